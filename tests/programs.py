"""Small programs that several tests share, and the ways to run and compare them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from fxamp import capture, graph, plan, rewrite
from fxamp.capture import Captured
from fxamp.plan import Plan
from fxamp.policy import Policy


class Fn(nn.Module):
    """A module from a function fn(self, *inputs) and the parameters, buffers and modules that it uses."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.fn(self, *inputs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def mlp(*sizes: int) -> nn.Sequential:
    layers = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def small_models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Ten kinds of layers, each in a tiny model with its input."""
    image = torch.randn(2, 3, 8, 8)
    tokens = torch.randint(0, 11, (2, 6))
    return {
        "mlp": (mlp(8, 16, 4), (torch.randn(4, 8),)),
        "conv": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(288, 4)), (image,)),
        "batch_norm": (nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()), (image,)),
        "group_norm": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2)), (image,)),
        "transformer": (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (torch.randn(2, 5, 16),)),
        "embedding": (nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)), (tokens,)),
        "attention": (Attention(16, 2), (torch.randn(2, 6, 16),)),
        "residual": (Residual(8), (torch.randn(4, 8),)),
        "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)), (image,)),
        "softmax": (nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2), nn.LogSoftmax(-1)), (torch.randn(4, 8),)),
        "gated": (Gated(8), (torch.randn(4, 8),)),
        "counted": (Counted(8), (torch.randn(4, 8),)),
    }


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.cat([self.gate(x), self.up(x)], -1).chunk(2, -1)
        return self.down(F.silu(a) * b).sum(-1)


class Counted(nn.Module):
    """Updates a running mean in its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return (y - self.mean).tanh()


def graph_of(fn: Callable[..., Any], *inputs: Any) -> tuple[torch.fx.GraphModule, list[Any]]:
    """(Dynamo's graph of fn, its example inputs); fn must have one graph."""
    found: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.append((gm, list(examples)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep)(*inputs)
    assert len(found) == 1, f"{len(found)} graphs"
    return found[0]


def captured_of(fn: Callable[..., Any], *inputs: Any) -> Captured:
    return capture.capture(*graph_of(fn, *inputs))


def planned(fn: Callable[..., Any], *inputs: Any, variant: str = "bf16", policy: Any = None) -> tuple[Captured, Plan]:
    captured = captured_of(fn, *inputs)
    return captured, plan.plan(captured, Policy.of(policy or "autocast"), variant=variant)


def decisions(fn: Callable[..., Any], *inputs: Any, **options: Any) -> dict[str, plan.Decision]:
    """Decisions by operation; the last one where an operation occurs more than once."""
    _, made = planned(fn, *inputs, **options)
    return {d.op: d for d in made.decisions.values() if d.op is not None}


def rewritten(fn: Callable[..., Any], *inputs: Any, **options: Any) -> torch.fx.GraphModule:
    captured, made = planned(fn, *inputs, **options)
    gm = graph.clone(captured.gm)
    for pass_ in rewrite.passes_for(captured, made):
        pass_(gm)
    return gm


def pull(outputs: Any) -> None:
    """Backward from every float output, with a fixed cotangent that has no symmetry to hide behind."""
    loss = [
        (t.float() * torch.arange(t.numel()).add(1).cos().view(t.shape).to(t.device)).sum()
        for t in tree_leaves(outputs)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad
    ]
    torch.stack(loss).sum().backward()


def everything(model: nn.Module, outputs: Any, inputs: Sequence[torch.Tensor] = ()) -> dict[str, torch.Tensor]:
    """Whatever a user can see of a step: outputs, gradients, parameters, buffers, gradients of inputs."""
    seen = {f"output {i}": t for i, t in enumerate(tree_leaves(outputs)) if isinstance(t, torch.Tensor)}
    seen |= {name: p for name, p in model.named_parameters()}
    seen |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen |= {name: b for name, b in model.named_buffers()}
    return seen | {f"input {i}.grad": x.grad for i, x in enumerate(inputs) if x.grad is not None}


def step(model: nn.Module, inputs: Sequence[torch.Tensor], **compile_options: Any) -> dict[str, torch.Tensor]:
    """Everything visible after one compiled forward and backward of a copy of `model`."""
    model = copy.deepcopy(model)
    torch._dynamo.reset()
    outputs = torch.compile(model, **compile_options)(*inputs)
    pull(outputs)
    return everything(model, outputs)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|, over all finite values of `want`; where `want` is infinite, `got` must be the same infinity."""
    got, want = got.detach().double(), want.detach().double()
    fine = want.isfinite()
    if not torch.equal(got[~fine].nan_to_num(), want[~fine].nan_to_num()):
        return float("inf")
    got, want = got[fine], want[fine]
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()
