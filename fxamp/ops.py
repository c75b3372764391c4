"""Functions that fxamp puts into graphs, each with its eager meaning. Importing this module registers them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor


@torch.library.custom_op("fxamp::round_to", mutates_args=())
def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, as a call that no compiler sees into: what comes out has been rounded, whatever is fused around it."""
    return x.to(dtype, copy=True)


@round_to.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


ROUND_TO: Final = torch.ops.fxamp.round_to.default
"""What a graph calls."""
