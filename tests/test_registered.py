"""Custom operations do what `torch.library.register_autocast` declares, as under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxamp
from tests.programs import decisions, relative_error

x, w = torch.randn(4, 8), torch.randn(8, 8)


def make(name: str, cast_inputs: torch.dtype | None) -> torch.library.CustomOpDef:
    @torch.library.custom_op(f"fxamp_registered::{name}", mutates_args=())
    def scale(a: Tensor, b: Tensor, n: Tensor) -> Tensor:
        return a * b.sum() * n

    @scale.register_fake
    def _(a: Tensor, b: Tensor, n: Tensor) -> Tensor:
        return a * b.sum() * n

    if cast_inputs is not None:
        torch.library.register_autocast(f"fxamp_registered::{name}", "cpu", cast_inputs)
    return scale


OPS = {
    "half": (make("half", torch.float16), "fp16"),
    "brain": (make("brain", torch.bfloat16), "bf16"),
    "full": (make("full", torch.float32), "fp32"),
    "silent": (make("silent", None), "fp32"),
}
n = torch.tensor(3)


@pytest.mark.parametrize("variant", ["bf16", "fp16"])
@pytest.mark.parametrize("name", list(OPS))
def test_computes_in_what_is_registered_whatever_the_variant(name: str, variant: str):
    op, want = OPS[name]
    d = decisions(lambda a: op(a @ w, a, n), x, variant=variant)[f"fxamp_registered::{name}"]
    assert d.computes == want
    assert ("register_autocast" in d.why) == (name != "silent")


def test_is_called_with_what_autocast_would_call_it_with():
    op, _ = OPS["half"]
    got = torch.compile(lambda a: op(a @ w, a, n), backend=fxamp.Amp(precision="bf16", lower="aot_eager"))(x)
    with torch.autocast("cpu", torch.bfloat16):
        want = op(x @ w, x, n)
    assert (want.dtype, got.dtype) == (torch.float16, torch.float32)
    assert relative_error(got, want) < 1e-6


def test_a_rule_of_the_policy_decides_before():
    op, _ = OPS["half"]
    d = decisions(lambda a: op(a, a, n), x, policy={"fxamp_registered::*": "fp32"})["fxamp_registered::half"]
    assert (d.computes, d.why) == ("fp32", "rule op:fxamp_registered::*=fp32")


def test_in_fp32_autocast_is_off():
    op, _ = OPS["half"]
    d = decisions(lambda a: op(a, a, n), x, variant="fp32")["fxamp_registered::half"]
    assert d.computes == "fp32"
