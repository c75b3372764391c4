"""A whole training step in one call, on CUDA in one CUDA graph. Run: python examples/train_step.py"""

from __future__ import annotations

import math

import torch
from torch import nn

import fxamp

BAD_STEP = 20


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lower = "inductor" if device == "cuda" else "aot_eager"  # Inductor takes longer than these steps on a CPU
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).to(device)
    amp = fxamp.Amp(ladder=("fp16", "fp32"), lower=lower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    x = torch.randn(256, 16)
    labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

    losses: list[torch.Tensor] = []
    with amp.train_step(model, nn.CrossEntropyLoss(), optimizer, clip_grad_norm=10.0, accumulate=2) as step:
        for i in range(60):
            if i == 40:
                amp.set_precision("fp32")  # another recording; nothing is compiled
            losses.append(step(x * math.inf if i == BAD_STEP else x, labels))
            schedule.step()
        print(step.summary())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"skipped {amp.read_skipped_steps()} of 60 steps, loss scale {amp.read_loss_scale():.0f}")
    assert losses[-1] < 0.3 * losses[0]
    assert amp.read_skipped_steps() == 1


if __name__ == "__main__":
    main()
