"""The one command."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest

from bench import __main__ as command
from bench import rows, systems, workloads
from bench.rows import Dispatch, Measurement, PassTime
from bench.systems import ANCHOR
from tests.house.source import ROOT


def python_m_bench(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measured(folder) -> dict[tuple[str, str], Measurement]:
    (path,) = folder.glob("*.jsonl")
    return {(r.workload, r.system): r for r in rows.read(path) if isinstance(r, Measurement)}


def test_a_small_run_end_to_end(tmp_path):
    names = ("fp32-eager", ANCHOR, "fxamp-bf16", "fp8-torchao-rowwise")
    selection = ("--only", "mlp-small", "mlp-infer-small", "--systems", *names, "--device", "cpu")
    printed = python_m_bench("--quick", *selection, "--repetitions", "3", "--results", str(tmp_path))
    found = measured(tmp_path)
    assert found.keys() == {(w, s) for w in ("mlp-small", "mlp-infer-small") for s in names}
    for (_, system), row in found.items():
        if system == "fp8-torchao-rowwise":
            assert row.status == "unavailable"
            continue
        assert (row.status, row.reason) == ("ok", None)
        assert row.timing is not None
        assert len(row.timing.step_ms) == 3
        assert row.facts is not None
    ours = found["mlp-small", "fxamp-bf16"]
    assert ours.facts is not None
    assert ours.facts.fxamp is not None
    assert ours.facts.fxamp.num_low_ops == 5
    assert ours.facts.num_casts is not None
    assert ours.facts.num_casts >= ours.facts.fxamp.num_own_casts > 0
    text = (tmp_path / "RESULTS.md").read_text()
    assert "### mlp-small" in text
    assert "| **fxamp-bf16** |" in text
    assert str(tmp_path) not in printed.replace(f"rows: {tmp_path}", "").replace(f"tables: {tmp_path}", "")
    assert str(tmp_path) not in ours.run.command

    start_s = time.monotonic()
    assert "all known already" in python_m_bench("--quick", *selection, "--results", str(tmp_path))
    assert time.monotonic() - start_s < 60  # nothing was compiled


QUICK_S = 180
"""What `--quick` may take on two cores that do nothing else."""


@pytest.mark.slow  # three minutes
def test_quick_runs_without_errors(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python_m_bench("--quick", "--device", "cpu", "--results", str(tmp_path))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Not the time on the clock, which others on the machine make longer.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2 * QUICK_S
    found = measured(tmp_path)
    assert found.keys() == {(w, s) for w in workloads.QUICK for s in systems.QUICK}
    assert {row.reason for row in found.values()} == {None}
    (path,) = tmp_path.glob("*.jsonl")
    kinds = {type(row) for row in rows.read(path)}
    assert {PassTime, Dispatch} <= kinds


def test_help_names_every_option():
    text = python_m_bench("--help")
    options = [o for action in command.parser()._actions for o in action.option_strings]
    assert len(options) > 15
    assert all(option in text for option in options)


def test_list():
    text = python_m_bench("--list")
    assert all(name in text for name in (*workloads.all_workloads(), *systems.all_systems()))


# ---- what is asked for -----------------------------------------------------------------------------------------------
def config(*arguments: str):
    return command.config_of(command.parser().parse_args([*arguments, "--device", "cpu"]), "python -m bench")


def test_patterns():
    known = list(systems.all_systems())
    assert command.chosen(["fxamp-fp32", "fp32-*"], known, "system") == ("fp32-eager", "fp32-compile", "fxamp-fp32")
    assert command.chosen(["none"], known, "system") == ()
    with pytest.raises(SystemExit, match="no system matches 'fxmap-"):
        command.chosen(["fp32-eager", "fxmap-*"], known, "system")


def test_defaults():
    full, quick = config(), config("--quick")
    assert full.systems == tuple(systems.all_systems())
    assert full.measures_compile
    assert full.compiles_again
    assert (quick.workloads, quick.systems) == (workloads.QUICK, systems.QUICK)
    assert not quick.measures_compile
    assert (quick.does_scaling, config("--quick", "--only", "mlp-small").does_scaling) == (True, False)


def test_core_systems():
    assert set(config("--systems", "core", "fp32-compile").systems) == {*systems.CORE, "fp32-compile"}


def test_the_command_that_goes_on():
    given = ["--only", "mlp-*", "gpt2", "--budget-s", "100", "--fresh", "--systems", "core", "--jobs", "2"]
    left = {"gpt2": ["fp32-eager", ANCHOR], "mlp": [ANCHOR]}
    assert command.command_for_rest(given, left) == (
        f"python -m bench --budget-s 100 --jobs 2 --only gpt2 mlp --systems fp32-eager {ANCHOR}"
    )
    assert command.command_for_rest(["--systems=core"], {"mlp": ["x"]}) == "python -m bench --only mlp --systems x"
