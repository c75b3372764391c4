from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxamp
from tests.programs import Fn, pull, relative_error


def counting(view: bool) -> Fn:
    def forward(m, x):
        steps = m.steps.view(1).squeeze() if view else m.steps
        y = m.lin(x)
        steps += 1
        return y / steps

    return Fn(forward, lin=nn.Linear(8, 8), steps=torch.zeros((), dtype=torch.long))


def gradients(model: Fn, **options) -> torch.Tensor:
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    compiled = torch.compile(model, **options) if options else model
    torch.manual_seed(1)
    pull(compiled(torch.randn(4, 8)))
    return model.lin.weight.grad


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("lower", ["inductor", "aot_eager"])
@pytest.mark.usefixtures("by_name")
def test_the_backward_sees_what_the_forward_saw(lower: str, view: bool):
    model = counting(view)
    got = gradients(model, backend="fxamp", options={"precision": "fp32", "lower": lower})
    assert relative_error(got, gradients(model)) < 1e-6


@pytest.mark.parametrize("read", [lambda slope: -slope, lambda slope: slope.flip(0).view(2, 4).abs().view(8)])
def test_what_is_saved_is_saved_after_casts_have_moved(read):
    def forward(m, x):
        y = F.prelu(m.lin(x), read(m.slope))  # its cast to bf16 moves above what `read` does, and replaces it
        m.slope += 5
        return y

    model = Fn(forward, lin=nn.Linear(8, 8), slope=torch.rand(8))
    got = gradients(model, backend=fxamp.Amp(precision="bf16", lower="aot_eager"))
    assert relative_error(got, gradients(model)) < 3e-2


@pytest.mark.parametrize("lower", ["inductor", "aot_eager"])
def test_a_clone_is_a_copy(lower: str):
    def forward(m, x):
        y = m.lin(x) * m.slope.clone()  # which plain Inductor removes, and then saves what is written below
        m.slope += 5
        return y

    model = Fn(forward, lin=nn.Linear(8, 8), slope=torch.rand(8))
    got = gradients(model, backend=fxamp.Amp(precision="fp32", lower=lower))
    assert relative_error(got, gradients(model)) < 1e-6


def test_upstream_still_wrong():
    """When this fails, PyTorch is repaired: delete SaveReadsOfMutated and its entry in _patches.py."""
    model = counting(view=False)
    assert relative_error(gradients(model, backend="inductor"), gradients(model)) > 0.1


def test_on_old_versions_the_users_casts_become_opaque(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxamp._patches.roundings_need_an_op", lambda: True)

    def fn(m, x):
        return (m.lin(x).half() * 2).float()

    model = Fn(fn, lin=nn.Linear(8, 8))
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    x = torch.randn(4, 8)
    pull(torch.compile(model, backend=amp)(x))
    targets = [str(n.target) for n in amp.graphs[0].variants["bf16"].joint.graph.nodes]
    # down to fp16 in the forward, and in the backward, where the gradient of the way up goes down
    assert targets.count("fxamp.round_to.default") == 2
    got = model.lin.weight.grad.clone()
    model.zero_grad()
    pull(model(x))
    assert relative_error(got, model.lin.weight.grad) < 2e-2


def test_the_opaque_rounding_is_what_a_cast_is():
    x = torch.tensor([1e5, 1 / 3, -0.0, float("nan")])
    for dtype in (torch.float16, torch.bfloat16):
        got = torch.ops.fxamp.round_to(x, dtype)
        assert got.dtype == dtype
        assert torch.equal(got.nan_to_num(7), x.to(dtype).nan_to_num(7))
    finite = torch.randn(4)  # opcheck compares with allclose, for which NaN is unequal to itself
    torch.library.opcheck(torch.ops.fxamp.round_to.default, (finite, torch.float16))
