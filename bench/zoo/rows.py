"""What the zoo writes: one JSON line for each architecture, and the tables made of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rich.table import Table

from bench.rows import load
from bench.zoo.measure import Lower, Result

LARGEST_ERROR_RATIO: Final = 1.1
"""Of fxamp's error to autocast's, of outputs and of all gradients."""

LARGEST_PARAMETER_RATIO: Final = 1.5
"""The same for the mean over parameters, which a few small gradients may decide: beyond it something is wrong, not noisy."""

WHAT: Final = MappingProxyType(
    {"outputs": LARGEST_ERROR_RATIO, "gradients": LARGEST_ERROR_RATIO, "parameters": LARGEST_PARAMETER_RATIO}
)

CASTS_GEOMETRIC_MEAN: Final = 0.8
"""Of the bytes that casts move, to autocast's, with output_dtype="low"."""

FXAMP: Final = ("fxamp-fp32", "fxamp-bf16", "fxamp-fp16", "fxamp-bf16-low")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One architecture, measured once."""

    name: str
    lower: Lower
    num_seeds: int
    versions: dict[str, str]
    fxamp_source: str
    """Digest of fxamp's source, as `bench.origin.digest` makes it."""
    results: dict[str, Result]
    """By system."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(line: str) -> Row:
        return load(Row, json.loads(line))


def read(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file."""
    return [Row.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows sorted by lowering and name, so that a change of one is a change of one line."""
    path.write_text("".join(f"{row.to_json()}\n" for row in sorted(rows, key=lambda row: (row.lower, row.name))))


# ---- ratios -------------------------------------------------------------------------------------------------------------
def ratio(own: Sequence[float], peer: Sequence[float]) -> float:
    """Geometric mean over seeds of own error to peer's. Where neither is a finite number they are equals."""
    logs: list[float] = []
    for a, b in zip(own, peer, strict=True):
        if not math.isfinite(b):
            continue  # out of range for the peer: nothing to compare with
        if not math.isfinite(a):
            return math.inf
        if a != b:
            logs.append(math.log(a or 5e-324) - math.log(b or 5e-324))
        else:
            logs.append(0.0)
    return math.exp(statistics.fmean(logs)) if logs else 1.0


def error_ratio(row: Row, precision: str, what: str) -> float | None:
    """fxamp's error to autocast's, of "outputs", "gradients" or "parameters"; None if either did not run."""
    own, peer = (row.results.get(f"{compiler}-{precision}") for compiler in ("fxamp", "autocast"))
    if own is None or peer is None or own.errors is None or peer.errors is None:
        return None
    return ratio(getattr(own.errors, what), getattr(peer.errors, what))


def cast_ratio(row: Row, what: str) -> float | None:
    """"cast_bytes" or "num_casts" of fxamp with output_dtype="low" to autocast's; None if either did not run."""
    own, peer = row.results.get("fxamp-bf16-low"), row.results.get("autocast-bf16")
    if own is None or peer is None or own.traffic is None or peer.traffic is None:
        return None
    a, b = getattr(own.traffic, what), getattr(peer.traffic, what)
    return a / b if b else (1.0 if not a else math.inf)


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers; 1 if there are none."""
    logs = [math.log(v) for v in values if v > 0]
    return math.exp(statistics.fmean(logs)) if logs else 1.0


def faults(row: Row) -> list[str]:
    """What fxamp owes and did not do: whatever compiles without it compiles with it, fp32 is bitwise, errors are bounded."""
    stock = row.results["stock"]
    if stock.failure is not None:
        return []
    found = [f"{name}: {r.failure}" for name in FXAMP if (r := row.results.get(name)) is not None and r.failure is not None]
    identity = row.results.get("fxamp-fp32")
    if identity is not None and identity.is_stock_bitwise is False:
        found.append("fxamp-fp32: not bit for bit what the same lowering gives without fxamp")
    for precision in ("bf16", "fp16"):
        for what, bound in WHAT.items():
            value = error_ratio(row, precision, what)
            if value is not None and value > bound:
                found.append(f"fxamp-{precision}: error of {what} is {value:.2f} times autocast's")
    return found


# ---- tables -------------------------------------------------------------------------------------------------------------
COLUMNS: Final = (
    "architecture", "stock", "fp32", "bf16", "fp16", "graphs", "outputs bf16", "gradients bf16", "parameters bf16",
    "outputs fp16", "gradients fp16", "parameters fp16", "cast bytes", "casts",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    systems = ("stock", "fxamp-fp32", "fxamp-bf16", "fxamp-fp16")
    ran = [_ran(row.results.get(name)) for name in systems]
    errors = [_number(error_ratio(row, p, what)) for p in ("bf16", "fp16") for what in WHAT]
    graphs = max(r.num_graphs for r in row.results.values())
    casts = [_number(cast_ratio(row, what)) for what in ("cast_bytes", "num_casts")]
    return (row.name, *ran, str(graphs or "-"), *errors, *casts)


def _ran(result: Result | None) -> str:
    if result is None:
        return "-"
    return "ok" if result.failure is None else "fails"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(rows: Sequence[Row]) -> Table:
    """For a terminal."""
    out = Table(title="errors and casts of fxamp as a multiple of autocast's")
    for index, column in enumerate(COLUMNS):
        out.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        out.add_row(*cells(row), style="red" if faults(row) else "")
    return out


def summary(rows: Sequence[Row]) -> list[str]:
    """The figures over all architectures, one sentence each."""
    compiling = [row for row in rows if row.results["stock"].failure is None]
    passing = [row for row in compiling if all(r.failure is None for n, r in row.results.items() if n in FXAMP)]
    lines = [f"Of {len(rows)} architectures {len(compiling)} compile without fxamp, and {len(passing)} of those with it."]
    for precision in ("bf16", "fp16"):
        both = [error_ratio(row, precision, what) for row in rows for what in ("outputs", "gradients")]
        ratios = [ratio for ratio in both if ratio is not None]
        if ratios:
            mean, largest = geometric_mean(ratios), max(ratios)
            lines.append(f"Error in {precision}: geometric mean {mean:.3f}, largest {largest:.2f} times autocast's.")
    casts = [r for row in rows if (r := cast_ratio(row, "cast_bytes")) is not None]
    if casts:
        lines.append(
            f'Bytes of casts with output_dtype="low": geometric mean {geometric_mean(casts):.2f} times autocast\'s, '
            f"below on {sum(r < 1 for r in casts)} of {len(casts)}, above on {sum(r > 1 for r in casts)}."
        )
    return lines


def markdown(rows: Sequence[Row]) -> str:
    """The committed table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)
