"""A whole training step: what it computes is the plain loop, whatever it is recorded as."""

from __future__ import annotations

import functools
import gc
import math
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import fxamp
from fxamp import errors
from fxamp.run import capturable
from fxamp.run.train_step import MAX_SHAPES, MAX_WORLDS, Batch, TrainStep
from tests.programs import mlp
from tests.waits import no_waits

pytestmark = pytest.mark.filterwarnings("ignore:train_step. a micro-batch runs")  # tests/run/test_recordings.py looks at it
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Net(nn.Module):
    """What a step has to get right: running statistics, dropout, a layer that can overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(F.gelu(self.norm(self.first(x))), 0.1, self.training))


def batches(device: torch.device, count: int, *, bad: tuple[int, ...] = (), rows: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        x, y = torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)
        x[0, 0] = math.inf if i in bad else x[0, 0]
        yield x.to(device), y.to(device)


def made(device: torch.device, **options: Any) -> tuple[nn.Module, optim.Optimizer, fxamp.Amp]:
    torch.manual_seed(0)
    model = Net().to(device)
    defaults = {"lower": "aot_eager"} if device.type == "cpu" else {}
    return model, optim.AdamW(model.parameters(), lr=1e-2, fused=True), fxamp.Amp(**defaults, **options)


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    states = [x.detach() for state in optimizer.state.values() for x in state.values()]
    return [t.detach().clone() for t in (*model.state_dict().values(), *states)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def by_hand(
    model: nn.Module, optimizer: optim.Optimizer, amp: fxamp.Amp, *, clip: float | None = None, accumulate: int = 1
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loop that a step stands for."""
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for part in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = F.mse_loss(run(part[0]), part[1]) / accumulate
            loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


# ---- what it computes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "clip", "accumulate"),
    [
        ({"precision": "fp16", "policy": {"first": "fp32"}}, None, 1),
        ({"precision": "fp16", "policy": {"first": "fp32"}}, 0.5, 1),
        ({"precision": "bf16"}, None, 4),
        ({"precision": "fp16", "scaling": 64.0}, 0.5, 2),
    ],
)
def test_a_step_is_the_plain_loop(options: dict[str, Any], clip: float | None, accumulate: int):
    """Bit for bit: parameters, statistics, optimizer and losses, with a schedule, dropout and overflows."""
    results = []
    for is_step in (True, False):
        model, optimizer, amp = made(CPU, **options)
        if is_step:
            step = amp.train_step(model, nn.MSELoss(), optimizer, clip_grad_norm=clip, accumulate=accumulate)
        else:
            step = by_hand(model, optimizer, amp, clip=clip, accumulate=accumulate)
        schedule = optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        losses = []
        for x, y in batches(CPU, 8, bad=(0, 1, 5) if options["precision"] == "fp16" else ()):
            losses.append(step(x, y))
            schedule.step()
        if options["precision"] == "fp16":
            assert amp.read_skipped_steps() == 3
        results.append([*state_of(model, optimizer), *(loss.nan_to_num(7.0) for loss in losses)])
    assert same(*results)
    for a, b in zip(*results, strict=True):  # the sum of losses is in another order
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_paths_of_modules_are_those_of_the_model():
    model, optimizer, amp = made(CPU, precision="bf16", policy={"first": "fp32"})
    step = amp.train_step(torch.compile(model, backend=amp), nn.MSELoss(), optimizer)  # pyright: ignore[reportArgumentType]
    for x, y in batches(CPU, 1):
        step(x, y)
    decisions = amp.graphs[0].variants["bf16"].plan.everywhere
    assert [d.computes for d in decisions if d.op == "linear"] == ["fp32", "bf16"]
    assert "train step: 0 replayed from 0 CUDA graphs; 1 as they are: no CUDA graphs on cpu" in str(amp.report())


def test_gradients_are_gone_and_the_loss_is_ones_own():
    model, optimizer, amp = made(CPU, precision="bf16")
    step = amp.train_step(model, nn.MSELoss(), optimizer)
    losses = [step(x, y) for x, y in batches(CPU, 3)]
    assert all(p.grad is None for p in model.parameters())
    assert len({float(loss) for loss in losses}) == 3
    assert not losses[0].requires_grad


