"""What holds for every graph that fxamp makes, under every policy. Each invariant is a function over a graph and its original.

Two graphs carry them. On Dynamo's graph, where operations have the user's names, stand the properties of the policy:
`check_invariants`. On the joint graph, after autograd, stand those of casts: `check_joint`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor

from fxamp import capture, formats, graph, guards, legal, ops, optable, passes, plan, rewrite
from fxamp.capture import Captured
from fxamp.errors import InvariantBroken
from fxamp.optable import OpClass
from fxamp.passes import Pass
from fxamp.policy import Policy, Rule
from fxamp.rewrite.lower import rounds_gradients
from fxamp.testing.values import difference

Leaf = tuple[torch.Tensor, torch.Tensor]
"""One tensor of a value: as the user's program was traced, and as it is after the rewrite."""


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A graph before and after, and what decided between them."""

    captured: Captured
    rewritten: fx.GraphModule
    policy: Policy
    variant: str
    output_dtype: Literal["traced", "low"]

    def pairs(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Nodes of the captured graph beside themselves in the rewritten one; those that a rewrite replaced are left out."""
        after = {node.name: node for node in self.rewritten.graph.nodes}
        for node in self.captured.gm.graph.nodes:
            if node.name in after:
                yield node, after[node.name]

    def broken(self, invariant: str, node: str, what: str) -> InvariantBroken:
        facts = self.captured.facts.get(node)
        return InvariantBroken(what, invariant=invariant, node=node, where=(facts.where if facts else "") or None)


def check_invariants(
    captured: Captured,
    rewritten: fx.GraphModule,
    policy: Policy,
    *,
    variant: str = "bf16",
    output_dtype: Literal["traced", "low"] = "traced",
) -> None:
    """Checks a rewritten Dynamo graph against the graph that was planned and the policy that it was planned by.

    Args: as for `plan.plan`, of which `rewritten` is the outcome.
    Raises: InvariantBroken, which names the invariant, the node and the user's line.
    """
    state = Rewrite(
        captured=captured, rewritten=rewritten, policy=policy, variant=variant, output_dtype=output_dtype
    )
    for check in INVARIANTS.values():
        check(state)
    for path, body in captured.bodies.items():
        inner = replace(state, captured=body, rewritten=graph.body(rewritten, path), output_dtype="low")
        is_function = any(capture.name_of(node) == capture.AUTOGRAD_FUNCTION for node in captured.callers[path])
        runs_as_given = is_function and (body.function is None or body.function.cast_inputs is not None)
        of_policy = () if runs_as_given else (observable_dtypes, allowed_formats)
        for check in (*of_policy, non_floats, no_redundant_casts):
            check(inner)


# ---- on Dynamo's graph --------------------------------------------------------------------------------------------------
def observable_dtypes(state: Rewrite) -> None:
    """What leaves the graph, comes into it, or is written in it has the dtype that it was traced with."""
    for before, after in state.pairs():
        if before.op == "placeholder":
            _same_dtypes(state, "observable dtypes", before.name, "the input", before, after)
        if before.op == "output" and state.output_dtype == "traced":
            for x, y in zip(graph.operands(before), graph.operands(after), strict=True):
                _same_dtypes(state, "observable dtypes", x.name, "the output", x, y)
        if before.op in ("placeholder", "output"):
            continue
        for x, y in zip(capture.writes(before), capture.writes(after), strict=True):
            _same_dtypes(state, "observable dtypes", before.name, f"the written {x.name}", x, y)
            owner = graph.own_cast(y)
            if owner is not None and len(y.all_input_nodes[0].users) > 1:
                raise state.broken("observable dtypes", before.name, f"writes to a copy of {x.name}, which others read")


