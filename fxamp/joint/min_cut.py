"""RELAXED: the formats of operations that may run in either, chosen so that the fewest bytes are moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import fx

from fxamp import graph
from fxamp.joint.layout import is_read_by_stride, same_layout
from fxamp.joint.movement import MOVES
from fxamp.passes import Change

WIDE: Final = torch.float32

_ATEN: Final = torch.ops.aten
_PROMOTES: Final = frozenset((_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor))
_EITHER: Final = MOVES | _PROMOTES
"""Operations of the joint graph that may run in either format where the policy says that they follow their operands."""


@dataclass(frozen=True)
class MinCut:
    """Runs the operations that follow their operands in the formats that move the fewest bytes.

    requires: joint graph with meta, operations marked by `rewrite.following`.  changes: formats, and so numerics.  keeps: what
    the policy put into a format, inputs, outputs, the user's casts.

        q: "bf16[B]" = mm(...)                        q: "bf16[B]" = mm(...)
        a: "f32[B]" = cast(q, f32)                    c: "bf16[B]" = cast(cos, bf16)
        m: "f32[B]" = mul(a, cos)             ->      m: "bf16[B]" = mul(q, c)
        n: "bf16[B]" = cast(m, bf16)                  ... = sdpa(m, ...)
        ... = sdpa(n, ...)

    Error added: one rounding of at most eps/2 (2**-9 of the value in bf16, 2**-12 in fp16) for each operation that now gives
    narrow values, and for each operand narrowed; measured against float64 by `tests/joint/test_relaxed.py`.
    Source: a labelling with two labels and submodular costs is a minimum s-t cut (Greig, Porteous and Seheult 1989).
    """

    low: torch.dtype

    def __call__(self, gm: fx.GraphModule) -> Change:
        facts = _Facts(gm, self.low)
        wanted = _solve(facts)
        num_added, num_removed = _carry_out(facts, wanted)
        return Change(pass_name=type(self).__name__, num_added=num_added, num_removed=num_removed)


@dataclass(frozen=True)
class _Facts:
    """Which values of a joint graph have a choice, and who reads them. Casts of fxamp's are looked through."""

    gm: fx.GraphModule
    low: torch.dtype

    @cached_property
    def free(self) -> frozenset[fx.Node]:
        """The nodes that have a choice."""
        left = {self.root(x) for x in self.gm.graph.output_node().all_input_nodes}  # whose memory they lie in is settled
        return frozenset(node for node in self.gm.graph.nodes if node not in left and self._has_choice(node))

    @cached_property
    def readers(self) -> Mapping[fx.Node, list[tuple[fx.Node, torch.dtype]]]:
        """For each value that is read in one of the two formats: its readers, and the format that each reads now."""
        found: dict[fx.Node, list[tuple[fx.Node, torch.dtype]]] = {}
        for node in self.gm.graph.nodes:
            if not self.is_cast(node):
                for operand in graph.operands(node):
                    if self.is_either(operand):
                        found.setdefault(self.root(operand), []).append((node, self.dtype(operand)))
        return found

    def root(self, node: fx.Node) -> fx.Node:
        while self.is_cast(node):
            node = graph.source_of(node)
        return node

    def is_cast(self, node: fx.Node) -> bool:
        """Is it a cast of fxamp's between the two formats?"""
        return graph.is_own_cast(node) and self.is_either(node) and self.is_either(graph.source_of(node))

    def is_either(self, node: fx.Node) -> bool:
        """Is it a tensor in one of the two formats? Tensors without dimensions are left alone: they decide no format."""
        value = graph.value_of(node)
        return isinstance(value, torch.Tensor) and value.dtype in (self.low, WIDE) and value.dim() > 0

    def dtype(self, node: fx.Node) -> torch.dtype:
        return graph.value_of(node).dtype

    def _has_choice(self, node: fx.Node) -> bool:
        if node.target not in _EITHER or not graph.follows(node) or "recompute" in node.meta or node.kwargs.get("dtype"):
            return False
        if not self.is_either(node) or any(abs(a) > torch.finfo(self.low).max for a in _numbers(node)):
            return False
        if is_read_by_stride(node):
            return False
        value = graph.value_of(node)
        is_dense = graph.retyped(value, self.low).stride() == value.stride() == graph.retyped(value, WIDE).stride()
        return is_dense and all(self.is_either(x) or graph.value_of(x).dim() == 0 for x in graph.operands(node))


def _numbers(node: fx.Node) -> Iterator[float]:
    return (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float))


