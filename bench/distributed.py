"""torchrun --nproc-per-node 2 -m bench.distributed: a training step on several GPUs, of fxamp and its peers, in one job.

All systems are built one after another in the same processes, and take turns. DDP: every system has a model of its own.
FSDP2: the model needs all GPUs, so the systems compute with one model and one optimizer, each by its own compiled
blocks. "alone": every process trains by itself, at the same time, with the batch that it has under DDP.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, distributed, nn
from torch._dynamo import config as dynamo_config
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bench import measure, origin, report, rows, systems, workloads
from bench.__main__ import RESULTS, chosen
from bench.measure import Memory
from bench.models import LlamaStack
from bench.rows import Distributed, Run
from bench.systems import ANCHOR, System
from bench.worker import describe, without_folders
from bench.workloads import Batch, Parts, Workload

NUM_FIRST_STEPS: Final = 4
"""Steps that compile, warm up, rebuild DDP's buckets and record CUDA graphs."""
NUM_MORE_STEPS_OF_DDP: Final = 20
"""On CUDA, of all systems alike: before that a train step is not recorded, for its ranks have not agreed on it."""
NUM_ROUGH_STEPS: Final = 3
NUM_MEMORY_STEPS: Final = 2
RECOMPILE_LIMIT: Final = 64
"""Programs of one code object: the systems share theirs, and Dynamo's default is 8."""


# ---- what is measured --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload in a strategy, with its systems."""

    workload: Workload
    strategy: str
    systems: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.workload.name}/{self.strategy}"


def llama_of_all() -> Workload:
    """36 layers: 8.8e9 parameters, of which fp32 values, gradients and AdamW's state are 130 GiB."""
    return Workload(
        name="llama-4096-deep",
        about="36 Llama layers of hidden size 4096 written by hand, is_causal=True, B2 T2048 a process; reduced in fp32",
        size="full",
        model=lambda: LlamaStack(width=4096, num_heads=32, num_layers=36, num_positions=2048),
        batch=workloads.hidden_states(2, 2048, 4096),
        criterion=F.mse_loss,
        num_items=2 * 2048,
        learning_rate=1e-5,
    )


def all_cases(device_type: str) -> tuple[Case, ...]:
    """The most telling first."""
    names = (ANCHOR, "fxamp-bf16", "fxamp-bf16-train-step", "bf16-autocast-reduce-overhead", "fxamp-bf16-reduce-overhead")
    sharded = (ANCHOR, "fxamp-bf16")
    if device_type != "cuda":
        small, names = workloads.find("gpt-small"), names[:3]
        llama = replace(workloads.find("llama-small"), about="1 Llama layer of hidden size 256, 4 heads, B4 T64")
    else:
        gpt2 = workloads.find("gpt2-causal")
        small, llama = replace(gpt2, about=f"{gpt2.about} a process"), llama_of_all()
    return (
        Case(workload=small, strategy="ddp", systems=names),
        Case(workload=small, strategy="alone", systems=names[:2]),
        Case(workload=llama, strategy="fsdp2", systems=sharded),
    )


# ---- building ----------------------------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class Contender:
    """A system in a case, ready to run."""

    case: Case
    system: System
    step: Callable[[], Tensor]
    note: Callable[[], str | None]
    memory_before: Memory
    compile_s: float = 0.0
    losses: tuple[float, ...] = ()
    rough_ms: float = 0.0
    memory: Memory | None = None
    times_ms: list[float] = field(default_factory=list)


class Job:
    """What all ranks do together. Whatever depends on a clock or on luck is decided by all."""

    def __init__(self, device: torch.device, begin_s: float) -> None:
        self.device, self.begin_s = device, begin_s
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()

    def largest(self, *values: float) -> tuple[float, ...]:
        """Of each value, the largest of all ranks. Waits for them."""
        together = torch.tensor(values, device=self.device, dtype=torch.float64)
        distributed.all_reduce(together, distributed.ReduceOp.MAX)
        return tuple(together.tolist())

    def mean(self, values: Sequence[float]) -> tuple[float, ...]:
        together = torch.tensor(values, device=self.device, dtype=torch.float64)
        distributed.all_reduce(together)
        return tuple((together / self.num_ranks).tolist())

    def is_over(self, budget_s: float | None) -> bool:
        (elapsed_s,) = self.largest(time.monotonic() - self.begin_s)
        return budget_s is not None and elapsed_s > budget_s

    def batches(self, parts: Parts) -> Iterator[Sequence[Batch]]:
        """Of this rank, one for each step: another order on each rank."""
        at = self.rank
        while True:
            yield (parts.batches[at % len(parts.batches)],)
            at += 1


