"""What a step makes and later steps keep lies in memory of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator

import pytest
import torch
from torch import nn

import fxamp
from fxamp.run.own_memory import OwnMemory


def printed(program: str) -> list[str]:
    """The words that a process of its own prints."""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.SGD])
def test_it_is_used_for_copies_and_the_first_update_alone(made, precision, monkeypatch: pytest.MonkeyPatch):
    """SGD never has state: what its later updates make for a moment is not to lie there."""
    depth, log = [0], list[str]()

    @contextlib.contextmanager
    def used(self: OwnMemory) -> Generator[None]:
        log.append("used")
        depth[0] += 1
        yield
        depth[0] -= 1

    def noted(name: str):
        return lambda *_: log.append(f"{name} {'inside' if depth[0] else 'outside'}")

    monkeypatch.setattr(OwnMemory, "used", used)
    monkeypatch.setattr(OwnMemory, "close", noted("close"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = made(model.parameters(), lr=0.1, fused=True)
    optimizer.register_step_post_hook(noted("step"))
    step = fxamp.Amp(precision=precision, lower="aot_eager").train_step(model, nn.MSELoss(), optimizer)
    for _ in range(3):
        step(torch.randn(4, 8), torch.randn(4, 8))
    copies = ["used"] if precision == "bf16" else []
    later = ["step outside", "close outside"]
    assert log == [*copies, "used", "step inside", "close outside", *later, *later]


def test_on_a_cpu_it_is_nothing():
    own_memory = OwnMemory(torch.device("cpu"))
    with own_memory.used():
        torch.empty(3)
    own_memory.close()


@pytest.mark.gpu
def test_what_lies_there_outlives_it():
    ordinary = torch.zeros(2**22, device="cuda")
    own_memory = OwnMemory(ordinary.device)
    with own_memory.used():
        kept = torch.ones(2**22, device="cuda")
    with own_memory.used():
        dropped = torch.ones(2**24, device="cuda")
    del dropped
    reserved = torch.cuda.memory_reserved()
    own_memory.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 4 * 2**24
    others = [torch.full((2**22,), 7.0, device="cuda") for _ in range(8)]
    assert bool((kept == 1).all())
    assert bool((ordinary == 0).all())
    del kept, others
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved - 4 * 2**24
    with own_memory.used():  # anew
        assert torch.ones(3, device="cuda").sum() == 3
    own_memory.close()


@pytest.mark.gpu
def test_a_recording_has_memory_of_its_own():
    x = torch.ones(8, device="cuda")
    own_memory = OwnMemory(x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), own_memory.used():
        y = x + 1
        assert not own_memory._uses
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5.0] * 8


FAILS = """
import torch
from fxamp.run.own_memory import OwnMemory

x = torch.ones(8, device="cuda")
own_memory = OwnMemory(x.device)
with own_memory.used():
    x = x.clone()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        float(x.sum())
except RuntimeError:
    own_memory.close()
    with own_memory.used():
        y = torch.ones(8, device="cuda")
    own_memory.close()
    print((x + y).tolist() == [2.0] * 8)
"""


@pytest.mark.gpu
def test_a_recording_that_failed_does_not_matter():
    """In a process of its own: PyTorch counts such a recording as under way for good."""
    assert printed(FAILS) == ["True"]


CACHED = """
import torch
from fxamp.run.own_memory import OwnMemory

own_memory, size = OwnMemory(torch.zeros((), device="cuda").device), 2**28
_, total = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5 * size) / total)
activations = torch.empty(size, dtype=torch.uint8, device="cuda")
del activations
with own_memory.used():
    print(torch.empty(size, dtype=torch.uint8, device="cuda").numel() == size)
"""


@pytest.mark.gpu
def test_memory_that_others_have_cached_is_there_for_it():
    assert printed(CACHED) == ["True"]


KEEPS = """
import torch
from torch import nn
import fxamp

model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step = fxamp.Amp(precision="bf16").train_step(model, nn.MSELoss(), optimizer)
x = torch.randn(2**15, 4096, device="cuda")  # an activation has 256 MiB in bf16, a moment of a weight 64
for _ in range(4):
    step(x, x)
assert step.summary().num_replayed == 2
torch.cuda.synchronize()
kept = [*model.parameters(), *(leaf.low for leaf in step._leaves)]
kept += [t for state in optimizer.state.values() for t in state.values()]
addresses = [t.data_ptr() for t in kept]
ordinary = with_kept = 0
for part in torch.cuda.memory_snapshot():
    empty, start = part["total_size"] - part["allocated_size"], part["address"]
    if any(start <= address < start + part["total_size"] for address in addresses):
        with_kept += empty
    elif tuple(part["segment_pool_id"]) == (0, 0):
        ordinary += empty
print(with_kept >> 20, ordinary >> 20)
"""


@pytest.mark.gpu
def test_what_is_kept_holds_no_block_of_activations():
    """In a process of its own: blocks that the first step has used are given back before the recording, which needs others."""
    with_kept, ordinary = map(int, printed(KEEPS)[-2:])
    assert with_kept < 24  # the allocator takes 20 MiB at once for what is small
    assert ordinary < 24
