from __future__ import annotations

from dataclasses import replace

import pytest

from bench import compare, report, rows
from bench.__main__ import RESULTS
from bench.measure import Memory
from bench.rows import Dispatch, PassTime, Swap, VariantMemory
from bench.systems import ANCHOR, CONTROL, REFERENCE
from tests.bench.make import CPU, ceilings, distributed, facts, fxamp_facts, measurement, run
from tests.house.source import ROOT

ROWS = [
    ceilings(),
    measurement(REFERENCE, (40.0, 40.0, 44.0), precision="fp32"),
    measurement(ANCHOR),
    measurement("fxamp-bf16", (12.0, 12.0, 12.6)),
    measurement("bf16-weights-compile", (8.0,) * 3, family="ceiling"),
]


LAUNCHES = facts().launches


def reserving(gib: float) -> Memory:
    return Memory(allocated_bytes=2**30, reserved_bytes=int(gib * 2**30))


def page_of(*measured, causes=None):
    return report.page(compare.results_of(measured), causes or {})


def row_of(text: str, system: str) -> dict[str, str]:
    """The cells of a system's line, by the titles of its table."""
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("|") and system in line.split("|")[1] and i > 15)
    head = next(i for i in range(at, -1, -1) if lines[i].startswith("| --- ")) - 1
    return dict(zip(*([c.strip() for c in lines[i].strip("|").split("|")] for i in (head, at)), strict=True))


# ---- the files of the project ----------------------------------------------------------------------------------------
def test_results_page_agrees_with_the_json_lines():
    page_path = RESULTS.parent / "RESULTS.md"
    written = page_path.read_text(encoding="utf-8") if page_path.exists() else None
    has_rows = any(RESULTS.glob("*.jsonl"))
    assert (written is not None) == has_rows, "python -m bench --report"
    causes = report.read_causes(RESULTS.parent / "causes.toml")
    drawn = report.pictures(RESULTS, page_path)
    assert written is None or written == report.page(report.load(RESULTS), causes, drawn), "python -m bench --report"


def test_readme_agrees_with_the_json_lines():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    all_results = report.load(RESULTS)
    if all_results:
        table = report.readme_table(all_results, report.pictures(RESULTS, ROOT / "README.md"))
        assert readme == report.with_table(readme, table), "python -m bench --report"
    else:
        assert report.BEGIN not in readme, "the README has a place for a table, and there are no results"


def test_causes_are_of_rows_that_lose():
    causes = report.read_causes(RESULTS.parent / "causes.toml")
    assert not undue(report.load(RESULTS), causes)


def undue(all_results, causes) -> set[tuple[str, str]]:
    """Causes of rows that lose to nobody, or that newer ones have made history."""
    due = {
        (d.fxamp.workload, d.fxamp.system)
        for r in all_results
        for d in compare.defeats(r)
        if not compare.newer(d.fxamp, r)
    }
    due |= {
        (defeat.fxamp.workload, report.memory_of(defeat.fxamp.system))
        for results in all_results
        for defeat in compare.memory_defeats(results)
    }
    return {(workload, system) for workload in causes for system in causes[workload]} - due


def test_a_cause_of_a_row_that_does_not_lose_is_undue():
    cause = {"tiny-gpt": {"fxamp-bf16": "Copies of outputs."}}
    assert undue(compare.results_of(ROWS), cause) == set()
    since = measurement("fxamp-bf16-train-step", run=run("r2", fxamp_source="newer", date="2025-01-02"))
    for history in (ROWS[:3], [*ROWS, since]):
        assert undue(compare.results_of(history), cause) == {("tiny-gpt", "fxamp-bf16")}


# ---- README ----------------------------------------------------------------------------------------------------------
def test_table_goes_between_the_markers():
    readme = f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nmore\n"
    assert report.with_table(readme, "new") == f"# Title\n\n{report.BEGIN}\nnew\n{report.END}\n\nmore\n"
    for untouched in ("no markers\n", f"only {report.BEGIN}\n", f"only {report.END}\n"):
        assert report.with_table(untouched, "new") == untouched


