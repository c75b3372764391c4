"""What became of each rule of a policy: how often it matched, won and was followed; and why some did nothing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from fxamp import optable
from fxamp.explain.record import VariantRecord
from fxamp.optable import OpClass
from fxamp.plan import Decision
from fxamp.policy import Policy, Rule


@dataclass(frozen=True, kw_only=True)
class RuleUse:
    """One rule, over all graphs so far."""

    rule: Rule
    num_matched: int
    """Operations that it speaks of."""
    num_decided: int
    """Those of them where no later rule speaks."""
    num_followed: int
    """Those of them that run as it says; the rest kept its traced dtypes, for the reasons in the plan."""
    note: str
    """What the user should know: why it did nothing, which of its operations did not follow and why, which of them it alone
    vouches for; "" where all is well."""

    @property
    def is_idle(self) -> bool:
        """Did it decide nothing?"""
        return self.num_decided == 0


def uses(policy: Policy, variants: Sequence[VariantRecord]) -> tuple[RuleUse, ...]:
    """One row per rule, in the policy's order."""
    decisions = [d for v in variants for d in v.plan.everywhere if d.op is not None]
    matched: dict[Rule, list[Decision]] = {rule: [] for rule in policy.rules}
    decided: dict[Rule, list[Decision]] = {rule: [] for rule in policy.rules}
    for d in decisions:
        for i, rule in enumerate(policy.matching(d.op, d.facts.module, d.facts.classes)):
            matched[rule].append(d)
            if i == 0:
                decided[rule].append(d)
    shadowed = {earlier: later for earlier, later in policy.shadowed}
    return tuple(
        RuleUse(
            rule=rule,
            num_matched=len(matched[rule]),
            num_decided=len(decided[rule]),
            num_followed=sum(_follows(rule, d) for d in decided[rule]),
            note=_note(rule, matched[rule], decided[rule], shadowed.get(rule), decisions),
        )
        for rule in policy.rules
    )


def _follows(rule: Rule, d: Decision) -> bool:
    return rule.precision in ("fp32", "keep") or d.cls is not OpClass.KEEP or d.computes == "-"


def _note(
    rule: Rule, matched: Sequence[Decision], decided: Sequence[Decision], later: Rule | None, decisions: Sequence[Decision]
) -> str:
    if later is not None:
        return f"can never win: {later}, behind it, matches all that it does"
    if not matched:
        return f"matched nothing{_suggestion(rule, decisions)}"
    if not decided:
        return "lost everywhere: a later rule matches too"
    refused = [d for d in decided if not _follows(rule, d)]
    if refused:
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        return f"not followed by {refused[0].op} at {refused[0].facts.where} ({refused[0].why}){more}"
    vouched = sorted({d.op or "" for d in decided if optable.classify(d.op)[0] is OpClass.KEEP and d.cls is OpClass.LOW})
    return f"runs low on this rule's word alone: {', '.join(vouched)}" if vouched else ""


def _suggestion(rule: Rule, decisions: Sequence[Decision]) -> str:
    """The nearest names of this kind, of those that occur."""
    names: set[str] = set()
    for d in decisions:
        if rule.kind == "op" and d.op:
            names.add(d.op)
        elif rule.kind == "module":
            parts = d.facts.module.split(".")
            names |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        elif rule.kind == "class":
            names |= {name.rpartition(".")[2] for name in d.facts.classes}
    if rule.kind == "module" and any(rule.pattern == d.op for d in decisions):
        return f". There is an operation of that name: write 'op:{rule.pattern}'"
    near = difflib.get_close_matches(rule.pattern, sorted(names), n=1)
    if near:
        return f". Did you mean {near[0]!r}?"
    kinds = {"op": "operations", "module": "modules", "class": "classes"}
    shown = sorted(names - {""})
    if rule.kind not in kinds or not shown:
        return ""
    return f". There are the {kinds[rule.kind]} {', '.join(shown[:5])}{', ...' * (len(shown) > 5)}"
