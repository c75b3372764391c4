"""Planning of a run, with workers that only pretend."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import rows, run, scaling, systems
from bench.config import Config
from bench.contest import rotated
from bench.measure import Ceilings, Launches, Memory, Work
from bench.rows import CeilingsRow, Dispatch, Measurement, PassTime, Swap, VariantMemory
from bench.run import Bench
from bench.systems import ANCHOR, CONTROL, System
from bench.worker import Reply
from tests.bench import make
from tests.bench.make import facts, measurement

GIB = 2**30


@dataclass
class World:
    """What all pretended workers share: a memory, a list of what was asked, and replies that tests plant."""

    free_gib: float | None = None
    """None: a CPU."""
    need_gib: float = 1.0
    idle_gib: Mapping[str, float] = field(default_factory=dict)
    """What systems hold between turns, where that is less than they need."""
    log: list[tuple[str, str]] = field(default_factory=list)
    timeouts_s: dict[tuple[str, str], float] = field(default_factory=dict)
    built: set[str] = field(default_factory=set)
    num_together: dict[str, int] = field(default_factory=dict)
    """Builds at the same time."""
    planted: dict[tuple[str, str], Callable[[], Reply]] = field(default_factory=dict)

    def hire(self, system: System | None) -> Pretended:
        return Pretended(self, system.name if system else "device")

    def left_gib(self) -> float:
        assert self.free_gib is not None
        return self.free_gib - sum(self.idle_gib.get(name, self.need_gib) for name in self.built)

    def order(self, method: str) -> list[str]:
        return [name for name, asked in self.log if asked == method]


@dataclass
class Pretended:
    """A worker that answers at once."""

    world: World
    name: str

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Reply:
        assert timeout_s > 0
        self.world.log.append((self.name, method))
        self.world.timeouts_s[self.name, method] = timeout_s
        reply = self.reply(method, *arguments)
        if reply.status == "error":  # as with a real one
            self.stop()
        return reply

    def reply(self, method: str, *arguments: Any) -> Reply:
        if method == "time" and self.name not in self.world.built:
            return Reply(status="error", reason="nothing was built")
        if (self.name, method) in self.world.planted:
            if method == "build":
                self.world.built.add(self.name)
            return self.world.planted[self.name, method]()
        if method == "time" and self.world.free_gib is not None:
            more_gib = self.world.need_gib - self.world.idle_gib.get(self.name, self.world.need_gib)
            if more_gib > self.world.left_gib():
                return Reply(status="error", reason="out of memory", is_out_of_memory=True)
        return Reply(status="ok", value=getattr(self, method)(*arguments))

    def interrupt(self) -> None:
        self.stop()

    def stop(self) -> None:
        self.world.built.discard(self.name)

    def start_up(self) -> dict[str, Any]:
        return self.device_facts()

    def device_facts(self) -> dict[str, Any]:
        left = None if self.world.free_gib is None else int(self.world.left_gib() * GIB)
        return {"name": "Some GPU", "free_bytes": left}

    def measure_ceilings(self) -> Ceilings:
        return Ceilings(matmul_flops_per_s={"fp32": 1e12}, matmul_size=8, copy_bytes_per_s=1e9, copy_bytes=8)

    def count_work(self, name: str) -> Work:
        return Work(num_flops=10, num_min_bytes=10)

    def unavailable(self, system: System, name: str) -> str | None:
        return "not today" if system.name == "tf32-compile" else None

    def measure_passes(self, num_nodes: int) -> scaling.PassFacts:
        return scaling.PassFacts(num_dynamo_nodes=num_nodes, num_joint_nodes=3, stage_ms={"plan": 1.0}, compile_s=1.0)

    def measure_dispatch(self, what: str) -> scaling.DispatchFacts:
        return scaling.DispatchFacts(what=what, inductor_us=(1.0,), fxamp_us=(2.0,))

    def measure_swaps(self, what: str) -> scaling.SwapFacts:
        return scaling.SwapFacts(what=what, kept_us=(1.0,), swapped_us=(2.0,))

    def measure_variants(self, num_regions: int | None) -> scaling.VariantFacts:
        num_variants = 1 if num_regions is None else 2 ** (num_regions + 1)
        return scaling.VariantFacts(
            num_variants=num_variants, num_parameters=10, host_bytes=5, device_bytes=None, compile_s=1.0
        )

    def build(self, name: str, num_parallel_builds: int) -> Any:
        self.world.built.add(self.name)
        self.world.num_together[self.name] = num_parallel_builds
        reserved = int(self.world.need_gib * GIB)
        memory = None
        if self.world.free_gib is not None:
            idle = int(self.world.idle_gib.get(self.name, self.world.need_gib) * GIB)
            memory = Memory(allocated_bytes=reserved, reserved_bytes=reserved, idle_bytes=idle)
        return facts(rough_step_ms=50.0, memory=memory, num_parallel_builds=num_parallel_builds, launches=None)

    def time(self, num_steps: int) -> float:
        return 20.0 if self.name.startswith("fxamp") else 10.0

    def profile(self) -> Launches | None:
        return facts().launches

    def warm_compile(self) -> float:
        self.world.built.discard(self.name)
        return 3.0

    def release(self) -> None:
        self.world.built.discard(self.name)


NAMES = (ANCHOR, "fp32-eager", "fp32-compile", "fxamp-bf16")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        device_type="cpu",
        protocol="full",
        workloads=("mlp-small",),
        systems=NAMES,
        num_repetitions=4,
        block_ms=100,
        num_jobs=1,
        num_threads=None,
        compiles_again=True,
        build_timeout_s=100,
        budget_s=None,
        is_fresh=False,
        retries_errors=False,
        reuses_peers=False,
        does_scaling=False,
        results=tmp_path,
        record=tmp_path / "record",
        command="python -m bench",
        commit="abc",
    )


def taking(gib: float) -> Any:
    """Facts of a system that takes memory."""
    return facts(memory=Memory(allocated_bytes=int(gib * GIB), reserved_bytes=int(gib * GIB)))


def go(config: Config, world: World) -> dict[str, Measurement]:
    """Runs, and returns the last row of each system on the first workload."""
    bench = Bench(config, world.hire, Console(file=io.StringIO()))
    bench.measure_all()
    found = [r for r in rows.read(bench.path) if isinstance(r, Measurement) and r.workload == config.workloads[0]]
    return {r.system: r for r in found}


# ---- turns -----------------------------------------------------------------------------------------------------------
def test_systems_take_turns_and_who_begins_moves_on(config):
    world = World()
    go(config, world)
    turns = iter(world.order("time"))
    take: Callable[[], list[str]] = lambda: [next(turns) for _ in NAMES]  # noqa: E731
    assert take() == list(NAMES)  # calibration
    assert [take() for _ in range(4)] == [rotated(NAMES, i) for i in range(4)]
    assert next(turns, None) is None


def test_rotation():
    assert [rotated("abc", i) for i in range(4)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert rotated([], 3) == []


def test_rows_hold_times_ratios_and_everything_else(config):
    found = go(config, World())
    assert found.keys() == set(NAMES)
    ours = found["fxamp-bf16"]
    assert ours.timing is not None
    assert ours.timing.step_ms == (20.0,) * 4
    assert ours.timing.anchor_ratios == (2.0,) * 4
    assert ours.timing.num_steps_per_block == 5  # of 20 ms, in 100
    assert set(ours.timing.together) == set(NAMES)
    assert (ours.status, ours.warm_compile_s, ours.family, ours.precision) == ("ok", 3.0, "fxamp", "bf16")
    assert ours.facts is not None
    assert ours.facts.launches == facts().launches  # of "profile": "build" has none


def test_profiling_comes_behind_all_timing(config):
    world = World()
    go(config, world)
    methods = [method for _, method in world.log]
    last_time = len(methods) - 1 - methods[::-1].index("time")
    assert methods.index("profile") > last_time


# ---- failures --------------------------------------------------------------------------------------------------------
def test_a_failed_build_is_a_row_and_the_rest_goes_on(config):
    failed = Reply(status="error", reason="RuntimeError: no")
    found = go(config, World(planted={("fp32-compile", "build"): lambda: failed}))
    row = found["fp32-compile"]
    assert (row.status, row.reason, row.timing, row.facts) == ("error", "RuntimeError: no", None, None)
    assert found["fxamp-bf16"].timing is not None


def test_who_fails_in_a_turn_drops_out(config):
    replies: Iterator[Reply] = iter([Reply(status="ok", value=10.0)] * 2 + [Reply(status="error", reason="died")])
    found = go(config, World(planted={("fp32-compile", "time"): lambda: next(replies)}))
    assert (found["fp32-compile"].status, found["fp32-compile"].reason) == ("error", "died")
    assert found["fxamp-bf16"].timing is not None
    assert "fp32-compile" not in found["fxamp-bf16"].timing.together


def test_without_the_anchor_the_others_are_measured(config):
    failed = Reply(status="error", reason="no")
    found = go(config, World(planted={(ANCHOR, "build"): lambda: failed}))
    timing = found["fxamp-bf16"].timing
    assert timing is not None
    assert timing.anchor_ratios == ()
    assert found[ANCHOR].status == "error"


def test_what_is_not_available_is_a_row_and_never_built(config):
    world = World()
    found = go(replace(config, systems=(*NAMES, "tf32-compile")), world)
    assert (found["tf32-compile"].status, found["tf32-compile"].reason) == ("unavailable", "not today")
    assert "tf32-compile" not in world.order("build")


def test_without_anything_that_works_there_are_rows(config):
    failed = Reply(status="error", reason="no")
    found = go(config, World(planted={(name, "build"): lambda: failed for name in NAMES}))
    assert {row.status for row in found.values()} == {"error"}
    assert found.keys() == set(NAMES)


def test_a_workload_without_its_package(config, monkeypatch):
    monkeypatch.setattr(run.workloads.Workload, "missing", lambda _: "nothing is not installed")
    world = World()
    found = go(config, world)
    assert {row.reason for row in found.values()} == {"nothing is not installed"}
    assert world.order("build") == []


def test_a_device_that_does_not_answer_ends_the_run(config):
    failed = Reply(status="error", reason="no driver")
    with pytest.raises(RuntimeError, match="no driver"):
        go(config, World(planted={("device", "start_up"): lambda: failed}))


# ---- what is known already -------------------------------------------------------------------------------------------
def test_what_is_known_is_left_out_and_the_anchor_comes_along(config):
    go(config, World())
    again = World()
    go(config, again)
    assert again.order("build") == []

    more = World()
    found = go(replace(config, systems=(*NAMES, "bf16-autocast-eager")), more)
    assert sorted(more.order("build")) == sorted((ANCHOR, "bf16-autocast-eager"))
    assert found["bf16-autocast-eager"].timing is not None
    assert found["bf16-autocast-eager"].timing.anchor_ratios == (1.0,) * 4


def test_fresh_measures_all_again(config):
    go(config, World())
    again = World()
    go(replace(config, is_fresh=True), again)
    assert sorted(again.order("build")) == sorted(NAMES)


def test_errors_are_tried_again_when_asked_for(config):
    failed = Reply(status="error", reason="no")
    go(config, World(planted={("fp32-compile", "build"): lambda: failed}))
    again = World()
    go(config, again)
    assert again.order("build") == []
    found = go(replace(config, retries_errors=True), again)
    assert sorted(again.order("build")) == sorted((ANCHOR, "fp32-compile"))
    assert found["fp32-compile"].status == "ok"


def test_a_change_of_fxamp_outdates_its_rows_and_if_wished_no_others(config, monkeypatch):
    go(config, World())
    bench_files = {run.origin.ROOT / "bench" / name for name in run.origin.MEASURING}
    digest = run.origin.digest

    def changed(root: Path, paths: Any) -> str:
        paths = set(paths)
        return digest(root, paths) if paths == bench_files else "changed"

    monkeypatch.setattr(run.origin, "digest", changed)
    reusing, not_reusing = World(), World()
    go(replace(config, reuses_peers=True), reusing)
    assert sorted(reusing.order("build")) == sorted((ANCHOR, "fxamp-bf16"))
    go(config, not_reusing)
    assert "fp32-eager" in not_reusing.order("build")


# ---- time ------------------------------------------------------------------------------------------------------------
def test_the_control_reports_no_cold_compile_time(config):
    """It compiles from the caches of the anchor."""
    found = go(replace(config, systems=(*NAMES, CONTROL)), World())
    cold_s = {name: row.facts.cold_compile_s for name, row in found.items() if row.facts is not None}
    assert cold_s[CONTROL] is None
    assert cold_s[ANCHOR] is not None


def test_a_spent_budget_begins_nothing(config):
    world = World()
    assert go(replace(config, budget_s=0.0), world) == {}
    assert world.order("build") == []


@dataclass
class Clock:
    """Time that passes only where a test says so."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def takes(self, seconds: float, value: Any) -> Callable[[], Reply]:
        def wait() -> Reply:
            self.now_s += seconds
            return Reply(status="ok", value=value)

        return wait


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


