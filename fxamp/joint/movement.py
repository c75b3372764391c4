"""EXACT passes that move casts of the joint graph past operations that only move values. `fxamp/joint/casts.py` then finds
round trips and equal casts that the movement hid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from fxamp import formats, graph
from fxamp.joint.layout import can_stand_for
from fxamp.passes import Change

_ATEN: Final = torch.ops.aten

MOVES: Final = frozenset(
    (
        _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.permute.default, _ATEN.transpose.int, _ATEN.t.default,
        _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.squeeze.default, _ATEN.expand.default,
        _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.alias.default, _ATEN.clone.default, _ATEN.flip.default,
        _ATEN.neg.default, _ATEN.abs.default,
    )
)  # fmt: skip
"""Operations of one tensor that commute with every cast: they move values, or change their sign, and compute nothing."""


@dataclass(frozen=True)
class SinkWidenings:
    """Moves a widening cast below the operation that moves its result, if nothing else reads it.

    requires: joint graph with meta.  changes: the format in which values are moved.  keeps: every bit, strides.

        a: "f32[4, 8]" = cast(x, f32)            v: "bf16[8, 4]" = permute(x, [1, 0])
        v: "f32[8, 4]" = permute(a, [1, 0]) ->   a: "f32[8, 4]" = cast(v, f32)
    kept: where the cast has other readers, where more elements would be cast (expand), where strides would differ.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_moved = 0
        for node in graph.nodes_of_own_casts(gm):
            cast: fx.Node | None = node
            while cast is not None:
                cast = _swap_down(cast)
                num_moved += cast is not None
        return Change(pass_name=type(self).__name__, num_added=2 * num_moved, num_removed=2 * num_moved)


@dataclass(frozen=True)
class HoistNarrowings:
    """Moves a narrowing cast above the operation that moved its operand, if nothing else reads what was moved.

    requires: joint graph with meta.  changes: the format in which values are moved.  keeps: every bit, strides.

        v: "f32[8, 64]" = expand(x, [8, 64])         n: "bf16[8, 1]" = cast(x, bf16)
        n: "bf16[8, 64]" = cast(v, bf16)        ->   v: "bf16[8, 64]" = expand(n, [8, 64])
    kept: where the moved value has other readers, where more elements would be cast (slice), where strides would differ.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_moved = 0
        for node in reversed(graph.nodes_of_own_casts(gm)):
            cast: fx.Node | None = node
            while cast is not None:
                cast = _swap_up(cast)
                num_moved += cast is not None
        return Change(pass_name=type(self).__name__, num_added=2 * num_moved, num_removed=2 * num_moved)


# ---- swapping a cast with a move ----------------------------------------------------------------------------------------
def _swap_down(cast: fx.Node) -> fx.Node | None:
    """move(cast(x)) becomes cast(move(x)), if no reader can tell; returns the new cast."""
    if len(cast.users) != 1 or not _widens(cast):
        return None
    move = next(iter(cast.users))
    if move.target not in MOVES or _numel(move) > _numel(cast):
        return None
    source, mark = cast.all_input_nodes[0], graph.own_cast(cast)
    assert mark is not None
    moved = _call(move, graph.value_of(source))
    dtype = graph.value_of(cast).dtype
    if moved is None or not can_stand_for(move, graph.retyped(moved, dtype)):
        return None
    low = graph.insert_like(move, {cast: source}, moved, before=move)
    wide = graph.insert_cast(low, dtype, before=move, why=mark.why, where=mark.where)
    graph.belong_with(wide, move)
    graph.replace(move, wide)
    graph.erase(move)
    graph.erase(cast)
    return wide


def _swap_up(cast: fx.Node) -> fx.Node | None:
    """cast(move(x)) becomes move(cast(x)), if no reader can tell; returns the new cast."""
    move = cast.all_input_nodes[0]
    if move.target not in MOVES or len(move.users) != 1 or _widens(cast):
        return None
    mark = graph.own_cast(cast)
    assert mark is not None
    source = move.all_input_nodes[0]
    if _numel(source) > _numel(move) or graph.value_of(source).dtype != graph.value_of(move).dtype:
        return None
    dtype = graph.value_of(cast).dtype
    moved = _call(move, graph.retyped(graph.value_of(source), dtype))
    if moved is None or not can_stand_for(cast, moved):
        return None
    narrow = graph.insert_cast(source, dtype, before=cast, why=mark.why, where=mark.where)
    graph.belong_with(narrow, cast)
    low = graph.insert_like(move, {source: narrow}, moved, before=cast)
    graph.belong_with(low, cast)
    graph.replace(cast, low)
    graph.erase(cast)
    graph.erase(move)
    return narrow


def _call(move: fx.Node, value: Any) -> Any | None:
    """What a move gives for another value of its tensor; None where the strides of that do not allow it."""
    sizes = [graph.value_of(x) for x in graph.operands(move)][1:]  # where shapes are symbolic, its sizes are operands too
    try:
        return graph.call_on_fakes(move, [value, *sizes])
    except (RuntimeError, ValueError):  # a view that the strides do not allow
        return None


# ---- questions ----------------------------------------------------------------------------------------------------------
def _widens(node: fx.Node) -> bool:
    """Does a cast of fxamp's lose nothing?"""
    return formats.is_lossless(graph.value_of(node.all_input_nodes[0]).dtype, graph.value_of(node).dtype)


def _numel(node: fx.Node) -> Any:
    return graph.value_of(node).numel()