def test_readme_shows_a_gpu_if_there_is_one():
    on_cpu = measurement(ANCHOR, run=run(machine=CPU))
    results = sorted(compare.results_of([on_cpu, *ROWS]), key=lambda r: r.machine.device_type == "cpu")
    table = report.readme_table(results)
    assert "Some GPU, torch 2.11.0" in table
    assert "1.20" in table


def test_written_files(tmp_path):
    rows.append(tmp_path / "results" / "gpu.jsonl", ROWS)
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    report.write(tmp_path / "results", tmp_path / "RESULTS.md", readme, {})
    assert (tmp_path / "RESULTS.md").read_text() == page_of(*ROWS)
    assert report.readme_table(compare.results_of(ROWS)) in readme.read_text()

    (tmp_path / "results" / "some-gpu.svg").touch()
    (tmp_path / "results" / "of-others.svg").touch()
    report.write(tmp_path / "results", tmp_path / "RESULTS.md", readme, {})
    for page in (readme, tmp_path / "RESULTS.md"):
        assert page.read_text().count("](results/some-gpu.svg)") == 1
        assert "of-others" not in page.read_text()


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_a_row_of_the_table():
    cells = row_of(page_of(*ROWS), "**fxamp-bf16**")
    assert cells == {
        "system": "**fxamp-bf16**",
        "time, ms": "12 [12..12.6]",
        f"vs {ANCHOR}": "1.20 [1.20..1.26]",
        "vs peer": "1.20 [1.20..1.26]",
        "vs same mode": "1.20 [1.20..1.26]",
        "throughput": "83.3k tokens/s",
        "matrix, copy": "17%, 2%",  # 1e12 / 5e14 and 1e9 / 4e12 seconds of 12 ms
        "memory": "2.00 / 3.00 GiB",
        "compile": "12.0 s, 2.0 s",
        "launches": "100 + 2",
        "waits": "1",
        "casts": "3, 6 MB",
        "loss": "3.0000",
    }


def test_fastest_first():
    text = page_of(*ROWS)
    order = [text.index(f"\n| {name} |") for name in ("*bf16-weights-compile*", ANCHOR, "**fxamp-bf16**", REFERENCE)]
    assert order == sorted(order)


def test_no_absolute_time_from_a_cpu():
    text = page_of(*(replace(m, run=run(machine=CPU)) for m in ROWS))
    cells = row_of(text, "**fxamp-bf16**")
    assert not cells.keys() & {"time, ms", "throughput", "memory", "launches", "waits"}
    assert cells["vs peer"] == "1.20 [1.20..1.26]"
    assert "12.6" not in text


def test_a_rate_that_is_only_emulated_has_no_share():
    cells = row_of(page_of(*ROWS[1:], ceilings(ceilings=replace(ROWS[0].ceilings, matmul_flops_per_s={}))), ANCHOR)
    assert cells["matrix, copy"] == "?, 2%"


def test_contended_compile_times_are_marked():
    m = measurement(ANCHOR, facts=facts(num_parallel_builds=4), warm_compile_s=None)
    assert row_of(page_of(m), ANCHOR)["compile"] == "12.0* s"


def test_inference_shows_its_error():
    m = measurement(ANCHOR, workload_kind="infer", facts=facts(losses=(), output_error=0.0123))
    assert row_of(page_of(m), ANCHOR)["loss"] == "1.2e-02"


def test_what_is_no_result_is_flagged_and_wins_nothing():
    broken = measurement("fxamp-bf16", (5.0,) * 3, facts=facts(losses=(5.0,) * 8, fxamp=fxamp_facts()))
    text = page_of(*ROWS[:3], broken)
    assert "**fxamp-bf16** ✗" in text
    assert "fxamp-bf16: trains worse" in text
    headline = text[: text.index("### Where fxamp loses")]
    assert "fxamp-bf16" not in headline.replace("`", "")