def test_a_model_that_knows_its_loss():
    class Knowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(8, 16, 4)

        def forward(self, x: Tensor, labels: Tensor, factor: float = 1.0) -> Any:
            return SimpleNamespace(loss=F.mse_loss(self.net(x), labels) * factor)

    losses = []
    for factor in (1.0, 2.0):
        torch.manual_seed(0)
        model, amp = Knowing(), fxamp.Amp(precision="bf16", lower="aot_eager")
        step = amp.train_step(model, None, optim.SGD(model.parameters(), lr=0.1))
        losses += [float(step(x, labels=y, factor=factor)) for x, y in batches(CPU, 1)]
    assert losses[1] == 2 * losses[0]


def test_a_change_of_precision_comes_with_the_next_step():
    model, optimizer, amp = made(CPU, ladder=("bf16", "fp32"))
    step = amp.train_step(model, nn.MSELoss(), optimizer)
    seen = []
    for i, (x, y) in enumerate(batches(CPU, 4)):
        seen.append(amp.precisions["model"])
        step(x, y)
        amp.set_precision("fp32" if i % 2 == 0 else "bf16")
    assert seen == ["bf16", "fp32", "bf16", "fp32"]


def test_retry_computes_an_overflowed_step_in_the_next_precision():
    """What it then does is what the step does in that precision; the scale still falls."""
    x, y = next(batches(CPU, 1))
    results = []
    for options in ({"ladder": ("fp16", "fp32"), "on_overflow": "retry"}, {"ladder": ("fp16", "fp32")}):
        torch.manual_seed(0)
        model = mlp(8, 16, 4)
        optimizer = optim.SGD(model.parameters(), lr=1e-15)
        amp = fxamp.Amp(lower="aot_eager", **options)  # pyright: ignore[reportArgumentType]
        step = amp.train_step(model, nn.MSELoss(), optimizer)
        if "on_overflow" not in options:
            amp.set_precision("fp32")
        losses = [step(factor * x, y) for factor in (1e6, 1e6)]  # beyond fp16
        assert all(bool(torch.isfinite(loss)) for loss in losses)
        results.append([p.detach().clone() for p in model.parameters()])
        assert amp.read_skipped_steps() == (2 if "on_overflow" in options else 0)
        assert amp.read_loss_scale() == (2**14 if "on_overflow" in options else 2**16)
        assert amp.precisions["model"] == ("fp16" if "on_overflow" in options else "fp32")
    assert same(*results)


# ---- what it refuses --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [optim.Adagrad, optim.Adafactor, optim.SparseAdam])
def test_an_optimizer_that_cannot_be_captured_is_refused(make: Callable[..., optim.Optimizer]):
    model, _, amp = made(CPU, precision="bf16")
    with pytest.raises(errors.CannotCapture, match=f"the step of {make.__name__}.*Adam, AdamW or SGD with fused=True"):
        amp.train_step(model, nn.MSELoss(), make(model.parameters()))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_optimizer_of_another_model_is_told_of(precision: str):
    model, _, amp = made(CPU, precision=precision)
    optimizer = optim.SGD(nn.Linear(8, 4).parameters(), lr=0.1)
    step = amp.train_step(model, nn.MSELoss(), optimizer)
    with pytest.warns(fxamp.FxampWarning, match="none of the 2 parameters of the SGD got a gradient: nothing is trained"):
        step(*next(batches(CPU, 1)))
    step(*next(batches(CPU, 1)))  # once
    assert repr(step).startswith("<TrainStep of ")


