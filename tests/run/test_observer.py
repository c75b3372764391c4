"""What is observed, when it arrives, and what is made of it."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxamp import errors
from fxamp.ladder import Ladder
from fxamp.run.loss_scale import NUM_RECENT, NUM_REMEMBERED, LossScale
from fxamp.run.mailbox import Mailbox
from fxamp.run.observer import Observer
from fxamp.run.variants import Precisions
from fxamp.scaling import DynamicScale
from fxamp.scheduler import CurvatureScheduler, Decision, FixedSchedule, Gradients, Scheduler, Signal

QUICK = CurvatureScheduler(dwell_steps=6, lag_steps=3)


def dial_of(*regions: str) -> Precisions:
    return Precisions(Ladder(rungs=("fp16", "fp32"), regions=tuple((name, f"{name}.*") for name in regions)))


class Telling:
    """A scheduler that remembers what it is told."""

    def __init__(self, lag_steps: int = 3) -> None:
        self.lag_steps, self.told = lag_steps, list[Signal]()

    def decide(self, signal: Signal, state: int | None) -> tuple[Decision, int]:
        self.told.append(signal)
        return Decision(precision="fp16", reason="always"), (state or 0) + 1


def watched(scheduler: Scheduler | None, *regions: str, signs: Any = lambda: None) -> tuple[Observer, Precisions]:
    dial = dial_of(*regions)
    return Observer(scheduler, dial, signs=signs), dial


# ---- lag ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lag", [1, 3, 8])
def test_a_decision_uses_what_is_lag_steps_old(lag: int):
    telling = Telling(lag)
    observer, _ = watched(telling)
    for step in range(20):
        observer.observe(torch.tensor(float(step)))
    assert [signal.step for signal in telling.told] == list(range(21))
    for signal in telling.told:
        newest = signal.losses[-1] if signal.losses else None
        assert newest == (signal.step - lag if signal.step >= lag else None)
    assert observer.state_dict()["state"] == 21


def test_a_mailbox_hands_out_what_was_posted_lag_posts_ago():
    mailbox = Mailbox(2)
    arrived = [mailbox.post(torch.tensor([float(i), -1.0])) for i in range(4)]
    assert [None if a is None else a.tolist() for a in arrived] == [None, None, [0.0, -1.0], [1.0, -1.0]]
    assert [a.tolist() for a in mailbox.read_waiting()] == [[2.0, -1.0], [3.0, -1.0]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_mailbox_may_send_off_one_in_so_many(device: str):
    """Eight steps later on a GPU, as ever, but of every fourth step; a CPU runs ahead of nobody."""
    mailbox = Mailbox(every=4)
    arrived = [mailbox.post(torch.tensor(float(i), device=device)) for i in range(1, 21)]
    heard = {i: float(a) for i, a in enumerate(arrived, 1) if a is not None}
    assert heard == ({12: 4.0, 16: 8.0, 20: 12.0} if device == "cuda" else {i: i for i in range(1, 21)})


def test_a_loss_may_be_overwritten_once_it_was_observed():
    telling = Telling(1)
    observer, _ = watched(telling)
    loss = torch.tensor(1.0)
    observer.observe(loss)
    loss.fill_(2.0)
    observer.observe(loss)
    assert telling.told[-1].losses == (1.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_losses_of_every_kind(dtype: torch.dtype):
    telling = Telling(1)
    observer, _ = watched(telling)
    loss = torch.full((1, 1), 0.5, dtype=dtype, requires_grad=True) * 3
    observer.observe(loss)
    observer.observe(1.5)
    observer.observe(torch.tensor(math.nan, dtype=dtype))
    assert telling.told[-1].losses[:2] == (1.5, 1.5)
    assert math.isnan(telling.told[-1].losses[2])
    loss.backward()  # nothing of the graph was let go, or detached


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.ones(2), "a loss of shape [2] and torch.float32. Give it the loss of the step, one floating-point number"),
        (torch.tensor(1), "a loss of shape [] and torch.int64. Give it the loss of the step, one floating-point number"),
        ("1.0", "a str as loss. Give it a tensor of one number, or a float"),
    ],
)
def test_what_is_no_loss(given: Any, text: str):
    observer, _ = watched(None)
    with pytest.raises(errors.InvalidOption) as caught:
        observer.observe(given)
    assert str(caught.value) == f"ERROR[InvalidOption]: observe() was given {text}"


# ---- decisions ------------------------------------------------------------------------------------------------------------
def test_a_training_starts_high_comes_down_and_is_raised():
    observer, dial = watched(QUICK)
    assert dial.current() == {"model": "fp32"}
    losses = [1.0] * 15 + [9.0] + [1.0] * 15
    ran_in = []
    for loss in losses:
        ran_in.append(dial.current()["model"])
        observer.observe(torch.tensor(loss))
    down = 4 + 3 + 6 - 1  # the fifth loss, three steps of lag, six calm steps
    assert ran_in[:down] == ["fp32"] * down
    assert ran_in[down : 15 + 3] == ["fp16"] * (18 - down)
    assert ran_in[18] == "fp32"
    history = observer.history
    assert [(c.step, c.before, c.precision) for c in history.changes] == [
        (0, {"model": "fp16"}, {"model": "fp32"}),
        (down, {"model": "fp32"}, {"model": "fp16"}),
        (18, {"model": "fp16"}, {"model": "fp32"}),
        *[(c.step, {"model": "fp32"}, {"model": "fp16"}) for c in history.changes[3:]],
    ]
    raised = history.changes[2]
    assert raised.reason == "curvature 8, from 0.02 on an alarm"
    assert raised.known is not None
    assert (raised.known.step, raised.known.loss, raised.known.curvature) == (15, 9.0, 8.0)
    assert [s.precision["model"] for s in history.steps] == ran_in[: len(history.steps)]
    assert [s.step for s in history.steps] == list(range(len(losses) - 3 + 1))


def test_a_measured_curvature_reaches_the_scheduler_and_stays_until_the_next():
    telling = Telling(1)
    observer, _ = watched(telling)
    observer.observe(1.0)
    observer.observe(1.0, torch.tensor(-0.5))
    observer.observe(1.0)
    observer.observe(1.0, 0.25)
    assert [signal.curvature for signal in telling.told] == [None, None, -0.5, -0.5, 0.25]
    assert [step.curvature for step in observer.history.steps] == [None, 0.5, 0.0, 0.25]


def test_a_fixed_schedule_needs_no_loss_to_arrive():
    observer, dial = watched(FixedSchedule({0: "fp32", 2: "fp16"}))
    ran_in = []
    for _ in range(4):
        ran_in.append(dial.current()["model"])
        observer.observe(1.0)
    assert ran_in == ["fp32", "fp32", "fp16", "fp16"]


def test_without_a_scheduler_losses_are_kept_and_nothing_is_decided():
    observer, dial = watched(None)
    for i in range(20):
        observer.observe(float(i) ** 3)
    assert dial.current() == {"model": "fp16"}
    assert [s.loss for s in observer.history.steps] == [float(i) ** 3 for i in range(13)]
    assert observer.history.changes == ()


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("fp8", "unknown precision 'fp8'. Did you mean 'fp32'? Known: fp16, fp32"),
        ({"head": "fp32"}, "unknown region 'head'. Known: model"),
    ],
)
def test_a_decision_has_to_be_possible(wanted: Any, text: str):
    with pytest.raises(errors.UnknownOption) as caught:
        watched(FixedSchedule({0: wanted}))
    assert str(caught.value).startswith("ERROR[UnknownOption]: " + text.split(".")[0])


class Saying:
    """A scheduler that answers always the same."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def decide(self, signal: Any, state: Any) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", ["fp32", ("fp32", None), None, 3, Decision(precision="fp32"), (), ("fp32", "a", "b")])
