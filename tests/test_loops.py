"""Contract 10: whatever works with Inductor works with fxamp at its defaults. On a GPU, CUDA graphs are part of that."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxamp
from tests.programs import relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def smooth(width: int) -> nn.Module:
    """No ReLU: where bf16 flips one, a gradient differs by a whole row, and a bound says nothing."""
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 2))


@pytest.fixture(params=["inductor", "aot_eager"])
def pair(request: pytest.FixtureRequest, device: str):
    """(compiled model, its eager twin)."""
    model = smooth(16).to(device)
    return torch.compile(model, backend=fxamp.Amp(precision="bf16", lower=request.param)), copy.deepcopy(model)


def test_accumulate_over_four_micro_batches(pair, device: str):
    compiled, _ = pair
    parameters = list(compiled.parameters())
    parts = torch.randn(32, 8, device=device).chunk(4)
    for _ in range(3):  # three steps: CUDA graphs record in the second
        apart = [torch.autograd.grad(compiled(x).pow(2).sum(), parameters) for x in parts]
        want = [a + b + c + d for a, b, c, d in zip(*apart, strict=True)]  # the order in which .grad adds them up
        compiled.zero_grad()
        for x in parts:
            compiled(x).pow(2).sum().backward()
        for p, w in zip(parameters, want, strict=True):
            assert p.grad.dtype == torch.float32
            assert torch.equal(p.grad, w)


def test_keep_all_losses_and_outputs(pair, device: str):
    compiled, twin = pair
    losses, outputs, wants = [], [], []
    for i in range(6):
        x = torch.randn(4, 8, device=device) * (i + 1)
        out = compiled(x)
        losses.append(out.pow(2).mean())
        outputs.append(out)
        wants.append(twin(x))
    for loss, out, want in zip(losses, outputs, wants, strict=True):
        assert relative_error(out, want) < 4e-2
        assert relative_error(loss, want.pow(2).mean()) < 8e-2
    torch.stack(losses).sum().backward()
    torch.stack([w.pow(2).mean() for w in wants]).sum().backward()
    for p, q in zip(compiled.parameters(), twin.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) < 8e-2


def test_hold_outputs_of_inference(pair, device: str):
    compiled, twin = pair
    with torch.no_grad():
        inputs = [torch.randn(4, 8, device=device) * (i + 1) for i in range(6)]
        outputs = [compiled(x) for x in inputs]
        for out, x in zip(outputs, inputs, strict=True):
            assert relative_error(out, twin(x)) < 4e-2


def test_two_optimizers_and_no_zero_grad(pair, device: str):
    compiled, twin = pair
    for model in (compiled, twin):
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(parameters[:2], lr=0.01), torch.optim.AdamW(parameters[2:], lr=0.01)]
        torch.manual_seed(7)
        for _ in range(4):
            model(torch.randn(8, 8, device=device)).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    for p, q in zip(compiled.parameters(), twin.parameters(), strict=True):
        assert relative_error(p, q) < 4e-2


def test_retain_graph_and_two_backwards(device: str):
    # A width of its own: a backward that AOTAutograd's cache kept from a loop without retain_graph refuses to be retained,
    # in stock PyTorch as well.
    model = smooth(12).to(device)
    compiled, twin = torch.compile(model, backend=fxamp.Amp(precision="bf16")), copy.deepcopy(model)
    x = torch.randn(4, 8, device=device)
    for model in (compiled, twin):
        out = model(x)
        out.sum().backward(retain_graph=True)
        out.pow(2).sum().backward()
    for p, q in zip(compiled.parameters(), twin.parameters(), strict=True):
        assert q.grad is not None
        assert relative_error(p.grad, q.grad) < 4e-2


@pytest.mark.gpu
def test_inference_replays_as_a_cuda_graph():
    amp = fxamp.Amp(precision="bf16")
    model = smooth(16).cuda()
    compiled = torch.compile(model, backend=amp)
    with torch.no_grad():
        for _ in range(4):
            compiled(torch.randn(4, 8, device="cuda"))
    assert "CUDA graph: on" in str(amp.report())
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        compiled(torch.randn(4, 8, device="cuda"))
    assert any("GraphLaunch" in event.key for event in prof.key_averages())


@pytest.mark.gpu
def test_tf32_is_set_for_fxamps_graphs_alone():
    x, w = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda", requires_grad=True)
    exact = x.double() @ w.double()

    def fn(x, w):
        return x @ w

    errors = {}
    for precision in ("fp32", "tf32"):
        torch._dynamo.reset()
        out = torch.compile(fn, backend=fxamp.Amp(precision=precision))(x, w)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), w)
        errors[precision] = relative_error(out, exact), relative_error(grad, x.double().T @ (2 * exact))
        assert relative_error(x @ w, exact) < 1e-5, "the switch leaked"
    assert max(errors["fp32"]) < 1e-5
    assert min(errors["tf32"]) > 1e-5
    assert max(errors["tf32"]) < 2e-3