def test_what_makes_no_sense_is_refused():
    model, optimizer, amp = made(CPU, precision="bf16")
    with pytest.raises(errors.InvalidOption, match=r"given a AdamW as its model. It takes \(model, loss_fn, optimizer\)"):
        amp.train_step(optimizer, nn.MSELoss(), model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InvalidOption, match="given a Linear as its optimizer"):
        amp.train_step(model, None, nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InvalidOption, match="accumulate=0"):
        amp.train_step(model, nn.MSELoss(), optimizer, accumulate=0)
    with pytest.raises(errors.InvalidOption, match=r"clip_grad_norm=-1\.0"):
        amp.train_step(model, nn.MSELoss(), optimizer, clip_grad_norm=-1.0)
    step = amp.train_step(model, nn.MSELoss(), optimizer, accumulate=3)
    x, y = next(batches(CPU, 1))
    with pytest.raises(errors.InvalidOption, match="8 rows, which accumulate=3 does not divide"):
        step(x, y)
    with pytest.raises(errors.InvalidOption, match="requires a gradient"):
        step(x.requires_grad_(), y)
    x = x.detach()
    with pytest.raises(errors.InvalidOption, match="and they have 8 and 6 rows"):
        step(x, y[:6])
    with pytest.raises(errors.InvalidOption, match="and they have none"):
        step(x.sum(), y.sum())
    with pytest.raises(errors.InvalidOption, match="there is no target"):
        step()
    with pytest.raises(errors.InvalidOption, match=r"the class MSELoss as its loss_fn. Give an instance, MSELoss\(\)"):
        amp.train_step(model, nn.MSELoss, optimizer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InvalidOption, match="clip_grad_norm=True"):
        amp.train_step(model, nn.MSELoss(), optimizer, clip_grad_norm=True)
    with pytest.raises(errors.CannotCapture, match="LBFGS evaluates the loss many times within one step, which a recording"):
        amp.train_step(model, nn.MSELoss(), optim.LBFGS(model.parameters()))
    for made_of, told in ((lambda *_: (x.sum(), x), "a tuple"), (lambda *_: {"loss": x.sum()}, "a dict")):
        with pytest.raises(errors.InvalidOption, match=f"the loss of the training step is {told}, not a tensor"):
            amp.train_step(model, made_of, optimizer, accumulate=2)(x, y)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InvalidOption, match="does not depend on a parameter"):
        amp.train_step(model, lambda out, y: F.mse_loss(out.detach(), y), optimizer)(x, y)
    wide = amp.train_step(model, nn.MSELoss(reduction="none"), optimizer)
    with wide, pytest.raises(errors.InvalidOption, match=r"a tensor of shape \[8, 4\]"):
        wide(x, y)
    with pytest.raises(errors.InvalidOption, match="closed"):
        wide(x, y)
    with pytest.raises(errors.InvalidOption, match="Give a ladder"):
        fxamp.Amp(precision="fp16", on_overflow="retry")
    with pytest.raises(errors.InvalidOption, match=r"Use amp\.train_step"):
        fxamp.Amp(ladder=("fp16", "fp32"), on_overflow="retry").attach(optimizer)


