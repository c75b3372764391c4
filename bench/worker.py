"""A process for each system: nothing that one of them compiles, sets, leaks or breaks reaches another.

The main process sends the name of a method of `Server` and its arguments through a pipe, and gets back a `Reply`. While
times are taken only one worker is asked at a time; the others sleep.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from bench import measure, scaling, systems, workloads
from bench.measure import Ceilings, CountCasts, Launches, Memory, Work
from bench.rows import Facts, Fxamp
from bench.systems import Runner, System
from bench.workloads import Batch, Parts, Workload
from fxamp import Amp, errors, graph

NUM_COMPILING_STEPS: Final = 3
"""Steps in which compilation may happen: the first compiles, the next two warm up and record CUDA graphs."""

NUM_PROFILED_STEPS: Final = 3
NUM_MEMORY_STEPS: Final = 2
NUM_UNTIMED_STEPS: Final[Mapping[str, int]] = MappingProxyType({"cuda": 2, "cpu": 1})
"""At the begin of a turn. On a GPU the first takes memory from the driver, and the second may need a little more."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a worker answers."""

    status: Literal["ok", "error", "unavailable"]
    value: Any = None
    reason: str | None = None
    is_out_of_memory: bool = False
    is_late: bool = False
    """Was there no answer in time?"""


# ---- inside the process ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Job:
    """A workload on the worker's system."""

    workload: Workload
    runner: Runner
    batches: Iterator[Sequence[Batch]]

    def step(self) -> Tensor:
        return self.runner.step(next(self.batches))


