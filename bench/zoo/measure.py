"""One architecture, measured: does it compile, how far is it from float64, how many bytes do its casts move.

All systems compile the same model, with the same weights and inputs, through the same lowering. The weights of a compiled
model are overwritten for each seed, so that a system compiles once.

The error of a system is relative and norm-wise, ||x - x64|| / ||x64||: of outputs the root mean square over the outputs of
the model, of gradients that of all of them as one vector, and once more the root mean square over the parameters, so that a
small gradient that is wrong cannot hide behind large ones. x64 is the model in float64, uncompiled. The gradient is that of
the sum of all outputs, each weighted with a random tensor (the same for all systems).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
import torch._inductor.lowering  # PyTorch's decomposition of max_pool2d takes it for imported
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from bench import joint
from bench.joint import Traffic
from bench.zoo import cuda_autocast, models
from bench.zoo.models import Entry, Inputs
from fxamp import Amp, graph

Lower = Literal["aot_eager", "inductor"]


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to compile a model."""

    name: str
    compiler: Literal["stock", "autocast", "fxamp"]
    precision: Literal["fp32", "bf16", "fp16"]
    output_dtype: Literal["traced", "low"] = "traced"
    is_counted: bool = False
    """Are the casts of its joint graphs counted? fxamp traces them once more for that."""

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]


SYSTEMS: Final = (
    System(name="stock", compiler="stock", precision="fp32"),
    System(name="fxamp-fp32", compiler="fxamp", precision="fp32"),
    System(name="autocast-bf16", compiler="autocast", precision="bf16", is_counted=True),
    System(name="fxamp-bf16", compiler="fxamp", precision="bf16"),
    System(name="autocast-fp16", compiler="autocast", precision="fp16"),
    System(name="fxamp-fp16", compiler="fxamp", precision="fp16"),
    System(name="fxamp-bf16-low", compiler="fxamp", precision="bf16", output_dtype="low", is_counted=True),
)
BY_NAME: Final[Mapping[str, System]] = MappingProxyType({system.name: system for system in SYSTEMS})


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors against float64, one for each seed."""

    outputs: tuple[float, ...]
    gradients: tuple[float, ...]
    """All gradients as one vector."""
    parameters: tuple[float, ...]
    """Root mean square over parameters."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one system did with one architecture."""

    failure: str | None = None
    """Why it did not run; None if it did."""
    errors: Errors | None = None
    traffic: Traffic | None = None
    """Casts of all joint graphs; None where the lowering shows none."""
    num_graphs: int = 0
    seconds: float = 0.0
    """For compilation, and a forward and a backward for each seed."""
    is_stock_bitwise: bool | None = None
    """In fp32: are outputs and gradients bit for bit those of the lowering without fxamp?"""


# ---- a step -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Step:
    """Outputs and gradients of one forward and backward, by name."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def step(model: nn.Module, run: Callable[..., Any], inputs: Inputs, seed: int) -> Step:
    """Runs forward and backward. The gradient is that of all outputs, each with a random weight for each element."""
    model.zero_grad(set_to_none=True)
    found = {name: value for name, value in run(**inputs).items() if isinstance(value, Tensor) and value.is_floating_point()}
    differentiable = [value for value in found.values() if value.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in differentiable]
    torch.autograd.backward(differentiable, [w.to(v.dtype) for w, v in zip(weights, differentiable, strict=True)])
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(outputs={name: value.detach().clone() for name, value in found.items()}, gradients=gradients)


def reference(entry: Entry, seed: int) -> Step:
    """The step in float64, uncompiled."""
    model = models.make(entry, seed).double()
    if hasattr(model, "set_experts_implementation"):  # the grouped kernel takes no float64
        with contextlib.suppress(ValueError):
            model.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in models.inputs(entry, seed).items()}
    return step(model, model, inputs, seed)


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, in float64; not finite where `got` is not."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(torch.finfo(torch.float64).tiny))


def error_of_outputs(got: Step, want: Step) -> float:
    """Root mean square of the outputs' relative errors."""
    assert got.outputs.keys() == want.outputs.keys(), (got.outputs.keys(), want.outputs.keys())
    return math.sqrt(statistics.fmean(relative_error(got.outputs[k], want.outputs[k]) ** 2 for k in want.outputs))


def error_of_gradients(got: Step, want: Step) -> float:
    """Relative error of all gradients as one vector."""
    assert got.gradients.keys() == want.gradients.keys(), got.gradients.keys() ^ want.gradients.keys()
    names = list(want.gradients)
    return relative_error(*(torch.cat([s.gradients[k].double().flatten() for k in names]) for s in (got, want)))


