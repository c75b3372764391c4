"""torch.func around and inside compiled functions, second derivatives, forward mode: right, or a typed error."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import fxamp
from fxamp import errors
from tests.programs import relative_error

w = torch.randn(8, 8, generator=torch.Generator().manual_seed(5)) / 3
x8 = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))


def f(x):
    return (x @ w).sin() @ w


def compiled(fn, amp: fxamp.Amp | None = None):
    return torch.compile(fn, backend=amp or fxamp.Amp(precision="bf16", lower="aot_eager"))


AROUND = {
    "grad": lambda c: grad(lambda x: c(x).sum())(x8),
    "vmap": lambda c: vmap(c)(x8[:, None]),
    "jvp": lambda c: jvp(c, (x8,), (x8,)),
    "vjp": lambda c: vjp(c, x8),
    "jacrev": lambda c: jacrev(c)(x8),
    "hessian": lambda c: hessian(lambda x: c(x).sum())(x8),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_transform_around_a_compiled_function_is_an_error(name: str):
    amp = fxamp.Amp(precision="bf16", lower="eager")
    c = compiled(f, amp)
    with pytest.raises(InternalTorchDynamoError, match=r"ERROR\[TransformAround\].*Compile the transform"):
        AROUND[name](c)
    c(x8)  # PyTorch alone would skip the function from now on
    assert amp.report().num_low_ops == 3


def test_other_backends_are_left_alone():
    keep = fxamp.Amp(precision="bf16", lower="eager")
    out = grad(lambda x: torch.compile(f, backend="eager")(x).sum())(x8)
    assert torch.equal(out, grad(lambda x: f(x).sum())(x8))
    assert keep.graphs == ()


def test_the_watch_ends_with_the_amp():
    from torch._dynamo.callback import callback_handler

    amp = fxamp.Amp(precision="bf16")
    before, alive = len(callback_handler.start_callbacks), weakref.ref(amp)
    del amp
    gc.collect()
    assert alive() is None
    assert len(callback_handler.start_callbacks) == before - 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: grad(lambda y: f(y).sum())(x),
        lambda x: vmap(f)(x[:, None]),
        lambda x: jvp(f, (x,), (x,))[1],
        lambda x: vjp(f, x)[1](x)[0],
        lambda x: hessian(lambda y: f(y).sum())(x[:1]),
    ],
    ids=["grad", "vmap", "jvp", "vjp", "hessian"],
)
def test_a_transform_inside_is_right(fn):
    assert relative_error(compiled(fn)(x8), fn(x8)) < 3e-2


def test_functional_call():
    lin = torch.nn.Linear(8, 8)
    parameters = {name: p.detach() * 2 for name, p in lin.named_parameters()}
    amp = fxamp.Amp(precision="bf16", lower="eager")
    got = compiled(lambda p, x: functional_call(lin, p, (x,)), amp)(parameters, x8)
    assert relative_error(got, functional_call(lin, parameters, (x8,))) < 3e-2
    assert amp.report().num_low_ops == 1


@pytest.mark.parametrize("fn", [f, lambda x: (x * x * x).sum(-1)], ids=["saves intermediates", "saves inputs"])
def test_second_derivatives_are_an_error(fn):
    x = x8.clone().requires_grad_()
    out = compiled(fn)(x).sum()
    with pytest.raises(errors.SecondOrder, match="differentiated again"):
        torch.autograd.grad(torch.autograd.grad(out, x, create_graph=True)[0].pow(2).sum(), x)


def test_a_hessian_is_not_silently_zero():
    with pytest.raises(errors.SecondOrder):
        torch.autograd.functional.hessian(lambda x: compiled(f)(x).sum(), x8[:1])


def test_first_derivatives_with_a_history_that_nobody_follows():
    x = x8.clone().requires_grad_()
    (g,) = torch.autograd.grad(compiled(lambda x: (x * x * x).sum(-1))(x).sum(), x, create_graph=True)
    assert relative_error(g, 3 * x8 * x8) < 1e-6


def test_watching_keeps_nothing_alive():
    x = x8.clone().requires_grad_()
    out = compiled(f)(x)
    node = weakref.ref(out.grad_fn)
    gc.disable()
    try:
        del out
        assert node() is None
    finally:
        gc.enable()


def test_forward_mode_is_an_error():
    c = compiled(f)
    c(x8)
    with forward_ad.dual_level():
        with pytest.raises(errors.SecondOrder, match="drops the tangents"):
            c(forward_ad.make_dual(x8, x8))
        assert c(x8).shape == x8.shape  # what has no tangent goes through


def test_a_backward_that_is_compiled_below_a_graph_break_does_not_wait_for_ever():
    """Dynamo watches there: it would compile our callback, call it for that, and wait for the lock that it holds."""
    weight = torch.ones(3, requires_grad=True)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        y = (x * weight).sin().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return gradient.square().sum()

    run = torch.compile(penalty, backend=fxamp.Amp(precision="fp32", lower="aot_eager"))
    with pytest.raises(errors.SecondOrder):
        run(torch.ones(3, requires_grad=True)).backward()
