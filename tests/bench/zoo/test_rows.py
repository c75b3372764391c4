from __future__ import annotations

import math

import pytest

from bench.joint import Traffic
from bench.zoo import report, rows
from bench.zoo.measure import Errors, Result
from bench.zoo.rows import Row


def ran(error: float = 1e-3, num_bytes: int = 100) -> Result:
    return Result(
        errors=Errors(outputs=(error, error), gradients=(error, error), parameters=(error, error)),
        traffic=Traffic(num_graphs=1, num_casts=10, cast_bytes=num_bytes),
        num_graphs=1,
    )


def row(**results: Result) -> Row:
    everything = {"stock": ran(), "autocast-bf16": ran(), "fxamp-bf16": ran(), "fxamp-bf16-low": ran()}
    changed = {name.replace("_", "-"): result for name, result in results.items()}
    return Row(
        name="net", lower="aot_eager", num_seeds=2, versions={"torch": "2"}, fxamp_source="abc", results=everything | changed
    )


@pytest.mark.parametrize(
    ("own", "peer", "want"),
    [
        ([2.0, 8.0], [1.0, 1.0], 4.0),
        ([0.0], [0.0], 1.0),
        ([math.inf, 1.0], [math.inf, 1.0], 1.0),  # out of range for both
        ([1.0, math.inf], [math.inf, 1.0], math.inf),
        ([1.0, math.nan], [1.0, 1.0], math.inf),
    ],
)
def test_ratio_is_a_geometric_mean_over_seeds(own, peer, want):
    assert rows.ratio(own, peer) == pytest.approx(want)


def test_what_counts_as_a_fault():
    assert rows.faults(row()) == []
    assert rows.faults(row(fxamp_bf16=Result(failure="E: no"))) == ["fxamp-bf16: E: no"]
    assert rows.faults(row(stock=Result(failure="E: no"), fxamp_bf16=Result(failure="E: no"))) == []
    assert len(rows.faults(row(fxamp_bf16=ran(error=1.2e-3)))) == 2  # outputs and gradients
    assert len(rows.faults(row(fxamp_bf16=ran(error=1.6e-3)))) == 3  # and parameters
    assert rows.faults(row(fxamp_fp32=Result(is_stock_bitwise=False))) != []


def test_rows_survive_the_file(tmp_path):
    path, some = tmp_path / "results.jsonl", [row(), row(fxamp_bf16=Result(failure="E: no"))]
    rows.write(path, some)
    assert rows.read(path) == some


def test_report_names_what_falls_short(tmp_path):
    rows.write(tmp_path / "results.jsonl", [row(fxamp_bf16=ran(error=2e-3), fxamp_bf16_low=ran(num_bytes=50))])
    report.write(tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "error of outputs is 2.00 times autocast's" in text
    assert "geometric mean 0.50 times autocast's, below on 1 of 1" in text
