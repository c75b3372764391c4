"""Precision that follows the loss: fp32 at the start and where the loss jumps, fp16 else. Run: python examples/scheduler.py"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fxamp

BAD_STEP = 70


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    scheduler = fxamp.CurvatureScheduler(threshold=0.5, lower_threshold=0.1, dwell_steps=16)
    amp = fxamp.Amp(precision="fp16", scheduler=scheduler, lower="aot_eager")  # without Inductor, as these steps are few
    compiled = torch.compile(model, backend=amp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.attach(optimizer)
    x = torch.randn(256, 16)
    labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

    for step in range(120):
        loss = F.cross_entropy(compiled(x), labels.flip(0) if step == BAD_STEP else labels)  # one batch of wrong labels
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        amp.observe(loss)

    for change in amp.history.changes:
        print(f"step {change.step:3}: {change.precision['model']}, {change.reason}")
    print(f"{len(amp.graphs)} graph, compiled once in {' and '.join(amp.graphs[0].variants)}")
    first, down, up, again = amp.history.changes
    assert (first.step, first.precision["model"]) == (0, "fp32")
    assert (up.step, up.precision["model"]) == (BAD_STEP + scheduler.lag_steps, "fp32")
    assert down.precision == again.precision == {"model": "fp16"}
    assert again.step - up.step >= scheduler.dwell_steps


if __name__ == "__main__":
    main()
