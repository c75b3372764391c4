"""A real small model, trained: handwritten digits (scikit-learn is not needed, the set is drawn), 200 steps."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import fxamp
from tests.programs import relative_error


def examples(generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy 8x8 images of eight shapes, shifted at random: (count, 1, 8, 8) and their labels."""
    shapes = torch.zeros(8, 8, 8)
    for i in range(8):
        shapes[i, i // 2, :] += i % 2
        shapes[i, :, (3 * i) % 8] += 1
        shapes[i].diagonal().add_(0.5 * (i % 3))
    labels = torch.randint(0, 8, (count,), generator=generator)
    shifts = torch.randint(-1, 2, (count,), generator=generator).tolist()
    images = torch.stack([shapes[k].roll(s, 0) for k, s in zip(labels.tolist(), shifts, strict=True)])
    return (images + 0.8 * torch.randn(count, 8, 8, generator=generator)).unsqueeze(1), labels


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.hidden, self.head = nn.Linear(16 * 16, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.gelu(self.norm(self.conv(x))), 2).flatten(1)
        return self.head(F.relu(self.hidden(x)))


def train(model: nn.Module, amp: fxamp.Amp | None, num_steps: int) -> float:
    """Trains a copy and returns the held-out loss."""
    model = copy.deepcopy(model)
    compiled = model if amp is None else torch.compile(model, backend=amp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        x, t = examples(generator, 32)
        loss = F.cross_entropy(compiled(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, t = examples(torch.Generator().manual_seed(2), 512)
    with torch.no_grad():
        return F.cross_entropy(model(x), t).item()


def test_two_hundred_steps_in_bf16_end_where_fp32_ends():
    torch.manual_seed(0)
    model = Classifier()
    low, high = fxamp.Amp(precision="bf16"), fxamp.Amp(precision="fp32")
    start, eager = train(model, None, 0), train(model, None, 200)
    bf16, fp32 = train(model, low, 200), train(model, high, 200)

    assert fp32 < 0.5 * start
    assert abs(fp32 / eager - 1) < 1e-2
    assert abs(bf16 / fp32 - 1) < 1e-2
    # and it really ran low: conv, two linears; the outputs differ by about what bf16 rounds
    assert low.report().num_low_ops == 4
    assert high.report().num_low_ops == 0
    x, _ = examples(torch.Generator().manual_seed(3), 32)
    difference = relative_error(torch.compile(model, backend=low)(x), model(x))
    assert 2**-12 < difference < 2**-5
    assert bf16 != fp32
