"""python -m bench.zoo: tiny models of transformers through fxamp, beside autocast and float64."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import origin
from bench.__main__ import chosen
from bench.zoo import compile_time, models, report, rows
from bench.zoo.measure import SYSTEMS, Lower, measure
from bench.zoo.rows import Row

FOLDER: Final = Path(__file__).parent

NUM_IN_PROCESS: Final = 8
"""Architectures for which the imports are paid once."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="python -m bench.zoo", description=__doc__)
    out.add_argument("--only", nargs="+", metavar="NAME", help="architectures, or patterns (see --list)")
    out.add_argument("--systems", nargs="+", metavar="SYSTEM", help="systems, or patterns; 'stock' is always there")
    out.add_argument("--lower", choices=("aot_eager", "inductor"), default="aot_eager", help="default: aot_eager")
    out.add_argument("--seeds", type=int, default=4, metavar="N", help="weights and inputs to take errors over (default 4)")
    out.add_argument("--jobs", type=int, default=1, metavar="N", help="architectures at the same time (default 1)")
    out.add_argument("--timeout-s", type=float, default=1200, metavar="S", help="for one architecture (default 1200)")
    out.add_argument("--compile-time", action="store_true", help="measure what fxamp adds to Inductor's compile time instead")
    out.add_argument("--repetitions", type=int, default=3, metavar="N", help="of --compile-time (default 3)")
    out.add_argument("--results", type=Path, default=FOLDER, metavar="DIR", help="where the results are (bench/zoo)")
    out.add_argument("--fresh", action="store_true", help="measure again what is there for the same source and versions")
    out.add_argument("--report", action="store_true", help="measure nothing, write the tables")
    out.add_argument("--list", action="store_true", help="list the architectures and systems, and stop")
    out.add_argument("--worker", nargs="+", metavar="NAME", help=argparse.SUPPRESS)  # prints a JSON line for each
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if fxamp fails where the lowering alone does not, or its error is beyond the bound."""
    options = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)  # in a file the table keeps its columns
    if options.list:
        console.print(*models.BY_NAME, "", *(system.name for system in SYSTEMS), sep="\n")
        return 0
    reason = models.missing()
    if reason and not options.report:
        console.print(reason)
        return 2
    if options.worker:
        for name in options.worker:
            print(_row(name, options).to_json(), flush=True)
        return 0
    names = chosen(options.only or ("*",), list(models.BY_NAME), "architecture")
    if options.compile_time and not options.report:
        wanted = chosen(options.systems, compile_time.SYSTEMS, "system") if options.systems else compile_time.USUAL
        path: Path = options.results / "compile_time.jsonl"
        compile_time.measure_all(names, options.repetitions, path, console.print, wanted)
    elif not options.report:
        _measure_all(names, options, console)
    report.write(options.results)
    shown = [row for row in rows.read(options.results / "results.jsonl") if row.name in names and row.lower == options.lower]
    console.print(rows.table(shown), *rows.summary(shown), sep="\n")
    found = [f"{row.name}: {fault}" for row in shown for fault in rows.faults(row)]
    console.print(*found, sep="\n")
    return 1 if found else 0


def _measure_all(names: Sequence[str], options: argparse.Namespace, console: Console) -> None:
    """In processes of some architectures each; what is there is kept, and every row is written when it is measured."""
    path: Path = options.results / "results.jsonl"
    known = {(row.lower, row.name): row for row in rows.read(path)}
    source, versions = _source(), origin.versions()
    todo = [
        name
        for name in names
        if options.fresh
        or (row := known.get((options.lower, name))) is None
        or (row.fxamp_source, row.versions, row.num_seeds) != (source, versions, options.seeds)
    ]

    writing = threading.Lock()

    def keep(line: str) -> None:
        row = Row.from_json(line)
        with writing:
            known[(row.lower, row.name)] = row
            rows.write(path, known.values())
            console.print(*rows.cells(row))
            console.print(*(f"  {fault}" for fault in rows.faults(row)), sep="\n", markup=False)

    def measured(some: Sequence[str]) -> None:
        """A process that dies takes one architecture with it; another goes on behind that."""
        left = list(some)
        while left:
            command = [sys.executable, "-m", "bench.zoo", "--lower", options.lower, "--seeds", str(options.seeds)]
            command += ["--systems", *options.systems] if options.systems else []
            with tempfile.TemporaryDirectory(prefix="fxamp-zoo-") as cache, tempfile.TemporaryFile("w+") as stderr:
                worker = subprocess.Popen(
                    [*command, "--worker", *left], stdout=subprocess.PIPE, stderr=stderr, text=True, env=_environment(cache),
                    cwd=origin.ROOT,
                )  # fmt: skip
                assert worker.stdout is not None
                alarm = threading.Timer(options.timeout_s * len(left), worker.kill)
                alarm.start()
                for line in worker.stdout:
                    if line.startswith("{"):  # models print too
                        keep(line)
                        left.pop(0)
                worker.wait()
                alarm.cancel()
                if left:
                    stderr.seek(0)
                    console.print(f"{left.pop(0)}: the process ended: {stderr.read()[-2000:]}", style="red", markup=False)

    chunks = [todo[i : i + NUM_IN_PROCESS] for i in range(0, len(todo), NUM_IN_PROCESS)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(measured, chunks))


def _row(name: str, options: argparse.Namespace) -> Row:
    import torch

    torch.set_num_threads(1)  # equal on every machine, and several processes may run side by side
    patterns = options.systems or ("*",)
    systems = [s for s in SYSTEMS if s.name in (*chosen(patterns, [x.name for x in SYSTEMS], "system"), "stock")]
    lower: Lower = options.lower
    results = measure(models.BY_NAME[name], systems, lower=lower, seeds=range(options.seeds))
    return Row(
        name=name, lower=lower, num_seeds=options.seeds, versions=origin.versions(), fxamp_source=_source(), results=results
    )


def _source() -> str:
    return origin.digest(origin.ROOT, (origin.ROOT / "fxamp").rglob("*.py"))


def _environment(cache: str) -> dict[str, str]:
    """Of the process of an architecture: no network, one thread, no compiled code of other runs."""
    fixed = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1",
             "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # fmt: skip
    return {**os.environ, **fixed}


if __name__ == "__main__":
    sys.exit(main())
