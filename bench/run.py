"""The benchmark: every system on every workload, in turns, and a line of JSON for each as soon as it is done."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console

from bench import needs, origin, rows, scaling, systems, workloads
from bench.config import Config
from bench.contest import MIN_BUILD_S, Contest, Outcome, tunes
from bench.crew import Crew, Hire
from bench.measure import Work
from bench.rows import CeilingsRow, Dispatch, Facts, Measurement, PassTime, Row, Swap, VariantMemory
from bench.systems import ANCHOR, CONTROL, System
from bench.worker import Reply, Worker
from bench.workloads import Workload

ScalingRow = TypeVar("ScalingRow", Dispatch, Swap, VariantMemory, PassTime)

MIN_SCALE_S: Final = 5.0
"""With less time than this left, nothing of how costs grow is begun."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of a run."""

    path: Path
    """The file of results."""
    left: Mapping[str, Sequence[str]]
    """By workload, the systems that wait for another run."""
    is_interrupted: bool


def run(config: Config, console: Console) -> Done:
    """Measures what is asked for and not yet known. Ctrl-C and SIGTERM end it; what was timed till then is written.

    Raises: RuntimeError if the device itself cannot be measured.
    """
    with tempfile.TemporaryDirectory(prefix="fxamp-bench-", ignore_cleanup_errors=True) as folder:

        def hire(system: System | None) -> Worker:
            name = system.name if system else "device"
            own_cache = ANCHOR if name == CONTROL else name  # what the control compiles is no news
            # A cache is shared within a precision at most: the keys of torch 2.11 ignore the dtype of autocast.
            shared = system.precision if system else "device"
            return Worker(
                system,
                config.device_type,
                log=Path(folder) / f"{name}.log",
                cache=Path(folder) / "caches" / (own_cache if config.measures_compile else shared),
                num_threads=config.num_threads,
                num_jobs=num_beside(system, config.num_jobs),
            )

        with _sigterm_interrupts(), closing(Bench(config, hire, console)) as bench:
            try:
                bench.measure_all()
            except KeyboardInterrupt:
                return Done(path=bench.path, left=bench.left(), is_interrupted=True)
            return Done(path=bench.path, left=bench.left(), is_interrupted=False)


def num_beside(system: System | None, num_jobs: int) -> int:
    """How many compile beside a system, itself included. Who tunes kernels has the machine alone, and all of its threads. So
    has None, the process that measures the device."""
    return 1 if system is None or tunes(system.name) else num_jobs


