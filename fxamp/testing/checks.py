"""A whole check of one program: its graphs, and what they compute beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch._inductor.config as inductor_config

from fxamp import capture as capturing
from fxamp import formats, graph, legal, passes, rewrite
from fxamp.backend import Amp
from fxamp.capture import Captured
from fxamp.errors import FxampError, InvariantBroken
from fxamp.lower import aot_eager
from fxamp.policy import Policy
from fxamp.testing.invariants import check_invariants, check_joint, rewrite_of
from fxamp.testing.program import Program
from fxamp.testing.trace import first_seen, trace
from fxamp.testing.values import SLACK, SLACK_ULPS, Rounded, Run, difference, gradients, run, same_memory


def check(
    program: Program,
    policy: Policy | str | Path | Mapping[str, str] = "autocast",
    *,
    precision: str = "bf16",
    lower: Literal["traced", "eager", "aot_eager", "inductor"] = "traced",
) -> None:
    """Compiles a program, checks every invariant of its graphs, and compares what it computes with eager PyTorch.

    Args: policy and precision as for `fxamp.Amp`. lower="traced" takes the graph from a walk over the program's syntax, which
    costs a tenth of Dynamo's time, and runs it as it is; the others are `fxamp.Amp`'s, behind torch.compile.
    Raises: InvariantBroken; InvalidOption for what "traced" cannot trace: checkpoint and cond.
    """
    chosen = Policy.of(policy)
    if lower == "traced":
        captured = capture_of(program)
        rewritten = rewrite_of(captured, chosen, variant=precision)
        check_invariants(captured, rewritten, chosen, variant=precision)
        check_values(program, lambda *made: rewritten(*_first(made)), precision=precision)
        return
    torch._dynamo.reset()
    amp = Amp(precision=precision, policy=chosen, lower=lower)
    with inductor_config.patch(fallback_random=True):  # else compiled programs draw other random numbers than eager ones
        check_values(program, _compiled(program, amp), precision=precision, is_partitioned=lower != "eager")
        for record in amp.graphs:
            for variant in record.variants.values():
                check_invariants(variant.captured, variant.dynamo, chosen, variant=variant.precision)
                if lower != "eager":
                    check_joint(variant.joint_before, variant.joint)


def _compiled(program: Program, backend: Any) -> Callable[..., Any]:
    """`torch.compile` of a program, as a function of all its arguments in order."""

    def call(*made: torch.Tensor) -> Any:
        named = dict(zip((a.name for a in program.arguments), made, strict=True))
        return torch.compile(program.module(named), backend=backend, fullgraph=True)(*program.inputs(named))

    return call


def capture_of(program: Program) -> Captured:
    """A program as it stands before the plan: traced, and with in-place operations made ordinary where nobody can tell.

    Raises: InvalidOption for checkpoint and cond, which only Dynamo can capture.
    """
    gm, examples = trace(program)
    normal = graph.clone(gm)
    passes.run(normal, rewrite.NORMALIZE, legal.checker(legal.REWRITTEN, gm))
    return capturing.capture(normal, examples)


def check_values(
    program: Program, call: Callable[..., Any], *, precision: str = "bf16", is_partitioned: bool = False
) -> None:
    """Compares `call`, given all arguments of the program in order, with the program run eagerly.

    Outputs, arguments (as the call left them) and gradients must have the same dtypes, shapes and values, and share memory
    where they do. Values may differ a few times as much as when every value is rounded: not at all if that changes nothing.

    Args: is_partitioned says that AOTAutograd compiled `call`: its kernels may round in another order even in fp32, and equal
    outputs may come to share memory. Where it breaks a program without fxamp, what it makes of it is compared with instead:
    nothing if it refuses the program.
    Raises: InvariantBroken.
    """
    limit = _Limit(_run_rounded(program, formats.STORAGE[precision]), is_partitioned)
    want = run(program)
    try:
        got = run(program, call)
    except RuntimeError as error:  # of the compiler, or of the backward
        if is_partitioned and not _is_ours(error) and _run_stock(program) is None:
            return
        raise
    try:
        _agree(program, got, want, limit)
    except InvariantBroken:
        stock = _run_stock(program) if is_partitioned else None
        if stock is None or not _agrees(program, got, stock, limit):
            raise


def _run_stock(program: Program) -> Run | None:
    """What AOTAutograd makes of a program without fxamp; None if it refuses it."""
    try:
        return run(program, _compiled(program, aot_eager))
    except RuntimeError:
        return None


def _is_ours(error: BaseException) -> bool:
    """Did fxamp itself raise it, behind whatever PyTorch says around it?"""
    return isinstance(getattr(error, "inner_exception", error), FxampError)


def _agrees(program: Program, got: Run, want: Run, limit: _Limit) -> bool:
    try:
        _agree(program, got, want, limit)
    except InvariantBroken:
        return False
    return True


def _agree(program: Program, got: Run, want: Run, limit: _Limit) -> None:
    """Raises: InvariantBroken if one run is not what another is."""
    rounded, by_name = limit.rounded, got.tensors()
    for name, tensor in want.tensors().items():
        _compare(program, name, by_name[name], tensor, limit.of_value(rounded.run.tensors()[name], tensor))
        if by_name[name].requires_grad != tensor.requires_grad:
            raise _broken(program, name, f"has requires_grad={by_name[name].requires_grad}")
    shared, should = same_memory(by_name), same_memory(want.tensors())
    if shared != should and not (limit.is_partitioned and _refines(should, shared)):
        raise _broken(program, "", f"these share memory: {_listed(shared)}, eagerly: {_listed(should)}")
    for name, gradient in want.gradients.items():
        mine, theirs = got.gradients[name], rounded.run.gradients[name]
        if (mine is None) != (gradient is None):
            raise _broken(program, f"gradient of {name}", "is there" if gradient is None else "is missing")
        if mine is not None and gradient is not None and theirs is not None:
            _compare(program, f"gradient of {name}", mine, gradient, limit.of_gradient(theirs, gradient))


# ---- how far apart ------------------------------------------------------------------------------------------------------
class _RoundedRun:
    """A run with every value rounded, in forward and backward."""

    def __init__(self, run: Run, mode: Rounded) -> None:
        self.run, self.low, self.num_rounded = run, mode.low, mode.num_rounded
        self.ulp, self.gradient_ulp = mode.ulp, mode.gradient_ulp


class _Limit:
    """How much a value may differ."""

    def __init__(self, rounded: _RoundedRun, is_partitioned: bool) -> None:
        self.rounded, self.is_partitioned = rounded, is_partitioned
        # fp32 through AOTAutograd is not eager's fp32 bit for bit: its decompositions round in another order.
        self.is_exact = not rounded.num_rounded and not (is_partitioned and rounded.low == torch.float32)

    def of_value(self, rounded: torch.Tensor, want: torch.Tensor) -> float:
        if self.is_exact:
            return 0.0
        return self._around(rounded, want, self.rounded.ulp)

    def of_gradient(self, rounded: torch.Tensor, want: torch.Tensor) -> float:
        if self.rounded.low == torch.float32 and self.is_exact:
            return 0.0
        return self._around(rounded, want, self.rounded.gradient_ulp)

    @staticmethod
    def _around(rounded: torch.Tensor, want: torch.Tensor, ulp: float) -> float:
        return SLACK * difference(rounded, want) + SLACK_ULPS * ulp


def _run_rounded(program: Program, low: torch.dtype) -> _RoundedRun:
    made = program.make_arguments()
    torch.manual_seed(0)
    with Rounded(low, made.values()) as mode:
        outputs = tuple(program.function()(*made.values()))
    found = Run(outputs=outputs, arguments=made, gradients=gradients(outputs, made))
    for gradient in found.gradients.values():
        if gradient is not None:
            mode.note_gradient(gradient)
    return _RoundedRun(found, mode)


def _compare(program: Program, name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise _broken(program, name, f"is {got.dtype}{list(got.shape)}, eagerly {want.dtype}{list(want.shape)}")
    if difference(got, want) > limit:
        raise _broken(program, name, f"differs from eager by {difference(got, want):.3g}, allowed are {limit:.3g}")


def _broken(program: Program, name: str, what: str) -> InvariantBroken:
    line = program.tree.body[-1].lineno
    return InvariantBroken(what, invariant="values", node=name, where=f"{program.file}:{line}")


def _refines(should: frozenset[frozenset[str]], shared: frozenset[frozenset[str]]) -> bool:
    """Does everything share memory that should, and perhaps more?"""
    return all(any(group <= other for other in shared) for group in should)


def _listed(groups: frozenset[frozenset[str]]) -> str:
    return "; ".join(sorted(", ".join(sorted(group)) for group in groups)) or "none"


def _first(made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t, is_first in zip(made, first_seen(made), strict=True) if is_first]


