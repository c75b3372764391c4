"""What a recorded step depends on, and whether it is seen when that changes. The same training runs recorded and as it is, and
has to come to the same bits; the tape knows addresses alone, as a CUDA graph does."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fxamp
from fxamp import errors
from fxamp.run import data_parallel, ranks, train_step
from fxamp.run.agreement import Agreement
from fxamp.run.mailbox import Mailbox
from fxamp.run.train_step import TrainStep
from tests.programs import Fn
from tests.run.tape import Recorder, taped
from tests.run.test_train_step import CPU, batches, same, state_of


class Settings:
    """Of the user's: neither a module's nor the loss function's."""

    def __init__(self) -> None:
        self.share, self.nested = 1.0, {"reduction": "mean"}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.drop, self.g = nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 4)
        self.gain, self.plain, self.config = 1.0, torch.ones(8), Settings()

    def forward(self, x: Tensor) -> Tensor:
        return self.g(self.drop(torch.tanh(self.f(x))) * self.plain) * self.gain * self.config.share


class Bench:
    """A training of its own."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = Small()
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.weight, self.factor = torch.ones(4), 1.0
        self.settings = Settings()
        self.another: fxamp.Amp | None = None
        self.other = nn.Linear(8, 4)
        self.waiting = optim.SGD(self.other.parameters())
        self.amp = fxamp.Amp(**{"precision": "fp16", "lower": "aot_eager", **options})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.teacher(x * self.weight), y, reduction=self.settings.nested["reduction"])
        return loss * self.factor * self.settings.share

    def run(self, step: TrainStep, count: int = 4) -> list[Tensor]:
        torch.manual_seed(0)
        losses = [step(x, y) for x, y in batches(CPU, count)]
        assert all(p.grad is None for p in self.model.parameters())
        return [*state_of(self.model, self.optimizer), torch.stack(losses), self.amp.loss_scale, self.amp.skipped_steps]


def reset_state(b: Bench) -> None:
    b.optimizer.state.clear()


def replace_state(b: Bench) -> None:
    for state in b.optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def replace_module(b: Bench) -> None:
    b.model.g = nn.Linear(8, 4)
    b.optimizer.param_groups[0]["params"][2:] = list(b.model.g.parameters())


def pop_group(b: Bench) -> None:
    b.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    b.optimizer.param_groups.pop()


def assign_parameters(b: Bench) -> None:
    """Others in their places; the optimizer steps the old ones."""
    b.model.load_state_dict({name: p.clone() for name, p in b.model.state_dict().items()}, assign=True)


def hook_a_step(b: Bench) -> None:
    def decay(*_: Any) -> None:
        with torch.no_grad():
            b.model.g.weight.mul_(0.5)

    b.optimizer.register_step_post_hook(decay)


def leave_gradients(b: Bench) -> None:
    """Of somebody who looked at them, and did not step; they overflow."""
    run = torch.compile(b.model, backend=b.amp)
    (run(next(batches(CPU, 1))[0]).sum() * 1e38 * 1e38).backward()


def leave_others_gradients(b: Bench) -> None:
    """Of an optimizer that steps later; they have overflowed, and are finite by now."""
    b.amp.attach(b.waiting)
    run = torch.compile(Fn(lambda m, x: m.f(x), f=b.other), backend=b.amp)
    (run(next(batches(CPU, 1))[0]).sum() * 1e38 * 1e38).backward()
    for p in b.other.parameters():
        assert p.grad is not None
        p.grad.fill_(1.0)


def step_other(b: Bench) -> None:
    before = [p.detach().clone() for p in b.other.parameters()]
    b.waiting.step()
    assert same(before, list(b.other.parameters()))


def attach_another(b: Bench) -> None:
    b.another = fxamp.Amp(precision="fp16", lower="aot_eager")
    b.another.attach(b.optimizer)


CHANGES: dict[str, Callable[[Bench], object]] = {
    "nothing": lambda b: None,
    "the optimizer's state is gone": reset_state,
    "a tensor of the optimizer's state is another": replace_state,
    "the optimizer's state is loaded": lambda b: b.optimizer.load_state_dict(b.optimizer.state_dict()),
    "a dropout's p is another": lambda b: setattr(b.model.drop, "p", 0.5),
    "a number of a module is another": lambda b: setattr(b.model, "gain", 0.5),
    "a number of the loss is another": lambda b: setattr(b, "factor", 0.5),
    "a number of the user's is another": lambda b: setattr(b.settings, "share", 0.5),
    "a number of an object that a module keeps is another": lambda b: setattr(b.model.config, "share", 0.5),
    "it is another number once more": lambda b: setattr(b.model.config, "share", 0.25),
    "a number deep in the user's is another": lambda b: b.settings.nested.update(reduction="sum"),
    "a tensor of a module is another": lambda b: setattr(b.model, "plain", torch.full((8,), 0.5)),
    "a tensor of the loss is another": lambda b: setattr(b, "weight", torch.full((4,), 0.5)),
    "it is another once more": lambda b: setattr(b, "weight", torch.full((4,), 0.25)),
    "a module of the loss is another": lambda b: setattr(b, "teacher", nn.Linear(4, 4).requires_grad_(False)),
    "a weight of it lies elsewhere": lambda b: setattr(b.teacher.weight, "data", b.teacher.weight.data * 2),
    "there are gradients already": leave_gradients,
    "gradients wait for another optimizer": leave_others_gradients,
    "and it steps": step_other,
    "compiled programs are gone": lambda b: torch._dynamo.reset(),
    "a group came and went": pop_group,
    "a second Amp has a say": attach_another,
    "and has none any more": lambda b: setattr(b, "another", None),
    "a hook runs behind the optimizer's step": hook_a_step,
    "a module is another": replace_module,
    "parameters are others": assign_parameters,
}


SOME = (
    "nothing",
    "the optimizer's state is gone",
    "a number of a module is another",
    "a number of the user's is another",
    "a number of an object that a module keeps is another",
    "it is another number once more",
    "a tensor of the loss is another",
    "there are gradients already",
    "gradients wait for another optimizer",
    "and it steps",
    "compiled programs are gone",
)


@torch._dynamo.config.patch(recompile_limit=64)
@pytest.mark.parametrize("chosen", [SOME, pytest.param(tuple(CHANGES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_changes_under_a_recording_is_seen(chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """One after the other, in a training that is recorded, and in one that is not."""
    monkeypatch.setattr(train_step, "MAX_WORLDS", 1 + len(CHANGES))
    monkeypatch.setattr(train_step, "MAX_CONSTANT", 1 + len(CHANGES))
    recorded, plain = Bench(), Bench()
    steps = [b.amp.train_step(b.model, b.loss, b.optimizer) for b in (recorded, plain)]
    taped(steps[0], monkeypatch)
    for what in chosen:
        results = []
        for bench, step in zip((recorded, plain), steps, strict=True):
            torch.manual_seed(5)
            CHANGES[what](bench)
            results.append(bench.run(step))
        assert same(*results), what
        num_replayed = steps[0].summary().num_replayed
        results = [bench.run(step, 1) for bench, step in zip((recorded, plain), steps, strict=True)]
        assert same(*results), what
        assert steps[0].summary().num_replayed == num_replayed + 1, what


def adversaries(patch: pytest.MonkeyPatch | None) -> list[Tensor]:
    """Two steps on one Amp, of which the second leaves gradients with the first one's parameters; some batches overflow."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    maker, judge = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", scaling=fxamp.DynamicScale(init=1024.0, growth_interval_steps=3))
    of_maker, of_judge = (optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (maker, judge))
    judges = amp.train_step(judge, lambda out, made: F.softplus(-out).mean() + F.softplus(judge(made)).mean(), of_judge)
    makes = amp.train_step(maker, lambda made, _: F.softplus(-judge(made)).mean(), of_maker)
    told = list[Tensor]()
    if patch is not None:
        taped(judges, patch)
        taped(makes, patch)
    for i, (noise, real) in enumerate(batches(CPU, 9, bad=(2, 5))):
        real = real * (torch.inf if i in (1, 6) else 1.0)
        with torch.no_grad():
            made = maker(noise.nan_to_num(posinf=0.0))
        told += [judges(real, made), amp.loss_scale, makes(noise, None), amp.loss_scale, amp.skipped_steps]
    if patch is not None:
        assert [step.summary().num_replayed for step in (judges, makes)] == [7, 7]
    return [*state_of(maker, of_maker), *state_of(judge, of_judge), *(x.nan_to_num(7.0) for x in told)]


