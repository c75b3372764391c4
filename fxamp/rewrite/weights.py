"""Weights that are kept in a low format beside the parameter: the graph takes the copy, and casts nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxamp import capture, graph
from fxamp.passes import Change, Kept


@dataclass(frozen=True)
class TakeLowWeights:
    """Gives a graph the low copies of weights all of whose readers want them in one low format.

    requires: LowerOperations has run.  changes: the dtypes of these inputs.  keeps: every value, all other inputs, outputs.

        w: "f32[8, 4]" = input                       w: "bf16[8, 4]" = input
        w_1: "bf16[8, 4]" = aten.to(w, bf16)   ->    y: "bf16[2, 8]" = linear(x, w)
        y: "bf16[2, 8]" = linear(x, w_1)
    kept: a weight that something else reads too: it would be there twice, and its memory could not be watched for writes.
    """

    weights: frozenset[str] = field(repr=False)
    """Names of the inputs of which low copies can be had."""

    def __call__(self, gm: fx.GraphModule) -> Change:
        removed, kept = 0, list[Kept]()
        for node in gm.graph.find_nodes(op="placeholder"):
            casts = [user for user in node.users if graph.is_own_cast(user)] if node.name in self.weights else []
            if not casts:
                continue
            reason, where = _obstacle(node, casts)
            if reason:
                kept.append(Kept(node=graph.input_name(node), reason=reason, where=where))
                continue
            graph.retype_input(node, graph.value_of(casts[0]))
            for cast in casts:
                graph.replace(cast, node)
                graph.erase(cast)
            removed += len(casts)
        gm.recompile()
        return Change(pass_name=type(self).__name__, num_removed=removed, kept=tuple(kept))


def _obstacle(weight: fx.Node, casts: list[fx.Node]) -> tuple[str, str]:
    """(why a graph cannot do without a weight in the format it has, the user's line); ("", "") if it can."""
    others = (user for user in weight.users if user not in casts)
    leaving = (user for cast in casts for user in cast.users if user.op == "output")
    reader = next(itertools.chain(others, leaving), None)
    if reader is not None:
        op = "the caller, to whom it goes" if reader.op == "output" else capture.name_of(reader) or reader.name
        return f"is cast at every call, since it is read as it is too, by {op}", capture.source_line(reader)[0]
    values = [graph.value_of(cast) for cast in casts]
    if len({value.dtype for value in values}) > 1:
        return "is cast at every call, since it is read in two low formats", ""
    return "", ""


def taken(before: fx.GraphModule, after: fx.GraphModule) -> Mapping[int, torch.dtype]:
    """The inputs that a graph takes in another format than before, by position."""
    pairs = zip(*(gm.graph.find_nodes(op="placeholder") for gm in (before, after)), strict=True)
    values = ((graph.value_of(old), graph.value_of(new)) for old, new in pairs)
    return {
        i: new.dtype
        for i, (old, new) in enumerate(values)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.dtype != new.dtype
    }
