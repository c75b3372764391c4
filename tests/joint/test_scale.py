"""Scaling in the joint graph: the program sees gradients that are bit for bit what they were, whatever it does with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.programs import Fn, small_models

LOWERINGS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


def gradients(model: nn.Module, run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Gradients of all outputs, each weighted with fixed numbers, for parameters and for inputs that want one."""
    inputs = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
    out = run(*inputs)
    outputs = [y for y in (out if isinstance(out, (tuple, list)) else (out,)) if y.requires_grad]
    generator = torch.Generator().manual_seed(0)
    total = sum(((y * torch.randn(y.shape, generator=generator)).sum() for y in outputs), torch.zeros(()))
    (total.real if total.is_complex() else total).backward()
    return [x.grad for x in (*inputs, *model.parameters())]


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def scaled_and_not(model: nn.Module, inputs: tuple[Tensor, ...], scale: float, **options: Any) -> tuple[list[Any], list[Any]]:
    results = []
    for scaling in (scale, None):
        twin = copy.deepcopy(model)
        amp = fxamp.Amp(precision="fp32", scaling=scaling, lower="aot_eager", **options)
        results.append(gradients(twin, torch.compile(twin, backend=amp), inputs))
    return results[0], results[1]


def same(got: list[Tensor | None], want: list[Tensor | None]) -> bool:
    return all((g is None and w is None) or torch.equal(g, w) for g, w in zip(got, want, strict=True))  # pyright: ignore


@pytest.mark.parametrize("name", small_models())
def test_a_power_of_two_leaves_every_gradient_bit_for_bit(name: str):
    model, inputs = small_models()[name]
    got, want = scaled_and_not(model, inputs, 2.0**10)
    assert same(got, want)
    assert any(w is not None for w in want)


# ---- programs whose gradients take unusual ways ----------------------------------------------------------------------------
def alias_of_an_intermediate(m: Any, x: Tensor) -> Any:
    h = m.lin(x)
    return h, h.view(-1), h.t()


def mutated_input(m: Any, x: Tensor) -> Any:
    y = m.lin(x)
    x.mul_(2) if not x.requires_grad else None
    return y * x


def views_of_one_base(m: Any, x: Tensor) -> Any:
    a, b = x.chunk(2)
    h = m.lin(torch.cat([a, b]))
    h[:2].mul_(3)
    return h.tanh()


def identity(m: Any, x: Tensor) -> Any:
    return x, m.lin(x), x.view(-1)


def unused_output(m: Any, x: Tensor) -> Any:
    h = m.lin(x)
    return h.sin(), h.detach(), torch.arange(3)


def tied(m: Any, x: Tensor) -> Any:
    return F.linear(m.lin(x), m.lin.weight)


def graph_break(m: Any, x: Tensor) -> Any:
    h = m.lin(x).relu()
    torch._dynamo.graph_break()
    return m.lin(h * x)


def recomputed(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: m.lin(y).sin(), x, use_reentrant=False)


def conditional(m: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (m.lin(x),))


def complex_inside(m: Any, x: Tensor) -> Any:
    return torch.fft.rfft(m.lin(x)).abs() + 1


def complex_outside(m: Any, x: Tensor) -> Any:
    return torch.fft.rfft(m.lin(x)), m.lin(x)


def wide(m: Any, x: Tensor) -> Any:
    return m.lin(x).double().sin()


def users_low(m: Any, x: Tensor) -> Any:
    return m.lin(x).bfloat16().sin().float()


