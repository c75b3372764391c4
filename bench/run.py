"""The benchmark: every system on every workload, in turns, and a line of JSON for each as soon as its workload is
done."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from rich.console import Console

from bench import origin, rows, scaling, systems, workloads
from bench.measure import Launches, Work
from bench.rows import CeilingsRow, Dispatch, Facts, Measurement, PassTime, Row, Timing
from bench.systems import ANCHOR, CONTROL, System
from bench.worker import NUM_UNTIMED_STEPS, Reply, Worker
from bench.workloads import Workload

MEMORY_MARGIN: Final = 1.4
"""A system is built beside others if this many times the largest need so far is free: fp32 takes more than the anchor's
bf16, and compiling more than running. Who runs out of memory nevertheless gets another try with less company."""

MAX_STEPS_PER_BLOCK: Final = 2000
DEVICE_TIMEOUT_S: Final = 300.0
"""For questions about the device alone."""

MIN_BUILD_S: Final = 20.0
"""With less time than this left, no build is begun."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One call of the command."""

    device_type: Literal["cpu", "cuda"]
    protocol: Literal["full", "quick"]
    workloads: tuple[str, ...]
    systems: tuple[str, ...]
    num_repetitions: int
    """How often each system gets its turn."""
    block_ms: float
    """How long a turn lasts, about."""
    num_jobs: int
    """Systems that are compiled at the same time."""
    num_threads: int | None
    """Of a system on the CPU; None is torch's default, all cores."""
    compiles_again: bool
    """Is every system compiled a second time, from warm caches?"""
    build_timeout_s: float
    budget_s: float | None
    """After this long no build is begun; what is built is still timed and written."""
    is_fresh: bool
    """Measure again what the results have already?"""
    retries_errors: bool
    """Measure again what the results have as an error?"""
    reuses_peers: bool
    """Do results of peers count although the source of fxamp or of the benchmark has changed since?"""
    does_scaling: bool
    results: Path
    command: str
    commit: str | None
    """Of git, where there is none to ask."""

    @property
    def measures_compile(self) -> bool:
        """Systems of a quick run share their caches: that saves time, and leaves no compile time worth reporting."""
        return self.protocol == "full"


