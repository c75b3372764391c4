"""Has a piece of memory been written? PyTorch's copy-on-write, read as a dirty bit.

`torch._lazy_clone` lets two tensors share memory until one of them is about to be written. It marks the memory; the mark goes
when any tensor in it, made before or after, view or not, hands out a pointer through which one may write: to a kernel, to
NumPy, to DLPack, to the caller of `data_ptr()`. Here the clone is gone at once: then there is nobody to copy the memory for,
which stays where it is, and a mark that is missing says that somebody may have written. Asking reads no memory, and nothing
waits.

What the mark cannot see goes by addresses that were handed out before: NumPy's and other libraries' views of old, other
processes, CUDA graphs. The first two have an owner, which `num_owners` counts. On CUDA, kernels for lists of tensors leave it
too: `watch_lists` makes them take it away.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


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


Layout = tuple[int, int, tuple[int, ...]]
"""(address of the memory, offset in it in numbers, strides)."""


def address(tensor: Tensor) -> int:
    """Where the memory that a tensor lies in begins. Leaves the mark, which `data_ptr()` takes away."""
    return torch._C._data_address(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def layout(tensor: Tensor) -> Layout:
    """Where a tensor lies."""
    return address(tensor), int(tensor.storage_offset()), tensor.stride()


def addresses(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Of many: equal where each begins where it did."""
    begins = tuple(map(torch._C._data_address, tensors))  # pyright: ignore[reportAttributeAccessIssue]
    return begins, tuple(map(Tensor.storage_offset, tensors))


def layouts(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Of many: equal where the `layout` of each is; zipped, these."""
    return *addresses(tensors), tuple(map(Tensor.stride, tensors))


def unmark(tensor: Tensor) -> None:
    """Takes the mark away."""
    tensor.data_ptr()


def is_alone(tensor: Tensor) -> bool:
    """Is its memory no one else's?"""
    return num_owners(tensor.untyped_storage()) <= 2  # the tensor, and what was just asked


def are_marked_and_alone(tensors: Sequence[Tensor]) -> bool:
    """`is_marked` and `is_alone`, of all of them."""
    if not all(map(torch._C._is_cow_tensor, tensors)):  # pyright: ignore[reportAttributeAccessIssue]
        return False
    storages = list(map(Tensor.untyped_storage, tensors))
    counts = map(torch._C._storage_Use_Count, map(operator.attrgetter("_cdata"), storages))  # pyright: ignore[reportAttributeAccessIssue]
    return max(counts, default=0) <= 2


def num_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors, and other holders, have a piece of memory, `storage` itself being one."""
    address: Any = storage._cdata
    return torch._C._storage_Use_Count(address)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def watch_lists() -> None:
    """From now on `torch._foreach_add_` and its like take the marks of what they write away, as every other operation does
    (`_patches.LIST_WRITES`)."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    # Dynamo finds these functions by identity, in tables that it fills when it first needs them.
    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    for name in dir(torch):
        if name.startswith(("_foreach_", "_fused_")) and name.endswith("_") and not name.endswith("__"):
            num_written = 1 if name.startswith("_foreach_") else None  # fused optimizers write states, and gradients
            setattr(torch, name, taking_marks(getattr(torch, name), num_written))


def taking_marks(write: Callable[..., Any], num_written: int | None) -> Callable[..., Any]:
    """A function that writes lists of tensors, the first so many of its arguments, as one that asks for pointers to do so."""

    @functools.wraps(write)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            given: list[object] = [*args, *kwargs.values()]
            for x in (x for some in given[:num_written] if isinstance(some, Sequence) for x in some):
                if type(x) in (Tensor, nn.Parameter) and is_marked(x):
                    unmark(x)
        return write(*args, **kwargs)

    return call
