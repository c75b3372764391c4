"""How things are measured, inside the process that runs them: time, memory, launches, casts, operations, ceilings."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from bench.workloads import Workload
from fxamp import formats
from fxamp.explain.kernels import Event, events_of, kernel_category
from fxamp.graph import numel
from fxamp.ops import ROUND_TO


# ---- time ------------------------------------------------------------------------------------------------------------
def synchronize(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def time_block_ms(run: Callable[[], object], device_type: str) -> float:
    """Duration of `run`, all of its work on the device included: by events on a GPU, by the clock elsewhere."""
    if device_type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    start_s = time.perf_counter()
    run()
    return (time.perf_counter() - start_s) * 1e3


# ---- casts -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Casts:
    """Conversions between float formats."""

    num_casts: int
    num_bytes: int
    """Read and written, if each is a kernel of its own. Fused into a neighbour it costs less."""


def count_casts(graph: fx.Graph) -> Casts:
    """Counts the conversions between float formats in a graph of ATen operations, whoever wrote them."""
    sizes: list[int] = []
    for target in (torch.ops.prims.convert_element_type.default, ROUND_TO):
        for node in graph.find_nodes(op="call_function", target=target):
            source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
            if source.is_floating_point() and result.is_floating_point():
                sizes.append(num_cast_bytes(source, result))
    return Casts(num_casts=len(sizes), num_bytes=sum(sizes))


def num_cast_bytes(source: Tensor, result: Tensor) -> int:
    """Bytes that a cast reads and writes if it is a kernel of its own; of the example, where sizes are symbols."""
    return numel(source) * (source.element_size() + result.element_size())


class CountCasts(CustomGraphPass):
    """Counts the casts between float formats in every joint graph that Inductor compiles; changes nothing.

    Given to Inductor as `joint_custom_pre_pass`, it runs behind the passes of fxamp, and for the peers alike. Code that
    comes from a cache passes it by.
    """

    def __init__(self) -> None:
        self.num_graphs = self.num_casts = self.num_bytes = 0

    def __call__(self, graph: fx.Graph) -> None:
        casts = count_casts(graph)
        self.num_graphs += 1
        self.num_casts += casts.num_casts
        self.num_bytes += casts.num_bytes

    def uuid(self) -> str:
        return "fxamp bench: count casts, change nothing"


# ---- launches and waits ----------------------------------------------------------------------------------------------
WINDOW: Final = "fxamp bench: steps"
"""Name of the profiled range that holds the steps, and none of the profiler's own waits."""

KERNEL_LAUNCHES: Final = frozenset(
    {"cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchKernelEx"}
)
GRAPH_LAUNCHES: Final = frozenset({"cudaGraphLaunch"})
HOST_SYNCS: Final = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"})
"""Calls in which the host waits for the device. `.item()` is a cudaMemcpyAsync and one of these."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """What the host asks of the device in a step, and what the device does. Means over the profiled steps."""

    num_kernel_launches: float
    num_graph_launches: float
    num_host_syncs: float
    num_copies_to_host: float
    num_kernels: float
    """Kernels, copies and fills that ran on the device, those inside CUDA graphs included."""
    kernel_ms: dict[str, float]
    """Time of kernels by category."""


def count_launches(events: Sequence[Event], num_steps: int) -> Launches:
    """What happened in the range `WINDOW`. Calls of the host count where they start in it; all work of the device
    belongs to it.

    Raises: ValueError if the range is not there exactly once.
    """
    (window,) = (e for e in events if e.name == WINDOW)
    calls = Counter(e.name for e in events if not e.is_on_device and window.start_us <= e.start_us <= window.end_us)
    work = [e for e in events if e.is_on_device]
    kernel_ms: dict[str, float] = {}
    for e in work:
        category = kernel_category(e.name)
        kernel_ms[category] = kernel_ms.get(category, 0.0) + (e.end_us - e.start_us) / 1e3 / num_steps

    def per_step(names: Iterable[str]) -> float:
        return sum(calls[name] for name in names) / num_steps

    return Launches(
        num_kernel_launches=per_step(KERNEL_LAUNCHES),
        num_graph_launches=per_step(GRAPH_LAUNCHES),
        num_host_syncs=per_step(HOST_SYNCS),
        num_copies_to_host=sum(e.name.startswith("Memcpy DtoH") for e in work) / num_steps,
        num_kernels=len(work) / num_steps,
        kernel_ms=kernel_ms,
    )


def profile_launches(run_step: Callable[[], object], num_steps: int) -> Launches:
    """Profiles steps on a GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        with record_function(WINDOW):
            for _ in range(num_steps):
                run_step()
        torch.cuda.synchronize()
    return count_launches(events_of(profiled.events() or (), ranges=(WINDOW,)), num_steps)


