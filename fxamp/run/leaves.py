"""Low copies of weights that gradients arrive at: what a train step computes with, in place of casting its weights anew.

A weight that a graph reads in one low format alone becomes a leaf of that format. It is written once a step, for all
micro-batches and graphs together, and its gradient stays low until the update, or until it is added to the others in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Compiled = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """The copy of a weight in one low format."""

    weight: Tensor
    low: Tensor
    """Requires a gradient where the weight does. Always the same tensor, as CUDA graphs read it."""


class LowLeaves:
    """The copies that belong to one train step."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._eligible = {id(w): w for w in weights if _is_plain(w)}
        self._leaves: dict[tuple[int, torch.dtype], Leaf] = {}

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._leaves.values())

    # ---- graphs ---------------------------------------------------------------------------------------------------------
    def positions(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Which inputs of a graph can be leaves."""
        return tuple(i for i, value in enumerate(inputs) if id(value) in self._eligible)

    def around(self, program: Compiled, taken: Mapping[int, torch.dtype]) -> Compiled:
        """A graph that takes leaves at these positions, as one that takes the weights."""
        wanted = tuple(taken.items())

        def call(*args: Any) -> Any:
            given = list(args)
            for i, dtype in wanted:
                given[i] = self._of(args[i], dtype)
            return program(*given)

        return call

    def _of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        leaf = self._leaves.get((id(weight), dtype))
        if leaf is None or leaf.low.shape != weight.shape or leaf.low.requires_grad != weight.requires_grad:
            low = weight.detach().to(dtype).requires_grad_(weight.requires_grad)
            leaf = self._leaves[id(weight), dtype] = Leaf(weight=weight, low=low)
        return leaf.low

    # ---- a step ---------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def refresh(self) -> None:
        """Writes all copies anew, however the weights have changed."""
        if self._leaves:
            torch._foreach_copy_([leaf.low.detach() for leaf in self], [leaf.weight.detach() for leaf in self])

    @torch.no_grad()
    def widen_gradients(self, inverse_scale: Tensor | None) -> None:
        """Moves the gradients of the copies to their weights, in fp32, added to what is there. `inverse_scale`: fp32 [], what
        they are multiplied by; None: they are true."""
        arrived = [leaf for leaf in self if leaf.low.grad is not None]
        if not arrived:
            return
        wide = [torch.empty_like(leaf.weight, requires_grad=False) for leaf in arrived]
        torch._foreach_copy_(wide, [leaf.low.grad for leaf in arrived])  # pyright: ignore[reportArgumentType]
        if inverse_scale is not None:
            torch._foreach_mul_(wide, inverse_scale)
        for leaf, gradient in zip(arrived, wide, strict=True):
            leaf.low.grad = None
            leaf.weight.grad = gradient if leaf.weight.grad is None else leaf.weight.grad.add_(gradient)

    def drop_gradients(self) -> None:
        """Forgets what has arrived."""
        for leaf in self:
            leaf.low.grad = None

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(leaf.low.nbytes for leaf in self)


def _is_plain(weight: Tensor) -> bool:
    """Is it a weight whose gradient nobody but the optimizer waits for? Hooks (DDP's, users') would never run."""
    hooked = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and not hooked
