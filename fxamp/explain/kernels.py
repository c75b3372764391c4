"""Which kernels ran: a few steps under PyTorch's profiler, and what the names of kernels tell.

On a GPU the kernels of CUDA, those inside of CUDA graphs included; elsewhere the operations that the CPU ran, by the time that
each took without those it called. Names are all that a profile has of a kernel: what they say of formats and matrix units is
read off the conventions of cuBLAS (`nvjet_tst`, `s16816gemm`), CUTLASS (`tensorop`, `simt`), cuDNN (`xmma`, `wgmma`),
FlashAttention, and Inductor (`triton_poi_fused_add_0`); where a name says nothing, so does this.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from fxamp.explain import printed

if TYPE_CHECKING:  # the profiler is imported where it is used: `import fxamp` stays light
    from torch.autograd.profiler_util import FunctionEvent

MAX_ROWS: Final = 30
"""Kernels that a printed profile shows, the longest first."""

WIDTH_CHARACTERS: Final = 140


# ---- events of the profiler ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Event:
    """What matters of a profiler's event."""

    name: str
    is_on_device: bool
    start_us: float
    end_us: float
    self_us: float = 0.0
    """Of the host's: without the events inside."""
    op: str = ""
    """Of the device's: the operation that launched it, "aten::mm"; "" where a CUDA graph did."""


def events_of(profiled: Iterable[FunctionEvent], *, ranges: Sequence[str] = ()) -> list[Event]:
    """The profiler's events, without the copies of named ranges (`ranges`, the optimizer's) on the device's timeline."""
    from torch.autograd import DeviceType

    given = list(profiled)
    launched: dict[str, Counter[str]] = {}
    for e in given:
        for kernel in e.kernels:
            launched.setdefault(kernel.name, Counter())[e.name] += 1
    events: list[Event] = []
    for e in given:
        is_on_device = e.device_type == DeviceType.CUDA
        if is_on_device and (e.is_user_annotation or e.name in ranges):
            continue
        span, by = e.time_range, launched.get(e.name)
        events.append(
            Event(
                name=e.name,
                is_on_device=is_on_device,
                start_us=span.start,
                end_us=span.end,
                self_us=0.0 if is_on_device else e.self_cpu_time_total,
                op=by.most_common(1)[0][0] if is_on_device and by else "",
            )
        )
    return events


# ---- what the name of a kernel says ---------------------------------------------------------------------------------------
_ONLY_CASTS: Final = re.compile(
    r"triton_poi_fused(_(_to_copy|convert_element_type|_unsafe_view|view|t|transpose|permute))*"
    r"_(_to_copy|convert_element_type)(_(_unsafe_view|view|t|transpose|permute))*_\d+"
)
"""A kernel of Inductor whose name lists nothing but casts and views."""

_OF_TRITON: Final = (
    ("triton_poi_", "pointwise"),
    ("triton_red_", "reduction"),
    ("triton_per_", "reduction"),
    ("triton_for_", "optimizer"),  # Inductor's foreach kernels
    ("triton_tem_", "matmul"),
    ("triton_mm", "matmul"),
)
_OF_OTHERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    # The first category with a matching part of the name, in lower case, wins: narrow names stand before wide ones.
    ("copy", ("memcpy", "memset", "fillfunctor", "direct_copy_kernel", "nchwtonhwc", "nhwctonchw")),
    ("cast", ("float16_copy_kernel", "float8_copy_kernel")),
    ("attention", ("flash", "fmha", "sdpa", "attention")),
    ("optimizer", ("multi_tensor_apply", "amp_update_scale")),
    ("reduction", ("reduce", "softmax", "layer_norm", "layernorm", "batch_norm", "batchnorm", "bn_fw", "bn_bw")),
    ("matmul", ("gemm", "gemv", "nvjet", "cutlass", "cublas", "xmma", "wgmma", "conv", "dgrad", "wgrad", "fprop")),
    ("pointwise", ("elementwise", "index", "catarray", "embedding")),
)
"""Parts of the names of kernels of torch, cuBLAS, cuDNN and FlashAttention, as profiles show them."""


