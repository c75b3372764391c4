"""python -m bench.host: what the host does in a step of a workload on each of some systems.

What to look at when a small step takes longer than its kernels. Steps are launched one behind the other, and the host runs
ahead of the GPU; where it needs longer for one, the GPU waits. So each system is timed twice: a few steps at a time with an
idle GPU, of which nothing but the host's part is counted, and many, until the GPU is done. Where both are the same, the host
decides, as it does on a CPU. Of systems that launch more kernels in those few steps than a GPU queues, some thousand, the
first time says nothing: the host waits then. Python on autograd's thread is in the times, and not among the functions.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from bench.kernels import parser_of, warmed_up
from bench.measure import synchronize

NUM_AHEAD: Final = 4
"""Steps that are launched at a time."""
NUM_GROUPS: Final = 75
NUM_TOGETHER: Final = 200
"""Steps until the GPU is done."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """Of Python, or a builtin."""

    name: str
    us: float
    """A step, in itself, while it is profiled: some two times as long as else."""
    num_calls: float
    """A step."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What it does."""

    host_us: float
    """A step, until it is launched; the median."""
    step_us: float
    """A step, until it is done."""
    functions: tuple[Function, ...]
    """Those that take longest first."""


def measured(workload_name: str, system_name: str) -> Host:
    """Of a system that has warmed up."""
    with warmed_up(workload_name, system_name) as take:
        take(NUM_TOGETHER)
        host = statistics.median(_us(lambda: take(NUM_AHEAD), NUM_AHEAD) for _ in range(NUM_GROUPS))

        def all_done() -> None:
            take(NUM_TOGETHER)
            _wait()

        step = statistics.median(_us(all_done, NUM_TOGETHER) for _ in range(3))
        return Host(host_us=host, step_us=step, functions=_functions(take))


def _us(run: Callable[[], object], num_steps: int) -> float:
    _wait()
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / num_steps * 1e6


def _functions(take: Callable[[int], None]) -> tuple[Function, ...]:
    profile = cProfile.Profile()
    for _ in range(NUM_GROUPS):
        _wait()
        profile.enable()
        take(NUM_AHEAD)
        profile.disable()
    num_steps = NUM_GROUPS * NUM_AHEAD
    found: list[Function] = []
    for (file, line, name), (_, num_calls, seconds, *_) in pstats.Stats(profile).stats.items():  # pyright: ignore
        where = f"{Path(file).name}:{line} {name}" if line else name  # builtins have no line
        found.append(Function(name=where, us=seconds / num_steps * 1e6, num_calls=num_calls / num_steps))
    return tuple(sorted(found, key=lambda function: -function.us))


def _wait() -> None:
    synchronize("cuda" if torch.cuda.is_available() else "cpu")


def table(found: Mapping[str, Host], num_rows: int) -> Table:
    """One row a system, and one for each function of it that takes longest."""
    out = Table(title="us a step")
    for name in ("system", "host", "done", "in itself, profiled", "function (calls)"):
        out.add_column(name, justify="left" if name in ("system", "function (calls)") else "right", overflow="fold")
    for system, host in found.items():
        rows = [(f"{f.us:.1f}", f"{f.name} ({f.num_calls:g})") for f in host.functions[:num_rows]] or [("", "")]
        heads = itertools.chain([(system, f"{host.host_us:.0f}", f"{host.step_us:.0f}")], itertools.repeat(("", "", "")))
        for head, row in zip(heads, rows, strict=False):
            out.add_row(*head, *row)
        out.add_section()
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = parser_of("host", __doc__)
    parser.add_argument("--rows", type=int, default=12, metavar="N", help="functions of each system (default 12)")
    given = parser.parse_args(arguments)
    found = {system: measured(given.workload, system) for system in given.systems}
    Console(width=160).print(table(found, given.rows))


if __name__ == "__main__":
    main()
