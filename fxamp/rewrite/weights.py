"""Weights that are kept in a low format beside the parameter: the graph takes the copy, and casts nothing."""

from __future__ import annotations

import functools
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
    Views of the weight, such as `w.t()`, become views of the copy.
    kept: a weight that something else reads too: it would be there twice, and its memory could not be watched for writes.
    """

    weights: frozenset[str] = field(repr=False)
    """Names of the inputs of which low copies can be had."""

    def __call__(self, gm: fx.GraphModule) -> Change:
        removed, kept = 0, list[Kept]()
        for node in gm.graph.find_nodes(op="placeholder"):
            readers = _Readers.of(node) if node.name in self.weights else None
            if readers is None or not readers.casts:
                continue
            reason, where = readers.obstacle()
            if reason:
                kept.append(Kept(node=graph.input_name(node), reason=reason, where=where))
                continue
            for value, low in readers.low.items():
                if value is node:
                    graph.retype_input(node, low)
                else:
                    graph.set_value(value, low)
            for cast in readers.casts:
                graph.replace(cast, cast.all_input_nodes[0])
                graph.erase(cast)
            removed += len(readers.casts)
        gm.recompile()
        return Change(pass_name=type(self).__name__, num_removed=removed, kept=tuple(kept))


@dataclass(frozen=True, kw_only=True)
class _Readers:
    """Who reads a weight, or a view of it."""

    views: tuple[fx.Node, ...]
    """The weight, and views of it, each behind what it is a view of."""
    casts: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]

    @staticmethod
    def of(weight: fx.Node) -> _Readers:
        views, casts, others = [weight], list[fx.Node](), list[fx.Node]()
        for value in views:  # which grows meanwhile
            for user in value.users:
                kind = casts if graph.is_own_cast(user) else views if _is_view(user, weight) else others
                kind.append(user)
        others += [user for cast in casts for user in cast.users if user.op == "output"]
        return _Readers(views=tuple(views), casts=tuple(casts), others=tuple(others))

    def obstacle(self) -> tuple[str, str]:
        """(why the graph cannot do without the weight in the format it has, the user's line); ("", "") if it can."""
        if self.others:
            reader = self.others[0]
            op = "the caller, to whom it goes" if reader.op == "output" else capture.name_of(reader) or reader.name
            return f"is cast at every call, since it is read as it is too, by {op}", capture.source_line(reader)[0]
        if len({graph.value_of(cast).dtype for cast in self.casts}) > 1:
            return "is cast at every call, since it is read in two low formats", ""
        if not all(_is_like(low, graph.retyped(graph.value_of(view), low.dtype)) for view, low in self.low.items()):
            return "is cast at every call, since a view of it would be another one in a low format", ""
        return "", ""

    @functools.cached_property
    def low(self) -> dict[fx.Node, torch.Tensor]:
        """The weight and its views in the low format."""
        weight, *views = self.views
        dtype = graph.value_of(self.casts[0]).dtype
        values = {weight: graph.retyped(graph.value_of(weight), dtype)}
        for view in views:
            values[view] = graph.call_on_fakes(view, [values.get(x, graph.value_of(x)) for x in graph.operands(view)])
        return values


def _is_view(node: fx.Node, weight: fx.Node) -> bool:
    """Is it all of a weight or a part, dense, and nothing but another view of the same memory?"""
    value = graph.value_of(node)
    return (
        node.op in ("call_method", "call_function")
        and isinstance(value, torch.Tensor)
        and value.dtype == graph.value_of(weight).dtype
        and graph.storages(node) == graph.storages(weight)
        and not capture.writes(node)
        and capture.name_of(node) != "as_strided"
        and not graph.cast_changes_strides(node)
    )


def _is_like(value: object, wanted: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype != wanted.dtype:
        return False
    return value.shape == wanted.shape and value.stride() == wanted.stride()


def taken(before: fx.GraphModule, after: fx.GraphModule) -> Mapping[int, torch.dtype]:
    """The inputs that a graph takes in another format than before, by position."""
    pairs = zip(*(gm.graph.find_nodes(op="placeholder") for gm in (before, after)), strict=True)
    values = ((graph.value_of(old), graph.value_of(new)) for old, new in pairs)
    return {
        i: new.dtype
        for i, (old, new) in enumerate(values)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.dtype != new.dtype
    }
