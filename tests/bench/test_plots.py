"""Pictures: what they show, and that those of the project show what its rows say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import compare, plots, report
from bench.__main__ import RESULTS
from bench.rows import PassTime, VariantMemory
from bench.systems import ANCHOR, REFERENCE
from tests.bench.make import CPU, ceilings, facts, fxamp_facts, measurement, run

ROWS = [
    ceilings(),
    measurement(REFERENCE, (40.0,) * 3, precision="fp32"),
    measurement(ANCHOR),
    measurement("bf16-autocast-reduce-overhead", (8.0,) * 3),
    measurement("fxamp-bf16", (6.0,) * 3),
    measurement("bf16-weights-compile", (5.0,) * 3, family="ceiling"),
]
OTHERS = [replace(row, workload=workload) for workload in ("gpt2", "mlp") for row in ROWS[1:]]
SWEPT = [
    replace(measurement(system, (ms,) * 3), workload=f"w{n}", sweep_over="layers", sweep_value=n)
    for n in (16, 2)
    for system, ms in ((ANCHOR, 10.0), ("fxamp-bf16", 5.0 * n))
]
PASSES = [
    PassTime(run=run(), num_dynamo_nodes=n, num_joint_nodes=3 * n, stage_ms={"plan": n / 10, "min_cut": 1.0}, compile_s=1.0)
    for n in (1000, 100)
]
VARIANTS = [
    VariantMemory(run=run(), num_variants=n, num_parameters=1, host_bytes=n, device_bytes=None, compile_s=1.0) for n in (2, 1)
]


def values_of(*measured) -> dict[str, plots.Values]:
    return {figure.name: figure.values for figure in plots.figures(compare.results_of(measured))}


def test_pictures_of_the_project_show_what_the_rows_say():
    """Needs no matplotlib."""
    wanted = {figure.name: figure.digest for figure in plots.figures(report.load(RESULTS))}
    assert {p.name: plots.digest_in(p) for p in RESULTS.glob("*.svg")} == wanted, "python -m bench --report --plots"


def test_times_stand_over_the_best_peer():
    row, *_ = values_of(*ROWS, *OTHERS)["some-gpu.svg"]
    assert (row["workload"], row["best"]) == ("tiny-gpt", 0.75)
    assert sorted(row["dots"]) == [
        ["ceiling", 0.625, False],
        ["fxamp", 0.75, False],
        ["peer", 1.0, False],
        ["peer", 1.25, False],
    ]  # and not fp32


def test_what_does_not_train_is_not_shown_and_what_is_old_is_marked():
    broken = measurement("fxamp-bf16-reduce-overhead", (1.0,) * 3, facts=facts(losses=(5.0,) * 8, fxamp=fxamp_facts()))
    newer = measurement("fxamp-bf16-train-step", (4.0,) * 3, run=run("r2", fxamp_source="newer", date="2025-01-02"))
    row, *_ = values_of(*ROWS, *OTHERS, broken, newer)["some-gpu.svg"]
    assert row["best"] == 0.5
    assert sorted(dot for dot in row["dots"] if dot[0] == "fxamp") == [["fxamp", 0.5, False], ["fxamp", 0.75, True]]


def test_growth():
    found = values_of(*ROWS, *OTHERS, *SWEPT, *PASSES, *VARIANTS)
    assert found.keys() == {"some-gpu.svg", "some-gpu-passes.svg", "some-gpu-variants.svg", "some-gpu-sweeps.svg"}
    assert found["some-gpu-passes.svg"] == {"nodes": [100, 1000], "stages": {"plan": [10.0, 100.0], "min_cut": [1.0, 1.0]}}
    assert found["some-gpu-variants.svg"] == {"variants": [1, 2], "bytes": {"host": [1, 2]}}
    assert found["some-gpu-sweeps.svg"] == {
        "layers": {ANCHOR: [[2, 10.0], [4, 10.0], [16, 10.0]], "fxamp-bf16": [[2, 10.0], [4, 6.0], [16, 80.0]]},
    }


def test_no_absolute_time_from_a_cpu():
    assert values_of(*(replace(row, run=run(machine=CPU)) for row in SWEPT)) == {}


def test_too_little_for_a_picture():
    two = [replace(row, workload="gpt2") for row in ROWS[1:]]
    assert values_of(*ROWS, *two, PASSES[0], VARIANTS[0]) == {}


def test_drawn_pictures_say_what_they_show(tmp_path):
    pytest.importorskip("matplotlib")
    results = compare.results_of([*ROWS, *OTHERS, *SWEPT, *PASSES, *VARIANTS])
    drawn = plots.draw(results, tmp_path)
    assert {p.name: plots.digest_in(p) for p in drawn} == {f.name: f.digest for f in plots.figures(results)}
    assert plots.draw(results, tmp_path) == drawn
    assert plots.are_due(tmp_path)
    assert not plots.are_due(tmp_path / "none")
    slower = replace(ROWS[4], timing=measurement("fxamp-bf16", (7.0,) * 3).timing)
    changed = plots.figures(compare.results_of([*ROWS[:4], slower, *OTHERS]))[0]
    assert changed.name == "some-gpu.svg"
    assert changed.digest != plots.digest_in(tmp_path / "some-gpu.svg")