def allowed_formats(state: Rewrite) -> None:
    """Every operation gets its operands in a format that the policy allows."""
    lows = {formats.STORAGE[r.precision] for r in state.policy.rules if r.precision in formats.STORAGE}
    nodes = state.captured.gm.graph.nodes
    known = guards.known(nodes, {n: state.captured.facts[n.name].op for n in nodes}, state.captured.pinned)
    exact = {node.name: values for node, values in known.items()}
    for before, after in state.pairs():
        facts = state.captured.facts[before.name]
        if before.op not in ("call_function", "call_method") or facts.op in optable.METADATA or before.target in _PLUMBING:
            continue
        if isinstance(before.target, HigherOrderOperator):
            continue  # the operations inside are checked
        verdict = state.policy.decide(facts.op, facts.module, facts.classes)
        cls, low = verdict.cls, formats.STORAGE[verdict.precision or state.variant]
        free, fixed = _deciding(facts.op, cls, before, after)
        held = {now.dtype for _, now in free}
        where = f"{facts.op or before.name} ({cls.value})"
        for traced, now in fixed:
            if now.dtype != traced.dtype:
                raise state.broken("allowed formats", before.name, f"{where} reads {formats.name(now.dtype)}")
        if len(held) > 1:
            raise state.broken(
                "allowed formats", before.name, f"{where} reads {' and '.join(sorted(map(formats.name, held)))}"
            )
        allowed = {plan.TRACED, low} if cls is OpClass.LOW else {plan.TRACED, formats.STORAGE[state.variant], *lows}
        if cls in (OpClass.HIGH, OpClass.KEEP) or facts.region != "none" or state.captured.ambient is not None:
            allowed = {plan.TRACED}
        if _is_foreign(before) or any(graph.storages(x) & graph.storages(before) for x in capture.writes(before)):
            allowed = {plan.TRACED}
        if held - allowed:
            raise state.broken("allowed formats", before.name, f"{where} reads {formats.name(next(iter(held)))}")
        for x in graph.operands(after) if cls in (OpClass.WIDEST, OpClass.FOLLOW) else ():
            values = exact.get(_origin(x).name, guards.UNKNOWN)
            if _is_narrowing(x) and not values.exists_in(graph.value_of(x).dtype):
                raise state.broken("allowed formats", before.name, f"{where} gets a cast down that rounds")


def non_floats(state: Rewrite) -> None:
    """What was not float32 is what it was; casts of fxamp start and end in float32."""
    for before, after in state.pairs():
        for traced, now in _leaves(before, after):
            if traced.dtype not in (plan.TRACED, now.dtype):
                raise state.broken("non-floats", before.name, f"is {now.dtype}, traced {traced.dtype}")
    traced = {node.name: node for node in state.captured.gm.graph.nodes}
    for node in state.rewritten.graph.nodes:
        if graph.own_cast(node) is None:
            continue
        source = _origin(node)
        held = graph.tensors_of(graph.value_of(traced[source.name])) if source.name in traced else []
        if held and all(t.dtype != plan.TRACED for t in held):
            raise state.broken("non-floats", source.name, "is cast, and was not traced as float32")


def no_redundant_casts(state: Rewrite) -> None:
    """No cast changes nothing, and none reads another: but where memory that somebody writes lies between the two. One cast
    serves all readers, but where their gradients would meet behind it in the narrower format."""
    seen: dict[tuple[fx.Node, torch.dtype, int], fx.Node] = {}
    modes = capture.mode_indices(state.rewritten.graph.nodes)
    for node in state.rewritten.graph.nodes:
        mark = graph.own_cast(node)
        if mark is None:
            continue
        (source,) = node.all_input_nodes
        origin = _origin(source).name
        if mark.src == mark.dst:
            raise state.broken("casts", origin, f"is cast from {mark.src} to {mark.dst}")
        if source.name != origin and origin not in state.captured.pinned:
            raise state.broken("casts", origin, f"is cast to {mark.src}, and that again to {mark.dst}")
        if origin in state.captured.pinned or _may_alias(state, node):
            continue
        if rounds_gradients(source, graph.value_of(node).dtype):
            if len(node.users) > 1:
                raise state.broken("casts", origin, f"has one cast to {mark.dst}, where gradients of its readers meet")
            continue
        twin = seen.setdefault((source, graph.value_of(node).dtype, modes[node]), node)
        if twin is not node and not _may_alias(state, twin):
            raise state.broken("casts", origin, f"is cast to {mark.dst} twice")


def recorded_values(state: Rewrite) -> None:
    """The value recorded at each node is the one that running the graph on fake tensors gives."""
    try:
        _repropagate(state)
    except InvariantBroken:
        raise
    except Exception as error:
        raise state.broken("recorded values", "", f"the graph does not run on fake tensors: {error}") from error


def idempotence(state: Rewrite) -> None:
    """Planning and rewriting what was rewritten changes nothing."""
    examples = [graph.value_of(node) for node in state.rewritten.graph.find_nodes(op="placeholder")]
    first = capture.capture(state.rewritten, examples)
    again = rewrite_of(first, state.policy, variant=state.variant, output_dtype=state.output_dtype)
    _same_code(state, "idempotence", first.gm, again, "rewriting it again")


