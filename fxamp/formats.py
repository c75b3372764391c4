"""Facts about float formats, computed from `torch.finfo`, and about what a device computes in hardware."""

from __future__ import annotations

import functools
import math
from types import MappingProxyType
from typing import Final

import torch

PRECISIONS: Final = ("auto", "fp32", "tf32", "bf16", "fp16", "fp8")
"""Names of precisions, as users write them. "auto" resolves to one of the others, per device."""

STORAGE: Final = MappingProxyType(
    {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""Precision -> dtype of a value that is stored in it (tf32 is fp32 in memory)."""

NAMES: Final = MappingProxyType(
    {
        torch.float64: "f64",
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float8_e4m3fn: "e4m3",
        torch.float8_e5m2: "e5m2",
    }
)
"""dtype -> the short name that dumps and reports use."""


def is_number(value: object) -> bool:
    """Is it a number of Python's? True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def name(dtype: torch.dtype) -> str:
    """Short name of a dtype: "bf16", "fp32", "int64"."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


@functools.cache
def smallest(dtype: torch.dtype) -> float:
    """Smallest positive value of a float format, subnormals included."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


@functools.cache  # asked of every cast by every pass
def is_lossless(src: torch.dtype, dst: torch.dtype) -> bool:
    """Does every value of the float format `src` exist in `dst`?

    >>> is_lossless(torch.bfloat16, torch.float32), is_lossless(torch.float16, torch.bfloat16)
    (True, False)
    """
    a, b = torch.finfo(src), torch.finfo(dst)
    return b.eps <= a.eps and b.max >= a.max and smallest(dst) <= smallest(src)


def may_overflow(src: torch.dtype, dst: torch.dtype) -> bool:
    """Can a finite value of `src` be beyond the largest finite value of `dst`?"""
    return torch.finfo(src).max > torch.finfo(dst).max


def overflows_at(dtype: torch.dtype) -> float:
    """The smallest magnitude that is rounded to infinity in a float format: half a step above its largest number.

    >>> overflows_at(torch.float16)
    65520.0
    """
    largest = torch.finfo(dtype).max
    return largest + (2.0 ** (math.frexp(largest)[1]) - largest) / 2


def has(value: float, dtype: torch.dtype) -> bool:
    """Is a number one of this format, or an infinity?"""
    if not math.isfinite(value) or value == 0:
        return True
    info = torch.finfo(dtype)
    exponent = max(math.frexp(value)[1] - 1, round(math.log2(info.smallest_normal)))
    quantum = 2.0**exponent * info.eps
    return abs(value) <= info.max and math.fmod(value, quantum) == 0


def is_narrow(dtype: torch.dtype) -> bool:
    """Is it a float format in which some float32 values do not exist?"""
    return dtype.is_floating_point and not is_lossless(torch.float32, dtype)


@functools.cache
def narrow_names() -> frozenset[str]:
    """Short names of the float formats that are narrower than fp32."""
    return frozenset(text for dtype, text in NAMES.items() if is_narrow(dtype))


def _cpu_flag(*names: str) -> bool:
    return any(getattr(torch.cpu, f"_is_{n}_supported", lambda: False)() for n in names)


def native_support(device: torch.device, precision: str) -> tuple[bool, str]:
    """(does this device compute products in `precision` in hardware, why).

    "auto" and "fp32" are True everywhere. Emulation, as of bf16 on a CPU without bf16 instructions, counts as False:
    it works, but slower than fp32.
    """
    if precision in ("auto", "fp32"):
        return True, "every device"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        # CUDA C++ Programming Guide, "Arithmetic Instructions" by compute capability.
        since = {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}[precision]
        relation = "at least" if (major, minor) >= since else "below"
        return (major, minor) >= since, f"compute capability {major}.{minor}, {relation} {since[0]}.{since[1]}"
    if device.type == "cpu":
        if precision == "bf16":
            ok = _cpu_flag("avx512_bf16", "amx_tile")
            return ok, "AVX512-BF16 or AMX" if ok else "no AVX512-BF16 or AMX instructions"
        if precision == "fp16":
            ok = _cpu_flag("amx_fp16")
            return ok, "AMX-FP16" if ok else "no AMX-FP16 instructions"
        return False, f"CPUs have no {precision} products"
    return False, f"fxamp has no facts about {device.type!r} devices"


def resolve_auto(device: torch.device) -> tuple[str, str]:
    """("bf16" or "fp32", reason): what `precision="auto"` means on a device."""
    ok, why = native_support(device, "bf16")
    return ("bf16", f"auto: {why}") if ok else ("fp32", f"auto: bf16 is not computed in hardware here ({why})")
