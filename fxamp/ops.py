"""Functions that fxamp puts into graphs, each with its eager meaning.

Importing this module registers them; graphs name them as `torch.ops.fxamp.<name>.default`.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fxamp::round_to", mutates_args=())
def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, as a call that no compiler sees into: what comes out has been rounded, whatever is fused around it."""
    return x.to(dtype, copy=True)


@round_to.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)
