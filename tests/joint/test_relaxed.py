"""RELAXED passes: what they gain in bytes, and the error that they add, against float64 in one run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxamp
from bench import joint
from bench.joint import Traffic
from fxamp import errors
from tests.programs import everything, pull, relative_error

LOW_EPS = torch.finfo(torch.bfloat16).eps


class Block(nn.Module):
    """A residual block with a norm and a gate written by hand, as in models of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        h = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(F.silu(self.gate(h)) * (self.up(h) * turn))


class Stack(nn.Module):
    def __init__(self, num_layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.register_buffer("turn", torch.linspace(0, 3, width).cos().expand(16, width).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.turn)
        return x


X = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(5))


def errors_of(relaxed: tuple[str, ...], model: nn.Module) -> dict[str, float]:
    """By output and gradient: the error of bf16 with these passes, in units of bf16's eps."""
    exact = copy.deepcopy(model).double()
    out = exact(X.double())
    pull(out)
    want = everything(exact, out)
    mine = copy.deepcopy(model)
    torch._dynamo.reset()
    got_out = torch.compile(mine, backend=fxamp.Amp(precision="bf16", lower="aot_eager", relaxed=relaxed))(X)
    pull(got_out)
    got = everything(mine, got_out)
    names = [name for name in want if name.startswith("output") or name.endswith(".grad")]
    return {name: relative_error(got[name], want[name]) / LOW_EPS for name in names}


def traffic(relaxed: tuple[str, ...], model: nn.Module) -> Traffic:
    return joint.of_fxamp(model, lambda compiled: pull(compiled(X)), precision="bf16", relaxed=relaxed)


@pytest.mark.parametrize(
    ("relaxed", "output_bound", "gradient_bound"),
    [
        # In units of eps. docs/relaxed.md has the same figures, as measured; here with a margin of two.
        (("min_cut",), 0.7, 0.8),
        (("low_residual",), 0.7, 0.3),
        (("min_cut", "low_residual"), 0.7, 0.8),
    ],
)
def test_the_error_added(relaxed, output_bound: float, gradient_bound: float):
    model = Stack()
    plain, got = errors_of((), model), errors_of(relaxed, model)
    assert got["output 0"] <= plain["output 0"] + output_bound
    assert max(got.values()) <= max(plain.values()) + gradient_bound
    assert got != plain  # it did something


def test_min_cut_moves_fewer_bytes():
    plain, cut = traffic((), Stack()), traffic(("min_cut",), Stack())
    assert cut.cast_bytes < plain.cast_bytes
    assert cut.saved_bytes <= plain.saved_bytes


def test_low_residual_saves_the_stream_low():
    plain, low = traffic((), Stack()), traffic(("low_residual",), Stack())
    assert low.saved_bytes < plain.saved_bytes


def test_the_policy_stands():
    """What a rule puts into fp32 stays there, under min_cut too."""
    both, rules = ("min_cut", "low_residual"), {"mul": "fp32", "add": "fp32"}
    amp = fxamp.Amp(precision="bf16", lower="aot_eager", relaxed=both, policy=rules)
    torch.compile(Stack(1), backend=amp)(X)
    nodes = amp.graphs[0].variants["bf16"].joint.graph.nodes
    forward = [n for n in nodes if n.meta.get("partitioner_tag") != "is_backward"]
    written = [n.meta["val"].dtype for n in forward if n.target in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)]
    assert len(written) > 4
    assert set(written[:3]) == {torch.float32}
    assert written.count(torch.bfloat16) <= 1  # inside silu, which no rule speaks of


def test_x_plus_a_function_of_x_only():
    """x + c * x**3 is no residual stream: there the low value was first."""

    def fn(x):
        h = F.linear(x, torch.ones(32, 32))
        return h + 0.1 * h.pow(3)

    amp = fxamp.Amp(precision="bf16", lower="aot_eager", relaxed=("low_residual",))
    torch.compile(fn, backend=amp)(X)
    plan = amp.graphs[0].variants["bf16"].plan
    assert [d.computes for d in plan.decisions.values() if d.op == "add"] == ["fp32"]


def test_names_are_checked():
    with pytest.raises(errors.UnknownOption, match="min_cut"):
        fxamp.Amp(relaxed=("mincut",))
    with pytest.raises(errors.InvalidOption, match="joint graph"):
        fxamp.Amp(relaxed=("min_cut",), lower="eager")
    assert fxamp.Amp(relaxed="min_cut").options.relaxed == ("min_cut",)


def test_caches_tell_them_apart():
    """Each choice has a digest of its own: it is part of the keys of PyTorch's caches."""
    from fxamp import backend

    digests: set[str] = set()
    seen = backend._digest

    def spy(*args):
        digests.add(seen(*args))
        return seen(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_digest", spy)
        for relaxed in ((), ("min_cut",), ("low_residual",), ("min_cut", "low_residual")):
            torch._dynamo.reset()
            torch.compile(Stack(1), backend=fxamp.Amp(precision="bf16", lower="aot_eager", relaxed=relaxed))(X)
    assert len(digests) == 4