def kernel_category(name: str) -> str:
    """One of "matmul" (convolutions included), "attention", "optimizer", "pointwise", "cast", "reduction", "copy",
    "other"."""
    lowered = name.lower()
    if _ONLY_CASTS.fullmatch(lowered):
        return "cast"
    for prefix, category in _OF_TRITON:
        if lowered.startswith(prefix):
            return "attention" if "attention" in lowered and category == "matmul" else category
    return next((category for category, parts in _OF_OTHERS if any(part in lowered for part in parts)), "other")


_NVJET: Final = re.compile(r"nvjet_(?:sm\d+_)?(?P<formats>[a-z]+)_")
_LETTERS: Final = (("t", "bf16"), ("h", "fp16"), ("s", "tf32"), ("q", "fp8"), ("r", "fp8"), ("d", "f64"))
_FORMATS: Final = (
    # The first that matches wins: products accumulate in fp32 whatever they read, so fp32 stands last.
    ("fp8", ("e4m3", "e5m2", "float8", "fp8")),
    ("bf16", ("bf16", "bfloat16")),
    ("fp16", ("f16", "fp16", "half", "s16816", "s884", "hgemm", "h884", "hmma")),
    ("tf32", ("tf32", "s1688")),
    ("f64", ("f64", "double", "dgemm", "d884")),
    ("fp32", ("f32", "float", "sgemm", "simt")),
)


def kernel_format(name: str) -> str:
    """The format that a product, convolution or attention reads: "bf16", "fp16", "fp8", "tf32", "fp32", "f64"; "" where the
    name does not say, and for all other kernels."""
    if kernel_category(name) not in ("matmul", "attention"):
        return ""
    lowered = name.lower()
    nvjet = _NVJET.search(lowered)
    if nvjet is not None:
        return next((fmt for letter, fmt in _LETTERS if nvjet["formats"].startswith(letter)), "")
    return next((fmt for fmt, parts in _FORMATS if any(part in lowered for part in parts)), "")


_ON_UNITS: Final = (
    *("nvjet", "tensorop", "wgmma", "gmma", "hmma", "imma", "16816", "1688", "884", "_tc_", "xmma"),
    *("flash_fwd", "flash_bwd", "flash_fprop", "flash_bprop", "fmha_cutlass", "sdpa"),
)
_OFF_UNITS: Final = ("simt", "sgemm", "gemv", "dgemm", "dot_kernel", "ffma", "gemmk1", "scalar")


def on_matrix_units(name: str) -> bool | None:
    """Does a product, convolution or attention run on matrix units? None where the name does not say, and for all other
    kernels."""
    if kernel_category(name) not in ("matmul", "attention"):
        return None
    lowered = name.lower()
    if any(part in lowered for part in _OFF_UNITS) and not any(part in lowered for part in ("tensorop", "1688", "16816")):
        return False
    fmt = kernel_format(name)
    if fmt == "fp32":
        return None if "fmha" in lowered or "triton" in lowered else False
    return True if any(part in lowered for part in _ON_UNITS) else None


