"""Two processes: where one overflows, both skip, and parameters stay equal bit for bit; what one observes, both decide by."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import distributed, nn

import fxamp
from fxamp.run import data_parallel
from fxamp.run.agreement import Agreement
from fxamp.run.observer import Observer
from fxamp.run.train_step import TrainStep
from fxamp.scheduler import CurvatureScheduler
from tests.run.tape import Recorder, taped
from tests.run.test_observer import dial_of

NUM_STEPS = 100
BAD: dict[int, tuple[int, float]] = {0: (1, math.inf), 17: (0, math.nan), 18: (1, 1e38), 60: (0, math.inf)}
"""Step -> (rank, what the loss is multiplied by)."""

NUM_PARTS = 3
"""Micro-batches of a batch."""

BAD_LOCALLY = 40
"""A step with one bad number on rank 0, where no reduction of gradients tells rank 1 of it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


def made(kind: str, amp: fxamp.Amp, policy: Any = None) -> nn.Module:
    """Compiled. `policy`: FSDP2's MixedPrecisionPolicy."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(torch.compile(model, backend=amp))  # pyright: ignore[reportArgumentType]
    for block in model:
        block.compile(backend=amp)
    return sharded(model, policy)


def wrapped(kind: str) -> nn.Module:
    """Not compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    return nn.parallel.DistributedDataParallel(model) if kind == "ddp" else sharded(model)


def sharded(model: nn.Module, policy: Any = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    options = {} if policy is None else {"mp_policy": policy}
    for block in model.children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # pyright: ignore


def stepped(rank: int, kind: str) -> dict[str, Any]:
    """Eight calls of `Amp.train_step`, of which one rank breaks two."""
    model = wrapped(kind)
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    step = amp.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), clip_grad_norm=1.0)
    generator = torch.Generator().manual_seed(rank)
    for i in range(8):
        x = torch.randn(4, 8, generator=generator)
        step(x * math.inf if (rank, i) in ((1, 0), (0, 4)) else x, torch.zeros(4, 8))
    assert all(p.grad is None for p in model.parameters())
    return {"parameters": [whole(p).detach().clone() for p in model.parameters()], "state": amp.state_dict()}