def test_two_steps_on_one_amp(monkeypatch: pytest.MonkeyPatch):
    """What one of them leaves behind goes into no recording of the other's: it would be gone when that is replayed."""
    assert same(adversaries(monkeypatch), adversaries(None))


def beside_a_loop(patch: pytest.MonkeyPatch | None) -> list[Tensor]:
    """A loop whose gradients wait for their optimizer while a train step of the same Amp is taken."""
    torch._dynamo.reset()
    b = Bench(scaling=fxamp.DynamicScale(init=1024.0, growth_interval_steps=3))
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = optim.SGD(other.parameters(), lr=1e-2)
    b.amp.attach(optimizer)
    run, step, told = torch.compile(other, backend=b.amp), b.amp.train_step(b.model, b.loss, b.optimizer), list[Tensor]()
    if patch is not None:
        taped(step, patch)
    for i, (x, y) in enumerate(batches(CPU, 9, bad=(4,))):
        F.mse_loss(run(x.nan_to_num(posinf=0.0) * (1e9 if i == 6 else 1.0)), y).backward()
        told += [step(x, y), b.amp.loss_scale]
        optimizer.step()
        optimizer.zero_grad()
        told += [b.amp.loss_scale, b.amp.skipped_steps]
    assert b.amp.read_skipped_steps() == 2
    return [*state_of(b.model, b.optimizer), *state_of(other, optimizer), *(x.nan_to_num(7.0) for x in told)]