def identity(state: Rewrite) -> None:
    """In fp32, and under a policy that keeps everything, the graph is the user's."""
    rules = tuple(rule for rule in state.policy.rules if rule.precision not in ("bf16", "fp16"))
    without = Policy(preset=state.policy.preset, rules=rules)
    in_fp32 = rewrite_of(state.captured, without, variant="fp32")
    _same_code(state, "identity", state.captured.gm, in_fp32, "rewriting it for fp32")
    kept = Policy(rules=(Rule(kind="op", pattern="*", precision="keep"),))
    keeping = rewrite_of(state.captured, kept, variant=state.variant)
    _same_code(state, "identity", state.captured.gm, keeping, "a policy that keeps everything")


INVARIANTS: Final[Mapping[str, Callable[[Rewrite], None]]] = {
    "observable dtypes": observable_dtypes,
    "allowed formats": allowed_formats,
    "non-floats": non_floats,
    "casts": no_redundant_casts,
    "recorded values": recorded_values,
    "idempotence": idempotence,
    "identity": identity,
}
"""Everything that `check_invariants` checks, by name, in order."""


def rewrite_of(
    captured: Captured, policy: Policy, *, variant: str = "bf16", output_dtype: Literal["traced", "low"] = "traced"
) -> fx.GraphModule:
    """The graph that fxamp makes of a captured one, as it goes to autograd."""
    made = plan.plan(captured, policy, variant=variant, output_dtype=output_dtype)
    rewritten = graph.clone(captured.gm)
    check = legal.checker(legal.REWRITTEN, captured.gm, output_dtypes=output_dtype == "traced")
    passes.run(rewritten, rewrite.passes_for(captured, made), check)
    return rewritten


# ---- on the joint graph -------------------------------------------------------------------------------------------------
def check_joint(before: fx.GraphModule, after: fx.GraphModule, *, exact: bool = True) -> None:
    """Checks a joint graph against itself before the passes on it: `variant.joint_before`, `variant.joint`.

    EXACT passes keep every bit of every output (both are run by `fx.Interpreter` on random inputs), leave the user's casts,
    and of fxamp's leave none that another makes needless. Every recorded value has the type and shape of the computed one.

    Args: exact=False, for graphs with RELAXED passes, leaves out the comparison of bits.
    Raises: InvariantBroken.
    """
    _joint_casts(after)
    had, has = _num_users_casts(before), _num_users_casts(after)
    if had != has:
        raise InvariantBroken(f"{had} casts of the user's became {has}", invariant="users' casts", node="", where=None)
    if _has_symbols(t for node in before.graph.nodes for t in graph.tensors_of(graph.value_of(node))):
        return
    with torch.random.fork_rng(devices=()):
        got, want = (_seeded(_Recomputed(gm), _random_inputs(gm)) for gm in (after, before))
    outputs = list(graph.operands(after.graph.output_node()))
    pairs = zip(graph.tensors_of(got), graph.tensors_of(want), strict=True)
    for node, (g, w) in zip([n for n in outputs if graph.tensors_of(graph.value_of(n))], pairs, strict=True):
        if g.dtype != w.dtype or exact and difference(g, w):
            raise _joint_broken("exact bits", node, f"differs by {difference(g, w):g}")


def _num_users_casts(gm: fx.GraphModule) -> int:
    """Casts that neither fxamp wrote nor PyTorch where it took an operation apart; those it wrote are moved like fxamp's."""
    casts = [n for n in gm.graph.nodes if n.target is ops.ROUND_TO or n.target is graph.JOINT_CAST]
    return sum(not graph.is_own_cast(n) and not graph.is_of_a_decomposition(n) for n in casts)


def check_exact(pass_: Pass, before: fx.GraphModule) -> fx.GraphModule:
    """Runs one EXACT pass on a copy of a joint graph, checks that it kept every bit, and returns what it made.

    Raises: InvariantBroken.
    """
    after = graph.clone(before)
    pass_(after)
    after.recompile()
    inputs = _random_inputs(before)
    with torch.random.fork_rng(devices=()):
        got, want = (_seeded(fx.Interpreter(gm), _copied(inputs)) for gm in (after, before))
    for g, w in zip(graph.tensors_of(got), graph.tensors_of(want), strict=True):
        if g.dtype != w.dtype or difference(g, w):
            raise InvariantBroken(f"{pass_!r} changed an output", invariant="exact bits", node="", where=None)
    return after


