"""TF32 for the graphs of fxamp alone: the switch is set around each of their calls, forward and backward, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Final

import torch

_SWITCHES: Final = (("cuda", "matmul"), ("cuda", "conv"))
"""(backend, operation) of torch.backends' fp32_precision that decide how fp32 products are computed on CUDA."""


def is_on(operation: str) -> bool:
    """Do fp32 products on CUDA run as TF32 now, by PyTorch's own switch? `operation`: "matmul" or "conv", which is on unless
    somebody turns it off."""
    return torch._C._get_fp32_precision_getter("cuda", operation) == "tf32"


@contextlib.contextmanager
def enabled() -> Generator[None]:
    """fp32 matrix products and convolutions run as TF32 inside, and as before outside."""
    before = [torch._C._get_fp32_precision_getter(*switch) for switch in _SWITCHES]
    for switch in _SWITCHES:
        torch._C._set_fp32_precision_setter(*switch, "tf32")
    try:
        yield
    finally:
        for switch, value in zip(_SWITCHES, before, strict=True):
            torch._C._set_fp32_precision_setter(*switch, value)


def around(program: Callable[..., Any]) -> Callable[..., Any]:
    """`program`, computing its fp32 products as TF32."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with enabled():
            return program(*args, **kwargs)

    return call