def run(config: Config, console: Console) -> Path:
    """Measures what is asked for and not yet known, and returns the file of results.

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

        with closing(Bench(config, hire, console)) as bench:
            bench.measure_all()
            return bench.path


class Asked(Protocol):
    """What a run needs of a worker."""

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Reply: ...
    def stop(self) -> None: ...


Hire = Callable[[System | None], Asked]
"""Makes the worker of a system, or, for None, of the device. It need not start before it is asked."""


@dataclass(kw_only=True)
class _Outcome:
    """What is known of a workload so far, by system."""

    replies: dict[str, Reply] = field(default_factory=dict)
    """What building answered, or the first error behind it."""
    turns: dict[str, Timing] = field(default_factory=dict)
    launches: dict[str, Launches | None] = field(default_factory=dict)
    warm_compile_s: dict[str, float | None] = field(default_factory=dict)
    crowded_out: set[str] = field(default_factory=set)
    """Systems that once ran out of memory in company."""
    alone: list[str] = field(default_factory=list)
    """Those of them that wait for a group of their own, beside the anchor only."""

    def crowd_out(self, name: str, reply: Reply) -> bool:
        """Puts a system off that lacked memory for the first time. Returns whether it did."""
        if not reply.is_out_of_memory or name in self.crowded_out or name == ANCHOR:
            return False
        self.crowded_out.add(name)
        self.alone.append(name)
        self.replies.pop(name, None)
        return True


def rotated(names: Sequence[str], repetition: int) -> list[str]:
    """The order of a repetition: who begins moves on by one each time."""
    first = repetition % len(names) if names else 0
    return [*names[first:], *names[:first]]


def _tunes(name: str) -> bool:
    """Does a system time kernels on the device while it compiles? Then nothing else may run there."""
    return systems.all_systems()[name].mode == "max-autotune"


def _built(reply: Reply) -> str:
    if reply.status != "ok":
        return str(reply.reason)
    compile_s = reply.value.cold_compile_s
    return "ready" if compile_s is None else f"compiled in {compile_s:.1f} s"


class Bench:
    """A run in progress, with its processes."""

    def __init__(self, config: Config, hire: Hire, console: Console) -> None:
        self.config, self._console = config, console
        self._end_s = None if config.budget_s is None else time.monotonic() + config.budget_s
        self._device = hire(None)
        self._workers = {name: hire(system) for name, system in systems.all_systems().items()}
        facts = self._ask_device("start_up")
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
        self._known = [] if config.is_fresh else [r for r in rows.read(self.path) if self._still_counts(r)]

    def close(self) -> None:
        """Ends all processes."""
        for worker in (self._device, *self._workers.values()):
            worker.stop()

    def measure_all(self) -> None:
        """Everything, in order; each part is written as soon as it is there."""
        self._write([CeilingsRow(run=self.run, ceilings=self._ask_device("measure_ceilings"))])
        for name in self.config.workloads:
            self._measure(workloads.find(name), self.config.systems)
        if self.config.does_scaling and not self._is_over():
            self._measure_scaling()

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

    def _is_known(self, workload: Workload, system: str) -> bool:
        return any(
            isinstance(r, Measurement) and (r.workload, r.system) == (workload.name, system) for r in self._known
        )

    def _write(self, new: Iterable[Row]) -> None:
        rows.append(self.path, new)

    # ---- time and memory ---------------------------------------------------------------------------------------------
    def _left_s(self) -> float:
        return float("inf") if self._end_s is None else self._end_s - time.monotonic()

    def _is_over(self) -> bool:
        """Is there too little time to begin something?"""
        return self._left_s() < MIN_BUILD_S

    def _turns_s(self, builds: Iterable[Reply]) -> float:
        """What taking turns will need, about."""
        num_untimed = NUM_UNTIMED_STEPS[self.config.device_type]
        steps_ms = [r.value.rough_step_ms for r in builds if r.status == "ok"]
        turn_ms = sum(max(self.config.block_ms, step_ms) + num_untimed * step_ms for step_ms in steps_ms)
        return (self.config.num_repetitions + 1) * turn_ms / 1e3

    def _num_that_fit(self, builds: Mapping[str, Reply]) -> int:
        """How many more systems may be built now, going by the memory of those that were."""
        free_bytes = self._ask_device("device_facts")["free_bytes"]
        needs = [
            r.value.memory.reserved_bytes for r in builds.values() if r.status == "ok" and r.value.memory is not None
        ]
        if free_bytes is None or not needs:
            return self.config.num_jobs
        return min(self.config.num_jobs, int(free_bytes // (MEMORY_MARGIN * max(needs))))

    # ---- one workload ------------------------------------------------------------------------------------------------
    def _measure(self, workload: Workload, wanted: Sequence[str]) -> None:
        names = [name for name in wanted if not self._is_known(workload, name)]
        if not names:
            self._say(f"[bold]{workload.name}[/]: all known already")
            return
        if self._is_over():
            self._say(f"[bold]{workload.name}[/]: out of time, left for another run")
            return
        self._say(f"[bold]{workload.name}[/]: {workload.about}")
        absent = {
            name: workload.missing() or self._ask_device("unavailable", self._system(name), workload.name)
            for name in names
        }
        for name in [name for name, reason in absent.items() if reason]:
            self._say(f"  {name}: {absent[name]}")
        runnable = [name for name in names if not absent[name]]
        outcome = _Outcome(
            replies={name: Reply(status="unavailable", reason=absent[name]) for name in names if absent[name]}
        )
        work = None
        if runnable:
            work = self._ask_device("count_work", workload.name)
            self._build_and_time(workload, runnable, outcome)
        self._write(self._row(workload, work, name, outcome) for name in outcome.replies)

    def _build_and_time(self, workload: Workload, names: Sequence[str], outcome: _Outcome) -> None:
        """The anchor stays; the others come in groups, as many at once as the memory holds."""
        self._start((ANCHOR, *names))
        outcome.replies |= self._build(workload, [ANCHOR], outcome)
        # Those that tune kernels come last, and one by one.
        todo = sorted((n for n in names if n != ANCHOR), key=_tunes)
        while todo or outcome.alone or ANCHOR not in outcome.turns:
            if not todo:
                todo, outcome.alone = outcome.alone, []
            group = self._build_group(workload, todo, outcome)
            present = [n for n in (ANCHOR, *group) if outcome.replies[n].status == "ok"]
            if not (present or todo or outcome.alone):
                break
            self._take_turns(present, outcome)
            self._finish(group, outcome)
        self._finish([ANCHOR], outcome)

    def _start(self, names: Sequence[str]) -> None:
        """Starts processes at the same time: that is most of the work of a small run. Failures show when they build."""
        num_jobs = max(self.config.num_jobs, self.run.machine.num_cpus // 2)
        with ThreadPoolExecutor(num_jobs) as pool:
            list(pool.map(lambda n: self._workers[n].ask("device_facts", timeout_s=self.config.build_timeout_s), names))

    def _build_group(self, workload: Workload, todo: list[str], outcome: _Outcome) -> list[str]:
        """Builds systems of `todo`, and takes them off it, until memory or time is short."""
        group: list[str] = []
        while todo:
            if self._left_s() < self._turns_s(outcome.replies.values()) + MIN_BUILD_S:
                self._say(f"  out of time: {', '.join(todo + outcome.alone)} left for another run")
                todo.clear()
                outcome.alone.clear()
                break
            is_crowded_out = todo[0] in outcome.crowded_out
            num_fitting = self._num_that_fit(outcome.replies)
            if group and (num_fitting == 0 or is_crowded_out):
                break
            is_single = is_crowded_out or _tunes(todo[0])
            num_now = 1 if is_single else max(1, min(num_fitting, sum(not _tunes(n) for n in todo)))
            batch, todo[:] = todo[:num_now], todo[num_now:]
            replies = self._build(workload, batch, outcome)
            has_company = bool(group) or len(batch) > 1
            replies = {n: reply for n, reply in replies.items() if not (has_company and outcome.crowd_out(n, reply))}
            outcome.replies |= replies
            group.extend(replies)
            if is_crowded_out or len(replies) < len(batch):
                break
        return group

    def _build(self, workload: Workload, names: Sequence[str], outcome: _Outcome) -> dict[str, Reply]:
        """Builds systems at the same time, each in its process."""
        left_s = self._left_s() - self._turns_s(outcome.replies.values())
        timeout_s = min(self.config.build_timeout_s, max(left_s, MIN_BUILD_S))

        def build(name: str) -> Reply:
            return self._workers[name].ask("build", workload.name, len(names), timeout_s=timeout_s)

        replies = self._at_once(names, build)
        for name, reply in replies.items():
            self._say(f"  {name}: {_built(reply)}")
        return replies

    def _take_turns(self, names: Sequence[str], outcome: _Outcome) -> None:
        """Times systems in turns; who begins moves on by one each time. Who fails drops out."""
        num_steps = {name: self._num_steps(outcome.replies[name].value.rough_step_ms) for name in names}
        times_ms: dict[str, list[float]] = {name: [] for name in names}

        def take_turn(name: str, num: int) -> float | None:
            reply = self._workers[name].ask("time", num, timeout_s=self.config.build_timeout_s)
            if reply.status != "ok":
                self._say(f"  {name}: {reply.reason}")
                del num_steps[name]
                if len(names) <= 2 or not outcome.crowd_out(name, reply):
                    outcome.replies[name] = reply
            return reply.value

        for name in names:  # rough times were taken while others compiled, or with clones of every loss
            time_ms = take_turn(name, min(num_steps[name], 3))
            if time_ms is not None:
                num_steps[name] = self._num_steps(time_ms)
        for repetition in range(self.config.num_repetitions):
            for name in rotated(list(num_steps), repetition):
                time_ms = take_turn(name, num_steps[name])
                if time_ms is not None:
                    times_ms[name].append(time_ms)
        for name in num_steps:
            anchor_ms = times_ms[ANCHOR] if ANCHOR in num_steps else []
            timing = Timing(
                step_ms=tuple(times_ms[name]),
                anchor_ratios=tuple(a / b for a, b in zip(times_ms[name], anchor_ms, strict=False)),
                num_steps_per_block=num_steps[name],
                together=tuple(num_steps),
            )
            outcome.turns.setdefault(name, timing)  # the anchor is in every group: its first one counts
            self._say(f"  {name}: {statistics.median(timing.step_ms):.3f} ms")

    def _num_steps(self, step_ms: float) -> int:
        return max(1, min(MAX_STEPS_PER_BLOCK, round(self.config.block_ms / step_ms)))

    def _finish(self, names: Sequence[str], outcome: _Outcome) -> None:
        """Profiles, one by one; compiles again from warm caches, if that is measured and there is time; releases."""
        names = [n for n in names if n in outcome.replies and outcome.replies[n].status == "ok"]
        for name in names:
            reply = self._workers[name].ask("profile", timeout_s=self.config.build_timeout_s)
            outcome.launches[name] = reply.value
            if reply.status != "ok":
                self._say(f"  {name}, profiled: {reply.reason}")
        cold_s = [outcome.replies[n].value.cold_compile_s or 0.0 for n in names]
        is_warm_measured = self.config.compiles_again and self._left_s() > sum(cold_s) + MIN_BUILD_S
        method = "warm_compile" if is_warm_measured else "release"

        def finish(name: str) -> Reply:
            return self._workers[name].ask(method, timeout_s=self.config.build_timeout_s)

        for name, reply in self._at_once(names, finish).items():
            outcome.warm_compile_s[name] = reply.value
            if reply.status != "ok":
                self._say(f"  {name}, {method}: {reply.reason}")

    def _at_once(self, names: Sequence[str], ask: Callable[[str], Reply]) -> dict[str, Reply]:
        """Asks workers, `num_jobs` at a time."""
        with ThreadPoolExecutor(self.config.num_jobs) as pool:
            return dict(zip(names, pool.map(ask, names), strict=True))

    def _row(self, workload: Workload, work: Work | None, name: str, outcome: _Outcome) -> Measurement:
        system, reply = self._system(name), outcome.replies[name]
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
        is_quick = self.config.protocol == "quick"
        for num_nodes in scaling.NUM_NODES_QUICK if is_quick else scaling.NUM_NODES:
            reply = self._device.ask("measure_passes", num_nodes, timeout_s=min(scaling.TIMEOUT_S, self._left_s()))
            self._say(f"passes on {num_nodes} nodes: {reply.reason or 'measured'}")
            if reply.status == "ok":
                facts: scaling.PassFacts = reply.value
                self._write([PassTime(run=self.run, **vars(facts))])
        for facts in self._ask_device("measure_dispatch"):
            self._write([Dispatch(run=self.run, **vars(facts))])
        if not is_quick:
            for workload in workloads.sweeps(self.config.device_type).values():
                self._measure(workload, [name for name in systems.SWEPT if name in self.config.systems])

    # ---- small things ------------------------------------------------------------------------------------------------
    def _system(self, name: str) -> System:
        return systems.all_systems()[name]

    def _ask_device(self, method: str, *arguments: Any) -> Any:
        reply = self._device.ask(method, *arguments, timeout_s=DEVICE_TIMEOUT_S)
        if reply.status != "ok":
            raise RuntimeError(f"the device could not be asked for {method}: {reply.reason}")
        return reply.value

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)
