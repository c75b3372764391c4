"""What ails a run in fp16, in the words of the field: explosion, underflow, oscillation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from fxamp.scaling import DynamicScale, Scaling

Kind = Literal[
    "calibration", "explosion", "loss spike", "broken loss", "underflow", "oscillation", "floor", "overflow", "unknown"
]

SPIKE: Final = 100.0
"""A largest gradient this many times the median of those before it is a spike: twice what fp16 has above a gradient of 2^9."""

NUM_BEFORE_SPIKE: Final = 8
"""Healthy updates that have to be on record before one can be called a spike."""

NUM_JUMPS: Final = 4
"""Falls of the scale, among the updates on record, that are an oscillation. A scale in balance falls once in a growth
interval, by default 2000 updates."""

NUM_OVERFLOWS: Final = 2
"""Overflows, among the updates on record, at a scale that had held before, that are worth a word."""

LOSS_SPIKE: Final = 10.0
"""A loss so many of its usual steps, from one loss to the next, above the median of those before is a spike."""

NUM_OBSERVED: Final = 256
"""Losses that are looked through for spikes: the last ones."""

NUM_BEFORE_LOSS_SPIKE: Final = 32
"""Losses that the median and the usual step are of; a quarter of them have to be there."""

SHARE_LOST: Final = 0.5
"""The share of a gradient's numbers below the smallest normal number that is called an underflow."""


NUM_NAMED: Final = 3
"""Operations that an underflow names; the evidence has all of them."""

AT_FLOOR: Final = "The forward overflows fp16, or loss or data hold inf or NaN"
"""Why gradients overflow that no lower scale would save."""


class Update(NamedTuple):
    """One update of the scale, on record."""

    scale: float
    overflowed: bool
    largest: float
    """The largest magnitude of any finite, true gradient that came out of a compiled graph; 0 if there was none."""


class Slot(NamedTuple):
    """What is known about one gradient of one graph."""

    name: str
    """Of the parameter, "layers.0.weight", or of the input."""
    num_overflows: int
    """Updates in which it held an inf or a NaN."""
    num_lost: int
    """Updates in which all its numbers, scaled, were below the smallest normal number of fp16."""
    share_lost: float | None
    """The largest share of its numbers, scaled, below the smallest normal number; None unless stats="full"."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a user wants to know."""

    kind: Kind
    what: str
    """One sentence."""
    evidence: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The numbers behind it."""
    way_out: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}. {self.way_out}"


def findings(
    config: Scaling,
    history: Sequence[Update],
    slots: Sequence[Slot],
    num_calibrating: int,
    share_by_operation: Mapping[str, float] = MappingProxyType({}),
    by_region: Mapping[str, Sequence[Update]] = MappingProxyType({}),
) -> tuple[Finding, ...]:
    """What the record shows, the gravest first. `history`: the updates on record, oldest first; `share_by_operation`: of the
    numbers of gradients that operations hand on in fp16, those that are mostly lost, largest first; `by_region`: the updates
    as each region saw them, where each has a scale."""
    worst = sorted((s for s in slots if s.num_overflows), key=lambda s: -s.num_overflows)
    culprits = {s.name: s.num_overflows for s in worst[:5]}
    # Skips of a scale that looks for its place are no illness; they come before the first clean update on record.
    first_clean = next((i for i, u in enumerate(history) if not u.overflowed), len(history))
    is_dynamic = isinstance(config, DynamicScale)  # another scale looks for no place
    begin = first_clean if num_calibrating and is_dynamic else 0
    settled, scales = history[begin:], by_region or {"": history}
    found = [
        *(_in_region(name, _floor(config, updates[begin:], culprits)) for name, updates in scales.items()),
        _explosion(settled, culprits),
        _underflow(slots, share_by_operation),
        *(_in_region(name, _oscillation(config, updates[begin:], culprits)) for name, updates in scales.items()),
        _overflows(config, settled, culprits),
        _calibration(num_calibrating if is_dynamic else 0, is_over=first_clean < len(history)),
    ]
    return tuple(finding for finding in found if finding is not None)


def _in_region(name: str, finding: Finding | None) -> Finding | None:
    """The same finding, about a region's own scale; "" is no region."""
    if finding is None or not name:
        return finding
    return replace(finding, what=f"in region {name}, {finding.what}", evidence={**finding.evidence, "region": name})


