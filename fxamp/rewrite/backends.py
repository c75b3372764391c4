"""Which fused kernel of attention is the fastest for its operands: measured while compiling, under mode="max-autotune"; by
rule for small ones that are recorded.

PyTorch chooses where `scaled_dot_product_attention` is traced, by a list of priorities that is one for the process. Here each
call gets a list of its own (`ops.ATTENTION`), which holds while that call is traced, forward and, since autograd follows from
what was traced, backward; compiled code has the kernels by name. No switch of the process is touched beyond that.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from fxamp import capture, graph, ops
from fxamp.passes import Change, Kept
from fxamp.rewrite.attention import arguments, change_arguments

WORTH: Final = 0.95
"""A kernel is taken before PyTorch's own choice if it needs less than this share of its time: small differences are noise as
often as not, and who compiles again should get the same kernel."""

NUM_REPETITIONS: Final = 7
"""Of which the median counts, behind two that warm up."""

SMALL_FLOPS: Final = 5e8
"""Up to here the product of queries and keys counts as small. A tenth of what a GPU with some 400 TFLOP/s in attention does
while it waits twice for 5 microseconds: flash has the slower products."""

_OFFERED: Final = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_PREFERS_CUDNN: Final = [*_OFFERED, SDPBackend.MATH]
"""PyTorch's own list of kernels, the preferred first, where it prefers cuDNN."""


@dataclass(frozen=True)
class Operands:
    """What decides the speed of an attention: layouts, not values."""

    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool] | None, ...]
    """(shape, strides, dtype, requires a gradient?) of queries, keys, values, and the mask if there is one."""
    device: torch.device
    options: tuple[tuple[str, Any], ...]
    """The other arguments, by name."""


Measure = Callable[[Operands], Mapping[SDPBackend, float]]
"""Milliseconds of forward, and backward if anything requires a gradient, of each kernel that takes these operands."""


@dataclass(frozen=True)
class ChooseAttentionKernels:
    """Lets each low attention on a GPU be traced with the kernel that is the fastest for its operands.

    requires: rewritten Dynamo graph, behind LowAttention.  changes: the argument `kernels` of attention.  keeps: all else; two
    kernels differ in how they round inside, as those do among which Inductor chooses in this mode.

        y = fxamp.attention(q, k, v)     ->     y = fxamp.attention(q, k, v, kernels=[cuDNN, Flash, efficient, math])
    kept: on other devices than CUDA; symbolic sizes; where one kernel alone takes the operands, or deterministic ones are
    asked for.
    """

    measure: Measure | None = None
    """None: on the device itself."""

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_marked, kept, known = 0, list[Kept](), dict[Operands, Measured | str]()
        for part in graph.all_of(gm):
            for node in [x for x in part.graph.nodes if x.target is ops.ATTENTION]:
                operands = _operands(node)
                if isinstance(operands, Operands) and operands not in known:
                    known[operands] = self._choose(operands)
                verdict = known[operands] if isinstance(operands, Operands) else operands
                if isinstance(verdict, str):
                    kept.append(Kept(node=node.name, reason=verdict, where=capture.source_line(node)[0]))
                    continue
                change_arguments(node, kernels=list(verdict.order))
                graph.set_meta(node, {graph.MEASURED: str(verdict)})
                num_marked += 1
            part.recompile()
        return Change(pass_name=type(self).__name__, num_marked=num_marked, kept=tuple(kept))

    def _choose(self, operands: Operands) -> Measured | str:
        allowed = [kernel for kernel in ops.allowed_kernels() if kernel in _OFFERED]
        if self.measure is None and operands.device.type != "cuda":
            return f"kernels of attention are measured on CUDA, and this is on {operands.device.type}"
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms are asked for"
        found = (self.measure or measured_on_device)(operands)
        times = {kernel: found[kernel] for kernel in allowed if kernel in found}
        if len(times) < 2:
            return f"{', '.join(map(_name, times)) or 'no fused kernel'} alone takes these operands"
        stock, fastest = next(iter(times)), min(times, key=lambda kernel: times[kernel])
        first = fastest if times[fastest] < WORTH * times[stock] else stock
        rest = [kernel for kernel in ops.allowed_kernels() if kernel is not first]
        return Measured(order=tuple(int(kernel.value) for kernel in (first, *rest)), times=tuple(times.items()))


@dataclass(frozen=True)
class Measured:
    """A choice, and what it rests on."""

    order: tuple[int, ...]
    """Values of SDPBackend, the chosen one first."""
    times: tuple[tuple[SDPBackend, float], ...]
    """Milliseconds, in PyTorch's own order."""

    def __str__(self) -> str:
        times = ", ".join(f"{_name(kernel)} {ms:.3f} ms" for kernel, ms in self.times)
        return f"{_name(SDPBackend(self.order[0]))} chosen by measurement: {times}"


