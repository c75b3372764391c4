"""What a recorded step depends on, and whether it is seen when that changes. The same training runs recorded and as it is, and
has to come to the same bits; the tape knows addresses alone, as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import fxamp
from fxamp.run import train_step
from fxamp.run.train_step import TrainStep
from tests.run.tape import taped
from tests.run.test_train_step import CPU, batches, same, state_of


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.drop, self.g = nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 4)
        self.gain, self.plain = 1.0, torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.g(self.drop(torch.tanh(self.f(x))) * self.plain) * self.gain


class Bench:
    """A training of its own."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = Small()
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.weight, self.factor = torch.ones(4), 1.0
        self.another: fxamp.Amp | None = None
        self.amp = fxamp.Amp(**{"precision": "bf16", "lower": "aot_eager", **options})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.teacher(x * self.weight), y) * self.factor


    def run(self, step: TrainStep, count: int = 4) -> list[Tensor]:
        torch.manual_seed(0)
        losses = [step(x, y) for x, y in batches(CPU, count)]
        return [*state_of(self.model, self.optimizer), torch.stack(losses)]


def reset_state(b: Bench) -> None:
    b.optimizer.state.clear()


def replace_state(b: Bench) -> None:
    for state in b.optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def replace_module(b: Bench) -> None:
    b.model.g = nn.Linear(8, 4)
    b.optimizer.param_groups[0]["params"][2:] = list(b.model.g.parameters())


def pop_group(b: Bench) -> None:
    b.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    b.optimizer.param_groups.pop()


def assign_parameters(b: Bench) -> None:
    """Others in their places; the optimizer steps the old ones."""
    b.model.load_state_dict({name: p.clone() for name, p in b.model.state_dict().items()}, assign=True)


def hook_a_step(b: Bench) -> None:
    def decay(*_: Any) -> None:
        with torch.no_grad():
            b.model.g.weight.mul_(0.5)

    b.optimizer.register_step_post_hook(decay)


def attach_another(b: Bench) -> None:
    b.another = fxamp.Amp(precision="fp16", lower="aot_eager")
    b.another.attach(b.optimizer)


CHANGES: dict[str, Callable[[Bench], object]] = {
    "nothing": lambda b: None,
    "the optimizer's state is gone": reset_state,
    "a tensor of the optimizer's state is another": replace_state,
    "the optimizer's state is loaded": lambda b: b.optimizer.load_state_dict(b.optimizer.state_dict()),
    "a dropout's p is another": lambda b: setattr(b.model.drop, "p", 0.5),
    "a number of a module is another": lambda b: setattr(b.model, "gain", 0.5),
    "a number of the loss is another": lambda b: setattr(b, "factor", 0.5),
    "a tensor of a module is another": lambda b: setattr(b.model, "plain", torch.full((8,), 0.5)),
    "a tensor of the loss is another": lambda b: setattr(b, "weight", torch.full((4,), 0.5)),
    "it is another once more": lambda b: setattr(b, "weight", torch.full((4,), 0.25)),
    "a module of the loss is another": lambda b: setattr(b, "teacher", nn.Linear(4, 4).requires_grad_(False)),
    "a weight of it lies elsewhere": lambda b: setattr(b.teacher.weight, "data", b.teacher.weight.data * 2),
    "compiled programs are gone": lambda b: torch._dynamo.reset(),
    "a group came and went": pop_group,
    "a second Amp has a say": attach_another,
    "and has none any more": lambda b: setattr(b, "another", None),
    "a hook runs behind the optimizer's step": hook_a_step,
    "a module is another": replace_module,
    "parameters are others": assign_parameters,
}


SOME = (
    "nothing",
    "the optimizer's state is gone",
    "a number of a module is another",
    "a tensor of the loss is another",
    "compiled programs are gone",
)


@pytest.mark.parametrize("chosen", [SOME, pytest.param(tuple(CHANGES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_changes_under_a_recording_is_seen(chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """One after the other, in a training that is recorded, and in one that is not."""
    monkeypatch.setattr(train_step, "MAX_WORLDS", 1 + len(CHANGES))
    recorded, plain = Bench(precision="fp16"), Bench(precision="fp16")
    steps = [b.amp.train_step(b.model, b.loss, b.optimizer) for b in (recorded, plain)]
    taped(steps[0], monkeypatch)
    for what in chosen:
        results = []
        for bench, step in zip((recorded, plain), steps, strict=True):
            torch.manual_seed(5)
            CHANGES[what](bench)
            results.append(bench.run(step))
        assert same(*results), what
        num_replayed = steps[0].summary().num_replayed
        results = [bench.run(step, 1) for bench, step in zip((recorded, plain), steps, strict=True)]
        assert same(*results), what
        assert steps[0].summary().num_replayed == num_replayed + 1, what
