from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxamp import formats

FLOATS = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(FLOATS, FLOATS)))
def test_lossless_means_every_value_survives(src: torch.dtype, dst: torch.dtype):
    bits = torch.finfo(src).bits
    if bits <= 16:  # all values of the format, by their bit patterns
        raw = torch.arange(2**bits, dtype=torch.int32).to(torch.int16 if bits == 16 else torch.uint8)
        values = raw.view(src).double()
    else:
        info = torch.finfo(src)
        values = torch.tensor([1 + info.eps, info.max, info.smallest_normal, formats.smallest(src)], dtype=torch.float64)
    values = values[values.isfinite()]
    survive = torch.equal(values.to(dst).double(), values)
    assert formats.is_lossless(src, dst) == survive


@given(st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_lossless_is_transitive(a: torch.dtype, b: torch.dtype, c: torch.dtype):
    if formats.is_lossless(a, b) and formats.is_lossless(b, c):
        assert formats.is_lossless(a, c)


@pytest.mark.parametrize(
    ("src", "dst", "want"),
    [
        (torch.float32, torch.float16, True),
        (torch.float32, torch.bfloat16, True),  # bf16's largest value is a little below fp32's
        (torch.float16, torch.bfloat16, False),
        (torch.float16, torch.float8_e4m3fn, True),
    ],
)
def test_may_overflow(src: torch.dtype, dst: torch.dtype, want: bool):
    assert formats.may_overflow(src, dst) is want


def test_narrow():
    assert [formats.is_narrow(d) for d in (*FLOATS, torch.int64)] == [False, False, True, True, True, True, False]


def test_auto_follows_the_hardware(monkeypatch: pytest.MonkeyPatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(formats, "_cpu_flag", lambda *_: True)
    assert formats.resolve_auto(cpu)[0] == "bf16"
    monkeypatch.setattr(formats, "_cpu_flag", lambda *_: False)
    assert formats.resolve_auto(cpu) == (
        "fp32",
        "auto: bf16 is not computed in hardware here (no AVX512-BF16 or AMX instructions)",
    )


@pytest.mark.parametrize(
    ("capability", "native"),
    [((7, 0), {"fp16"}), ((8, 0), {"fp16", "bf16", "tf32"}), ((9, 0), {"fp16", "bf16", "tf32", "fp8"})],
)
def test_cuda_by_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: set[str]):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cuda", 0)
    assert {p for p in ("tf32", "bf16", "fp16", "fp8") if formats.native_support(device, p)[0]} == native


def test_unknown_devices_compute_nothing_special():
    ok, why = formats.native_support(torch.device("meta"), "bf16")
    assert not ok
    assert "meta" in why