BUILT = facts(rough_step_ms=50.0, launches=None)


def test_what_is_built_when_time_is_short_is_timed(config, clock):
    world = World(planted={(name, "build"): clock.takes(200, BUILT) for name in NAMES})
    found = go(replace(config, budget_s=415.0), world)
    assert [found[name].timing is not None for name in found] == [True, True]  # the anchor and the next one
    assert set(found) == {ANCHOR, "fp32-eager"}


def test_no_build_is_begun_that_would_take_longer_than_is_left(config, clock):
    """The anchor took 100 s; two at once may take 1.3 times that."""
    world = World(planted={(name, "build"): clock.takes(100, BUILT) for name in NAMES})
    go(replace(config, budget_s=225.0, num_jobs=1), world)
    assert world.order("build") == [ANCHOR, "fp32-eager"]
    assert world.timeouts_s["fp32-eager", "build"] <= 100  # the limit for any build
    assert go(replace(config, budget_s=50.0, is_fresh=True), World()).keys() == set(NAMES)  # nothing is known: 20 s do


def test_who_is_late_because_the_budget_is_short_is_no_error(config, clock):
    late = Reply(status="error", reason="no answer", is_late=True)
    world = World(planted={("fp32-eager", "build"): lambda: late})
    assert "fp32-eager" not in go(replace(config, budget_s=60.0), world)
    assert go(config, world)["fp32-eager"].status == "error"  # it had all the time that any build has


