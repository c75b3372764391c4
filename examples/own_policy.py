"""Rules of one's own, and looking at what they did. Run: python examples/own_policy.py"""

from __future__ import annotations

import torch
from torch import nn

import fxamp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).softmax(-1)


def main() -> None:
    torch.manual_seed(0)
    # the head in fp32, softmax in bf16, everything else as autocast would
    amp = fxamp.Amp(precision="bf16", policy={"head": "fp32", "softmax": "bf16"}, lower="aot_eager")
    model = Model()
    out = torch.compile(model, backend=amp)(torch.randn(8, 16))
    assert out.dtype == torch.float32  # what leaves a graph has the dtype of the program as written

    variant = amp.graphs[0].variants["bf16"]
    computed = {(d.op, d.facts.module): d.computes for d in variant.plan.decisions.values()}
    assert computed[("linear", "head")] == "fp32"
    assert computed[("linear", "body.0")] == "bf16"
    assert computed[("softmax", "")] == "bf16"
    print(variant.text("plan"))
    print(variant.diff())


if __name__ == "__main__":
    main()
