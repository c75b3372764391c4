"""What one call of a train step is given."""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fxamp import errors


class Structure(NamedTuple):
    """How arguments are nested."""

    spec: TreeSpec
    words: str
    """Equal for what is nested alike."""


@functools.cache
def _flat(num_args: int) -> Structure:
    """Of so many positional arguments, none of them nested."""
    spec = tree_flatten(((0,) * num_args, {}))[1]
    return Structure(spec, str(spec))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments of one call: its tensors, and everything else."""

    tensors: tuple[Tensor, ...]
    others: tuple[Any, ...]
    structure: Structure

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        if not kwargs and all(isinstance(x, Tensor) for x in args):  # nearly all: nothing to flatten
            leaves, structure = args, _flat(len(args))
        else:
            leaves, spec = tree_flatten((args, dict(kwargs)))
            structure = Structure(spec, str(spec))
        tensors = tuple(x for x in leaves if isinstance(x, Tensor))
        if any(x.requires_grad for x in tensors):
            raise errors.InvalidOption(
                "a tensor of the batch requires a gradient, which a recorded step could not hand out",
                way_out="Give x.detach(), or use a plain training loop",
            )
        strange = next((x for x in leaves if not isinstance(x, (Tensor, *_CONSTANTS))), None)
        if strange is not None:
            raise errors.InvalidOption(
                f"an argument of the step holds a {type(strange).__name__}, in which nobody would see a change",
                way_out="Give tensors, numbers, strings or None, or tuples, lists and dicts of them",
            )
        others = tuple(_A_TENSOR if isinstance(x, Tensor) else x for x in leaves)
        return Batch(tensors=tensors, others=others, structure=structure)

    def key(self) -> Hashable:
        """Equal for batches that one recording serves."""
        layouts = tuple((x.shape, x.stride(), x.dtype) for x in self.tensors)
        others = tuple(x if x is _A_TENSOR else (type(x), repr(x)) for x in self.others)
        return layouts, others, self.structure.words

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in place of its own."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if x is _A_TENSOR else x for x in self.others], self.structure.spec)

    def parts(self, tensors: Sequence[Tensor], num: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of each micro-batch: equal parts along the first dimension; tensors without one are for all.

        Raises: InvalidOption where that leaves a rest, and where tensors have different numbers of rows, or there are none."""
        if num == 1:
            return [self.arguments(tensors)]
        lengths = list(dict.fromkeys(x.shape[0] for x in tensors if x.dim()))
        if len(lengths) != 1:
            raise errors.InvalidOption(
                f"accumulate={num} splits every tensor of a batch along its first dimension, and they have "
                + (" and ".join(map(str, lengths)) + " rows" if lengths else "none"),
                way_out="Give all of them one row a sample, and register what is the same for all samples as a buffer",
            )
        if lengths[0] % num:
            raise errors.InvalidOption(
                f"a tensor of the batch has {lengths[0]} rows, which accumulate={num} does not divide",
                way_out="Give a batch that is a multiple of the number of micro-batches",
            )
        split = [x.chunk(num) if x.dim() else (x,) * num for x in tensors]
        return [self.arguments(part) for part in zip(*split, strict=True)]


class _ATensor:
    """Stands for a tensor among the arguments."""

    def __repr__(self) -> str:
        return "tensor"


_A_TENSOR: Final = _ATensor()
_CONSTANTS: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
"""What an argument may be beside a tensor."""