def test_builds_at_once_have_the_same_deadline(config, clock):
    world = World(planted={(name, "build"): clock.takes(1, BUILT) for name in NAMES})
    go(replace(config, budget_s=60.0, num_jobs=2), world)
    first, second = (world.timeouts_s[name, "build"] for name in NAMES[:2])
    assert first == second
    assert first == pytest.approx(60 - 4 * 2 * 0.1)  # three turns of 100 ms, and one to begin with
    # By now two seconds are gone, and a step is known to take 50 ms: each turn begins with one that is not timed.
    assert world.timeouts_s[NAMES[2], "build"] == pytest.approx(58 - 4 * 4 * (0.1 + 0.05))


def test_time_that_runs_out_ends_turns_behind_three(config, clock):
    world = World(planted={(name, "time"): clock.takes(10, 10.0) for name in NAMES})
    found = go(replace(config, num_repetitions=9, budget_s=100.0), world)
    timings = [row.timing for row in found.values()]
    assert [len(t.step_ms) for t in timings if t is not None] == [3] * len(NAMES)


def test_what_is_left_for_another_run(config, clock):
    world = World(planted={(name, "build"): clock.takes(100, BUILT) for name in NAMES})
    short = replace(config, budget_s=215.0, workloads=("mlp-small", "gpt-small"))
    bench = Bench(short, world.hire, Console(file=io.StringIO()))
    bench.measure_all()
    assert bench.left() == {"mlp-small": ["fp32-compile", "fxamp-bf16"], "gpt-small": list(NAMES)}