def test_batches_are_told_apart():
    x, y = torch.zeros(4, 2), torch.zeros(4)
    keys = [
        Batch.of(args, kwargs).key()
        for args, kwargs in [
            ((x, y), {}), ((x, y), {"a": 1}), ((x, y), {"a": 2}), ((x, y), {"b": 1}), ((y, x), {}), ((x.double(), y), {}),
            ((x.T.contiguous().T, y), {}), (([x, y],), {}), (({"x": x, "y": y},), {}),
        ]
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert Batch.of((torch.ones(4, 2), y), {}).key() == keys[0]
    others = [Batch.of((x, other), {}).key() for other in (1, True, 1.0, 0.0, -0.0, False, "1", None, torch.float32)]
    assert len(set(others)) == len(others)
    with pytest.raises(errors.InvalidOption, match="holds a object, in which nobody would see a change"):
        Batch.of((x, object()), {})


# ---- beside the plain loop, where it is easy to go wrong --------------------------------------------------------------
def through(x: Tensor) -> Tensor:
    """A graph break."""
    torch._dynamo.graph_break()
    return x.clone()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return through(x + 0.1 * torch.tanh(self.f(x)))


class Repeated(nn.Module):
    """One weight that many graphs read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*[Block()] * 20), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Clamped(nn.Module):
    """Writes a weight between two graphs that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.o = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = through(self.o(F.relu(self.f(x))).detach())
        with torch.no_grad():
            self.o.weight.clamp_(-0.05, 0.05)
        return h + self.o(through(F.relu(self.f(x))))


@pytest.mark.parametrize("kind", [Repeated, Clamped])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_of_several_graphs(kind: type[nn.Module], precision: str):
    """Their gradients are added up in fp32, and what the model writes is seen: as near fp32 as the plain loop."""
    results = []
    for is_step, of in ((True, precision), (False, precision), (False, "fp32")):
        torch.manual_seed(0)
        model, amp = kind(), fxamp.Amp(precision=of, lower="aot_eager")
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step = amp.train_step(model, nn.MSELoss(), optimizer) if is_step else by_hand(model, optimizer, amp)
        losses = [step(x, y) for x, y in batches(CPU, 3)]
        results.append(torch.cat([t.flatten() for t in (*state_of(model, optimizer), torch.stack(losses))]))
    stepped, plain, exact = results
    assert 0 < (stepped - exact).norm() < 1.5 * (plain - exact).norm()


def test_a_hook_that_would_not_run_is_refused():
    model, optimizer, amp = made(CPU, precision="bf16")
    step = amp.train_step(model, nn.MSELoss(), optimizer)
    x, y = next(batches(CPU, 1))
    step(x, y)
    handle = model.last.weight.register_hook(lambda g: g * 0)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    with pytest.raises(errors.InvalidOption, match="a hook was registered on a weight"):
        step(x, y)
    handle.remove()
    step(x, y)


def test_groups_that_join_later_are_clipped_and_stepped():
    results = []
    for is_step in (True, False):
        torch.manual_seed(0)
        model, amp = mlp(8, 16, 4), fxamp.Amp(precision="bf16", lower="aot_eager")
        optimizer = optim.SGD(model[0].parameters(), lr=0.1)
        step = amp.train_step(model, nn.MSELoss(), optimizer, clip_grad_norm=0.05) if is_step else None
        for i, (x, y) in enumerate(batches(CPU, 4)):
            if i == 2:
                optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
            if step is not None:
                step(x, y)
                continue
            F.mse_loss(torch.compile(model, backend=amp)(x), y).backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
            optimizer.step()
            model.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)


def test_many_steps_in_one_process():
    """Dynamo's limit of recompilations is one step's own."""
    for _ in range(10):
        model, optimizer, amp = made(CPU, precision="bf16")
        step = amp.train_step(model, nn.MSELoss(), optimizer)
        for x, y in batches(CPU, 1):
            step(x, y)
        assert len(amp.graphs) == 1


def test_skips_of_others_are_not_retried_and_schedules_count_steps():
    torch.manual_seed(0)
    model = mlp(8, 16, 4)
    optimizer = optim.SGD(model.parameters(), lr=1e-15)
    amp = fxamp.Amp(ladder=("fp16", "fp32"), on_overflow="retry", lower="aot_eager")
    first = amp.train_step(model, nn.MSELoss(), optimizer)
    second = amp.train_step(model, nn.MSELoss(), optimizer)
    x, y = next(batches(CPU, 1))
    first(math.inf * x, y)  # lost in any precision
    schedule = amp.when_stepped(optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1e-15 * (n + 1)))
    calls = amp.graphs
    for factor in (1.0, 1e6, 1.0):  # the second overflows fp16, and is rescued
        second(factor * x, y)
        schedule.step()
    assert len(amp.graphs) == len(calls) + 1
    assert schedule.schedule.last_epoch == 3
    second(math.inf * x, y)
    schedule.step()
    assert schedule.schedule.last_epoch == 3


def twice(step: TrainStep, model: nn.Module, amp: fxamp.Amp, run: Callable[[], list[Tensor]]) -> bool:
    """Does a part of a training come to the same bits, recorded and as it is, from the same state? One compiled program serves
    both: two compilations may choose other kernels, and Adam makes steps of any difference in a gradient that is all noise."""
    optimizer = step._task.optimizer
    before, scaling = state_of(model, optimizer), amp.state_dict()
    results = []
    for why in ("", "asked by a test"):
        with torch.no_grad():
            states = (t for state in optimizer.state.values() for t in state.values())
            for t, value in zip((*model.state_dict().values(), *states), before, strict=True):
                t.copy_(value)
        if scaling:
            amp.load_state_dict(scaling)
        torch.manual_seed(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "_why_plain", why)
            losses = run()
        results.append([*state_of(model, optimizer), torch.stack(losses).nan_to_num(7.0)])
    return same(*results)


