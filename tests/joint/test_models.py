"""The EXACT passes on joint graphs of layers: outputs and gradients bit for bit as without the passes, from fewer casts."""

from __future__ import annotations

import copy

import pytest
import torch

import fxamp
from fxamp import joint
from tests.programs import everything, pull, small_models

NAMES = ("transformer", "attention", "residual", "gated", "group_norm")


@pytest.mark.parametrize("name", NAMES)
def test_bitwise(name: str, monkeypatch: pytest.MonkeyPatch):
    model, inputs = small_models()[name]

    def run() -> tuple[dict[str, torch.Tensor], int]:
        torch._dynamo.reset()
        mine, amp = copy.deepcopy(model), fxamp.Amp(precision="bf16", lower="aot_eager")
        outputs = torch.compile(mine, backend=amp)(*inputs)
        pull(outputs)
        return everything(mine, outputs), len(amp.graphs[0].variants["bf16"].casts)

    got, num_casts = run()
    monkeypatch.setattr(joint, "EXACT", ())
    want, num_without = run()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert num_casts <= num_without
    assert num_casts < num_without or name not in ("transformer", "residual")
