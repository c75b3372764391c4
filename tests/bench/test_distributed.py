from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench import distributed, rows
from bench.rows import Distributed
from bench.systems import ANCHOR
from tests.house.source import ROOT

STRATEGIES = {"ddp", "alone", "fsdp2"}


def test_cases_can_be_chosen():
    parse = distributed.parser().parse_args
    found = distributed.cases_of(parse(["--only", "*/ddp", "--systems", "fxamp-*"]), "cpu")
    assert [(case.strategy, case.systems) for case in found] == [("ddp", ("fxamp-bf16", "fxamp-bf16-train-step"))]
    assert {case.strategy for case in distributed.cases_of(parse([]), "cuda")} == STRATEGIES
    with pytest.raises(SystemExit, match="no case matches 'none/ddp'"):
        distributed.cases_of(parse(["--only", "none/ddp"]), "cpu")


@pytest.mark.slow
def test_two_processes_measure_every_case(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--repetitions", "1", "--block-ms", "1", "--results", str(tmp_path), "--commit", "abc"]
    done = subprocess.run(
        [*command, "-m", "bench.distributed", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.jsonl")
    found = [row for row in rows.read(path) if isinstance(row, Distributed)]
    assert {row.strategy for row in found} == STRATEGIES, done.stdout
    for case in distributed.all_cases("cpu"):
        here = {row.system: row for row in found if (row.workload, row.strategy) == (case.workload.name, case.strategy)}
        assert set(here) == set(case.systems), done.stdout
        assert here[ANCHOR].num_ranks == 2
        assert all(len(row.step_ms) == 1 and row.losses for row in here.values())
