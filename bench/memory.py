"""python -m bench.memory: what a workload reserves of a GPU's memory on each of some systems, and in which pieces.

What to look at when a row of the results holds more memory than its peer. PyTorch's allocator takes memory from the driver in
segments, and keeps them; each belongs to a pool, the ordinary one or that of CUDA graphs. What a step needs at its peak is
what its pools reserve. Systems are measured one after another, each in a process of its own. With --holes, what is reserved
and in no tensor of the ordinary pool is listed too: segments that are partly empty between two steps, and which code made the
tensors that keep the allocator from giving them back.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from bench import systems, workloads
from bench.kernels import warmed_up

NUM_STEPS: Final = 3
LARGE_MIB: Final = 64
"""Segments from this size on are listed one by one."""
HOLE_MIB: Final = 4
"""What is empty of a segment is a hole from this size on."""
NUM_FRAMES: Final = 6
"""Of the Python that made a tensor, innermost first."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Of PyTorch's allocator."""

    name: str
    reserved_mib: float
    allocated_mib: float
    """Of which in tensors now, between two steps. Those that a CUDA graph makes anew are not among them."""
    large_mib: tuple[tuple[int, int], ...]
    """(size, how many) of its large segments."""


@dataclass(frozen=True, kw_only=True)
class Hole:
    """What is empty of a segment of the ordinary pool."""

    segment_mib: float
    empty_mib: float
    holders: tuple[tuple[str, float], ...]
    """(code, MiB) of the tensors beside it, largest first: "file.py:line function < its caller < ..."."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """By a system."""

    peak_reserved_mib: float
    """Of steps that follow warm-up."""
    pools: tuple[Pool, ...]
    holes: tuple[Hole, ...] = ()
    """Largest first. Empty unless asked for."""


def held(workload_name: str, system_name: str, *, with_holes: bool = False) -> Held:
    """What a system holds after some steps, and its peak in them."""
    if with_holes:
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
    with warmed_up(workload_name, system_name) as take:
        torch.cuda.reset_peak_memory_stats()
        take(NUM_STEPS)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved() / 2**20
        segments = torch.cuda.memory_snapshot()
        return Held(
            peak_reserved_mib=peak, pools=tuple(pools_of(segments)), holes=tuple(holes_of(segments)) if with_holes else ()
        )


def pools_of(segments: Sequence[dict[str, Any]]) -> list[Pool]:
    """The pools that segments belong to, as `torch.cuda.memory_snapshot` lists them, the ordinary one first."""
    by_pool: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for segment in segments:
        by_pool.setdefault(tuple(segment["segment_pool_id"]), []).append(segment)
    found: list[Pool] = []
    for pool, parts in sorted(by_pool.items(), key=lambda item: item[0] != (0, 0)):
        sizes = [part["total_size"] / 2**20 for part in parts]
        large = Counter(round(size) for size in sizes if size >= LARGE_MIB)
        found.append(
            Pool(
                name="ordinary" if pool == (0, 0) else f"CUDA graphs {len(found)}",
                reserved_mib=sum(sizes),
                allocated_mib=sum(part["allocated_size"] for part in parts) / 2**20,
                large_mib=tuple(sorted(large.items(), reverse=True)),
            )
        )
    return found


def holes_of(segments: Sequence[dict[str, Any]]) -> list[Hole]:
    """Holes in the ordinary pool, largest first."""
    found: list[Hole] = []
    for segment in segments:
        empty = (segment["total_size"] - segment["allocated_size"]) / 2**20
        if tuple(segment["segment_pool_id"]) != (0, 0) or empty < HOLE_MIB:
            continue
        holders: Counter[str] = Counter()
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                holders[made_by(block.get("frames", ()))] += block["size"]
        found.append(
            Hole(
                segment_mib=segment["total_size"] / 2**20,
                empty_mib=empty,
                holders=tuple((code, size / 2**20) for code, size in holders.most_common()),
            )
        )
    return sorted(found, key=lambda hole: -hole.empty_mib)


def made_by(frames: Sequence[dict[str, Any]]) -> str:
    """The code that made a tensor, innermost first."""
    names = [f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames[:NUM_FRAMES]]
    return " < ".join(names) or "unknown"


def table_of_holes(found: dict[str, Held]) -> Table:
    """One row a holder."""
    out = Table(title="MiB of the ordinary pool that are in no tensor, and what keeps them")
    for name in ("system", "segment", "empty", "of which", "made by"):
        out.add_column(name, justify="left" if name in ("system", "made by") else "right", overflow="fold")
    for system, memory in found.items():
        for hole in memory.holes:
            head = (system, f"{hole.segment_mib:.0f}", f"{hole.empty_mib:.0f}")
            for i, (code, mib) in enumerate(hole.holders or (("nothing", 0.0),)):
                out.add_row(*(head if i == 0 else ("", "", "")), f"{mib:.2f}", code)
    return out


def table(found: dict[str, Held]) -> Table:
    """One row a pool."""
    out = Table(title="MiB")
    for name in ("system", "peak reserved", "pool", "reserved", "in tensors now"):
        out.add_column(name, justify="left" if name in ("system", "pool") else "right")
    out.add_column(f"segments of {LARGE_MIB} MiB and more", overflow="fold", max_width=100)
    for system, memory in found.items():
        for i, pool in enumerate(memory.pools):
            large = ", ".join(f"{count} x {size}" if count > 1 else f"{size}" for size, count in pool.large_mib)
            head = (system, f"{memory.peak_reserved_mib:.0f}") if i == 0 else ("", "")
            out.add_row(*head, pool.name, f"{pool.reserved_mib:.0f}", f"{pool.allocated_mib:.0f}", large)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("workload", choices=sorted(workloads.all_workloads()))
    parser.add_argument("systems", nargs="+", choices=sorted(systems.all_systems()), metavar="SYSTEM")
    parser.add_argument("--holes", action="store_true", help="list what is reserved and in no tensor, and what keeps it")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    found: dict[str, Held] = {}
    for system in given.systems:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            found[system] = process.apply(held, (given.workload, system), {"with_holes": given.holes})
    Console(width=200).print(table(found))
    if given.holes:
        Console(width=200).print(table_of_holes(found))


if __name__ == "__main__":
    main()