# ---- on CUDA ----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_recorded_step_is_the_one_as_it_is(precision: str):
    """A hundred steps, bit for bit, with dropout, a schedule, clipping and overflows."""
    model, optimizer, amp = made(CUDA, precision=precision, policy={"first": "fp32"}, scaling="dynamic", cuda_graphs="require")
    step = amp.train_step(model, nn.MSELoss(), optimizer, clip_grad_norm=0.5)
    for x, y in batches(CUDA, 4, bad=(0,)):
        step(x, y)
    skipped = amp.read_skipped_steps()

    def run() -> list[Tensor]:
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        losses = []
        for x, y in batches(CUDA, 100, bad=(5, 50)):
            losses.append(step(x, y))
            schedule.step()
        assert amp.read_skipped_steps() == skipped + 2
        assert int(amp._scaling.state().num_updates) == 104
        assert len(amp._scaling.state().read_history()) == 104
        optimizer.param_groups[0]["lr"] = 1e-2
        return losses

    assert twice(step, model, amp, run)
    assert step.summary().num_recordings == 1
    assert step.summary().num_plain["asked by a test"] == 100


@pytest.mark.gpu
def test_it_never_waits_nor_records_again():
    """Precisions, shapes, evaluations and overflows in any order, after each has been seen."""
    model, optimizer, amp = made(CUDA, ladder=("fp16", "fp32"), policy={"first": "fp32"})
    step = amp.train_step(model, nn.MSELoss(), optimizer, accumulate=2)
    evaluate = torch.compile(model, backend=amp)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    data = {rows: list(batches(CUDA, 8, bad=(6,), rows=rows)) for rows in (4, 8)}

    def evaluation() -> Tensor:
        model.eval()
        with torch.no_grad():
            out = evaluate(data[8][0][0])
        model.train()
        return out

    for rows in (4, 8):
        for x, y in data[rows][:4]:
            step(x, y)
    for precision in ("fp16", "fp32"):
        amp.set_precision(precision)
        for _ in range(4):
            evaluation()
    recorded = step.summary().num_recordings
    assert recorded == 4
    with no_waits():
        for i in range(200):
            amp.set_precision("fp32" if i % 3 == 0 else "fp16")
            step(*data[4 if i % 5 else 8][i % 8])
            schedule.step()
            if i % 10 == 0:
                evaluation()
    assert step.summary().num_recordings == recorded
    assert step.summary().num_replayed == 200 + (8 - 2 * 2)
    assert amp.read_skipped_steps() > 0
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*capturable.CAPTURABLE, *capturable.FUSED])
def test_every_optimizer_on_the_list_is_recorded(kind: type[optim.Optimizer]):
    how = {"fused": True} if kind is optim.SGD else {"capturable": True}
    results = []
    for cuda_graphs in ("require", False):
        torch.manual_seed(0)
        model = mlp(8, 16, 4).cuda()
        amp = fxamp.Amp(precision="fp16", cuda_graphs=cuda_graphs)
        optimizer = kind(model.parameters(), lr=1e-3, **how)  # pyright: ignore[reportCallIssue]
        step = amp.train_step(model, nn.MSELoss(), optimizer)
        for i, (x, y) in enumerate(batches(CUDA, 10, bad=(6,))):
            step(x, y)
            optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)
        assert step.summary().num_recordings == (1 if cuda_graphs else 0)
        results.append(state_of(model, optimizer))
    assert same(*results)


