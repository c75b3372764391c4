"""The update in one kernel a group, beside the optimizer of torch that it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn, optim

from fxamp.run import update
from fxamp.run.update import FusedUpdate, Gradient

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": functools.partial(optim.AdamW, lr=0.1, weight_decay=0.1, fused=True),
    "Adam": functools.partial(optim.Adam, lr=0.1, weight_decay=0.1, betas=(0.0, 0.95), fused=True),
    "SGD": functools.partial(optim.SGD, lr=0.1, fused=True),
    "SGD with momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, fused=True),
    "SGD with Nesterov's": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


def test_what_the_kernels_do_not_take():
    p = [nn.Parameter(torch.zeros(4))]
    assert update.why_not(optim.AdamW(p, fused=True)) == ""
    assert update.why_not(optim.SGD(p, lr=0.1, fused=True)) == ""
    assert update.why_not(optim.AdamW(p)) == "fused=True was not asked for"
    assert update.why_not(optim.AdamW(p, amsgrad=True, fused=True)) == "amsgrad=True"
    assert update.why_not(optim.SGD(p, maximize=True, fused=True)) == "maximize=True"
    assert update.why_not(optim.RMSprop(p)) == "RMSprop has no kernel of fxamp's"
    assert "fp32" in update.why_not(optim.AdamW([nn.Parameter(torch.zeros(4, dtype=torch.float64))], fused=True))

    class Mine(optim.AdamW):
        pass

    assert update.why_not(Mine(p, fused=True)) == "Mine has no kernel of fxamp's"


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_kernel_is_the_optimizer(name: str, dtype: torch.dtype, clip: float | None):
    """Parameters after five steps, of which one is left out, are those of torch's fused kernels up to rounding; low copies
    are the rounded parameters."""
    torch.manual_seed(0)
    shapes = [(5,), (4096,), (9001,), (3, 8, 2, 2), ()]
    ours = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    ours[3] = nn.Parameter(ours[3].detach().to(memory_format=torch.channels_last))  # pyright: ignore[reportCallIssue]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a, b = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    kernels, scale = FusedUpdate(a), 8.0
    rates = [torch.tensor(0.1, device="cuda")]
    kernels.load([dtype], rates)
    for step in range(5):
        gradients = [torch.randn_like(p).to(dtype) for p in ours]
        lows = [torch.zeros_like(p, dtype=torch.bfloat16, requires_grad=False) for p in ours]
        for p, q, gradient in zip(ours, theirs, gradients, strict=True):
            q.grad = gradient.float() / scale
            p.grad = q.grad.clone()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs, clip)
            nn.utils.clip_grad_norm_(ours, clip)
        if step == 0:  # makes the state
            a.step()
            b.step()
            continue
        pairs = [
            Gradient(parameter=p, gradient=g, is_scaled=True, low=low) for p, g, low in zip(ours, gradients, lows, strict=True)
        ]
        assert kernels.takes(pairs)
        before = _everything(a, ours)
        is_bad = step == 3
        kernels.launch(
            pairs,
            rates,
            kernels.reserve(),
            inverse_scale=torch.tensor(1 / scale, device="cuda"),
            clip=clip,
            overflowed=torch.tensor(float(is_bad), device="cuda"),
        )
        if is_bad:
            assert all(map(torch.equal, _everything(a, ours), before))
        else:
            b.step()
            assert all(torch.equal(low, p.detach().bfloat16()) for p, low in zip(ours, lows, strict=True))
    for x, y in zip(_everything(a, ours), _everything(b, theirs), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)


def _everything(optimizer: optim.Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return [t.detach().clone() for t in (*parameters, *states)]
