"""A training whose precision changes by what is observed, from end to end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fxamp
from fxamp import errors

QUICK = fxamp.CurvatureScheduler(threshold=0.5, dwell_steps=4, lag_steps=2)
SPIKE = 25
"""A step whose loss is multiplied."""


class Run:
    """A tiny training in fp16 with a scheduler."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.amp = fxamp.Amp(lower="aot_eager", **({"precision": "fp16", "scheduler": QUICK} | options))
        self.counted = CompileCounterWithBackend(self.amp)  # pyright: ignore[reportArgumentType]
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.compiled = torch.compile(self.model, backend=self.counted)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.amp.attach(self.optimizer)
        self.losses: list[float] = []
        self.ran_in: list[str] = []

    def train(self, steps: range) -> Run:
        for step in steps:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
            self.ran_in.append(self.amp.precisions["model"])
            loss = F.mse_loss(self.compiled(x), x[:, :4]) * (8.0 if step == SPIKE else 1.0)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.amp.observe(loss)
            self.losses.append(loss.item())
        return self

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "amp": self.amp.state_dict()}
        return json.loads(json.dumps(parts["amp"])) and parts | {"amp": json.loads(json.dumps(parts["amp"]))}

    def load(self, state: Mapping[str, Any]) -> Run:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.amp.load_state_dict(state["amp"])
        return self


@pytest.fixture(scope="module")
def whole() -> Run:
    return Run().train(range(50))


def test_it_starts_high_comes_down_rises_at_the_spike_and_compiles_once(whole: Run):
    down = 4 + 2 + 4 - 1  # the fifth loss, two steps of lag, four calm steps
    up = SPIKE + 2
    later = whole.ran_in.index("fp16", up)
    wanted = ["fp32"] * down + ["fp16"] * (up - down) + ["fp32"] * (later - up) + ["fp16"] * (50 - later)
    assert whole.ran_in == wanted
    assert (whole.counted.frame_count, len(whole.amp.graphs)) == (1, 1)
    assert [change.step for change in whole.amp.history.changes] == [0, down, up, later]
    assert whole.amp.history.steps[20].loss_scale == 2.0**16
    assert whole.amp.history.steps[20].overflow_rate == 0.0


def test_the_report_says_when_and_why(whole: Run):
    report = whole.amp.report()
    assert report.scheduling[2][:2] == (str(SPIKE + 2), "fp32")
    assert "from 0.5 on an alarm" in report.scheduling[2][2]
    text = str(report)
    assert "precision of the steps, as the scheduler changed it" in text
    assert "starts high" in text
    (spike,) = (finding for finding in whole.amp.health() if finding.kind == "loss spike")
    assert list(spike.evidence["loss_by_step"]) == [SPIKE]


@pytest.mark.parametrize("at", [8, SPIKE + 1, 30])
def test_a_resumed_run_is_the_whole_one_bit_for_bit(whole: Run, at: int):
    first = Run().train(range(at))
    second = Run().load(first.state()).train(range(at, 50))
    assert first.losses + second.losses == whole.losses
    assert first.ran_in + second.ran_in == whole.ran_in
    assert second.amp.state_dict() == whole.amp.state_dict()
    for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