def test_headline_has_the_best_of_both():
    faster = measurement("fxamp-bf16-train-step", (5.0,) * 3)
    (line,) = [x for x in report.headline(compare.results_of([*ROWS, faster])[0]) if "tiny-gpt | 16 bit" in x]
    assert line == f"| tiny-gpt | 16 bit | {ANCHOR}, 10 | fxamp-bf16-train-step, 5 | **0.50** | 1.00 | 0123456 |"


# ---- defeats, errors, gaps -------------------------------------------------------------------------------------------
def test_defeats_and_their_causes():
    text = page_of(*ROWS, causes={"tiny-gpt": {"fxamp-bf16": "Copies of outputs."}})
    section = text[text.index("### Where fxamp loses") : text.index("### tiny-gpt")]
    assert f"**tiny-gpt / fxamp-bf16**: 1.20 [1.20..1.26] of {ANCHOR} (0123456, 2025-01-01). Copies of outputs." in section
    assert "Kernels, fxamp / peer: matmul 7 / 7, cast 1.5 / 1.5." in section
    assert "*not explained yet*" in page_of(*ROWS)
    assert "No row of fxamp takes more than 1.02" in page_of(*ROWS[:3])


@pytest.mark.parametrize(("fxamp_ms", "is_of_mode"), [(10.1, True), (12.0, False)])
def test_a_defeat_by_a_peer_in_another_mode_says_how_its_own_mode_compares(fxamp_ms, is_of_mode):
    """The anchor takes 10 ms in the default mode; a peer with CUDA graphs takes 5."""
    replaying = measurement("bf16-autocast-reduce-overhead", (5.0,) * 3, mode="reduce-overhead")
    text = page_of(*ROWS[:3], replaying, measurement("fxamp-bf16", (fxamp_ms,) * 3))
    assert ("The peer runs in another mode" in text) == is_of_mode
    assert ("*not explained yet*" in text) != is_of_mode


@pytest.mark.parametrize(("control_ms", "is_noise"), [(13.0, True), (7.0, True), (10.5, False)])
def test_a_defeat_smaller_than_the_noise_is_called_so(control_ms, is_noise):
    """fxamp takes 1.20 of the anchor's time."""
    control = measurement(CONTROL, (control_ms,) * 3, family="control")
    text = page_of(*ROWS, control)
    assert ("Within noise" in text) == is_noise
    assert ("*not explained yet*" in text) != is_noise
    assert f"two processes of {ANCHOR} differ by a factor of" in text
    assert CONTROL not in text[: text.index("### tiny-gpt")]  # no peer, though it may be the fastest


@pytest.mark.parametrize(("fastest_ms", "is_doubted"), [(9.9, True), (10.1, False)])
def test_a_defeat_that_repetitions_do_not_agree_on_is_called_so(fastest_ms, is_doubted):
    text = page_of(*ROWS[:3], measurement("fxamp-bf16", (12.0, 12.0, fastest_ms)))
    assert ("Undecided" in text) == is_doubted
    assert ("*not explained yet*" in text) != is_doubted


def test_a_defeat_that_newer_rows_have_made_history_is_marked_and_comes_last():
    """The worst row of all is of a source before that of the other two."""
    old = measurement("fxamp-bf16", (20.0,) * 3)
    now = run("r2", fxamp_source="newer", date="2025-01-02", commit="fedcba9876543210")
    times_ms = {"tiny-gpt": 9.0, "mlp": 12.0}
    since = [measurement("fxamp-bf16-train-step", (ms,) * 3, run=now, workload=w) for w, ms in times_ms.items()]
    text = page_of(*ROWS[:3], old, *since, replace(ROWS[2], workload="mlp"))
    section = text[text.index("### Where fxamp loses") : text.index("### Where fxamp holds")]
    assert section.index("**mlp / fxamp-bf16-train-step**: 1.20") < section.index("**tiny-gpt / fxamp-bf16** †: 2.00")
    assert f"newer rows here: fxamp-bf16-train-step 0.90 of {ANCHOR} (fedcba9, 2025-01-02)" in section
    assert section.count("*not explained yet*") == 1
    assert "| **fxamp-bf16** † | 20" in text
    assert "- † of an older fxamp than fedcba9, 2025-01-02" in text
    assert "which other rows here are of: fxamp-bf16 (0123456, 2025-01-01)." in text


