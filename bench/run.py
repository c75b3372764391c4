"""The benchmark: every system on every workload, in turns, and a line of JSON for each as soon as it is done."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import needs, origin, rows, scaling, systems, workloads
from bench.config import Config
from bench.contest import MIN_BUILD_S, Contest, Outcome
from bench.crew import Crew, Hire
from bench.measure import Work
from bench.rows import CeilingsRow, Dispatch, Facts, Measurement, PassTime, Row, VariantMemory
from bench.systems import ANCHOR, CONTROL, System
from bench.worker import Reply, Worker
from bench.workloads import Workload


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
                num_jobs=config.num_jobs,
            )

        with _sigterm_interrupts(), closing(Bench(config, hire, console)) as bench:
            try:
                bench.measure_all()
            except KeyboardInterrupt:
                return Done(path=bench.path, left=bench.left(), is_interrupted=True)
            return Done(path=bench.path, left=bench.left(), is_interrupted=False)


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
        """What is quick comes first: a budget ends the rest."""
        is_quick = self.config.protocol == "quick"
        for facts in self.crew.ask_device("measure_dispatch"):
            self._write([Dispatch(run=self.run, **vars(facts))])
        if not is_quick:
            reply = self._measure_on_device("measure_variants", what="memory of variants")
            self._write(VariantMemory(run=self.run, **vars(facts)) for facts in reply.value or ())
        for num_nodes in scaling.NUM_NODES_QUICK if is_quick else scaling.NUM_NODES:
            reply = self._measure_on_device("measure_passes", num_nodes, what=f"passes on {num_nodes} nodes")
            if reply.status == "ok":
                self._write([PassTime(run=self.run, **vars(reply.value))])
        if not is_quick:
            for workload in workloads.sweeps(self.config.device_type).values():
                self._measure(workload, [name for name in systems.SWEPT if name in self.config.systems])

    def _measure_on_device(self, method: str, *arguments: Any, what: str) -> Reply:
        """What may take long, and may fail."""
        timeout_s = min(scaling.TIMEOUT_S, max(self.crew.left_s(), 1.0))
        reply = self.crew.try_device(method, *arguments, timeout_s=timeout_s)
        self.crew.say(f"{what}: {reply.reason or 'measured'}")
        return reply
