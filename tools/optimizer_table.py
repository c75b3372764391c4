"""Writes the table of docs/scaling.md: how a step of each optimizer of torch is left out, and how often it waits.

    python tools/optimizer_table.py            write it
    python tools/optimizer_table.py --check    exit with 1 if it is stale

The columns for CUDA need no GPU: the optimizers take two steps on fake CUDA tensors, and what they then keep on the host, and
what they read from the device, is seen.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp import errors
from fxamp.run import skipping

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- optimizers:begin -->", "<!-- optimizers:end -->"

FLAGS = ("fused", "capturable")
NUM_PARAMETERS = 2
TAKES_NO_STEP_HERE = ("SparseAdam",)
"""Fake tensors are dense; the route of this one is known by its class."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """How steps of one optimizer, built in one way, are left out."""

    optimizer: str
    flag: str | None
    on_cuda: skipping.Route | None
    """None: fxamp refuses the optimizer."""
    on_cpu: skipping.Route | None
    refusal: str = ""
    num_own_waits: float = 0
    """How often the optimizer itself reads a number from the device, for each parameter and step on CUDA."""

    def cells(self) -> tuple[str, ...]:
        built = f"`{self.optimizer}`" if self.flag is None else f"`{self.optimizer}(..., {self.flag}=True)`"
        if self.on_cuda is None or self.on_cpu is None:
            return built, "refused", "", "refused", self.refusal
        own = f" and {self.num_own_waits:g} of its own for each parameter" if self.num_own_waits else ""
        return built, self.on_cuda.name, f"{self.on_cuda.num_waits}{own}", self.on_cpu.name, self.on_cuda.why


def rows() -> Iterator[Row]:
    """Every optimizer of torch, as it is by default and with each flag that it takes."""
    for name in sorted(name for name in optim.__all__ if name[0].isupper() and name != "Optimizer"):
        flags = [flag for flag in FLAGS if flag in inspect.signature(getattr(optim, name)).parameters]
        for flag in (None, *flags):
            yield row(name, flag)


def row(name: str, flag: str | None = None) -> Row:
    options: dict[str, Any] = {} if flag is None else {flag: True}
    on_cuda, refusal, num_own_waits = route(name, options, "cuda", is_fake=True)
    on_cpu, _, _ = route(name, {} if flag == "capturable" else options, "cpu", is_fake=False)  # the CPU has nothing to capture
    return Row(
        optimizer=name, flag=flag, on_cuda=on_cuda, on_cpu=on_cpu, refusal=refusal, num_own_waits=num_own_waits
    )


def route(name: str, options: dict[str, Any], device: str, *, is_fake: bool) -> tuple[skipping.Route | None, str, float]:
    """(route after two steps on a device, or why there is none, waits of the optimizer itself for each parameter)."""
    cls = getattr(optim, name)
    if device == "cuda" and not options.get("fused") and "foreach" in inspect.signature(cls).parameters:
        options = {**options, "foreach": True}  # the default on CUDA, which does not know fake tensors
    with FakeTensorMode() if is_fake else nullcontext():
        parameters = [nn.Parameter(torch.zeros(4, 4, device=device)) for _ in range(NUM_PARAMETERS)]
        optimizer: optim.Optimizer = cls(parameters, **options)
        try:
            skipping.check(optimizer)
        except errors.CannotSkip as refusal:
            return None, refusal.what, 0
        num_waits = 0
        for _ in range(0 if name in TAKES_NO_STEP_HERE else 2):
            for p in parameters:
                p.grad = torch.ones_like(p)
            with _FakeCuda() as cuda, _WithoutCopies():
                optimizer.step()
            num_waits = cuda.num_reads
        return skipping.choose(optimizer, "auto"), "", num_waits / NUM_PARAMETERS


class _FakeCuda(TorchDispatchMode):
    """Counts the numbers that the host reads from a GPU, and gives it one; passes over fused kernels, which make no state."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        on_cuda = any(isinstance(arg, Tensor) and arg.is_cuda for arg in args)
        if func is torch.ops.aten._local_scalar_dense.default and on_cuda:
            self.num_reads += 1
            return 2.0
        if func.name().startswith("aten::_fused_"):
            return None
        return func(*args, **(kwargs or {}))


class _WithoutCopies(TorchFunctionMode):
    """`copy_` asks for a real GPU before it looks at what it copies: the same by operations that do not."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            target, source = args
            return target.zero_().add_(source)
        if func is Tensor.__setitem__:
            target, mask, number = args
            return target.masked_fill_(mask, number)
        return func(*args, **(kwargs or {}))


def table() -> str:
    """The table, in Markdown."""
    head = ("optimizer", "on CUDA", "waits a step", "on the CPU", "why, on CUDA")
    lines = [head, ("---",) * len(head), *(row.cells() for row in rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str) -> str:
    """A page with the table between its markers made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    old = PAGE.read_text()
    new = page(old)
    if "--check" in sys.argv[1:]:
        sys.exit(f"{PAGE.relative_to(ROOT)} is stale: run `make optimizers`" if old != new else 0)
    PAGE.write_text(new)
    print(f"wrote {PAGE.relative_to(ROOT)}")
