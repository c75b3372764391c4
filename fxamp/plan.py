"""(Captured, Policy) -> Plan: a format and a reason for every value of a graph. Pure data; edits nothing.

One walk in program order. Each node's operands arrive in formats that are already decided; its class says which formats it
wants; a call on fake tensors shows what comes out. A call that refuses, or whose result is not the traced one but for its
format, makes the node KEEP its traced dtypes: no table is trusted beyond what the operation itself confirms.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor

from fxamp import _patches, as_given, capture, errors, formats, garbage, graph, guards, legal, optable, registered, widening
from fxamp.as_given import Given
from fxamp.calls import Calls, Later
from fxamp.capture import Captured, Facts, Region
from fxamp.optable import Inside, OpClass
from fxamp.policy import Policy, Rule

TRACED: Final = torch.float32
"""The one traced dtype that fxamp lowers. Values that the user made narrower or wider stay as they are."""

NUMERICS: Final = ("eager", "fast")

_UNTOUCHED: Final = "; fxamp leaves the graph as PyTorch traced it. Called outside of autocast, fxamp decides"
"""What a note says once of a graph, and not of each of its operations."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What happens to one node."""

    node: str
    op: str | None
    cls: OpClass
    operands: tuple[torch.dtype | None, ...]
    """For each operand, the dtype that its fp32-traced tensors must have on arrival; None: as they come."""
    computes: str
    """Short name of the format that it computes in: the one that its floating operands have or, where an autocast of the
    user's casts these, that of its result: "bf16", "fp32"; "-" if it has none."""
    result: torch.dtype | None
    """The dtype to cast the result to at once, None if it is handed on as computed."""
    widened_early: bool = False
    """Does it read the one widening that its low operand has for all who want it wide? See `fxamp.widening`."""
    saturated: frozenset[int] = frozenset()
    """Operands that are cut off at the ends of their new format instead of being rounded to infinity: masks of attention."""
    why: str
    rule: Rule | None = None
    """That of the policy which keeps it as it was traced."""
    facts: Facts
    value: Any = field(repr=False, compare=False)
    """The fake value that the node computes in its new formats, before `result`."""

    @property
    def is_counted(self) -> bool:
        """Is it an operation on floating-point values? Whoever counts operations counts these."""
        return self.computes != "-"

    @property
    def runs_low(self) -> bool:
        """Does it compute in less than fp32, whoever decided that?"""
        return not formats.narrow_names().isdisjoint(self.computes.split("+"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions for one variant of one graph."""

    variant: str
    """The precision planned for: "bf16"."""
    low: torch.dtype
    """The dtype of lowered values."""
    decisions: MappingProxyType[str, Decision]
    """By node name, for every call in the graph."""
    outputs: tuple[torch.dtype | None, ...]
    """For each output, the dtype to cast it to before it leaves; None: as it is."""
    note: str
    """Why the graph is planned as it is, where that is not the policy alone: "ambient autocast"; else ""."""
    bodies: MappingProxyType[str, Plan] = field(default_factory=lambda: MappingProxyType({}))
    """The plans of the graphs nested in its higher-order operations, by the attribute that holds each."""

    def digest(self) -> str:
        """A key of everything in the plan that changes the rewritten graph, for caches; equal across processes."""
        text = repr(self.outputs)
        text += "".join(
            f"{d.node}|{d.op}|{d.operands}|{d.result}|{d.widened_early}|{sorted(d.saturated)};"
            for d in self.decisions.values()
        )
        text += repr([(path, body.digest()) for path, body in self.bodies.items()])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def everywhere(self) -> tuple[Decision, ...]:
        """The decisions of the graph and of all graphs nested in it."""
        return (*self.decisions.values(), *(d for body in self.bodies.values() for d in body.everywhere))

    @property
    def operations(self) -> tuple[Decision, ...]:
        """The decisions about operations on floating-point values."""
        return tuple(d for d in self.everywhere if d.is_counted)

    @property
    def num_low_ops(self) -> int:
        """Operations that compute in less than fp32: those that the policy lowers, those that follow them, and those that the
        program itself runs low."""
        return sum(d.runs_low for d in self.everywhere)

    @property
    def lowers(self) -> bool:
        """Does the policy lower anything?"""
        return any(d.cls is OpClass.LOW and d.runs_low for d in self.everywhere)

    @property
    def formats(self) -> tuple[str, ...]:
        """Short names of all formats that some operation computes in."""
        return tuple(sorted({name for d in self.operations for name in d.computes.split("+")}))


@garbage.collected_later()
def plan(
    captured: Captured,
    policy: Policy,
    *,
    variant: str,
    parts: tuple[tuple[str, str], ...] = (),
    output_dtype: Literal["traced", "low"] = "traced",
    relaxed: tuple[str, ...] = (),
) -> Plan:
    """Decides the format of every value of a graph for one precision.

    Args: variant is a key of `formats.STORAGE`; `parts`, (module path glob, another such key), of which the last that matches
    decides, let parts of the model run in other precisions; output_dtype="low" lets outputs leave as they are computed; of
    `relaxed`, "low_residual" is decided here, before autograd, so that the gradient of a low residual stream is low too.
    """
    calls = Calls(checked=legal.wants_full_check())
    if captured.ambient is not None:
        note = f"ambient autocast ({captured.ambient}) decides here{_UNTOUCHED}"
        return _plan(captured, Policy(), variant, (), output_dtype, note, (), calls)
    return _plan(captured, policy, variant, parts, output_dtype, "", relaxed, calls)


def _plan(
    captured: Captured,
    policy: Policy,
    variant: str,
    parts: tuple[tuple[str, str], ...],
    output_dtype: str,
    note: str,
    relaxed: tuple[str, ...],
    calls: Calls,
) -> Plan:
    """The plan of a graph, and of those nested in it; with a note, it keeps its traced dtypes for that reason."""
    planner = _Planner(captured, policy, variant, parts, note, relaxed, calls)
    made = planner.plan(output_dtype)
    functions, reasons = ({}, {}) if note else _functions(captured, policy, variant, parts, planner.current)
    notes = {path: note or reasons.get(path) or _barrier(captured, policy, path) or "" for path in captured.bodies}
    bodies = {
        # What enters and leaves a body has its traced dtype, so each is planned by itself, once for all that call it.
        path: functions.get(path) or _plan(body, policy, variant, parts, "traced", notes[path], relaxed, calls)
        for path, body in captured.bodies.items()
    }
    return replace(made, bodies=MappingProxyType(bodies))


def _barrier(captured: Captured, policy: Policy, path: str) -> str | None:
    """Why nothing changes inside a body; None if it is rewritten."""
    for caller in captured.callers.get(path, ()):
        facts = captured.facts[caller.name]
        cls, _, why, rule = policy.decide(facts.op, facts.module, facts.classes)
        if rule is not None and cls is not OpClass.LOW:
            return why
        name = (facts.op or "").removeprefix("higher_order::")
        inside, reason = optable.HIGHER_ORDER.get(name, (Inside.TRACED, "not listed"))
        if inside is Inside.TRACED or (inside is Inside.DECLARED and captured.bodies[path].function is None):
            return f"inside {name}: {reason}"
        to = _cast_inputs(captured, path)
        if inside is Inside.DECLARED and to is not None:
            return f"inside {name}: custom_fwd casts its inputs to {formats.name(to)}"
    return None


def _cast_inputs(captured: Captured, path: str) -> torch.dtype | None:
    function = captured.bodies[path].function
    return None if function is None else function.cast_inputs


def _low_in(module: str, variant: str, parts: tuple[tuple[str, str], ...]) -> torch.dtype:
    """The low format of the part that holds a module."""
    rules = ((Rule(kind="module", pattern=glob, precision="low"), precision) for glob, precision in reversed(parts))
    return formats.STORAGE[next((precision for rule, precision in rules if rule.matches("", module)), variant)]


def _functions(
    captured: Captured,
    policy: Policy,
    variant: str,
    parts: tuple[tuple[str, str], ...],
    current: Mapping[fx.Node, Any],
) -> tuple[dict[str, Plan], dict[str, str]]:
    """(the plans of forward and backward of autograd.Functions that run as PyTorch runs them on low inputs, by the attribute
    that holds each; the reasons why others keep their traced dtypes). `current` is what each node hands on."""
    plans, reasons = dict[str, Plan](), dict[str, str]()
    for caller in (node for node in captured.gm.graph.nodes if captured.facts[node.name].op == capture.AUTOGRAD_FUNCTION):
        facts, paths = captured.facts[caller.name], list(graph.bodies(caller))
        low = _low_in(facts.module, variant, parts)
        rule = policy.decide(facts.op, facts.module, facts.classes)
        if low == TRACED or facts.region != "none" or (rule.rule is not None and rule.cls is not OpClass.LOW):
            continue
        to = _cast_inputs(captured, paths[0])
        if to not in (None, TRACED):
            made, why = as_given.casting(caller, captured, TRACED), f"custom_fwd casts its inputs to {formats.name(to)}"
        elif to is None and all(_only_follows(captured.bodies[path], policy, low) for path in paths):
            arriving = {x: current[x].dtype for x in caller.all_input_nodes if _is_lowered(current[x], graph.value_of(x))}
            if not arriving:
                continue
            made, why = as_given.following(caller, captured, arriving), "it works element by element"
        else:
            continue
        if isinstance(made, str):
            reasons |= dict.fromkeys(paths, f"inside an autograd.Function: {why}; {made}")
        else:
            plans |= {
                path: _plan_of_given(captured.bodies[path], given, variant, low, f"inside an autograd.Function: {why}")
                for path, given in zip(paths, (made.forward, made.backward), strict=True)
            }
    return plans, reasons


def _only_follows(body: Captured, policy: Policy, low: torch.dtype) -> bool:
    """Do all operations of a graph take the format of their operands, under autocast and without it, and are their constants
    numbers of the low format?"""
    largest, smallest = torch.finfo(low).max, formats.smallest(low)
    for node in body.gm.graph.nodes:
        facts = body.facts[node.name]
        if node.op in ("placeholder", "output", "get_attr") or node.target is torch._C._set_grad_enabled:
            continue
        verdict = policy.decide(facts.op, facts.module, facts.classes)
        follows = verdict.rule is None and verdict.cls in (OpClass.FOLLOW, OpClass.WIDEST)
        numbers = [abs(x) for x in graph.constants(node) if isinstance(x, (int, float)) and x != 0]
        if not follows or facts.op not in optable.IN_EITHER_FORMAT or facts.region != "none":
            return False
        names_a_dtype = any(isinstance(x, torch.dtype) for x in graph.constants(node))
        if names_a_dtype or not all(smallest <= x <= largest for x in numbers):
            return False
    return True


def _is_lowered(value: Any, traced: Any) -> bool:
    both = isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor)
    return both and traced.dtype == TRACED and value.dtype != TRACED


def _plan_of_given(captured: Captured, given: Given, variant: str, low: torch.dtype, why: str) -> Plan:
    """The plan of a graph whose inputs are cast, and which is then run as it is."""
    decisions = {
        node.name: Decision(
            node=node.name,
            op=captured.facts[node.name].op,
            cls=_class_as_given(captured.facts[node.name].op, given, node),
            operands=given.wanted(node),
            computes="+".join(sorted({formats.name(t.dtype) for t in _floats_given(given, node)})) or "-",
            result=None,
            why=why,
            facts=captured.facts[node.name],
            value=given.values[node],
        )
        for node in captured.gm.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    }
    outputs = tuple(
        TRACED if x.name in decisions and _is_another(given.values[x], graph.value_of(x)) else None
        for x in graph.operands(captured.gm.graph.output_node())
    )
    return Plan(variant=variant, low=low, decisions=MappingProxyType(decisions), outputs=outputs, note="")


def _class_as_given(op: str | None, given: Given, node: fx.Node) -> OpClass:
    """LOW for what the table would lower, and is given low values; else KEEP: nothing was decided."""
    is_low = any(t.dtype not in (TRACED, torch.float64) for t in _floats_given(given, node))
    return OpClass.LOW if is_low and optable.classify(op)[0] is OpClass.LOW else OpClass.KEEP


def _floats_given(given: Given, node: fx.Node) -> list[torch.Tensor]:
    tensors = [t for x in graph.operands(node) for t in graph.tensors_of(given.values[x])]
    return [t for t in tensors if t.is_floating_point()]


def _is_another(value: Any, traced: Any) -> bool:
    """Has it another format than the traced value?"""
    pairs = zip(graph.tensors_of(value), graph.tensors_of(traced), strict=True)
    return any(new.dtype != old.dtype for new, old in pairs)


class _Planner:
    """The walk. `current` is what each node hands on, in the formats decided so far."""

    def __init__(
        self,
        captured: Captured,
        policy: Policy,
        variant: str,
        parts: tuple[tuple[str, str], ...],
        note: str,
        relaxed: tuple[str, ...],
        calls: Calls,
    ) -> None:
        self.variant, self.low = variant, TRACED if note else formats.STORAGE[variant]
        self.captured, self.policy, self.note, self.relaxed = captured, policy, note, relaxed
        self.calls = calls
        self.parts = parts
        self.low_of: dict[str, torch.dtype] = {}
        self.position = {node: i for i, node in enumerate(captured.gm.graph.nodes)}
        self.nodes = {node.name: node for node in captured.gm.graph.nodes}
        self.ops = {node: captured.facts[node.name].op for node in captured.gm.graph.nodes}
        self.known = guards.known(captured.gm.graph.nodes, self.ops, captured.pinned)
        self.current: dict[fx.Node, Any] = {}
        self.floats: dict[fx.Node, list[torch.Tensor]] = {}
        self.dtypes: dict[fx.Node, set[torch.dtype]] = {}
        self.others: dict[fx.Node, set[torch.dtype]] = {}
        """Of the floating-point tensors that were not traced in fp32."""
        self.converted: dict[tuple[fx.Node, torch.dtype], Any] = {}

    def plan(self, output_dtype: str) -> Plan:
        decisions: dict[str, Decision] = {}
        outputs: tuple[torch.dtype | None, ...] = ()
        for node in self.captured.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._hand_on(node, graph.called_value(node))
            elif node.op == "output":
                outputs = tuple(self._output(x, output_dtype) for x in graph.operands(node))
            else:
                try:
                    decision = self._decide(node)
                except errors.FxampError:
                    raise
                except Exception as error:
                    raise errors.StageFailed(
                        f"planning {node.name} ({node.target}) failed: {error}",
                        where=self.captured.facts[node.name].where or None,
                        way_out="Please report this; on_error='eager' compiles the untouched graph meanwhile",
                    ) from error
                decisions[node.name] = decision
                value = decision.value
                self._hand_on(node, value if decision.result is None else _retype(value, decision.result))
        self._widen(self._early(decisions), decisions)
        return Plan(
            variant=self.variant,
            low=self.low,
            decisions=MappingProxyType(decisions),
            outputs=outputs,
            note=self.note,
        )

    def _hand_on(self, node: fx.Node, value: Any) -> None:
        pairs = list(zip(graph.tensors_of(graph.value_of(node)), graph.tensors_of(value), strict=True))
        floats = [now for traced, now in pairs if traced.dtype == TRACED]
        self.current[node], self.floats[node] = value, floats
        self.dtypes[node] = {now.dtype for now in floats}
        self.others[node] = {t.dtype for t, _ in pairs if t.dtype != TRACED and t.dtype.is_floating_point}

    # ---- one node -----------------------------------------------------------------------------------------------------
    def _decide(self, node: fx.Node) -> Decision:
        facts = self.captured.facts[node.name]
        cls, precision, why, rule = self.policy.decide(facts.op, facts.module, facts.classes)
        own = self._low_in(facts.module)
        low = own if precision is None else formats.STORAGE[precision]
        if rule is None and cls is OpClass.KEEP and own != TRACED and not self.note:
            declared = registered.cast_inputs(node, self.captured.device, own)
            if declared is not None:
                cls, low = (OpClass.HIGH if declared == TRACED else OpClass.LOW), declared
                why = f"register_autocast: {formats.name(declared)}"
        operands = list(graph.operands(node))
        if precision is None and cls is OpClass.LOW and low == TRACED:
            why = f"{why}; its part runs in fp32" if self.parts else f"{why}; the precision is {self.variant}"
        if precision is None and cls in _FOLLOWING and self._is_foreign(operands, own):
            cls, why = OpClass.HIGH, f"{why}; its part runs in {formats.name(own)}, and follows nothing else"
        if facts.op in optable.METADATA:
            return self._keep(node, facts, "reads the shape alone", casts=False)
        left = self._left_alone(facts)
        if left is not None and cls is not OpClass.KEEP:
            return self._keep(node, facts, left, rule=rule if cls is OpClass.HIGH else None)
        if facts.op not in optable.TABLE and graph.bodies(node):
            return self._keep(node, facts, optable.classify(facts.op)[1])  # a body is planned for its traced dtypes
        if cls in (OpClass.KEEP, OpClass.HIGH):
            return self._keep(node, facts, why, cls=cls, rule=rule)
        obstacle = self._obstacle(node, facts, operands, cls, low)
        if obstacle is not None:
            return self._keep(node, facts, obstacle)

        wanted = self._wanted(node, facts.op, cls, low, operands)
        pinned = self.captured.pinned.get(node.name)
        if pinned is not None and (cls is not OpClass.LOW or node.name in self.captured.read_by_stride):
            return self._keep(node, facts, f"{why}; {pinned}")
        satisfied = all(want is None or self._has(x, want) for x, want in zip(operands, wanted, strict=True))
        if satisfied and not any(self._lowered(x) for x in operands):
            return self._keep(node, facts, why, cls=cls)
        saturated = self._saturated(node, facts.op, operands, wanted)
        guarded = self._guarded(node, facts.op, operands, wanted, saturated)
        if guarded is not None:
            return self._keep(node, facts, f"guard: {guarded}")
        value, refusal = self._try(node, operands, wanted)
        if refusal is not None:
            return self._keep(node, facts, f"{why}; {refusal}")
        result = None
        if pinned is not None:
            if not isinstance(value, torch.Tensor):
                return self._keep(node, facts, f"{why}; {pinned}")
            result, why = TRACED if value.dtype != TRACED else None, f"{why}; result is fp32: {pinned}"
        return Decision(
            node=node.name,
            op=facts.op,
            cls=cls,
            operands=wanted,
            computes=self._format(operands, wanted),
            result=result,
            saturated=saturated,
            why=why,
            facts=facts,
            value=value,
        )

    def _keep(
        self,
        node: fx.Node,
        facts: Facts,
        why: str,
        *,
        cls: OpClass = OpClass.KEEP,
        casts: bool = True,
        rule: Rule | None = None,
    ) -> Decision:
        """The node as it was traced: operands up to their traced dtypes, traced result."""
        operands = list(graph.operands(node))
        back = TRACED if casts else None
        wanted = tuple(back if self._lowered(x) else None for x in operands)
        computes = self._format(operands, tuple(back for _ in operands)) if casts else "-"
        if self._is_autocast(facts) and optable.classify(facts.op)[0] is not OpClass.KEEP:
            results = {t.dtype for t in graph.tensors_of(graph.value_of(node)) if t.is_floating_point()}
            computes = "+".join(sorted(map(formats.name, results))) or computes
        return Decision(
            node=node.name,
            op=facts.op,
            cls=cls,
            operands=wanted,
            computes=computes,
            result=None,
            why=why,
            rule=rule,
            facts=facts,
            value=self._value_of_kept(node, operands, wanted),
        )

    def _value_of_kept(self, node: fx.Node, operands: list[fx.Node], wanted: tuple[torch.dtype | None, ...]) -> Any:
        """The traced value; but of a cast that lays its operand out anew, an operation may give other strides."""
        if not any(self._moves_memory(x, want) for x, want in zip(operands, wanted, strict=True)):
            return graph.value_of(node)
        if node.name in self.captured.pinned or capture.writes(node) or isinstance(node.target, HigherOrderOperator):
            return graph.value_of(node)
        value, refusal = self._try(node, operands, wanted)
        return value if refusal is None and not _is_another(value, graph.value_of(node)) else graph.value_of(node)

    def _moves_memory(self, node: fx.Node, want: torch.dtype | None) -> bool:
        """Has what a cast back to the traced format gives other strides than the traced value?"""
        value, traced = self.current[node], graph.value_of(node)
        if want is None or not isinstance(value, FakeTensor):
            return False
        with graph.quietly(value.fake_mode):  # compares symbolic sizes
            strides = value.stride() if value.is_contiguous() else graph.retyped(value, want).stride()
            return strides != traced.stride()

    def _early(self, decisions: dict[str, Decision]) -> frozenset[fx.Node]:
        """The operations that had better be given the one widening of what they read."""

        def reads_wide(node: fx.Node, index: int) -> bool:
            return node.name in decisions and decisions[node.name].operands[index] == TRACED

        return widening.early(
            self.captured.gm.graph.nodes,
            is_low=self._lowered,
            is_free=lambda node: node.name in decisions and self._may_be_widened(node, decisions[node.name]),
            is_source=self._widens_to_traced,
            reads_wide=reads_wide,
        )

    def _may_be_widened(self, node: fx.Node, decision: Decision) -> bool:
        """Does it take its format from operands that are all low, and hand it on to a result that nobody writes?"""
        if decision.cls not in _FOLLOWING or decision.op not in optable.IN_EITHER_FORMAT:
            return False
        if node.name in self.captured.pinned:
            return False
        pairs = zip(graph.operands(node), decision.operands, strict=True)
        wanted = [want for x, want in pairs if self._is_float(x)]
        return bool(wanted) and all(want not in (None, TRACED) for want in wanted)

    def _widens_to_traced(self, node: fx.Node) -> bool:
        """Is a cast of it the traced value, strides too? What reads it then makes and shares memory as it was traced."""
        now, traced = self.current[node], graph.value_of(node)
        return isinstance(now, torch.Tensor) and graph.retyped(now, TRACED).stride() == traced.stride()

    def _widened(self, decision: Decision) -> Decision:
        """An operation that follows its operands, given them wide."""
        return replace(
            decision,
            operands=tuple(None if want is None else TRACED for want in decision.operands),
            computes=formats.name(TRACED),
            widened_early=True,
            why=f"{decision.why}; whoever reads it, and others that read its operand, want fp32",
            value=graph.value_of(self.nodes[decision.node]),
        )

    def _widen(self, early: frozenset[fx.Node], decisions: dict[str, Decision]) -> None:
        """Gives operations their operands wide. What reads them reads other strides, then, than those of a cast of its own."""
        changed: set[fx.Node] = set()
        for node in self.captured.gm.graph.nodes if early else ():
            decision = decisions.get(node.name)
            if decision is None:
                continue
            if node in early:
                now = self._widened(decision)
            elif decision.value is not graph.value_of(node) and not changed.isdisjoint(node.all_input_nodes):
                now = self._read_anew(node, decision)
            else:
                continue
            decisions[node.name] = now
            if now is not decision:
                changed.add(node)
                self._hand_on(node, now.value if now.result is None else _retype(now.value, now.result))
                for key in [key for key in self.converted if key[0] is node]:
                    del self.converted[key]

    def _read_anew(self, node: fx.Node, decision: Decision) -> Decision:
        """The decision, with the value that it comes to when what it reads has other strides than it had."""
        operands = list(graph.operands(node))
        if decision.cls in (OpClass.KEEP, OpClass.HIGH):
            value = self._value_of_kept(node, operands, decision.operands)
        else:
            found, refusal = self._try(node, operands, decision.operands)
            value = found if refusal is None else decision.value
        return decision if value is decision.value else replace(decision, value=value)

    def _left_alone(self, facts: Facts) -> str | None:
        """Why fxamp decides nothing here, where somebody else does; None: it does."""
        if self.note:
            return self.note.removesuffix(_UNTOUCHED)
        return _LEFT_ALONE.get(facts.region)

    def _is_autocast(self, facts: Facts) -> bool:
        """Does an autocast of the user's cast the operands here?"""
        is_around = self.captured.ambient not in (None, "enabled=False")
        return facts.region == "users" or (facts.region == "none" and is_around)

    def _obstacle(
        self, node: fx.Node, facts: Facts, operands: list[fx.Node], cls: OpClass, low: torch.dtype
    ) -> str | None:
        """Why an operation of a lowering class must nevertheless keep its traced dtypes; None if nothing forbids it."""
        if not any(self._is_float(x) for x in operands):
            return "has no fp32 operand"
        if node.kwargs.get("out") is not None:
            return "writes into out="
        if any(isinstance(a, torch.dtype) for a in graph.constants(node)):
            return "names a dtype"
        if not _contracts(node, facts.op, operands):
            return "contracts nothing: it only moves or multiplies values"
        if not self._has_kernel(facts.op, low):
            return f"has no {formats.name(low)} kernel on {self.captured.device.type}"
        if cls is OpClass.LOW and graph.storages(node) & frozenset(key for x in operands for key in graph.storages(x)):
            written = self.captured.pinned.get(node.name)
            return f"in place: {written}" if written else "is a view here"
        if _new_symbols(node, operands):
            return "its shape depends on data"
        tensors = [t for x in (*operands, node) for t in graph.tensors_of(graph.value_of(x))]
        for tensor in tensors:
            dtype = tensor.dtype
            if dtype != TRACED and (dtype.is_floating_point or dtype.is_complex):
                return f"a value is {formats.name(dtype)} in the user's program"
            if type(tensor) not in graph.PLAIN or tensor.layout is not torch.strided:
                return f"a value is a {type(tensor).__name__} with layout {tensor.layout}"
        return None

    def _has_kernel(self, op: str | None, low: torch.dtype) -> bool:
        device, name = self.captured.device, formats.name(low)
        if op in optable.NO_LOW_KERNEL.get(device.type, ()) or (op == "lstm" and _patches.lstms_stay_wide(device.type)):
            return False
        return op not in optable.NEEDS_NATIVE.get((device.type, name), ()) or formats.native_support(device, name)[0]

    def _wanted(
        self, node: fx.Node, op: str | None, cls: OpClass, low: torch.dtype, operands: list[fx.Node]
    ) -> tuple[torch.dtype | None, ...]:
        """The dtype that each operand must arrive in, by the class of the operation."""
        limit = optable.FOLLOWING_OPERANDS.get(op or "", len(operands))
        if cls is OpClass.LOW:
            written = set(capture.writes(node))  # what is written into a cast of it would be lost
            lowered = [i < limit and self._is_float(x) and x not in written for i, x in enumerate(operands)]
            return tuple(
                low if is_low else (TRACED if self._lowered(x) else None)
                for x, is_low in zip(operands, lowered, strict=True)
            )
        # A 0-dim tensor takes part in an operation without deciding its dtype (torch's promotion rule).
        counts = op in optable.SELECTING
        deciding = [x for x in operands[:limit] if self._is_float(x) and (counts or not self._is_scalar(x))]
        dtypes = {dtype for x in deciding for dtype in self.dtypes[x]}
        narrow = next(iter(dtypes - {TRACED}), TRACED)
        is_mixed = len(dtypes) == 2 and TRACED in dtypes  # two low formats widen each other to fp32
        if is_mixed and all(self._exists_in(x, narrow) for x in deciding if self._has(x, TRACED)):
            dtypes = {narrow}  # a mask of zeros and ones loses nothing, and widens nobody
        follow = next(iter(dtypes)) if len(dtypes) == 1 else TRACED
        if "low_residual" in self.relaxed and op == "add" and dtypes <= {low, TRACED} and self._is_residual(deciding):
            follow = low
        back = [TRACED if self._lowered(x) else None for x in operands]
        return tuple(
            follow if x in deciding and i < limit else (None if self._is_scalar(x) else back[i])
            for i, x in enumerate(operands)
        )

    def _saturated(
        self, node: fx.Node, op: str | None, operands: list[fx.Node], wanted: tuple[torch.dtype | None, ...]
    ) -> frozenset[int]:
        """The wider mask of an attention that computes low: its smallest number means "not this one", and stays finite."""
        mask = guards.mask_of(node, op)
        if mask is None:
            return frozenset()
        fits = self.known.get(mask, guards.UNKNOWN).fits
        pairs = enumerate(zip(operands, wanted, strict=True))
        return frozenset(i for i, (x, want) in pairs if x is mask and want and not self._has(x, want) and not fits(want))

    def _guarded(
        self,
        node: fx.Node,
        op: str | None,
        operands: list[fx.Node],
        wanted: tuple[torch.dtype | None, ...],
        saturated: frozenset[int],
    ) -> str | None:
        """Which numeric guard objects to these formats, and why; None if none does."""
        low = next((want for want in wanted if want not in (None, TRACED)), None)
        if op is None or low is None:
            return None
        pairs = list(zip(operands, wanted, strict=True))
        narrowed = [x for x, want in pairs if not self._lowered(x) and (want == low or (want is None and self._is_scalar(x)))]
        return guards.reason(
            guards.Call(
                node=node,
                op=op,
                low=low,
                narrowed=frozenset(x for x in narrowed if self._is_float(x)),
                saturated=frozenset(operands[i] for i in saturated),
                known=self.known,
                ops=self.ops,
            )
        )

    def _try(
        self, node: fx.Node, operands: list[fx.Node], wanted: tuple[torch.dtype | None, ...]
    ) -> tuple[Any, str | None]:
        """(fake result, None), or (None, why the operation does not take these formats)."""
        traced = graph.value_of(node)
        pairs = list(zip(operands, wanted, strict=True))
        try:
            if "::" in (self.ops[node] or "::"):  # not PyTorch's own
                value = graph.call_on_fakes(node, [self._convert(x, want) for x, want in pairs])
            else:
                value = self.calls(node, [self._later(x, want) for x, want in pairs])
            refusal = graph.difference(value, traced, format_of=TRACED)
            return graph.with_history_of(traced, value) if refusal is None else None, refusal
        except errors.FxampError:
            raise
        except Exception as error:  # anything the operation raises is its way to say no
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            return None, f"refuses {formats.name(self.low)}: {first_line[:80]}"

    def _later(self, node: fx.Node, want: torch.dtype | None) -> Any:
        """What `_convert` gives, or will give when it is needed."""
        value = self.current[node]
        if want is None or type(value) is not FakeTensor or self._has(node, want):
            return self._convert(node, want)
        return Later(node, value, want, lambda: self._convert(node, want))

    def _convert(self, node: fx.Node, want: torch.dtype | None) -> Any:
        if want is None or self._has(node, want):
            return self.current[node]
        key = (node, want)
        if key not in self.converted:
            self.converted[key] = _retype(self.current[node], want)
        return self.converted[key]

    # ---- questions ----------------------------------------------------------------------------------------------------
    def _low_in(self, module: str) -> torch.dtype:
        if self.note or not self.parts:
            return self.low
        if module not in self.low_of:
            self.low_of[module] = _low_in(module, self.variant, self.parts)
        return self.low_of[module]

    def _is_foreign(self, operands: list[fx.Node], own: torch.dtype) -> bool:
        """Would it follow what another part has lowered, or may a relaxed pass lower what its part does not?"""
        if not self.parts:
            return False
        return own == TRACED or any(self._lowered(x) and not self._has(x, own) for x in operands)

    def _floats(self, node: fx.Node) -> list[torch.Tensor]:
        """The tensors of a node's current value that were traced in fp32."""
        return self.floats[node]

    def _is_float(self, node: fx.Node) -> bool:
        return bool(self._floats(node))

    def _is_scalar(self, node: fx.Node) -> bool:
        value = self.current[node]
        return isinstance(value, torch.Tensor) and value.dim() == 0

    def _exists_in(self, node: fx.Node, dtype: torch.dtype) -> bool:
        """Is everything that the node can hold, whatever the inputs, a number of this format? An empty tensor holds none."""
        if TRACED not in self.dtypes[node]:
            return False
        return graph.is_empty(graph.value_of(node)) or self.known.get(node, guards.UNKNOWN).exists_in(dtype)

    def _has(self, node: fx.Node, dtype: torch.dtype) -> bool:
        return self.dtypes[node] <= {dtype}

    def _lowered(self, node: fx.Node) -> bool:
        return not self._has(node, TRACED)

    def _is_residual(self, operands: list[fx.Node]) -> bool:
        """Is it x + f(x), where x is wide and f(x) low? Both have one shape, which a bias or a mask has not, and x was there
        first, which in x + c * x**3 is the low one."""
        if len(operands) != 2 or len({graph.value_of(x).shape for x in operands}) > 1:
            return False
        wide, low = sorted(operands, key=self._is_low_inside)
        return self.position[wide] < self.position[low] and self._is_low_inside(low)

    def _is_low_inside(self, node: fx.Node) -> bool:
        """Is it low, or what dropout (which draws in fp32) made of a low value?"""
        return self._lowered(node.all_input_nodes[0] if self.ops[node] == "dropout" else node)

    def _format(self, operands: list[fx.Node], wanted: tuple[torch.dtype | None, ...]) -> str:
        pairs = list(zip(operands, wanted, strict=True))
        # Among tensors with dimensions, a 0-dim one takes part in whatever format it has.
        deciding = [(x, want) for x, want in pairs if want is not None or not self._is_scalar(x)] or pairs
        found = {want or dtype for x, want in deciding for dtype in self.dtypes[x]}
        found |= {dtype for x, _ in deciding for dtype in self.others[x]}
        return formats.name(*found) if len(found) == 1 else "+".join(sorted(map(formats.name, found))) or "-"

    def _output(self, node: fx.Node, output_dtype: str) -> torch.dtype | None:
        if not self._lowered(node):
            return None
        return None if output_dtype == "low" else TRACED


_FOLLOWING: Final = (OpClass.FOLLOW, OpClass.WIDEST)

_LEFT_ALONE: Final[Mapping[Region, str]] = MappingProxyType({
    "opted_out": "inside autocast(enabled=False)",
    "function": "inside an autograd.Function whose custom_fwd casts its inputs: autocast is off",
    "users": "inside an autocast region of the user's own, which PyTorch casts",
})  # fmt: skip
"""Region of the user's -> why fxamp decides nothing in it."""


# ---- helpers without state ----------------------------------------------------------------------------------------------
def _contracts(node: fx.Node, op: str | None, operands: Sequence[fx.Node]) -> bool:
    """Is anything summed? Outer products are not: they are made for positions and angles, which a low format would spoil, and
    no matrix unit is any faster at them. A layer with one input is a layer all the same."""
    if op == "einsum":
        return _has_summed_label(node)
    if op == "addr":
        return False
    if op not in ("matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm") or len(operands) < 2:
        return True
    named = (node.kwargs[name] for name in ("mat1", "batch1", "input", "self") if name in node.kwargs)
    size = graph.value_of(cast(fx.Node, next(named, operands[-2]))).shape[-1]
    return type(size) is not int or size != 1


def _has_summed_label(einsum: fx.Node) -> bool:
    """Does an einsum sum over a label, of more than one element, that two of its operands have?"""
    equation = einsum.args[0] if einsum.args else einsum.kwargs.get("equation")
    if not isinstance(equation, str):
        return True  # the form with lists of labels; rare, and treated as autocast would
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    shapes = [graph.value_of(x).shape for x in graph.operands(einsum)]
    num_readers, is_long = Counter[str](), set[str]()
    for term, shape in zip(terms, shapes, strict=True):
        left, _, right = term.partition("...")
        pairs = [*zip(left, shape, strict=False), *zip(reversed(right), reversed(shape), strict=False)]
        num_readers.update({label for label, _ in pairs})
        is_long |= {label for label, size in pairs if type(size) is not int or size != 1}
    shared = {label for label, num in num_readers.items() if num > 1 and label in is_long}
    return bool(shared - set(output)) if arrow else bool(shared)


def _new_symbols(node: fx.Node, operands: list[fx.Node]) -> bool:
    """Does the traced result have sizes that only running the operation can tell?"""
    if not any(map(graph.has_symbols, graph.tensors_of(graph.value_of(node)))):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # brings sympy: half a second at import

    own = free_unbacked_symbols(graph.tensors_of(graph.value_of(node)))
    return bool(own) and bool(own - free_unbacked_symbols([t for x in operands for t in graph.tensors_of(graph.value_of(x))]))


def _retype(value: Any, dtype: torch.dtype) -> Any:
    """A value with its fp32 or lowered tensors in `dtype`; everything else in it stays."""
    if isinstance(value, torch.Tensor):
        return graph.retyped(value, dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_retype(v, dtype) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_retype(v, dtype) for v in value)
    return value