def test_processes_of_a_gpu_start_while_its_ceilings_are_measured(config):
    world = World(free_gib=100.0)
    go(replace(config, device_type="cuda", systems=(*NAMES, "tf32-compile")), world)
    started = {name for name, method in world.log[: world.log.index(("device", "count_work"))] if method == "device_facts"}
    assert started >= set(NAMES)
    assert "tf32-compile" not in started  # it is not available


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_groups_by_memory_each_beside_the_anchor(config):
    """6 GiB, 2 for each, and 1.4 times that has to be free: the anchor and one other at a time."""
    found = go(replace(config, device_type="cuda"), World(free_gib=6.0, need_gib=2.0))
    timings = [found[name].timing for name in NAMES]
    assert [set(t.together) for t in timings if t is not None][1:] == [{ANCHOR, name} for name in NAMES[1:]]
    assert all(t is not None and len(t.anchor_ratios) == 4 for t in timings)
    assert all(row.facts is not None and row.facts.launches == facts().launches for row in found.values())


def test_as_many_at_once_as_jobs_and_memory_allow(config):
    world = World(free_gib=100.0, need_gib=2.0)
    found = go(replace(config, device_type="cuda", num_jobs=3), world)
    builds = {name: row.facts.num_parallel_builds for name, row in found.items() if row.facts is not None}
    assert builds == {ANCHOR: 3, "fp32-eager": 3, "fp32-compile": 3, "fxamp-bf16": 1}
    timing = found["fxamp-bf16"].timing
    assert timing is not None
    assert set(timing.together) == set(NAMES)