class Copied(torch.autograd.Function):
    """Hands on what it is given; the backward is another class's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()


class Clipped(Copied):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.clamp(-0.1, 0.1)


class Normalized(Copied):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        large = torch.where(grad.abs() > 0.5, grad * 2, 0.25)
        return large / (grad.square().sum().sqrt() + 1e-3) + grad.sign() * 0.1 - 1 / (2 + grad.exp())


class Changed(Copied):
    """In ways that do not commute with a factor."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ends = torch.cat([grad[:1], torch.ones_like(grad[1:])])
        marked = grad.masked_fill(grad > 0, 0.5).index_fill(0, torch.tensor([1]), 0.25)
        steps = (grad * 8).int().float() + torch.div(grad, 0.3, rounding_mode="floor")
        return grad.sin() + grad.softmax(-1) + ends + marked + steps + torch.addmm(torch.ones(4), grad, grad) + grad.var()


def changed_inside(m: Any, x: Tensor) -> Any:
    return m.lin(Changed.apply(m.lin(x).relu()))


def clipped_inside(m: Any, x: Tensor) -> Any:
    return m.lin(Clipped.apply(m.lin(x).relu()))


def normalized_inside(m: Any, x: Tensor) -> Any:
    return m.lin(Normalized.apply(m.lin(x).relu()))


def hook_inside(m: Any, x: Tensor) -> Any:
    h = m.lin(x)
    h.register_hook(lambda grad: grad.clamp(max=0.05) * 2 + 1)
    return h.sin() * h


def scalar(m: Any, x: Tensor) -> Any:
    return F.mse_loss(m.lin(x), x)


def many(m: Any, x: Tensor) -> Any:
    return tuple(m.lin(x).unbind(0))


def returned_twice(m: Any, x: Tensor) -> Any:
    h = m.lin(x).sin()
    return h, h.view(-1), h


def recomputed_reentrantly(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: m.lin(y).sin(), x, use_reentrant=True)


def loop(m: Any, x: Tensor) -> Any:
    return torch.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, m.lin(y).sin()), (torch.tensor(0), x))[1]


def gradient_inside(m: Any, x: Tensor) -> Any:
    h = m.lin(x)
    (grad,) = torch.autograd.grad(h.sin().sum(), m.lin.weight, retain_graph=True)
    return h, grad * 2


def force(m: Any, x: Tensor) -> Any:
    """A small gradient with respect to the input, as in models of molecules."""
    y = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(m.lin(y).sin().sum() * 1e-7, y)
    return m.lin(x) * grad


