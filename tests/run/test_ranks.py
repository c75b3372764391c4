"""Two processes: where one overflows, both skip, and parameters stay equal bit for bit; what one observes, both decide by."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import distributed, nn

import fxamp
from fxamp.run.observer import Observer
from fxamp.scheduler import CurvatureScheduler
from tests.run.test_observer import dial_of

NUM_STEPS = 100
BAD: dict[int, tuple[int, float]] = {0: (1, math.inf), 17: (0, math.nan), 18: (1, 1e38), 60: (0, math.inf)}
"""Step -> (rank, what the loss is multiplied by)."""

BAD_LOCALLY = 40
"""A step with one bad number on rank 0, where no reduction of gradients tells rank 1 of it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


def made(kind: str, amp: fxamp.Amp) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(torch.compile(model, backend=amp))  # pyright: ignore[reportArgumentType]
    from torch.distributed.fsdp import fully_shard

    for block in model:
        block.compile(backend=amp)
        fully_shard(block)
    fully_shard(model)
    return model


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # pyright: ignore


def stepped(rank: int, kind: str) -> dict[str, Any]:
    """Eight calls of `Amp.train_step`, of which one rank breaks two."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Block(), Block())
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.children():
            fully_shard(block)
        fully_shard(model)
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    step = amp.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), clip_grad_norm=1.0)
    generator = torch.Generator().manual_seed(rank)
    for i in range(8):
        x = torch.randn(4, 8, generator=generator)
        step(x * math.inf if (rank, i) in ((1, 0), (0, 4)) else x, torch.zeros(4, 8))
    assert all(p.grad is None for p in model.parameters())
    return {"parameters": [whole(p).detach().clone() for p in model.parameters()], "state": amp.state_dict()}


def work(rank: int, kind: str, port: int, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    regions = {"first": "0"} if kind == "ddp" else None  # FSDP2's blocks share a graph, which regions cannot tell apart
    config = fxamp.DynamicScale(growth_interval_steps=20, per_region=regions is not None)
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", scaling=config, stats="overflow", regions=regions)
    model = made(kind, amp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp.attach(optimizer)
    generator = torch.Generator().manual_seed(rank)
    stood_still: list[int] = []
    for step in range(NUM_STEPS):
        x = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        bad_rank, factor = BAD.get(step, (0, 1.0))
        (model(x).square().mean() * (factor if rank == bad_rank else 1.0)).backward()
        if step == BAD_LOCALLY and rank == 0:
            grad = next(p.grad for p in model.parameters() if p.grad is not None)
            (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = math.inf  # pyright: ignore
        before = [whole(p).detach().clone() for p in model.parameters()]
        optimizer.step()
        if all(torch.equal(whole(p), b) for p, b in zip(model.parameters(), before, strict=True)):
            stood_still.append(step)
    facts: dict[str, Any] = {
        "parameters": [whole(p).detach().clone() for p in model.parameters()],
        "stood_still": stood_still,
        "state": amp.state_dict(),
        "num_graphs": len(amp.graphs),
        "observed": observed(rank),
        "observed by region": observed_by_region(rank),
        "stepped": stepped(rank, kind),
        "health": [(f.kind, f.what, dict(f.evidence)) for f in amp.health()],
    }
    torch.save(facts, out / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks have to tell."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(request.param, port, out), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def test_ranks_skip_together(ranks: list[dict[str, Any]]):
    first, second = ranks
    assert first["num_graphs"] > 0
    assert first["stood_still"] == second["stood_still"] == sorted([*BAD, BAD_LOCALLY])
    assert first["state"] == second["state"]
    assert first["state"]["scaling"]["num_skipped"] == len(BAD) + 1
    for p, q in zip(first["parameters"], second["parameters"], strict=True):
        assert torch.equal(p, q)
        assert torch.isfinite(p).all()


def test_a_train_step_is_skipped_together(ranks: list[dict[str, Any]]):
    first, second = (facts["stepped"] for facts in ranks)
    assert first["state"] == second["state"]
    assert first["state"]["scaling"]["num_skipped"] == 2
    for p, q in zip(first["parameters"], second["parameters"], strict=True):
        assert torch.equal(p, q)
        assert torch.isfinite(p).all()


def test_each_rank_names_what_it_made_itself(ranks: list[dict[str, Any]]):
    """`BAD`: an inf or a NaN of the loss arrives, 1e38 does not survive the scale; the other rank did neither."""
    keys = ("phase", "operation", "first_update", "last_update")
    wanted = [("arriving", "add", 17, 60)], [("arriving", "add", 0, 0), ("scaled", "add", 18, 18)]
    for rank, want in enumerate(wanted):
        found = [evidence for kind, _, evidence in ranks[rank]["health"] if kind == "overflow"]
        assert [tuple(evidence[key] for key in keys) for evidence in found] == want
    assert all(f"seen on rank {rank}" in facts["health"][-1][1] for rank, facts in enumerate(ranks))


# ---- observing ------------------------------------------------------------------------------------------------------------
SPIKES: dict[int, tuple[int, float]] = {20: (1, 8.0), 60: (0, math.nan), 100: (1, math.inf), 140: (0, 0.015)}
"""Step -> (rank, its loss). The last one bends the mean by less than the threshold, and that of the rank by more."""

LOSSES = (1.0, 2.0)
"""Of the two ranks, in the other steps."""


def observed(rank: int) -> tuple[str, str]:
    scheduler, dial = CurvatureScheduler(dwell_steps=6, lag_steps=3, gradient_ratio_limit=50.0), dial_of()
    signs = torch.tensor([1024.0, 0.0, 1.0, 0.0])
    observer = Observer(scheduler, dial, signs=lambda: signs.clone())
    for step in range(200):
        bad_rank, loss = SPIKES.get(step, (None, 0.0))
        signs[2] = 60.0 if (step, rank) == (180, 1) else 1.0  # gradients that only one of them sees
        observer.observe(torch.tensor(LOSSES[rank] + loss if rank == bad_rank else LOSSES[rank]))
    return observer.history.as_json(), repr(observer.state_dict())


def observed_by_region(rank: int) -> tuple[str, str]:
    """Gradients of one region jump, of which one rank alone knows."""
    scheduler, dial = CurvatureScheduler(dwell_steps=6, lag_steps=3, per_region=True), dial_of("early", "late")
    observer = Observer(scheduler, dial, signs=lambda: torch.tensor([1024.0, 0.0, 1.0, 0.0, *ratios]))
    for step in range(60):
        jumps = 1000.0 if (step, rank) == (40, 1) else 1.0
        ratios = [0.0, 1.0, 0.0, 1.0, 0.0, jumps]
        observer.observe(torch.tensor(1.0))
    return observer.history.as_json(), repr(observer.state_dict())


def test_ranks_raise_the_same_region(ranks: list[dict[str, Any]]):
    first, second = (facts["observed by region"] for facts in ranks)
    assert first == second
    rise = next(c for c in json.loads(first[0])["changes"] if c["step"] == 40 + 3)
    assert rise["precision"] == {"model": "fp16", "early": "fp16", "late": "fp32"}


def test_the_scales_of_regions_are_those_of_all_ranks(ranks: list[dict[str, Any]]):
    scale, other = (facts["state"]["scaling"]["scale"] for facts in ranks)
    assert scale == other
    if isinstance(scale, dict):  # 1e38 did not survive being scaled where it came in, and the first block never saw it finite
        assert scale["first"] == 2 * scale["model"]


def test_ranks_decide_together(ranks: list[dict[str, Any]]):
    first, second = ranks
    assert first["observed"] == second["observed"]
    history = json.loads(first["observed"][0])
    assert [history["steps"][i]["loss"] for i in (19, 20, 60, 100)] == [1.5, 5.5, "nan", "inf"]
    rises = [c["step"] for c in history["changes"] if c["precision"] == {"model": "fp32"}]
    assert rises == [0, 20 + 3, 60 + 3, 100 + 3, 180 + 3]
