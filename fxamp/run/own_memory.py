"""Memory of its own for what a step makes and later steps keep: state of the optimizer, low copies of weights.

PyTorch's allocator puts a tensor into the smallest gap that it has. In the first step gaps are what activations have left,
and a block of them in which something lies on cannot be given back before a recording, which needs others.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator

import torch

from fxamp.run import recorder


class OwnMemory:
    """What is made inside `used` lies with what is made there, and with nothing else.

    Inside, nothing may be recorded: a CUDA graph would take its memory from here, and lose it.
    """

    def __init__(self, device: torch.device) -> None:
        """Args: device: where tensors are; with its index."""
        self._device = device
        self._pool: tuple[int, int] | None = None
        self._uses = list[tuple[int, int]]()
        """The pool, once for each use: PyTorch counts them."""
        self._is_used = False
        weakref.finalize(self, _release, device, self._uses).atexit = False

    @contextlib.contextmanager
    def used(self) -> Generator[None]:
        """Without effect on a CPU, in a recording, which has memory of its own, inside another `used`, and with other
        allocators than PyTorch's own."""
        is_cached = self._device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
        if not is_cached or self._is_used or recorder.is_recording():
            yield
            return
        torch.cuda.empty_cache()  # an allocation for a pool that finds no memory does not look for cached one elsewhere
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # A `torch.cuda.MemPool` aborts the process where it is dropped while anybody records, or has failed to.
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device.index, self._pool)
        self._uses.append(self._pool)
        self._is_used = True
        try:
            yield
        finally:
            self._is_used = False
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)

    def close(self) -> None:
        """Lets the next `torch.cuda.empty_cache()` give back what is free of it, now or later. Tensors stay where they are."""
        _release(self._device, self._uses)
        self._pool = None


def _release(device: torch.device, uses: list[tuple[int, int]]) -> None:
    while uses:
        torch._C._cuda_releasePool(device.index, uses.pop())