def split(rank: int, kind: str, how: str) -> dict[str, Any]:
    """Four steps of three micro-batches, of which one rank breaks one, by `Amp.train_step` or by the loop people write."""
    torch.compiler.reset()  # all share the code of `Block`, of which Dynamo compiles eight programs at most
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    model = wrapped(kind) if how == "train_step" else made(kind, amp)
    travels = watching_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if how == "train_step":
        step = amp.train_step(model, F.mse_loss, optimizer, accumulate=NUM_PARTS)
    else:
        amp.attach(optimizer)
        step = functools.partial(split_by_hand, model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    for i in range(4):
        x = torch.randn(2 * NUM_PARTS, 8, generator=generator)
        if (rank, i) == (1, 1):
            x[0] = math.inf  # in the first micro-batch, after which nothing travels
        step(x, torch.zeros_like(x))
    return {
        "parameters": [whole(p).detach().clone() for p in model.parameters()],
        "state": amp.state_dict(),
        "travels": travels,
    }


def split_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    for i, (part, target) in enumerate(zip(x.chunk(NUM_PARTS), y.chunk(NUM_PARTS), strict=True)):
        is_last = i == NUM_PARTS - 1
        with contextlib.ExitStack() as stack:
            if not isinstance(model, nn.parallel.DistributedDataParallel):
                model.set_requires_gradient_sync(is_last)  # pyright: ignore[reportCallIssue]
            elif not is_last:
                stack.enter_context(model.no_sync())
            (F.mse_loss(model(part), target) * (1 / NUM_PARTS)).backward()
    optimizer.step()
    optimizer.zero_grad()


def watching_gradients(model: nn.Module) -> list[torch.dtype]:
    """What they travel in, one entry each time that some do."""
    found: list[torch.dtype] = []
    if isinstance(model, nn.parallel.DistributedDataParallel):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(group: Any, bucket: Any) -> Any:
            found.append(bucket.buffer().dtype)
            return allreduce_hook(group, bucket)

        hook.__annotations__.clear()  # DDP compares them with classes
        model.register_comm_hook(None, hook)
        return found
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class Watched(DefaultReduceScatter):
        def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(input_tensor.dtype)
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    for block in model.children():
        block.set_custom_reduce_scatter(Watched())  # pyright: ignore[reportCallIssue]
    return found


def placeholders(record: Any) -> list[torch.dtype]:
    nodes = record.captured.graph.find_nodes(op="placeholder")
    return [value.dtype for node in nodes if isinstance(value := node.meta["example_value"], torch.Tensor)]


def low_already(rank: int) -> dict[str, Any]:
    """FSDP2 gathers parameters in bf16, and gradients travel in fp32, or in bf16 where nothing is said."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    facts: dict[str, Any] = {}
    for reduce_dtype in (torch.float32, None):
        torch.compiler.reset()
        amp = fxamp.Amp(precision="bf16", scaling="dynamic", lower="aot_eager")
        model = made("fsdp2", amp, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
        travels = watching_gradients(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        amp.attach(optimizer)
        for i in range(3):
            out = model(torch.ones(4, 8, requires_grad=True)).square().mean()  # both blocks are one graph then
            (out * (math.inf if (rank, i) == (1, 1) else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        facts[str(reduce_dtype)] = {
            "inputs": sorted({str(t) for g in amp.graphs for t in placeholders(g)}),
            "casts": [str(cast) for g in amp.graphs for cast in g.variants["bf16"].casts],
            "travels": travels,
            "skipped": amp.read_skipped_steps(),
            "parameters": [whole(p).detach().clone() for p in model.parameters()],
        }
    return facts


def refused(kind: str) -> str:
    """What fxamp says of fp16 parameters that FSDP2 gathers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    torch.compiler.reset()
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    model = made(kind, amp, MixedPrecisionPolicy(param_dtype=torch.float16))
    with pytest.raises(Exception, match="CannotScale") as found:
        model(torch.ones(4, 8))
    return str(found.value)


def dropped(rank: int) -> dict[str, Any]:
    """Gradients of which one rank's overflow, and which nobody uses."""
    torch.compiler.reset()
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    model = made("ddp", amp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    for i in range(4):
        (model(torch.ones(4, 8)).square().mean() * (math.inf if (rank, i) == (0, 1) else 1.0)).backward()
        if i != 1:
            optimizer.step()
        optimizer.zero_grad()
    return amp.state_dict()


def dropped_before_steps(rank: int) -> dict[str, Any]:
    """Gradients that somebody has looked at before a train step; those of one rank have overflowed."""
    torch.compiler.reset()
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    torch.manual_seed(0)
    inner = nn.Sequential(Block(), Block())
    model, run = nn.parallel.DistributedDataParallel(inner), torch.compile(inner, backend=amp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = amp.train_step(model, F.mse_loss, optimizer)
    for i in range(6):
        if i in (2, 4):
            (run(torch.ones(4, 8)).square().mean() * (math.inf if (rank, i) == (0, 2) else 1.0)).backward()
        step(torch.ones(4, 8), torch.zeros(4, 8))
    return {"state": amp.state_dict(), "weights": [p.detach().clone() for p in inner.parameters()]}


def broken_off(rank: int, *, is_taped: bool) -> dict[str, Any]:
    """A recording breaks off on one rank."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(Block(), Block()))
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def ask(*_: Any) -> None:
        if Recorder.is_recording and rank == 1:
            raise RuntimeError("a hook asks the host")

    optimizer.register_step_post_hook(ask)
    step = amp.train_step(model, F.mse_loss, optimizer)
    if is_taped:
        taped(step, pytest.MonkeyPatch())._agreement = Agreement(torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(18):
            x = torch.randn(4, 8, generator=generator)
            step(x, torch.zeros_like(x))
    step.close()
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "notes": [note for note in amp.report().notes if "from now on" in note],
    }


class Normed(nn.Module):
    """DDP broadcasts its buffers before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Block(), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(x))


NUM_CALLS = 36
BAD_CALLS = (0, 3), (1, 20), (0, 31)
"""(rank, call) whose loss is inf."""
LONGER = range(25, 28)
"""Calls in which rank 1 has a batch of another shape, and no recording for it: it launches what the other one replays."""


def recorded(rank: int, *, is_taped: bool) -> tuple[dict[str, Any], TrainStep]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(Normed(), Normed()))
    amp = fxamp.Amp(ladder=("fp16", "fp32"), lower="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = amp.train_step(model, F.mse_loss, optimizer, clip_grad_norm=1.0)
    if is_taped:
        taped(step, pytest.MonkeyPatch())._agreement = Agreement(torch.device("cpu"))
        data_parallel.call_before_groups_end(step.close)
    generator = torch.Generator().manual_seed(rank)
    losses: list[torch.Tensor] = []
    for i in range(NUM_CALLS):
        amp.set_precision("fp32" if i in (1, 2, 3, 15, 16, 17) else "fp16")  # a recording each, from the second call on
        x = torch.randn(6 if rank == 1 and i in LONGER else 4, 8, generator=generator)
        losses.append(step(x * math.inf if (rank, i) in BAD_CALLS else x, torch.zeros_like(x)))
    facts = {
        "losses": torch.stack(losses).nan_to_num(),
        "weights": {name: x.clone() for name, x in model.state_dict().items()},
        "state": amp.state_dict(),
        "summary": step.summary(),
        "notes": [note for note in amp.report().notes if "train_step" in note],
    }
    return facts, step


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
        "split": {how: split(rank, kind, how) for how in ("train_step", "loop")},
        "low already": low_already(rank) if kind == "fsdp2" else None,
        "refused": refused(kind) if kind == "fsdp2" else None,
        "health": [(f.kind, f.what, dict(f.evidence)) for f in amp.health()],
    }
    if kind == "fsdp2":
        distributed.destroy_process_group()
    else:
        facts["dropped"] = dropped(rank)
        facts["dropped before steps"] = dropped_before_steps(rank)
        facts["broken off"] = [broken_off(rank, is_taped=is_taped) for is_taped in (False, True)]
        facts["plain"], _ = recorded(rank, is_taped=False)
        facts["taped"], step = recorded(rank, is_taped=True)
        distributed.destroy_process_group()
        with pytest.raises(fxamp.errors.InvalidOption, match="closed"):
            step(torch.ones(4, 8), torch.ones(4, 8))
    torch.save(facts, out / f"{rank}.pt")


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks have to tell."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path_factory.mktemp("ranks")
    # All four come from one process, which has imported what takes most of their time.
    multiprocessing.set_forkserver_preload(["torch._inductor.compile_fx", "torch.distributed.fsdp", __name__])
    mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
        work, args=(request.param, port, out), nprocs=2, start_method="forkserver"
    )
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]


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


