"""PyTorch's operator database through fxamp: every operation, forward and backward, beside float64.

Each sample becomes a small program that runs the operation twice: on the inputs as they are ("alone"), and on inputs that a
lowered operation made ("fed"), so that operations which follow their operands are seen in the low format too:

    def program(*inputs):  # each half has inputs of its own, so that gradients tell the halves apart
        return op(*inputs[:n]), op(*map(lowered, inputs[n:]))

Dynamo traces it once; every precision is compiled from that graph. What is compared with what:

    computed in fp32    |fxamp - f64|  <=  MARGIN * (|eager fp32 - f64| + eps_fp32 * |f64|)        inputs rounded where fed
    computed low        |fxamp - f64|  <=  MARGIN * (|eager low - f64| + |f64(rounded) - f64| + eps_low * |f64|)

with norms over whole tensors: the error that the format itself makes, by PyTorch's own kernel (or autocast, where PyTorch has
no kernel) and by rounding the inputs, is the yardstick. Integer and bool results equal eager fp32's.
"""

from __future__ import annotations

import itertools
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import fxamp
from fxamp import formats
from fxamp.plan import Decision

PRECISIONS: Final = ("bf16", "fp16")
MARGIN: Final = 8.0
"""Times the error of the format. Another order of summation alone makes a factor of a few."""
UNINITIALISED: Final = ("empty", "new_empty")
"""Beginnings of the names of operations whose results hold whatever the memory held: only dtype and shape are compared."""
ILL_POSED: Final = ("linalg_pinv_singular",)
"""Operations without a stable result: the pseudo-inverse of a product of exact low rank, which has full rank once rounded.
Autocast raises there. Only dtype and shape are compared."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one operation did in one precision, over its samples."""

    op: str
    precision: str
    status: str
    """"ok", "fault", or why it was not compared: "no sample", "not captured", "fails without fxamp"."""
    forward: float = math.nan
    """Largest error of a result, as a part of what is allowed."""
    backward: float = math.nan
    """The same for gradients."""
    formats: tuple[str, ...] = ()
    """What the operations of the fed half computed in."""
    num_samples: int = 0
    faults: tuple[str, ...] = field(default=(), repr=False)


def database() -> dict[str, OpInfo]:
    """All operations with float32 samples on the CPU, by name, in the order of PyTorch's list."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {info.formatted_name: info for info in op_db if info.supports_dtype(torch.float32, "cpu")}


# ---- one program --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Program:
    """An operation with the arguments of one sample, as a function of its float32 tensors."""

    name: str
    op: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    places: tuple[int, ...]
    """Where in `leaves` the tensors are that are inputs."""
    trained: tuple[bool, ...]
    """Which of the inputs want a gradient."""

    @staticmethod
    def of(info: OpInfo, sample: SampleInput) -> Program:
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if _is_plain_float(leaf)]
        trained = tuple(leaves[i].requires_grad for i in places)
        return Program(info.formatted_name, info.op, leaves, spec, tuple(places), trained)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.leaves[i].detach() for i in self.places]

    def call(self, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> Any:
        """The operation on `inputs`; with a dtype, tensors that are none of them and dtype arguments become it too."""
        leaves = list(self.leaves)
        for i, value in zip(self.places, inputs, strict=True):
            leaves[i] = value
        if dtype is not None:
            leaves = [_widened(leaf, dtype) for leaf in leaves]
        value, args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(value, *args, **kwargs)

    def both(self, *inputs: torch.Tensor) -> tuple[Any, Any]:
        """On the first half of `inputs`, then on the second."""
        return self.call(inputs[: len(self.places)]), self.call(inputs[len(self.places) :])

    def twice(self, *inputs: torch.Tensor) -> tuple[Any, Any]:
        """Alone on the first half of `inputs`, then fed with the second."""
        alone, fed = inputs[: len(self.places)], inputs[len(self.places) :]
        first = self.call(alone)
        made = [torch.prelu(x, torch.ones(1)) for x in fed]  # FEED
        return first, self.call(made)


def _is_plain_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 and leaf.layout == torch.strided


def _widened(leaf: Any, dtype: torch.dtype) -> Any:
    if dtype == torch.float64:
        if leaf is torch.float32:
            return dtype
        if leaf is torch.complex64 or (isinstance(leaf, torch.Tensor) and leaf.dtype == torch.complex64):
            return torch.complex128 if leaf is torch.complex64 else leaf.to(torch.complex128)
    return leaf


@dataclass(frozen=True)
class Outcome:
    """Results and gradients of a run."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


