"""The EXACT pass that leaves widenings of the joint graph to the operations that widen by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import torch
from torch import fx

from fxamp import formats, graph
from fxamp.joint.layout import can_stand_for, same_layout
from fxamp.joint.movement import can_undo, is_free_constant, moves_in, num_bytes, parts_of, sources, undo
from fxamp.passes import Change

_ATEN: Final = torch.ops.aten

PROMOTES: Final = frozenset(
    (
        _ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.maximum.default, _ATEN.minimum.default,
        _ATEN.where.self,
    )
)  # fmt: skip
"""Elementwise operations that bring their tensors to the widest format before they compute, in eager execution and in code
that Inductor generates."""

_CAT: Final = _ATEN.cat.default
"""Promotes as well, and moves values where all of them are narrow."""

SUMS: Final = frozenset((_ATEN.sum.default, _ATEN.sum.dim_IntList))
"""Reductions that take the format to compute in, and read their operand in it. (PyTorch sums gradients of biases so.)"""


@dataclass(frozen=True)
class AbsorbWidenings:
    """Leaves a widening to the operations that read it, where they widen by themselves or narrow it again, also behind what
    moves the values; for the others it is done behind the movement, if fewer bytes are cast there.

    requires: joint graph with meta.  changes: number of casts, the format in which values are moved; saved for the backward
    is the narrow value.  keeps: every bit, strides.

        a: "f32[4, 8]" = cast(x, f32)
        v: "f32[4, 4]" = slice(a, 1, 4)        v: "bf16[4, 4]" = slice(x, 1, 4)
        y: "f32[4, 4]" = mul(v, r)         ->  y: "f32[4, 4]" = mul(v, r)                      (r is fp32)
        s: "f32[8]" = sum(a, [0])              s: "f32[8]" = sum(x, [0], dtype=f32)
        n: "bf16[4, 4]" = cast(v, bf16)        readers of n read v
    kept: where an operation has no other operand in the wide format, since it would then compute in the narrow one; casts of
    the user's own.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        thin = _thin(gm)
        places = _places(thin)
        return _carry_out(thin, places, type(self).__name__)


class _Place(Enum):
    """In which formats there is a value that is narrow at heart, from now on."""

    NARROW = auto()
    BOTH = auto()
    """It is narrow, and a cast of it wide. A widening that is there stays."""
    WIDE = auto()
    """It is moved as it was."""


# ---- what could be narrow -----------------------------------------------------------------------------------------------
def _thin(gm: fx.GraphModule) -> dict[fx.Node, torch.dtype]:
    """The widenings, and the operations that move nothing but what was widened from one format; with that format, in the
    order of the graph."""
    thin: dict[fx.Node, torch.dtype] = {}
    casts = gm.graph.find_nodes(op="call_function", target=graph.JOINT_CAST, sort=False)
    waiting = [node for node in casts if _widens(node) and not _leaves(node)]
    for node in waiting:  # grows
        moves = node.target is not graph.JOINT_CAST
        thin[node] = thin[next(x for x in node.all_input_nodes if x in thin)] if moves else _dtype(graph.source_of(node))
        for user in node.users:
            if user not in thin and moves_in(user, thin[node]) and all(_is_thin(x, thin[node], thin) for x in sources(user)):
                waiting.append(user)
    return {node: thin[node] for node in sorted(thin)}


def _leaves(node: fx.Node) -> bool:
    """Does a value leave the graph, and nothing else become of it? (Gradients of parameters do.)"""
    return all(user.op == "output" for user in node.users)


def _is_thin(node: fx.Node, dtype: torch.dtype, thin: dict[fx.Node, torch.dtype]) -> bool:
    return thin.get(node) == dtype or is_free_constant(node, dtype)


def _widens(node: fx.Node) -> bool:
    """Is it a cast that loses nothing, keeps strides, and that no user wrote?"""
    if not (graph.is_own_cast(node) or graph.is_of_a_decomposition(node)):
        return False
    source, result = graph.value_of(graph.source_of(node)), graph.value_of(node)
    before, after = source.dtype, result.dtype
    if before == after or not (before.is_floating_point and after.is_floating_point):
        return False
    return formats.is_lossless(before, after) and same_layout(source, result)