def test_what_is_on_record_says_how_many_are_built_at_once(config):
    """Without a record a quarter of what is free is thought to be needed, whoever it is."""
    roomy = replace(config, device_type="cuda", num_jobs=4)
    rows.append(
        roomy.record / "some-gpu.jsonl",
        [measurement(name, run=make.run(fxamp_source="old"), workload="mlp-small", facts=taking(gib))
         for name, gib in ((ANCHOR, 10), ("fp32-eager", 30), ("fp32-compile", 20))],
    )  # fmt: skip
    world = World(free_gib=100.0)
    go(roomy, world)
    # 1.4 * (10 + 30) fits, and 1.4 * (10 + 30 + 20) does too, but not 30 more for one of which nothing is on record.
    assert {world.num_together[name] for name in NAMES[:3]} == {3}
    assert world.num_together["fxamp-bf16"] == 1


def test_an_anchor_that_runs_out_of_memory_in_company_is_built_alone_first(config):
    full = Reply(status="error", reason="out of memory", is_out_of_memory=True)
    replies = iter([full])
    ok = Reply(status="ok", value=facts(rough_step_ms=50.0, launches=None))
    world = World(free_gib=100.0, planted={(ANCHOR, "build"): lambda: next(replies, ok)})
    found = go(replace(config, device_type="cuda", num_jobs=4), world)
    assert {row.status for row in found.values()} == {"ok"}
    assert world.order("build").count(ANCHOR) == 2
    assert world.order("release").index("fp32-eager") >= 0
    timing = found["fxamp-bf16"].timing
    assert timing is not None
    assert set(timing.together) == set(NAMES)


def test_what_was_given_back_between_turns_is_needed_again(config):
    """The anchor gives back 1.5 GiB behind each turn. Beside three others it would not get them again."""
    gpu, world = replace(config, device_type="cuda"), World(free_gib=7.4, need_gib=2.0, idle_gib={ANCHOR: 0.5})
    timings = [row.timing for row in go(gpu, world).values()]
    assert [len(t.anchor_ratios) for t in timings if t] == [4, 4, 4, 4]
    assert sorted(len(t.together) for t in timings if t) == [2, 3, 3, 3]
    assert world.order("build").count(ANCHOR) == 1  # it was never short of memory
    # Who gives nothing back takes nothing again.
    found = go(replace(gpu, is_fresh=True), World(free_gib=8.9, need_gib=2.0))
    assert {row.timing.together for row in found.values() if row.timing} == {NAMES}


