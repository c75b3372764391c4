"""Wrong arguments of a train step: each is told of before anything is compiled, with the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import fxamp
from fxamp import errors
from tests.programs import Fn, mlp

X, Y = torch.randn(4, 8), torch.randint(3, (4,))
LOSS = nn.CrossEntropyLoss()


def make(*parts: Any, **numbers: Any) -> Any:
    return fxamp.Amp(precision="fp16", lower="aot_eager").train_step(*parts, **numbers)


def parts() -> tuple[nn.Module, optim.Optimizer]:
    model = mlp(8, 16, 3)
    return model, optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (lambda m, o: (LOSS, m, o), "given a CrossEntropyLoss as its model. It takes (model, loss_fn, optimizer)"),
        (lambda m, o: (F.cross_entropy, m, o), "given a cross_entropy as its model"),
        (lambda m, o: (m, o, LOSS), "given a CrossEntropyLoss as its optimizer"),
        (lambda m, o: (o, m, LOSS), "given a SGD as its model"),
        (lambda m, o: (m, LOSS, optim.SGD), "given a SGD as its optimizer"),
        (lambda m, o: (m, "cross_entropy", o), "given 'cross_entropy' as its loss_fn"),
        (lambda m, o: (m, nn.CrossEntropyLoss, o), "Give an instance, CrossEntropyLoss()"),
        (lambda m, o: (m, lambda output: output.sum(), o), "cannot be called with an output and a target: too many"),
        (lambda m, o: (m, m, o), "cannot be called with an output and a target"),
    ],
)
def test_parts_in_another_order_are_told_of(order: Any, told: str):
    with pytest.raises(errors.InvalidOption) as caught:
        make(*order(*parts()))
    assert told in str(caught.value)


@pytest.mark.parametrize("clip", [0, -1.0, "1", True, float("nan"), torch.tensor(1.0)])
def test_a_norm_is_a_number(clip: Any):
    model, optimizer = parts()
    with pytest.raises(errors.InvalidOption, match="Give a norm above 0, or None"):
        make(model, LOSS, optimizer, clip_grad_norm=clip)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, "2", True, None])
def test_a_number_of_micro_batches_is_whole(accumulate: Any):
    model, optimizer = parts()
    with pytest.raises(errors.InvalidOption, match="Give a number of micro-batches"):
        make(model, LOSS, optimizer, accumulate=accumulate)


@pytest.mark.parametrize(
    ("args", "named", "told"),
    [
        ((X,), {}, "called with 1 arguments, and Sequential cannot be called with 0 of them: missing a required argument"),
        ((), {}, "there is no target. step(*inputs, target, **named) is loss_fn(model(*inputs, **named), target)"),
        (((X, Y),), {}, "cannot be called with 0 of them"),
        ((X, X, Y), {}, "cannot be called with 2 of them: too many positional arguments"),
        ((X,), {"target": Y}, "cannot be called with 0 of them and target by name"),
        ((X, Y), {"mask": X}, "got an unexpected keyword argument 'mask'"),
    ],
)
def test_a_call_that_leaves_somebody_without_an_argument_is_told_of(args: Any, named: dict[str, Any], told: str):
    model, optimizer = parts()
    step = make(model, LOSS, optimizer)
    for _ in range(2):
        with pytest.raises(errors.InvalidOption) as caught:
            step(*args, **named)
        assert told in str(caught.value)
    step(X, Y)


def test_without_a_loss_the_model_gets_all_arguments():
    model = Fn(lambda m, x, y: F.cross_entropy(m.net(x), y), net=mlp(8, 3))
    step = make(model, None, optim.SGD(model.parameters(), lr=0.1))
    step(X, Y)
    single = mlp(8, 3)
    with pytest.raises(errors.InvalidOption, match=r"step\(\*inputs, \*\*named\) is model\(\*inputs, \*\*named\)"):
        make(single, None, optim.SGD(single.parameters(), lr=0.1))(X, Y)


@pytest.mark.parametrize("wrap", [dict, lambda **parts: SimpleNamespace(**parts)], ids=["dict", "attributes"])
def test_a_model_may_return_its_loss_among_other_things(wrap: Any):
    losses = []
    for wrapped in (wrap, None):
        torch.manual_seed(0)
        net = mlp(8, 16, 3)

        def computed(m: Any, x: torch.Tensor, y: torch.Tensor, wrapped: Any = wrapped) -> Any:
            logits = m.net(x)
            loss = F.cross_entropy(logits, y)
            return loss if wrapped is None else wrapped(loss=loss, logits=logits)

        step = make(Fn(computed, net=net), None, optim.SGD(net.parameters(), lr=0.1))
        losses.append([float(step(X, Y)) for _ in range(4)])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


class Scaled(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.net(x) * scale


def test_what_gives_a_model_more_arguments_may():
    """A hook in front of the model, as libraries have them."""
    model = Scaled(mlp(8, 3))
    model.register_forward_pre_hook(lambda module, args: (*args, 2.0))
    make(model, LOSS, optim.SGD(model.parameters(), lr=0.1))(X, Y)
    noisy = mlp(8, 3)
    metric = Fn(lambda m, output, target: F.cross_entropy(m.head(output), target), head=nn.Linear(3, 3))
    make(noisy, metric, optim.SGD([*noisy.parameters(), *metric.parameters()], lr=0.1))(X, Y)
