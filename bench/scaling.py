"""How fxamp's own costs grow: time of its stages with the size of the graph, and the cost of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxamp
from bench import measure
from fxamp import capture, lower, plan

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
    """Times of fxamp's stages on one graph that trains."""

    num_dynamo_nodes: int
    num_joint_nodes: int
    stage_ms: dict[str, float]
    compile_s: float
    """All of torch.compile up to where Inductor would begin."""


def measure_passes(num_nodes: int) -> PassFacts:
    """Compiles a graph of about `num_nodes` with lower="aot_eager", which runs the same passes as in front of
    Inductor."""
    torch.compiler.reset()
    model = nn.Sequential(*(_Residual(8) for _ in range(num_nodes // 11)))
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return amp(gm, inputs)

    functions = {
        "capture": (capture, "capture"),
        "plan": (plan, "plan"),
        "lower": (lower, "lower"),
        "all": (amp, "_compile"),
    }
    start_s = time.perf_counter()
    with _timed(functions) as spent_ms:
        torch.compile(model, backend=backend)(torch.randn(4, 8))
    compile_s = time.perf_counter() - start_s
    (variant,) = amp.graphs[0].variants.values()
    rewrite_ms = sum(c.elapsed_ms for c in variant.changes)
    stage_ms = {
        "capture": spent_ms["capture"],
        "plan": spent_ms["plan"],
        "rewrite": rewrite_ms,
        "joint": sum(c.elapsed_ms for c in variant.joint_changes),
        "copies and digests": spent_ms["all"]
        - rewrite_ms
        - sum(spent_ms[name] for name in ("capture", "plan", "lower")),
    }
    return PassFacts(
        num_dynamo_nodes=len(amp.graphs[0].captured.graph.nodes),
        num_joint_nodes=len(variant.joint.graph.nodes),
        stage_ms=stage_ms,
        compile_s=compile_s,
    )


@contextmanager
def _timed(functions: Mapping[str, tuple[ModuleType | object, str]]) -> Generator[dict[str, float]]:
    """Adds up the time spent in functions, given by their owner and name."""
    spent_ms = dict.fromkeys(functions, 0.0)

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent_ms[label] += (time.perf_counter() - start_s) * 1e3

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


def measure_dispatch(device_type: str) -> list[DispatchFacts]:
    """Calls what the back ends return for one tiny graph in fp32, in turns: the programs are the same, so that a
    difference is fxamp's."""
    return [_dispatch(device_type, "inference", trains=False), _dispatch(device_type, "training, forward", trains=True)]


def _dispatch(device_type: str, what: str, *, trains: bool) -> DispatchFacts:
    inductor = torch._dynamo.lookup_backend("inductor")
    amp = fxamp.Amp(precision="fp32", cuda_graphs=False)
    calls = [_program(backend, device_type, trains=trains) for backend in (inductor, amp)]
    times_us: list[list[float]] = [[], []]
    with torch.set_grad_enabled(trains):
        for repetition in range(NUM_REPETITIONS + 1):
            for i in (0, 1) if repetition % 2 else (1, 0):
                time_us = measure.time_block_ms(lambda call=calls[i]: _repeat(call), device_type) * 1e3 / NUM_CALLS
                if repetition > 0:  # the first warms up
                    times_us[i].append(time_us)
    return DispatchFacts(what=what, inductor_us=tuple(times_us[0]), fxamp_us=tuple(times_us[1]))


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
