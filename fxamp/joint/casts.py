"""EXACT passes over the casts of the joint graph: bit for bit the same results, with fewer casts.

Only casts that fxamp inserted, and those that autograd derived from them, are touched; the user's own stay (contract 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxamp import formats, graph
from fxamp.joint.layout import is_output
from fxamp.joint.movement import can_undo, undo
from fxamp.passes import Change


def _chain(node: fx.Node) -> fx.Node | None:
    """What a cast of fxamp's reads, if that is such a cast too, which loses nothing."""
    inner = graph.source_of(node)
    if not graph.is_own_cast(inner):
        return None
    source, middle = graph.value_of(graph.source_of(inner)), graph.value_of(inner)
    return inner if formats.is_lossless(source.dtype, middle.dtype) else None


@dataclass(frozen=True)
class CancelCasts:
    """Removes a lossless way there and back, and shortens a chain whose first step is lossless.

    requires: joint graph with meta.  changes: who reads a cast.  keeps: every bit.

        a: "f32[B]" = cast(x, f32)            (x is bf16)
        b: "bf16[B]" = cast(a, bf16)     ->   users of b read x
        c: "f16[B]" = cast(a, f16)       ->   c = cast(x, f16)
    A copy of x takes its place where the casts laid it out anew, and somebody may tell.
    kept: f32 -> bf16 -> f32, because the first step rounds; what leaves the graph in memory of its own.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_removed = num_added = 0
        for node in graph.nodes_of_own_casts(gm):
            inner = _chain(node)
            if inner is None:
                continue
            value, mark = graph.source_of(inner), graph.own_cast(node)
            assert mark is not None
            if graph.value_of(value).dtype == graph.value_of(node).dtype:
                if not can_undo(node, graph.value_of(value)):
                    continue
                num_added += undo(node, value)
            else:
                dtype = graph.value_of(node).dtype
                short = graph.insert_cast(value, dtype, before=node, why=mark.why, where=mark.where)
                graph.belong_with(short, node)
                graph.replace(node, short, except_in=frozenset((short,)))
                num_added += 1
                graph.erase(node)
            num_removed += 1
        return Change(pass_name=type(self).__name__, num_added=num_added, num_removed=num_removed)


@dataclass(frozen=True)
class ShareCasts:
    """Lets all users of one value in one format read one cast.

    requires: joint graph with meta.  changes: number of casts.  keeps: every bit, and where values are computed: a cast of
    the backward is never used by the forward, and recomputation regions keep casts of their own.

        a: "bf16[B]" = cast(x, bf16)          a: "bf16[B]" = cast(x, bf16)
        b: "bf16[B]" = cast(x, bf16)     ->   users of b read a
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        first: dict[tuple[object, ...], fx.Node] = {}
        num_removed = 0
        for node in graph.nodes_of_own_casts(gm):
            value = graph.source_of(node)
            key = (value, graph.value_of(node).dtype, node.meta.get("recompute"), node.meta.get("ac_graph_id"))
            kept = first.setdefault(key, node)
            if kept is not node and not (is_output(kept) and is_output(node)):  # they leave the graph as two tensors
                graph.replace(node, kept)
                graph.erase(node)
                num_removed += 1
        return Change(pass_name=type(self).__name__, num_removed=num_removed)


@dataclass(frozen=True)
class DropDeadCasts:
    """Erases casts that nothing reads.

    requires: joint graph.  changes: number of casts.  keeps: everything that is read.

        a: "f32[B]" = cast(x, f32);  return x     ->     return x
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_removed = 0
        for node in reversed(graph.nodes_of_own_casts(gm)):
            if not node.users:
                graph.erase(node)
                num_removed += 1
        return Change(pass_name=type(self).__name__, num_removed=num_removed)