@pytest.mark.gpu
def test_what_moves_is_seen():
    """Weights written, moved, put in place of others; hyperparameters; modes: never a stale weight."""
    model, optimizer, amp = made(CUDA, precision="bf16")
    step = amp.train_step(model, nn.MSELoss(), optimizer)

    def both(change: Callable[[Any, optim.Optimizer], object]) -> None:
        change(model, optimizer)
        for x, y in batches(CUDA, 4):  # records anew where that is due
            step(x, y)
        change(model, optimizer)
        assert twice(step, model, amp, lambda: [step(x, y) for x, y in batches(CUDA, 4)])

    def halve(m: Any, _: optim.Optimizer) -> None:
        m.last.weight.data.mul_(0.5)

    def replace(m: Any, _: optim.Optimizer) -> None:
        m.last.weight.data = m.last.weight.data * 0.5

    both(lambda m, o: None)
    both(halve)
    both(replace)
    both(lambda m, o: m.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in m.state_dict().items()}))
    both(lambda m, o: o.param_groups[0].update(weight_decay=0.3))
    both(lambda m, o: o.param_groups[0].update(lr=0.3))
    both(lambda m, o: m.norm.eval())
    both(lambda m, o: o.load_state_dict(o.state_dict()))
    assert step.summary().num_replayed > 0


def step_of_another(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxamp.FxampWarning)  # it is not attached
        optim.SGD(model.parameters(), lr=0.01, fused=True).step()
    model.zero_grad()


def scale_all(model: nn.Module, factor: float) -> None:
    """As an average of weights is swapped in."""
    torch._foreach_copy_([p.data for p in model.parameters()], [p * factor for p in model.parameters()])


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "data.mul_": lambda m: m.get_parameter("last.weight").data.mul_(0.5),
    "foreach on data": lambda m: scale_all(m, 0.5),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 0.9 for k, v in m.state_dict().items()}),
    "another optimizer, fused": step_of_another,
    "through a view": lambda m: m.get_parameter("last.weight").data[1:3].zero_(),
    "through its address": lambda m: torch.from_dlpack(m.get_parameter("last.weight").detach()).mul_(0.5),
}


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_update_writes_the_low_copies(precision: str, accumulate: int):
    """Nothing is copied between two replays, unless somebody writes a weight; then all is as if everything were."""
    model, optimizer, amp = made(CUDA, precision=precision)
    step = amp.train_step(model, nn.MSELoss(), optimizer, accumulate=accumulate)

    def run() -> list[Tensor]:
        return [step(x, y) for x, y in batches(CUDA, 4)]

    run()
    run()
    copied = step._leaves.num_copied
    run()
    assert step._leaves.num_copied == copied
    assert step.summary().num_replayed > 4
    assert twice(step, model, amp, run)
    for way, write in WRITES.items():
        run()
        with torch.no_grad():
            write(model)
        copied = step._leaves.num_copied
        assert twice(step, model, amp, functools.partial(with_a_write, run, functools.partial(write, model))), way
        run()
        assert step._leaves.num_copied > copied, way
    assert step.summary().num_recordings == 1


def with_a_write(run: Callable[[], list[Tensor]], write: Callable[[], object]) -> list[Tensor]:
    """Steps with a write in their midst."""
    losses = run()
    with torch.no_grad():
        write()
    return losses + run()


@pytest.mark.gpu
def test_a_copy_outlives_a_time_in_which_its_weight_is_not_trained():
    """The recording from before reads it again; its memory has not become somebody else's."""
    model, optimizer, amp = made(CUDA, precision="bf16")
    step = amp.train_step(model, nn.MSELoss(), optimizer)

    def run() -> list[Tensor]:
        losses, junk = list[Tensor](), list[Tensor]()
        for trains in (True, False, True):
            model.get_parameter("last.weight").requires_grad_(trains)
            losses += [step(x, y) for x, y in batches(CUDA, 4)]
            junk += [torch.full((4, 16), 9.0, device=CUDA, dtype=torch.bfloat16) for _ in range(16)]
        assert all(bool((x == 9.0).all()) for x in junk)
        return losses

    run()
    assert twice(step, model, amp, run)


