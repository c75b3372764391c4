"""Rows for tests: complete, and with everything that a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.measure import Ceilings, Launches, Memory, Work
from bench.rows import CeilingsRow, Distributed, Facts, Fxamp, Machine, Measurement, Run, Timing
from bench.systems import all_systems

GPU = Machine(device="Some GPU", device_type="cuda", num_cpus=16)
CPU = Machine(device="Some CPU", device_type="cpu", num_cpus=2)

FALLING = (5.0, 4.5, 4.0, 3.5, 3.0, 3.0, 3.0, 3.0)


def run(run_id: str = "r1", machine: Machine = GPU, **changes: Any) -> Run:
    made = Run(
        id=run_id,
        date="2025-01-01",
        command="python -m bench",
        protocol="full",
        machine=machine,
        num_threads=None,
        versions={"python": "3.12.3", "torch": "2.11.0"},
        commit="0123456789abcdef",
        is_dirty=False,
        fxamp_source="f" * 12,
        bench_source="b" * 12,
    )
    return replace(made, **changes)


def facts(**changes: Any) -> Facts:
    made = Facts(
        losses=FALLING,
        output_error=None,
        cold_compile_s=12.0,
        num_parallel_builds=1,
        memory=Memory(allocated_bytes=2 * 2**30, reserved_bytes=3 * 2**30),
        launches=Launches(
            num_kernel_launches=100,
            num_graph_launches=2,
            num_host_syncs=1,
            num_copies_to_host=1,
            num_kernels=120,
            kernel_ms={"matmul": 7.0, "cast": 1.5},
        ),
        num_casts=3,
        cast_bytes=6_000_000,
        rough_step_ms=10.0,
        num_graphs=1,
        num_graph_breaks=0,
        num_cuda_graph_skips=0,
        fxamp=None,
        note=None,
    )
    return replace(made, **changes)


def fxamp_facts(**changes: Any) -> Fxamp:
    made = Fxamp(
        precisions=("bf16",), num_low_ops=5, num_own_casts=9, own_cast_bytes=100, pass_ms=3.0, notes=("a note",)
    )
    return replace(made, **changes)


def measurement(
    system: str,
    step_ms: Sequence[float] | None = (10.0, 10.0, 10.0),
    *,
    together: Sequence[str] = (),
    anchor_ms: Sequence[float] = (10.0, 10.0, 10.0),
    **changes: Any,
) -> Measurement:
    """A system in bf16 whose family its name says, and that took turns with all known ones. `step_ms=None`: no time."""
    is_fxamp = system.startswith("fxamp")
    timing = None
    if step_ms is not None:
        ratios = tuple(a / b for a, b in zip(step_ms, anchor_ms, strict=True)) if anchor_ms else ()
        timing = Timing(
            step_ms=tuple(step_ms),
            anchor_ratios=ratios,
            num_steps_per_block=4,
            together=tuple(together or dict.fromkeys((*all_systems(), system))),
        )
    made = Measurement(
        run=run(),
        workload="tiny-gpt",
        workload_about="GPT, 4 layers",
        workload_kind="train",
        unit="tokens",
        num_items_per_step=1000,
        sweep_over=None,
        sweep_value=None,
        work=Work(num_flops=10**12, num_min_bytes=10**9),
        system=system,
        system_about=f"about {system}",
        precision="bf16",
        family="fxamp" if is_fxamp else "peer",
        mode="default",
        status="ok",
        timing=timing,
        facts=facts(fxamp=fxamp_facts() if is_fxamp else None),
        warm_compile_s=2.0,
    )
    return replace(made, **changes)


def ceilings(**changes: Any) -> CeilingsRow:
    values = Ceilings(
        matmul_flops_per_s={"fp32": 5e13, "bf16": 5e14}, matmul_size=8192, copy_bytes_per_s=4e12, copy_bytes=2**32
    )
    return replace(CeilingsRow(run=run(), ceilings=values), **changes)


def distributed(system: str, step_ms: Sequence[float] = (10.0, 10.0, 10.0), **changes: Any) -> Distributed:
    """A row of `bench.distributed`: DDP on two devices."""
    made = Distributed(
        run=run(),
        workload="gpt2",
        workload_about="GPT-2 of 124M parameters",
        strategy="ddp",
        system=system,
        system_about=f"about {system}",
        num_ranks=2,
        num_items_per_rank=1000,
        unit="tokens",
        status="ok",
        reason=None,
        step_ms=tuple(step_ms),
        memory=Memory(allocated_bytes=2 * 2**30, reserved_bytes=3 * 2**30),
        compile_s=40.0,
        losses=FALLING,
        note=None,
    )
    return replace(made, **changes)
