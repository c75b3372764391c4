"""Has a piece of memory been written? PyTorch's copy-on-write, read as a dirty bit.

`torch._lazy_clone` lets two tensors share memory until one of them is about to be written. It marks the memory; the mark goes
when any tensor in it, made before or after, view or not, hands out a pointer through which one may write: to a kernel, to
NumPy, to DLPack, to the caller of `data_ptr()`. Here the clone is gone at once: then there is nobody to copy the memory for,
which stays where it is, and a mark that is missing says that somebody may have written. Asking reads no memory, and nothing
waits.

What the mark cannot see goes by addresses that were handed out before: NumPy's and other libraries' views of old, other
processes, CUDA graphs. The first two have an owner, which `num_owners` counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mark(tensor: Tensor) -> bool:
    """Says that the memory of a tensor has not been written, from here on. False: that cannot be, since the memory is not from
    an allocator of PyTorch's: it is shared between processes, mapped from a file, or another library's."""
    try:
        torch._lazy_clone(tensor.detach())  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # the only thing it can raise for a tensor that has memory
        return False
    return True


def is_marked(tensor: Tensor) -> bool:
    """Is the mark still there?"""
    return torch._C._is_cow_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def unmark(tensor: Tensor) -> None:
    """Takes the mark away."""
    tensor.data_ptr()


def num_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors, and other holders, have a piece of memory, `storage` itself being one."""
    address: Any = storage._cdata
    return torch._C._storage_Use_Count(address)  # pyright: ignore[reportAttributeAccessIssue]