def _floor(config: Scaling, settled: Sequence[Update], culprits: Mapping[str, int]) -> Finding | None:
    floor = config.floor if isinstance(config, DynamicScale) else None
    at_floor = [u for u in settled if u.overflowed and u.scale == floor]
    if not at_floor:
        return None
    return Finding(
        kind="floor",
        what=f"gradients overflowed {len(at_floor)} times at the floor of the scale, {floor:g}",
        evidence={"num_overflows": len(at_floor), "gradients": culprits},
        way_out=f"{AT_FLOOR}: keep what overflows in fp32 by policy={{...}}",
    )


def _overflows(config: Scaling, settled: Sequence[Update], culprits: Mapping[str, int]) -> Finding | None:
    """Those that are no search for the largest scale, which ends with an overflow, and are too few for an oscillation."""
    bad = [update.scale for update in settled if update.overflowed]
    how = "at a loss scale that stays"
    if isinstance(config, DynamicScale):
        if len(bad) >= NUM_JUMPS or config.floor in bad:
            return None
        how, bad = "at a loss scale that had held before", _where_it_had_held(settled)
        bad = bad if len(bad) >= NUM_OVERFLOWS else []
    if not bad:
        return None
    names = ", ".join(list(culprits)[:NUM_NAMED]) + (" and others" if len(culprits) > NUM_NAMED else "")
    return Finding(
        kind="overflow",
        what=f"gradients{f' of {names}' if names else ''} overflowed in {len(bad)} of the last {len(settled)} updates, {how}, "
        "and these steps were left out",
        evidence={"num_overflows": len(bad), "num_updates": len(settled), "scales": (min(bad), max(bad)),
                  "gradients": culprits},
        way_out="stats='overflow' names the operation, module and line that make the first inf or NaN",
    )  # fmt: skip


def _where_it_had_held(settled: Sequence[Update]) -> list[float]:
    """The scales of overflows that are no larger than one without an overflow before."""
    held, scales = 0.0, list[float]()
    for update in settled:
        if not update.overflowed:
            held = max(held, update.scale)
        elif update.scale <= held:
            scales.append(update.scale)
    return scales


def nothing_known(*, is_scaled: bool) -> Finding:
    """What to say where nobody has counted anything yet."""
    if is_scaled:
        return Finding(
            kind="unknown",
            what="no update of the loss scale is on record yet: nothing is known of gradients",
            way_out="Attach the optimizer, amp.attach(optimizer), and take a step",
        )
    return Finding(
        kind="unknown",
        what="gradients are not scaled, so nobody looks at them, and no loss was observed: nothing is known of this run",
        way_out="amp.observe(loss), once a step, tells of spikes and broken losses; scaling=1.0 with stats='overflow' names "
        "what makes an inf or a NaN, in any precision",
    )


def _explosion(settled: Sequence[Update], culprits: Mapping[str, int]) -> Finding | None:
    healthy: list[float] = []
    spikes: dict[int, float] = {}
    for i, update in enumerate(settled):
        if update.largest <= 0:
            continue
        if len(healthy) >= NUM_BEFORE_SPIKE and update.largest > SPIKE * _median(healthy):
            spikes[i - len(settled)] = update.largest
        else:
            healthy.append(update.largest)
    if not spikes:
        return None
    return Finding(
        kind="explosion",
        what=f"the largest gradient jumped to {max(spikes.values()):.3g}, from a median of {_median(healthy):.3g}",
        evidence={"largest_by_update": spikes, "median": _median(healthy), "gradients": culprits},
        way_out="Clip gradients, warm the learning rate up, or look at the data of those steps (update -1 is the last one)",
    )


def loss_spikes(losses: Sequence[tuple[int, float]]) -> tuple[Finding, ...]:
    """What losses alone show, (step, loss), oldest first: none or one finding. An inf or a NaN is a spike."""
    calm: list[float] = []
    spikes: dict[int, float] = {}
    usual = math.nan
    for step, loss in losses:
        before = calm[-NUM_BEFORE_LOSS_SPIKE:]
        if len(before) >= NUM_BEFORE_LOSS_SPIKE // 4:
            usual, move = _median(before), _median([abs(b - a) for a, b in zip(before, before[1:], strict=False)])
            if loss > usual + LOSS_SPIKE * max(move, 2.0**-20 * abs(usual)):
                spikes[step] = loss
                continue
        if math.isfinite(loss):
            calm.append(loss)
        else:
            spikes[step] = loss
    if not spikes:
        return ()
    newest = max(spikes)
    return (
        Finding(
            kind="loss spike",
            what=f"the loss jumped in {len(spikes)} of the last {len(losses)} steps, in step {newest} to "
            f"{spikes[newest]:.3g}, from a median of {usual:.3g}: gradients explode there, if the batch is like others",
            evidence={"loss_by_step": spikes, "median": usual},
            way_out="Clip gradients, warm the learning rate up, or look at the data of those steps",
        ),
    )


