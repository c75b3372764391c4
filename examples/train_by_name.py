"""One line switches a training loop to bf16: the backend's name. Run: python examples/train_by_name.py"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fxamp


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    compiled = torch.compile(model, backend="fxamp", options={"precision": "bf16"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 16)
    labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

    losses: list[float] = []
    for _ in range(60):
        loss = F.cross_entropy(compiled(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.dtype == torch.float32 and p.grad is not None for p in model.parameters())
    print(fxamp.shared(precision="bf16").report())


if __name__ == "__main__":
    fxamp.register()  # only needed where fxamp is on the path without being installed
    main()
