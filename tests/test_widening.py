"""Where low values are widened: once, for all that hand them on to readers that want fp32."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp import widening
from tests.programs import Fn, decisions, planned, pull, relative_error, step

X = torch.linspace(-2, 2, 48).view(6, 8)


def rotated(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), -1)


def rotary(m: Any, x: torch.Tensor) -> torch.Tensor:
    q = m.lin(x)
    return q * m.cos + rotated(q) * m.sin


def with_rotary() -> Fn:
    torch.manual_seed(0)
    return Fn(rotary, lin=nn.Linear(8, 8), cos=torch.rand(8), sin=torch.rand(8))


def widened(fn: Callable[..., Any], *inputs: Any, **parts: Any) -> list[str]:
    """The operations of a program on a linear layer that are given its one widening."""
    _, made = planned(Fn(fn, lin=nn.Linear(8, 8), **parts), *inputs)
    return [d.op or "" for d in made.decisions.values() if d.widened_early]


def test_what_is_moved_is_widened_before():
    assert decisions(with_rotary(), X)["cat"].computes == "fp32"
    assert widened(rotary, X, cos=torch.rand(8), sin=torch.rand(8)) == ["getitem", "neg", "getitem", "cat"]


def test_what_computes_is_widened_before():
    assert widened(lambda m, x: (h := m.lin(x)) * 0.5 * (1 + h.pow(3)), X) == ["mul"]


NOT: dict[str, Callable[..., Any]] = {
    "one reader: as many gradients are narrowed either way": lambda m, x: m.lin(x).relu().exp(),
    "fewer elements behind it": lambda m, x: m.lin(x)[:2].exp(),
    "a reader that wants it low": lambda m, x: (h := m.lin(x)) * (r := rotated(h)).exp() + m.lin(r),
    "it leaves the graph": lambda m, x: ((h := m.lin(x)).exp(), r := rotated(h), r.exp()),
    "it is written": lambda m, x: (h := m.lin(x)).exp()[:3] + (s := (r := h.neg())[:3]).exp() + r.mul_(2)[:3] + s,
}


@pytest.mark.parametrize("fn", NOT.values(), ids=NOT.keys())
def test_not_where(fn):
    assert widened(fn, X) == []


def test_not_where_a_cast_would_lie_otherwise_in_memory():
    """A cast of every other column is dense: what was a copy of it might now share its memory."""

    def several_readers(m: Any, h: torch.Tensor) -> torch.Tensor:
        return m.head(h) + h.exp() + h.neg().exp()

    def dense(m: Any, x: torch.Tensor) -> torch.Tensor:
        return several_readers(m, m.lin(x)[:, ::2] * 2)

    def strided(m: Any, x: torch.Tensor) -> torch.Tensor:
        return several_readers(m, m.lin(x)[:, ::2])

    assert widened(dense, X, head=nn.Linear(4, 4)) == ["neg"]
    assert widened(strided, X, head=nn.Linear(4, 4)) == []


def test_forward_keeps_every_bit_and_gradients_are_rounded_less_often(monkeypatch: pytest.MonkeyPatch):
    model, exact = with_rotary(), with_rotary().double()

    def run() -> tuple[torch.Tensor, list[float]]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=fxamp.Amp(precision="bf16", lower="aot_eager"))
        outputs, errors = list[torch.Tensor](), list[float]()
        for seed in range(4):
            x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            x64 = x.detach().double().requires_grad_()
            outputs.append(compiled(x))
            pull(outputs[-1])
            pull(exact(x64))
            assert x.grad is not None
            assert x64.grad is not None
            errors.append(relative_error(x.grad, x64.grad))
        return torch.cat(outputs), errors

    output, errors = run()
    monkeypatch.setattr(widening, "early", lambda *_, **__: frozenset())
    other, more = run()
    assert torch.equal(output, other)
    assert statistics.fmean(errors) < statistics.fmean(more)


def test_nothing_is_widened_in_the_end():
    """The joint passes leave the widening to the operations that read it, behind the movement as well."""
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    step(with_rotary(), (X.clone().requires_grad_(),), backend=amp)
    (record,) = amp.graphs
    casts = [(c.src, c.dst) for c in record.variants["bf16"].casts]
    # forward: x, weight, bias; backward: the gradient of q. Gradients of parameters and input leave in fp32.
    assert casts.count(("fp32", "bf16")) == 4
    assert casts.count(("bf16", "fp32")) == 3