# ---- memory ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peaks of a step on a GPU, model and optimizer states included."""

    allocated_bytes: int
    reserved_bytes: int
    """With what the allocator and CUDA graphs hold beyond."""
    idle_bytes: int = 0
    """Reserved between steps, when all that can be given back is; 0 in rows before 2026-12-01."""


def peak_memory(run_step: Callable[[], object], num_steps: int) -> Memory:
    """Peaks over steps, after the memory that only compiling and warming up needed is given back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(num_steps):
        run_step()
    torch.cuda.synchronize()
    allocated_bytes, reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    idle_bytes = torch.cuda.memory_reserved()
    return Memory(allocated_bytes=allocated_bytes, reserved_bytes=reserved_bytes, idle_bytes=idle_bytes)


# ---- operations ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step has to do at least, whoever does it."""

    num_flops: int
    """Of matrix products and convolutions. Attention counts in full, also where it is causal."""
    num_min_bytes: int
    """A lower bound of the bytes moved: activations, and all that is read twice, are left out.

    Training: AdamW reads parameter, gradient and two states, and writes all but the gradient, in fp32: 28 bytes a
    parameter. Inference: every weight once, in a format of 16 bits.
    """


def count_work(workload: Workload) -> Work:
    """Counts on fake tensors, in eager fp32. (Not on the meta device: models of transformers read values of tensors
    there.)"""
    trains = workload.kind == "train"
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
        parts = replace(workload, is_channels_last=False).parts("cpu")  # a fake parameter cannot change its format
        x, y = parts.batches[0]
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trains):
            out = parts.model(x)
            if trains:
                parts.criterion(out, y).backward()
        num_parameters = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    return Work(
        num_flops=counter.get_total_flops() * workload.num_micro_batches,
        num_min_bytes=num_parameters * (28 if trains else 2),
    )


# ---- ceilings --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reaches at best, measured, on random data."""

    matmul_flops_per_s: dict[str, float]
    """By precision, of square products."""
    matmul_size: int
    copy_bytes_per_s: float
    """Bytes read plus bytes written, of a copy within the device."""
    copy_bytes: int


_MAX_CEILING_REPETITIONS: Final = 10
_CEILING_BUDGET_MS: Final = 500.0
"""For the repetitions of one product. CPUs without bf16 instructions take hundreds of ms for one."""


def measure_ceilings(device_type: str) -> Ceilings:
    """Measures matrix rates and copy bandwidth. Sets this process's matmul precision."""
    on_gpu = device_type == "cuda"
    size, num_elements = (8192, 2**30) if on_gpu else (512, 2**26)  # 4 GiB and 256 MiB of fp32: beyond every cache
    rates: dict[str, float] = {}
    for precision, product in _products(device_type, size).items():
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        rates[precision] = 2 * size**3 / (_median_ms(product, device_type) / 1e3)
    source = torch.randn(num_elements, device=device_type)
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda: target.copy_(source), device_type)
    num_bytes = source.numel() * source.element_size()
    return Ceilings(
        matmul_flops_per_s=rates,
        matmul_size=size,
        copy_bytes_per_s=2 * num_bytes / (copy_ms / 1e3),
        copy_bytes=num_bytes,
    )


def _products(device_type: str, size: int) -> dict[str, Callable[[], object]]:
    a, b = torch.randn(size, size, device=device_type), torch.randn(size, size, device=device_type)
    products: dict[str, Callable[[], object]] = {"fp32": lambda: a @ b}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if not formats.native_support(a.device, name)[0]:
            continue  # emulated: some other way of emulation would be faster, and no ceiling at all
        low_a, low_b = a.to(dtype), b.to(dtype)
        products[name] = lambda low_a=low_a, low_b=low_b: low_a @ low_b
    if device_type == "cuda":
        products["tf32"] = products["fp32"]
        if torch.cuda.get_device_capability() >= (8, 9):
            # The second operand of _scaled_mm is column-major.
            e4m3_a, e4m3_b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            one = torch.ones((), device=device_type)
            products["fp8"] = lambda: torch._scaled_mm(
                e4m3_a, e4m3_b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
    return products


def _median_ms(run: Callable[[], object], device_type: str) -> float:
    warm_up_ms = [time_block_ms(run, device_type) for _ in range(2)][-1]
    num_repetitions = max(3, min(_MAX_CEILING_REPETITIONS, int(_CEILING_BUDGET_MS / warm_up_ms)))
    return statistics.median(time_block_ms(run, device_type) for _ in range(num_repetitions))


def device_facts(device_type: str) -> dict[str, Any]:
    """What a run has to know of the device: its name, and its free memory."""
    if device_type == "cuda":
        return {"name": torch.cuda.get_device_name(), "free_bytes": torch.cuda.mem_get_info()[0]}
    return {"name": "cpu", "free_bytes": None}