def test_an_answer_has_to_be_a_decision_and_a_state(answer: Any):
    with pytest.raises(errors.InvalidOption) as caught:
        watched(Saying(answer))
    assert f"decide() of Saying returned {answer!r}. Return a decision and the state" in str(caught.value)


def test_a_lag_has_to_be_one():
    with pytest.raises(errors.InvalidOption, match="lag_steps=0"):
        watched(Telling(0))


# ---- gradients ------------------------------------------------------------------------------------------------------------
@given(
    updates=st.lists(
        st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 1.0, 3.0, 300.0])), max_size=NUM_REMEMBERED + 20
    )
)
def test_signs_are_those_of_the_record(updates: list[tuple[bool, float]]):
    scale = LossScale(DynamicScale(floor=2.0**-126), torch.device("cpu"))
    for overflowed, largest in updates:
        scale.update(torch.tensor(float(overflowed)), torch.tensor(largest))
    now, rate, ratio, overflowed = scale.signs().tolist()
    assert now == float(scale.scale)
    assert overflowed == max((float(bad) for bad, _ in updates), default=-1.0)
    assert scale.signs().tolist()[3] == -1.0, "it was told"
    assert rate == sum(overflowed for overflowed, _ in updates[-NUM_RECENT:]) / NUM_RECENT
    *before, newest = [largest for _, largest in updates[-NUM_REMEMBERED:]] or [0.0]
    known = [x for x in before if x > 0]
    wanted = newest / statistics.median_high(known) if len(known) >= 8 and newest > 0 else -1.0
    assert ratio == pytest.approx(wanted)


