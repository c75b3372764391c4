"""Low copies of fp32 weights for evaluation, beside averaged weights that are swapped in and out.

Run: python examples/inference.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxamp


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    amp = fxamp.Amp(precision="bf16")
    compiled = torch.compile(model, backend=amp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, labels = torch.randn(256, 16), torch.randint(4, (256,))

    def evaluate() -> float:
        return sum(F.cross_entropy(compiled(a), b).item() for a, b in zip(x.chunk(8), labels.chunk(8), strict=True)) / 8

    for _ in range(3):
        for _ in range(10):
            F.cross_entropy(compiled(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        with torch.no_grad(), amp.freeze(model) as frozen:
            trained = evaluate()
            own = [p.clone() for p in model.parameters()]
            for p, mean in zip(model.parameters(), average.module.parameters(), strict=True):
                p.data.copy_(mean)  # seen, as every other way to write is
            print(f"{trained:.3f}, averaged {evaluate():.3f}, {frozen}")
            for p, before in zip(model.parameters(), own, strict=True):
                p.data.copy_(before)


if __name__ == "__main__":
    main()
