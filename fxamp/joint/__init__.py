"""Passes on AOTAutograd's joint graph, where forward, backward and what is saved between them are seen at once.

EXACT passes keep every bit and are on. RELAXED ones change numerics and are asked for by name; a pass belongs to the tuple
that it stands in, never to an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from fxamp import _patches
from fxamp.joint.absorb import AbsorbWidenings
from fxamp.joint.casts import CancelCasts, DropDeadCasts, ShareCasts
from fxamp.joint.min_cut import MinCut
from fxamp.joint.movement import HoistNarrowings, NarrowMovement, SinkWidenings
from fxamp.joint.repair import KeepRoundings, SaveReadsOfMutated
from fxamp.joint.scale import KeepFiniteStatistics, ScaleGradients
from fxamp.passes import Pass


def order(*, keeps_roundings: bool, relaxed: tuple[Pass, ...] = ()) -> tuple[Pass, ...]:
    """All passes on a joint graph, but loss scaling. `keeps_roundings`: the program narrows, and wants its roundings."""
    return (
        KeepRoundings(keeps_roundings and _patches.roundings_need_an_op()),  # first: it knows casts by their marks
        *relaxed,  # before EXACT, which tidies up
        *EXACT,
        SaveReadsOfMutated(),  # last: a pass that replaced what it marks would lose the mark, and gradients be wrong
    )


EXACT: Final[tuple[Pass, ...]] = (
    CancelCasts(),  # before ShareCasts: fewer casts to key, and what a round trip fed reads the original value
    ShareCasts(),  # before DropDeadCasts: sharing never leaves a dead cast, cancelling may
    DropDeadCasts(),  # before the moves: a dead cast counts as a reader
    SinkWidenings(),  # before HoistNarrowings: where both could pass a move, the widening does, in one walk
    HoistNarrowings(),  # before NarrowMovement, which takes movement of several readers as a whole, or leaves it
    NarrowMovement(),
    CancelCasts(),  # again: casts that a move kept apart now meet
    ShareCasts(),
    DropDeadCasts(),
    AbsorbWidenings(),  # last: what widens by itself is no cast any more, and nothing could cancel or share it
)

def scaling(
    *,
    scale: int,
    probe: int,
    slots: tuple[int, ...],
    low: tuple[int, ...],
    shares: bool,
    statistics: tuple[int, ...],
    num_regions: int = 0,
    per_region: bool = False,
    marks: str = "",
) -> tuple[Pass, ...]:
    """Loss scaling, for the inputs at these positions; `low`: those whose gradients stay scaled. It comes after all
    other passes: they see no arithmetic but the program's."""
    return (
        KeepFiniteStatistics(statistics),
        ScaleGradients(
            scale=scale,
            probe=probe,
            slots=slots,
            low=low,
            shares=shares,
            num_regions=num_regions,
            per_region=per_region,
            marks=marks,
        ),
    )


def relaxed(names: tuple[str, ...], low: torch.dtype) -> tuple[Pass, ...]:
    """The RELAXED passes on the joint graph among the names that were asked for."""
    return tuple(make(low) for name, make in RELAXED.items() if name in names)


RELAXED: Final[Mapping[str, Callable[[torch.dtype], Pass]]] = MappingProxyType({"min_cut": MinCut})
"""Name -> the pass, for the low format of the variant."""
