"""Memory of its own for what a step makes and later steps keep: state of the optimizer, low copies of weights.

PyTorch's allocator puts a tensor into the smallest gap that it has. In the first step gaps are what activations have left,
and a block of them in which something lies on cannot be given back before a recording, which needs others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from fxamp.run import recorder


class OwnMemory:
    """What is made inside `used` lies with what is made there, and with nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: torch.cuda.MemPool | None = None

    @contextlib.contextmanager
    def used(self) -> Generator[None]:
        """Without effect on a CPU, in a recording, which has memory of its own, and where CUDA allocates by itself."""
        is_cached = self._device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
        if not is_cached or recorder.is_recording():
            yield
            return
        self._pool = self._pool or torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def close(self) -> None:
        """Gives back what is free of it. Tensors stay where they are, as long as they live."""
        self._pool = None
