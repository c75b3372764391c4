"""Carries out a Plan on a copy of the Dynamo graph: the casts before operations, behind results, and at the outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxamp import formats, graph
from fxamp.capture import Captured
from fxamp.passes import Change
from fxamp.plan import Decision, Plan


@dataclass(frozen=True)
class LowerOperations:
    """Inserts the casts that a plan asks for.

    requires: the graph that was planned, unedited.  changes: dtypes between operations.  keeps: inputs and outputs.

        y: "f32[4, 8]" = linear(x, w)          x_1: "bf16[4, 8]" = aten.to(x, bf16);  w_1: ... = aten.to(w, bf16)
        return y                          ->   y: "bf16[4, 8]" = linear(x_1, w_1)
                                               y_1: "f32[4, 8]" = aten.to(y, f32)
                                               return y_1
    """

    captured: Captured = field(repr=False)
    plan: Plan = field(repr=False)

    def __call__(self, gm: fx.GraphModule) -> Change:
        return Change(pass_name=type(self).__name__, num_added=_lower(gm, self.captured, self.plan))


def _lower(gm: fx.GraphModule, captured: Captured, plan: Plan) -> int:
    """Carries out a plan and those of the graphs nested inside, and returns how many nodes were added."""
    editor = _Editor(plan, captured)
    for node in list(gm.graph.nodes):
        decision = plan.decisions.get(node.name)
        if decision is not None:
            editor.lower(node, decision)
        elif node.op == "output":
            editor.restore_outputs(node)
    gm.recompile()
    inner = [_lower(graph.body(gm, path), captured.bodies[path], body) for path, body in plan.bodies.items()]
    return editor.num_added + sum(inner)


class _Editor:
    """Edits one graph.

    Gradients are summed in the wide format. The cotangents of all readers of a widening meet behind it, so its readers share
    one; those of the readers of a narrowing meet in its low format if they share it, so that each has its own, as under
    autocast, unless nothing is summed or the value is a leaf (weights), whose casts autocast shares too. The joint passes let
    equal casts of the forward be one again. A cast of a pinned node, whose memory is written, is a snapshot, never shared.
    """

    def __init__(self, plan: Plan, captured: Captured) -> None:
        self.plan, self.hands_on, self.snapshots = plan, captured.hands_on, set(captured.pinned)
        self.switches = len({d.facts.mode_index for d in plan.decisions.values()}) > 1
        self.shared: dict[tuple[fx.Node, torch.dtype, int, bool], fx.Node] = {}
        self.num_added = 0

    def lower(self, node: fx.Node, decision: Decision) -> None:
        wanted, where = decision.operands, decision.facts.where
        if any(want is not None for want in wanted):
            graph.map_operands(
                node,
                lambda i, x: self._cast(
                    x, wanted[i], node, decision.facts.mode_index, decision.why, where, saturates=i in decision.saturated
                ),
            )
        if decision.value is graph.value_of(node):
            return
        graph.set_value(node, decision.value)
        if decision.result is not None:
            cast = graph.insert_cast(
                node, decision.result, before=graph.after(node), why=decision.why, where=decision.facts.where
            )
            self.num_added += 1
            self.snapshots.add(cast.name)  # it is the value that is written from here on
            graph.replace(node, cast, except_in=frozenset((cast,)))

    def restore_outputs(self, output: fx.Node) -> None:
        wanted = self.plan.outputs
        graph.map_operands(output, lambda i, x: self._restored(x, wanted[i], output))

    def _restored(self, value: fx.Node, dtype: torch.dtype | None, output: fx.Node) -> Any:
        """An output in its traced dtype, cast in the grad mode that it was computed in."""
        decision = self.plan.decisions.get(value.name)
        if dtype is None or decision is None:
            return value
        place = graph.after(value) if self.switches else output
        why = "an output keeps its traced dtype"
        return self._cast(value, dtype, output, decision.facts.mode_index, why, decision.facts.where, before=place)

    def _cast(
        self,
        value: fx.Node,
        dtype: torch.dtype | None,
        user: fx.Node,
        mode_index: int,
        why: str,
        where: str,
        *,
        saturates: bool = False,
        before: fx.Node | None = None,
    ) -> Any:
        """`value` in `dtype`, for `user`: itself where it needs no cast, else a cast, else a rebuilt tuple of casts.

        What is put in stands in front of `before`, or of `user`.
        """
        held = graph.value_of(value)
        if dtype is None or not _differs(held, dtype):
            return value
        if not isinstance(held, torch.Tensor):
            parts = [self._part(value, i, before or user) for i in range(len(held))]
            cast = [self._cast(part, dtype, user, mode_index, why, where, before=before) for part in parts]
            return cast if isinstance(held, list) else tuple(cast)
        key = (value, dtype, mode_index, saturates)
        may_share = self._keeps_to_itself(user) and value.name not in self.snapshots
        if key in self.shared and may_share:
            return self.shared[key]
        source = graph.insert_saturation(value, dtype, before=before or user) if saturates else value
        made = graph.insert_cast(source, dtype, before=before or user, why=why, where=where)
        self.num_added += 1
        if may_share and not rounds_gradients(value, dtype):
            self.shared[key] = made
        return made

    def _keeps_to_itself(self, user: fx.Node) -> bool:
        """False for a user that might hand on the cast's own memory where the program got a copy. What was widened early reads
        a cast with the strides of the traced value: there memory is shared as it was traced."""
        decision = self.plan.decisions.get(user.name)
        return user.name not in self.hands_on or (decision is not None and decision.widened_early)

    def _part(self, value: fx.Node, index: int, user: fx.Node) -> fx.Node:
        self.num_added += 1
        return graph.insert_getitem(value, index, before=user)


def rounds_gradients(value: fx.Node, dtype: torch.dtype) -> bool:
    """Would sharing a cast of `value` to `dtype` sum the gradients of its readers in a narrower format than `value` has?

    Those of leaves (parameters) are, under autocast as well, which shares the casts of leaves and of nothing else.
    """
    held = graph.value_of(value)
    is_leaf = value.op in ("placeholder", "get_attr") and held.is_leaf
    return held.requires_grad and not is_leaf and not formats.is_lossless(held.dtype, dtype)


def _differs(held: Any, dtype: torch.dtype) -> bool:
    return any(t.is_floating_point() and t.dtype != dtype for t in graph.tensors_of(held))