PROGRAMS = (
    alias_of_an_intermediate, mutated_input, views_of_one_base, identity, unused_output, tied, graph_break, recomputed,
    conditional, complex_inside, complex_outside, wide, users_low, scalar, many, clipped_inside, normalized_inside,
    changed_inside,
    hook_inside, returned_twice, recomputed_reentrantly, loop, gradient_inside,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_that_take_unusual_ways(program: Callable[..., Any]):
    model = Fn(program, lin=nn.Linear(4, 4))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # or no backend compiles the backward of a loop
        got, want = scaled_and_not(model, (torch.randn(4, 4),), 2.0**12)
    assert same(got, want)


def test_a_gradient_taken_inside_is_taken_between_graphs_and_scaled():
    model, x = Fn(force, lin=nn.Linear(4, 4)), torch.randn(4, 4)
    want = copy.deepcopy(model).double()(x.double()).detach()
    lost = []
    for scaling in (2.0**14, None):
        amp = fxamp.Amp(precision="fp16", lower="aot_eager", scaling=scaling)
        got = torch.compile(copy.deepcopy(model), backend=amp)(x).detach()
        lost.append(float((got - want).norm() / want.norm()))
    assert lost[0] < 1e-2 < 0.1 < lost[1]


@pytest.mark.parametrize("program", [gradient_inside, force])
def test_a_gradient_that_dynamo_takes_inside_of_a_graph_is_refused(program: Callable[..., Any]):
    run = torch.compile(Fn(program, lin=nn.Linear(4, 4)), backend=fxamp.Amp(precision="fp16", lower="aot_eager"))
    traced = torch._dynamo.config.patch(trace_autograd_ops=True)
    with traced, pytest.raises(Exception, match=r"ERROR\[CannotScale\].* taken inside .*, at .*test_scale\.py:\d+"):
        run(torch.randn(4, 4))


def test_frozen_parameters_get_no_gradient():
    model = Fn(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.a.weight.requires_grad_(False)
    got, want = scaled_and_not(model, (torch.randn(2, 4),), 2.0**12)
    assert same(got, want)
    assert got[1] is None


def test_dynamic_shapes():
    model = Fn(lambda m, x: m.lin(x).relu().sum(0), lin=nn.Linear(4, 4))
    twin = copy.deepcopy(model)
    amp = fxamp.Amp(precision="fp32", scaling=2.0**12, lower="aot_eager")
    run = torch.compile(model, backend=amp, dynamic=True)
    for rows in (3, 7, 5):
        x = torch.randn(rows, 4)
        run(x).sum().backward()
        twin(x).sum().backward()
    assert len(amp.graphs) == 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("lower", LOWERINGS)
def test_gradients_below_the_format_arrive(lower: str):
    model, x = Fn(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(8, 16), b=nn.Linear(16, 4)), torch.randn(8, 8)
    amp = fxamp.Amp(precision="fp16", lower=lower)
    unprotected = fxamp.Amp(precision="fp16", scaling=None, lower=lower)
    errors = []
    for backend in (amp, unprotected):
        low, high = copy.deepcopy(model), copy.deepcopy(model).double()
        backend.attach(torch.optim.SGD(low.parameters(), lr=0.1))
        (torch.compile(low, backend=backend)(x).square().sum() * 1e-7).backward()
        (high(x.double()).square().sum() * 1e-7).backward()
        pairs = [(grad_of(p), grad_of(q)) for p, q in zip(low.parameters(), high.parameters(), strict=True)]
        errors.append(max(float((p - q).norm() / q.norm()) for p, q in pairs))
    assert errors[0] < 1e-2 < 0.1 < errors[1]


# ---- what overflowed ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lower", LOWERINGS)
def test_a_gradient_that_overflows_raises_its_own_flag_alone(lower: str):
    """The first layer's gradient is beyond fp16 once it is scaled, the second one's is not: names of both come out right."""
    model = Fn(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model.a.weight.copy_(torch.eye(4) * 1e-3)
        model.b.weight.copy_(torch.eye(4) * 100)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in (model.a, model.b)]
    amp = fxamp.Amp(precision="fp16", scaling=2.0**10, lower=lower)
    for optimizer in optimizers:
        amp.attach(optimizer)
    torch.compile(model, backend=amp)(torch.ones(1, 4)).sum().backward()
    assert not torch.isfinite(model.a.weight.grad).all()
    assert torch.isfinite(model.b.weight.grad).all()
    before = copy.deepcopy(model.state_dict())
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(model.a.weight, before["a.weight"])
    assert not torch.equal(model.b.weight, before["b.weight"])


@pytest.mark.parametrize("lower", LOWERINGS)
@pytest.mark.parametrize("name", small_models())
def test_a_flag_is_up_whenever_a_gradient_is_not_finite(name: str, lower: str):
    """Compiled code hides overflow inside fused kernels. What is looked at is what was written to memory."""
    model, inputs = small_models()[name]
    amp = fxamp.Amp(precision="fp16", scaling=1.0, lower=lower)
    run = torch.compile(model, backend=amp)
    for exponent in (0, 8, 15, 17, 40, 127):
        model.zero_grad()
        y = run(*inputs)
        y.backward(torch.randn_like(y) * 2.0**exponent)
        (flags,) = amp._scaler._flags.values()  # pyright: ignore[reportOptionalMemberAccess]
        for p in model.parameters():
            assert p.grad is not None
            is_bad = not bool(torch.isfinite(p.grad).all())
            assert bool(flags.overflow_of([id(p)])) == is_bad, (exponent, p.shape)
        flags.clear(torch.ones(()))
    assert math.isfinite(amp.read_loss_scale())
