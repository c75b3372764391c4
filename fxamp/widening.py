"""Where a low value had better be widened: once, before operations that only hand it on to readers that want it wide.

    q: "bf16[B]" = linear(...)                             q_1: "f32[B]" = cast(q)
    a: "f32[B]" = mul(cast(q), cos)                        a: "f32[B]" = mul(q_1, cos)
    r: "bf16[B]" = roll(q)                       ->        r: "f32[B]" = roll(q_1)
    b: "f32[B]" = mul(cast(r), sin)                        b: "f32[B]" = mul(r, sin)

Backward, each widening narrows a gradient. So values are widened where the gradients that come back through the widenings have
the fewest elements; they are then summed in fp32, and rounded once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from torch import fx

from fxamp import graph


def early(
    nodes: Iterable[fx.Node],
    *,
    is_low: Callable[[fx.Node], bool],
    is_free: Callable[[fx.Node], bool],
    is_source: Callable[[fx.Node], bool],
    reads_wide: Callable[[fx.Node, int], bool],
) -> frozenset[fx.Node]:
    """The operations to be given wide operands, and to give wide results.

    Args: is_low: is a node's value low?  is_free: may the operation, which is low, be wide instead?  is_source: may a low
    value be cast for operations that hand it on?  reads_wide(user, i): is the i-th operand, which is low, wanted wide?
    """
    every = list(nodes)
    readers: dict[fx.Node, list[tuple[fx.Node, bool]]] = defaultdict(list)
    for node in every:
        for index, operand in enumerate(graph.operands(node)):
            if is_low(operand):
                readers[operand].append((node, reads_wide(node, index)))

    wide: set[fx.Node] = set()
    for node in reversed(every):  # readers before what they read
        if node in readers and all(user in wide or is_wide for user, is_wide in readers[node]) and is_free(node):
            wide.add(node)

    def sources(node: fx.Node) -> list[fx.Node]:
        return [x for x in node.all_input_nodes if is_low(x) and x not in wide]

    chosen: set[fx.Node] = set()
    for part in _parts(wide, sources):
        given = {x for node in part for x in sources(node)}
        widened_now = [x for x in (*given, *part) if any(is_wide for _, is_wide in readers[x])]
        if all(map(is_source, given)) and _numel(given) < _numel(widened_now):
            chosen |= part
    return frozenset(chosen)


def _parts(wide: set[fx.Node], sources: Callable[[fx.Node], list[fx.Node]]) -> list[set[fx.Node]]:
    """`wide` in sets that hang together, by what they read of each other or of one source."""
    neighbours: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in wide:
        for other in (*sources(node), *(x for x in node.all_input_nodes if x in wide)):
            neighbours[node].add(other)
            neighbours[other].add(node)
    parts: list[set[fx.Node]] = []
    seen: set[fx.Node] = set()
    for start in wide:
        part, waiting = set[fx.Node](), [start]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                part.add(node)
                waiting += neighbours[node]
        parts.append(part & wide)
    return parts


def _numel(nodes: Iterable[fx.Node]) -> int:
    return sum(graph.numel(t) for node in nodes for t in graph.tensors_of(graph.value_of(node)) if t.is_floating_point())
