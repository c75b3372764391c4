"""Reads by stride that need only the values of their operand, so that a copy of it in the same order would do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxamp import capture, graph
from fxamp.passes import Change


@dataclass(frozen=True)
class DenseReads:
    """Lets `as_strided` read an operand that lies in memory as it was traced, whatever becomes of what it is made of.

    requires: Dynamo graph as captured.  changes: where a dense tensor is read by strides that stay within its elements, its
    dimensions are put in the order of its memory, by a `permute` and a `contiguous`, which copies nothing as traced.
    keeps: every value, bit for bit, and which memory is shared.

        y: "f32[3, 4]" = as_strided(x, (3, 4), (2, 1), 0)     ->     c: "f32[8]" = x.permute((0,)).contiguous()
                                                                     y: "f32[3, 4]" = as_strided(c, (3, 4), (2, 1))
    kept: memory that is written, which nothing may be put in front of.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_added = sum(_dense(part) for part in graph.all_of(gm))
        return Change(pass_name=type(self).__name__, num_added=num_added)


def _dense(gm: fx.GraphModule) -> int:
    found = [node for node in gm.graph.nodes if capture.name_of(node) == "as_strided"]
    written = capture.written(gm) if found else frozenset()
    found = [node for node in found if graph.storages(node).isdisjoint(written)]
    reads = {node: read for node in found if (read := capture.strided_read(node)) is not None and not read.is_made_dense}
    for node, read in reads.items():
        dense = graph.insert_contiguous(read.operand, read.order, before=node)
        graph.set_arguments(node, (dense, read.size, read.stride), {})
    if reads:
        gm.recompile()
    return len(reads)