def test_the_headline_marks_rows_of_an_older_source():
    newer = measurement("fxamp-bf16-train-step", (13.0,) * 3, run=run("r2", fxamp_source="newer", date="2025-01-02"))
    for measured, ends in ((ROWS, "| 0123456 |"), ([*ROWS, newer], "| 0123456 † |")):
        (line,) = [x for x in report.headline(compare.results_of(measured)[0]) if "tiny-gpt | 16 bit" in x]
        assert line.endswith(ends)


def test_memory_is_compared_where_cuda_graphs_are_alike():
    """The best of fxamp replays; the best peer does not, and another one does."""
    assert LAUNCHES is not None
    replaying, launching = (replace(LAUNCHES, num_graph_launches=n) for n in (1, 0))
    fast, alike, ours = (
        measurement(system, (ms,) * 3, facts=facts(launches=launches, memory=reserving(gib)))
        for system, ms, launches, gib in (
            (ANCHOR, 10.0, launching, 6),
            ("bf16-autocast-reduce-overhead", 11.0, replaying, 10),
            ("fxamp-bf16-train-step", 5.0, replaying, 12),
        )
    )
    text = page_of(fast, alike, ours)
    assert f"| tiny-gpt | 16 bit | {ANCHOR}, 10 | fxamp-bf16-train-step, 5 | **0.50** | 1.20 |" in text
    assert "- **tiny-gpt / fxamp-bf16-train-step**: 1.20 of bf16-autocast-reduce-overhead, 12.00 / 10.00 GiB" in text
    assert "No row of fxamp reserves more" in page_of(fast, alike, replace(ours, facts=alike.facts))


def test_losses_without_fp32_are_said_to_be_unchecked():
    says = f"no row of {REFERENCE}: whether these losses fall"
    assert says in page_of(*ROWS[2:])
    assert says not in page_of(*ROWS)
    inferred = facts(losses=(), output_error=0.01, fxamp=fxamp_facts())
    assert says not in page_of(*(replace(m, workload_kind="infer", facts=inferred) for m in ROWS[2:]))


def test_errors_and_gaps_are_listed():
    failed = measurement("fp16", None, status="error", reason="RuntimeError: no", facts=None)
    absent = measurement("fp8", None, status="unavailable", reason="torchao is not installed", facts=None)
    text = page_of(*ROWS, failed, absent)
    assert "- **tiny-gpt / fp16**: RuntimeError: no" in text
    assert "- torchao is not installed: fp8 (tiny-gpt)" in text


def test_a_precision_that_did_not_run_is_said():
    other = measurement("fxamp-bf16", facts=facts(fxamp=fxamp_facts(precisions=("fp32",), notes=("no bf16 here",))))
    assert "fxamp-bf16: ran in fp32: no bf16 here" in page_of(*ROWS[:3], other)


def test_groups_are_said():
    together, alone = measurement(ANCHOR), measurement("fp32-compile", together=("fp32-compile", ANCHOR))
    assert f"measured in 2 groups, each beside {ANCHOR}" in page_of(together, alone)
    assert "groups" not in page_of(together, measurement("fp32-compile"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"commit": None}, "no git (source ffffffffffff"),
        ({"is_dirty": True}, "0123456789ab with changes"),
        ({"num_threads": 1}, "CPU threads: 1"),
    ],
)
def test_origin_of_rows(changes, says):
    assert says in page_of(measurement(ANCHOR, run=run(**changes)))


