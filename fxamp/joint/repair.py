"""Repairs of upstream faults that work on the joint graph. `fxamp/_patches.py` says what each is for and when it can go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxamp import graph, ops
from fxamp.joint.layout import is_view, same_layout
from fxamp.passes import Change


@dataclass(frozen=True)
class SaveReadsOfMutated:
    """Saves, instead of recomputing, what the forward computed from an input that it writes later (`mutated-reads`).

    requires: joint graph, mutations as `copy_` into placeholders.  changes: `meta["recompute"]`, targets.  keeps: every value.

        n: "i64[]" = add(steps, 1)                 n: ... = add(steps, 1)      # MUST_SAVE
        z: "f32[B]" = div(y, n)               ->   z: ... = div(y, n)
        copy_(steps, n)                            copy_(steps, n)             # a recomputed add would count twice

    A `clone` becomes an opaque copy besides: Inductor takes it for nothing, and the backward would read what was written.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        writes = list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
        needed = _needed_by_backward(gm) if writes else frozenset[fx.Node]()
        num_marked = 0
        for write in writes:
            destination = write.args[0]
            if not (isinstance(destination, fx.Node) and destination.op == "placeholder"):
                continue
            for reader in _readers(destination):
                if reader in needed and "recompute" not in reader.meta:
                    graph.set_meta(reader, {"recompute": CheckpointPolicy.MUST_SAVE})
                    _make_opaque(reader)
                    num_marked += 1
        return Change(pass_name=type(self).__name__, num_marked=num_marked)


@dataclass(frozen=True)
class KeepRoundings:
    """Makes the user's narrowing casts opaque where Inductor would drop their rounding (`hidden-rounding`).

    requires: joint graph, casts marked by `rewrite.roundings`.  changes: a target.  keeps: every value, as eager computes it.

        h: "f16[B]" = cast(x, f16)                 h: "f16[B]" = fxamp.round_to(x, f16)
        y: "f32[B]" = cast(h, f32)          ->     y: "f32[B]" = cast(h, f32)
    """

    on: bool

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_marked = 0
        for node in list(gm.graph.nodes) if self.on else ():
            if graph.is_users_narrowing(node):
                graph.retarget(node, ops.ROUND_TO)
                num_marked += 1
        return Change(pass_name=type(self).__name__, num_marked=num_marked)


def _make_opaque(reader: fx.Node) -> None:
    """Makes a `clone` that changes no strides a call that Inductor does not see into."""
    if reader.target is not torch.ops.aten.clone.default:
        return
    source, value = graph.value_of(graph.source_of(reader)), graph.value_of(reader)
    if same_layout(source, value):
        graph.retarget(reader, ops.ROUND_TO)
        graph.set_arguments(reader, (reader.args[0], value.dtype), {})


def _needed_by_backward(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The forward's nodes on which something in the backward depends."""
    needed: set[fx.Node] = set()
    for node in reversed(list(gm.graph.nodes)):
        if node in needed or node.meta.get("partitioner_tag") == "is_backward":
            needed.update(node.all_input_nodes)
    return frozenset(node for node in needed if node.meta.get("partitioner_tag") != "is_backward")


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """The nodes that compute something from `value`, seen through its views."""
    for user in list(value.users):
        if user.op != "call_function":
            continue
        if is_view(user):
            yield from _readers(user)
        elif graph.tensors_of(graph.value_of(user)):
            yield user