def _joint_casts(gm: fx.GraphModule) -> None:
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in gm.graph.nodes:
        mark = graph.own_cast(node)
        if mark is None:
            continue
        source, dtype = node.all_input_nodes[0], graph.value_of(node).dtype
        if not node.users:
            raise _joint_broken("casts", node, "is a cast that nothing reads")
        if mark.src == mark.dst:
            raise _joint_broken("casts", node, f"casts {mark.src} to {mark.dst}")
        inner = graph.own_cast(source)
        if inner is not None and formats.is_lossless(*(graph.value_of(n).dtype for n in (source.all_input_nodes[0], source))):
            raise _joint_broken("casts", node, f"goes {inner.src} to {inner.dst} to {mark.dst} without need")
        twin = seen.setdefault((source, dtype, *(node.meta.get(key) for key in ("recompute", "ac_graph_id"))), node)
        if twin is not node:
            raise _joint_broken("casts", node, f"is the cast {twin.name} once more")


class _Recomputed(fx.Interpreter):
    """Runs a graph, and compares what comes out with what is recorded."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            _same_value(n, graph.value_of(n), result)
        return result


def _same_value(node: fx.Node, recorded: Any, computed: Any) -> None:
    for r, c in zip(graph.tensors_of(recorded), graph.tensors_of(computed), strict=False):
        if r.dtype != c.dtype or tuple(r.shape) != tuple(c.shape):
            what = f"is recorded as {r.dtype}{list(r.shape)}, and is {c.dtype}{list(c.shape)}"
            raise _joint_broken("recorded values", node, what)


def _joint_broken(invariant: str, node: fx.Node, what: str) -> InvariantBroken:
    where, _ = capture.source_line(node)
    return InvariantBroken(f"{node.name} {what}", invariant=invariant, node=node.name, where=where or None)


def _seeded(interpreter: fx.Interpreter, inputs: Sequence[Any]) -> Any:
    torch.manual_seed(0)
    return interpreter.run(*inputs)


def _random_inputs(gm: fx.GraphModule) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = graph.value_of(node)
        if not isinstance(value, torch.Tensor):
            made.append(value)
        elif value.is_floating_point():
            made.append(torch.randn(value.shape, generator=generator).to(value.dtype).contiguous())
        else:
            made.append(torch.randint(0, 2, value.shape, generator=generator).to(value.dtype))
    return made


def _copied(values: list[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in values]


def _has_symbols(tensors: Iterable[torch.Tensor]) -> bool:
    return any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape)


# ---- questions ----------------------------------------------------------------------------------------------------------
_PLUMBING: Final = frozenset((torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast))


def _leaves(before: fx.Node, after: fx.Node) -> list[Leaf]:
    traced, now = graph.tensors_of(graph.value_of(before)), graph.tensors_of(graph.value_of(after))
    return list(zip(traced, now, strict=True))


def _operand_leaves(before: fx.Node, after: fx.Node) -> list[list[Leaf]]:
    """Leaves of each operand of a node. A tuple that was cast part by part is several operands of the rewritten node."""
    now = [t for x in graph.operands(after) for t in graph.tensors_of(graph.value_of(x))]
    found: list[list[Leaf]] = []
    for x in graph.operands(before):
        traced = graph.tensors_of(graph.value_of(x))
        found.append(list(zip(traced, now[: len(traced)], strict=True)))
        now = now[len(traced) :]
    assert not now, before
    return found


def _deciding(op: str | None, cls: OpClass, before: fx.Node, after: fx.Node) -> tuple[list[Leaf], list[Leaf]]:
    """(float32-traced leaves that must agree on an allowed format, leaves that must be as traced)."""
    operands = _operand_leaves(before, after)
    limit = optable.FOLLOWING_OPERANDS.get(op or "", len(operands)) if cls is OpClass.FOLLOW else len(operands)
    free: list[Leaf] = []
    fixed = [leaf for leaves in operands[limit:] for leaf in leaves]
    for traced, now in (leaf for leaves in operands[:limit] for leaf in leaves):
        if traced.dtype != plan.TRACED:
            fixed.append((traced, now))
        elif now.dim() or cls in (OpClass.LOW, OpClass.HIGH, OpClass.KEEP) or op in optable.SELECTING:
            free.append((traced, now))
    return free, fixed


def _is_foreign(node: fx.Node) -> bool:
    """Does it hold floats, in or out, that the user made of another type? Then it is promoted as the user's program is."""
    tensors = [t for n in (node, *node.all_input_nodes) for t in graph.tensors_of(graph.value_of(n))]
    return any((t.is_floating_point() or t.is_complex()) and t.dtype != plan.TRACED for t in tensors)