def _may_absorb(user: fx.Node, value: fx.Node) -> bool:
    """Can an operation widen `value` by itself, if another of its operands is wide?"""
    is_alone = user.target in PROMOTES and sum(x is value for x in (*user.args, *user.kwargs.values())) == 1
    return (is_alone or user.target in SUMS or user.target is _CAT) and _dtype(user) == _dtype(value)


def _narrows(user: fx.Node, dtype: torch.dtype) -> bool:
    """Is it a cast of fxamp's back to what the value was, and can that take its place?"""
    if not graph.is_own_cast(user) or graph.value_of(user).dtype != dtype:
        return False
    return can_undo(user, graph.retyped(graph.value_of(graph.source_of(user)), dtype))


def _dtype(node: fx.Node) -> torch.dtype:
    return graph.value_of(node).dtype


def _is_wide(operand: fx.Node, node: fx.Node) -> bool:
    """Does an operand decide the format of `node`? A tensor without dimensions takes part without deciding it."""
    value = graph.value_of(operand)
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.dtype == _dtype(node)


# ---- where it is widened ------------------------------------------------------------------------------------------------
def _places(thin: dict[fx.Node, torch.dtype]) -> dict[fx.Node, _Place]:
    """The formats of every value that could be narrow: as it is, or where fewer bytes are cast in its part of the graph."""
    wanted = {
        node
        for node, dtype in thin.items()
        if not all(_moves_on(user, thin) or _may_absorb(user, node) or _narrows(user, dtype) for user in node.users)
    }
    least = _least_bytes(thin)
    for node in dict.fromkeys(user for value in thin for user in value.users if user not in thin):
        if node.target not in PROMOTES and node.target is not _CAT:
            continue
        # Of its operands one must stay wide, or the operation would not compute in the wide format.
        deciding = [x for x in node.all_input_nodes if _is_wide(x, node)]
        if not deciding:
            wanted |= {x for x in node.all_input_nodes if x in thin}
        elif all(x in thin and x not in wanted for x in deciding):
            wanted.add(min(reversed(deciding), key=least.__getitem__))
    places = dict[fx.Node, _Place]()
    for part in parts_of(thin, lambda node: _moved_from(node, thin)):
        chosen = _chosen(part, thin, wanted, least)
        places |= chosen if chosen is not None and _pays(part, thin, chosen) else _unchanged(part)
    return places


def _least_bytes(thin: dict[fx.Node, torch.dtype]) -> dict[fx.Node, int]:
    """The fewest bytes for which there is a value in the wide format, if nothing else is wide."""
    least = dict[fx.Node, int]()
    for node, dtype in thin.items():
        own = num_bytes(node, dtype)
        above = [least[x] for x in _moved_from(node, thin)]
        least[node] = min(own, sum(above)) if above else own
    return least


def _moves_on(user: fx.Node, thin: dict[fx.Node, torch.dtype]) -> bool:
    """Is it a movement that could be narrow?"""
    return user in thin and user.target is not graph.JOINT_CAST


def _moved_from(node: fx.Node, thin: dict[fx.Node, torch.dtype]) -> list[fx.Node]:
    """What a movement moves that could be narrow; nothing for a widening."""
    return [] if node.target is graph.JOINT_CAST else [x for x in node.all_input_nodes if x in thin]


def _unchanged(part: list[fx.Node]) -> dict[fx.Node, _Place]:
    return {node: _Place.BOTH if node.target is graph.JOINT_CAST else _Place.WIDE for node in part}


