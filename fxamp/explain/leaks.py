"""Promotion leaks: where a low value meets a wider one, and the result, with all that follows it, is wide.

PyTorch's promotion decides so, and so does autocast; nothing is rounded that was not. A wider operand all of whose possible
values exist in the low format (a mask of zeros and ones) never gets here: the plan casts it down, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import fx

from fxamp import formats, graph, optable
from fxamp.capture import Captured
from fxamp.explain import text
from fxamp.optable import OpClass
from fxamp.plan import TRACED, Decision, Plan

Origin = Literal["parameter", "buffer", "input", "constant", "computed"]

_PROMOTES: Final = (OpClass.FOLLOW, OpClass.WIDEST)


@dataclass(frozen=True, kw_only=True)
class Leak:
    """One operation whose low operand was cast up because another is wider."""

    where: str
    """The user's line, "train.py:33"."""
    code: str
    """The text of that line."""
    node: str
    op: str
    low: str
    """The low operand: "linear (bf16)"."""
    wide: str
    """The wider one: "pos_table (fp32 buffer)", "softmax (fp32, computed by softmax at train.py:31)"."""
    origin: Origin
    """What the wider one is."""
    num_widened: int
    """Operations behind it that would have followed a low result, and run in fp32 with this one."""
    advice: str
    """What to change if it is to be low."""


def find(captured: Captured, plan: Plan) -> tuple[Leak, ...]:
    """The leaks of a planned graph and of the graphs nested in it, in program order."""
    return tuple(_find(captured, plan))


def _find(captured: Captured, plan: Plan) -> Iterator[Leak]:
    nodes = {node.name: node for node in captured.gm.graph.nodes}
    names = text.short_names(captured.gm)
    for decision in plan.decisions.values():
        if decision.cls not in _PROMOTES:
            continue
        node = nodes[decision.node]
        counts = decision.op in optable.SELECTING
        pairs = list(zip(graph.operands(node), decision.operands, strict=True))
        low = [x for x, want in pairs if want == TRACED and _held(x, plan) not in (None, TRACED) and not _is_empty(x)]
        wide = [x for x, _ in pairs if _takes_part(x, counts) and _held(x, plan) == TRACED]
        if not low or not wide:
            continue
        origin, described = _origin(wide[0], captured, plan.decisions, names)
        held = _held(low[0], plan)
        assert held is not None
        yield Leak(
            where=decision.facts.where,
            code=decision.facts.code,
            node=decision.node,
            op=decision.op or "",
            low=f"{names.get(low[0].name, low[0].name)} ({formats.name(held)})",
            wide=described,
            origin=origin,
            num_widened=_num_widened(node, plan),
            advice=_advice(decision, origin, plan.decisions.get(wide[0].name)),
        )
    for path, body in plan.bodies.items():
        yield from _find(captured.bodies[path], body)


def _is_empty(node: fx.Node) -> bool:
    return graph.is_empty(graph.value_of(node))


def _takes_part(node: fx.Node, zero_dim_counts: bool) -> bool:
    value = graph.value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype == TRACED and (zero_dim_counts or value.dim() > 0)


def _held(node: fx.Node, plan: Plan) -> torch.dtype | None:
    """The format in which a node's value arrives at those that read it; None if it is no tensor."""
    decision = plan.decisions.get(node.name)
    if decision is None:
        value = graph.called_value(node)
    elif decision.result is not None:
        return decision.result
    else:
        value = decision.value
    return value.dtype if isinstance(value, torch.Tensor) else None


def _origin(
    node: fx.Node, captured: Captured, decisions: Mapping[str, Decision], names: Mapping[str, str]
) -> tuple[Origin, str]:
    name = names.get(node.name, node.name)
    if node.op == "placeholder":
        role = captured.roles.get(node.name, "input")
        kind: Origin = role if role in ("parameter", "buffer") else "input"
        return kind, f"{name} (fp32 {kind})"
    made = decisions.get(node.name)
    if made is None or not any(_takes_part(x, True) for x in node.all_input_nodes):
        return "constant", f"{name} (fp32 constant)"
    return "computed", f"{name} (fp32, computed by {made.op or '?'} at {made.facts.where})"


def _advice(decision: Decision, origin: Origin, made: Decision | None) -> str:
    here = f"a rule 'op:{decision.op}=low'"
    if decision.facts.module:
        here += f" or 'module:{decision.facts.module}=low'"
    if origin == "computed" and made is not None and made.op not in (None, decision.op):
        return f"a rule 'op:{made.op}=low' makes it low where it is computed, {here} casts it down here"
    if origin == "constant":
        return f"write numbers that the low format holds; or {here} rounds it here"
    return f"{here} casts it down here"


def _num_widened(start: fx.Node, plan: Plan) -> int:
    """How many operations that follow their operands read the wide result, directly or through others such."""
    seen, waiting = {start}, [start]
    while waiting:
        for user in waiting.pop().users:
            decision = plan.decisions.get(user.name)
            if user not in seen and decision is not None and decision.cls in _PROMOTES and _held(user, plan) == TRACED:
                seen.add(user)
                waiting.append(user)
    return len(seen) - 1
