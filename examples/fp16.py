"""fp16 in a plain loop: a batch that overflows is left out, bit for bit. Run: python examples/fp16.py"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import fxamp

BAD_STEP = 20


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")  # without Inductor, which takes longer than these steps
    compiled = torch.compile(model, backend=amp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.attach(optimizer)
    schedule = amp.when_stepped(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60))
    x = torch.randn(256, 16)
    labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

    losses: list[float] = []
    for step in range(60):
        loss = F.cross_entropy(compiled(x), labels)
        losses.append(loss.item())
        if step == BAD_STEP:
            loss = loss * math.inf
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)  # of true gradients: nothing has to be unscaled first
        optimizer.step()
        schedule.step()
        stood_still = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert stood_still == (step == BAD_STEP)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"skipped {amp.read_skipped_steps()} of 60 steps, loss scale {amp.read_loss_scale():.0f}")
    assert losses[-1] < 0.3 * losses[0]
    assert (amp.read_skipped_steps(), amp.read_loss_scale()) == (1, 2.0**15)


if __name__ == "__main__":
    main()
