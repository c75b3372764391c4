"""Rounds of the loss scale, by operations of PyTorch and by our kernels: the same bits. `python -m tests.run.rounds` where
Triton interprets kernels (TRITON_INTERPRET=1)."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fxamp
from fxamp.run import flags as module
from fxamp.run.flags import ROOM_AT_FIRST, Flags
from fxamp.run.loss_scale import NUM_REMEMBERED, LossScale
from fxamp.scaling import DynamicScale, Scaling, StaticScale

NUM_ROUNDS = 8
MINE, OTHERS = 1, 2
"""Ids of parameters."""


def a_config(chance: random.Random) -> Scaling:
    if chance.random() < 0.2:
        return StaticScale(value=128.0)
    floor = chance.choice([1.0, 2.0**10])
    return DynamicScale(
        init=floor * 2.0 ** chance.randint(0, 6),
        floor=floor,
        cap=chance.choice([2.0**16, 3e38]),
        growth_factor=chance.choice([2.0, 1.3, 1e30]),
        backoff_factor=chance.choice([0.5, 0.3]),
        growth_interval_steps=chance.randint(1, 3),
        hysteresis_steps=chance.randint(1, 2),
    )


def magnitudes(chance: random.Random, num_slots: int) -> Tensor:
    """Of everything between nothing and too much."""
    found = torch.rand(num_slots) * 10.0 ** torch.randint(-12, 6, (num_slots,))
    found[torch.rand(num_slots) < 0.5] = 0.0
    if chance.random() < 0.4:
        found[chance.randrange(num_slots)] = chance.choice([math.inf, math.nan])
    return found


def check(device: torch.device, seed: int) -> None:
    """Some rounds of one model."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    config, num_slots = a_config(chance), chance.choice([1, 2, 4]) * ROOM_AT_FIRST
    two = [(Flags(device), LossScale(config, device)) for _ in range(2)]
    num_updates = chance.choice([0, NUM_REMEMBERED - NUM_ROUNDS // 2])  # what is remembered begins anew in some
    for flags, scale in two:
        flags._room_for([None] * num_slots, [""] * num_slots)
        scale.num_updates.fill_(num_updates)
    for _ in range(NUM_ROUNDS):
        now, is_mine = magnitudes(chance, num_slots), torch.rand(num_slots) < 0.5
        is_other = ~is_mine & (torch.rand(num_slots) < 0.5)
        found = chance.choice([None, torch.zeros((), device=device), torch.ones((), device=device)])
        others, moves = chance.choice([set[int](), {OTHERS}]), chance.random() < 0.7
        told = list[tuple[Tensor, ...]]()
        for (flags, scale), has_kernels in zip(two, (False, True), strict=True):
            flags.slots[0].copy_(now)
            flags._owners = [MINE if a else OTHERS if b else None for a, b in zip(is_mine, is_other, strict=True)]
            flags._is_stale = True
            flags.arrivals.add(MINE)
            with mock.patch.object(module, "kernels_run_on", return_value=has_kernels):
                told.append(flags.look({MINE}, others, found))
            bad, anywhere, largest = told[-1]
            assert float(bad) <= float(anywhere)
            if has_kernels:
                scale.clear_and_update(flags, anywhere, largest, moves=moves)
            else:
                flags.clear(scale.scale)
                scale.update(anywhere, largest, moves=moves)
            assert not flags.arrivals
        for a, b in zip(*told, strict=True):
            assert torch.equal(a, b), (seed, config)
        (flags, scale), (same_flags, same_scale) = two
        for a, b in zip((*flags.stores, *scale.tensors), (*same_flags.stores, *same_scale.tensors), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), (seed, config)


def check_training(device: torch.device, seed: int) -> None:
    """Some steps of a model, with overflows of the forward and of single gradients, and gradients that nobody uses."""
    assert trained(device, seed, has_kernels=True) == trained(device, seed, has_kernels=False)


def trained(device: torch.device, seed: int, *, has_kernels: bool) -> list[object]:
    """All that is left of it."""
    from fxamp import kernels

    chance, num_launched = random.Random(seed), dict.fromkeys((kernels.look, kernels.clear_and_update), 0)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    launch = kernels.launch_over_slots

    def counted(kernel: Any, *args: Any, **constants: Any) -> None:
        num_launched[kernel] += 1
        launch(kernel, *args, **constants)

    model = nn.Linear(8, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", scaling=a_config(chance), stats=chance.choice([None, "overflow"]))
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    with (
        mock.patch.object(module, "kernels_run_on", return_value=has_kernels),
        mock.patch.object(kernels, "launch_over_slots", counted),
    ):
        for _ in range(NUM_ROUNDS):
            run(torch.randn(4, 8, device=device) * chance.choice([1e-6, 1.0, 1e6])).float().square().mean().backward()
            what = chance.random()
            if what < 0.2 and model.weight.grad is not None:
                model.weight.grad[0, 0] = math.nan
            elif what < 0.4:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    assert all(num > 0 for num in num_launched.values()) if has_kernels else not any(num_launched.values())
    assert amp._scaler is not None
    stores = [store for flags in amp._scaler._flags.values() for store in flags.stores]
    numbers = [x.tolist() for x in (*amp._scaler.state().tensors, *stores, *model.parameters())]
    return [repr(numbers), amp.state_dict()]


if __name__ == "__main__":
    for seed in range(40):
        check(torch.device("cpu"), seed)
    for seed in range(4):
        check_training(torch.device("cpu"), seed)
    print("the same bits")
