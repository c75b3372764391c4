"""Two GPUs over NCCL: the example trains with overflows planted on one rank at a time, and itself compares the ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.house.source import ROOT

NUM_STEPS, OVERFLOW_EVERY = 40, 8


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("how", ["loop", "train_step"])
def test_ranks_stay_equal(how: str):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--strategy", "ddp", "fsdp2", "--precision", "bf16", "fp16", "--steps", str(NUM_STEPS)]
    arguments += ["--overflow-every", str(OVERFLOW_EVERY), *(["--train-step"] if how == "train_step" else [])]
    done = subprocess.run(
        [*command, "examples/train_distributed.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "2 ranks equal" in line]
    assert [line.split(":")[0] for line in told] == [
        f"{strategy} {precision} {how}" for strategy in ("ddp", "fsdp2") for precision in ("bf16", "fp16")
    ]
    assert all(f"{NUM_STEPS // OVERFLOW_EVERY} steps skipped" in line for line in told)
