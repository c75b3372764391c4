"""When a training computes in which precision: pure decisions over what was observed, on plain numbers.

A scheduler is any object with `decide(signal, state) -> (Decision, state)`. Nothing here knows of graphs or devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from fxamp import errors
from fxamp.formats import is_number

NUM_LOSSES: Final = 256
"""Losses that a `Signal` remembers."""

ROUNDING: Final = 2.0**-20
"""Second differences below this share of the loss are taken for roundings: fp32 makes up to 4 * 2^-24 of it."""


# ---- what a scheduler is told, and what it says ---------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What is known about recent gradients, of the whole model or of a region."""

    overflow_rate: float | None = None
    """Share of the recent updates whose gradients overflowed, 0..1; None: gradients are not scaled, or none has come yet."""
    ratio: float | None = None
    """The largest magnitude of the newest update over the median of those on record before; None as above."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """What is known when the precision of a step is decided. Of step t - lag and earlier, so that runs repeat bit for bit."""

    step: int
    """The step that the decision is for, in calls of `Amp.observe`, from 0."""
    ladder: tuple[str, ...]
    """The precisions there are, low to high."""
    regions: tuple[str, ...]
    """The parts of the model that have a precision each."""
    losses: tuple[float, ...] = ()
    """Oldest first, at most `NUM_LOSSES`. An inf or a NaN is what it was."""
    curvature: float | None = None
    """The newest one that was measured and given to `Amp.observe`, see `fxamp.directional_curvature`; None: none was."""
    gradients: Gradients = Gradients()
    by_region: Mapping[str, Gradients] = field(default_factory=lambda: MappingProxyType({}))
    """The same of single regions, where it is known."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The precision of the next step. Raises, when built: InvalidOption for what are no names."""

    precision: str | Mapping[str, str]
    """Of each region; a region that is left out keeps its own. One name stands for all regions."""
    reason: str = ""
    """In words, with the numbers."""

    def __post_init__(self) -> None:
        given: object = self.precision
        names = list(given.values()) if isinstance(given, Mapping) else [given]
        fields: list[tuple[str, object]] = [*(("precision", name) for name in names), ("reason", self.reason)]
        for field_name, value in fields:
            if not isinstance(value, str):
                raise errors.InvalidOption(
                    f"a Decision with {field_name}={value!r}",
                    way_out="Its precision is the name of one on the ladder, or {region: name}, and its reason a text",
                )


def decided(scheduler: object, answer: object) -> tuple[Decision, Any]:
    """What `decide` has returned. Raises: InvalidOption if that is no decision with a state."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Decision):
        return answer
    raise errors.InvalidOption(
        f"decide() of {type(scheduler).__name__} returned {answer!r}",
        way_out="Return a decision and the state for the next call: fxamp.Decision(precision=signal.ladder[-1], reason='...')"
        ", state",
    )


class Scheduler(Protocol):
    """What `Amp(scheduler=...)` takes. An attribute `lag_steps`, a whole number from 1 on, is the lag; without it, 8."""

    def decide(self, signal: Signal, state: Any, /) -> tuple[Decision, Any]:
        """The precision of step `signal.step`, and the state for the next call.

        Called once a step, and once before the first. Has to depend on its arguments alone.

        Args: state: what the last call returned, None in the first one. It becomes part of a checkpoint: None, numbers, texts,
            lists and dicts of them, or a dataclass of these, which comes back from a checkpoint as a dict.
        """
        ...


# ---- the curvature of a sequence of losses --------------------------------------------------------------------------------
def curvature(losses: Sequence[float]) -> float | None:
    """|l[t] - 2 l[t-1] + l[t-2]| at the newest loss. Infinite if that is an inf or a NaN; others are passed over. None: fewer
    than three finite losses."""
    if losses and not math.isfinite(losses[-1]):
        return math.inf
    bends = _second_differences(_newest_finite(losses, 3))
    return bends[-1] if bends else None


def _newest_finite(losses: Sequence[float], num: int) -> list[float]:
    """The last `num` finite ones, oldest first."""
    found: list[float] = []
    for loss in reversed(losses):
        if math.isfinite(loss):
            found.append(loss)
            if len(found) == num:
                break
    return found[::-1]


def _second_differences(losses: Sequence[float]) -> list[float]:
    return [abs((c - b) - (b - a)) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]


def _median(values: Sequence[float]) -> float:  # the module `statistics` would cost `import fxamp` ten milliseconds
    return sorted(values)[len(values) // 2]


# ---- the scheduler --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class CurvatureState:
    """Where a `CurvatureScheduler` stands."""

    precision: Mapping[str, str]
    """Of each region."""
    num_calm_steps: Mapping[str, int]
    """In a row, since the region's precision last changed."""