def _name(kernel: SDPBackend) -> str:
    names = {"CUDNN_ATTENTION": "cuDNN", "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "memory-efficient"}
    return names.get(kernel.name, kernel.name.lower())


def _operands(node: fx.Node) -> Operands | str:
    """What is measured for a node, or why nothing is."""
    given = arguments(node)
    tensors: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool] | None] = []
    for name in ("query", "key", "value", "attn_mask"):
        operand = given.pop(name, None)
        value = graph.value_of(operand) if isinstance(operand, fx.Node) else None
        if operand is None:
            tensors.append(None)
            continue
        if not isinstance(value, FakeTensor) or not all(type(x) is int for x in (*value.shape, *value.stride())):
            return "its sizes are symbolic"
        requires_grad = value.requires_grad and name != "attn_mask"
        tensors.append((tuple(value.shape), tuple(value.stride()), value.dtype, requires_grad))
    if any(isinstance(x, fx.Node) for x in given.values()):
        return "an option is computed in the graph"
    options = tuple(sorted((name, value) for name, value in given.items() if name != "kernels"))
    return Operands(tuple(tensors), graph.value_of(node).device, options)


@dataclass(frozen=True)
class FlashForSmall:
    """Lets small low attention that a CUDA graph replays be traced with flash before cuDNN, whose kernels begin with a memset:
    behind one, the next kernel of a graph starts 4 to 8 microseconds late (H200, CUDA 13), forward and backward. On some
    devices PyTorch prefers cuDNN; where its list is what it writes there itself, it is taken as asked for by nobody.

    requires: rewritten Dynamo graph, behind LowAttention.  changes: the argument `kernels` of attention.  keeps: all else; two
    kernels differ in how they round inside.

        y = fxamp.attention(q, k, v)     ->     y = fxamp.attention(q, k, v, kernels=[flash, cuDNN, efficient, math])
    kept: large ones, symbolic sizes, and all where somebody has another list. Where flash does not take the
    operands, the next one does.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        allowed, num_marked = ops.allowed_kernels(), 0
        is_free = allowed[:1] == [SDPBackend.FLASH_ATTENTION] or allowed[: len(_PREFERS_CUDNN)] == _PREFERS_CUDNN
        if not is_free or SDPBackend.CUDNN_ATTENTION not in allowed:
            return Change(pass_name=type(self).__name__)  # somebody wants another order, or there is nothing to choose
        order = [SDPBackend.FLASH_ATTENTION, *(x for x in allowed if x is not SDPBackend.FLASH_ATTENTION)]
        for part in graph.all_of(gm):
            for node in [x for x in part.graph.nodes if x.target is ops.ATTENTION and _num_flops(x) <= SMALL_FLOPS]:
                change_arguments(node, kernels=[int(kernel.value) for kernel in order])
                num_marked += 1
            part.recompile()
        return Change(pass_name=type(self).__name__, num_marked=num_marked)


def _num_flops(node: fx.Node) -> float:
    """Of the product of queries and keys; inf where sizes are symbolic."""
    operands = _operands(node)
    if isinstance(operands, str) or operands.tensors[0] is None or operands.tensors[1] is None:
        return math.inf
    queries, keys = operands.tensors[0][0], operands.tensors[1][0]
    return 2.0 * math.prod(queries) * keys[-2]


# ---- the measurement ------------------------------------------------------------------------------------------------------
def measured_on_device(operands: Operands) -> Mapping[SDPBackend, float]:
    """As `Measure`, on random tensors; random numbers of the program stay what they are. Waits for the device."""
    found = dict[SDPBackend, float]()
    off = torch.autocast(operands.device.type, enabled=False)
    with _disable_current_modes(), torch.random.fork_rng(devices=[operands.device]), torch.enable_grad(), off:
        try:
            tensors = [None if x is None else _random(*x, device=operands.device) for x in operands.tensors]
            for kernel in _OFFERED:
                ms = _time_ms(tensors, operands, kernel)
                if ms is not None:
                    found[kernel] = ms
        except torch.cuda.OutOfMemoryError:
            return {}
    return found


def _random(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, *, device: torch.device
) -> Tensor:
    num_elements = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    numbers = torch.randn(num_elements, device=device)
    numbers = numbers > 0 if dtype == torch.bool else numbers.to(dtype)
    return numbers.as_strided(shape, stride).requires_grad_(requires_grad)


def _time_ms(tensors: list[Tensor | None], operands: Operands, kernel: SDPBackend) -> float | None:
    """The median, or None if the kernel does not take these operands."""
    wanted = [x for x in tensors if x is not None and x.requires_grad]
    options = dict(operands.options)

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, **options)  # pyright: ignore[reportArgumentType]
        if wanted:
            torch.autograd.grad(out, wanted, out.detach())

    times: list[float] = []
    with sdpa_kernel([kernel]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel that does not take them says why, once for each rule
        try:
            for _ in range(2 + NUM_REPETITIONS):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                run()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:  # "No available kernel": its way to say no
            return None
    return statistics.median(times[2:])
