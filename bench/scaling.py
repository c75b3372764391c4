"""How fxamp's own costs grow: time of its stages with the size of the graph, the cost of a call and of a change of precision,
and memory with the number of variants."""

from __future__ import annotations

import gc
import mmap
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import fxamp
from bench import measure
from fxamp import capture, graph, lower, passes, plan

NUM_NODES: Final = (100, 1_000, 10_000)
"""Sizes of Dynamo graphs for which fxamp's stages are timed."""

NUM_NODES_QUICK: Final = (100,)


# ---- passes ----------------------------------------------------------------------------------------------------------
class _Residual(nn.Module):
    """11 nodes of a Dynamo graph: 6 parameters and 5 operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@dataclass(frozen=True, kw_only=True)
class PassFacts:
    """CPU time of all that fxamp does to compile one graph that trains. Medians of `NUM_TURNS` turns. What Python's garbage
    collector does meanwhile is part of it; garbage that others left is gone before."""

    num_dynamo_nodes: int
    num_joint_nodes: int
    stage_ms: dict[str, float]
    """Without `min_cut`, which is asked for by name, the sum is what fxamp adds to a compilation."""
    compile_s: float
    """Of Dynamo and AOTAutograd, up to where the joint passes begin."""


NUM_TURNS: Final = 5
TIMEOUT_S: Final = 3_600
"""PyTorch takes minutes to trace the joint graph of the largest."""


def measure_passes(num_nodes: int) -> PassFacts:
    """Compiles a graph of about `num_nodes` with lower="aot_eager", which runs the passes that run in front of Inductor, up to
    the end of the joint passes. Its joint graph is traced once, and the passes run on copies of it."""
    torch.compiler.reset()
    model = nn.Sequential(*(_Residual(8) for _ in range(num_nodes // 11)))
    found: list[PassFacts] = []
    start_s = time.process_time()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(_measure(gm, inputs, start_s))
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(4, 8))
    return found[0]


def _measure(gm: fx.GraphModule, inputs: Sequence[Any], start_s: float) -> PassFacts:
    amp = fxamp.Amp(precision="bf16", lower="aot_eager", relaxed=("min_cut",))
    joint_gm, steps = _trace(amp, gm, inputs)
    compile_s = time.process_time() - start_s
    turns = [_dynamo_ms(amp, gm, inputs) | _joint_ms(joint_gm, steps) for _ in range(NUM_TURNS)]
    return PassFacts(
        num_dynamo_nodes=len(gm.graph.nodes),
        num_joint_nodes=len(joint_gm.graph.nodes),
        stage_ms={stage: statistics.median(turn[stage] for turn in turns) for stage in turns[0]},
        compile_s=compile_s,
    )


def _trace(amp: fxamp.Amp, gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, lower.Steps]:
    """(the joint graph of a compilation before all passes, the steps that it would go through)."""
    real, found = lower._compile, list[tuple[fx.GraphModule, lower.Steps]]()

    def until_joint(rewritten: fx.GraphModule, inputs: Sequence[Any], settings: Any, steps: lower.Steps, *rest: Any):
        def keep(joint_gm: fx.GraphModule) -> None:
            found.append((graph.clone(joint_gm), steps))
            raise lower._Traced

        with suppress(lower._Traced):
            real(rewritten, inputs, settings, [(keep, "")], *rest)
        return rewritten.forward

    with mock.patch.object(lower, "_compile", until_joint):
        amp._compile(gm, inputs, amp.options)
    return found[0]


def _dynamo_ms(amp: fxamp.Amp, gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, float]:
    """Time of everything up to AOTAutograd."""
    stages = {"capture": (capture, "take"), "plan": (plan, "plan"), "rewrite": (passes, "run"), "all": (amp, "_compile")}
    gc.collect()
    with mock.patch.object(lower, "_compile", return_value=gm.forward), _timed(stages) as spent_ms:
        amp._compile(gm, inputs, amp.options)
    all_ms = spent_ms.pop("all")
    return spent_ms | {"copies and digests": all_ms - sum(spent_ms.values())}


def _joint_ms(joint_gm: fx.GraphModule, steps: lower.Steps) -> dict[str, float]:
    """Time of the passes that are always on, and of `min_cut`."""
    relaxed = [step for step, key in steps if key.startswith("MinCut(")]
    exact = [step for step, key in steps if not key.startswith("MinCut(")]
    return {"joint": _run_ms(exact, joint_gm), "min_cut": _run_ms([steps[0][0], *relaxed], joint_gm)}


def _run_ms(steps: Sequence[lower.Step], joint_gm: fx.GraphModule) -> float:
    copied = graph.clone(joint_gm)
    gc.collect()
    start_s = time.process_time()
    for step in steps:
        step(copied)
    return (time.process_time() - start_s) * 1e3


@contextmanager
def _timed(functions: Mapping[str, tuple[ModuleType | object, str]]) -> Generator[dict[str, float]]:
    """Adds up the CPU time spent in functions, given by their owner and name."""
    spent_ms = dict.fromkeys(functions, 0.0)

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent_ms[label] += (time.process_time() - start_s) * 1e3

        return call

    with ExitStack() as stack:
        for label, (owner, name) in functions.items():
            stack.enter_context(mock.patch.object(owner, name, timed(label, getattr(owner, name))))
        yield spent_ms


# ---- calls -----------------------------------------------------------------------------------------------------------
NUM_CALLS: Final = 500
NUM_REPETITIONS: Final = 9


@dataclass(frozen=True, kw_only=True)
class DispatchFacts:
    """Time of a call of a compiled graph, Dynamo's guards left out."""

    what: str
    inductor_us: tuple[float, ...]
    fxamp_us: tuple[float, ...]