@contextmanager
def _sigterm_interrupts() -> Generator[None]:
    """SIGTERM does what Ctrl-C does, while this lasts. The first one only: `timeout` sends it twice."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Bench:
    """A run in progress, with its processes."""

    def __init__(self, config: Config, hire: Hire, console: Console) -> None:
        self.config, self.crew = config, Crew(config, hire, console, os.cpu_count() or 1)
        facts = self.crew.ask_device("start_up")
        self.run = origin.run(
            config.device_type,
            facts["name"],
            protocol=config.protocol,
            num_threads=config.num_threads,
            command=config.command,
            commit=config.commit,
        )
        suffix = "" if config.protocol == "full" else "-quick"
        self.path = config.results / f"{self.run.machine.slug}{suffix}.jsonl"
        earlier = list(rows.read(self.path))
        self._known = [] if config.is_fresh else [r for r in earlier if self._still_counts(r)]
        self._record = [*rows.read(config.record / self.path.name), *earlier]

    def close(self) -> None:
        """Ends all processes."""
        self.crew.close()

    def measure_all(self) -> None:
        """Everything, in order; each part is written as soon as it is there."""
        if self.config.device_type == "cuda":  # on a CPU the ceilings would be those of a busy one
            self.crew.start(self._first_systems())
        self._write([CeilingsRow(run=self.run, ceilings=self.crew.ask_device("measure_ceilings"))])
        for name in self.config.workloads:
            self._measure(workloads.find(name), self.config.systems)
        if self.config.does_scaling and self.crew.left_s() >= MIN_BUILD_S:
            self._measure_scaling()

    def left(self) -> dict[str, list[str]]:
        """By workload, the systems that are asked for and have no row yet."""
        left = {name: self._unknown(workloads.find(name), self.config.systems) for name in self.config.workloads}
        return {name: waiting for name, waiting in left.items() if waiting}

    # ---- what is known already ---------------------------------------------------------------------------------------
    def _still_counts(self, row: Row) -> bool:
        """Does a row of an earlier run say what this one would?"""
        if row.run.versions != self.run.versions or (
            isinstance(row, Measurement) and row.status == "error" and self.config.retries_errors
        ):
            return False
        if self.config.reuses_peers and isinstance(row, Measurement) and row.family != "fxamp":
            return True
        return (row.run.bench_source, row.run.fxamp_source) == (self.run.bench_source, self.run.fxamp_source)

    def _unknown(self, workload: Workload, wanted: Sequence[str]) -> list[str]:
        """Systems that are still to be measured."""
        known = {r.system for r in self._known if isinstance(r, Measurement) and r.workload == workload.name}
        return [name for name in wanted if name not in known]

    def _write(self, new: Iterable[Row]) -> None:
        new = list(new)
        rows.append(self.path, new)
        self._known += new

    def _write_finished(
        self, workload: Workload, work: Work | None, outcome: Outcome, but: Sequence[str] = ()
    ) -> None:
        names = [name for name in outcome.finished() if name not in but]
        self._write(self._row(workload, work, name, outcome) for name in names)
        outcome.written.update(names)

    # ---- one workload ------------------------------------------------------------------------------------------------
    def _measure(self, workload: Workload, wanted: Sequence[str]) -> None:
        names = self._unknown(workload, wanted)
        if not names:
            self.crew.say(f"[bold]{workload.name}[/]: all known already")
            return
        contest = Contest(self.crew, workload, needs.on_record(self._record, workload.name, self.run.machine.device))
        outcome = contest.outcome
        if not contest.has_time_for([ANCHOR]):
            self.crew.say(f"[bold]{workload.name}[/]: no time to build it, left for another run")
            return
        self.crew.say(f"[bold]{workload.name}[/]: {workload.about}")
        absent = self._absent(workload, names)
        for name, reason in absent.items():
            self.crew.say(f"  {name}: {reason}")
            outcome.replies[name] = Reply(status="unavailable", reason=reason)
        runnable = [name for name in names if name not in absent]
        work = None
        try:
            if runnable:
                self.crew.start((ANCHOR, *runnable))
                work = self.crew.ask_device("count_work", workload.name)
                self.crew.wait_for_start()
                for _ in contest.build_and_time(runnable):
                    self._write_finished(workload, work, outcome, but=(ANCHOR,))
        finally:  # an interrupted run keeps what it has
            self._write_finished(workload, work, outcome)

    def _absent(self, workload: Workload, names: Sequence[str]) -> dict[str, str]:
        """Systems that cannot run here, and why."""
        missing = workload.missing()
        reasons = {n: missing or self.crew.ask_device("unavailable", systems.all_systems()[n], workload.name) for n in names}
        return {name: reason for name, reason in reasons.items() if reason}

    def _first_systems(self) -> list[str]:
        """Systems that the first workload with something to measure begins with."""
        for workload in map(workloads.find, self.config.workloads):
            names = self._unknown(workload, self.config.systems)
            absent = self._absent(workload, names)
            runnable = [name for name in names if name not in absent]
            if runnable:
                return [ANCHOR, *runnable]
        return []

    def _row(self, workload: Workload, work: Work | None, name: str, outcome: Outcome) -> Measurement:
        system, reply = systems.all_systems()[name], outcome.replies[name]
        is_ok = reply.status == "ok" and name in outcome.turns
        facts: Facts | None = reply.value if isinstance(reply.value, Facts) else None
        if facts is not None:
            is_cold = self.config.measures_compile and system.family != "control"
            cold_s = facts.cold_compile_s if is_cold else None
            facts = replace(facts, cold_compile_s=cold_s, launches=outcome.launches.get(name))
        return Measurement(
            run=self.run,
            workload=workload.name,
            workload_about=workload.about,
            workload_kind=workload.kind,
            unit=workload.unit,
            num_items_per_step=workload.num_items_per_step,
            sweep_over=workload.sweep[0] if workload.sweep else None,
            sweep_value=workload.sweep[1] if workload.sweep else None,
            work=work,
            system=name,
            system_about=system.about,
            precision=system.precision,
            family=system.family,
            mode="eager" if system.compiler == "none" else system.mode,
            status=reply.status,
            reason=reply.reason,
            timing=outcome.turns[name] if is_ok else None,
            facts=facts,
            warm_compile_s=outcome.warm_compile_s.get(name),
        )

    # ---- scaling -----------------------------------------------------------------------------------------------------
    def _measure_scaling(self) -> None:
        """What is quick comes first, and each row is written when it is there: a budget, or SIGTERM, ends the rest."""
        for what in scaling.DISPATCHES:
            self._scale(Dispatch, "measure_dispatch", what, f"calls, {what}", lambda row, what=what: row.what == what)
        if self.config.protocol == "full":
            for what in scaling.SWAPS:
                self._scale(Swap, "measure_swaps", what, f"swaps, {what}", lambda row, what=what: row.what == what)
            *few, many = scaling.NUM_REGIONS
            for num_regions in few:
                self._measure_variants(num_regions)
            for workload in workloads.sweeps(self.config.device_type).values():
                self._measure(workload, [name for name in systems.SWEPT if name in self.config.systems])
            self._measure_variants(many)
        self._measure_passes()

    def _measure_variants(self, num_regions: int | None) -> None:
        num_variants = 1 if num_regions is None else 2 ** (num_regions + 1)
        is_same = lambda row: row.num_variants == num_variants  # noqa: E731
        self._scale(VariantMemory, "measure_variants", num_regions, f"memory of {num_variants} variants", is_same)

    def _measure_passes(self) -> None:
        """A graph of ten times the size takes at least ten times as long."""
        took_s = 0.0
        for num_nodes in scaling.NUM_NODES_QUICK if self.config.protocol == "quick" else scaling.NUM_NODES:
            if self.crew.left_s() < 10 * took_s:
                self.crew.say(f"passes on {num_nodes} nodes: no time, left for another run")
                return
            begin_s = time.monotonic()
            is_same = lambda row, num=num_nodes: abs(row.num_dynamo_nodes - num) < num / 2  # noqa: E731
            self._scale(PassTime, "measure_passes", num_nodes, f"passes on {num_nodes} nodes", is_same)
            took_s = time.monotonic() - begin_s

    def _scale(
        self, kind: type[ScalingRow], method: str, argument: Any, what: str, is_same: Callable[[ScalingRow], bool]
    ) -> None:
        """Asks the device for one row, unless it is known, or time is short. It may take long, and may fail."""
        if any(isinstance(row, kind) and is_same(row) for row in self._known):
            self.crew.say(f"{what}: known already")
            return
        if self.crew.left_s() < MIN_SCALE_S:
            self.crew.say(f"{what}: no time, left for another run")
            return
        reply = self.crew.try_device(method, argument, timeout_s=min(scaling.TIMEOUT_S, self.crew.left_s()))
        self.crew.say(f"{what}: {reply.reason or 'measured'}")
        if reply.status == "ok":
            self._write([kind(run=self.run, **vars(reply.value))])