# ---- growth ----------------------------------------------------------------------------------------------------------
def test_growth():
    sweep = [
        replace(measurement(system, ms), workload=f"w{n}", sweep_over="layers", sweep_value=n)
        for n in (16, 2)
        for system, ms in ((ANCHOR, (10.0,) * 3), ("fxamp-bf16", (10.0 * n,) * 3))
    ]
    text = page_of(
        *ROWS,
        *sweep,
        PassTime(run=run(), num_dynamo_nodes=992, num_joint_nodes=7642, stage_ms={"plan": 70.4, "joint": 30, "min_cut": 9},
                 compile_s=4.56),
        Dispatch(run=run(), what="training", inductor_us=(10.0, 20.0), fxamp_us=(13.0, 23.0)),
    )
    assert "- passes: 0123456 (source ffffffffffff, 2025-01-01), `python -m bench`\n- calls: 0123456" in text
    assert "| 992, 7642 | 70 | 30 | 100 | 101 | 9 | 4.6 |" in text
    assert "| training | 15.0 | 18.0 | +3.0 [+3.0..+3.0] |" in text
    # Four layers are tiny-gpt, which has a table of its own too; fp32-eager was not swept.
    table = """\
| layers | bf16-autocast-compile | fxamp-bf16 |
| --- | --- | --- |
| 2 | 1.00, 10 ms | 2.00, 20 ms |
| 4 | 1.00, 10 ms | 1.20 [1.20..1.26], 12 ms |
| 16 | 1.00, 10 ms | 16.00, 160 ms |
"""
    assert table in text
    assert "### w16" not in text
    assert "### tiny-gpt" in text
    assert "against batch size" not in text


def test_changes_of_precision():
    text = page_of(*ROWS, Swap(run=run(), what="a train step", kept_us=(100.0, 200.0), swapped_us=(110.0, 206.0)))
    assert "| a train step | 150.0 | 158.0 | +8.0 [+6.0..+10.0] |" in text


NOTHING_HELD = VariantMemory(run=run(), num_variants=1, num_parameters=1, host_bytes=0, device_bytes=None, compile_s=3.0)


def test_memory_of_variants():
    def holding(num_variants: int, mib: int) -> VariantMemory:
        held = replace(NOTHING_HELD, num_variants=num_variants, host_bytes=mib * 2**20)
        return replace(held, num_parameters=2_100_000)

    text = page_of(*ROWS, holding(4, 70), holding(1, 40), holding(2, 50))
    assert "2.1 million parameters" in text
    assert "| 1 | 40 |  |  | 3.0 |\n| 2 | 50 | 10.0 |  | 3.0 |\n| 4 | 70 | 10.0 |  | 3.0 |" in text


# ---- several processes -----------------------------------------------------------------------------------------------
def test_processes_stand_beside_each_by_itself():
    text = page_of(
        distributed(ANCHOR, (12.0, 12.0, 12.0)),
        distributed("fxamp-bf16", (10.0, 10.0, 10.0), note="0 replayed"),
        distributed("fxamp-bf16", (9.0, 9.0, 9.0), strategy="alone"),
        distributed("fxamp-bf16-train-step", run=run("r2")),  # of another job, which says nothing about this one
    )
    assert "#### gpt2, DDP, 2 processes" in text
    row = row_of(text, "fxamp-bf16 ")
    assert (row["time, ms"], row["throughput of all"], row["efficiency"]) == ("10", "200k tokens/s", "90.0%")
    assert row[f"vs {ANCHOR}"] == "0.83"
    assert (row["memory of one"], row["first steps"], row["loss"]) == ("2.00 / 3.00 GiB", "40 s", "3.0000")
    other = row_of(text, "fxamp-bf16-train-step")
    assert (other[f"vs {ANCHOR}"], other["efficiency"]) == ("", "")
    assert "- `fxamp-bf16`: 0 replayed" in text


def test_without_such_rows_there_is_no_such_chapter():
    assert "### Several processes" not in page_of(*ROWS)
