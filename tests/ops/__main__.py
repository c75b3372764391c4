"""python -m tests.ops: all operations of PyTorch's database through fxamp, and the table of what they did."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.ops.sweep import MARGIN, PRECISIONS, Verdict, database, sweep

RESULTS = Path(__file__).with_name("RESULTS.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each operation and precision; 1 if one is at fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.ops", description=__doc__)
    parser.add_argument("operations", nargs="*", help="names as in the database; all if none is given")
    parser.add_argument("--samples", type=int, default=3, help="samples of each operation")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="one of the precisions; both by default")
    parser.add_argument("--part", default="1/1", help="I/N: the I-th of N parts of the database")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} beside this file")
    chosen = parser.parse_args(arguments)
    known = database()
    names = chosen.operations or sorted(known)
    part, parts = map(int, chosen.part.split("/"))
    verdicts: list[Verdict] = []
    start = time.perf_counter()
    for name in names[part - 1 :: parts]:
        for verdict in sweep(known[name], precisions=chosen.precision or PRECISIONS, num_samples=chosen.samples):
            print(line(verdict), flush=True)
            verdicts.append(verdict)
    print(f"\n{summary(verdicts)}\n{time.perf_counter() - start:.0f} s")
    if chosen.write:
        RESULTS.write_text(page(verdicts, chosen.samples))
    return int(any(v.status == "fault" for v in verdicts))


def line(v: Verdict) -> str:
    errors = f"{v.forward:9.2g} {v.backward:9.2g}"
    return "  ".join([f"{v.op:44} {v.precision} {v.status:20} {errors}", " ".join(v.formats), *v.faults])


def summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(v.status.partition(":")[0] for v in verdicts)
    return f"{len({v.op for v in verdicts})} operations: " + ", ".join(f"{n} {status}" for status, n in counts.most_common())


def page(verdicts: Sequence[Verdict], samples: int) -> str:
    """RESULTS.md."""
    rows = [
        f"| `{v.op}` | {v.precision} | {v.status} | {v.forward:.2g} | {v.backward:.2g} | {' '.join(v.formats)} |"
        for v in verdicts
    ]
    head = f"""\
# The operator database through fxamp

Made by `python -m tests.ops --samples {samples} --write` (`make test-ops` takes 3 samples) with torch
{torch.__version__.split("+")[0]}, forward and backward: {summary(verdicts)}.

Errors are parts of what is allowed ({MARGIN:g} times the error of the format, see `tests/ops/sweep.py`); `formats` is what the
operation computed in when it was fed low values.

| operation | precision | status | forward | backward | formats |
|---|---|---|---|---|---|
"""
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