@pytest.mark.slow
def test_a_step_beside_a_loop(monkeypatch: pytest.MonkeyPatch):
    """The scale moves in each replay, whoever was waiting when it was recorded."""
    assert same(beside_a_loop(monkeypatch), beside_a_loop(None))


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_number_that_changes_again_and_again_is_followed(is_recorded: bool, every: int, monkeypatch: pytest.MonkeyPatch):
    """Dynamo would make it an input of the program, whose guard takes any value. Recorded anew a few times, and no more."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, settings = nn.Linear(8, 4), Settings()
    optimizer, amp = optim.SGD(model.parameters(), lr=0.0, fused=True), fxamp.Amp(precision="bf16", lower="aot_eager")
    step = amp.train_step(model, lambda out, y: F.mse_loss(out, y) * settings.share, optimizer)
    if is_recorded:
        taped(step, monkeypatch)
    x, y = next(batches(CPU, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxamp.FxampWarning)
        whole = step(x, y)
        for i in range(1, 30):
            settings.share = 0.125 * (i // every)
            assert torch.allclose(step(x, y), whole * settings.share), i
    if is_recorded:
        assert 1 <= step.summary().num_recordings <= train_step.MAX_CONSTANT
        assert "it reads a float of Python's that has changed several times" in " ".join(amp.report().notes)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_leaves_that_are_no_parameters_get_no_gradients(is_recorded: bool, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    model, share = nn.Linear(8, 4), torch.ones((), requires_grad=True)
    optimizer, amp = optim.SGD(model.parameters(), lr=0.1, fused=True), fxamp.Amp(precision="bf16", lower="aot_eager")
    step = amp.train_step(model, lambda out, y: F.mse_loss(out, y) * share, optimizer)
    if is_recorded:
        taped(step, monkeypatch)
    for i, (x, y) in enumerate(batches(CPU, 6)):
        share.grad = waiting = torch.ones(()) if i % 2 else None
        step(x, y)
        assert share.grad is waiting


@pytest.mark.parametrize("how", ["moves", "is another"])
def test_hooks_of_weights_are_told_apart(how: str, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    told = list[str]()
    handle = model[0].weight.register_hook(lambda g: told.append("first"))
    optimizer, amp = optim.SGD(model.parameters(), lr=0.1, fused=True), fxamp.Amp(precision="bf16", lower="aot_eager")
    step = taped(amp.train_step(model, F.mse_loss, optimizer), monkeypatch)
    for x, y in batches(CPU, 5):
        step(x, y)
    handle.remove()
    told.clear()
    weight = model[1].weight if how == "moves" else model[0].weight
    weight.register_hook(lambda g: told.append("second"))
    if how == "moves":
        with pytest.raises(errors.InvalidOption, match="a hook was registered on a weight"):
            step(x, y)
    else:
        step(x, y)
        assert told == ["second"]


def test_gradients_may_be_dropped_in_inference_mode():
    torch._dynamo.reset()
    model = nn.Linear(8, 4)
    optimizer, amp = optim.SGD(model.parameters(), lr=0.1), fxamp.Amp(precision="fp16", lower="aot_eager")
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for others in range(3):
        run(torch.ones(2, 8)).sum().backward()
        with torch.inference_mode():
            optimizer.zero_grad()
        torch.compile(nn.Linear(8, 2 + others), backend=amp)(torch.ones(2, 8)).sum().backward()  # slots change hands
        run(torch.ones(2, 8)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_gradients_of_others_wait_for_whoever_steps_them(is_recorded: bool, precision: str, monkeypatch: pytest.MonkeyPatch):
    """A loss that another network computes leaves nothing with it, and touches nothing that is there."""
    torch._dynamo.reset()
    maker, critic = nn.Linear(8, 4), nn.Linear(4, 1)
    optimizer, amp = optim.SGD(maker.parameters(), lr=0.1, fused=True), fxamp.Amp(precision=precision, lower="aot_eager")
    step = amp.train_step(maker, lambda made, _: critic(made).square().mean(), optimizer)
    if is_recorded:
        taped(step, monkeypatch)
    for i, (x, y) in enumerate(batches(CPU, 8)):
        waiting = torch.full_like(critic.weight, float(i)) if i % 3 else None
        critic.weight.grad = waiting
        step(x, y)
        assert critic.weight.grad is waiting
        assert waiting is None or torch.equal(waiting, torch.full_like(critic.weight, float(i)))
        assert critic.bias.grad is None
    assert step.summary().num_replayed == (6 if is_recorded else 0)


class Late:
    """Scales by a parameter that joins later, and may break off a recording."""

    def __init__(self, b: Bench) -> None:
        self.bench, self.scale = b, nn.Parameter(torch.ones(4))
        self.is_there = False
        self.error: type[BaseException] | None = None
        self.unseen: Any = torch._dynamo.disable(self.through)  # pyright: ignore[reportArgumentType]
        b.optimizer.add_param_group({"params": [self.scale]})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.unseen(x), y)

    def through(self, x: Tensor) -> Tensor:
        if self.error is not None and Recorder.is_recording:
            raise self.error("in the middle")
        return x * self.scale if self.is_there else x


@pytest.mark.filterwarnings("ignore:train_step. a micro-batch runs")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_recording_that_breaks_off_leaves_no_trace(error: type[BaseException], monkeypatch: pytest.MonkeyPatch):
    """Neither flags that never arrived, nor state that was never made; nor does one that makes state."""
    torch._dynamo.reset()
    results = []
    for is_taped in (True, False):
        b = Bench()
        late = Late(b)
        step = b.amp.train_step(b.model, late.loss, b.optimizer)
        if is_taped:
            taped(step, monkeypatch)
        data = list(batches(CPU, 8))
        for x, y in data[:2]:
            step(x, y)
        late.is_there, late.error = True, error  # its first gradient makes its state
        if is_taped:
            with pytest.raises(error, match="in the middle"):
                step(*data[2])
        assert late.scale not in b.optimizer.state
        late.error = None
        for x, y in data[2:]:
            step(x, y)
        assert step.summary().num_replayed == (5 if is_taped else 0)
        results.append([*state_of(b.model, b.optimizer), late.scale.detach(), b.amp.loss_scale])
    assert same(*results)


class Broken(nn.Module):
    """Of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.config = nn.Linear(8, 8), nn.Linear(8, 4), Settings()

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        torch._dynamo.graph_break()
        return self.g(x) * self.config.share