def run(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], trained: Sequence[bool], *, seed: int = 0) -> Outcome:
    torch.manual_seed(seed)
    mine = [x.detach().clone().requires_grad_(wants) for x, wants in zip(inputs, trained, strict=True)]
    outputs = [t for t in tree_leaves(fn(*mine)) if isinstance(t, torch.Tensor)]
    results = [t.detach() for t in outputs]
    roots = [t for t in outputs if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    leaves = [x for x in mine if x.requires_grad]
    if not (leaves and roots):
        return Outcome(results, [])
    gradients = torch.autograd.grad(roots, leaves, [_cotangent(t) for t in roots], allow_unused=True)
    return Outcome(results, list(gradients))


def _cotangent(t: torch.Tensor) -> torch.Tensor:
    """Fixed, with no symmetry to hide behind, and exact in every format."""
    steps = torch.arange(t.numel(), dtype=torch.float64) % 7
    return ((steps - 2.5) / 4).view(t.shape).to(t.dtype)


# ---- compiling ----------------------------------------------------------------------------------------------------------
class Switch:
    """A Dynamo backend that compiles each graph once in every precision and runs whichever is chosen."""

    def __init__(self, precisions: Sequence[str]) -> None:
        self.amps = {p: fxamp.Amp(precision=p, lower="aot_eager", scaling=None) for p in precisions}
        self.chosen = ""
        self.failed: dict[str, str] = {}

    def __call__(self, gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        compiled: dict[str, Callable[..., Any]] = {}
        for precision, amp in self.amps.items():
            try:
                compiled[precision] = amp(gm, examples)
            except exceptions_allowed_to_be_fallback:  # Dynamo breaks the graph there, under every backend
                raise
            except Exception as error:
                self.failed[precision] = _told(error)
        return lambda *inputs: compiled.get(self.chosen, gm.forward)(*inputs)

    def decisions(self, precision: str) -> list[Decision]:
        return [d for g in self.amps[precision].graphs for v in g.variants.values() for d in v.plan.decisions.values()]


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/fxamp/" in f.filename or "/tests/ops" in f.filename]
    place = f" ({ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}{place}"


# ---- judging ------------------------------------------------------------------------------------------------------------
@dataclass
class _Tally:
    forward: float = 0.0
    backward: float = math.nan
    formats: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def sweep(info: OpInfo, *, precisions: Sequence[str] = PRECISIONS, num_samples: int = 3) -> Iterator[Verdict]:
    """Runs the first `num_samples` samples of an operation that compile, in every precision."""
    tallies = {p: _Tally() for p in precisions}
    done, status = 0, "no sample"
    for program in _programs(info, 3 * num_samples):
        if done == num_samples:
            break
        outcome = _judge(program, tallies)
        if outcome == "ok":
            done += 1
        elif status != "fault":
            status = outcome
    for precision, tally in tallies.items():
        verdict = "fault" if tally.faults else ("ok" if done else status)
        yield Verdict(
            op=info.formatted_name,
            precision=precision,
            status=verdict,
            forward=tally.forward,
            backward=tally.backward,
            formats=tuple(sorted(tally.formats - {"-"})),
            num_samples=done,
            faults=tuple(dict.fromkeys(tally.faults)),
        )


def _programs(info: OpInfo, limit: int) -> Iterator[Program]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd), limit)
        programs = [Program.of(info, sample) for sample in samples]
    # Programs of scalars last: a 0-dim tensor decides no format.
    yield from sorted(programs, key=lambda p: all(x.dim() == 0 or x.numel() == 0 for x in p.inputs))


