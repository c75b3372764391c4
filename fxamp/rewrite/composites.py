"""Replaces composite calls by their parts, so that each part gets a class of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from fxamp import capture, graph, optable
from fxamp.passes import Change, Kept

_aten = torch.ops.aten

_DECOMPOSED: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
    {op: op.decompose for op in (_aten.tensordot.default, _aten.inner.default)}
)
"""Composites inside of composites that tracing alone leaves whole."""


@dataclass(frozen=True)
class SeeIntoComposites:
    """Puts the parts of a composite (`optable.SEEN_INTO`) where it was called.

    requires: Dynamo graph as captured.  changes: one call becomes those ATen calls that PyTorch makes for it.  keeps: every
    value, bit for bit; the user's line, module, and mode of each part.

        y: "f32[2, 3]" = tensordot(a, b, dims=1)     ->     a_1 = aten.reshape(a, [2, 4]);  b_1 = aten.reshape(b, [4, 3])
                                                            y: "f32[2, 3]" = aten.mm(a_1, b_1)
    kept: what PyTorch itself casts (autocast regions), what is more than a plain tensor, what reads values to decide.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        return _see_into(gm, "none")


def _see_into(gm: fx.GraphModule, around: capture.Region) -> Change:
    """Does it in a graph that stands in a region of the user's, and in all graphs nested in it."""
    num_added = num_removed = 0
    kept: list[Kept] = []
    nodes = list(gm.graph.nodes)
    bodies = {node: paths for node in nodes if (paths := graph.bodies(node))}
    composites = [node for node in nodes if capture.name_of(node) in optable.SEEN_INTO]
    regions = capture.regions(nodes, around) if bodies or composites else {}
    inner: dict[str, capture.Region] = {}
    for node, paths in bodies.items():
        for path in paths:
            inner[path] = regions[node] if inner.get(path, "none") == "none" else inner[path]
    for node in composites:
        body = _parts(node, regions[node])
        if isinstance(body, str):
            kept.append(Kept(node=node.name, reason=body, where=capture.source_line(node)[0]))
            continue
        num_removed += 1
        num_added += len(graph.inline(node, body))
    if num_removed:
        gm.recompile()
    for path, region in inner.items():
        nested = _see_into(graph.body(gm, path), region)
        num_added, num_removed = num_added + nested.num_added, num_removed + nested.num_removed
        kept += nested.kept
    return Change(
        pass_name=SeeIntoComposites.__name__, num_added=num_added, num_removed=num_removed, kept=tuple(kept)
    )


def _parts(node: fx.Node, region: capture.Region) -> fx.GraphModule | str:
    """A graph of the parts of a call, whose inputs are the call's operands; or why there is none."""
    if region != "none":
        return "inside an autocast region"
    values = [graph.value_of(x) for x in graph.operands(node)]
    tensors = graph.tensors_of(values)
    if any(torch.is_autocast_enabled(t.device.type) for t in tensors):
        return "inside ambient autocast"
    if any(type(t) not in graph.PLAIN for t in tensors):
        return "a value is more than a plain tensor"
    if node.kwargs.get("out") is not None:
        return "writes into out="
    if isinstance(graph.value_of(node), tuple) and not _only_indexed(node):
        return "its results are not taken one by one"
    try:
        body = _trace(node, values)
    except Exception as error:  # whatever tracing raises is the composite's way to say that it decides by values
        return f"cannot be traced: {type(error).__name__}"
    if body.graph.find_nodes(op="get_attr"):
        return "makes constants of its own"
    return body


def _only_indexed(node: fx.Node) -> bool:
    """Is each of the results taken by index, and none of them missing?"""
    results = graph.value_of(node)
    return all(
        capture.name_of(user) == "getitem" and isinstance(user.args[1], int) and results[user.args[1]] is not None
        for user in node.users
    )


def _trace(node: fx.Node, values: list[Any]) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # imports much

    with graph.among_fakes(values):
        trace = make_fx(lambda *inputs: graph.call(node, inputs), decomposition_table=dict(_DECOMPOSED), pre_dispatch=True)
        return trace(*values)
