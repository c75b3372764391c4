"""EXACT passes that move casts of the joint graph past operations that only move values. `fxamp/joint/casts.py` then finds
round trips and equal casts that the movement hid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from fxamp import formats, graph
from fxamp.joint.layout import can_stand_for, is_output, is_read_by_stride, same_layout
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

ASSEMBLES: Final = frozenset(
    (
        _ATEN.cat.default, _ATEN.slice_scatter.default, _ATEN.select_scatter.default, _ATEN.constant_pad_nd.default,
        _ATEN.index.Tensor, _ATEN.index_select.default, _ATEN.gather.default,
    )
)  # fmt: skip
"""Operations that only move values, and beside those of one tensor read others, constants or indices."""


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


@dataclass(frozen=True)
class NarrowMovement:
    """Moves values in the narrow format where all that becomes of them is narrowed, and casts what goes in instead of what
    comes out, if that is less.

    requires: joint graph with meta.  changes: the format in which values are moved.  keeps: every bit, strides.

        v: "f32[8, 4]" = slice(x, 0, 8)              n: "bf16[64, 4]" = cast(x, bf16)
        c: "f32[72, 4]" = cat([x, v])           ->   v: "bf16[8, 4]" = slice(n, 0, 8)
        a: "bf16[8, 4]" = cast(v, bf16)              c: "bf16[72, 4]" = cat([n, v])
        b: "bf16[72, 4]" = cast(c, bf16)             readers of a and b read v and c
    kept: where somebody reads a moved value wide, where more bytes would be cast.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        wanted = _wanted_narrow(gm)
        num_added = num_removed = 0
        for part in _parts_of(wanted):
            dtype = wanted[part[0]]
            values = _values_if_narrow(part, dtype)
            if values is None or not _is_less(part, dtype):
                continue
            added, removed = _narrow(part, dtype, values)
            num_added, num_removed = num_added + added, num_removed + removed
        return Change(pass_name=type(self).__name__, num_added=num_added, num_removed=num_removed)


# ---- movement that is narrowed afterwards -------------------------------------------------------------------------------
def _wanted_narrow(gm: fx.GraphModule) -> dict[fx.Node, torch.dtype]:
    """Movement of what all readers narrow to one format, or move and then narrow; with that format. In the graph's order."""
    wanted: dict[fx.Node, torch.dtype] = {}
    waiting = {graph.source_of(cast): None for cast in graph.nodes_of_own_casts(gm) if not _widens(cast)}
    for node in sorted(waiting, reverse=True):
        _want(node, wanted)
    return {node: wanted[node] for node in sorted(wanted)}


