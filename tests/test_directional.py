"""Curvature along an update, beside the Hessian by double backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxamp import demo, errors
from fxamp.directional import METHODS, directional_curvature


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop, self.norm = nn.Linear(8, 24), nn.Dropout(0.2), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.norm(self.drop(mixed).transpose(1, 2)).square().mean()


def an_update(model: nn.Module, size: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: size * torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}


def by_double_backward(model: nn.Module, loss: torch.Tensor, update: dict[str, torch.Tensor]) -> float:
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    slope = sum(((g * update[name]).sum() for name, g in zip(parameters, slopes, strict=True)), torch.zeros(()))
    bends = torch.autograd.grad(slope, list(parameters.values()), materialize_grads=True)
    return float(sum((b * update[name]).sum() for name, b in zip(parameters, bends, strict=True)))


@pytest.mark.parametrize("method", METHODS)
def test_it_is_that_of_double_backward_and_leaves_everything_as_it_was(method: str):
    torch.manual_seed(0)
    model, x = Attends().double(), torch.randn(3, 5, 8, dtype=torch.float64)
    update = an_update(model, 1e-3)
    model(x).backward()
    state = torch.get_rng_state()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found = directional_curvature(model, lambda: model(x), update, method=method)  # pyright: ignore
    assert found.shape == ()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = by_double_backward(model, model(x), update)
    assert float(found) == pytest.approx(wanted, rel=1e-10 if method == "jvp" else 1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_of_a_quadratic_it_is_exact(method: str):
    model = nn.Linear(2, 1, bias=False)
    update = {"weight": torch.tensor([[1.0, 2.0]])}
    bend = directional_curvature(model, lambda: (3 * model.weight**2).sum(), update, method=method)  # pyright: ignore
    assert float(bend) == 6 * 5


def test_it_is_the_second_difference_of_the_loss_along_the_update():
    config = demo.DemoConfig(model=demo.GPTConfig(num_layers=1, num_heads=2, width=16, num_context_bytes=16))
    model = demo.initial_model(config)
    batch = demo.Corpus.of_stdlib().train_batches(config)[0]
    update = an_update(model, 3e-3)

    def loss_at(factor: float) -> float:
        moved = demo.initial_model(config).double()
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p += factor * update[name]
        return moved(batch[:, :-1], batch[:, 1:]).item()

    bend = directional_curvature(model, lambda: model(batch[:, :-1], batch[:, 1:]), update)
    assert float(bend) == pytest.approx(loss_at(1) - 2 * loss_at(0) + loss_at(-1), rel=0.05)


@pytest.mark.parametrize(
    ("update", "text"),
    [
        ({"bias": torch.ones(3)}, "an update of 'bias' has shape [3], and 'bias' has [1]"),
        ({"other": torch.ones(1)}, "an update of 'other' has shape [1], and 'other' is no parameter"),
        ({"bias": 1.0}, "an update of 'bias' is a float, and 'bias' has [1]"),
        ([torch.ones(1)], "was given a list as its update"),
        (None, "was given a NoneType as its update"),
    ],
)
def test_an_update_has_to_fit(update: dict[str, torch.Tensor], text: str):
    model = nn.Linear(2, 1)
    with pytest.raises(errors.InvalidOption) as caught:
        directional_curvature(model, lambda: model(torch.ones(1, 2)).sum(), update)
    assert text in str(caught.value)


def test_what_is_measured_is_a_module_and_a_closure():
    model = nn.Linear(2, 1)
    for wrong in ((model.forward, lambda: model(torch.ones(1, 2)).sum()), (model, model(torch.ones(1, 2)).sum())):
        with pytest.raises(errors.InvalidOption, match=r"It takes \(model, closure, update\)"):
            directional_curvature(*wrong, {})  # pyright: ignore[reportArgumentType]


def test_a_compiled_module_is_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(errors.InvalidOption, match="a compiled module"):
        directional_curvature(torch.compile(model), lambda: model(torch.ones(1, 2)).sum(), {})  # pyright: ignore
    with pytest.raises(errors.UnknownOption, match="unknown method 'hessian'"):
        directional_curvature(model, lambda: model(torch.ones(1, 2)).sum(), {}, method="hessian")  # pyright: ignore