@dataclass(frozen=True, kw_only=True)
class CurvatureScheduler:
    """High precision where the loss bends, low where it is calm.

    It starts at the top of the ladder. A step is an alarm if the newest loss is inf or NaN, if the curvature reaches
    `threshold`, or if overflows or gradients reach their limits: then the precision goes to the top at once. A step is calm
    if it is no alarm and the curvature is below `lower_threshold`: `dwell_steps` calm steps in a row take the precision
    down by one rung, and are counted anew. So two changes follow each other within a dwell only if the second one goes up.

    Curvature is |l[t] - 2 l[t-1] + l[t-2]| over the finite losses, or what was measured, see `Signal.curvature`.

    Raises, when built: InvalidOption for a number that makes no sense.
    """

    threshold: float = 0.02
    """In units of the loss; with `relative`, a multiple. Losses of small batches bend by more than 0.02 all the time: noise of
    standard deviation s has curvatures around 2.4 s."""
    lower_threshold: float | None = None
    """Below it a step is calm; None: half the threshold. Between the two nothing changes, and calm steps are counted anew."""
    relative: bool = False
    """Measure the curvature in multiples of its median over the history: what is usual for this training is 1."""
    history_steps: int = 10
    """Finite losses that are looked at. More than three matter for `relative` only, where 50 make a steadier median."""
    min_steps: int = 5
    """Finite losses before the curvature is judged at all. Until then only an inf or a NaN and gradients are."""
    dwell_steps: int = 32
    lag_steps: int = 8
    """A decision uses what was observed so many steps ago and before: the host may run ahead of an accelerator as far."""
    overflow_rate_limit: float | None = 0.2
    """Of the recent updates: more than a scale that looks for its place needs. None: overflows do not count."""
    gradient_ratio_limit: float | None = 100.0
    """A largest gradient so many times the median is an alarm, as it is an explosion for `Amp.health`. None: not counted."""
    per_region: bool = False
    """Let overflows and gradients of a region raise that region alone. The loss raises all of them."""

    def __post_init__(self) -> None:
        for name in ("relative", "per_region"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "It is True or False")
        _require(_is_positive(self.threshold), "threshold", self.threshold, "It has to be positive and finite")
        if self.relative:
            what = "With relative=True it is a multiple of what is usual: it has to be above 1"
            _require(self.threshold > 1, "threshold", self.threshold, what)
        if self.lower_threshold is not None:
            within = is_number(self.lower_threshold) and 0 < self.lower_threshold <= self.threshold
            _require(within, "lower_threshold", self.lower_threshold, f"It has to be in (0, {self.threshold:g}]")
        bounds = {
            "history_steps": (3, NUM_LOSSES), "min_steps": (3, self.history_steps),
            "dwell_steps": (1, math.inf), "lag_steps": (1, math.inf),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            steps = getattr(self, name)
            is_whole = isinstance(steps, int) and is_number(steps) and low <= steps <= high
            _require(is_whole, name, steps, f"It has to be a whole number in [{low}, {high:g}]")
        rate, ratio = self.overflow_rate_limit, self.gradient_ratio_limit
        is_rate = rate is None or (is_number(rate) and 0 < rate <= 1)
        _require(is_rate, "overflow_rate_limit", rate, "It has to be in (0, 1], or None")
        is_ratio = ratio is None or (is_number(ratio) and ratio > 1)
        _require(is_ratio, "gradient_ratio_limit", ratio, "It has to be above 1, or None")

    def decide(self, signal: Signal, state: CurvatureState | Mapping[str, Any] | None, /) -> tuple[Decision, CurvatureState]:
        """See `Scheduler`."""
        if state is None:
            top = dict.fromkeys(signal.regions, signal.ladder[-1])
            return Decision(precision=top, reason="starts high"), CurvatureState(
                precision=top, num_calm_steps=dict.fromkeys(signal.regions, 0)
            )
        before = state if isinstance(state, CurvatureState) else CurvatureState(**state)
        bend = self.bend(signal)
        lower = self.threshold / 2 if self.lower_threshold is None else self.lower_threshold
        precision: dict[str, str] = {}
        calm: dict[str, int] = {}
        reasons: dict[str, str] = {}
        for region in signal.regions:
            now = before.precision.get(region, signal.ladder[-1])
            alarm = self._alarm(bend, signal, region)
            is_calm = alarm is None and bend is not None and bend < lower
            num_calm = before.num_calm_steps.get(region, 0) + 1 if is_calm else 0
            then = signal.ladder[-1] if alarm is not None else now
            if num_calm >= self.dwell_steps and now != signal.ladder[0]:
                then = signal.ladder[signal.ladder.index(now) - 1]
            if alarm is not None:
                reasons[region] = alarm
            elif then != now:
                reasons[region] = f"{num_calm} calm steps, the last of curvature {bend:.3g}, below {lower:g}"
            precision[region], calm[region] = then, num_calm if then == now else 0
        return (
            Decision(precision=precision, reason=_joined(reasons, len(signal.regions))),
            CurvatureState(precision=precision, num_calm_steps=calm),
        )

    def bend(self, signal: Signal) -> float | None:
        """The curvature as it is compared with the thresholds; None: not enough is known."""
        newest = curvature(signal.losses)
        if newest == math.inf:
            return newest
        losses = _newest_finite(signal.losses, self.history_steps)
        if len(losses) < self.min_steps:
            return None
        if signal.curvature is not None:
            newest = math.inf if math.isnan(signal.curvature) else abs(signal.curvature)
        if newest is None or not self.relative:
            return newest
        usual = _median(_second_differences(losses[:-1]) or [0.0])
        least = ROUNDING * max(map(abs, losses))
        return newest / max(usual, least) if usual or least else newest and math.inf

    def _alarm(self, bend: float | None, signal: Signal, region: str) -> str | None:
        """Why precision has to go up; None: it need not."""
        if signal.losses and not math.isfinite(signal.losses[-1]):
            return f"the loss is {signal.losses[-1]:g}"
        if bend is not None and bend >= self.threshold:
            unit = " times the usual" if self.relative else ""
            return f"curvature {bend:.3g}{unit}, from {self.threshold:g} on an alarm"
        gradients = signal.by_region.get(region, signal.gradients) if self.per_region else signal.gradients
        rate, ratio = gradients.overflow_rate, gradients.ratio
        if rate is not None and self.overflow_rate_limit is not None and rate >= self.overflow_rate_limit:
            return f"{rate:.0%} of the recent updates overflowed, from {self.overflow_rate_limit:.0%} on an alarm"
        if ratio is not None and self.gradient_ratio_limit is not None and not ratio < self.gradient_ratio_limit:
            return f"the largest gradient is {ratio:.3g} times its median, from {self.gradient_ratio_limit:g} on an alarm"
        return None


def _joined(reasons: Mapping[str, str], num_regions: int) -> str:
    """One text for all regions, their names in it where they differ."""
    texts = list(dict.fromkeys(reasons.values()))
    if len(texts) == 1 and len(reasons) == num_regions:
        return texts[0]
    return "; ".join(f"{region}: {text}" for region, text in reasons.items())


# ---- schedules that look at nothing -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FixedSchedule:
    """Precisions fixed in advance.

        FixedSchedule({0: "fp32", 1000: "fp16"})                     # from which step on
        FixedSchedule(lambda step: "fp32" if step % 100 < 5 else "fp16")
        FixedSchedule({0: {"head": "fp32", "body": "fp16"}})         # of each region

    Steps are counted in calls of `Amp.observe`.
    Raises, when built: InvalidOption for a mapping that does not say what step 0 runs in, or has steps that are none.
    """

    steps: Mapping[int, str | Mapping[str, str]] | Callable[[int], str | Mapping[str, str]]

    def __post_init__(self) -> None:
        given: object = self.steps
        is_either = isinstance(given, Mapping) or (callable(given) and not isinstance(given, type))
        _require(is_either, "steps", given, "Give {0: 'fp32', 1000: 'fp16'}, or a function of the step")
        if isinstance(self.steps, Mapping):
            for step, precision in self.steps.items():
                is_step = isinstance(step, int) and step >= 0  # pyright: ignore[reportUnnecessaryIsInstance]
                _require(is_step, "step", step, "Steps are whole numbers from 0 on")
                Decision(precision=precision)
            _require(0 in self.steps, "steps", dict(self.steps), "It has to say what step 0 runs in")

    def decide(self, signal: Signal, state: None = None, /) -> tuple[Decision, None]:
        """See `Scheduler`."""
        if not isinstance(self.steps, Mapping):
            return Decision(precision=self.steps(signal.step), reason=f"fixed at step {signal.step}"), None
        begun = max(step for step in self.steps if step <= signal.step)
        return Decision(precision=self.steps[begun], reason=f"fixed from step {begun} on"), None


def _is_positive(number: float) -> bool:
    return is_number(number) and math.isfinite(number) and number > 0


def _require(holds: bool, name: str, value: object, way_out: str) -> None:
    if not holds:
        raise errors.InvalidOption(f"a scheduler with {name}={value!r}", way_out=way_out)