def _want(node: fx.Node, wanted: dict[fx.Node, torch.dtype]) -> None:
    """Adds a movement all of whose readers want it narrow, and then what that moves."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        dtypes = {_wants(user, node, wanted) for user in node.users}
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        if node in wanted or dtype is None or not moves_in(node, dtype):
            continue
        if all(_dtype(x) == _dtype(node) for x in sources(node)):
            wanted[node] = dtype
            waiting += sources(node)


def _wants(user: fx.Node, value: fx.Node, wanted: dict[fx.Node, torch.dtype]) -> torch.dtype | None:
    """The narrow format that a reader makes of a value; None if it does anything else with it."""
    if graph.is_own_cast(user):
        dtype = graph.value_of(user).dtype
        return dtype if dtype != _dtype(value) and formats.is_lossless(dtype, _dtype(value)) else None
    return wanted.get(user)


def _parts_of(wanted: Mapping[fx.Node, torch.dtype]) -> Iterator[list[fx.Node]]:
    """Movement in one format that hangs together, by what it reads of each other or of one source."""
    for dtype in dict.fromkeys(wanted.values()):
        moved = [node for node in wanted if wanted[node] == dtype]
        read = {node: [x for x in sources(node) if not is_free_constant(x, dtype)] for node in moved}
        nodes = dict.fromkeys(x for node in moved for x in (*read[node], node))
        for part in parts_of(nodes, lambda node, read=read: read.get(node, ())):
            yield [node for node in part if node in read]


def _values_if_narrow(part: list[fx.Node], dtype: torch.dtype) -> dict[fx.Node, Any] | None:
    """The fake values of movement in the narrow format; None if strides do not allow it."""
    values: dict[fx.Node, Any] = {}
    for node in part:
        for x in sources(node):
            values.setdefault(x, graph.retyped(graph.value_of(x), dtype))
        try:
            values[node] = graph.call_on_fakes(node, [values.get(x, graph.value_of(x)) for x in graph.operands(node)])
        except (RuntimeError, ValueError):  # a view that the strides do not allow
            return None
        casts = [user for user in node.users if graph.is_own_cast(user)]
        if not all(can_undo(cast, values[node]) for cast in casts):
            return None
    return values


def _is_less(part: list[fx.Node], dtype: torch.dtype) -> bool:
    """Are fewer bytes cast at the sources of movement than behind it, or as many by fewer casts?"""
    inside = set(part)
    now = {_cast_key(user): num_bytes(node, dtype) for node in part for user in node.users if user not in inside}
    then = {
        (x, *_phase(node)): num_bytes(x, dtype)
        for node in part
        for x in sources(node)
        if x not in inside and not is_free_constant(x, dtype) and not _is_narrow_anyway(x, dtype, node)
    }
    return (sum(then.values()), len(then)) < (sum(now.values()), len(now))


def _is_narrow_anyway(value: fx.Node, dtype: torch.dtype, user: fx.Node) -> bool:
    """Is a value the widening of a narrow one, or a cast of it there that `user` could share?"""
    if graph.is_own_cast(value) and _dtype(graph.source_of(value)) == dtype:
        return True
    casts = (x for x in value.users if graph.is_own_cast(x) and _dtype(x) == dtype)
    return any(_phase(x) == _phase(user) for x in casts)


def _cast_key(cast: fx.Node) -> tuple[object, ...]:
    """Casts with one key are one, sooner or later."""
    return (graph.source_of(cast), *_phase(cast))


def _phase(node: fx.Node) -> tuple[object, ...]:
    return tuple(node.meta.get(key) for key in ("recompute", "ac_graph_id"))


def _narrow(part: list[fx.Node], dtype: torch.dtype, values: Mapping[fx.Node, Any]) -> tuple[int, int]:
    """Does it; returns how many nodes were added and removed."""
    num_added = num_removed = 0
    narrow: dict[fx.Node, fx.Node] = {}
    for node in part:
        changed: dict[fx.Node, fx.Node] = {}
        for x in sources(node):
            changed[x] = narrow[x] if x in narrow else _narrowed(x, dtype, node)
            num_added += x not in narrow
        narrow[node] = graph.insert_like(node, changed, values[node], before=node)
        num_added += 1
    for node in part:
        for cast in [user for user in node.users if graph.is_own_cast(user)]:
            num_added += undo(cast, narrow[node])
            num_removed += 1
    for node in reversed(part):
        graph.erase(node)
        num_removed += 1
    return num_added, num_removed


def _narrowed(value: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
    """A value in the narrow format, in front of a movement of it."""
    if is_free_constant(value, dtype):
        return graph.insert_retyped_constant(value, dtype, before=user)
    made = graph.insert_cast(value, dtype, before=user, why="narrowed before it is moved")
    graph.belong_with(made, user)
    return made


# ---- movement in another format -----------------------------------------------------------------------------------------
def sources(node: fx.Node) -> list[fx.Node]:
    """The floating-point tensors that an operation moves; indices and sizes are none."""
    values = [(x, graph.value_of(x)) for x in node.all_input_nodes]
    return [x for x, value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def moves_in(node: fx.Node, dtype: torch.dtype) -> bool:
    """Does an operation move values, and nothing else, in this format too?"""
    if node.target is _ATEN.constant_pad_nd.default:
        return _is_number_of(dtype, node.args[2] if len(node.args) > 2 else 0)
    return node.target in MOVES or node.target in ASSEMBLES


def is_free_constant(node: fx.Node, dtype: torch.dtype) -> bool:
    """Is it a tensor of one number, which a format has?"""
    return node.target is _ATEN.full.default and "dtype" in node.kwargs and _is_number_of(dtype, node.args[1])


def _is_number_of(dtype: torch.dtype, argument: Any) -> bool:
    return isinstance(argument, (int, float)) and formats.has(argument, dtype)


def num_bytes(value: fx.Node, dtype: torch.dtype) -> int:
    """What a cast between a value and its like in `dtype` reads and writes."""
    tensor = graph.value_of(value)
    return graph.numel(tensor) * (tensor.element_size() + dtype.itemsize)


def parts_of(
    nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> list[list[fx.Node]]:
    """Nodes in parts that hang together, each in the order in which they came; neighbours came before."""
    part_of: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        joined = [node]
        for part in {id(part_of[x]): part_of[x] for x in neighbours(node)}.values():
            small, joined = sorted((part, joined), key=len)
            joined += small
            part_of |= dict.fromkeys(small, joined)
        part_of[node] = joined
    order = {node: i for i, node in enumerate(part_of)}
    return [sorted(part, key=order.__getitem__) for part in {id(part): part for part in part_of.values()}.values()]


def undo(cast: fx.Node, narrow: fx.Node) -> int:
    """Lets the readers of a narrowing read the value that was narrow before, or a copy of that, where they need strides or
    memory of its own. Returns how many nodes were added."""
    if can_stand_for(cast, graph.value_of(narrow)):
        graph.replace(cast, narrow)
        num_added = 0
    else:
        graph.replace(cast, graph.insert_beside(_ATEN.clone.default, (narrow,), before=cast))
        num_added = 1
    graph.erase(cast)
    return num_added


def can_undo(cast: fx.Node, value: torch.Tensor) -> bool:
    """Can the value that was narrow before, or a copy of it, take the place of a narrowing?"""
    if can_stand_for(cast, value):
        return True
    if is_output(cast) or is_read_by_stride(cast):  # the compiler may take a copy for nothing
        return False
    with graph.among_fakes(value):
        return same_layout(value.clone(), graph.value_of(cast))


# ---- swapping a cast with a move ----------------------------------------------------------------------------------------
def _swap_down(cast: fx.Node) -> fx.Node | None:
    """move(cast(x)) becomes cast(move(x)), if no reader can tell; returns the new cast."""
    if len(cast.users) != 1 or not _widens(cast):
        return None
    move = next(iter(cast.users))
    if move.target not in MOVES or _numel(move) > _numel(cast):
        return None
    source, mark = graph.source_of(cast), graph.own_cast(cast)
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
    move = graph.source_of(cast)
    if move.target not in MOVES or len(move.users) != 1 or _widens(cast):
        return None
    mark = graph.own_cast(cast)
    assert mark is not None
    source = graph.source_of(move)
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
    return formats.is_lossless(graph.value_of(graph.source_of(node)).dtype, graph.value_of(node).dtype)


def _numel(node: fx.Node) -> Any:
    return graph.value_of(node).numel()


def _dtype(node: fx.Node) -> torch.dtype:
    return graph.value_of(node).dtype
