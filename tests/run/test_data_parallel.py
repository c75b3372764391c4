"""What of DDP can be recorded, and what ranks agree on; one process of gloo, which is what NCCL would be for one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import fxamp
from fxamp import errors
from fxamp.run import data_parallel
from fxamp.run.agreement import Agreement
from fxamp.run.mailbox import Mailbox
from tests.programs import mlp

CPU = torch.device("cpu")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, taken for NCCL's."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def hooked() -> nn.Module:
    ddp = DistributedDataParallel(mlp(4, 4))

    def hook(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__.clear()  # DDP compares them with classes
    ddp.register_comm_hook(None, hook)
    return ddp


def built_in() -> nn.Module:
    ddp = DistributedDataParallel(mlp(4, 4))
    ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)  # pyright: ignore
    return ddp


def compiled_part() -> nn.Module:
    model = mlp(4, 4, 4)
    model[0].compile()
    return DistributedDataParallel(model)


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(mlp(4, 4), mesh=distributed.init_device_mesh("cpu", (1,)))  # pyright: ignore


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ddp": (lambda: DistributedDataParallel(mlp(4, 4)), ""),
    "static": (lambda: DistributedDataParallel(mlp(4, 4), static_graph=True), ""),
    "alone": (lambda: mlp(4, 4), ""),
    "unused": (lambda: DistributedDataParallel(mlp(4, 4), find_unused_parameters=True), "which parameters were used"),
    "hook": (hooked, "a communication hook"),
    "built-in hook": (built_in, "a communication hook"),
    "compiled": (lambda: DistributedDataParallel(torch.compile(mlp(4, 4))), "compiled by itself"),  # pyright: ignore
    "compiled part": (compiled_part, "compiled by itself"),
    "fsdp2": (sharded, "FSDP"),
}


@pytest.mark.parametrize("name", MODELS)
def test_why_collectives_are_not_recorded(name: str, group: None, monkeypatch: pytest.MonkeyPatch):
    made, want = MODELS[name]
    modules = list(made().modules())
    assert data_parallel.why_not_recorded(modules, CPU, None).startswith("collectives of gloo run on the host")
    monkeypatch.setattr(data_parallel, "_backend_of", lambda group, device: "nccl")  # pyright: ignore
    found = data_parallel.why_not_recorded(modules, CPU, None)
    assert want in found
    assert bool(want) == bool(found)


def test_a_step_that_has_to_be_recorded_says_why_it_is_not(group: None):
    model = DistributedDataParallel(mlp(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with pytest.raises(errors.CudaGraphsUnavailable, match="of these ranks is not recorded: no CUDA graphs on cpu"):
        fxamp.Amp(precision="bf16", cuda_graphs="require").train_step(model, F.mse_loss, optimizer)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_reducer_that_is_built_anew_reduces(options: dict[str, Any], group: None):
    """In the midst of a training, whose gradients stay what they were."""
    found: list[list[Tensor]] = []
    for is_rebuilt in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(mlp(8, 8, 4), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(6):
            if i == 3 and is_rebuilt:
                before = model.reducer
                optimizer.zero_grad()
                data_parallel.rebuild(model)
                assert model.reducer is not before
            optimizer.zero_grad()
            model(torch.full((2, 8), i / 6)).square().mean().backward()
            optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


def test_what_is_registered_is_called_before_groups_end(group: None):
    class Step:
        def __init__(self) -> None:
            self.was_initialized: list[bool] = []

        def close(self) -> None:
            self.was_initialized.append(distributed.is_initialized())

    kept, gone = Step(), Step()
    data_parallel.call_before_groups_end(kept.close)
    data_parallel.call_before_groups_end(gone.close)
    del gone
    distributed.destroy_process_group()
    assert kept.was_initialized == [True]


@pytest.mark.parametrize("lag", [0, 3])
def test_what_all_are_ready_for_is_heard_once(lag: int, group: None):
    """As many steps later as it takes; what was said before the last time that something was done is not heard again."""
    agreement = Agreement(CPU)
    agreement._mailbox = Mailbox(lag)
    heard: list[int] = []
    for step in range(30):
        agreement.say(step in range(5, 15) or step == 20)
        with agreement.travelling():
            pass
        if agreement.hear():
            heard.append(step)
    # Said in steps 5 to 14, and heard from 5 + lag on; what was under way then was said before.
    assert heard == ([*range(5, 15), 20] if lag == 0 else [8, 12, 16, 23])
    assert agreement.num_ranks == 1