def _judge(program: Program, tallies: dict[str, _Tally]) -> str:
    """Runs one program in all precisions, adds what was seen to the tallies, and says how it went."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = _Reference(program)
        except Exception as error:
            return f"fails in eager: {_told(error)}"
        torch._dynamo.reset()
        switch = Switch(list(tallies))
        compiled = torch.compile(program.twice, backend=switch)
        for precision, tally in tallies.items():
            switch.chosen = precision
            try:
                got = run(compiled, 2 * program.inputs, 2 * program.trained)
                if precision in switch.failed:
                    raise RuntimeError(switch.failed[precision])
            except Exception as error:
                if _fails_anyway(program):
                    return "fails without fxamp"
                tally.faults.append(_told(error))
                continue
            if not any(map(len, _split(switch.decisions(precision)))):
                return "not captured"
            want.compare(got, switch.decisions(precision), formats.STORAGE[precision], tally)
    return "ok"


def _fails_anyway(program: Program) -> bool:
    torch._dynamo.reset()
    try:
        run(torch.compile(program.twice, backend="aot_eager"), 2 * program.inputs, 2 * program.trained)
    except Exception:
        return True
    return False


class _Reference:
    """What a program gives in eager, in float64, fp32 and the low formats."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.eager = run(program.twice, 2 * program.inputs, 2 * program.trained)
        again = run(program.twice, 2 * program.inputs, 2 * program.trained, seed=1)
        self.draws = any(not torch.equal(a, b) for a, b in zip(self.eager.results, again.results, strict=True))
        """Does it draw random numbers? Then eager fp32 with the same seed is the truth: float64 draws others."""
        self.runs: dict[tuple[str, torch.dtype | None], Outcome | None] = {}

    def exact(self, rounded: torch.dtype | None) -> Outcome | None:
        """In float64, of inputs rounded to a format."""
        return self._run("f64", torch.float64, rounded)

    def fp32(self, rounded: torch.dtype | None) -> Outcome | None:
        return self._run("fp32", torch.float32, rounded)

    def low(self, dtype: torch.dtype) -> Outcome | None:
        """By PyTorch's own kernel for the format; where there is none, under CPU autocast."""
        return self._run("low", dtype, dtype) or self._run("autocast", torch.float32, dtype)

    def _run(self, kind: str, dtype: torch.dtype, rounded: torch.dtype | None) -> Outcome | None:
        key = (kind, rounded)
        if key not in self.runs:
            inputs = [(x if rounded is None else x.to(rounded)).to(dtype) for x in self.program.inputs]
            around = torch.autocast("cpu", rounded, enabled=kind == "autocast")
            try:
                with around:
                    self.runs[key] = run(lambda *xs: self.program.call(xs, dtype), inputs, self.program.trained)
            except Exception:
                self.runs[key] = None
        return self.runs[key]

    def compare(self, got: Outcome, decisions: list[Decision], low: torch.dtype, tally: _Tally) -> None:
        if len(got.results) != len(self.eager.results):
            tally.faults.append(f"{len(got.results)} results, eager has {len(self.eager.results)}")
            return
        for i, (mine, theirs) in enumerate(zip(got.results, self.eager.results, strict=True)):
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                tally.faults.append(
                    f"result {i} is {mine.dtype}{list(mine.shape)}, eager's {theirs.dtype}{list(theirs.shape)}"
                )
                return
        if self.program.name.startswith((*UNINITIALISED, *ILL_POSED)):
            return
        for name, half, part in zip(("alone", "fed"), _split(decisions), _halves(got), strict=True):
            is_low = any(d.computes not in ("-", "fp32") for d in half)
            yardstick = self._yardstick(is_low, low, fed=name == "fed")
            if name == "fed":
                tally.formats |= {d.computes for d in half}
            if yardstick is None or len(yardstick.truth.results) != len(part.results):
                continue
            forward, told = yardstick.measure(part.results, "results")
            tally.forward = max(tally.forward, forward)
            tally.faults += [f"{name}: {text}" for text in told]
            if part.gradients and len(yardstick.truth.gradients) == len(part.gradients):
                # Gradients of fed inputs come back through the feeding casts.
                backward, told = yardstick.measure(part.gradients, "gradients", low if name == "fed" else None)
                tally.backward = max(backward, 0.0 if math.isnan(tally.backward) else tally.backward)
                tally.faults += [f"{name}: {text}" for text in told]

    def _drawn(self, low: torch.dtype, *, fed: bool) -> Outcome:
        """What a half gives in eager fp32 with the random numbers that its place in the program entails."""
        inputs = self.program.inputs + [x.to(low).to(x.dtype) for x in self.program.inputs]
        pair = _halves(run(self.program.both, inputs, 2 * self.program.trained))
        return pair[fed]

    def _yardstick(self, is_low: bool, low: torch.dtype, *, fed: bool) -> _Yardstick | None:
        if self.draws:
            drawn = self._drawn(low, fed=fed)
            return _Yardstick(drawn, drawn, None, None, low if is_low else torch.float32)
        truth, plain = self.exact(low if fed else None), self.fp32(low if fed else None)
        if truth is None or plain is None:
            return None
        if not is_low:
            return _Yardstick(truth, plain, plain, truth, torch.float32)
        return _Yardstick(truth, plain, self.low(low), self.exact(low), low)


