"""The EXACT pass that leaves widenings of the joint graph to the operations that widen by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fxamp import formats, graph
from fxamp.joint.layout import layout
from fxamp.joint.movement import MOVES
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

CARRIES: Final = MOVES | {_CAT}
"""Operations that move values, and give the same in every format."""


@dataclass(frozen=True)
class AbsorbWidenings:
    """Leaves a widening to the operations that read it, if each of them widens by itself, also behind what moves the values.

    requires: joint graph with meta.  changes: number of casts, the format in which values are moved; saved for the backward
    is the narrow value.  keeps: every bit, strides.

        a: "f32[4, 8]" = cast(x, f32)
        v: "f32[4, 4]" = slice(a, 1, 4)        v: "bf16[4, 4]" = slice(x, 1, 4)
        y: "f32[4, 4]" = mul(v, r)         ->  y: "f32[4, 4]" = mul(v, r)                      (r is fp32)
        s: "f32[8]" = sum(a, [0])              s: "f32[8]" = sum(x, [0], dtype=f32)
    kept: where an operation has no other operand in the wide format, since it would then compute in the narrow one; casts of
    the user's own.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        narrow = _absorbed(gm)
        num_added = num_removed = 0
        stands_for: dict[fx.Node, fx.Node] = {}
        for node in list(gm.graph.nodes):
            if node in narrow:
                if node.target in CARRIES:
                    values = [graph.value_of(stands_for[x]) for x in graph.operands(node)]
                    stands_for[node] = graph.insert_like(node, stands_for, graph.call_on_fakes(node, values), before=node)
                    num_added += 1
                else:
                    stands_for[node] = node.all_input_nodes[0]
            elif any(operand in narrow for operand in node.all_input_nodes):
                if node.target in SUMS:
                    graph.set_arguments(node, node.args, {**node.kwargs, "dtype": graph.value_of(node).dtype})
                graph.map_operands(node, lambda _, x: stands_for.get(x, x))
        for node in reversed(list(stands_for)):
            graph.erase(node)
            num_removed += 1
        return Change(pass_name=type(self).__name__, num_added=num_added, num_removed=num_removed)


def _absorbed(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The widenings that nobody needs, and the operations between them and those that widen by themselves.

    Begins with all that might be narrow, and keeps wide what has to be until nothing more has to.
    """
    narrow: dict[fx.Node, torch.dtype] = {}
    for node in gm.graph.nodes:
        if _widens(node):
            narrow[node] = graph.value_of(node.all_input_nodes[0]).dtype
        elif node.target in CARRIES:
            formats_read = {narrow.get(x) for x in node.all_input_nodes}
            if len(formats_read) == 1 and None not in formats_read:
                narrow[node] = narrow[node.all_input_nodes[0]]

    def keep_wide(nodes: list[fx.Node]) -> None:
        while nodes:
            node = nodes.pop()
            if node not in narrow:
                continue
            del narrow[node]
            nodes += node.users  # movement of what stays wide
            nodes += node.all_input_nodes if node.target in MOVES else ()

    keep_wide([node for node in narrow if not all(user in narrow or _may_absorb(user, node) for user in node.users)])
    promoting = [node for node in gm.graph.nodes if node.target in PROMOTES or node.target is _CAT]
    num_before = -1
    while num_before != len(narrow):
        num_before = len(narrow)
        for node in promoting:
            # Of its operands one must stay wide, or the operation would not compute in the wide format.
            if node not in narrow and not any(_is_wide(x, node) and x not in narrow for x in node.all_input_nodes):
                keep_wide([x for x in node.all_input_nodes if x in narrow][-1:])
    return frozenset(node for node in narrow if node.users)


def _may_absorb(user: fx.Node, value: fx.Node) -> bool:
    """Can an operation widen `value` by itself, if another of its operands is wide?"""
    dtype, operands = graph.value_of(value).dtype, list(graph.operands(user))
    if user.target in SUMS or user.target is _CAT:
        return graph.value_of(user).dtype == dtype
    return user.target in PROMOTES and operands.count(value) == 1 and graph.value_of(user).dtype == dtype


def _is_wide(operand: fx.Node, node: fx.Node) -> bool:
    """Does an operand decide the format of `node`? A tensor without dimensions takes part without deciding it."""
    value = graph.value_of(operand)
    return isinstance(value, torch.Tensor) and value.dtype == graph.value_of(node).dtype and value.dim() > 0


def _widens(node: fx.Node) -> bool:
    """Is it a cast that loses nothing, keeps strides, and that no user wrote?"""
    if graph.own_cast(node) is None and not graph.is_of_a_decomposition(node):
        return False
    source, result = graph.value_of(node.all_input_nodes[0]), graph.value_of(node)
    if not (source.is_floating_point() and result.is_floating_point()):
        return False
    return formats.is_lossless(source.dtype, result.dtype) and layout(source) == layout(result)
