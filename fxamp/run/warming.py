"""Runs every variant of a model beforehand, and leaves no trace of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxamp.run import reach
from fxamp.run.variants import Precisions

NUM_RUNS: Final = 3
"""Of each variant: Inductor's CUDA graphs run once to warm up, once to be recorded, and then are replayed."""


def warm(precisions: Precisions, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Calls a model in all assignments of precisions that its graphs can meet, forward, and backward if it has one.

    Gradients, buffers, random numbers, and the precisions are what they were. Returns the number of assignments.
    Raises: TooManyVariants if there are more than `MAX_VARIANTS`.
    """
    with untouched(model), precisions.kept():
        step(model, args, kwargs)  # compiles
        combinations = tuple(precisions.combinations())
        for chosen in combinations:
            precisions.force(chosen)
            for _ in range(NUM_RUNS):
                torch.compiler.cudagraph_mark_step_begin()
                step(model, args, kwargs)
    return len(combinations)


def step(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Forward and backward. The backward is asked for gradients by value: nothing is accumulated, no flag arrives."""
    outputs = [x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    leaves = list({id(leaf): leaf for _, leaf in reach.reads(outputs)}.values())
    if leaves:
        torch.autograd.grad(outputs, leaves, [torch.zeros_like(x) for x in outputs], allow_unused=True)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Generator[None]:
    """Buffers and random number generators of a model's devices are what they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {t.device for t in itertools.chain(model.parameters(), model.buffers()) if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=[device.index for device in devices]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