def _is_narrowing(node: fx.Node) -> bool:
    if graph.own_cast(node) is None or not graph.value_of(node).dim():
        return False
    source, result = graph.value_of(node.all_input_nodes[0]), graph.value_of(node)
    return not formats.is_lossless(source.dtype, result.dtype)


def _origin(node: fx.Node) -> fx.Node:
    """The value of the user's program behind a cast, or a part of a cast tuple."""
    while graph.own_cast(node) is not None:
        node = node.all_input_nodes[0]
    return node


def _may_alias(state: Rewrite, cast: fx.Node) -> bool:
    """Is the cast read by an operation that may hand on its memory, so that it must be read by that one alone?"""
    captured = state.captured
    return any(user.name in captured.hands_on or user.name not in captured.facts for user in cast.users)


def _same_dtypes(state: Rewrite, invariant: str, node: str, what: str, before: fx.Node, after: fx.Node) -> None:
    for traced, now in _leaves(before, after):
        if traced.dtype != now.dtype:
            raise state.broken(invariant, node, f"{what} is {now.dtype}, traced {traced.dtype}")


def _same_code(state: Rewrite, invariant: str, before: fx.GraphModule, after: fx.GraphModule, what: str) -> None:
    lines, others = str(before.graph).splitlines(), str(after.graph).splitlines()
    for node, line, other in zip(before.graph.nodes, lines[1:], others[1:], strict=False):
        if line != other:
            raise state.broken(invariant, node.name, f"{what} makes `{other.strip()}` of `{line.strip()}`")
    if len(lines) != len(others):
        raise state.broken(invariant, "", f"{what} gives {len(others)} nodes, not {len(lines)}")


# ---- running on fake tensors --------------------------------------------------------------------------------------------
def _repropagate(state: Rewrite) -> None:
    nodes = list(state.rewritten.graph.nodes)
    if any(getattr(node.target, "__name__", "").endswith("_increment_nesting") for node in nodes):
        return  # functorch levels of this run are not those of the traced one
    values: dict[fx.Node, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for node in nodes:
            values[node] = _again(node, values, stack)
            if node.op == "output":
                continue
            recorded = graph.tensors_of(graph.value_of(node))
            for r, c in zip(recorded, graph.tensors_of(values[node]), strict=False):
                if _described(r) != _described(c):
                    what = f"{node.name} is recorded as {_described(r)}, and is {_described(c)}"
                    raise state.broken("recorded values", node.name, what)


def _again(node: fx.Node, values: dict[fx.Node, Any], stack: contextlib.ExitStack) -> Any:
    recorded = graph.value_of(node)
    tensors = graph.tensors_of(recorded)
    if node.op == "placeholder" or node.op == "get_attr":
        return _fresh(recorded)
    if node.op == "output":
        return None
    if node.target is torch.amp.autocast_mode._enter_autocast:
        device, dtype, enabled, *_ = (*node.args, *node.kwargs.values())
        region = stack.enter_context(contextlib.ExitStack())  # left at the latest with `stack`
        region.enter_context(torch.autocast(str(device), dtype=dtype, enabled=bool(enabled)))  # pyright: ignore[reportArgumentType]
        return region
    if node.target is torch.amp.autocast_mode._exit_autocast:
        values[node.all_input_nodes[0]].close()
        return None
    if isinstance(node.target, HigherOrderOperator) or not tensors or any(type(t) is not FakeTensor for t in tensors):
        return recorded  # bodies, mode switches and tensors of other types are the recorder's to judge
    if _has_symbols(tensors):
        return recorded  # a new run has new symbols
    again = graph.call_on_fakes(node, [values[x] for x in graph.operands(node)])
    # How `matmul` lays out its result hangs on whether an operand requires a gradient.
    return graph.with_history_of(recorded, again) if len(graph.tensors_of(again)) == len(tensors) else again


def _fresh(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return graph.with_history_of(value, fresh)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}"
