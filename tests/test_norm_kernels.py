"""Norms between lowered operations: fp32 inside one kernel, low tensors on both sides, no kernel that only casts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import fxamp

WIDTH = 64


class Between(nn.Module):
    """A norm between two products."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


class HandWritten(nn.Module):
    """RMSNorm as models of transformers write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def kernels(norm: Callable[[int], nn.Module], device: str) -> set[str]:
    """Names of the kernels that Inductor generates for inference."""
    model = Between(norm).to(device)
    amp = fxamp.Amp(precision="bf16", output_dtype="low", cuda_graphs=False)
    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(model, backend=amp), torch.randn(128, WIDTH, device=device))
    return set(re.findall(r"(?:cpp|triton_(?:poi|red|per))_fused\w*", "\n".join(code)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, HandWritten])
def test_one_kernel(norm: Callable[[int], nn.Module], device: str):
    names = kernels(norm, device)
    norms = {name for name in names if "norm" in name or "rsqrt" in name}
    assert len(norms) == 1
    # What else there is casts inputs of the graph: x and the weights.
    assert all(re.fullmatch(r"(cpp|triton_poi)_fused(__to_copy|_t|_addmm|_linear|_view)+_\d+", name) for name in names - norms)
    if device == "cpu":
        assert len(names) == 2
