"""What rows say about each other: who is faster, who does not train, and against whom a system has to stand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from bench.rows import (
    CeilingsRow,
    Dispatch,
    Distributed,
    Machine,
    Measurement,
    PassTime,
    Row,
    ScheduledRun,
    Swap,
    VariantMemory,
)  # fmt: skip
from bench.systems import ANCHOR, CONTROL, REFERENCE
from bench.workloads import CROSSINGS, NUM_BATCHES

LOSS_RATIO: Final = 1.02
"""Slower than a peer by more than this counts as a loss. Below it lies what repetitions of one and the same system
differ by."""

MIN_SHARE_OF_DROP: Final = 0.9
"""A system trains if its loss fell by at least this share of fp32's drop after as many updates. A judgement: who loses more
than a tenth in so few steps needs a look."""

LOSS_NOISE: Final = torch.finfo(torch.bfloat16).eps / 2
"""Relative: a loss is not known better than by one rounding to bf16, so that a smaller gap says nothing."""

MAX_OUTPUT_ERROR: Final = 0.1
"""Relative error of an inference that is still a result. A judgement: a few roundings of bf16 (0.4 % each) add up to
far less."""

COMPARABLE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"fp32": ("fp32",), "tf32": ("tf32",), "bf16": ("bf16",), "fp16": ("fp16",), "fp8": ("fp8", "bf16")}
)
"""Precision of a system -> precisions of the peers that it has to beat. fp8 is worth nothing where bf16 is as fast."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Time of one system over that of another: less than 1 is faster."""

    median: float
    low: float
    high: float
    """The extremes over repetitions, if both took turns; else equal to the median."""