def test_an_anchor_that_runs_out_of_memory_in_a_turn_goes_on_with_less_company(config):
    """All were built at once, each with what it needs, and hold more between turns than anybody knew."""
    world = World(free_gib=10.0, need_gib=1.0, idle_gib={ANCHOR: 0.5})
    full, ok = Reply(status="error", reason="out of memory", is_out_of_memory=True), Reply(status="ok", value=10.0)
    world.planted[ANCHOR, "time"] = lambda: full if len(world.built) > 2 else ok
    found = go(replace(config, device_type="cuda", num_jobs=4), world)
    timings = [row.timing for row in found.values()]
    assert [len(t.anchor_ratios) for t in timings if t] == [4, 4, 4, 4]
    assert {t.together for t in timings if t} == {(ANCHOR, name) for name in NAMES[1:]}


def test_who_leaves_no_memory_for_the_anchor_even_alone_says_so(config):
    world = World(free_gib=10.0)
    full, ok = Reply(status="error", reason="out of memory", is_out_of_memory=True), Reply(status="ok", value=10.0)
    world.planted[ANCHOR, "time"] = lambda: full if "fp32-compile" in world.built else ok
    found = go(replace(config, device_type="cuda"), world)
    assert found["fp32-compile"].reason == f"{ANCHOR} beside it: out of memory"
    timings = [found[name].timing for name in NAMES if name != "fp32-compile"]
    assert [len(t.anchor_ratios) for t in timings if t] == [4, 4, 4]


def test_who_tunes_kernels_is_built_alone_and_last(config):
    tuner = "bf16-autocast-max-autotune"
    world = World()
    found = go(replace(config, systems=(tuner, *NAMES), num_jobs=4), world)
    assert world.order("build")[-1] == tuner
    tuned = found[tuner].facts
    assert tuned is not None
    assert tuned.num_parallel_builds == 1


def test_who_compiles_alone_has_all_threads():
    known = systems.all_systems()
    assert [run.num_beside(known.get(name), 6) for name in ("fxamp-bf16-max-autotune", ANCHOR, "the device")] == [1, 6, 1]


def test_who_runs_out_of_memory_in_company_tries_again_beside_the_anchor(config):
    full = Reply(status="error", reason="out of memory", is_out_of_memory=True)
    replies = iter([full])

    def build() -> Reply:
        return next(replies, Reply(status="ok", value=facts(rough_step_ms=50.0, launches=None)))

    world = World(free_gib=100.0, planted={("fp32-compile", "build"): build})
    found = go(replace(config, device_type="cuda"), world)
    assert world.order("build").count("fp32-compile") == 2
    timing = found["fp32-compile"].timing
    assert timing is not None
    assert set(timing.together) == {ANCHOR, "fp32-compile"}


def test_who_runs_out_of_memory_in_a_turn_tries_again_too(config):
    full = Reply(status="error", reason="out of memory", is_out_of_memory=True)
    replies = iter([Reply(status="ok", value=10.0), full])
    world = World(
        free_gib=100.0,
        planted={("fp32-compile", "time"): lambda: next(replies, Reply(status="ok", value=10.0))},
    )
    found = go(replace(config, device_type="cuda"), world)
    assert world.order("build").count("fp32-compile") == 2
    timing = found["fp32-compile"].timing
    assert timing is not None
    assert set(timing.together) == {ANCHOR, "fp32-compile"}
    assert found["fxamp-bf16"].timing is not None


