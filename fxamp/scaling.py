"""How gradients are scaled: what the user asks for, and what it means for a graph."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, get_args

from fxamp import errors
from fxamp.formats import is_number

UNATTACHED: Final = 2.0**8
"""A scale that has to do as it is: in the middle between the numbers 2^16 where fp16 ends and 2^-14 where it loses precision,
for gradients of about 1 (a sum over a batch) to 2^-14 (a mean over 2^14 tokens), both with as much room as there is."""

FloorAction = Literal["warn", "raise", "raise precision"]
FLOOR_ACTIONS: Final = get_args(FloorAction)


@dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """A loss scale that grows while gradients stay finite and shrinks where they do not.

    The rule is that of `torch.amp.GradScaler`: an update that saw an overflow multiplies the scale by `backoff_factor`, and
    `growth_interval_steps` updates in a row without one multiply it by `growth_factor`. Powers of two cost no precision.

    Raises, when built: InvalidOption for a number that makes no sense, UnknownOption for another word in `at_floor`.
    """

    init: float = 2.0**16
    """The first scale. GradScaler's default, like the next three. Where no optimizer is attached yet, and so nobody would skip
    a step or lower the scale, it is at most `UNATTACHED`."""
    growth_factor: float = 2.0
    growth_interval_steps: int = 2000
    backoff_factor: float = 0.5
    floor: float = 1.0
    """The scale never falls below it. At 1 gradients are what they are without scaling: what overflows there has another
    cause. GradScaler has none, and sinks to 0."""
    cap: float = math.inf
    """The scale never grows beyond it. It never grows to infinity either, as GradScaler's does not."""
    hysteresis_steps: int = 1
    """Updates with an overflow, since the scale last grew, until the first one that lowers it. Each of them skips its step all
    the same. Above 1 a single bad batch leaves the scale alone (Megatron-LM's rule)."""
    per_region: bool = False
    """Give each of the Amp's `regions` a scale of its own, and one to the rest of the model. An overflow skips the whole step,
    and lowers the scales of the regions that made it."""
    at_floor: FloorAction = "warn"
    """What an overflow at the floor does: "warn" once, "raise" ScaleAtFloor from a later optimizer step, or "raise precision",
    one rung up the ladder. On an accelerator the host learns of it 8 to 15 steps later."""

    def __post_init__(self) -> None:
        positive = {"init": self.init, "floor": self.floor, "cap": self.cap}
        numbers = {**positive, "growth_factor": self.growth_factor, "backoff_factor": self.backoff_factor}
        for name, value in {
            **numbers, "growth_interval_steps": self.growth_interval_steps, "hysteresis_steps": self.hysteresis_steps
        }.items():  # fmt: skip
            _require(is_number(value), f"{name}={value!r}", "It has to be a number")
        _require(isinstance(self.per_region, bool), f"per_region={self.per_region!r}", "It is True or False")  # pyright: ignore[reportUnnecessaryIsInstance]
        for name, value in positive.items():
            _require(value > 0, f"{name}={value!r}", "It has to be positive")
        _require(math.isfinite(self.init), f"init={self.init!r}", "It has to be finite")
        _require(self.floor <= self.init <= self.cap, f"init={self.init!r}", f"It has to be in [{self.floor}, {self.cap}]")
        _require(self.growth_factor > 1, f"growth_factor={self.growth_factor!r}", "It has to be above 1")
        _require(0 < self.backoff_factor < 1, f"backoff_factor={self.backoff_factor!r}", "It has to be between 0 and 1")
        for name, steps in {
            "growth_interval_steps": self.growth_interval_steps,
            "hysteresis_steps": self.hysteresis_steps,
        }.items():
            _require(steps >= 1 and steps == int(steps), f"{name}={steps!r}", "It has to be a whole number from 1 on")
        if self.at_floor not in FLOOR_ACTIONS:
            raise errors.unknown("at_floor", self.at_floor, FLOOR_ACTIONS)


@dataclass(frozen=True, kw_only=True)
class StaticScale:
    """A loss scale that stays. Steps whose gradients overflow are skipped all the same.

    Raises, when built: InvalidOption for what is no positive, finite number.
    """

    value: float

    def __post_init__(self) -> None:
        is_fine = is_number(self.value) and math.isfinite(self.value) and self.value > 0
        _require(is_fine, f"{self.value!r}", "It has to be positive and finite")


Scaling = DynamicScale | StaticScale


def _require(holds: bool, what: str, way_out: str) -> None:
    if not holds:
        raise errors.InvalidOption(f"loss scaling with {what}", way_out=way_out)


def resolve(scaling: str | float | Scaling | None, precisions: Collection[str]) -> Scaling | None:
    """What `Amp(scaling=...)` means where these precisions occur; None: gradients are not scaled."""
    if scaling == "auto":
        return DynamicScale() if "fp16" in precisions else None
    if scaling == "dynamic":
        return DynamicScale()
    if isinstance(scaling, (int, float)):
        return StaticScale(value=float(scaling))
    assert scaling is None or isinstance(scaling, (DynamicScale, StaticScale)), scaling
    return scaling