class Server:
    """One system, and at most one workload at a time on it. Without a system: what is measured of device and compiler
    alone."""

    def __init__(self, system: System | None, device_type: str) -> None:
        self.system, self.device_type = system, device_type
        self._job: _Job | None = None
        self._steady_ms = 0.0
        self._variant_meter: scaling.VariantMeter | None = None

    # -- of the device -------------------------------------------------------------------------------------------------
    def start_up(self) -> dict[str, Any]:
        """Compiles something small, so that what only the first compilation of a process does is in no measurement."""
        if self.system is not None and self.system.compiler != "none":
            x = torch.randn(8, 8, device=self.device_type, requires_grad=True)
            torch.compile(lambda x: (x * 2).sum())(x).backward()
        return self.device_facts()

    def device_facts(self) -> dict[str, Any]:
        return measure.device_facts(self.device_type)

    def measure_ceilings(self) -> Ceilings:
        ceilings = measure.measure_ceilings(self.device_type)
        self._give_memory_back()
        return ceilings

    def count_work(self, name: str) -> Work:
        return measure.count_work(workloads.find(name))

    def unavailable(self, system: System, name: str) -> str | None:
        return systems.unavailable(system, workloads.find(name), self.device_type)

    def measure_passes(self, num_nodes: int) -> scaling.PassFacts:
        return scaling.measure_passes(num_nodes)

    def measure_dispatch(self, what: str) -> scaling.DispatchFacts:
        return scaling.measure_dispatch(self.device_type, what)

    def measure_swaps(self, what: str) -> scaling.SwapFacts:
        return scaling.measure_swaps(self.device_type, what)

    def measure_variants(self, num_regions: int | None) -> scaling.VariantFacts:
        self._variant_meter = self._variant_meter or scaling.VariantMeter(self.device_type)
        return self._variant_meter.measure(num_regions)

    # -- of a workload -------------------------------------------------------------------------------------------------
    def build(self, name: str, num_parallel_builds: int) -> Facts:
        """Compiles and warms up. The first steps are those over which losses are compared."""
        self.release()
        counters.clear()
        workload, casts = workloads.find(name), CountCasts()
        parts = workload.parts(self.device_type)
        expected = _expected(workload, parts)
        compile_s, losses, output = self._start(workload, parts, casts)
        job = self._current()
        num_skipped = None if job.runner.read_skipped is None else job.runner.read_skipped()  # before there are more steps
        return Facts(
            losses=losses if workload.kind == "train" else (),
            output_error=None if expected is None else _relative_error(output, expected),
            cold_compile_s=compile_s,
            num_parallel_builds=num_parallel_builds,
            memory=self._memory(job),
            launches=None,
            rough_step_ms=self._steady_ms,
            num_casts=casts.num_casts if casts.num_graphs else None,
            cast_bytes=casts.num_bytes if casts.num_graphs else None,
            num_graphs=counters["stats"]["unique_graphs"],
            num_graph_breaks=sum(counters["graph_break"].values()),
            num_cuda_graph_skips=counters["inductor"]["cudagraph_skips"],
            fxamp=None if job.runner.amp is None else _fxamp_facts(job.runner.amp),
            note=job.runner.note,
            num_skipped=num_skipped,
        )

    def time(self, num_steps: int) -> float:
        """Mean time of a step, in ms, behind some that are not timed: memory and caches come back after a pause."""
        job = self._current()
        for _ in range(NUM_UNTIMED_STEPS[self.device_type]):
            job.step()

        def block() -> None:
            for _ in range(num_steps):
                job.step()

        time_ms = measure.time_block_ms(block, self.device_type) / num_steps
        self._give_memory_back()
        return time_ms

    def profile(self) -> Launches | None:
        """Counts launches. Comes behind all timing: a profiler that was on once may slow launches down for good."""
        if self.device_type != "cuda":
            return None
        launches = measure.profile_launches(self._current().step, NUM_PROFILED_STEPS)
        self._give_memory_back()
        return launches

    def warm_compile(self) -> float | None:
        """Compiles the same again, in this process, after a reset, from the caches on disk. Ends the workload."""
        workload = self._current().workload
        self.release()
        # Observed as before: the observer is part of the caches' keys.
        compile_s, _, _ = self._start(workload, workload.parts(self.device_type), CountCasts())
        self.release()
        return compile_s

    def release(self) -> None:
        """Forgets the workload and all that was compiled for it."""
        self._job = None
        torch.compiler.reset()
        gc.collect()
        self._give_memory_back()

    # -- parts of these ------------------------------------------------------------------------------------------------
    def _current(self) -> _Job:
        assert self._job is not None, "nothing was built"
        return self._job

    def _start(
        self, workload: Workload, parts: Parts, casts: CountCasts
    ) -> tuple[float | None, tuple[float, ...], Tensor]:
        """Sets up and runs the first steps. Returns (compile time, losses, what the first batch gave last)."""
        assert self.system is not None
        runner = systems.prepare(self.system, workload, parts, self.device_type)
        batches = _low_inputs(parts.batches, self.system)
        self._job = job = _Job(workload=workload, runner=runner, batches=_rounds(batches, workload.num_micro_batches))
        results: list[Tensor] = []

        def run(num_steps: int) -> float:
            def steps() -> None:
                # Clones: the next replay of a CUDA graph overwrites what this one returned.
                results.extend(job.step().clone() for _ in range(num_steps))

            return measure.time_block_ms(steps, self.device_type)

        num_more = workload.num_loss_steps - NUM_COMPILING_STEPS
        with _observing(casts):
            first_ms = run(NUM_COMPILING_STEPS)
            self._steady_ms = run(num_more) / num_more
        compile_s = max(first_ms - NUM_COMPILING_STEPS * self._steady_ms, 0.0) / 1e3
        losses = [float(x) for x in results] if workload.kind == "train" else []
        first_batch_again = results[(len(results) - 1) // len(batches) * len(batches)]
        return compile_s if self.system.compiler != "none" else None, tuple(losses), first_batch_again

    def _memory(self, job: _Job) -> Memory | None:
        if self.device_type != "cuda":
            return None
        memory = measure.peak_memory(job.step, NUM_MEMORY_STEPS)
        self._give_memory_back()
        return memory

    def _give_memory_back(self) -> None:
        """What the allocator only keeps for later, so that more systems fit beside each other."""
        if self.device_type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _observing(casts: CountCasts) -> Iterator[None]:
    from torch._inductor import config

    with config.patch(joint_custom_pre_pass=casts):
        yield


def _rounds(batches: Sequence[Batch], num_micro_batches: int) -> Iterator[Sequence[Batch]]:
    """Micro-batches for one step after another, round and round."""
    forever = itertools.cycle(batches)
    while True:
        yield tuple(itertools.islice(forever, num_micro_batches))


def _low_inputs(batches: Sequence[Batch], system: System) -> Sequence[Batch]:
    """Inputs as a data loader for low weights would give them."""
    if not system.stores_low:
        return batches
    dtype = systems.DTYPES[system.precision]
    return [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in batches]


def _expected(workload: Workload, parts: Parts) -> Tensor | None:
    """Of inference: what eager fp32 says to the first batch."""
    if workload.kind == "train":
        return None
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        return parts.model(parts.batches[0][0])


def _relative_error(output: Tensor, expected: Tensor) -> float:
    return float((output.double() - expected.double()).norm() / expected.double().norm())


def _fxamp_facts(amp: Amp) -> Fxamp:
    report = amp.report()
    changes = [c for v in report.variants for c in (*v.changes, *v.joint_changes)]
    notes = dict.fromkeys(note for source in (*report.variants, report) for note in source.notes)
    return Fxamp(
        precisions=report.precisions,
        num_low_ops=report.num_low_ops,
        num_own_casts=report.num_casts,
        own_cast_bytes=_own_cast_bytes(amp),
        pass_ms=sum(c.elapsed_ms for c in changes),
        notes=tuple(notes),
    )


def _own_cast_bytes(amp: Amp) -> int | None:
    """Bytes of the casts that fxamp has in its joint graphs; None where one is not on record."""
    total = 0
    for variant in amp.report().variants:
        try:
            joint = variant.joint
        except errors.NeedsCaptured:
            return None
        for node in joint.graph.nodes:
            if graph.own_cast(node) is not None:
                total += measure.num_cast_bytes(graph.value_of(node.all_input_nodes[0]), graph.value_of(node))
    return total


def describe(error: BaseException) -> str:
    """An error in one line, without the folders of this machine."""
    first_line = str(error).strip().split("\n")[0]
    return without_folders(f"{type(error).__name__}: {first_line}")


def without_folders(text: str) -> str:
    """Absolute paths cut to their last part."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\":]+/)+", "", text)


def serve(
    connection: Connection,
    system: System | None,
    device_type: str,
    cache: Path,
    log: Path,
    num_threads: int | None,
    num_compile_threads: int,
) -> None:
    """Answers until the pipe is closed. Everything that is printed goes to a file: max-autotune alone prints pages."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they come to the whole group; the main process ends this one
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which compilers would inherit
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(num_compile_threads))
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    server = Server(system, device_type)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(answer(server, method, arguments))


