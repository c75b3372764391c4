"""Copies that the update writes are current whenever a replay begins, whoever has written the weights meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from fxamp.run import stepping, writes
from fxamp.run.leaves import Leaf, LowLeaves
from fxamp.run.own_memory import OwnMemory
from tests.run.test_frozen import DURING, HELD, layers, weight

BF16 = torch.bfloat16

RECORDED_ANEW = (
    *("load_state_dict(assign=True)", "swap_tensors", "swap_tensors of each other", "another parameter"),
    "set_ on its own memory",
)
"""Ways after which there are other parameters, or one lies otherwise: the step forgets its recordings."""


def write_by_address(tensor: Tensor, numbers: Tensor) -> None:
    """As a CUDA graph does it: nobody hears of it."""
    numbers = numbers.to(tensor.dtype).contiguous()
    ctypes.memmove(writes.address(tensor), numbers.data_ptr(), numbers.nbytes)


class Recorded:
    """The part of a recorded step that deals with copies: reads them, then writes weights and copies by address."""

    def __init__(self, model: nn.Module, *, follows: bool = True) -> None:
        self.model, self.follows = model, follows
        self.parameters = list(model.parameters())
        self.optimizer = optim.SGD(self.parameters, lr=0.1)
        self.leaves = LowLeaves(self.parameters, OwnMemory(torch.device("cpu")))
        self._program = self.leaves.around(lambda *lows: list(lows), dict.fromkeys(range(len(self.parameters)), BF16))
        self.leaves.begin()
        self._program(*self.parameters)
        self.read: tuple[Leaf, ...] = self.leaves.read

    def num_stale(self) -> int:
        return sum(not leaf.is_current() for leaf in self.read)

    def replay(self) -> None:
        self.leaves.bring_up_to_date(self.read)
        for leaf in self.read:
            assert torch.equal(leaf.low, leaf.weight.detach().to(BF16))
        for leaf in self.read:
            new = torch.randn(leaf.weight.shape)
            write_by_address(leaf.weight, new)
            if self.follows:
                write_by_address(leaf.low, new.to(BF16))
        self.leaves.forget(but=self.read if self.follows else ())
        stepping.tell(self.optimizer, by=self.leaves)


def test_nothing_is_copied_while_nobody_writes():
    step = Recorded(layers())
    step.replay()
    for _ in range(3):
        assert step.num_stale() == 0
        step.replay()


def test_a_step_that_does_not_write_them_finds_them_stale():
    step = Recorded(layers(), follows=False)
    for _ in range(3):
        step.replay()
        assert step.num_stale() == len(step.read) == 4


@pytest.mark.parametrize("way", sorted(set(DURING) - set(RECORDED_ANEW)))
def test_a_write_between_two_replays_is_seen(way: str):
    step = Recorded(layers())
    for _ in range(2):
        step.replay()
        step.replay()
        with torch.no_grad():
            DURING[way](step.model)
        step.replay()


@pytest.mark.parametrize("way", HELD)
@torch.no_grad()
def test_a_write_through_what_is_held_is_seen(way: str):
    take, write = HELD[way]
    step = Recorded(layers())
    held = take(weight(step.model))
    for _ in range(3):
        step.replay()
        write(held)
    del held
    step.replay()
    assert step.num_stale() == 0


def test_steps_that_share_weights_tell_each_other():
    model = layers()
    one, other = Recorded(model), Recorded(model)
    for step in (one, other, other, one, one, other, one):
        step.replay()
    one.replay()
    assert (one.num_stale(), other.num_stale()) == (0, 4)


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_steps_of_an_optimizer_are_seen_though_they_leave_no_mark(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    step = Recorded(layers())
    step.replay()
    monkeypatch.setattr(writes, "is_marked", lambda _: True)
    for p in step.parameters:
        p.grad = torch.randn_like(p)
    optim.AdamW(step.parameters, lr=0.1, **settings).step()
    assert step.num_stale() == 4
    step.replay()


def test_weights_that_are_not_trained_are_copied_at_every_step():
    model = layers()
    model[0].requires_grad_(False)
    step = Recorded(model)
    step.replay()
    assert step.num_stale() == 2


def test_a_copy_that_only_a_recording_reads_hears_of_steps_too():
    step = Recorded(layers())
    step.replay()
    step.parameters[0].requires_grad_(False)
    step.leaves.begin()  # a step of another kind, which makes a copy of its own
    step._program(*step.parameters)
    step.parameters[0].requires_grad_()
    for p in step.parameters:
        write_by_address(p, torch.randn(p.shape))
    step.leaves.forget()
    assert step.num_stale() == 4
    step.replay()


def test_a_weight_that_the_model_writes_between_two_reads_cannot_be_followed():
    model = layers()
    leaves = LowLeaves(model.parameters(), OwnMemory(torch.device("cpu")))
    program = leaves.around(lambda low: low, {0: BF16})
    leaves.begin()
    program(weight(model))
    assert leaves.can_be_followed()
    with torch.no_grad():
        weight(model).add_(1.0)
    assert torch.equal(program(weight(model)), weight(model).detach().to(BF16))
    assert not leaves.can_be_followed()


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.mul_(0.5),
        lambda w: torch._foreach_copy_([w.data], [w.data * 0.5]),
        lambda w: w.detach().numpy().fill(0.5),
        lambda w: setattr(w, "data", w.data * 0.5),
    ],
)
def test_a_write_within_a_step_that_leaves_no_version_is_seen(write: Callable[[Tensor], Any], is_read: bool):
    model = layers()
    leaves = LowLeaves(model.parameters(), OwnMemory(torch.device("cpu")))
    program = leaves.around(lambda low: low, {0: BF16})
    program(weight(model))
    leaves.begin()
    before: Tensor = program(weight(model)) if is_read else torch.zeros(())
    kept = before.detach().clone()
    version = weight(model)._version
    write(weight(model))
    assert weight(model)._version == version
    assert torch.equal(program(weight(model)), weight(model).detach().to(BF16))
    assert torch.equal(before, kept)  # a graph may have saved it for its backward
