"""DDPOptimizer compiles a model in parts, so that gradients travel while the backward still runs: each part is planned, and
changes its precision, as it would in the whole model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import fxamp

WIDTH = 400  # 0.6 MB a layer: two do not fit into the first bucket of DDP, of 1 MB


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Net(nn.Module):
    """Not a bare Sequential, whose code is PyTorch's own: Dynamo does not begin a graph there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(F.gelu(linear(x)))
        return x


def trained(amp: fxamp.Amp, model: nn.Module, precisions: tuple[str, ...]) -> list[Tensor]:
    run = torch.compile(model, backend=amp)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    outputs: list[Tensor] = []
    for step, precision in enumerate(precisions):
        amp.set_precision(precision)
        out = run(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(out.detach())
    return [*outputs, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.usefixtures("alone")
def test_parts_are_planned_and_run_as_the_whole_model():
    results, decisions, num_graphs = [], [], []
    for wraps in (False, True):
        torch._dynamo.reset()
        amp = fxamp.Amp(ladder=("fp16", "fp32"), lower="aot_eager")
        model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=1) if wraps else Net()
        results.append(trained(amp, model, ("fp32", "fp16", "fp16", "fp32")))  # the first is not the lowest
        num_graphs.append(len(amp.graphs))
        decisions.append([
            [(d.op, d.facts.module.removeprefix("module."), d.computes) for g in amp.graphs for d in _plan(g, rung)]
            for rung in ("fp16", "fp32")
        ])  # fmt: skip
    assert num_graphs[0] == 1
    assert num_graphs[1] > 1
    for whole, parts in zip(*decisions, strict=True):
        assert sorted(whole) == sorted(parts)
    for a, b in zip(*results, strict=True):
        assert type(b) is Tensor or isinstance(b, nn.Parameter)
        assert torch.equal(a, b)


@pytest.mark.usefixtures("alone")
def test_what_ddp_keeps_dynamo_from_is_told():
    """Dynamo begins no graph in a bare Sequential behind DDP's graph break."""
    bare = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    torch.compile(bare, backend=amp)(torch.randn(4, 8))
    assert not amp.graphs
    text = " ".join(str(amp.report()).split())
    assert "No graph was compiled yet" in text
    assert "DistributedDataParallel(nn.Sequential(...)): wrap a class of your own, or compile first" in text

    def step_of(model: nn.Module) -> None:
        step = amp.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        step(torch.randn(4, 8), torch.zeros(4, 8))

    told = r"4 parameters \(module.0.bias, .*\) are read outside of every compiled graph"
    with pytest.warns(fxamp.FxampWarning, match=told):
        step_of(bare)
    assert "4 parameters (module.0.bias, " in str(amp.report())
    step_of(nn.parallel.DistributedDataParallel(torch.compile(nn.Sequential(nn.Linear(8, 8)), backend=amp)))  # does not warn


@pytest.mark.usefixtures("alone")
def test_a_plain_loop_is_told_of_parameters_that_no_graph_reads():
    bare = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    amp.attach(optimizer)
    torch.compile(bare, backend=amp)(torch.randn(4, 8)).mean().backward()
    with pytest.warns(fxamp.FxampWarning, match="an attached SGD steps parameters that no compiled graph"):
        optimizer.step()
    optimizer.step()  # once is enough


def _plan(graph, rung: str):
    return [d for d in graph.variants[rung].plan.everywhere if d.op is not None]