# ---- kernels of a step ------------------------------------------------------------------------------------------------------
_NUMBER: Final = re.compile(r"_\d+(?=_|$)")
_FUSED: Final = re.compile(r"^triton_[a-z]+_fused_(?P<ops>\w+)$")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All launches of one kernel in a step. Generated kernels are told apart by what they fuse, not by their number."""

    name: str
    count: float
    """Launches, mean per step."""
    ms: float
    """Of all of them, mean per step."""
    op: str = ""
    """What launched it, "aten::mm"; of a generated kernel what it fuses, "_to_copy_add"; "" where nothing says."""

    @property
    def category(self) -> str:
        """As of `kernel_category`."""
        return kernel_category(self.name)

    @property
    def format(self) -> str:
        """As of `kernel_format`."""
        return kernel_format(self.name)

    @property
    def is_on_matrix_units(self) -> bool | None:
        """As of `on_matrix_units`."""
        return on_matrix_units(self.name)


def kernels_of(events: Sequence[Event], num_steps: int) -> dict[str, Kernel]:
    """Kernels of the device by name, means per step."""
    return _summed([(e.name, (e.end_us - e.start_us) / 1e3, e.op) for e in events if e.is_on_device], num_steps)


def host_operations_of(events: Sequence[Event], num_steps: int) -> dict[str, Kernel]:
    """What the CPU ran, by name, means per step; of each the time without what it called."""
    return _summed([(e.name, e.self_us / 1e3, "") for e in events if not e.is_on_device], num_steps)


def _summed(runs: Iterable[tuple[str, float, str]], num_steps: int) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for given, ms, op in runs:
        name = _NUMBER.sub("", given) if given.startswith("triton") else given
        fused = _FUSED.match(name)
        old = found.get(name, Kernel(name=name, count=0.0, ms=0.0, op=fused["ops"] if fused else op))
        found[name] = Kernel(name=name, count=old.count + 1 / num_steps, ms=old.ms + ms / num_steps, op=old.op)
    return found


# ---- a profile ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a step runs. `print(profile)` shows a table; the fields are for programs."""

    device: str
    """"cuda", or "cpu": then `kernels` are operations of the CPU, by their own time."""
    num_steps: int
    kernels: tuple[Kernel, ...]
    """The longest first."""

    @property
    def ms(self) -> float:
        """Of all kernels of a step, one after another."""
        return sum(k.ms for k in self.kernels)

    @property
    def ms_on_matrix_units(self) -> float:
        """Of those that run on matrix units, by their names."""
        return sum(k.ms for k in self.kernels if k.is_on_matrix_units)

    def share(self, kernel: Kernel) -> float:
        """Of the step's time in kernels, 0 to 1."""
        return kernel.ms / self.ms if self.ms else 0.0

    def __str__(self) -> str:
        is_on_gpu = self.device == "cuda"
        what = "kernels" if is_on_gpu else "operations"
        # The CPU's operations launch no kernels of which a name would say more.
        told = ("operation", "kernel", "kind", "format", "matrix units", "launches") if is_on_gpu else ("operation", "calls")
        columns = (*told, "ms", "share")
        title = f"{what} of a step on {self.device}, means of {self.num_steps} steps"
        table = printed.table(title, columns, numbers=columns[-3:], max_width=56)
        if is_on_gpu:
            table.columns[0].max_width = 28
        words = {True: "yes", False: "no", None: ""}
        for k in self.kernels[:MAX_ROWS]:
            about = (k.op, k.name, k.category, k.format, words[k.is_on_matrix_units]) if is_on_gpu else (k.name,)
            table.add_row(*about, f"{k.count:g}", f"{k.ms:.3f}", f"{self.share(k):.1%}")
        rest = self.kernels[MAX_ROWS:]
        if rest:
            ms = sum(k.ms for k in rest)
            table.caption = f"and {len(rest)} more, {ms:.3f} ms together: profile.kernels has them all"
        units = f", {self.ms_on_matrix_units / self.ms:.1%} of it on matrix units" if is_on_gpu and self.ms else ""
        return printed.text([table, f"{self.ms:.3f} ms a step in {what}{units}"], printed.width(WIDTH_CHARACTERS))


class Recorder:
    """Profiles what runs between `start` and `stop`. Waits for the device at both."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        self._wait = torch.cuda.synchronize if on_gpu else lambda: None

    def start(self) -> None:
        """Begins to record."""
        self._wait()
        self._profiler.start()

    def stop(self, num_steps: int) -> Profile:
        """Ends, after so many steps."""
        self._wait()
        self._profiler.stop()
        return profile_of(events_of(self._profiler.events() or ()), num_steps)


def profile_of(events: Sequence[Event], num_steps: int) -> Profile:
    """The profile in recorded events: of the device if it did anything, else of the host."""
    on_device = kernels_of(events, num_steps)
    kernels = on_device or host_operations_of(events, num_steps)
    order = sorted(kernels.values(), key=lambda k: -k.ms)
    return Profile(device="cuda" if on_device else "cpu", num_steps=num_steps, kernels=tuple(order))


def profile(step: Callable[[], object], steps: int) -> Profile:
    """Runs a step once, then so many times under the profiler. Waits for the device."""
    step()
    recorder = Recorder()
    recorder.start()
    try:
        for _ in range(steps):
            step()
    finally:  # a profiler that is left running takes the process down with it
        made = recorder.stop(steps)
    return made
