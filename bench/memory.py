"""python -m bench.memory: what a workload reserves of a GPU's memory on each of some systems, and in which pieces.

What to look at when a row of the results holds more memory than its peer. PyTorch's allocator takes memory from the driver in
segments, and keeps them; each belongs to a pool, the ordinary one or a private one. CUDA graphs have such pools, and little of
theirs is in tensors between two steps; train steps of fxamp have one for what they keep. What a step needs at its peak is what
its pools reserve. Systems are measured one after another, each in a process of its own. With --holes, who made what lives on
is listed, and what is reserved and in no tensor: segments that are partly empty between two steps, and what keeps the
allocator from giving them back.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from bench.kernels import parser_of, warmed_up

NUM_STEPS: Final = 3
LARGE_MIB: Final = 64
"""Segments from this size on are listed one by one."""
HOLE_MIB: Final = 4
"""What is empty of a segment is a hole from this size on."""
NUM_FRAMES: Final = 6
"""Of the Python that made a tensor, innermost first."""
NUM_HOLDERS: Final = 16
"""Rows of the table of what lives on."""
NUM_EVENTS: Final = 200_000
"""Of the allocator, which are remembered."""


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
    """What is empty of a segment, between two steps."""

    segment_mib: float
    empty_mib: float
    holders: tuple[tuple[str, float], ...]
    """(code, MiB) of the tensors beside it, largest first: "file.py:line function < its caller < ..."."""
    last: str
    """The code that was the last to have memory there, of late."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """By a system."""

    peak_reserved_mib: float
    """Of steps that follow warm-up."""
    pools: tuple[Pool, ...]
    holders: tuple[tuple[str, float], ...] = ()
    """(code, MiB) of the tensors that there are, most first. Empty unless asked for, as the next."""
    holes: tuple[Hole, ...] = ()
    """Largest first."""


def held(workload_name: str, system_name: str, *, with_holes: bool = False) -> Held:
    """What a system holds after some steps, and its peak in them."""
    if with_holes:
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=NUM_EVENTS)
    with warmed_up(workload_name, system_name) as take:
        torch.cuda.reset_peak_memory_stats()
        take(NUM_STEPS)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved() / 2**20
        segments = torch.cuda.memory_snapshot()
        pools = tuple(pools_of(segments))
        if not with_holes:
            return Held(peak_reserved_mib=peak, pools=pools)
        told: Any = torch.cuda.memory._snapshot()  # its type says too little
        holes = holes_of(segments, told["device_traces"][0])
        return Held(peak_reserved_mib=peak, pools=pools, holders=holders_in(lasting(segments)), holes=tuple(holes))


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
                name="ordinary" if pool == (0, 0) else f"private {len(found)}",
                reserved_mib=sum(sizes),
                allocated_mib=sum(part["allocated_size"] for part in parts) / 2**20,
                large_mib=tuple(sorted(large.items(), reverse=True)),
            )
        )
    return found


def holes_of(segments: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> list[Hole]:
    """Holes, largest first. `events`: what the allocator did before, oldest first."""
    found: list[Hole] = []
    for segment in lasting(segments):
        empty = (segment["total_size"] - segment["allocated_size"]) / 2**20
        if empty < HOLE_MIB:
            continue
        found.append(
            Hole(
                segment_mib=segment["total_size"] / 2**20,
                empty_mib=empty,
                holders=holders_in([segment]),
                last=last_in(segment, events),
            )
        )
    return sorted(found, key=lambda hole: -hole.empty_mib)


def lasting(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those for tensors that live from step to step: of the ordinary pool, and of private ones most of which is in tensors
    between two steps. Pools of CUDA graphs are not."""
    total, allocated = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for segment in segments:
        pool = tuple(segment["segment_pool_id"])
        total[pool] += segment["total_size"]
        allocated[pool] += segment["allocated_size"]
    pools = {(0, 0), *(pool for pool in total if 2 * allocated[pool] > total[pool])}
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) in pools]


def holders_in(segments: Sequence[dict[str, Any]]) -> tuple[tuple[str, float], ...]:
    """(code, MiB) of the tensors in some segments, most first."""
    sizes: Counter[str] = Counter()
    for block in itertools.chain.from_iterable(segment["blocks"] for segment in segments):
        if block["state"] == "active_allocated":
            sizes[made_by(block.get("frames", ()))] += block["size"]
    return tuple((code, size / 2**20) for code, size in sizes.most_common())


def last_in(segment: dict[str, Any], events: Sequence[dict[str, Any]]) -> str:
    """The code that was the last to have had memory in a segment, and gave it back."""
    start, end = segment["address"], segment["address"] + segment["total_size"]
    freed = set[int]()
    for event in reversed(events):
        if start <= event["addr"] < end:
            if event["action"] == "free_completed":
                freed.add(event["addr"])
            elif event["action"] == "alloc" and event["addr"] in freed:
                return f"{event['size'] / 2**20:.0f} MiB, {made_by(event.get('frames', ()))}"
    return "unknown"


def made_by(frames: Sequence[dict[str, Any]]) -> str:
    """The code that made a tensor, innermost first."""
    names = [f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames[:NUM_FRAMES]]
    return " < ".join(names) or "unknown"


def table_of_holders(found: dict[str, Held]) -> Table:
    """One row for code that made tensors which live on."""
    out = Table(title="MiB in tensors between two steps", show_lines=True)
    for name in ("system", "MiB", "made by"):
        out.add_column(name, justify="right" if name == "MiB" else "left", overflow="fold")
    for system, memory in found.items():
        for code, mib in memory.holders[:NUM_HOLDERS]:
            out.add_row(system, f"{mib:.1f}", code)
    return out


def table_of_holes(found: dict[str, Held]) -> Table:
    """One row for segments that are alike."""
    out = Table(title="MiB reserved and in no tensor, and what keeps them", show_lines=True)
    for name in ("system", "segments", "empty", "tensors beside", "last of what was there"):
        out.add_column(name, justify="right" if name in ("segments", "empty") else "left", overflow="fold")
    for system, memory in found.items():
        for hole, count in Counter(memory.holes).items():
            beside = "\n".join(f"{mib:.2f} {code}" for code, mib in hole.holders) or "nothing"
            out.add_row(system, f"{count} x {hole.segment_mib:.0f}", f"{count} x {hole.empty_mib:.0f}", beside, hole.last)
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
    parser = parser_of("memory", __doc__)
    parser.add_argument("--holes", action="store_true", help="list what lives on, and what is empty")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    found: dict[str, Held] = {}
    for system in given.systems:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            found[system] = process.apply(held, (given.workload, system), {"with_holes": given.holes})
    Console(width=200).print(table(found))
    if given.holes:
        Console(width=200).print(table_of_holders(found))
        Console(width=200).print(table_of_holes(found))


if __name__ == "__main__":
    main()
