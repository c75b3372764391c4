"""Two processes and more, with DDP or FSDP2: whoever overflows, all skip, and all of them stay equal bit for bit.

Run: torchrun --nproc-per-node 2 examples/train_distributed.py --strategy ddp fsdp2 --precision bf16 fp16 [--train-step]
Without torchrun it starts two processes of its own, of gloo on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxamp
from fxamp.demo import Corpus, DemoConfig, GPTConfig, initial_model
from fxamp.run.train_step import TrainStep

NUM_OWN_RANKS = 2
ON_CUDA = "RANK" in os.environ and torch.cuda.is_available()  # processes of our own are on the CPU
SIZE = GPTConfig(num_layers=2, num_heads=4, width=128, num_context_bytes=32)
if not ON_CUDA:
    SIZE = GPTConfig(num_layers=1, num_heads=2, width=32, num_context_bytes=16)  # seconds, most of them imports
BUCKET_MB = 1
"""The smallest that DDP takes. On CUDA gradients travel in two buckets, the first while the backward still runs."""


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--strategy", nargs="+", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"])
    out.add_argument("--precision", nargs="+", choices=("bf16", "fp16"), default=["fp16"])
    out.add_argument("--train-step", action="store_true", help="amp.train_step in place of the loop")
    out.add_argument("--steps", type=int, default=200 if ON_CUDA else 16)
    every = 16 if ON_CUDA else 8
    out.add_argument("--overflow-every", type=int, default=every, metavar="N", help="steps; on one rank only (0: never)")
    out.add_argument("--lower", choices=("inductor", "aot_eager"), help="default: inductor on CUDA, else aot_eager")
    return out


# ---- the model, as FSDP2 and DDP want it -------------------------------------------------------------------------------
def sharded(model: nn.Module, amp: fxamp.Amp, precision: str) -> nn.Module:
    """FSDP2, compiled block by block. In bf16 it hands out parameters that are low already; in fp16 fxamp casts, since
    gradients that travel in fp16 would need a loss scale of their own."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None, reduce_dtype=torch.float32
    )
    for block in model.get_submodule("blocks").children():
        block.compile(backend=amp)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def train(args: argparse.Namespace, strategy: str, precision: str, device: torch.device) -> dict[str, Any]:
    """Trains, and returns what has to be equal on all ranks."""
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    torch.compiler.reset()
    config = DemoConfig(num_steps=args.steps, num_warmup_steps=0, seed=rank, model=SIZE, precision=precision)
    batches = Corpus.of_stdlib().train_batches(config).to(device)  # each rank has its own
    amp = fxamp.Amp(
        ladder=(precision, "fp32"),
        scheduler=fxamp.CurvatureScheduler(threshold=5.0, dwell_steps=4),
        scaling="dynamic",
        lower=args.lower or ("inductor" if device.type == "cuda" else "aot_eager"),
    )
    model: nn.Module = initial_model(DemoConfig(seed=0, model=SIZE)).to(device)
    model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB) if strategy == "ddp" else sharded(model, amp, precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    step_of = recorded if args.train_step else looped
    step = step_of(amp, model, optimizer, compiles=strategy == "ddp")

    losses = torch.zeros(args.steps, device=device)
    for i, batch in enumerate(batches):
        is_bad = args.overflow_every and (i + 1) % args.overflow_every == 0 and i // args.overflow_every % num_ranks == rank
        factor = torch.full((), math.inf if is_bad else 1.0, device=device)
        losses[i] = step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), factor)
        amp.observe(losses[i])
    distributed.all_reduce(losses)
    return {
        "parameters": [fingerprint(p) for p in model.parameters()],
        "loss": (losses / num_ranks).tolist(),
        "scale": amp.read_loss_scale(),
        "skipped": amp.read_skipped_steps(),
        "decisions": [(change.step, change.precision["model"], change.reason) for change in amp.history.changes],
        "calls": str(step.summary()) if isinstance(step, TrainStep) else "",
    }


def looped(amp: fxamp.Amp, model: nn.Module, optimizer: torch.optim.Optimizer, *, compiles: bool) -> Callable[..., Tensor]:
    """The loop as it was before fxamp, with `amp.attach` before it."""
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp) if compiles else model  # FSDP2's blocks are compiled already

    def step(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        loss = run(x, y) * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def recorded(amp: fxamp.Amp, model: nn.Module, optimizer: torch.optim.Optimizer, *, compiles: bool) -> Callable[..., Tensor]:
    """The same as one call. It compiles the model itself."""
    return amp.train_step(model, lambda loss, factor: loss * factor, optimizer)


def fingerprint(parameter: Tensor) -> str:
    """Of all its numbers, on whichever rank they are."""
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # pyright: ignore
    return hashlib.sha256(bytes(whole.detach().cpu().view(torch.uint8).flatten().tolist())).hexdigest()


# ---- the processes -----------------------------------------------------------------------------------------------------
def work(args: argparse.Namespace) -> None:
    """What each rank does, with the variables that torchrun sets."""
    device = torch.device("cpu")
    if ON_CUDA:  # two ranks may share a GPU, if NCCL lets them: NCCL_MULTI_RANK_GPU_ENABLE=1, from 2.31 on
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if ON_CUDA else "gloo")
    try:
        for strategy in args.strategy:
            for precision in args.precision:
                start_s = time.perf_counter()
                mine = train(args, strategy, precision, device)
                everybodys: list[Any] = [None] * distributed.get_world_size()
                distributed.all_gather_object(everybodys, mine)
                check(args, strategy, precision, everybodys, time.perf_counter() - start_s)
    finally:
        distributed.destroy_process_group()


def check(args: argparse.Namespace, strategy: str, precision: str, ranks: Sequence[dict[str, Any]], seconds: float) -> None:
    first = ranks[0]
    for what in first:
        assert all(repr(rank[what]) == repr(first[what]) for rank in ranks), f"{what} differs between ranks: {ranks}"
    num_planted = args.steps // args.overflow_every if args.overflow_every else 0
    assert first["skipped"] == num_planted, (first["skipped"], num_planted)
    good = [loss for loss in first["loss"] if math.isfinite(loss)]
    assert len(good) == args.steps - num_planted
    assert good[-1] < good[0]
    if distributed.get_rank() == 0:
        how = "train_step" if args.train_step else "loop"
        print(
            f"{strategy} {precision} {how}: {len(ranks)} ranks equal after {args.steps} steps, {seconds:.0f} s; "
            f"loss {good[0]:.2f} -> {good[-1]:.2f}, scale {first['scale']:g}, {first['skipped']} steps skipped, "
            f"{', '.join(f'{p} from {step}' for step, p, _ in first['decisions'])}"
            f"{'; ' if first['calls'] else ''}{first['calls']}",
            flush=True,
        )


def work_as(rank: int, args: argparse.Namespace, port: int) -> None:
    """A process of our own as one of torchrun's."""
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_OWN_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"CUDA_VISIBLE_DEVICES": ""}
    work(args)


def main(arguments: Sequence[str] = ()) -> None:
    args = parser().parse_args(arguments)
    if "RANK" in os.environ:
        work(args)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if sys.platform == "linux":  # what the ranks would import one by one, most of their time, is imported once
        importlib.import_module("torch._inductor.compile_fx")
    method = "fork" if sys.platform == "linux" else "spawn"  # on the CPU: CUDA does not survive a fork
    torch.multiprocessing.start_processes(work_as, args=(args, port), nprocs=NUM_OWN_RANKS, start_method=method)


if __name__ == "__main__":
    main(sys.argv[1:])