@pytest.mark.gpu
def test_ten_thousand_steps_of_all_kinds():
    """Shapes, precisions, overflows, evaluations, writes: no wrong batch, no stale weight, no recording, no growing memory."""
    scaling = fxamp.DynamicScale(growth_interval_steps=2)  # every twentieth batch overflows: it must not sink to its floor
    model, optimizer, amp = made(CUDA, ladder=("fp16", "bf16", "fp32"), policy={"first": "fp32"}, scaling=scaling)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    step = amp.train_step(model, nn.MSELoss(), optimizer)
    evaluate = torch.compile(model, backend=amp)
    data = {rows: list(batches(CUDA, 8, bad=(6,), rows=rows)) for rows in (4, 8, 16)}
    model.eval()  # statistics as they are, no dropout: the loss of a step can be computed beforehand
    for rows in data:
        for x, y in data[rows][:4]:
            step(x, y)
    draw = random.Random(0)

    def one(i: int) -> None:
        amp.set_precision(draw.choice(("fp16", "bf16", "fp32")))
        x, y = data[draw.choice((4, 8, 16))][draw.randrange(6) if i % 20 else 6]
        checked = i % 50 == 1
        with torch.no_grad():
            if draw.random() < 0.02:
                evaluate(data[8][0][0])
            if i % 40 == 0:
                scale_all(model, 0.5 if i % 80 else 2.0)
            wanted = F.mse_loss(model(x), y) if checked else None
        loss = step(x, y)
        if wanted is not None:
            torch.testing.assert_close(loss, wanted, rtol=0.05, atol=0.05)

    for i in range(200):
        one(i)
    recorded, reserved, graphs = step.summary().num_recordings, torch.cuda.memory_reserved(), len(amp.graphs)
    for i in range(10_000):
        one(i)
    assert (step.summary().num_recordings, torch.cuda.memory_reserved(), len(amp.graphs)) == (recorded, reserved, graphs)
    assert step.summary().num_replayed >= 10_000
    assert amp.read_skipped_steps() > 100
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.gpu
def test_bounds_are_reported_not_exceeded():
    model, optimizer, amp = made(CUDA, precision="fp32")
    step = amp.train_step(model, nn.MSELoss(), optimizer)
    for rows in range(2, 2 + 2 * (MAX_SHAPES + 1), 2):
        for x, y in batches(CUDA, 3, rows=rows):
            step(x, y)
    assert step.summary().num_recordings == MAX_SHAPES
    assert step.summary().num_plain[f"more than {MAX_SHAPES} shapes of batches"] == 3

    def decay_changes() -> None:
        for i in range(MAX_WORLDS):
            optimizer.param_groups[0]["weight_decay"] = 0.1 + 0.01 * i
            for x, y in batches(CUDA, 4):
                step(x, y)

    with pytest.warns(fxamp.FxampWarning, match="each step runs as it is"):
        decay_changes()


@pytest.mark.gpu
def test_a_step_that_cannot_be_recorded_goes_on_as_it_is():
    @torch._dynamo.disable
    def waits(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x, y) * (1.0 if float(x.detach().sum()) else 2.0)

    model, optimizer, amp = made(CUDA, precision="fp16")
    step = amp.train_step(model, waits, optimizer)
    with pytest.warns(fxamp.FxampWarning, match="it cannot be recorded: .*"):
        losses = [step(x, y) for x, y in batches(CUDA, 8)]
    assert step.summary().num_replayed == 0
    assert all(bool(torch.isfinite(loss)) for loss in losses)
    assert len({float(loss) for loss in losses}) == 8
    model, optimizer, amp = made(CUDA, precision="fp16", cuda_graphs="require")
    step = amp.train_step(model, waits, optimizer)
    with pytest.raises(errors.CudaGraphsUnavailable, match="the training step cannot be recorded"):
        [step(x, y) for x, y in batches(CUDA, 8)]


@pytest.mark.gpu
def test_memory_comes_back():
    def trained() -> None:
        model, optimizer, amp = made(CUDA, precision="bf16")
        with amp.train_step(model, nn.MSELoss(), optimizer) as step:
            for x, y in batches(CUDA, 6):
                step(x, y)
        assert step.summary().num_recordings == 1
        torch._dynamo.reset()

    held = []
    for _ in range(3):
        trained()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[2] <= held[0]
