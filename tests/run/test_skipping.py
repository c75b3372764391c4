"""Every optimizer of torch.optim: a step that is left out changes no bit of parameters and state."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fxamp
from fxamp import errors
from fxamp.run import skipping
from tests.programs import mlp

pytestmark = pytest.mark.filterwarnings("ignore:an attached .* that no compiled graph")  # gradients are made by hand

Make = Callable[[list[nn.Parameter]], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1),
    "Adam fused": lambda p: optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "Muon": lambda p: optim.Muon([x for x in p if x.ndim == 2], lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
}

WITHOUT = {"LBFGS": "refused", "SparseAdam": "takes sparse gradients only"}
"""Optimizers that are tested on their own, below."""


def test_no_optimizer_is_forgotten():
    known = {type(make([nn.Parameter(torch.zeros(2, 2))])).__name__ for make in OPTIMIZERS.values()} | set(WITHOUT)
    assert known == {name for name in optim.__all__ if name[0].isupper() and name != "Optimizer"}


def everything(optimizer: optim.Optimizer) -> list[Any]:
    """Copies of all that a step may write: parameters, state, groups."""
    found: list[Any] = [p.detach().clone() for p in skipping.parameters(optimizer)]
    for p in skipping.parameters(optimizer):
        state = optimizer.state.get(p, {})
        found += [(k, v.detach().clone() if isinstance(v, Tensor) else v) for k, v in sorted(state.items())]
    found += [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def with_gradients(parameters: list[nn.Parameter], value: float = 1.0) -> None:
    for i, p in enumerate(parameters):
        p.grad = torch.randn(p.shape)
        if i == 1:
            p.grad.view(-1)[-1] *= value


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("route", skipping.ROUTES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_left_out_changes_no_bit(name: str, route: str, bad: float):
    def made() -> tuple[list[nn.Parameter], optim.Optimizer]:
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(5))]
        return parameters, OPTIMIZERS[name](parameters)

    parameters, optimizer = made()
    amp = fxamp.Amp(precision="fp16")
    try:
        amp.attach(optimizer, route=route)
    except errors.CannotSkip:
        assert route == "fused"
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)  # as of fused Adagrad in PyTorch 2.11
        return
    assert route != "fused" or "fused" in name
    twins, twin = made()  # takes the healthy steps only
    for step, factor in enumerate([bad, bad, 1.0, bad, 1.0, bad, bad, 1.0]):
        torch.manual_seed(step)
        with_gradients(parameters, factor)
        gradients = [None if p.grad is None else p.grad.view(torch.int32).clone() for p in parameters]
        before = everything(optimizer)
        optimizer.step()
        left = [None if p.grad is None else p.grad.view(torch.int32) for p in parameters]
        assert all(map(same, left, gradients))  # bit patterns: a NaN equals none
        if factor == 1.0:
            torch.manual_seed(step)
            with_gradients(twins)
            twin.step()
        else:
            assert same(everything(optimizer), before), step
    assert same([p.detach() for p in parameters], [p.detach() for p in twins])
    assert same(everything(optimizer), everything(twin))
    assert amp.read_skipped_steps() == 5


class Twice(optim.Adam):
    """A step with hooks of its own, around its parent's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("is_within", [False, True], ids=["the step", "a function with the step"])
@pytest.mark.parametrize("route", skipping.ROUTES)
@pytest.mark.parametrize("name", ["SGD momentum", "Adam fused", "subclass"])
def test_a_step_that_somebody_compiles_is_left_out_too(name: str, route: str, is_within: bool):
    """Dynamo would trace the hooks, and lose what they delete: `found_inf` was left behind."""

    def made() -> tuple[list[nn.Parameter], optim.Optimizer]:
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
        make = OPTIMIZERS.get(name) or (lambda p: Twice(p, lr=0.1, fused=route == "fused"))
        return parameters, make(parameters)

    torch._dynamo.reset()
    parameters, optimizer = made()
    amp = fxamp.Amp(precision="fp16", scaling=fxamp.DynamicScale(init=4.0, growth_interval_steps=2))
    try:
        amp.attach(optimizer, route=route)
    except errors.CannotSkip:
        assert (route, name) == ("fused", "SGD momentum")
        return
    # A lambda that is returned from is compiled around the step, and the bound method by itself.
    step = torch.compile((lambda: optimizer.step()) if is_within else optimizer.step, backend="eager")
    twins, twin = made()
    for number, factor in enumerate([1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0]):
        torch.manual_seed(number)
        with_gradients(parameters, factor)
        gradients = [None if p.grad is None else p.grad.view(torch.int32).clone() for p in parameters]
        before = everything(optimizer)
        step()
        assert not hasattr(optimizer, "found_inf")
        assert all(map(same, [None if p.grad is None else p.grad.view(torch.int32) for p in parameters], gradients))
        if factor == 1.0:
            torch.manual_seed(number)
            with_gradients(twins)
            twin.step()
        else:
            assert same(everything(optimizer), before)
    assert amp.read_skipped_steps() == 2
    for p, q in zip(parameters, twins, strict=True):
        torch.testing.assert_close(p.detach(), q.detach())
    assert amp.loss_scale is not None
    # 4, halved twice, and twice doubled behind two steps that went well in a row.
    assert float(amp.loss_scale) == 4.0


