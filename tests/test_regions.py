"""Autocast regions of the user's own: inside the model, around it, nested, as decorators, across graph breaks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.programs import Fn, decisions, planned, relative_error

w = torch.randn(8, 8, generator=torch.Generator().manual_seed(5)) / 3
x8 = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))


def off(device: str = "cpu"):
    return torch.autocast(device, enabled=False)


def users():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def product(x):
    return F.linear(x, w)


# ---- nestings: (program, formats that its linears compute in, in order; "users": those of a region of the user's own) -------
def off_then_on_again(x):
    with off():
        y = product(x)
    return product(y)


def off_inside_users(x):
    with users():
        y = product(x)
        with off():
            y = product(y.float())
        return product(y).float()


def users_inside_off(x):
    with off():
        y = product(x)
        with users():
            y = product(y)
        y = product(y.float())
    return product(y)


@torch.autocast("cpu", enabled=False)
def decorated(x):
    return product(x)


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated_on(x):
    return product(x).float()


def region_of_another_device(x):
    with off("cuda"):
        return product(x)


def two_devices(x):
    with off("cpu"), off("cuda"):
        return product(x)


@pytest.mark.parametrize(
    ("fn", "formats"),
    [
        (off_then_on_again, ["fp32", "bf16"]),
        (off_inside_users, ["users", "fp32", "users"]),
        (users_inside_off, ["fp32", "users", "fp32", "bf16"]),
        (lambda x: product(decorated(x)), ["fp32", "bf16"]),
        (lambda x: product(decorated_on(x)), ["users", "bf16"]),
        (region_of_another_device, ["bf16"]),
        (two_devices, ["fp32"]),
        (lambda x: checkpoint(decorated, x, use_reentrant=False) + product(x), ["bf16", "fp32"]),
    ],
)
def test_nestings(fn, formats: list[str]):
    _, made = planned(fn, x8)
    linears = [d for d in made.everywhere if d.op == "linear"]
    for d, wanted in zip(linears, formats, strict=True):
        assert d.computes == ("bf16" if wanted == "users" else wanted), d
        if wanted == "users":  # PyTorch casts there itself: fxamp keeps what it traced
            assert (d.cls.value, d.operands) == ("keep", (None,) * len(d.operands))
            assert "region of the user's own" in d.why


class OptedOut(nn.Module):
    """A module that opts out by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.lin(x).tanh()


def test_one_module_opts_out_forward_and_backward():
    torch.manual_seed(0)
    model = Fn(lambda m, x: m.inner(x).sum(), inner=OptedOut())
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    x, twin = x8.clone().requires_grad_(), x8.clone().requires_grad_()
    torch.compile(model, backend=amp)(x).backward()
    model(twin).backward()
    assert x.grad is not None
    assert twin.grad is not None
    assert relative_error(x.grad, twin.grad) < 1e-6  # rounding of tanh's decomposed backward
    assert "inside autocast(enabled=False)" in amp.graphs[0].variants["bf16"].text("plan")
    values = [node.meta.get("val") for node in amp.graphs[0].variants["bf16"].joint.graph.nodes]
    assert {v.dtype for v in values if isinstance(v, torch.Tensor)} == {torch.float32}


def test_a_region_of_the_users_own_is_what_pytorch_makes_of_it():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    got, want = torch.compile(decorated_on, backend=amp)(x8), decorated_on(x8)
    assert relative_error(got, want) < 1e-2
    assert amp.graphs[0].variants["bf16"].casts == ()
    assert amp.graphs[0].variants["bf16"].captured.facts["linear"].region == "users"


# ---- regions around a graph -------------------------------------------------------------------------------------------------
def breaks(x):
    y = product(x)
    torch._dynamo.graph_break()
    return product(y)


def break_in_a_region(x):
    with off():
        y = product(x)
        torch._dynamo.graph_break()
        return product(y)


def break_in_a_function_that_a_region_calls(x):
    with off():
        return breaks(x) * 2


@pytest.mark.filterwarnings("ignore:ambient autocast")
@pytest.mark.parametrize("fn", [break_in_a_region, break_in_a_function_that_a_region_calls])
def test_a_region_holds_across_graph_breaks(fn):
    amp = fxamp.Amp(precision="bf16", lower="eager")
    got = torch.compile(fn, backend=amp)(x8)
    assert len(amp.graphs) > 1
    assert amp.report().num_low_ops == 0
    assert torch.equal(got, fn(x8))


def test_a_graph_behind_a_region_is_lowered():
    amp = fxamp.Amp(precision="bf16", lower="eager")

    def fn(x):
        with off():
            y = product(x)
        torch._dynamo.graph_break()
        return product(y)

    torch.compile(fn, backend=amp)(x8)
    assert amp.report().num_low_ops == 1


def test_autocast_that_is_off_around_the_call_is_said_once():
    amp = fxamp.Amp(precision="bf16", lower="eager")
    first, second = torch.compile(product, backend=amp), torch.compile(lambda x: product(x).relu(), backend=amp)
    call = torch.autocast("cpu", enabled=False)(lambda: (first(x8), second(x8)))
    with pytest.warns(fxamp.FxampWarning, match=r"ambient autocast \(enabled=False\)") as caught:
        call()
    assert len([c for c in caught if "ambient" in str(c.message)]) == 1
    assert amp.report().num_low_ops == 0
    assert torch.autocast_increment_nesting() == 1  # asking left no trace
    torch.autocast_decrement_nesting()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_uncompiled_checkpoint_around_a_compiled_block(use_reentrant: bool):
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    block = torch.compile(product, backend=amp)
    x, twin = x8.clone().requires_grad_(), x8.clone().requires_grad_()
    checkpoint(lambda x: block(x).sin(), x, use_reentrant=use_reentrant).sum().backward()
    block(twin).sin().sum().backward()
    assert x.grad is not None
    assert twin.grad is not None
    assert torch.equal(x.grad, twin.grad)
    assert all(v.plan.num_low_ops == 1 for v in amp.report().variants)


def test_decisions_inside_and_outside_of_a_submodule():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with off():
                y = self.a(x)
            return self.b(y)

    _, made = planned(Outer(), x8)
    assert [d.computes for d in made.decisions.values() if d.op == "linear"] == ["fp32", "bf16"]
    assert decisions(OptedOut(), x8)["linear"].why == "inside autocast(enabled=False)"
