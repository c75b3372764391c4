"""python -m bench.kernels: which kernels a workload runs on each of some systems, and where two systems differ.

What to look at when a row of the results is slower than its peer. Systems are prepared, compiled and profiled one after
another in this process, each with caches of its own, so that choices which Inductor makes by timing are made on a quiet
device and not inherited.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch._inductor.utils import fresh_inductor_cache

from bench import systems, workloads
from fxamp.explain.kernels import Kernel, Recorder, kernel_category

NUM_WARM_UP_STEPS: Final = 5


@contextlib.contextmanager
def warmed_up(workload_name: str, system_name: str) -> Generator[Callable[[int], None]]:
    """A workload on a system, compiled here and now: takes so many steps."""
    workload, system = workloads.find(workload_name), systems.all_systems()[system_name]
    torch._dynamo.reset()
    gc.collect()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder, fresh_inductor_cache(dir=folder):
        parts = workload.parts(device)
        runner = systems.prepare(system, workload, parts, device)
        batches = [[parts.batches[i % len(parts.batches)] for i in range(workload.num_micro_batches)]] * NUM_WARM_UP_STEPS
        for some in batches:
            runner.step(some)

        def take(num_steps: int) -> None:
            for some in (batches * num_steps)[:num_steps]:
                runner.step(some)

        yield take


def profiled(workload_name: str, system_name: str, num_steps: int) -> dict[str, Kernel]:
    """Kernels of a step."""
    with warmed_up(workload_name, system_name) as take:
        recorder = Recorder()
        recorder.start()
        take(num_steps)
        return {kernel.name: kernel for kernel in recorder.stop(num_steps).kernels}


def table(found: Mapping[str, Mapping[str, Kernel]], num_rows: int) -> Table:
    """One row a kernel, in order of the largest difference between systems, then of time."""
    out = Table(title="ms a step (launches)")
    out.add_column("kernel", overflow="fold", max_width=90)
    out.add_column("category")
    for system in found:
        out.add_column(system, justify="right")
    names = list(dict.fromkeys(name for kernels in found.values() for name in kernels))

    def times(name: str) -> list[float]:
        return [kernels[name].ms if name in kernels else 0.0 for kernels in found.values()]

    names.sort(key=lambda name: (max(times(name)) - min(times(name)), max(times(name))), reverse=True)
    for name in names[:num_rows]:
        cells = [
            f"{kernels[name].ms:.3f} ({kernels[name].count:g})" if name in kernels else "" for kernels in found.values()
        ]
        out.add_row(name, kernel_category(name), *cells)
    out.add_section()
    totals = [f"{sum(k.ms for k in kernels.values()):.3f}" for kernels in found.values()]
    out.add_row(f"all {len(names)}", "", *totals)
    return out


def parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    """The command line of a module that looks closely at a workload on some systems."""
    out = argparse.ArgumentParser(prog=f"python -m bench.{module}", description=about)
    out.add_argument("workload", choices=sorted(workloads.all_workloads()))
    out.add_argument("systems", nargs="+", choices=sorted(systems.all_systems()), metavar="SYSTEM")
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = parser_of("kernels", __doc__)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to profile (default 3)")
    parser.add_argument("--rows", type=int, default=40, metavar="N", help="kernels to list (default 40)")
    given = parser.parse_args(arguments)
    found = {system: profiled(given.workload, system, given.steps) for system in given.systems}
    Console(width=160).print(table(found, given.rows))


if __name__ == "__main__":
    main()