def test_routes_are_what_they_say():
    p = [nn.Parameter(torch.zeros(2))]
    assert skipping.choose(optim.AdamW(p, fused=True), "auto").name == "fused"
    assert skipping.choose(optim.AdamW(p), "auto").num_waits == 1
    with pytest.raises(errors.CannotSkip, match="fused=True"):
        skipping.choose(optim.AdamW(p), "fused")
    with pytest.raises(errors.UnknownOption, match="Did you mean 'select'"):
        skipping.choose(optim.AdamW(p), "selct")


def test_a_step_that_makes_state_on_the_host_is_waited_for():
    class Counting(optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for p in skipping.parameters(self):
                if p.grad is not None:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1

    p = nn.Parameter(torch.zeros(2))
    optimizer = Counting([p], lr=0.1)
    amp = fxamp.Amp(precision="fp16")
    amp.attach(optimizer)
    p.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[p]["count"] == 1
    with pytest.raises(errors.CannotSkip, match="'count' is a Python int"):
        amp.attach(optimizer, route="select")
    assert skipping.choose(optimizer, "auto").name == "wait"
    p.grad = torch.full((2,), math.inf)
    optimizer.step()
    assert optimizer.state[p]["count"] == 1


def test_a_step_that_raises_ends_with_itself():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=1.0)
    amp = fxamp.Amp(precision="fp16")
    amp.attach(optimizer)

    def fails() -> Tensor:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        optimizer.step(fails)
    for factor in (math.inf, 1.0):
        p.grad = torch.full((2,), factor)
        optimizer.step()
    assert p.tolist() == [-1.0, -1.0]
    assert amp.read_skipped_steps() == 1


def test_a_grad_scaler_around_a_fused_optimizer_is_refused():
    """Both would set the flag that its kernels read, and they would divide nothing by GradScaler's scale."""
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=1.0, fused=True)
    fxamp.Amp(precision="fp16").attach(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    with pytest.raises(errors.CannotSkip, match="Leave the GradScaler out"):
        scaler.step(optimizer)
    assert p.tolist() == [0.0, 0.0]


def test_an_amp_may_be_collected_while_an_optimizer_steps():
    """A hook that went with it would be taken out of the hooks that `step` walks along."""

    class InCircle:
        def __init__(self):
            self.itself, self.amp = self, fxamp.Amp(precision="fp16")

    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=1.0)
    p.grad = torch.ones(2)
    gc.disable()
    forgotten = weakref.ref(InCircle().amp)

    def collect(*_: Any) -> None:
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        optimizer.step()
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()
    assert forgotten() is None
    assert p.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("route", skipping.ROUTES)
def test_a_step_that_overflows_and_raises_leaves_nothing_to_later_ones(route: str):
    class Raising(optim.SGD):
        raises = True

        def step(self, closure: Any = None) -> Any:
            if self.raises:
                raise ValueError("no step")
            return super().step(closure)

    p = nn.Parameter(torch.ones(2))
    optimizer = Raising([p], lr=0.5, fused=route == "fused")
    amp = fxamp.Amp(precision="fp16")
    amp.attach(optimizer, route=route)
    p.grad = torch.full((2,), math.inf)
    with pytest.raises(ValueError, match="no step"):
        optimizer.step()
    optimizer.raises = False
    optimizer.zero_grad()
    with torch.no_grad():
        p.add_(1.0)
    optimizer.step()  # nothing to step with
    assert p.grad is None
    assert p.tolist() == [2.0, 2.0]
    p.grad = torch.ones(2)
    optimizer.step()
    assert p.tolist() == [1.5, 1.5]
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_an_optimizer_whose_step_has_raised_may_be_collected(is_compiled: bool):
    """The frame that is left behind knows it, and the Amp goes on."""
    torch._dynamo.reset()
    amp, p = fxamp.Amp(precision="fp16"), nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=1.0)
    amp.attach(optimizer)

    def fails() -> Tensor:
        raise ValueError("no data")

    step: Callable[..., Any] = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
    with pytest.raises(ValueError, match="no data"):
        step(fails)
    alive = weakref.ref(optimizer)
    del optimizer, step
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
    assert amp.read_skipped_steps() == 0


def test_sparse_gradients_are_waited_for():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optim.SparseAdam(list(table.parameters()), lr=0.1)
    amp = fxamp.Amp(precision="fp16")
    amp.attach(optimizer)
    for step, factor in enumerate([1.0, math.inf, 1.0]):
        optimizer.zero_grad()
        (table(torch.tensor([0, 2])).sum() * factor).backward()
        before = copy.deepcopy(everything(optimizer))
        optimizer.step()
        assert same(everything(optimizer), before) == (step == 1)
    assert amp.read_skipped_steps() == 1


