"""Passes on the Dynamo graph, before autograd sees it. Their order is the tuple that `passes_for` returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from fxamp.capture import Captured
from fxamp.passes import Pass
from fxamp.plan import Plan
from fxamp.rewrite.attention import LowAttention
from fxamp.rewrite.backends import ChooseAttentionKernels, FlashForSmall
from fxamp.rewrite.composites import SeeIntoComposites
from fxamp.rewrite.following import MarkFollowing
from fxamp.rewrite.groups import GroupQueries
from fxamp.rewrite.lower import LowerOperations
from fxamp.rewrite.masks import ReplaceMasks
from fxamp.rewrite.out_of_place import OutOfPlace
from fxamp.rewrite.padding import PadLogits
from fxamp.rewrite.roundings import MarkRoundings
from fxamp.rewrite.strided import DenseReads
from fxamp.rewrite.weights import TakeLowWeights, taken

__all__ = ["NORMALIZE", "RELAXED", "normalize", "passes_for", "taken"]

NORMALIZE: Final[tuple[Pass, ...]] = (
    SeeIntoComposites(),  # before OutOfPlace, which looks at every operation
    OutOfPlace(),
    DenseReads(),
)
"""Passes before the plan is made: the same program, in a form that leaves the plan more freedom."""

RELAXED: Final[Mapping[str, Pass]] = MappingProxyType(
    {"attention_masks": ReplaceMasks(), "padded_logits": PadLogits()}
)
"""Passes before the plan that change numerics, by the name that asks for each."""


def normalize(relaxed: Collection[str]) -> tuple[Pass, ...]:
    """The passes before the plan, with those that were asked for by name."""
    asked = (pass_ for name, pass_ in RELAXED.items() if name in relaxed)
    return (*NORMALIZE, *asked)  # behind OutOfPlace: a mask that was filled in place is made of constants by then


def passes_for(
    captured: Captured,
    plan: Plan,
    *,
    relaxed: Collection[str] = (),
    frozen: Collection[str] = (),
    measures: bool = False,
    is_recorded: bool = False,
) -> tuple[Pass, ...]:
    """The passes that turn a captured graph into the planned one, in order. `relaxed`: names of what was asked for; `frozen`:
    names of the inputs of which low copies can be had; `measures`: may time be spent on choosing kernels? `is_recorded`: is it
    part of a train step on CUDA?"""
    return (
        *((MarkFollowing(plan.decisions),) if "min_cut" in relaxed else ()),
        MarkRoundings(captured),  # before LowerOperations: it knows the nodes of the captured graph by name
        LowerOperations(captured, plan),
        LowAttention(plan),  # behind LowerOperations: the plan counts operands of the captured call
        *((GroupQueries(),) if "grouped_queries" in relaxed else ()),  # behind LowAttention: others may have no kernel for it
        *((ChooseAttentionKernels(),) if measures else ()),  # behind GroupQueries: groups have kernels of their own
        *((FlashForSmall(),) if is_recorded and not measures else ()),
        *((TakeLowWeights(frozenset(frozen)),) if frozen else ()),  # behind LowerOperations, whose casts it looks for
    )
