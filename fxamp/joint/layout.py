"""Strides and memory of the joint graph's values.

A cast keeps the strides of a dense tensor and lays out every other anew, so equal values are not always as good as each other.
Which outputs share memory, AOTAutograd has settled before any pass runs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from fxamp import graph


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Have they the same shape and strides? Where sizes are symbols, as far as that is known without asking for it."""
    if not graph.has_symbols(a) and not graph.has_symbols(b):
        return a.shape == b.shape and a.stride() == b.stride()
    return _same((*a.shape, *a.stride()), (*b.shape, *b.stride()))


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    if all(type(size) is int for size in (*a, *b)):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy: half a second at import

    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def is_output(node: fx.Node) -> bool:
    """Does a value, or a view of it, leave the graph, so that somebody may see whose memory it lies in?"""
    return any(user.op == "output" or (is_view(user) and is_output(user)) for user in node.users)


def is_view(node: fx.Node) -> bool:
    """Does an operation give its operand's own memory?"""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


_BY_STRIDE: Final = frozenset((torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default))
"""Operations that read the memory around a value."""


def is_read_by_stride(node: fx.Node) -> bool:
    """Is a value, or a view of it, read by an operation that sees more of its memory than its elements?"""
    return any(user.target in _BY_STRIDE or (is_view(user) and is_read_by_stride(user)) for user in node.users)


def memory(value: torch.Tensor) -> tuple[Any, Any]:
    """Where a value begins in its memory, and how many elements that holds."""
    return value.storage_offset(), value.untyped_storage().nbytes() // value.element_size()


def can_stand_for(node: fx.Node, value: torch.Tensor) -> bool:
    """Can `value`, equal to what `node` gives but for strides and memory, take its place? Not in an output; elsewhere it can
    where its readers then give the strides that they gave, and none reads the memory around it, if that is another."""
    if is_output(node):
        return False
    now = graph.value_of(node)
    is_same = same_layout(value, now)
    if is_read_by_stride(node) and not (is_same and _same(memory(value), memory(now))):
        return False
    return is_same or all(_reads_any(user, node, value) for user in node.users)


def _reads_any(user: fx.Node, node: fx.Node, value: torch.Tensor) -> bool:
    """Is it an elementwise operation, and what it makes of `value` laid out as what it makes of `node`?"""
    target = user.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or torch.Tag.pointwise not in target.tags:
        return False
    values = [value if operand is node else graph.value_of(operand) for operand in graph.operands(user)]
    return same_layout(graph.call_on_fakes(user, values), graph.value_of(user))
