"""Attention that runs low calls an operation of fxamp's, whose products are low also where no fused kernel takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx

from fxamp import capture, graph, ops
from fxamp.passes import Change, Kept
from fxamp.plan import TRACED, Decision, Plan

TARGETS: Final = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
"""Ways to call attention, all with the arguments of `ops.ATTENTION`."""

_POSITIONS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an attention by name."""
    return dict(zip(_POSITIONS, node.args, strict=False)) | node.kwargs


def change_arguments(node: fx.Node, **changed: Any) -> None:
    """Gives an attention other values for some of its arguments."""
    given = arguments(node) | changed
    positional = tuple(given.pop(name) for name in _POSITIONS[:3])
    graph.set_arguments(node, positional, given)


@dataclass(frozen=True)
class LowAttention:
    """Lets attention whose operands are low call `fxamp::attention`.

    requires: Dynamo graph with the plan's casts.  changes: targets.  keeps: dtypes and shapes; and every bit where PyTorch has
    a fused kernel for the operands.

        y: "bf16[B, L, E]" = scaled_dot_product_attention(q, k, v)     ->     y: ... = fxamp.attention(q, k, v)
    kept: inside a torch.func transform, whose rules for derivatives and batches it does not have.
    """

    plan: Plan = field(repr=False)

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_marked, kept = _retarget(gm, self.plan, in_functorch=False)
        return Change(pass_name=type(self).__name__, num_marked=num_marked, kept=tuple(kept))


def _retarget(gm: fx.GraphModule, plan: Plan, *, in_functorch: bool) -> tuple[int, list[Kept]]:
    """Does a graph and those nested inside; returns how many operations were changed, and which were left."""
    nodes = list(gm.graph.nodes)
    transformed = capture.inside_functorch(nodes, in_functorch)
    num_marked, kept = 0, list[Kept]()
    for node in nodes:
        decision = plan.decisions.get(node.name)
        if node.target not in TARGETS or decision is None or not _runs_low(decision):
            continue
        if transformed[node]:
            kept.append(Kept(node=node.name, reason="inside a torch.func transform", where=decision.facts.where))
        else:
            graph.retarget(node, ops.ATTENTION)
            num_marked += 1
    if num_marked:
        gm.recompile()
    callers = graph.callers(nodes) if plan.bodies else {}
    for path, body in plan.bodies.items():
        around = any(transformed[node] for node in callers.get(path, ()))
        num_inside, kept_inside = _retarget(graph.body(gm, path), body, in_functorch=around)
        num_marked, kept = num_marked + num_inside, [*kept, *kept_inside]
    return num_marked, kept


def _runs_low(decision: Decision) -> bool:
    return any(want not in (None, TRACED) for want in decision.operands)