def answer(server: Server, method: str, arguments: Sequence[Any]) -> Reply:
    """Calls a method. Whatever goes wrong in it becomes a row of the results, and never ends the run."""
    try:
        return Reply(status="ok", value=getattr(server, method)(*arguments))
    except errors.NotYet as error:
        return Reply(status="unavailable", reason=f"not in this version of fxamp: {error.what}")
    except systems.NotApplicable as error:
        return Reply(status="unavailable", reason=str(error))
    except torch.OutOfMemoryError as error:
        return Reply(status="error", reason=describe(error), is_out_of_memory=True)
    except Exception as error:
        return Reply(status="error", reason=describe(error))


# ---- in the main process ---------------------------------------------------------------------------------------------
class Worker:
    """The main process's end. The process starts with the first question, and anew after one that failed."""

    def __init__(
        self, system: System | None, device_type: str, *, log: Path, cache: Path, num_threads: int | None, num_jobs: int
    ) -> None:
        """`num_jobs`: how many compile beside each other, and share the cores."""
        self._system, self._device_type, self._log, self._cache = system, device_type, log, cache
        self._num_threads = num_threads
        self._num_compile_threads = max(1, (os.cpu_count() or 1) // num_jobs)
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._is_interrupted = False

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Reply:
        """One question. An error, a crash or silence beyond `timeout_s` ends the process and comes back as a Reply."""
        end_s = time.monotonic() + timeout_s
        if self._process is None:
            self._start()
            if self._is_interrupted:  # before there was a process to end
                self.stop()
                return Reply(status="error", reason="interrupted")
            started = self._exchange("start_up", (), end_s - time.monotonic())
            if started.status != "ok":
                return started
        return self._exchange(method, arguments, end_s - time.monotonic())

    def interrupt(self) -> None:
        """Ends the process for good. May come from another thread than the one that waits for an answer, which then gets an
        error at once; `stop` may not."""
        self._is_interrupted = True
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(timeout=0.1)  # what it would do on its own way out takes seconds, and nobody needs it
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._process = self._connection = None

    def _start(self) -> None:
        # "spawn": CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(
            target=serve,
            args=(
                theirs,
                self._system,
                self._device_type,
                self._cache,
                self._log,
                self._num_threads,
                self._num_compile_threads,
            ),
            daemon=True,
        )
        process.start()
        self._process = process
        theirs.close()  # else the end of the process would not close the pipe

    def _exchange(self, method: str, arguments: Sequence[Any], timeout_s: float) -> Reply:
        assert self._connection is not None
        assert self._process is not None
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(max(timeout_s, 0)):
                reason = f"no answer to {method} within {timeout_s:.0f} s"
                reply = Reply(status="error", reason=reason, is_late=True)
            else:
                reply = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            reason = f"the process ended ({self._process.exitcode}) in {method}: {self._last_words()}"
            reply = Reply(status="error", reason="interrupted" if self._is_interrupted else reason)
        if reply.status == "error":
            self.stop()
        return reply

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return without_folders(lines[-1]) if lines else "it printed nothing"
