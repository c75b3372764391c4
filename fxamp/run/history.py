"""What was observed in each step, and which decisions changed a precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fxamp import errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  # optional

NUM_STEPS: Final = 10_000
"""Steps on record: the last ones."""

NUM_CHANGES: Final = 1_000
"""Changes on record: the last ones."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of `Amp.observe`, as it arrived on the host."""

    step: int
    """Calls before it."""
    loss: float
    """With several ranks: the mean."""
    curvature: float | None
    """|l[t] - 2 l[t-1] + l[t-2]|, infinite for an inf or a NaN; or what was measured and given to `observe`."""
    overflow_rate: float | None
    """Share of the last 16 updates whose gradients overflowed; None without loss scaling, here and below."""
    gradient_ratio: float | None
    """The largest gradient over the median of those before; None also while there are few."""
    loss_scale: float | None
    precision: Mapping[str, str]
    """Region -> precision that the step ran in."""
    overflowed: bool | None = None
    """Did a gradient since the last call overflow? None: none came."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A decision that changed a precision."""

    step: int
    """The first step that runs so."""
    precision: Mapping[str, str]
    """Of all regions, from now on."""
    before: Mapping[str, str]
    reason: str
    known: Step | None
    """The newest step that the decision knew of: `step - lag`. None at the start of a run."""


@dataclass(frozen=True, kw_only=True)
class History:
    """A copy of what is on record."""

    steps: tuple[Step, ...]
    """The last 10,000, oldest first. The newest `lag - 1` steps are still on their way."""
    changes: tuple[Change, ...]
    """The last 1,000, oldest first."""

    def as_csv(self) -> str:
        """A line for each step. A column `precision NAME` for each region; `reason`, where the precision changed."""
        import csv  # here and below: `import fxamp` stays light
        import io

        regions = list(dict.fromkeys(name for step in self.steps for name in step.precision))
        reasons = {change.step: change.reason for change in self.changes}
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*_NUMBERS, *(f"precision {name}" for name in regions), "reason"])
        for step in self.steps:
            numbers = ["" if (x := getattr(step, name)) is None else repr(x) for name in _NUMBERS]
            writer.writerow([*numbers, *(step.precision.get(name, "") for name in regions), reasons.get(step.step, "")])
        return out.getvalue()

    def as_json(self) -> str:
        """{"steps": [...], "changes": [...]}, with the fields of `Step` and `Change`. What is not finite is a text: "nan"."""
        import json

        return json.dumps(_strict(asdict(self)), indent=1, allow_nan=False)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Loss, curvature, loss scale and precision over the steps, drawn with matplotlib; stored if a path is given.

        Raises: MissingPackage without matplotlib.
        """
        try:
            from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  # optional
        except ImportError:
            raise errors.MissingPackage(
                "plots need matplotlib, which is not installed",
                way_out="pip install matplotlib (or fxamp[plot]), or draw from as_csv() or as_json()",
            ) from None
        figure = Figure(figsize=(9, 8), layout="constrained")
        at = [step.step for step in self.steps]
        lines = {"loss": "linear", "curvature": "log", "loss_scale": "log"}
        axes = figure.subplots(len(lines) + 1, sharex=True)
        for axis, (name, scale) in zip(axes, lines.items(), strict=False):
            values = [_drawable(getattr(step, name)) for step in self.steps]
            axis.plot(at, values, linewidth=1)
            if scale == "log" and any(value > 0 for value in values):
                axis.set_yscale("log")
            axis.set_ylabel(name.replace("_", " "))
        for name in dict.fromkeys(name for step in self.steps for name in step.precision):
            axes[-1].step(at, [step.precision.get(name) for step in self.steps], where="post", label=name)
        axes[-1].set_ylabel("precision")
        axes[-1].set_xlabel("step")
        if at:
            axes[-1].legend(loc="upper right")
        if path is not None:
            figure.savefig(path)
        return figure


_NUMBERS: Final = ("step", "loss", "curvature", "overflow_rate", "gradient_ratio", "loss_scale")


def _drawable(value: float | None) -> float:
    """Gaps in the line for what has no place on an axis."""
    return value if value is not None and math.isfinite(value) else math.nan


def _strict(value: Any) -> Any:
    """For JSON, which has neither inf nor NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _strict(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(part) for part in value]
    return value