def broken_losses(losses: Mapping[int, float], places: Sequence[str]) -> tuple[Finding, ...]:
    """Losses, by their steps, that are inf or NaN although no gradient of theirs was: none or one finding. `places`: who may
    have made them, where somebody watches."""
    if not losses:
        return ()
    step = max(losses)
    maker = f", perhaps by {' or '.join(places[:NUM_NAMED])}" if places else ""
    return (
        Finding(
            kind="broken loss",
            what=f"the loss was inf or NaN in {len(losses)} steps, {losses[step]:g} in step {step}, although every gradient "
            f"was finite: it was made where no gradient comes by{maker}, and the steps were taken",
            evidence={"loss_by_step": dict(losses), "operations": tuple(places)},
            way_out="Look at the parts of the loss that are detached or computed under no_grad"
            + ("" if places else "; if the loss is compiled with the model, stats='overflow' names the operation"),
        ),
    )


def _median(values: Sequence[float]) -> float:  # the module `statistics` would cost `import fxamp` ten milliseconds
    return sorted(values)[len(values) // 2]


def _underflow(slots: Sequence[Slot], share_by_operation: Mapping[str, float]) -> Finding | None:
    lost = {s.name: s.share_lost for s in slots if s.share_lost is not None and s.share_lost > SHARE_LOST}
    whole = {s.name: s.num_lost for s in slots if s.num_lost}
    if not lost and not whole and not share_by_operation:
        return None
    names = list(lost or whole)
    by_operation = {"share_by_operation": dict(share_by_operation)} if share_by_operation else {}
    parts: list[str] = []
    if names:
        of = f"{len(names)} tensors, {names[0]} for one,"
        parts.append(f"gradients of {of} are mostly below the smallest normal number of fp16")
    if share_by_operation:
        worst = [f"{share:.0%} at {place}" for place, share in list(share_by_operation.items())[:NUM_NAMED]]
        parts.append(f"of the gradients that operations hand on fp16 holds badly or not at all {', '.join(worst)}")
    return Finding(
        kind="underflow",
        what="; ".join(parts),
        evidence={"share_lost": lost, "num_updates_lost": whole, **by_operation},
        way_out="Let the scale grow (growth_interval_steps, hysteresis_steps), or keep the operation in fp32 by policy={...}",
    )


def _oscillation(config: Scaling, settled: Sequence[Update], culprits: Mapping[str, int]) -> Finding | None:
    scales = [u.scale for u in settled]
    falls = [i for i, u in enumerate(settled) if u.overflowed]
    if not isinstance(config, DynamicScale) or len(falls) < NUM_JUMPS:
        return None
    return Finding(
        kind="oscillation",
        what=f"{len(falls)} of the last {len(settled)} updates overflowed; the scale went between {min(scales):g} and "
        f"{max(scales):g}",
        evidence={"num_overflows": len(falls), "num_updates": len(settled), "scales": (min(scales), max(scales)),
                  "gradients": culprits},
        way_out="Raise growth_interval_steps, set a cap just below the top, or keep what overflows in fp32 by policy={...}",
    )  # fmt: skip


def _calibration(num_calibrating: int, *, is_over: bool) -> Finding | None:
    if not num_calibrating:
        return None
    if not is_over:
        return Finding(
            kind="calibration",
            what=f"all {num_calibrating} steps so far were left out: the scale is still looking for its place",
            evidence={"num_updates": num_calibrating},
            way_out="Wait for the first that is not; a smaller DynamicScale(init=...) starts nearer to it. If none comes, the "
            "cause is another one",
        )
    return Finding(
        kind="calibration",
        what=f"the first {num_calibrating} steps were left out while the scale looked for its place",
        evidence={"num_updates": num_calibrating},
        way_out="Nothing is wrong; a smaller DynamicScale(init=...) starts nearer to it",
    )
