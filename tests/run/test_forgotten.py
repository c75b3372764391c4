"""What a train step holds is given back with it: no program that Dynamo keeps may hold a weight."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fxamp
from fxamp.run import surroundings
from tests.run.tape import taped


class Half(nn.Module):
    """Dynamo keeps what it compiles behind a graph break in the globals of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y.relu())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("made", [Half, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))])
def test_a_step_that_nobody_has_holds_nothing(made, is_recorded, precision, monkeypatch, recwarn):
    monkeypatch.setattr(surroundings, "NUM_RIGHT", 2)  # guards in C++ hold what they compare

    def trained() -> list[weakref.ref[object]]:
        model = made()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        amp = fxamp.Amp(precision=precision, lower="aot_eager")
        step = amp.train_step(model, nn.MSELoss(), optimizer)
        if is_recorded:
            taped(step, monkeypatch)
        for _ in range(8):
            step(torch.randn(4, 8), torch.randn(4, 8))
        state = [x for states in optimizer.state.values() for x in states.values()]
        assert step.summary().num_replayed == (6 if is_recorded else 0)
        assert not is_recorded or getattr(step._glance, "_unchanged", None) is not None
        return [weakref.ref(x) for x in (step, model, optimizer, *model.parameters(), *state)]

    refs = trained()
    gc.collect()
    left = [x for ref in refs if (x := ref()) is not None]
    assert [type(x).__name__ for x in left] == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:train_step. a micro-batch runs 3 graphs")
def test_a_recorded_step_gives_its_memory_back():
    def trained() -> None:
        model = Half().cuda()
        amp = fxamp.Amp(precision="bf16")
        step = amp.train_step(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), fused=True))
        for _ in range(5):
            step(torch.randn(4, 8, device="cuda"), torch.randn(4, 8, device="cuda"))
        assert step.summary().num_replayed

    trained()
    gc.collect()
    before = torch.cuda.memory_allocated()
    trained()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
