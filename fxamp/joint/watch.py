"""Finds the values that `watched.Table` speaks of in AOTAutograd's graphs, and reads them where they are made.

It works behind the partitioner: what is saved and what is recomputed is decided on the graph that nobody watches. So a watched
program needs the memory of the one that is not, but for a number for each value. Run as it is (aot_eager), it keeps the bits
too; a compiler that fuses may round other values of fp16 into memory than it did without the reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fxamp import formats, graph, ops, watch_ops
from fxamp.joint.descriptors import descriptors, input_of
from fxamp.watched import Table

Partitioned = tuple[fx.GraphModule, fx.GraphModule]

_NAMES = """
    clone cat alias _unsafe_view expand flip roll gather index index_select embedding copy lift_fresh_copy
    slice_backward select_backward slice_scatter select_scatter
"""
_MOVING: Final = frozenset(f"aten::{name}" for name in _NAMES.split())
"""Operations that hand numbers on, and are no views by their schema."""


@dataclass(frozen=True)
class _Value:
    """A value that is read."""

    name: str
    """Of its node, in the joint graph and in the parts that it is partitioned into."""
    entry: int
    parents: tuple[int, ...]
    """Positions of the values that it was computed from, with nothing watched in between."""
    is_gradient: bool


@dataclass(frozen=True)
class Watch:
    """Adds, behind what the probe's gradient holds already, what `watch_ops.judge` says of each entry of the table, and, with
    `shares`, the largest share of the numbers of its gradients, where they are in fp16, that is below the smallest normal one.
    """

    table: Table
    scale: int
    """Positions of scale and probe among the graph's inputs."""
    probe: int
    shares: bool
    fuses: bool
    """Does the compiler behind fuse operations, so that some values never get to memory?"""

    def partition(
        self,
        split: Callable[..., Partitioned],
        joint: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        **options: Any,
    ) -> Partitioned:
        """As `split`, which partitions a joint graph."""
        seen = self._look(joint, num_fwd_outputs)
        forward, backward = split(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        if seen is not None:
            self._read(*seen, forward, backward, num_fwd_outputs)
        return forward, backward

    # ---- what there is to read ------------------------------------------------------------------------------------------
    def _look(self, joint: fx.GraphModule, num_outputs: int) -> tuple[list[_Value], str] | None:
        """(the values to be read, the name of the probe's gradient); None for a graph that has no such gradient."""
        output: Any = joint.graph.output_node()
        desc = output.meta.get("desc") or ()
        found = [x for x, d in zip(output.args[0], desc, strict=False) if input_of(d) == self.probe]
        if not found or not isinstance(found[0], fx.Node):
            return None
        nodes = list(joint.graph.nodes)
        backward = _backward(nodes)
        entries = dict(self._entries(nodes, backward))
        chosen = _chosen(nodes, entries, backward)
        position = {node: i for i, node in enumerate(chosen)}
        results = [x for x in output.args[0][:num_outputs] if isinstance(x, fx.Node)]
        ancestors = _nearest(nodes, position, results)
        values = [
            _Value(node.name, entries[node], tuple(sorted(ancestors[node])), node in backward) for node in chosen
        ]
        return values, found[0].name

    def _entries(self, nodes: list[fx.Node], backward: set[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
        """The entry of each node that has one. What carries no mark (sums of gradients, scaling) goes with its operand."""
        known: dict[fx.Node, int] = {}
        for node in nodes:
            entry = self._entry(node, known, backward)
            if entry is not None:
                known[node] = entry
                yield node, entry

    def _entry(self, node: fx.Node, known: dict[fx.Node, int], backward: set[fx.Node]) -> int | None:
        kinds = descriptors()
        desc: Any = node.meta.get("desc")
        if node.op == "placeholder":
            if isinstance(desc, kinds.PlainAOTInput) and desc.idx not in (self.scale, self.probe):
                return desc.idx
            if isinstance(desc, kinds.TangentAOTInput):
                plain = isinstance(desc.output, kinds.PlainAOTOutput)
                return self.table.arriving(desc.output.idx if plain else None)
            return None
        if node.op != "call_function" or node.target in (ops.LARGEST, ops.LOST_SHARES):
            return None
        mark = (node.meta.get("custom") or {}).get(graph.WATCHED)
        if mark is not None:
            return mark + (node in backward)
        first = next((x for x in node.all_input_nodes if x in known and (x in backward) == (node in backward)), None)
        if first is None or (first.op == "placeholder" and first not in backward):
            return None
        return known[first] + (first.op == "placeholder")

    # ---- reading --------------------------------------------------------------------------------------------------------
    def _read(
        self, values: list[_Value], probe_gradient: str, forward: fx.GraphModule, backward: fx.GraphModule, position: int
    ) -> None:
        end: Any = backward.graph.output_node()
        largest = next(x for x in end.args[0] if isinstance(x, fx.Node) and x.name == probe_gradient)
        device = graph.value_of(largest).device

        def call(target: Callable[..., Any], *args: Any, before: fx.Node = end) -> fx.Node:
            return graph.insert_beside(target, args, before=before)

        here, there = ({x.name: x for x in part.graph.nodes if x.op != "output"} for part in (forward, backward))
        first = [i for i, value in enumerate(values) if value.name in here]
        rest = [i for i, value in enumerate(values) if value.name not in here and value.name in there]
        joined: list[fx.Node] = []
        reader = _Reader(self.fuses)
        if first:
            numbers = [reader.magnitude(here[values[i].name]) for i in first]
            whole = call(watch_ops.JOIN, numbers, device, before=forward.graph.output_node())
            joined.append(graph.save_for_backward(whole, backward.graph, position=position))
        if rest:
            joined.append(call(watch_ops.JOIN, [reader.magnitude(there[values[i].name]) for i in rest], device))

        num_entries = len(self.table.entries)
        order = [*first, *rest]
        numbers = call(watch_ops.JOIN, joined, device)
        parents, entries = _indices(values, order)
        held = _constant(parents, "watched_parents", end, device)
        judged = call(watch_ops.JUDGE, numbers, held, _constant(entries, "watched_entries", end, device), num_entries)
        facts = [largest, judged]
        if self.shares:
            low = [i for i in rest if values[i].is_gradient and graph.value_of(there[values[i].name]).dtype == torch.float16]
            shares = [reader.small_share(there[values[i].name]) for i in low]
            places = _constant([order.index(i) for i in low], "watched_places", end, device)
            of = _constant([values[i].entry for i in low], "watched_gradients", end, device)
            facts.append(call(watch_ops.LOST_OF_EACH, shares, numbers, held, places, of, num_entries))
        results = [call(watch_ops.JOIN, facts, device) if x is largest else x for x in end.args[0]]
        graph.set_arguments(end, (type(end.args[0])(results),), {})
        for part in (forward, backward):
            part.recompile()


def _backward(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes of the backward: those that AOTAutograd says so of, and all that is computed from them."""
    found: set[fx.Node] = set()
    for node in nodes:
        is_marked = node.op != "placeholder" and node.meta.get("partitioner_tag") == "is_backward"
        if _is_tangent(node) or is_marked or any(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def _chosen(nodes: Sequence[fx.Node], entries: Mapping[fx.Node, int], backward: set[fx.Node]) -> list[fx.Node]:
    """The nodes to read: what is computed for an entry and read by others. What only the backward reads of an operation's
    forward (the deviation in a norm) is passed over, where the forward reads something of it too."""
    readers: dict[fx.Node, set[tuple[int | None, bool]]] = {}
    for node in reversed(nodes):  # readers before what they read
        readers[node] = set()
        for user in node.users:
            readers[node] |= readers[user] if _hands_on(user) else {(entries.get(user), user in backward)}
    outside = {node: {(e, b) for e, b in readers[node] if e is None or e != entries[node]} for node in entries}
    read_in_forward = {
        entry for node, entry in entries.items() if node not in backward and any(not b for _, b in outside[node])
    }

    def is_chosen(node: fx.Node) -> bool:
        if not _is_float(node) or not outside[node]:
            return False
        if node.op == "placeholder":
            return True
        is_kept_for_backward = node not in backward and all(b for _, b in outside[node])
        return not _hands_on(node) and not (is_kept_for_backward and entries[node] in read_in_forward)

    return [node for node in nodes if node in entries and is_chosen(node)]


def _nearest(
    nodes: Sequence[fx.Node], position: Mapping[fx.Node, int], results: Sequence[fx.Node]
) -> dict[fx.Node, frozenset[int]]:
    """For each node, the positions of the watched values that it was computed from, with no watched one in between. `results`:
    of the forward, from which the loss, and so the gradients that come in, are computed outside of the graph."""
    found: dict[fx.Node, frozenset[int]] = {}

    def sources(of: Iterable[fx.Node]) -> frozenset[int]:
        return frozenset[int]().union(*(frozenset((position[x],)) if x in position else found[x] for x in of))

    for node in nodes:
        is_for_numbers = _is_float(node) or not isinstance(graph.value_of(node), torch.Tensor)  # no inf comes through a mask
        found[node] = sources(node.all_input_nodes) if is_for_numbers else frozenset()
    return found | dict.fromkeys(filter(_is_tangent, nodes), sources(results))


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("desc"), descriptors().TangentAOTInput)


def _is_float(node: fx.Node) -> bool:
    value = graph.value_of(node)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _hands_on(node: fx.Node) -> bool:
    """Does it make no number that its operands do not hold? Then there is nothing to read in it."""
    if not isinstance(node.target, OpOverload):
        return False
    if node.target is graph.JOINT_CAST:
        source, result = graph.value_of(graph.source_of(node)).dtype, graph.value_of(node).dtype
        return source.is_floating_point and result.is_floating_point and formats.is_lossless(source, result)
    return node.target.is_view or node.target._schema.name in _MOVING


@dataclass(frozen=True)
class _Reader:
    """Reads values of one graph, each right where it is made, and so that the program around it changes as little as may be.

    A compiler that fuses may keep narrow values in registers, unrounded, and round them into memory where one more reads them:
    then all their readers get the rounded ones, and an inf where there was none. So such a value is computed once more:

        h: "f16[B]" = relu(a);  y = mul(h, b)     ->     h = relu(a);  magnitude(cast(relu(a), f32));  y = mul(h, b)

    What is read is wide, or lies in memory anyway.
    """

    fuses: bool
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    def magnitude(self, node: fx.Node) -> fx.Node:
        """Inf where the format of the value would not hold it, in a register or not."""
        dtype = graph.value_of(node).dtype
        limit = formats.overflows_at(dtype) if formats.is_narrow(dtype) else None
        readable = self._readable(node)
        return graph.insert_beside(watch_ops.MAGNITUDE, (readable, limit), before=_behind(readable))

    def small_share(self, node: fx.Node) -> fx.Node:
        readable = self._readable(node)
        return graph.insert_beside(watch_ops.SMALL_SHARE, (readable,), before=_behind(readable))

    def _readable(self, node: fx.Node) -> fx.Node:
        copy = self._copy(node)
        if copy is node:
            return node
        return graph.insert_beside(graph.JOINT_CAST, (copy, torch.float32), before=_behind(copy))

    def _copy(self, node: fx.Node) -> fx.Node:
        """The node itself, or, if it may be in a register, another one for the same value."""
        if node not in self.copies:
            self.copies[node] = node
            if self.fuses and formats.is_narrow(graph.value_of(node).dtype) and _is_fusible(node):
                operands = {x: self._copy(x) for x in node.all_input_nodes if _is_float(x)}
                self.copies[node] = graph.insert_like(node, operands, graph.value_of(node), before=_behind(node))
        return self.copies[node]


def _behind(node: fx.Node) -> fx.Node:
    """Where to insert what reads a node: directly behind it, or behind the inputs."""
    after = graph.after(node)
    while after.op == "placeholder":
        after = graph.after(after)
    return after


def _is_fusible(node: fx.Node) -> bool:
    """Is it something that a compiler may compute within another kernel, with no effect but its result?"""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    moves = target.is_view or target._schema.name in _MOVING
    return moves or torch.Tag.pointwise in target.tags or target.namespace == "prims"


def _indices(values: Sequence[_Value], order: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """(parents, entries) of `watch_ops.judge`, for the values in an order. Values that were removed are passed over."""
    place = {i: k for k, i in enumerate(order)}
    rows = [[place[p] for p in values[i].parents if p in place] for i in order]
    width = max([1, *map(len, rows)])
    return [row + [len(order)] * (width - len(row)) for row in rows], [values[i].entry for i in order]


def _constant(numbers: Sequence[Any], name: str, before: fx.Node, device: torch.device) -> fx.Node:
    with unset_fake_temporarily():
        tensor = torch.tensor(numbers or [0], dtype=torch.int64, device=device)  # Inductor takes no empty one
    return graph.insert_tensor(tensor, name, before=before)