DISPATCHES: Final[Mapping[str, tuple[Mapping[str, Any], bool]]] = {
    "inference": ({"precision": "fp32"}, False),
    "training, forward": ({"precision": "fp32"}, True),
    "training, forward, of two precisions": ({"ladder": ("bf16", "fp32")}, True),
}
"""What is called -> (fields of the Amp, does it train?). With a ladder, fp32 is one of two precisions."""


def measure_dispatch(device_type: str, what: str, lower: str = "inductor") -> DispatchFacts:
    """Calls what the back ends return for one tiny graph in fp32, in turns: the programs are the same, so that a
    difference is fxamp's."""
    fields, trains = DISPATCHES[what]
    amp = fxamp.Amp(**fields, lower=lower, cuda_graphs=False)
    amp.set_precision("fp32")
    backends = (torch._dynamo.lookup_backend(lower), amp)
    calls = [_program(backend, device_type, trains=trains) for backend in backends]
    with torch.set_grad_enabled(trains):
        inductor_us, fxamp_us = _take_turns([lambda call=call: _repeat(call) for call in calls], device_type, NUM_CALLS)
    return DispatchFacts(what=what, inductor_us=inductor_us, fxamp_us=fxamp_us)


def _take_turns(
    blocks: Sequence[Callable[[], None]], device_type: str, num_calls: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean time of a call in two blocks of them, per repetition."""
    times_us: tuple[list[float], list[float]] = [], []
    for repetition in range(NUM_REPETITIONS + 1):
        for i in (0, 1) if repetition % 2 else (1, 0):
            time_us = _time_us(blocks[i], device_type) / num_calls
            if repetition > 0:  # the first warms up
                times_us[i].append(time_us)
    return tuple(times_us[0]), tuple(times_us[1])


def _time_us(block: Callable[[], None], device_type: str) -> float:
    """Of the host, with its waits for a GPU; where there is none, of its own work alone, whoever else is on the machine."""
    if device_type == "cuda":
        return measure.time_block_ms(block, device_type) * 1e3
    start_ns = time.process_time_ns()
    block()
    return (time.process_time_ns() - start_ns) / 1e3


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(NUM_CALLS):
        call()


def _program(backend: Callable[..., Any], device_type: str, *, trains: bool) -> Callable[[], object]:
    """A call of the program that a back end returns for a tiny graph."""
    torch.compiler.reset()
    programs: list[Callable[[], object]] = []

    def spy(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = backend(gm, inputs)
        programs.append(lambda: run(*inputs))
        return run

    layer = nn.Linear(8, 8, device=device_type)
    with torch.set_grad_enabled(trains):
        torch.compile(lambda x: F.gelu(layer(x)), backend=spy)(torch.randn(8, 8, device=device_type))
    (program,) = programs
    return program


# ---- changes of precision --------------------------------------------------------------------------------------------
LADDER: Final = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class SwapFacts:
    """Time of calls of what was compiled in two precisions, half of them in either."""

    what: str
    kept_us: tuple[float, ...]
    """With one change between the halves."""
    swapped_us: tuple[float, ...]
    """With a change before each call."""


def measure_swaps(device_type: str, what: str, lower: str = "inductor") -> SwapFacts:
    """Takes turns of calls in one precision after the other, and of the same calls in both by turns."""
    amp, call, num_calls = SWAPS[what](device_type, lower)

    def block(is_swapping: bool) -> None:
        for i in range(num_calls):
            if is_swapping or i in (0, num_calls // 2):
                amp.set_precision(LADDER[i % 2 if is_swapping else i * 2 // num_calls])
            call()

    blocks = [lambda is_swapping=is_swapping: block(is_swapping) for is_swapping in (False, True)]
    for warm_up in blocks:  # a train step is recorded
        warm_up()
    kept_us, swapped_us = _take_turns(blocks, device_type, num_calls)
    return SwapFacts(what=what, kept_us=kept_us, swapped_us=swapped_us)


def _swapped_graph(device_type: str, lower: Any) -> tuple[fxamp.Amp, Callable[[], object], int]:
    amp = fxamp.Amp(ladder=LADDER, lower=lower, cuda_graphs=False)
    return amp, _program(amp, device_type, trains=True), NUM_CALLS


def _swapped_step(device_type: str, lower: Any) -> tuple[fxamp.Amp, Callable[[], object], int]:
    amp = fxamp.Amp(ladder=LADDER, lower=lower)
    torch.compiler.reset()
    model = nn.Linear(8, 8, device=device_type)
    step = amp.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters(), fused=device_type == "cuda"))
    x, y = (torch.randn(8, 8, device=device_type) for _ in range(2))
    return amp, lambda: step(x, y), NUM_CALLS // 5


SWAPS: Final[Mapping[str, Callable[[str, Any], tuple[fxamp.Amp, Callable[[], object], int]]]] = {
    "a compiled graph that trains, forward": _swapped_graph,
    "a train step": _swapped_step,
}
"""What is called -> (device, lower) -> (its Amp, a call, how many calls take a turn)."""


# ---- variants --------------------------------------------------------------------------------------------------------
NUM_REGIONS: Final = (None, 0, 1, 2)
"""Parts of the model that change their precision on their own, beside the rest; None: nothing changes. Each part more doubles
the variants."""


@dataclass(frozen=True, kw_only=True)
class VariantFacts:
    """What a train step holds, compiled in so many combinations of precisions."""

    num_variants: int
    num_parameters: int
    host_bytes: int | None
    device_bytes: int | None
    compile_s: float


class VariantMeter:
    """Train steps of one network, each compiled with nothing in the caches. All of them are kept: what one gives back would
    hide what the next one takes."""

    def __init__(self, device_type: str, lower: str = "inductor") -> None:
        self.device_type, self.lower = device_type, lower
        self._kept: list[object] = [self._stepped(None)]  # also holds what is imported and set up once

    def measure(self, num_regions: int | None) -> VariantFacts:
        """Makes one more."""
        host_before, device_before, start_s = _resident_bytes(), _reserved_bytes(self.device_type), time.process_time()
        amp, model, step = self._stepped(num_regions)
        compile_s = time.process_time() - start_s
        self._kept.append((amp, model, step))
        host_after, device_after = _resident_bytes(), _reserved_bytes(self.device_type)
        return VariantFacts(
            num_variants=max(len(g.variants) for g in amp.graphs),
            num_parameters=sum(p.numel() for p in model.parameters()),
            host_bytes=None if host_before is None or host_after is None else host_after - host_before,
            device_bytes=None if device_before is None or device_after is None else device_after - device_before,
            compile_s=compile_s,
        )

    def _stepped(self, num_regions: int | None) -> tuple[fxamp.Amp, nn.Module, object]:
        with fresh_cache():  # else what one before has loaded would cost nothing
            return _stepped(self.device_type, self.lower, num_regions)


def _stepped(device_type: str, lower: Any, num_regions: int | None) -> tuple[fxamp.Amp, nn.Module, object]:
    """A train step that was compiled in all of its variants, and on a GPU recorded."""
    options: dict[str, Any] = {"precision": "bf16"} if num_regions is None else {"ladder": ("bf16", "fp32")}
    if num_regions:
        options["regions"] = {f"part{i}": str(i) for i in range(num_regions)}
    amp = fxamp.Amp(**options, lower=lower)
    model = nn.Sequential(*(_Residual(256) for _ in range(3)))
    model.to(device_type)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device_type == "cuda")
    step = amp.train_step(model, F.mse_loss, optimizer)
    for _ in range(4):  # the third is recorded
        step(torch.randn(8, 256, device=device_type), torch.randn(8, 256, device=device_type))
    return amp, model, step


def _resident_bytes() -> int | None:
    """Memory of this process that is not swapped out. Linux says it in /proc."""
    statm = Path("/proc/self/statm")
    gc.collect()
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.exists() else None


def _reserved_bytes(device_type: str) -> int | None:
    if device_type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