def test_signs_of_gradients_travel_with_the_loss():
    signs = torch.tensor([1024.0, 0.25, -1.0, 1.0, 0.5, 2.0, 0.0, -1.0])
    telling = Telling(2)
    observer, _ = watched(telling, "body", signs=lambda: signs.clone())
    observer.observe(torch.tensor(1.0))
    signs[1], signs[3] = 0.75, 0.0
    observer.observe(torch.tensor(1.0))
    first = telling.told[-1]
    assert first.gradients == Gradients(overflow_rate=0.25, ratio=None)
    assert first.by_region == {
        "model": Gradients(overflow_rate=0.5, ratio=2.0),
        "body": Gradients(overflow_rate=0.0, ratio=None),
    }
    observer.observe(torch.tensor(1.0))
    assert telling.told[-1].gradients.overflow_rate == 0.75
    assert observer.history.steps[0].loss_scale == 1024.0
    assert [step.overflowed for step in observer.history.steps] == [True, False]


# ---- resuming -------------------------------------------------------------------------------------------------------------
class Streak:
    """A user's scheduler with a state of plain Python: up after two rises of the loss in a row."""

    def decide(self, signal: Signal, state: dict[str, int] | None) -> tuple[Decision, dict[str, int]]:
        rises = len(signal.losses) > 1 and signal.losses[-1] > signal.losses[-2]
        num = ({"num": 0} if state is None else state)["num"] + 1 if rises else 0
        return Decision(precision="fp32" if num > 1 else "fp16", reason=f"{num} rises"), {"num": num}


loss = st.one_of(st.sampled_from([1.0, 1.001, 3.0]), st.floats(allow_nan=True, allow_infinity=True))


@given(losses=st.lists(loss, max_size=80), at=st.integers(0, 80), scheduler=st.sampled_from([QUICK, Streak()]))
def test_a_resumed_run_decides_as_the_whole_one(losses: list[float], at: int, scheduler: Scheduler):
    def run(observer: Observer, dial: Precisions, losses: Sequence[float]) -> list[str]:
        ran_in = []
        for x in losses:
            ran_in.append(dial.current()["model"])
            observer.observe(torch.tensor(x, dtype=torch.float64), measured=x / 2 if x == 3.0 else None)
        return ran_in

    observer, dial = watched(scheduler)
    whole = run(observer, dial, losses)
    first, first_dial = watched(scheduler)
    begun = run(first, first_dial, losses[:at])
    stored = json.loads(json.dumps(first.state_dict()))
    second, second_dial = watched(scheduler)
    run(second, second_dial, [5.0, 7.0, math.nan])  # what it saw before is forgotten
    second.load_state_dict(stored)
    assert begun + run(second, second_dial, losses[at:]) == whole
    assert repr(second.history) == repr(observer.history)
    assert repr(second.state_dict()) == repr(observer.state_dict())


def test_what_is_no_state():
    observer, _ = watched(QUICK)
    with pytest.raises(errors.InvalidOption, match="a state without by_region, changes, measured"):
        observer.load_state_dict({"step": 3})
    state = observer.state_dict() | {"precision": {"model": "fp8"}}
    with pytest.raises(errors.UnknownOption, match="'fp8'"):
        observer.load_state_dict(state)


# ---- history --------------------------------------------------------------------------------------------------------------
def recorded() -> Observer:
    observer, _ = watched(QUICK, signs=lambda: torch.tensor([1024.0, 0.0, -1.0, -1.0]))
    for x in [1.0] * 20 + [math.nan] + [1.0] * 10:
        observer.observe(torch.tensor(x))
    return observer


def test_history_as_csv():
    rows = list(csv.DictReader(io.StringIO(recorded().history.as_csv())))
    assert list(rows[0]) == [
        "step", "loss", "curvature", "overflow_rate", "gradient_ratio", "loss_scale", "precision model", "reason"
    ]  # fmt: skip
    assert [row["step"] for row in rows] == [str(i) for i in range(29)]
    assert (rows[20]["loss"], rows[20]["curvature"]) == ("nan", "inf")
    assert {row["reason"] for row in rows[1:]} - {""} == {
        "6 calm steps, the last of curvature 0, below 0.01", "the loss is nan"
    }  # fmt: skip
    assert [row["precision model"] for row in rows[22:24]] == ["fp16", "fp32"]


def test_history_as_json():
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    stored = json.loads(recorded().history.as_json(), parse_constant=refuse)
    assert stored["steps"][20]["loss"] == "nan"
    assert stored["changes"][2]["reason"] == "the loss is nan"
    assert stored["changes"][2]["known"]["step"] == 20


def test_plots_without_matplotlib_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(errors.MissingPackage) as caught:
        recorded().history.plot()
    assert str(caught.value) == (
        "ERROR[MissingPackage]: plots need matplotlib, which is not installed. pip install matplotlib (or fxamp[plot]), or "
        "draw from as_csv() or as_json()"
    )


def test_a_plot_has_a_line_for_each_number(tmp_path: Any):
    pytest.importorskip("matplotlib")
    figure = recorded().history.plot(tmp_path / "run.svg")
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels == ["loss", "curvature", "loss scale", "precision"]
    assert all(len(axis.lines[0].get_xdata()) == 29 for axis in figure.axes)  # pyright: ignore
    assert "<svg" in (tmp_path / "run.svg").read_text()