# ---- by region ------------------------------------------------------------------------------------------------------------
class Branches(nn.Module):
    """Two branches, of which one is a region."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(y)


class BranchRun:
    """A training of which one branch gets an input that is `factor` times as large in step `SPIKE`."""

    def __init__(self, factor: float, **options: Any) -> None:
        torch.manual_seed(0)
        scheduler = fxamp.CurvatureScheduler(threshold=1e9, dwell_steps=4, lag_steps=2, per_region=True)
        self.amp = fxamp.Amp(
            precision="fp16", lower="aot_eager", scheduler=scheduler, regions={"left": "left"},
            **({"scaling": 16.0} | options),
        )  # fmt: skip
        self.model, self.factor = Branches(), factor
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.amp.attach(self.optimizer)
        self.compiled = torch.compile(self.model, backend=self.amp)

    def train(self, steps: range) -> BranchRun:
        for step in steps:
            x, y = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(step))
            out = self.compiled(x * (self.factor if step == SPIKE else 1.0), y)
            loss = out.clamp(-1.0, 1.0).square().mean() + 0.1 * out.mean()  # whose gradient is not larger where `out` is
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.amp.observe(loss)
        return self


@pytest.fixture(scope="module")
def spiking() -> BranchRun:
    return BranchRun(5e3).train(range(32))


def test_gradients_that_jump_in_one_region_raise_that_region_alone(spiking: BranchRun):
    start, down, *rises = spiking.amp.history.changes
    assert (start.reason, set(down.precision.values())) == ("starts high", {"fp16"})
    assert rises[0].step == SPIKE + 2
    assert rises[0].precision == {"model": "fp16", "left": "fp32"}
    assert rises[0].reason.startswith("left: the largest gradient is ")
    assert all(change.precision["model"] == "fp16" for change in rises)
    assert spiking.amp.read_skipped_steps() == 0


def test_a_region_that_overflows_is_raised_alone():
    """What overflows in the left branch is not handed to the right one, and the loss is finite."""
    run = BranchRun(1.0, scaling=2.0**10).train(range(12))
    first, second = (layer for layer in run.model.left if isinstance(layer, nn.Linear))
    with torch.no_grad():
        for p in first.parameters():
            p.mul_(1e-5)
        second.weight.mul_(1e5)  # of what comes back to `first`, too
    run.train(range(12, 24))
    rise = run.amp.history.changes[-1]
    assert rise.precision == {"model": "fp16", "left": "fp32"}
    assert rise.reason.startswith("left: 25% of the recent updates overflowed")
    assert rise.step == 12 + 4 - 1 + 2  # the fourth bad update, and the lag
    assert run.amp.read_skipped_steps() == 5


def test_runs_with_regions_repeat_bit_for_bit_and_resume(spiking: BranchRun):
    again = BranchRun(5e3).train(range(24))
    resumed = BranchRun(5e3)
    resumed.model.load_state_dict(again.model.state_dict())
    resumed.amp.load_state_dict(json.loads(json.dumps(again.amp.state_dict())))
    for run, steps in ((again, range(24, 32)), (resumed, range(24, 32))):
        run.train(steps)
        assert run.amp.state_dict() == spiking.amp.state_dict()
        for p, q in zip(run.model.parameters(), spiking.model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_a_schedule_of_ones_own():
    class Alternating:
        def decide(self, signal: fxamp.Signal, state: None) -> tuple[fxamp.Decision, None]:
            return fxamp.Decision(precision=signal.ladder[signal.step % 2], reason="odd or even"), None

    run = Run(scheduler=Alternating(), precision="auto", ladder=("fp16", "fp32")).train(range(6))
    assert run.ran_in == ["fp16", "fp32"] * 3
    assert run.counted.frame_count == 1


def test_a_ladder_follows_from_the_precision():
    for precision, ladder in {"fp16": ("fp16", "fp32"), "bf16": ("bf16", "fp32"), "auto": ("auto", "fp32")}.items():
        amp = fxamp.Amp(precision=precision, scheduler=fxamp.FixedSchedule({0: ladder[0], 1: ladder[1]}))
        assert dict(amp.precisions) == {"model": ladder[0]}
        amp.observe(1.0)
        assert dict(amp.precisions) == {"model": ladder[1]}


def test_losses_are_observed_without_a_scheduler_and_without_scaling():
    amp = fxamp.Amp(precision="bf16")
    assert [finding.kind for finding in amp.health()] == ["unknown"]
    for i in range(40):
        amp.observe(torch.tensor(1.0 + 0.125 * (i % 2)))
    assert amp.health() == ()
    amp.observe(torch.tensor(7.0))
    amp.observe(torch.tensor(math.nan))
    for _ in range(8):
        amp.observe(torch.tensor(1.0))
    (finding,) = amp.health()
    assert finding.kind == "loss spike"
    assert finding.evidence["loss_by_step"][40] == 7.0
    assert math.isnan(finding.evidence["loss_by_step"][41])
    assert finding.evidence["median"] == 1.125
    assert "in 2 of the last 43 steps, in step 41 to nan, from a median of 1.12" in finding.what
    assert amp.state_dict() == {}
    assert [c.reason for c in amp.history.changes] == []


def test_losses_that_fall_or_stand_are_no_spikes():
    amp = fxamp.Amp(precision="bf16")
    for i in range(60):
        amp.observe(5.0 * 0.8**i)
    for _ in range(60):
        amp.observe(1e-5)
    assert amp.health() == ()


def test_a_state_with_a_scheduler_needs_one(whole: Run):
    with pytest.raises(errors.InvalidOption) as caught:
        fxamp.Amp(precision="fp16").load_state_dict(whole.amp.state_dict())
    assert str(caught.value) == (
        "ERROR[InvalidOption]: the state is of a run with a scheduler, and Amp(precision='fp16') has none. Give "
        'scheduler=..., or leave "scheduler" out of the state'
    )


def test_a_scheduler_that_hears_of_no_loss_is_told_of():
    model = nn.Linear(4, 4)
    amp = fxamp.Amp(precision="bf16", scheduler=fxamp.CurvatureScheduler(), lower="aot_eager")
    assert amp.report().notes == ()
    torch.compile(model, backend=amp)(torch.randn(2, 4)).sum().backward()
    assert amp.report().notes == ("the scheduler has heard of no loss yet: call amp.observe(loss) once a step",)
    amp.observe(1.0)
    assert amp.report().notes == ()
