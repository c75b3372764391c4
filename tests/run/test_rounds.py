"""Our kernels for the loss scale, beside the operations of PyTorch that they stand for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.house.source import ROOT
from tests.run import rounds


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_two_launches_are_a_round(seed: int):
    rounds.check(torch.device("cuda", 0), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_a_training_goes_by_them(seed: int):
    rounds.check_training(torch.device("cuda", 0), seed)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton, which would interpret the kernels")
def test_two_launches_are_a_round_as_triton_interprets_them():
    numpy = pytest.importorskip("numpy")
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("with NumPy 2.4 Triton's interpreter cannot loop")
    command = [sys.executable, "-m", "tests.run.rounds"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "the same bits\n", done.stderr