def _chosen(
    part: list[fx.Node], thin: dict[fx.Node, torch.dtype], wanted: set[fx.Node], least: dict[fx.Node, int]
) -> dict[fx.Node, _Place] | None:
    """Readers first: where somebody wants a value wide, it is cast, or its sources are. None if strides forbid that."""
    places: dict[fx.Node, _Place] = {}
    for node in reversed(part):
        users = [places[user] for user in node.users if _moves_on(user, thin)]
        if node not in wanted and _Place.WIDE not in users:
            places[node] = _Place.NARROW
        elif node.target is graph.JOINT_CAST:
            places[node] = _Place.BOTH
        else:
            dtype, value = thin[node], graph.value_of(node)
            again = sum(_narrowed_again(node, dtype))
            above = sum(least[x] for x in node.all_input_nodes if x in thin and x not in wanted)
            can_cast = can_stand_for(node, graph.retyped(graph.retyped(value, dtype), value.dtype))
            is_moved_narrow = any(place is not _Place.WIDE for place in users)
            if is_moved_narrow and not can_cast:
                return None
            is_cast = is_moved_narrow or (can_cast and num_bytes(node, dtype) < above + again)
            places[node] = _Place.BOTH if is_cast else _Place.WIDE
    return places


def _narrowed_again(node: fx.Node, dtype: torch.dtype) -> list[int]:
    """The bytes of the casts of a value back to what it was."""
    return [num_bytes(node, dtype) for user in node.users if _narrows(user, dtype)]


def _pays(part: list[fx.Node], thin: dict[fx.Node, torch.dtype], places: dict[fx.Node, _Place]) -> bool:
    """Are fewer bytes cast than now, or as many by fewer casts?"""
    before, after = list[int](), list[int]()
    for node in part:
        dtype = thin[node]
        again = _narrowed_again(node, dtype)
        before += again
        after += again if places[node] is _Place.WIDE else []
        before += [num_bytes(node, dtype)] if node.target is graph.JOINT_CAST else []
        after += [num_bytes(node, dtype)] if places[node] is _Place.BOTH else []
    return (sum(after), len(after)) < (sum(before), len(before))


# ---- doing it -----------------------------------------------------------------------------------------------------------
def _carry_out(
    thin: dict[fx.Node, torch.dtype], places: dict[fx.Node, _Place], name: str
) -> Change:
    num_added = num_removed = 0
    narrow: dict[fx.Node, fx.Node] = {}
    """What a value is read as by those that take it narrow."""
    is_only = set[fx.Node]()
    changing = [node for node, place in places.items() if place is not _Place.WIDE]
    for node in sorted({*changing, *(user for value in changing for user in value.users)}):
        place = places.get(node)
        if place is _Place.WIDE:
            continue
        if place is not None and node.target is graph.JOINT_CAST:
            narrow[node] = graph.source_of(node)
            if place is _Place.NARROW:
                is_only.add(node)
        elif place is not None:
            made, num_constants = _moved(node, narrow, thin[node])
            narrow[node] = made
            num_added += 1 + num_constants
            is_only.add(node)
            if place is _Place.BOTH:
                wide = graph.insert_cast(made, graph.value_of(node).dtype, before=node, why="moved while it was narrow")
                graph.belong_with(wide, node)
                graph.replace(node, wide)
                narrow[wide] = made
                num_added += 1
        else:
            operands = [x for x in node.all_input_nodes if x in narrow]
            if operands and _narrows(node, graph.value_of(narrow[operands[0]]).dtype):
                num_added += undo(node, narrow[operands[0]])
                num_removed += 1
            elif any(x in is_only for x in operands):
                if node.target in SUMS:
                    graph.set_arguments(node, node.args, {**node.kwargs, "dtype": graph.value_of(node).dtype})
                graph.map_operands(node, lambda _, x: narrow[x] if x in is_only else x)
    for node in reversed([x for x in narrow if x in is_only]):
        graph.erase(node)
        num_removed += 1
    return Change(pass_name=name, num_added=num_added, num_removed=num_removed)


def _moved(node: fx.Node, narrow: dict[fx.Node, fx.Node], dtype: torch.dtype) -> tuple[fx.Node, int]:
    """A movement in the narrow format, in front of the one that it stands for, and how many constants were made for it."""
    constants = {x: graph.insert_retyped_constant(x, dtype, before=node) for x in sources(node) if x not in narrow}
    changed = {x: narrow[x] for x in sources(node) if x in narrow} | constants
    values: list[Any] = [graph.value_of(changed.get(x, x)) for x in graph.operands(node)]
    return graph.insert_like(node, changed, graph.call_on_fakes(node, values), before=node), len(constants)