def error_of_parameters(got: Step, want: Step) -> float:
    """Root mean square, over parameters, of the relative error of the gradient.

    A gradient that is zero but for rounding (of a bias before a softmax, say) counts as a thousandth of the typical norm.
    """
    norms = [float(g.double().norm()) for g in want.gradients.values()]
    floor = 1e-3 * math.sqrt(statistics.fmean(n * n for n in norms))
    distances = [float((got.gradients[k].double() - g.double()).norm()) for k, g in want.gradients.items()]
    return math.sqrt(statistics.fmean((d / max(n, floor)) ** 2 for d, n in zip(distances, norms, strict=True)))


def errors(got: Sequence[Step], want: Sequence[Step]) -> Errors:
    """Of steps with the weights and inputs of some seeds."""
    pairs = list(zip(got, want, strict=True))
    return Errors(
        outputs=tuple(error_of_outputs(*pair) for pair in pairs),
        gradients=tuple(error_of_gradients(*pair) for pair in pairs),
        parameters=tuple(error_of_parameters(*pair) for pair in pairs),
    )


# ---- compilers ----------------------------------------------------------------------------------------------------------
class _Recording:
    """The lowering of `lower="aot_eager"` without fxamp; keeps the joint graphs that it saw."""

    def __init__(self) -> None:
        self.joints: list[fx.GraphModule] = []
        self._backend = aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
            bw_compiler=lambda gm, _: make_boxed_func(gm.forward),
            inference_compiler=self._infer,
            partition_fn=self._partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._backend(gm, inputs)

    def _infer(self, gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        self.joints.append(graph.clone(gm))
        return make_boxed_func(gm.forward)

    def _partition(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.joints.append(graph.clone(gm))
        return min_cut_rematerialization_partition(gm, inputs, **kwargs)


class Compiler:
    """A compiled model of one system."""

    def __init__(self, system: System, lower: Lower) -> None:
        self.system = system
        self._amp = self._recording = None
        if system.compiler == "fxamp":
            scaling = None if system.precision == "fp16" else "auto"
            self._amp = Amp(
                precision=system.precision, scaling=scaling, output_dtype=system.output_dtype, lower=lower
            )
            self.backend: Any = self._amp
        else:
            self._recording = _Recording() if lower == "aot_eager" else None
            self.backend = self._recording or "inductor"

    def region(self) -> contextlib.AbstractContextManager[object]:
        """What is around the forward."""
        if self.system.compiler != "autocast":
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        stack.enter_context(cuda_autocast.cuda_lists_on_cpu())
        stack.enter_context(torch.autocast("cpu", dtype=self.system.dtype))
        return stack

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=self.backend)

        def run(**inputs: Any) -> Any:
            with self.region():
                return compiled(**inputs)

        return run

    def joints(self) -> list[fx.GraphModule]:
        """The joint graphs that were compiled so far."""
        if self._recording is not None:
            return self._recording.joints
        if self._amp is not None and self._amp.options.lower == "aot_eager":
            return [variant.joint for record in self._amp.graphs for variant in record.variants.values()]
        return []


# ---- an architecture ----------------------------------------------------------------------------------------------------
def measure(entry: Entry, systems: Sequence[System], *, lower: Lower, seeds: Sequence[int]) -> dict[str, Result]:
    """What each system does with an architecture; the first is the lowering without fxamp."""
    wanted = {seed: reference(entry, seed) for seed in seeds}
    results: dict[str, Result] = {}
    stock: list[Step] = []
    for system in systems:
        start = time.perf_counter()
        compiler = Compiler(system, lower)
        try:
            done = list(steps(entry, compiler, seeds))
        except Exception as error:  # whatever a compiler raises is its result
            results[system.name] = Result(failure=_first_line(error), seconds=time.perf_counter() - start)
            continue
        if system.compiler == "stock":
            stock = done
        joints = compiler.joints() if system.is_counted else []
        results[system.name] = Result(
            errors=errors(done, [wanted[seed] for seed in seeds]),
            traffic=sum(map(joint.traffic, joints), Traffic()) if joints else None,
            num_graphs=len(joints),
            seconds=time.perf_counter() - start,
            is_stock_bitwise=all(map(_is_equal, done, stock)) if system.precision == "fp32" and stock else None,
        )
    return results


def steps(entry: Entry, compiler: Compiler, seeds: Sequence[int]) -> Iterator[Step]:
    """Compiles a model, and runs a step with the weights and inputs of each seed."""
    model = models.make(entry, seeds[0])
    # Dynamo would draw what a model draws by numpy (BigBird does) from torch's generator: other numbers than in float64.
    with warnings.catch_warnings(), torch._dynamo.config.patch(trace_numpy=False):
        warnings.simplefilter("ignore")  # what models and compilers say of themselves; failures are no warnings
        run = compiler.compile(model)
        for seed in seeds:
            model.load_state_dict(models.make(entry, seed).state_dict())
            yield step(model, run, models.inputs(entry, seed), seed)


def _is_equal(one: Step, other: Step) -> bool:
    pairs = ((one.outputs, other.outputs), (one.gradients, other.gradients))
    return all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
