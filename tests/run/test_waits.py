"""The step never waits for the host: what a step reads back, and when."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from tests.programs import mlp
from tests.waits import no_waits

pytestmark = pytest.mark.filterwarnings("ignore:an attached .* that no compiled graph")  # gradients are made by hand

OPTIMIZERS: dict[str, tuple[str, Callable[[list[nn.Parameter]], optim.Optimizer]]] = {
    "AdamW fused": ("fused", lambda p: optim.AdamW(p, lr=1e-3, fused=True)),
    "SGD fused": ("fused", lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, fused=True)),
    "SGD": ("select", lambda p: optim.SGD(p, lr=1e-3, momentum=0.9)),
    "Adam capturable": ("select", lambda p: optim.Adam(p, lr=1e-3, capturable=p[0].is_cuda)),
    "RMSprop capturable": ("select", lambda p: optim.RMSprop(p, lr=1e-3, capturable=p[0].is_cuda)),
}
"""Name -> (route on CUDA, how it is made). The CPU has no capturable optimizers, nor needs them."""


class CountReads(TorchDispatchMode):
    """Counts the values that the host reads from tensors."""

    num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fxamp_reads_nothing_back_in_a_step(name: str):
    """What the optimizer itself reads on the CPU (its step counter) is not fxamp's doing, and is counted beside it."""
    route, make = OPTIMIZERS[name]
    num_reads = []
    for is_attached in (True, False):
        torch.manual_seed(0)
        model = mlp(8, 16, 4)
        # A scale that stays has no floor, of which the host would be told (on CUDA 8 to 15 steps later, without a wait).
        optimizer, amp = make(list(model.parameters())), fxamp.Amp(precision="fp16", scaling=1024.0)
        if is_attached:
            amp.attach(optimizer, route=route)
        with CountReads() as counted:
            for step in range(4):
                if step == 1:  # the first step makes state, and waits
                    counted.num_reads = 0
                for p in model.parameters():
                    p.grad = torch.full(p.shape, math.inf if step == 2 and is_attached else 1.0)
                optimizer.step()
                optimizer.zero_grad()
        num_reads.append(counted.num_reads)
    assert num_reads[0] <= num_reads[1]


def test_a_wait_is_one_read():
    model = mlp(8, 16, 4)
    optimizer, amp = optim.SGD(model.parameters(), lr=1e-3), fxamp.Amp(precision="fp16", scaling=1024.0)
    amp.attach(optimizer, route="wait")
    with CountReads() as counted:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert counted.num_reads == 1


@pytest.mark.gpu
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_whole_step_on_cuda_never_waits(name: str, lower: str):
    route, make = OPTIMIZERS[name]
    model = mlp(64, 128, 32).cuda()
    optimizer, amp = make(list(model.parameters())), fxamp.Amp(precision="fp16", lower=lower)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    schedule = amp.when_stepped(optim.lr_scheduler.StepLR(optimizer, 100))
    x, y = torch.randn(16, 64, device="cuda"), torch.randn(16, 32, device="cuda")
    good, bad = torch.ones((), device="cuda"), torch.full((), math.inf, device="cuda")

    def step(factor: torch.Tensor) -> None:
        (F.mse_loss(run(x), y) * factor).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    for _ in range(4):
        step(good)
    with no_waits():
        for factor in (good, bad, good):
            step(factor)
    assert amp.read_skipped_steps() == 1
    assert amp._scaler is not None
    assert [r.name for _, r in amp._scaler.routes] == [route]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