def follows(
    made: Callable[[], nn.Module], count: int, change: Callable[[Any, int], None], monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Is a model that is changed before each of so many steps, behind graph breaks, trained to the same bits recorded, in two
    recordings, as it is when it is not?"""
    results = list[list[Tensor]]()
    for is_taped in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = made()
        optimizer, amp = optim.SGD(model.parameters(), lr=0.1, fused=True), fxamp.Amp(precision="bf16", lower="aot_eager")
        step = amp.train_step(model, F.mse_loss, optimizer)
        if is_taped:
            taped(step, monkeypatch)
        losses = list[Tensor]()
        for i, (x, y) in enumerate(batches(CPU, count)):
            change(model, i)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses.append(step(x, y))
        assert step.summary().num_recordings == (2 if is_taped else 0)
        results.append([*losses, *state_of(model, optimizer)])
    return same(*results)


def test_a_number_behind_a_graph_break_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Of the user's own object, which no module holds: the programs behind the break were compiled for it."""

    def change(model: Broken, i: int) -> None:
        model.config.share = 1.0 if i < 6 else 0.5

    assert follows(Broken, 12, change, monkeypatch)


class Blocks(nn.Module):
    """One program serves both, which have numbers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = BrokenBlock(), BrokenBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))[:, :4]


class BrokenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.config, self.shares = nn.Linear(8, 8), Settings(), [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        settings, shares = self.config, self.shares

        def shared(y: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return y * settings.share * shares[0]

        return shared(torch.tanh(self.f(x)))


@pytest.mark.parametrize("block", ["first", "second"])
@pytest.mark.parametrize("what", ["an attribute", "an item"])
def test_numbers_of_each_object_that_a_program_serves_are_seen(what: str, block: str, monkeypatch: pytest.MonkeyPatch):
    def change(model: Blocks, i: int) -> None:
        of = model.get_submodule(block)
        assert isinstance(of, BrokenBlock)
        if i == 5 and what == "an attribute":
            of.config.share = 0.5
        elif i == 5:
            of.shares[0] = 0.5

    assert follows(Blocks, 9, change, monkeypatch)


class Recurrent(nn.Module):
    """Keeps what it computes for the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.last = nn.Linear(8, 4), torch.zeros(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x) + self.last
        self.last = y.detach() * 0.5
        return y


def test_what_a_model_keeps_from_step_to_step_is_not_recorded(monkeypatch: pytest.MonkeyPatch):
    """A replay would read that of the step before the recording for ever."""
    torch._dynamo.reset()
    model = Recurrent()
    optimizer, amp = optim.SGD(model.parameters(), lr=0.1, fused=True), fxamp.Amp(precision="bf16", lower="aot_eager")
    step = taped(amp.train_step(model, F.mse_loss, optimizer), monkeypatch)
    data = list(batches(CPU, 5))
    for x, y in data[:2]:
        step(x, y)
    with pytest.warns(fxamp.FxampWarning, match="neither a parameter nor a buffer"):
        step(*data[2])
    for x, y in data[3:]:
        step(x, y)
    assert step.summary().num_replayed == 0


# ---- one rank of one -----------------------------------------------------------------------------------------------------
@pytest.fixture
def one_rank() -> Iterator[None]:
    """It agrees with itself."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


NUM_CALLS, LAG_STEPS = 28, 3
"""DDP times ten steps; the answer to a wish of the eleventh call arrives in the fifteenth."""


class Ranked:
    """A training under DDP."""

    def __init__(self, kind: type[nn.Module] = Small) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.inner: Any = kind()
        self.model = nn.parallel.DistributedDataParallel(self.inner)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.amp = fxamp.Amp(precision="fp16", lower="aot_eager")

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y[:, :4])


class Failing(torch.autograd.Function):
    """Its backward asks the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if Recorder.is_recording:
            raise RuntimeError("a backward asks the host")
        return gradients[0]


@torch._dynamo.disable
def fails_backward(x: Tensor) -> Tensor:
    return Failing.apply(x)  # pyright: ignore[reportReturnType]


class Halfway(nn.Module):
    """One gradient has arrived when its backward asks the host."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.g(fails_backward(self.f(x)))


def feed_twins(b: Ranked, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def feed_columns(b: Ranked, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.cat([x, x + 1], 1)
    return wide[:, :8], wide[:, 8:]


def feed_and_replace(b: Ranked, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    b.inner.plain = torch.full((8,), 0.5 + 0.125 * i)
    return x, torch.zeros_like(x)


def feed_and_replace_once(b: Ranked, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    if i in (12, 22):
        b.inner.plain = torch.full((8,), 0.5 + 0.125 * i)
    return x, torch.zeros_like(x)


def feed_and_renew(b: Ranked, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    if i == 18:  # as a second train step of the same model does
        data_parallel.move_to([b.model], contextlib.nullcontext)
    return x, torch.zeros_like(x)


def feed_and_hook(b: Ranked, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    if i == 18:
        b.model.register_comm_hook(None, allreduce_hook)
    return x, torch.zeros_like(x)


def feed_shapes(b: Ranked, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    return x[: 8 - i % 2], torch.zeros_like(x[: 8 - i % 2])


FEEDS: dict[Callable[[Ranked, int, Tensor], tuple[Tensor, Tensor]], int] = {
    feed_twins: NUM_CALLS - 15,
    feed_columns: NUM_CALLS - 15,
    feed_and_replace: 0,
    feed_and_replace_once: NUM_CALLS - 15 - 6,
    feed_and_renew: 3,
    feed_and_hook: 3,
    feed_shapes: NUM_CALLS - 17,
}
"""And how many calls are replayed."""


@pytest.mark.filterwarnings("ignore:train_step. from now on each step")
@pytest.mark.parametrize("feed", FEEDS, ids=lambda f: f.__name__)
def test_what_changes_while_ranks_agree(feed: Any, one_rank: None, monkeypatch: pytest.MonkeyPatch):
    """Nothing is compiled while the step is recorded, and what is recorded is the step of now."""
    results = list[list[Tensor]]()
    for is_taped in (False, True):
        b = Ranked()
        step = b.amp.train_step(b.model, b.loss, b.optimizer)
        if is_taped:
            agreeing(step, monkeypatch)
        losses = [step(*feed(b, i, x)) for i, (x, _) in enumerate(batches(CPU, NUM_CALLS))]
        results.append([*losses, *state_of(b.model, b.optimizer), b.amp.loss_scale])
        if is_taped:
            assert step.summary().num_replayed == FEEDS[feed], step.summary()
            assert "other ranks are not ready" in step.summary().num_plain
    assert same(*results)


def agreeing(step: TrainStep, patch: pytest.MonkeyPatch) -> TrainStep:
    """Recorded as where there are other ranks."""
    step = taped(step, patch)
    step._agreement = Agreement(CPU)
    step._agreement._mailbox = Mailbox(LAG_STEPS)
    return step


def test_a_backward_that_breaks_off_a_recording_leaves_ddp_whole(one_rank: None, monkeypatch: pytest.MonkeyPatch):
    """Its reducer waits for the gradients that did not come, and would refuse every step from then on."""
    results = list[list[Tensor]]()
    for is_taped in (False, True):
        b = Ranked(Halfway)
        step = b.amp.train_step(b.model, b.loss, b.optimizer)
        if is_taped:
            agreeing(step, monkeypatch)
        losses = list[Tensor]()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for x, _ in batches(CPU, NUM_CALLS):
                losses.append(step(x, x))
        assert any("a backward asks the host" in str(w.message) for w in told) == is_taped
        results.append([*losses, *state_of(b.model, b.optimizer), b.amp.loss_scale])
    assert same(*results)


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_graph_break_in_a_recording_is_told_of(is_broken: bool, monkeypatch: pytest.MonkeyPatch):
    """Once: what Python computes between two programs is seen by no guard."""
    torch._dynamo.reset()
    model = Broken() if is_broken else Small()
    optimizer, amp = optim.SGD(model.parameters(), lr=0.1, fused=True), fxamp.Amp(precision="bf16", lower="aot_eager")
    step = taped(amp.train_step(model, F.mse_loss, optimizer, accumulate=2), monkeypatch)
    for x, y in (*batches(CPU, 5), *((x[:4], y[:4]) for x, y in batches(CPU, 4))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(x, y)
    assert step.summary().num_recordings == 2
    told = [note for note in amp.report().notes if "a micro-batch runs" in note]
    assert [note.startswith("train_step: a micro-batch runs 3 graphs, not one") for note in told] == [True] * is_broken


def test_switches_of_pytorch_are_those_of_the_recording(monkeypatch: pytest.MonkeyPatch):
    """Else the step runs as it is, and says what it says then."""
    b = Bench()
    step = taped(b.amp.train_step(b.model, b.loss, b.optimizer), monkeypatch)
    data = next(batches(CPU, 1))
    for _ in range(2):
        for switch in (torch.no_grad, torch.inference_mode):
            with switch(), pytest.raises(errors.InvalidOption, match=r"under torch\.no_grad\(\) or torch\.inference_mode"):
                step(*data)
        b.run(step)
    with torch.autocast("cpu", torch.float16), pytest.warns(fxamp.FxampWarning, match="ambient autocast"):
        step(*data)
    assert step.summary().num_replayed == 6
    step(*data)
    assert step.summary().num_replayed == 7
    assert sum(count for why, count in step.summary().num_plain.items() if "another switch of PyTorch" in why) == 1


def test_a_write_before_the_recording_is_not_one_of_the_models(monkeypatch: pytest.MonkeyPatch):
    """Copies of weights that the model writes in the midst of a step are not left to the update; others are."""
    b = Bench()
    step = taped(b.amp.train_step(b.model, b.loss, b.optimizer), monkeypatch)
    for i, (x, y) in enumerate(batches(CPU, 4)):
        if i == 2:
            b.model.load_state_dict({name: 0.5 * p for name, p in b.model.state_dict().items()})
        step(x, y)
    assert step.summary().num_replayed == 2
    assert tuple(step._leaves)
    assert step._leaves.can_be_followed()


def test_a_process_that_becomes_one_of_many_records_no_more(monkeypatch: pytest.MonkeyPatch):
    b = Bench()
    step = taped(b.amp.train_step(b.model, b.loss, b.optimizer), monkeypatch)
    b.run(step)
    monkeypatch.setattr(ranks, "is_one_of_many", lambda: True)
    monkeypatch.setattr(b.amp._scaling, "_agreed", lambda *numbers: numbers)
    with pytest.warns(fxamp.FxampWarning, match="torch.distributed was initialized after the step was made"):
        b.run(step)
    assert step.summary().num_replayed == 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_that_the_first_forward_makes(precision: str, monkeypatch: pytest.MonkeyPatch):
    def trained(*, is_recorded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(8, 4))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step = fxamp.Amp(precision=precision, lower="aot_eager").train_step(model, F.mse_loss, optimizer)
        if is_recorded:
            taped(step, monkeypatch)
        losses = [step(x, y) for x, y in batches(CPU, 8)]
        assert step.summary().num_replayed == (5 if is_recorded else 0)
        return [*losses, *model.parameters()]

    assert same(trained(is_recorded=True), trained(is_recorded=False))
