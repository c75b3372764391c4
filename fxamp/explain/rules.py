"""What became of each rule of a policy: how often it matched, won and was followed; and why some did nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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


def misspelt(policy: Policy, variants: Sequence[VariantRecord]) -> tuple[str, ...]:
    """What to say of rules that have matched nothing, and were hardly meant so: the pattern is nearly the name of an operation
    of torch, or another spelling of one, for a mapping takes every key that is no operation for the path of a module; or it is
    an operation's name, and there is a module of that name."""
    decisions = [d for v in variants for d in v.plan.everywhere if d.op is not None]
    modules = _modules(decisions)
    told: list[str] = []
    for rule in policy.rules:
        if rule.kind not in ("op", "module"):
            continue
        is_meant = rule.pattern not in modules if rule.pattern in optable.TABLE else _operation(rule.pattern) is None
        if is_meant or any(rule.matches(d.op or "", d.facts.module, d.facts.classes) for d in decisions):
            continue
        what = "no operation so far" if rule.kind == "op" else "no module so far, and is no operation of torch"
        told.append(f"the rule {rule} matches {what}{_suggestion(rule, decisions)}")
    return tuple(told)


def _modules(decisions: Sequence[Decision]) -> set[str]:
    """The paths of all modules that operations are in."""
    paths = [d.facts.module.split(".") for d in decisions]
    return {".".join(parts[:n]) for parts in paths for n in range(1, len(parts) + 1)} - {""}


_SPELT_OUT: Final = re.compile(r"(?:(?:torch|ops|aten|nn|functional|F|Tensor)(?:\.|::))*(?P<name>\w+)")
"""`F.gelu`, `torch.softmax`, `aten::mm`."""

NEARLY: Final = 0.85
"""How alike two names are, as `difflib.get_close_matches` counts, that are taken for one."""


def _operation(pattern: str) -> str | None:
    """The operation of torch that a pattern nearly names; None for what is more likely the name of a module: `norm1`,
    `linears`."""
    match = _SPELT_OUT.fullmatch(pattern)
    if match is None:
        return None
    name = match["name"].lower()
    bare = name.rstrip("_")
    bare = optable.SYNONYMS.get(bare, bare)
    if bare in optable.TABLE:
        return bare
    if name[-1:].isdigit() or name.removesuffix("s") in optable.TABLE:
        return None
    return next(iter(difflib.get_close_matches(name, optable.TABLE, n=1, cutoff=NEARLY)), None)


def _suggestion(rule: Rule, decisions: Sequence[Decision]) -> str:
    """The nearest names of this kind, of those that occur; else of another kind."""
    classes = {name.rpartition(".")[2] for d in decisions for name in d.facts.classes}
    occurring = {"op": {d.op for d in decisions if d.op}, "module": _modules(decisions), "class": classes}
    names = occurring.get(rule.kind)
    if names is None:
        return ""
    words = {"op": "an operation", "module": "a module", "class": "a class of modules"}
    for kind, others in occurring.items():
        if kind != rule.kind and rule.pattern in others:
            return f". There is {words[kind]} of that name: write '{kind}:{rule.pattern}'"
    near = difflib.get_close_matches(rule.pattern, sorted(names), n=1)
    if near:
        return f". Did you mean {near[0]!r}?"
    op = _operation(rule.pattern) if rule.kind in ("op", "module") else None
    if op is not None and (rule.kind, op) != ("op", rule.pattern):
        return f". Did you mean the operation {op!r}?"
    kinds = {"op": "operations", "module": "modules", "class": "classes"}
    shown = sorted(names)
    if not shown:
        return ""
    return f". There are the {kinds[rule.kind]} {', '.join(shown[:5])}{', ...' * (len(shown) > 5)}"
