"""The scheduler: what it does on sequences of numbers, and what it does on all of them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxamp import errors
from fxamp.scheduler import (
    NUM_LOSSES,
    CurvatureScheduler,
    CurvatureState,
    Decision,
    FixedSchedule,
    Gradients,
    Scheduler,
    Signal,
    curvature,
)

LADDER = ("fp16", "fp32")
DWELL, LAG = 6, 8
QUICK = CurvatureScheduler(dwell_steps=DWELL)
CALM = Gradients(overflow_rate=0.0, ratio=1.0)


def decisions(
    scheduler: Scheduler,
    losses: Sequence[float],
    *,
    ladder: tuple[str, ...] = LADDER,
    gradients: Sequence[Gradients] | None = None,
    lag: int = LAG,
) -> list[Decision]:
    """What is decided for steps 0, 1, ... of a run with these losses, and one step beyond."""
    made: list[Decision] = []
    state = None
    for step in range(len(losses) + lag):
        known = max(0, step - lag + 1)
        signal = Signal(
            step=step,
            ladder=ladder,
            regions=("model",),
            losses=tuple(losses[max(0, known - NUM_LOSSES) : known]),
            gradients=gradients[known - 1] if gradients and known else Gradients(),
        )
        decision, state = scheduler.decide(signal, state)
        made.append(decision)
    return made


def path(scheduler: Scheduler, losses: Sequence[float], **given: object) -> list[str]:
    return [d.precision["model"] for d in decisions(scheduler, losses, **given)]  # pyright: ignore


def changes(precisions: Sequence[str], ladder: tuple[str, ...] = LADDER) -> list[tuple[int, int]]:
    """(step, rungs up) of each change."""
    rungs = [ladder.index(p) for p in precisions]
    return [(i, b - a) for i, (a, b) in enumerate(zip(rungs, rungs[1:], strict=False), start=1) if a != b]


# ---- curvature ------------------------------------------------------------------------------------------------------------
def test_curvature_is_the_second_difference_at_the_newest_loss():
    assert curvature([9.0, 5.0, 1.0, 3.0]) == 6.0
    assert curvature([1.0, 2.0]) is None


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_bends_infinitely_once(bad: float):
    assert curvature([1.0, 1.0, 1.0, bad]) == math.inf
    assert curvature([bad]) == math.inf
    assert curvature([1.0, 2.0, bad, 3.0]) == 0.0
    assert curvature([1.0, bad, bad, 2.0]) is None


def test_differences_of_huge_losses_are_infinite_and_not_nan():
    assert curvature([1e308, -1e308, 1e308]) == math.inf


# ---- examples -------------------------------------------------------------------------------------------------------------
def test_it_starts_high_and_comes_down_after_a_dwell_of_calm_steps():
    made = decisions(QUICK, [1.0] * 40)
    (first,) = changes([d.precision["model"] for d in made])  # pyright: ignore
    # the fifth loss, which makes five of them, is known at step 4 + LAG: the first calm step
    assert first == (4 + LAG + DWELL - 1, -1)
    assert made[0].reason == "starts high"
    assert made[first[0]].reason == f"{DWELL} calm steps, the last of curvature 0, below 0.01"


def test_it_goes_up_at_once_and_says_why():
    made = decisions(QUICK, [1.0] * 40 + [1.5] + [1.0] * 40)
    spike = made[40 + LAG]
    assert spike.precision == {"model": "fp32"}
    assert spike.reason == "curvature 0.5, from 0.02 on an alarm"
    assert made[39 + LAG].precision == {"model": "fp16"}


def test_between_the_thresholds_nothing_changes():
    """Curvature 0.015: no alarm for who is low, no calm for who is high."""
    wave = [1.0 + 0.0075 * (i % 2) for i in range(60)]
    assert set(path(QUICK, wave)) == {"fp32"}
    low_then_wave = path(QUICK, [1.0] * 40 + wave)
    assert low_then_wave[-1] == "fp16"
    assert len(changes(low_then_wave)) == 1


def test_a_ladder_of_three_is_climbed_at_once_and_left_rung_by_rung():
    ladder = ("fp8", "bf16", "fp32")
    steps = changes(path(QUICK, [1.0] * 40 + [math.nan] + [1.0] * 40, ladder=ladder), ladder)
    assert [by for _, by in steps] == [-1, -1, 2, -1, -1]


def test_relative_curvature_is_a_multiple_of_the_usual():
    scheduler = CurvatureScheduler(relative=True, threshold=6.0, lower_threshold=5.0, history_steps=50, dwell_steps=DWELL)
    noisy = [1.0 + 0.3 * ((7 * i) % 5) for i in range(80)]  # bends by 0.3 to 2.4: far above any absolute threshold
    assert path(QUICK, noisy)[-1] == "fp32"
    assert path(scheduler, noisy)[-1] == "fp16"
    raised = decisions(scheduler, [*noisy, 40.0])[-1]
    assert raised.precision == {"model": "fp32"}
    assert "times the usual" in raised.reason


def test_relative_curvature_of_roundings_is_calm():
    scheduler = CurvatureScheduler(relative=True, threshold=4.0, history_steps=50, dwell_steps=DWELL)
    one_ulp = [3.0] * 60 + [3.0 * (1 + 2**-23)] + [3.0] * 3
    assert path(scheduler, one_ulp)[-1] == "fp16"
    assert path(scheduler, [0.0] * 60)[-1] == "fp16"


def test_a_measured_curvature_stands_in_for_that_of_the_losses():
    signal = Signal(step=9, ladder=LADDER, regions=("model",), losses=(1.0, 2.0) * 5)
    assert QUICK.bend(signal) == 2.0
    assert QUICK.bend(dataclasses.replace(signal, curvature=-0.001)) == 0.001
    assert QUICK.bend(dataclasses.replace(signal, curvature=math.nan)) == math.inf
    assert QUICK.bend(dataclasses.replace(signal, curvature=0.0, losses=(1.0, math.nan))) == math.inf


@pytest.mark.parametrize(
    ("gradients", "reason"),
    [
        (Gradients(overflow_rate=0.25, ratio=1.0), "25% of the recent updates overflowed, from 20% on an alarm"),
        (Gradients(overflow_rate=0.0, ratio=150.0), "the largest gradient is 150 times its median, from 100 on an alarm"),
        (Gradients(overflow_rate=0.0, ratio=math.nan), "the largest gradient is nan times its median, from 100 on an alarm"),
    ],
)
def test_gradients_raise_precision_too(gradients: Gradients, reason: str):
    made = decisions(QUICK, [1.0] * 41, gradients=[CALM] * 40 + [gradients])
    assert made[-2].precision == {"model": "fp16"}
    assert (made[-1].precision, made[-1].reason) == ({"model": "fp32"}, reason)
    deaf = CurvatureScheduler(dwell_steps=DWELL, overflow_rate_limit=None, gradient_ratio_limit=None)
    assert path(deaf, [1.0] * 41, gradients=[CALM] * 40 + [gradients])[-1] == "fp16"


def test_a_region_is_raised_by_its_own_gradients():
    low = CurvatureState(precision={"head": "fp16", "body": "fp16"}, num_calm_steps={"head": 3, "body": 3})
    signal = Signal(
        step=50,
        ladder=LADDER,
        regions=("head", "body"),
        losses=(1.0,) * 20,
        gradients=Gradients(overflow_rate=0.5, ratio=1.0),
        by_region={"head": Gradients(overflow_rate=0.5, ratio=1.0), "body": CALM},
    )
    alone, state = CurvatureScheduler(per_region=True).decide(signal, low)
    assert alone.precision == {"head": "fp32", "body": "fp16"}
    assert alone.reason == "head: 50% of the recent updates overflowed, from 20% on an alarm"
    assert state.num_calm_steps == {"head": 0, "body": 4}
    together, _ = CurvatureScheduler().decide(signal, low)
    assert together.precision == {"head": "fp32", "body": "fp32"}
    by_loss, _ = CurvatureScheduler(per_region=True).decide(dataclasses.replace(signal, losses=(math.nan,)), low)
    assert (by_loss.precision, by_loss.reason) == ({"head": "fp32", "body": "fp32"}, "the loss is nan")


def test_a_state_goes_through_json():
    signal = Signal(step=0, ladder=LADDER, regions=("model",))
    _, state = QUICK.decide(signal, None)
    _, state = QUICK.decide(dataclasses.replace(signal, losses=(1.0,) * 9), state)
    stored = json.loads(json.dumps(dataclasses.asdict(state)))
    again = dataclasses.replace(signal, losses=(1.0,) * 10)
    assert QUICK.decide(again, stored) == QUICK.decide(again, state)
    assert state.num_calm_steps == {"model": 1}


# ---- properties -----------------------------------------------------------------------------------------------------------
numbers = st.floats(-1e3, 1e3, allow_nan=False)
anything = st.one_of(
    st.floats(0.0, 3.0), st.sampled_from([1.0, 1.001, 1.0]), st.floats(allow_nan=True, allow_infinity=True)
)
schedulers = st.builds(
    CurvatureScheduler,
    dwell_steps=st.integers(1, 12),
    relative=st.booleans(),
    threshold=st.floats(1.5, 50.0),
    history_steps=st.integers(5, 40),
)
ladders = st.sampled_from([("fp16", "fp32"), ("fp8", "bf16", "fp32")])


@given(start=numbers, slope=st.floats(-1.0, 1.0), relative=st.booleans(), ladder=ladders)
def test_constant_and_linear_losses_end_low(start: float, slope: float, relative: bool, ladder: tuple[str, ...]):
    scheduler = CurvatureScheduler(relative=relative, threshold=4.0 if relative else 0.02, dwell_steps=DWELL)
    line = [start + slope * i for i in range(5 + (len(ladder) - 1) * DWELL)]
    assert path(scheduler, line, ladder=ladder)[-1] == ladder[0]


@given(
    at=st.integers(5, 60),
    height=st.one_of(st.floats(0.02, 1e30), st.sampled_from([math.inf, -math.inf, math.nan])),
    lag=st.integers(1, 12),
)
def test_a_spike_is_answered_within_lag_and_a_step(at: int, height: float, lag: int):
    losses = [1.0] * at + [1.0 + height] + [1.0] * 20
    precisions = path(CurvatureScheduler(dwell_steps=DWELL, lag_steps=lag, threshold=0.0199), losses, lag=lag)
    assert precisions[at + lag + 1] == "fp32"


@given(losses=st.lists(anything, max_size=120), scheduler=schedulers, ladder=ladders, lag=st.integers(1, 9))
def test_precision_falls_no_sooner_than_a_dwell_after_any_change(
    losses: list[float], scheduler: CurvatureScheduler, ladder: tuple[str, ...], lag: int
):
    """It rises whenever it has to: a rise within a dwell of a fall is what the fall is taken back by."""
    found = [(0, 1), *changes(path(scheduler, losses, ladder=ladder, lag=lag), ladder)]
    for (before, _), (step, by) in zip(found, found[1:], strict=False):
        if by < 0:
            assert step - before >= scheduler.dwell_steps
            assert by == -1


@given(losses=st.lists(anything, max_size=60), bad=st.sampled_from([math.inf, -math.inf, math.nan]), scheduler=schedulers)
def test_inf_and_nan_are_answered_and_leave_no_trace_in_the_history(
    losses: list[float], bad: float, scheduler: CurvatureScheduler
):
    signal = Signal(step=99, ladder=LADDER, regions=("model",), losses=(*losses, bad))
    _, state = scheduler.decide(dataclasses.replace(signal, step=0, losses=()), None)
    low = dataclasses.replace(state, precision={"model": "fp16"})
    assert scheduler.bend(signal) == math.inf
    assert scheduler.decide(signal, low)[0].precision == {"model": "fp32"}
    finite = tuple(x for x in losses if math.isfinite(x))
    bend = scheduler.bend(dataclasses.replace(signal, losses=(*losses, bad, 1.0)))
    assert bend == scheduler.bend(dataclasses.replace(signal, losses=(*finite, 1.0)))
    assert bend is None or not math.isnan(bend)


@given(losses=st.lists(anything, max_size=80), at=st.integers(0, 80), scheduler=schedulers)
def test_decisions_depend_on_what_was_observed_alone(losses: list[float], at: int, scheduler: CurvatureScheduler):
    """A run that is cut anywhere, its state stored and loaded, goes on as the whole one; what comes later changes nothing."""
    whole = decisions(scheduler, losses)
    twin = dataclasses.replace(scheduler)
    cut = losses[:at]
    assert decisions(twin, cut)[: len(cut)] == whole[: len(cut)]
    state, again = None, []
    for step in range(len(losses) + LAG):
        known = tuple(losses[: max(0, step - LAG + 1)])
        decision, state = twin.decide(Signal(step=step, ladder=LADDER, regions=("model",), losses=known), state)
        again.append(decision)
        if step == at:
            twin, state = dataclasses.replace(twin), json.loads(json.dumps(dataclasses.asdict(state)))
    assert again == whole


# ---- fixed schedules ------------------------------------------------------------------------------------------------------
def test_fixed_schedules():
    from_steps = FixedSchedule({0: "fp32", 3: "fp16", 5: "fp32"})
    by_call = FixedSchedule(lambda step: "fp16" if step in (3, 4) else "fp32")
    for schedule in (from_steps, by_call):
        made = [d.precision for d in decisions(schedule, [1.0] * 7, lag=1)]
        assert made == ["fp32", "fp32", "fp32", "fp16", "fp16", "fp32", "fp32", "fp32"]
    assert decisions(from_steps, [1.0] * 7)[4].reason == "fixed from step 3 on"


# ---- errors ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threshold": 0.0}, "threshold=0.0. It has to be positive and finite"),
        ({"threshold": math.nan}, "threshold=nan. It has to be positive and finite"),
        ({"relative": True}, "threshold=0.02. With relative=True it is a multiple of what is usual: it has to be above 1"),
        ({"lower_threshold": 0.03}, "lower_threshold=0.03. It has to be in (0, 0.02]"),
        ({"history_steps": 2}, "history_steps=2. It has to be a whole number in [3, 256]"),
        ({"history_steps": 257}, "history_steps=257. It has to be a whole number in [3, 256]"),
        ({"min_steps": 11}, "min_steps=11. It has to be a whole number in [3, 10]"),
        ({"dwell_steps": 0}, "dwell_steps=0. It has to be a whole number in [1, inf]"),
        ({"lag_steps": 1.5}, "lag_steps=1.5. It has to be a whole number in [1, inf]"),
        ({"overflow_rate_limit": 0.0}, "overflow_rate_limit=0.0. It has to be in (0, 1], or None"),
        ({"gradient_ratio_limit": 1.0}, "gradient_ratio_limit=1.0. It has to be above 1, or None"),
        ({"threshold": "0.1"}, "threshold='0.1'. It has to be positive and finite"),
        ({"threshold": None}, "threshold=None. It has to be positive and finite"),
        ({"lower_threshold": "0.1"}, "lower_threshold='0.1'. It has to be in (0, 0.02]"),
        ({"dwell_steps": True}, "dwell_steps=True. It has to be a whole number in [1, inf]"),
        ({"overflow_rate_limit": "x"}, "overflow_rate_limit='x'. It has to be in (0, 1], or None"),
        ({"gradient_ratio_limit": "x"}, "gradient_ratio_limit='x'. It has to be above 1, or None"),
        ({"relative": 6}, "relative=6. It is True or False"),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, float], text: str):
    with pytest.raises(errors.InvalidOption) as caught:
        CurvatureScheduler(**options)  # pyright: ignore
    assert str(caught.value) == f"ERROR[InvalidOption]: a scheduler with {text}"


@pytest.mark.parametrize(
    "steps", [{}, {1: "fp32"}, {0: "fp32", -1: "fp16"}, {0: "fp32", 1.5: "fp16"}, "fp32", ["fp32"], 3, FixedSchedule]
)
def test_schedules_that_are_none(steps: dict[int, str]):
    with pytest.raises(errors.InvalidOption, match="a scheduler with step"):
        FixedSchedule(steps)


@pytest.mark.parametrize(
    "fields", [{"precision": 3}, {"precision": None}, {"precision": {"model": 3}}, {"precision": "fp32", "reason": 3}]
)
def test_a_decision_is_made_of_names(fields: dict[str, Any]):
    with pytest.raises(errors.InvalidOption, match="Its precision is the name of one on the ladder"):
        Decision(**fields)
    with pytest.raises(errors.InvalidOption, match="a Decision with precision=None"):
        FixedSchedule({0: None})  # pyright: ignore[reportArgumentType]


# ---- the page -------------------------------------------------------------------------------------------------------------
PAGE = (Path(__file__).parents[1] / "docs" / "scheduler.md").read_text()


@pytest.mark.parametrize("described", [Signal, Decision])
def test_the_page_has_every_field(described: type):
    table = PAGE.split(f"| field of `fxamp.{described.__name__}` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.M) == [f.name for f in dataclasses.fields(described)]


def test_the_scheduler_of_the_page_runs():
    import fxamp

    found: dict[str, Any] = {"fxamp": fxamp}
    exec(PAGE.split("## One of your own\n\n```python\n")[1].split("```")[0], found)
    scheduler, state = found["amp"].options.scheduler, None
    asked = []
    for step, rate in enumerate([0.0, 0.25, *[0.0] * 101]):
        known = Signal(step=step, ladder=("fp16", "fp32"), regions=("model",), gradients=Gradients(overflow_rate=rate))
        decision, state = scheduler.decide(known, state)
        asked.append(decision.precision)
    assert asked == ["fp16", *["fp32"] * 100, "fp16", "fp16"]
