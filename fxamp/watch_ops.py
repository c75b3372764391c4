"""Functions that read what is watched in a graph, each with its eager meaning. Importing this module registers them, which
takes time: it is done where somebody watches."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from fxamp.ops import SMALLEST_NORMAL, numbers_of, to_fp32

# A compiler may lay out what these read as it likes: they must not change how a program is compiled.
_TAGS: Final = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
torch.library.define("fxamp::magnitude", "(Tensor x, float? limit=None) -> Tensor", tags=_TAGS)


@torch.library.impl("fxamp::magnitude", "CompositeExplicitAutograd")
def magnitude(x: Tensor, limit: float | None = None) -> Tensor:
    """The largest magnitude in `x`, fp32 [1]: NaN if there is one, inf from `limit` on, 0 if `x` is empty."""
    numbers = numbers_of(x)
    if numbers.numel() == 0:
        return torch.zeros(1, device=x.device)
    found = to_fp32(torch.linalg.vector_norm(numbers, math.inf))
    return (found if limit is None else torch.where(found >= limit, math.inf, found)).view(1)


torch.library.define("fxamp::small_share", "(Tensor x) -> Tensor", tags=_TAGS)


@torch.library.impl("fxamp::small_share", "CompositeExplicitAutograd")
def small_share(x: Tensor) -> Tensor:
    """The share, among the numbers of `x` that are not 0, of those below the smallest normal number of fp16, fp32 [1]; 0 if
    there are none. (Zeros are not counted: masks and ReLUs make them too.)"""
    size = numbers_of(x).abs()
    is_small = (size > 0) & (size < SMALLEST_NORMAL)
    return (is_small.sum() / (size > 0).sum().clamp(min=1)).float().view(1)


torch.library.define("fxamp::join", "(Tensor[] numbers, Device device) -> Tensor", tags=_TAGS)


@torch.library.impl("fxamp::join", "CompositeExplicitAutograd")
def join(numbers: list[Tensor], device: torch.device) -> Tensor:
    """Vectors, one behind the other, on a device."""
    return torch.cat([x.to(device, non_blocking=True) for x in numbers])


torch.library.define("fxamp::judge", "(Tensor numbers, Tensor parents, Tensor entries, int num_entries) -> Tensor", tags=_TAGS)


@torch.library.impl("fxamp::judge", "CompositeExplicitAutograd")
def judge(numbers: Tensor, parents: Tensor, entries: Tensor, num_entries: int) -> Tensor:
    """Who made the first inf or NaN, and who has only been handed one.

    Args: numbers: fp32 [V], the magnitudes of V values; parents: int64 [V, P], from which values each one was computed, V
    where there are fewer than P; entries: int64 [V], whose value each one is, below `num_entries`.
    Returns: fp32 [3 * num_entries], for each entry the number of its values that are inf or NaN of finite operands; then of
    those that are NaN where operands were inf at worst; then of those that hold what an operand held.
    """
    level = torch.isnan(numbers).to(torch.int8) * 2 + torch.isinf(numbers).to(torch.int8)
    above = torch.cat([level, level.new_zeros(1)])[parents].amax(1)
    kinds = ((level > 0) & (above == 0), (level == 2) & (above == 1), (level > 0) & (level <= above))
    counts = torch.zeros((3, num_entries), device=numbers.device)
    return counts.index_add_(1, entries, torch.stack(kinds).to(torch.float32)).view(-1)


torch.library.define(
    "fxamp::lost_of_each",
    "(Tensor[] shares, Tensor numbers, Tensor parents, Tensor places, Tensor entries, int num_entries) -> Tensor",
    tags=_TAGS,
)


@torch.library.impl("fxamp::lost_of_each", "CompositeExplicitAutograd")
def lost_of_each(
    shares: list[Tensor], numbers: Tensor, parents: Tensor, places: Tensor, entries: Tensor, num_entries: int
) -> Tensor:
    """How much of the gradients of each entry fp16 holds badly, or not at all.

    Args: shares: G of fp32 [1], `small_share` of each of G gradients; numbers, parents: as in `judge`; places, entries:
    int64 [G], which of the numbers is each one's, and its entry.
    Returns: fp32 [num_entries], the largest share; 1 where all of a gradient is 0, and nothing that it was computed from is.
    """
    nothing = torch.zeros(num_entries, device=numbers.device)
    if not shares:
        return nothing
    of_parents = torch.cat([numbers, numbers.new_full((1,), math.inf)])[parents[places]].amin(1)
    is_flushed = (numbers[places] == 0) & (of_parents > 0) & of_parents.isfinite()
    share = torch.where(is_flushed, 1.0, torch.cat([x.to(numbers.device, non_blocking=True) for x in shares]))
    return nothing.scatter_reduce_(0, entries, share, "amax")


@torch.library.register_fake("fxamp::magnitude")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(x: Tensor, limit: float | None = None) -> Tensor:
    return x.new_empty((1,), dtype=torch.float32)


@torch.library.register_fake("fxamp::small_share")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(x: Tensor) -> Tensor:
    return x.new_empty((1,), dtype=torch.float32)


@torch.library.register_fake("fxamp::join")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(numbers: list[Tensor], device: torch.device) -> Tensor:
    return torch.empty((sum(len(x) for x in numbers),), dtype=torch.float32, device=device)


@torch.library.register_fake("fxamp::judge")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(numbers: Tensor, parents: Tensor, entries: Tensor, num_entries: int) -> Tensor:
    return numbers.new_empty((3 * num_entries,))


@torch.library.register_fake("fxamp::lost_of_each")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(
    shares: list[Tensor], numbers: Tensor, parents: Tensor, places: Tensor, entries: Tensor, num_entries: int
) -> Tensor:
    return numbers.new_empty((num_entries,))


MAGNITUDE: Final = torch.ops.fxamp.magnitude.default
SMALL_SHARE: Final = torch.ops.fxamp.small_share.default
JOIN: Final = torch.ops.fxamp.join.default
JUDGE: Final = torch.ops.fxamp.judge.default
LOST_OF_EACH: Final = torch.ops.fxamp.lost_of_each.default