@dataclass(frozen=True)
class _Yardstick:
    """What a half is measured with."""

    truth: Outcome
    """In float64, of the inputs that the half was given."""
    plain: Outcome
    """In eager fp32, of the same inputs."""
    kernel: Outcome | None
    """In eager, in the format that the half computed in; None if PyTorch can neither do that nor autocast it."""
    shifted: Outcome | None
    """In float64, of the inputs that `kernel` was given."""
    dtype: torch.dtype
    """The format that the half computed in."""

    def measure(
        self, values: Sequence[torch.Tensor | None], kind: str, at_least: torch.dtype | None = None
    ) -> tuple[float, list[str]]:
        """(largest error as a part of what is allowed, what is wrong) of results or gradients."""
        worst, told = 0.0, list[str]()
        eps = torch.finfo(at_least or self.dtype).eps
        for i, value in enumerate(values):
            truth, plain, kernel, shifted = (
                getattr(o, kind)[i] if o is not None and len(getattr(o, kind)) == len(values) else None
                for o in (self.truth, self.plain, self.kernel, self.shifted)
            )
            if value is None or truth is None or plain is None:
                if (value is None) != (plain is None):
                    told.append(f"{kind}[{i}] is {value}, eager's is {plain}")
                continue
            if not (value.is_floating_point() or value.is_complex()):
                if not torch.equal(value, plain):
                    told.append(f"{kind}[{i}] ({value.dtype}) is not eager's")
                continue
            allowed = eps * _norm(truth) + formats.smallest(at_least or self.dtype) * math.sqrt(truth.numel())
            if kernel is not None and shifted is not None:
                allowed += _distance(kernel, shifted) + _distance(shifted, truth)
            part = _distance(value, truth) / (MARGIN * allowed + 1e-30)
            within = truth.abs() < torch.finfo(at_least or self.dtype).max
            for same in (plain, kernel):
                if same is not None and torch.equal((value.isfinite() != same.isfinite()) & within, ~torch.ones_like(within)):
                    break
            else:
                told.append(f"{kind}[{i}] is finite elsewhere than eager's")
            if not part <= 1:
                told.append(f"{kind}[{i}] has {part:.3g} times the allowed error ({formats.name(at_least or self.dtype)})")
            worst = max(worst, part)
        return worst, told


def _halves(outcome: Outcome) -> tuple[Outcome, Outcome]:
    r, g = len(outcome.results) // 2, len(outcome.gradients) // 2
    return Outcome(outcome.results[:r], outcome.gradients[:g]), Outcome(outcome.results[r:], outcome.gradients[g:])


def _split(decisions: list[Decision]) -> tuple[list[Decision], list[Decision]]:
    """(those of the alone half, those of the fed half)."""
    feeds = [i for i, d in enumerate(decisions) if d.facts.code.endswith("# FEED")]
    return (decisions[: feeds[0]], decisions[feeds[-1] + 1 :]) if feeds else (decisions, [])


def _norm(t: torch.Tensor) -> float:
    return torch.linalg.vector_norm(t.to(torch.complex128 if t.is_complex() else torch.float64).nan_to_num()).item()


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| where both are finite."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return torch.linalg.vector_norm((a - b)[a.isfinite() & b.isfinite()]).item()
