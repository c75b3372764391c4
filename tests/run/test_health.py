"""Findings: from records made by hand, and from runs that have what they name."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import fxamp
from fxamp import DynamicScale, StaticScale
from fxamp.run.health import Finding, Slot, Update, findings
from tests.programs import Fn

GOOD, BAD = Update(1024.0, False, 1.0), Update(1024.0, True, 0.0)


def found(history: list[Update], slots: list[Slot] | None = None, num_calibrating: int = 0) -> dict[str, Finding]:
    return {f.kind: f for f in findings(DynamicScale(), history, slots or [], num_calibrating)}


def test_a_calm_run_has_no_findings():
    assert found([GOOD] * 100 + [BAD] + [GOOD] * 100) == {}


def test_skips_at_the_start_are_calibration_and_nothing_worse():
    kinds = found([BAD] * 9 + [GOOD] * 20, num_calibrating=9)
    assert set(kinds) == {"calibration"}
    assert "first 9 steps" in kinds["calibration"].what


def test_frequent_falls_are_an_oscillation():
    history = [GOOD, BAD._replace(scale=2048.0)] * 4
    finding = found(history, [Slot("head.weight", 4, 0, None)])["oscillation"]
    assert finding.evidence["num_overflows"] == 4
    assert finding.evidence["scales"] == (1024.0, 2048.0)
    assert finding.evidence["gradients"] == {"head.weight": 4}


def test_overflows_at_a_scale_that_had_held_are_counted():
    finding = found([GOOD] * 10 + [BAD] + [GOOD] * 5 + [BAD] + [GOOD], [Slot("head.weight", 2, 0, None)])["overflow"]
    assert finding.evidence["num_overflows"] == 2
    assert "gradients of head.weight overflowed in 2 of the last 18 updates" in finding.what
    assert "stats='overflow'" in finding.way_out


def test_an_overflow_that_ends_a_growth_is_none():
    higher = BAD._replace(scale=2048.0)
    assert found([GOOD] * 10 + [higher] + [GOOD] * 5 + [higher] + [GOOD]) == {}


def test_overflows_under_a_scale_that_stays_are_counted_whenever_they_come():
    held = findings(StaticScale(value=1024.0), [BAD, BAD, GOOD], [], 2)
    assert [f.kind for f in held] == ["overflow"]
    assert "calibration" not in {f.kind for f in findings(StaticScale(value=1024.0), [BAD], [], 1)}


def test_what_says_more_is_said_once():
    for more in ([BAD] * 4, [BAD._replace(scale=1.0)] * 2):
        kinds = found([GOOD, *more, GOOD])
        assert "overflow" not in kinds
        assert kinds


def test_a_jump_of_the_gradient_is_an_explosion():
    finding = found([GOOD] * 10 + [GOOD._replace(largest=500.0), GOOD])["explosion"]
    assert finding.evidence["largest_by_update"] == {-2: 500.0}
    assert "jumped to 500, from a median of 1" in finding.what


def test_gradients_that_shrink_are_no_explosion():
    assert found([GOOD._replace(largest=2.0**-i) for i in range(40)]) == {}


def test_overflow_at_the_floor_has_another_cause():
    finding = found([GOOD, BAD._replace(scale=1.0)])["floor"]
    assert finding.evidence["num_overflows"] == 1


def test_what_is_lost_is_an_underflow():
    finding = found([GOOD], [Slot("a", 0, 0, 0.9), Slot("b", 0, 0, 0.1), Slot("c", 0, 3, None)])["underflow"]
    assert finding.evidence == {"share_lost": {"a": 0.9}, "num_updates_lost": {"c": 3}}


# ---- runs -----------------------------------------------------------------------------------------------------------------
def train(amp: fxamp.Amp, model: nn.Module, factors: list[float]) -> None:
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for factor in factors:
        optimizer.zero_grad()
        (F.mse_loss(run(torch.randn(8, 8)), torch.zeros(8, 4)) * factor).backward()
        optimizer.step()


def model() -> nn.Module:
    return Fn(lambda m, x: m.head(m.body(x)), body=nn.Linear(8, 8), head=nn.Linear(8, 4))


def test_a_run_that_explodes_and_oscillates():
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", scaling=DynamicScale(init=2.0**5))
    train(amp, model(), [1.0] * 10 + [1e3] + [1.0, math.inf] * 4)
    kinds = {finding.kind: finding for finding in amp.health()}
    assert {"explosion", "oscillation"} <= set(kinds)
    assert set(kinds["oscillation"].evidence["gradients"]) >= {"head.weight", "body.weight"}
    assert "oscillation" in str(amp.report())


def test_the_culprit_is_named():
    """The first layer's gradient alone is beyond fp16."""
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", scaling=2.0**10)
    m = Fn(lambda m, x: m.head(m.body(x)), body=nn.Linear(8, 8, bias=False), head=nn.Linear(8, 4, bias=False))
    with torch.no_grad():
        m.body.weight.copy_(torch.eye(8) * 1e-3)
        m.head.weight.fill_(1e3)
    optimizer = optim.SGD(m.parameters(), lr=1e-6)
    amp.attach(optimizer)
    torch.compile(m, backend=amp)(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert [slot.name for slot in amp._scaler.read_slots() if slot.num_overflows] == ["body.weight"]  # pyright: ignore


@pytest.mark.parametrize("stats", [None, "full"])
def test_a_run_that_underflows(stats: str | None):
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", scaling=1.0, stats=stats)
    train(amp, model(), [1e-4] * 3)
    (finding,) = amp.health()
    assert finding.kind == "underflow"
    if stats:
        assert finding.evidence["share_lost"]["body.weight"] > 0.5
    else:
        assert finding.evidence["num_updates_lost"]["body.weight"] == 3


def test_two_bad_batches_are_told_of_and_who_asks_for_more_gets_more():
    for stats in (None, "overflow"):
        amp = fxamp.Amp(precision="fp16", lower="aot_eager", stats=stats)
        train(amp, model(), [1.0, math.inf, 1.0, math.inf, 1.0])
        told = [finding for finding in amp.health() if finding.kind == "overflow"]
        assert amp.read_skipped_steps() == 2
        assert [("operation" in finding.evidence) for finding in told] == ([False] if stats is None else [True] * len(told))
        assert len(told) >= 1
        if stats is None:
            assert told[0].evidence["num_overflows"] == 2
            assert "body.weight" in told[0].evidence["gradients"]
            assert "overflow" in str(amp.report())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_asking_never_raises_and_says_what_is_missing(precision: str):
    amp = fxamp.Amp(precision=precision, lower="aot_eager")
    (finding,) = amp.health()
    assert finding.kind == "unknown"
    train(amp, model(), [1.0, 1.0])
    if precision == "fp16":
        assert "amp.attach(optimizer)" in finding.way_out
        assert amp.health() == ()
        return
    assert amp.health() == (finding,)
    assert "amp.observe(loss)" in finding.way_out
    assert "stats='overflow'" in finding.way_out
    for _ in range(16):  # the newest are still on their way
        amp.observe(1.0)
    assert amp.health() == ()


def test_what_the_scale_saves_is_no_underflow():
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", stats="full")
    train(amp, model(), [1e-2] * 3)
    assert amp.health() == ()
