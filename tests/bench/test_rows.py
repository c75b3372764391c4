from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from bench import rows
from bench.rows import Dispatch, PassTime, Swap, VariantMemory
from tests.bench.make import CPU, GPU, ceilings, distributed, facts, measurement, run

ROWS = [
    measurement("fxamp-bf16"),
    measurement("fp32-eager", None, status="error", reason="RuntimeError: no", facts=None, work=None),
    measurement(
        "fp32-compile", facts=facts(memory=None, launches=None, output_error=0.5), sweep_over="layers", sweep_value=4
    ),
    ceilings(),
    PassTime(run=run(), num_dynamo_nodes=10, num_joint_nodes=30, stage_ms={"plan": 1.0}, compile_s=2.0),
    Dispatch(run=run(machine=CPU), what="training", inductor_us=(1.0, 2.0), fxamp_us=(3.0, 4.0)),
    Swap(run=run(), what="a train step", kept_us=(1.0,), swapped_us=(2.0,)),
    distributed("fxamp-bf16", memory=None, note="replayed"),
    VariantMemory(run=run(), num_variants=2, num_parameters=10, host_bytes=None, device_bytes=4, compile_s=3.0),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_what_is_written_is_read(tmp_path, row):
    path = tmp_path / "deep" / "results.jsonl"
    rows.append(path, [row])
    assert list(rows.read(path)) == [row]


def test_rows_are_appended_in_order(tmp_path):
    path = tmp_path / "results.jsonl"
    rows.append(path, ROWS[:2])
    rows.append(path, ROWS[2:])
    assert list(rows.read(path)) == ROWS
    assert list(rows.read(tmp_path / "none.jsonl")) == []


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "results.jsonl"
    rows.append(path, ROWS[:2])
    path.write_text(path.read_text()[:-20])
    assert list(rows.read(path)) == ROWS[:1]
    # The next run starts a line of its own.
    rows.append(path, ROWS[2:3])
    assert list(rows.read(path)) == [ROWS[0], ROWS[2]]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "measurement", \n')
    with pytest.raises(json.JSONDecodeError):
        list(rows.read(path))


def test_a_loss_that_is_not_a_number_survives(tmp_path):
    path = tmp_path / "results.jsonl"
    rows.append(path, [measurement("fxamp-bf16", facts=facts(losses=(1.0, math.nan, math.inf)))])
    (row,) = rows.read(path)
    assert isinstance(row, rows.Measurement)
    assert row.facts is not None
    assert math.isnan(row.facts.losses[1])
    assert row.facts.losses[2] == math.inf


def test_a_field_that_nobody_knows_is_an_error(tmp_path):
    path = tmp_path / "results.jsonl"
    rows.append(path, ROWS[:1])
    path.write_text(path.read_text().replace('"workload_about"', '"workload_title"'))
    with pytest.raises(KeyError, match="workload_title"):
        list(rows.read(path))


def test_slugs():
    assert GPU.slug == "some-gpu"
    assert replace(CPU, device="AMD EPYC (R) 7-Core").slug == "amd-epyc-r-7-core-2-cpus"