def test_who_runs_out_of_memory_alone_is_an_error(config):
    full = Reply(status="error", reason="out of memory", is_out_of_memory=True)
    world = World(free_gib=100.0, planted={("fp32-compile", "build"): lambda: full})
    found = go(replace(config, device_type="cuda"), world)
    assert (found["fp32-compile"].status, found["fp32-compile"].reason) == ("error", "out of memory")
    assert world.order("build").count("fp32-compile") == 2


# ---- protocols -------------------------------------------------------------------------------------------------------
def test_quick_runs_report_no_compile_times_and_stand_apart(config):
    bench = Bench(replace(config, protocol="quick", compiles_again=False), World().hire, Console(file=io.StringIO()))
    bench.measure_all()
    assert bench.path.name.endswith("-quick.jsonl")
    measured = [r for r in rows.read(bench.path) if isinstance(r, Measurement)]
    assert {(r.facts.cold_compile_s, r.warm_compile_s) for r in measured if r.facts is not None} == {(None, None)}


def test_scaling(config):
    world = World()
    bench = Bench(replace(config, does_scaling=True, workloads=()), world.hire, Console(file=io.StringIO()))
    bench.measure_all()
    found = list(rows.read(bench.path))
    assert [r.num_dynamo_nodes for r in found if isinstance(r, PassTime)] == list(scaling.NUM_NODES)
    assert [r.what for r in found if isinstance(r, Dispatch)] == list(scaling.DISPATCHES)
    assert [r.what for r in found if isinstance(r, Swap)] == list(scaling.SWAPS)
    assert [r.num_variants for r in found if isinstance(r, VariantMemory)] == [1, 2, 4, 8]
    swept = [r for r in found if isinstance(r, Measurement)]
    assert {r.sweep_over for r in swept} == {"layers", "batch size", None}
    assert {r.workload for r in swept if r.sweep_over is None} == {"gpt-small"}
    assert {r.system for r in swept} == {ANCHOR, "fxamp-bf16"}
    assert {r.facts.launches for r in swept if r.sweep_over and r.facts} == {None}  # of sweeps only times are shown


def scale(config: Config, world: World) -> list[tuple[str, Any]]:
    """Rows of a run that only scales: their kinds, and what tells them apart."""
    bench = Bench(replace(config, does_scaling=True, workloads=()), world.hire, Console(file=io.StringIO()))
    with run._sigterm_interrupts(), contextlib.suppress(KeyboardInterrupt):
        bench.measure_all()
    keys = {
        Dispatch: lambda r: r.what,
        Swap: lambda r: r.what,
        VariantMemory: lambda r: r.num_variants,
        PassTime: lambda r: r.num_dynamo_nodes,
        Measurement: lambda r: (r.workload, r.system),
        CeilingsRow: lambda _: None,
    }
    return [(r.kind, keys[type(r)](r)) for r in rows.read(bench.path)]


def test_what_of_the_scaling_is_known_is_not_asked_again(config):
    first = World()
    all_rows = scale(config, first)
    again = World()
    assert scale(config, again) == [*all_rows, ("ceilings", None)]
    assert {method for _, method in again.log} == {"start_up", "measure_ceilings"}


def test_a_scaling_that_is_ended_keeps_its_rows(config):
    """SIGTERM while the device measures the second number of variants."""
    world = World()
    ok = World().hire(None)

    def answer() -> Reply:
        if world.order("measure_variants") == ["device"]:
            return Reply(status="ok", value=ok.measure_variants(None))
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM came late")

    world.planted["device", "measure_variants"] = answer
    assert scale(config, world)[1:] == [
        *(("dispatch", what) for what in scaling.DISPATCHES),
        *(("swap", what) for what in scaling.SWAPS),
        ("variant_memory", 1),
    ]


def test_a_scaling_that_fails_in_one_thing_goes_on(config):
    world = World(planted={("device", "measure_swaps"): lambda: Reply(status="error", reason="no")})
    kinds = {kind for kind, _ in scale(config, world)}
    assert kinds == {"ceilings", "dispatch", "variant_memory", "measurement", "pass_time"}