def test_sparse_gradients_beside_low_ones():
    """In one graph, whose weights are low leaves, and in one that casts them."""
    results = []
    for is_step in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 8, sparse=True), nn.Linear(8, 4))
        amp = fxamp.Amp(precision="fp16", lower="aot_eager", scaling=fxamp.DynamicScale(init=1024.0))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step = amp.train_step(model, lambda out, factor: out.sum() * factor, optimizer) if is_step else None
        amp.attach(optimizer)
        run = torch.compile(model, backend=amp)
        for factor in (1.0, math.inf, 1.0, 1.0):
            words = torch.tensor([1, 2, 2])
            if step is not None:
                step(words, torch.tensor(factor))
                continue
            (run(words).sum() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert amp.read_skipped_steps() == 1
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_lbfgs_is_refused():
    with pytest.raises(errors.CannotSkip, match="LBFGS evaluates the loss many times"):
        fxamp.Amp(precision="fp16").attach(optim.LBFGS([nn.Parameter(torch.zeros(2))]))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["SGD momentum", "Adam fused", "RMSprop"])
def test_a_closure_makes_its_gradients_within_the_step(name: str, is_compiled: bool):
    torch._dynamo.reset()
    model = mlp(4, 8, 2)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    amp = fxamp.Amp(precision="fp16")
    amp.attach(optimizer)
    take: Callable[..., Any] = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    for step, factor in enumerate([1.0, 1.0, math.inf, 1.0]):

        def closure(factor: float = factor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * factor
            loss.backward()
            return loss

        before = everything(optimizer)
        loss = take(closure) if step % 2 else take(closure=closure)
        assert loss is not None
        assert same(everything(optimizer), before) == (step == 2)
    assert amp.read_skipped_steps() == 1


def test_no_gradient_is_no_step():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.Adam([p])
    amp = fxamp.Amp(precision="fp16", scaling=fxamp.DynamicScale(growth_interval_steps=1))
    amp.attach(optimizer)
    optimizer.step()
    assert not optimizer.state
    assert (amp.read_loss_scale(), amp.read_skipped_steps()) == (2.0**16, 0)


def test_fp16_parameters_are_refused_with_the_way_out():
    with pytest.raises(errors.CannotScale, match="Keep fp32 parameters"):
        fxamp.Amp(precision="fp16").attach(optim.SGD([nn.Parameter(torch.zeros(2).half())], lr=0.1))


def test_an_optimizer_can_be_copied_and_saved():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.Adam([p])
    fxamp.Amp(precision="fp16").attach(optimizer)
    copied = copy.deepcopy(optimizer)
    copied.load_state_dict(optimizer.state_dict())
    assert not copied._optimizer_step_pre_hooks


def test_an_optimizer_outlives_its_amp():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=1.0)
    amp = fxamp.Amp(precision="fp16")
    amp.attach(optimizer)
    del amp
    p.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    assert p.tolist() == [-1.0, -1.0]


def cleared(optimizer: optim.Optimizer) -> None:
    optimizer.state.clear()


def with_momentum(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.9


@pytest.mark.parametrize("route", ["auto", "fused", "select"])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda p: optim.Adam(p, lr=0.1, fused=True), cleared),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True), cleared),
        (lambda p: optim.SGD(p, lr=0.1, fused=True), with_momentum),
    ],
    ids=["Adam", "SGD", "momentum that comes later"],
)
def test_state_that_is_made_anew_is_not_made_by_a_step_that_is_left_out(
    make: Make, change: Callable[[optim.Optimizer], None], route: str
):
    """What a step makes cannot be unmade on the device; and a step that makes none waits for nothing."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer, amp = make(parameters), fxamp.Amp(precision="fp16")
    amp.attach(optimizer, route=route)
    for _ in range(3):
        with_gradients(parameters)
        optimizer.step()
    change(optimizer)
    for is_again in (False, True):
        before = everything(optimizer)
        with_gradients(parameters, math.inf)
        optimizer.step()
        assert same(everything(optimizer), before), is_again
        with_gradients(parameters)
        optimizer.step()
        assert not same(everything(optimizer), before), is_again
    assert amp.read_skipped_steps() == 2
    attachment = amp._scaling._attached[optimizer]
    assert not attachment._makes_state(optimizer)


def test_a_new_optimizer_finds_the_scale_as_it_is():
    """Gradients are those of the model: that the optimizer of its first stage is gone, or is not there yet, says nothing."""
    model, amp = mlp(4, 4, 2), fxamp.Amp(precision="fp16", lower="aot_eager")
    run = torch.compile(model, backend=amp)

    def stage(factor: float) -> None:
        optimizer = optim.SGD(model.parameters(), lr=1e-3)
        amp.attach(optimizer)
        for _ in range(2):
            (run(torch.ones(2, 4)).sum() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()

    stage(1e38 * 1e38)
    gc.collect()
    assert amp.read_loss_scale() == 2**14
    assert amp.state_dict()["scaling"]["scale"] == 2**14
    stage(1.0)
    assert amp.read_loss_scale() == 2**14
    assert amp.read_skipped_steps() == 2