def test_a_step_is_recorded_with_its_collectives(ranks: list[dict[str, Any]]):
    """All ranks record together, and may then do as they like: a step has the same collectives replayed and launched."""
    if "taped" not in ranks[0]:
        return  # FSDP's collectives are not recorded
    for rank, facts in enumerate(ranks):
        plain, taped = facts["plain"], facts["taped"]
        assert taped["summary"].num_recordings == 2
        assert taped["summary"].num_ranks == 2
        # DDP times ten iterations, the eleventh is ready to be recorded, the twelfth says so; fp32 does in its fifth call.
        assert taped["summary"].num_replayed == NUM_CALLS - 12 - 2 - rank * len(LONGER)
        assert taped["notes"] == []  # of graph breaks: they are DDP's
        assert torch.equal(taped["losses"], plain["losses"])
        assert taped["state"] == plain["state"]
        assert taped["state"]["scaling"]["num_skipped"] == len(BAD_CALLS)
        assert all(torch.equal(p, plain["weights"][name]) for name, p in taped["weights"].items())
        others = ranks[0]["taped"]["weights"]  # statistics are each rank's own until the next forward
        assert all(torch.equal(p, others[name]) for name, p in taped["weights"].items() if "norm.running" not in name)


def test_gradients_that_nobody_uses_lower_the_scale_of_all(ranks: list[dict[str, Any]]):
    if "dropped" not in ranks[0]:
        return
    first, second = (facts["dropped"] for facts in ranks)
    assert first == second
    assert first["scaling"]["scale"] == 2.0**15


def test_gradients_left_before_a_train_step_leave_ranks_equal(ranks: list[dict[str, Any]]):
    """One alone knows that they overflowed."""
    if "dropped before steps" not in ranks[0]:
        return
    first, second = (facts["dropped before steps"] for facts in ranks)
    assert first["state"] == second["state"]
    assert all(torch.equal(p, q) for p, q in zip(first["weights"], second["weights"], strict=True))


def test_a_recording_that_breaks_off_on_one_rank_is_nobodys(ranks: list[dict[str, Any]]):
    if "broken off" not in ranks[0]:
        return
    (plain, first), (_, second) = (facts["broken off"] for facts in ranks)
    assert "another rank cannot record it" in first["notes"][0]
    assert "a hook asks the host" in second["notes"][0]
    for p, q, r in zip(first["weights"], second["weights"], plain["weights"], strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


def test_gradients_of_a_split_batch_travel_once(ranks: list[dict[str, Any]]):
    (step, loop), (other, _) = ([facts["split"][how] for how in ("train_step", "loop")] for facts in ranks)
    assert step["state"] == other["state"] == loop["state"]
    assert step["state"]["scaling"]["num_skipped"] == 1
    assert len(step["travels"]) in (4, 2 * 4)  # DDP has one bucket, FSDP2 two blocks
    assert step["travels"] == loop["travels"]
    for p, q, r in zip(step["parameters"], other["parameters"], loop["parameters"], strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)
        assert torch.isfinite(p).all()


def test_parameters_that_fsdp_gathers_low_are_cast_no_more(ranks: list[dict[str, Any]]):
    first, second = (facts["low already"] for facts in ranks)
    if first is None or second is None:
        return  # DDP gathers nothing
    for reduce_dtype, travels in (("torch.float32", torch.float32), ("None", torch.bfloat16)):
        mine, other = first[reduce_dtype], second[reduce_dtype]
        assert mine["inputs"] == ["torch.bfloat16"]
        assert mine["casts"] == []
        assert mine["travels"] == 3 * 2 * [travels]
        assert mine["skipped"] == other["skipped"] == 1
        for p, q in zip(mine["parameters"], other["parameters"], strict=True):
            assert torch.equal(p, q)
            assert torch.isfinite(p).all()


def test_parameters_that_fsdp_gathers_in_fp16_are_refused(ranks: list[dict[str, Any]]):
    text = ranks[0]["refused"]
    assert text is None or "as FSDP2's MixedPrecisionPolicy(param_dtype=torch.float16) gathers them" in text
    assert text is None or "Leave param_dtype out" in text


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