class OnWorkload(Mapping[str, Measurement]):
    """The last row of each system on one workload, in the order in which systems first appeared; and, beside any row, those
    that it took turns with, whatever came later."""

    def __init__(self, rows: Iterable[Measurement]) -> None:
        self._rows = tuple(rows)
        self._last = {row.system: row for row in self._rows}
        self._of_run = {(row.run.id, row.system): row for row in self._rows if row.timing is not None}

    def __getitem__(self, system: str) -> Measurement:
        return self._last[system]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def beside(self, m: Measurement) -> dict[str, Measurement]:
        """Those that took turns with `m`, by system."""
        together = () if m.timing is None else m.timing.together
        found = {name: self._of_run.get((m.run.id, name)) for name in together}
        return {n: x for n, x in found.items() if n != m.system and x and x.timing and m.system in x.timing.together}

    def only(self, keep: Callable[[Measurement], bool]) -> OnWorkload:
        """Some of the rows."""
        return OnWorkload(filter(keep, self._rows))


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that is known of one machine under one protocol: the last row of each kind."""

    machine: Machine
    protocol: str
    measurements: Mapping[str, OnWorkload]
    """By workload, in the order in which they first appeared."""
    ceilings: CeilingsRow | None
    pass_times: tuple[PassTime, ...]
    """By number of nodes."""
    dispatches: tuple[Dispatch, ...]
    scheduled: tuple[ScheduledRun, ...] = ()
    """In the order in which workloads, systems and seeds first appeared."""
    distributed: tuple[Distributed, ...] = ()
    """In the order in which workloads, strategies and systems first appeared."""
    variants: tuple[VariantMemory, ...] = ()
    """By number of variants."""
    swaps: tuple[Swap, ...] = ()
    sources: tuple[str, ...] = ()
    """Of fxamp, the oldest first: by date, and on one day in the order in which rows were written."""


def results_of(rows: Iterable[Row]) -> list[Results]:
    """Sorts rows by machine and protocol; later rows replace earlier ones of the same workload and system."""
    sorted_rows: dict[tuple[Machine, str], list[Row]] = {}
    for row in rows:
        sorted_rows.setdefault((row.run.machine, row.run.protocol), []).append(row)
    return [_results(machine, protocol, group) for (machine, protocol), group in sorted_rows.items()]


def _results(machine: Machine, protocol: str, group: Sequence[Row]) -> Results:
    measurements: dict[str, list[Measurement]] = {}
    ceilings: CeilingsRow | None = None
    pass_times: dict[int, PassTime] = {}
    dispatches: dict[str, Dispatch] = {}
    scheduled: dict[tuple[str, str, int], ScheduledRun] = {}
    distributed: dict[tuple[str, str, str], Distributed] = {}
    variants: dict[int, VariantMemory] = {}
    swaps: dict[str, Swap] = {}
    first_seen: dict[str, str] = {}
    for row in group:
        first_seen.setdefault(row.run.fxamp_source, row.run.date)
        match row:
            case Measurement():
                measurements.setdefault(row.workload, []).append(row)
            case CeilingsRow():
                ceilings = row
            case PassTime():
                pass_times[row.num_dynamo_nodes] = row
            case Dispatch():
                dispatches[row.what] = row
            case VariantMemory():
                variants[row.num_variants] = row
            case Swap():
                swaps[row.what] = row
            case ScheduledRun():
                scheduled[row.workload, row.system, row.seed] = row
            case Distributed():
                distributed[row.workload, row.strategy, row.system] = row
    return Results(
        machine=machine,
        protocol=protocol,
        measurements={workload: OnWorkload(found) for workload, found in measurements.items()},
        ceilings=ceilings,
        pass_times=tuple(pass_times[n] for n in sorted(pass_times)),
        dispatches=tuple(dispatches.values()),
        scheduled=tuple(scheduled.values()),
        distributed=tuple(distributed.values()),
        variants=tuple(variants[n] for n in sorted(variants)),
        swaps=tuple(swaps.values()),
        sources=tuple(sorted(first_seen, key=lambda source: first_seen[source])),
    )


# ---- age -------------------------------------------------------------------------------------------------------------
def newer(m: Measurement, results: Results) -> list[Measurement]:
    """Rows of fxamp on the same workload whose source is newer than that of `m`, which then says nothing of fxamp as it is."""
    age_of = results.sources.index
    on_workload = results.measurements[m.workload].values()
    is_ours = m.family == "fxamp"
    return [
        other
        for other in on_workload
        if is_ours and other.family == "fxamp" and other.timing and age_of(other.run.fxamp_source) > age_of(m.run.fxamp_source)
    ]


# ---- time ------------------------------------------------------------------------------------------------------------
def median_ms(m: Measurement) -> float | None:
    """Of a step; None for what was not measured."""
    return statistics.median(m.timing.step_ms) if m.timing is not None else None


def ratio_of_pairs(times: Sequence[float], others: Sequence[float]) -> Ratio | None:
    """Of systems that took turns: from pairs of the same repetition. None where there are none."""
    pairs = [x / y for x, y in zip(times, others, strict=False)]
    return Ratio(median=statistics.median(pairs), low=min(pairs), high=max(pairs)) if pairs else None


def ratio(m: Measurement, other: Measurement, on: OnWorkload | None = None) -> Ratio | None:
    """Time of `m` over that of `other`; None if they cannot be compared.

    Of systems that took turns: from pairs of the same repetition, so that what slows the whole machine down cancels. Of
    systems of different runs or groups: both are compared with the anchor, which took turns with each; or else, `on` a
    workload, with the peers that did.
    """
    a, b = m.timing, other.timing
    if a is None or b is None:
        return None
    if m.run.id == other.run.id and other.system in a.together and m.system in b.together:
        return ratio_of_pairs(a.step_ms, b.step_ms)
    if a.anchor_ratios and b.anchor_ratios:
        value = statistics.median(a.anchor_ratios) / statistics.median(b.anchor_ratios)
        return Ratio(median=value, low=value, high=value)
    return None if on is None else _through_a_peer(m, other, on)


def _through_a_peer(m: Measurement, other: Measurement, on: OnWorkload) -> Ratio | None:
    """Several peers that took turns with both say different things: their median. Of fxamp, rows of different runs may be of
    different sources."""
    ours, theirs = ({x.system: x, **on.beside(x)} for x in (m, other))
    found: list[float] = []
    for name in ours.keys() & theirs.keys():
        if ours[name].family != "fxamp":
            a, b = _paired(m, ours[name]), _paired(other, theirs[name])
            found += [] if a is None or b is None else [a / b]
    if not found:
        return None
    value = statistics.median(found)
    return Ratio(median=value, low=value, high=value)


def _paired(m: Measurement, other: Measurement) -> float | None:
    if m is other:
        return 1.0
    found = ratio_of_pairs(m.timing.step_ms, other.timing.step_ms) if m.timing and other.timing else None
    return None if found is None else found.median


# ---- is it a result at all? ------------------------------------------------------------------------------------------
def problem(m: Measurement, on_workload: Mapping[str, Measurement]) -> str | None:
    """Why a measurement is no result although it has a time, or None."""
    if m.facts is None:
        return None
    if m.workload_kind == "infer":
        error = m.facts.output_error
        is_good = error is not None and error <= MAX_OUTPUT_ERROR  # not so for NaN
        return None if is_good else f"output differs from fp32's by {error:.2g} of its size"
    losses = m.facts.losses
    if not all(math.isfinite(x) for x in losses):
        return "loss is not finite"
    reference = on_workload.get(REFERENCE)
    if reference is None or reference.facts is None or len(reference.facts.losses) != len(losses):
        return None
    # As many updates as it has taken: a scaler that looks for its scale skips the first ones.
    num_taken = max(len(losses) - (m.facts.num_skipped or 0), NUM_BATCHES + 1)
    drop, expected = loss_drop(losses), loss_drop(reference.facts.losses[:num_taken])
    if drop < MIN_SHARE_OF_DROP * expected - LOSS_NOISE * abs(losses[0]):
        return f"trains worse: loss fell by {drop:.3g}, that of fp32 by {expected:.3g}"
    return None


def trains_known(on_workload: Mapping[str, Measurement]) -> bool:
    """Is there a row of eager fp32, whose losses say how far those of the others should fall?"""
    reference = on_workload.get(REFERENCE)
    return reference is not None and reference.facts is not None


def last_loss(losses: Sequence[float]) -> float:
    """Mean over the last round of batches: a single batch has a loss of its own."""
    return statistics.fmean(losses[-NUM_BATCHES:])


def loss_drop(losses: Sequence[float]) -> float:
    return losses[0] - last_loss(losses)


# ---- against whom ----------------------------------------------------------------------------------------------------
def best(candidates: Iterable[Measurement], on_workload: OnWorkload) -> Measurement | None:
    """The fastest that is a result. Needs a common yardstick: the first candidate of all."""
    found: Measurement | None = None
    for m in candidates:
        if m.timing is None or problem(m, on_workload):
            continue
        against = None if found is None else ratio(m, found, on_workload)
        if found is None or (against is not None and against.median < 1):
            found = m
    return found


def best_peer(m: Measurement, on_workload: OnWorkload, precisions: Sequence[str] | None = None) -> Measurement | None:
    """The fastest peer of these precisions, or of those comparable with `m`; never `m` itself."""
    return _best_beside(m, _is_peer(m, precisions), on_workload)


def _is_peer(m: Measurement, precisions: Sequence[str] | None = None) -> Callable[[Measurement], bool]:
    wanted = COMPARABLE[m.precision] if precisions is None else precisions
    return lambda p: p.family == "peer" and p.precision in wanted and p.system != m.system


def _best_beside(m: Measurement, is_wanted: Callable[[Measurement], bool], on_workload: OnWorkload) -> Measurement | None:
    """The fastest that is a result, as it was beside `m` if it ever was: one of another run has to be faster by more than what
    repetitions of one and the same system differ by."""
    beside = on_workload.beside(m)
    rows = (beside.get(name, p) for name, p in on_workload.items())
    over = {p.system: (p, against.median) for p in rows if is_wanted(p) and (against := ratio(m, p, on_workload))}
    over = {name: (p, value) for name, (p, value) in over.items() if not problem(p, on_workload)}
    if not over:
        return None
    overall = max(over.values(), key=lambda pair: pair[1])
    own = max((pair for name, pair in over.items() if name in beside), key=lambda pair: pair[1], default=overall)
    return own[0] if overall[1] <= LOSS_RATIO * own[1] else overall[0]


# ---- sweeps ----------------------------------------------------------------------------------------------------------
def swept(results: Results, over: str) -> dict[int, dict[str, Measurement]]:
    """The rows of a sweep by its values, in order, of the systems that were swept; with those of the workload that it goes
    through."""
    found: dict[int, dict[str, Measurement]] = {}
    for on in results.measurements.values():
        for m in on.values():
            if m.sweep_over == over and m.sweep_value is not None:
                found.setdefault(m.sweep_value, {})[m.system] = m
    names = {name for on in found.values() for name in on}
    crossing, at = CROSSINGS[results.machine.device_type]
    through = {name: m for name, m in results.measurements.get(crossing, {}).items() if name in names}
    if through:
        found[next(value for what, value in at.items() if what == over)] = through
    return {value: found[value] for value in sorted(found)}


# ---- memory ----------------------------------------------------------------------------------------------------------
def replays(m: Measurement) -> bool | None:
    """Does a step launch CUDA graphs, whatever its mode is called? None if it was not profiled."""
    launches = m.facts and m.facts.launches
    return None if launches is None else launches.num_graph_launches > 0


def memory_peer(m: Measurement, on_workload: OnWorkload) -> Measurement | None:
    """The fastest comparable peer that replays CUDA graphs if `m` does, and does not if `m` does not: a graph keeps for itself
    what a step without graphs hands back between its parts."""
    if replays(m) is None:
        return None
    is_peer = _is_peer(m)

    def is_alike(p: Measurement) -> bool:
        return is_peer(p) and replays(p) == replays(m) and p.facts is not None and p.facts.memory is not None

    return _best_beside(m, is_alike, on_workload)


def memory_ratio(m: Measurement, peer: Measurement | None) -> float | None:
    """Peak reserved bytes of `m` over those of `peer`. Allocated bytes leave out what CUDA graphs hold."""
    ours, theirs = m.facts and m.facts.memory, peer and peer.facts and peer.facts.memory
    return ours.reserved_bytes / theirs.reserved_bytes if ours and theirs else None


def process_noise(on_workload: Mapping[str, Measurement]) -> float | None:
    """By which factor two processes of one and the same system differ; None where there was no control."""
    anchor, control = on_workload.get(ANCHOR), on_workload.get(CONTROL)
    found = None if anchor is None or control is None else ratio(control, anchor)
    return None if found is None else max(found.median, 1 / found.median)


@dataclass(frozen=True, kw_only=True)
class Defeat:
    """A system of fxamp that is slower than a peer."""

    results: Results
    fxamp: Measurement
    peer: Measurement
    ratio: Ratio


def defeats(results: Results) -> list[Defeat]:
    """Every row of fxamp that loses to its best comparable peer, worst first."""
    found: list[Defeat] = []
    for m, peer in _beside(results, best_peer):
        against = ratio(m, peer, results.measurements[m.workload])
        if against is not None and against.median > LOSS_RATIO:
            found.append(Defeat(results=results, fxamp=m, peer=peer, ratio=against))
    return sorted(found, key=lambda d: -d.ratio.median)


def _beside(
    results: Results, find: Callable[[Measurement, OnWorkload], Measurement | None]
) -> Iterator[tuple[Measurement, Measurement]]:
    """Every row of fxamp that has a peer, as `find` finds them on its workload, with it."""
    for on_workload in results.measurements.values():
        for m in on_workload.values():
            peer = find(m, on_workload) if m.family == "fxamp" else None
            if peer is not None:
                yield m, peer


@dataclass(frozen=True, kw_only=True)
class MemoryDefeat:
    """A system of fxamp that holds more memory than a peer."""

    fxamp: Measurement
    peer: Measurement
    ratio: float


def memory_defeats(results: Results) -> list[MemoryDefeat]:
    """Every row of fxamp that reserves more than its peer does, worst first."""
    found: list[MemoryDefeat] = []
    for m, peer in _beside(results, memory_peer):
        against = memory_ratio(m, peer)
        if against is not None and against > LOSS_RATIO:
            found.append(MemoryDefeat(fxamp=m, peer=peer, ratio=against))
    return sorted(found, key=lambda d: -d.ratio)