def test_a_scaling_begins_with_what_is_quick(config, clock):
    """Passes on ten times the nodes take ten times as long."""
    facts = World().hire(None).measure_passes(100)
    world = World(planted={("device", "measure_passes"): clock.takes(30, facts)})
    assert ("pass_time", 100) in scale(replace(config, budget_s=100.0), world)
    assert len(world.order("measure_passes")) == 1  # 70 s are left
    assert world.log[-1] == ("device", "measure_passes")
    assert world.log[1:3] == [("device", "measure_ceilings"), ("device", "measure_dispatch")]
    assert world.log.index(("device", "measure_swaps")) < world.log.index((ANCHOR, "build"))


def test_without_time_nothing_of_a_scaling_is_begun(config, clock):
    world = World()
    clock.now_s = 0.0
    world.planted["device", "measure_ceilings"] = clock.takes(96, World().hire(None).measure_ceilings())
    assert scale(replace(config, budget_s=100.0), world) == [("ceilings", None)]


# ---- interruptions ---------------------------------------------------------------------------------------------------
def interrupted(config: Config, world: World, name: str, method: str, *before: Reply) -> dict[str, Measurement]:
    """Rows of a run that gets SIGTERM in a question to a worker, behind some that were answered."""
    left = iter(before)

    def answer() -> Reply:
        found = next(left, None)
        if found is None:
            os.kill(os.getpid(), signal.SIGTERM)
            return Reply(status="error", reason="killed")
        return found

    world.planted[name, method] = answer
    bench = Bench(config, world.hire, Console(file=io.StringIO()))
    with run._sigterm_interrupts(), pytest.raises(KeyboardInterrupt):
        bench.measure_all()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return {r.system: r for r in rows.read(bench.path) if isinstance(r, Measurement)}


TIMED = Reply(status="ok", value=10.0)


def test_an_interrupted_run_keeps_what_took_three_turns(config):
    """"time" is asked once before the turns."""
    found = interrupted(config, World(), "fp32-compile", "time", *[TIMED] * 4)
    timings = {name: row.timing for name, row in found.items()}
    assert timings.keys() == set(NAMES)
    assert {len(t.step_ms) for t in timings.values() if t is not None} == {3}


def test_fewer_turns_leave_nothing_but_the_request_for_another_run(config):
    assert interrupted(config, World(), "fp32-compile", "time", *[TIMED] * 3) == {}


def test_an_interrupted_run_keeps_what_the_groups_before_had(config):
    """One system fits beside the anchor: the second group is interrupted while it is built."""
    world = World(free_gib=6.0, need_gib=2.0)
    found = interrupted(replace(config, device_type="cuda"), world, "fp32-compile", "build")
    assert found.keys() == {ANCHOR, "fp32-eager"}
    assert found["fp32-eager"].facts is not None
    assert found["fp32-eager"].facts.launches is not None
    assert all(row.timing is not None for row in found.values())


def test_an_interruption_ends_the_processes_that_are_waited_for(config, monkeypatch):
    """Else the run would wait for a compilation before it writes."""
    ended: list[str] = []
    monkeypatch.setattr(Pretended, "interrupt", lambda self: ended.append(self.name))
    interrupted(replace(config, num_jobs=2), World(), "fp32-eager", "build")
    assert set(ended) >= {ANCHOR, "fp32-eager"}


def test_a_run_that_is_killed_keeps_finished_workloads(config):
    def killed() -> Reply:
        raise KeyboardInterrupt

    world = World()
    bench = Bench(replace(config, workloads=("mlp-small", "gpt-small")), world.hire, Console(file=io.StringIO()))
    calls = iter(range(100))

    def count_work() -> Reply:
        return Reply(status="ok", value=Work(num_flops=1, num_min_bytes=1)) if next(calls) == 0 else killed()

    world.planted["device", "count_work"] = count_work
    with pytest.raises(KeyboardInterrupt):
        bench.measure_all()
    kinds = [type(r) for r in rows.read(bench.path)]
    assert kinds == [CeilingsRow, *[Measurement] * len(NAMES)]
