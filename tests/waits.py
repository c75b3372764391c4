"""Code that must not wait for the device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator

import torch


@contextlib.contextmanager
def no_waits() -> Generator[None]:
    """A wait of the host for the CUDA device raises inside, as far as PyTorch sees it."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