# ---- choosing -----------------------------------------------------------------------------------------------------------
_WIDE_SIDE: Final = "wide"
_LOW_SIDE: Final = "low"


def _solve(facts: _Facts) -> dict[fx.Node, torch.dtype]:
    """The format of each node that has a choice. Among equally good choices the widest."""
    import networkx as nx  # half a second at import

    network = nx.DiGraph()
    network.add_nodes_from((_WIDE_SIDE, _LOW_SIDE))

    def end(node: fx.Node, dtype: torch.dtype) -> Any:
        return node if node in facts.free else (_WIDE_SIDE if dtype == WIDE else _LOW_SIDE)

    def costs(a: Any, b: Any, num_bytes: float | None = None) -> None:
        """a wide and b low costs num_bytes; without a number it cannot be."""
        if num_bytes is None:
            network.add_edge(a, b)
        elif network.has_edge(a, b):
            network[a][b]["capacity"] += num_bytes
        else:
            network.add_edge(a, b, capacity=num_bytes)

    for node in facts.free:
        costs(node, _LOW_SIDE, _numel(node) * (WIDE.itemsize - facts.low.itemsize))  # what it writes beyond the low value
    for node, readers in facts.readers.items():
        own = end(node, facts.dtype(node))
        ends = [end(reader, dtype) for reader, dtype in readers]
        # An operation with another wide operand widens by itself; with none it would not be wide.
        casting = [e for e, (reader, _) in zip(ends, readers, strict=True) if reader.target not in _PROMOTES]
        cast_bytes = _numel(node) * (WIDE.itemsize + facts.low.itemsize)
        narrowed, widened = ("narrowed", node), ("widened", node)
        if own != _LOW_SIDE and any(e != _WIDE_SIDE for e in ends):
            costs(own, narrowed, cast_bytes)  # once, however many read it
            for e in ends:
                if e != _WIDE_SIDE:
                    costs(narrowed, e)
        if own != _WIDE_SIDE and any(e != _LOW_SIDE for e in casting):
            costs(widened, own, cast_bytes)
            for e in casting:
                if e != _LOW_SIDE:
                    costs(e, widened)
    if not (facts.free and network.in_degree(_LOW_SIDE) and network.out_degree(_WIDE_SIDE)):
        return {node: facts.dtype(node) for node in facts.free}
    _, (wide, _) = nx.minimum_cut(network, _WIDE_SIDE, _LOW_SIDE)
    return {node: WIDE if node in wide else facts.low for node in facts.free}


def _numel(node: fx.Node) -> int:
    return graph.numel(graph.value_of(node))


# ---- carrying it out ----------------------------------------------------------------------------------------------------
def _carry_out(facts: _Facts, wanted: Mapping[fx.Node, torch.dtype]) -> tuple[int, int]:
    """Makes every node in its wanted format, and lets all readers read it in the format that they read before."""
    made: dict[fx.Node, fx.Node] = {}
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def read(operand: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node:
        root = facts.root(operand)
        if root not in made and facts.dtype(operand) == dtype:
            return operand
        value = made.get(root, root)
        if facts.dtype(value) == dtype:
            return value
        if (value, dtype) not in casts:
            cast = graph.insert_cast(value, dtype, before=reader, why="min_cut")
            graph.belong_with(cast, reader)
            casts[value, dtype] = cast
        return casts[value, dtype]

    nodes = list(facts.gm.graph.nodes)
    for node in nodes:
        if facts.is_cast(node):
            continue
        operands = [x for x in graph.operands(node) if facts.is_either(x)]
        if node in wanted:
            new = {x: read(x, wanted[node], node) for x in operands}
            if wanted[node] == facts.dtype(node) and all(x is y for x, y in new.items()):
                continue
            value = graph.call_on_fakes(node, [graph.value_of(new.get(x, x)) for x in graph.operands(node)])
            if value.dtype == wanted[node] and same_layout(value, graph.value_of(node)):
                made[node] = graph.insert_like(node, new, value, before=node)
                continue
        changed = {x: read(x, facts.dtype(x), node) for x in operands if facts.root(x) in made}
        if changed:
            graph.map_operands(node, lambda _, x, changed=changed: changed.get(x, x))
    num_removed = 0
    for node in reversed(list(facts.gm.graph.nodes)):
        if not node.users and (node in made or graph.is_own_cast(node)):
            graph.erase(node)
            num_removed += 1
    return len(made) + len(casts), num_removed