def build_whole(case: Case, system: System, job: Job) -> tuple[Callable[[], Tensor], Callable[[], str | None]]:
    """DDP, or each process by itself."""
    parts = case.workload.parts(str(job.device))
    around = DistributedDataParallel if case.strategy == "ddp" else systems.as_it_is
    runner, batches = systems.prepare(system, case.workload, parts, job.device.type, around), job.batches(parts)
    amp = runner.amp

    def note() -> str | None:
        return "; ".join(amp.report().steps) or None if amp is not None and system.is_train_step else None

    return lambda: runner.step(next(batches)), note


class Sharded:
    """A model and its optimizer under FSDP2, which several systems compute with."""

    def __init__(self, case: Case, job: Job) -> None:
        self._workload, self._device_type = case.workload, job.device.type
        parts = case.workload.parts(str(job.device))
        self._blocks: list[nn.Module] = list(parts.model.get_submodule("layers").children())
        # Parameters are gathered low, as is recommended; gradients are summed up in fp32, as they are under DDP.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self._blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(parts.model, mp_policy=replace(policy, output_dtype=torch.float32))  # for the loss
        self._model = parts.model
        self._criterion, self._batches = parts.criterion, job.batches(parts)
        self._optimizer = systems.optimizer_for(case.workload, self._model, self._device_type)

    def build(self, system: System) -> tuple[Callable[[], Tensor], Callable[[], str | None]]:
        amp = systems.amp_for(system, self._workload) if system.compiler == "fxamp" else None
        if amp is not None:
            amp.attach(self._optimizer)
        # What `block.compile()` sets, once for each system.
        calls = [systems.compiled(system, block._call_impl, amp) for block in self._blocks]  # pyright: ignore
        begin = systems.begins_step(system, self._device_type)

        def step() -> Tensor:
            begin()
            for block, call in zip(self._blocks, calls, strict=True):
                block._compiled_call_impl = call
            ((x, y),) = next(self._batches)
            with systems.autocast(system, self._device_type):
                loss = self._criterion(self._model(x), y)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            return loss.detach()

        return step, lambda: "its loss goes on from that of the system before, whose model it has"


# ---- measuring ---------------------------------------------------------------------------------------------------------
def first_steps(contender: Contender, job: Job) -> None:
    """Compiles, warms up, and measures what is not time."""
    results: list[Tensor] = []

    def run(num_steps: int) -> float:
        def steps() -> None:
            results.extend(contender.step().clone() for _ in range(num_steps))

        return measure.time_block_ms(steps, job.device.type)

    contender.compile_s = run(NUM_FIRST_STEPS) / 1e3
    if contender.case.strategy == "ddp" and job.device.type == "cuda":
        run(NUM_MORE_STEPS_OF_DDP)
    contender.rough_ms = run(NUM_ROUGH_STEPS) / NUM_ROUGH_STEPS
    contender.losses = job.mean([float(x) for x in results])
    if job.device.type == "cuda":
        peak, before = measure.peak_memory(contender.step, NUM_MEMORY_STEPS), contender.memory_before
        allocated, reserved = job.largest(
            peak.allocated_bytes - before.allocated_bytes, peak.reserved_bytes - before.reserved_bytes
        )
        contender.memory = Memory(allocated_bytes=int(allocated), reserved_bytes=int(reserved))


def memory_now(device_type: str) -> Memory:
    """What is there before a system is built."""
    if device_type != "cuda":
        return Memory(allocated_bytes=0, reserved_bytes=0)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return Memory(allocated_bytes=torch.cuda.memory_allocated(), reserved_bytes=torch.cuda.memory_reserved())


def take_turns(contenders: Sequence[Contender], job: Job, *, num_repetitions: int, block_ms: float) -> None:
    """In each repetition every one runs a block of steps; who begins moves on by one each time."""
    rough_ms = job.largest(*(c.rough_ms for c in contenders))
    for repetition in range(num_repetitions):
        for i in range(len(contenders)):
            at = (i + repetition) % len(contenders)
            contender, num_steps = contenders[at], max(1, int(block_ms / rough_ms[at]))

            def block(contender: Contender = contender, num_steps: int = num_steps) -> None:
                for _ in range(num_steps):
                    contender.step()

            contender.step()  # memory and caches come back after a pause
            distributed.barrier()
            (time_ms,) = job.largest(measure.time_block_ms(block, job.device.type) / num_steps)
            contender.times_ms.append(time_ms)


def run_case(case: Case, job: Job, args: argparse.Namespace, tell: Callable[[str], None]) -> list[Contender]:
    """Builds the systems of a case, until the budget is spent. One that fails on every rank is left out, with its reason."""
    built: list[Contender] = []
    before_all = memory_now(job.device.type)
    shared = None
    for name in case.systems:
        if job.is_over(args.budget_s):
            tell(f"{case.name} {name}: not built, the budget is spent")
            continue
        system = systems.all_systems()[name]
        before = before_all if case.strategy == "fsdp2" else memory_now(job.device.type)
        error: Exception | None = None
        try:
            if case.strategy == "fsdp2":
                shared = shared or Sharded(case, job)
                step, note = shared.build(system)
            else:
                step, note = build_whole(case, system, job)
            contender = Contender(case=case, system=system, step=step, note=note, memory_before=before)
            first_steps(contender, job)
        except Exception as failed:
            error = failed
        if any(job.largest(float(error is not None))):
            tell(f"{case.name} {name}: {'failed elsewhere' if error is None else describe(error)}")
            continue
        built.append(contender)
        tell(f"{case.name} {name}: first steps {contender.compile_s:.1f} s, then about {contender.rough_ms:.2f} ms, "
             f"{contender.memory}, loss {contender.losses[0]:.4f} -> {contender.losses[-1]:.4f}")
    return built


def row_of(contender: Contender, job: Job, run: Run) -> Distributed:
    case = contender.case
    return Distributed(
        run=run,
        workload=case.workload.name,
        workload_about=case.workload.about,
        strategy=case.strategy,
        system=contender.system.name,
        system_about=contender.system.about,
        num_ranks=job.num_ranks,
        num_items_per_rank=case.workload.num_items,
        unit=case.workload.unit,
        status="ok",
        reason=None,
        step_ms=tuple(contender.times_ms),
        memory=contender.memory,
        compile_s=contender.compile_s,
        losses=contender.losses,
        note=contender.note(),
    )


# ---- the command -------------------------------------------------------------------------------------------------------
def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m bench.distributed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--only", nargs="+", metavar="CASE", help="names or patterns of WORKLOAD/STRATEGY, e.g. '*/ddp'")
    out.add_argument("--systems", nargs="+", metavar="SYSTEM", help="names or patterns (default: those of each case)")
    out.add_argument("--repetitions", type=int, default=7, metavar="N", help="turns of each system (default 7)")
    out.add_argument("--block-ms", type=float, default=400, metavar="MS", help="length of a turn (default 400)")
    out.add_argument("--budget-s", type=float, metavar="S", help="build nothing new after this long")
    out.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON lines go (bench/results)")
    out.add_argument("--commit", metavar="SHA", help="commit of the tree, for a copy of it without git")
    return out


def cases_of(args: argparse.Namespace, device_type: str) -> list[Case]:
    """What the command line asks for. Raises: SystemExit for a pattern that matches nothing."""
    cases = all_cases(device_type)
    wanted = chosen(args.only or ["*"], [case.name for case in cases], "case")
    patterns = args.systems or ["*"]
    found = [
        replace(case, systems=tuple(s for s in case.systems if any(fnmatch.fnmatchcase(s, p) for p in patterns)))
        for case in cases
        if case.name in wanted
    ]
    return [case for case in found if case.systems]


def main(arguments: Sequence[str]) -> int:
    """Runs the command, on every rank; rank 0 tells and writes."""
    begin_s, args = time.monotonic(), parser().parse_args(arguments)
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_cuda else "gloo")
    job = Job(device, begin_s)

    def tell(text: str) -> None:
        if job.rank == 0:
            print(f"{time.monotonic() - begin_s:6.1f} s  {text}", flush=True)

    prefix = f"torchrun --nproc-per-node {job.num_ranks} -m bench.distributed"
    run = origin.run(
        device.type,
        torch.cuda.get_device_name() if on_cuda else "",
        protocol="full",
        num_threads=None if on_cuda else torch.get_num_threads(),
        command=without_folders(f"{prefix} {shlex.join(arguments)}".strip()),
        commit=args.commit,
    )
    run = replace(run, machine=replace(run.machine, device=f"{job.num_ranks} x {run.machine.device}"))
    path = args.results / f"{run.machine.slug}.jsonl"
    with dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT):
        # Cases of one workload take turns with each other: efficiency is a quotient of pairs.
        for workload, cases in _by_workload(cases_of(args, device.type)):
            contenders = [c for case in cases for c in run_case(case, job, args, tell)]
            if contenders:
                take_turns(contenders, job, num_repetitions=args.repetitions, block_ms=args.block_ms)
            for contender in contenders:
                row = row_of(contender, job, run)
                tell(f"{contender.case.name} {row.system}: {', '.join(f'{t:.2f}' for t in row.step_ms)} ms; {row.note or ''}")
                if job.rank == 0:
                    rows.append(path, [row])
            del contenders
            gc.collect()
            torch.compiler.reset()
            tell(f"{workload}: done")
    if job.rank == 0 and args.results.resolve() == RESULTS:
        causes = report.read_causes(RESULTS.parent / "causes.toml")
        report.write(RESULTS, RESULTS.parent / "RESULTS.md", origin.ROOT / "README.md", causes)
    with contextlib.suppress(RuntimeError):  # a peer that is gone already
        distributed.destroy_process_group()
    return 0


def _by_workload(cases: Sequence[Case]) -> Iterator[tuple[str, list[Case]]]:
    for name in dict.fromkeys(case.workload.name for case in cases):
        yield name, [case for case in cases if case.workload.name == name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
