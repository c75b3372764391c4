"""Random programs full of views, writes and nested graphs, and the comparison of a compiled one with its eager twin."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.programs import relative_error

w = torch.randn(8, 8, generator=torch.Generator().manual_seed(5)) / 3

Pool = list[torch.Tensor]


# ---- statements: (pool, chosen tensor) -> new tensor, or None for a write ---------------------------------------------------
def _square(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1)[:32].reshape(4, 8)


def _swap_rows(t: torch.Tensor) -> None:
    t[1:] = t[:-1].clone()


def _write_through_view(t: torch.Tensor) -> None:
    t.view(-1)[: t.numel() // 2].add_(0.5)


def _add_out(t: torch.Tensor) -> None:
    torch.add(t, 0.25, out=t)


def _increment(t: torch.Tensor) -> None:
    t += 0.5


def _checkpointed(t: torch.Tensor) -> torch.Tensor:
    def body(y: torch.Tensor) -> torch.Tensor:
        h = y @ w
        h.mul_(0.5)
        v = h[1:]
        v.add_(1.0)
        return h @ w

    return checkpoint(body, _square(t), use_reentrant=False)  # pyright: ignore[reportReturnType]


def _writing_body(t: torch.Tensor) -> torch.Tensor:
    def body(y: torch.Tensor) -> torch.Tensor:
        early = y @ w
        y.add_(0.125)
        return early + y @ w

    return checkpoint(body, _square(t) * 1.0, use_reentrant=False)  # pyright: ignore[reportReturnType]


def _branches(t: torch.Tensor) -> torch.Tensor:
    return torch.cond(t.sum() > 0, lambda y: (y @ w).relu_(), lambda y: (y * 2).sin(), (_square(t).clone(),))


def _opted_out(t: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return (_square(t) @ w).contiguous()


def _opted_out_view(t: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return t.view(-1)


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda t: _square(t) @ w,
    "linear": lambda t: F.linear(_square(t), w),
    "sliced_product": lambda t: (_square(t) @ w)[:, :6],
    "view": lambda t: t.view(-1) if t.is_contiguous() else t.reshape(-1),
    "rows": lambda t: t[1:] if t.dim() and t.size(0) > 2 else t,
    "columns": lambda t: t[..., :6] if t.dim() and t.size(-1) > 6 else t,
    "transposed": lambda t: t.transpose(0, -1),
    "unsqueezed": lambda t: t.unsqueeze(0)[0],
    "half": lambda t: t.chunk(2)[0] if t.size(0) % 2 == 0 else t,
    "unbound": lambda t: t.unbind(0)[0].unsqueeze(0),
    "detached": lambda t: t.detach(),
    "contiguous": lambda t: t.contiguous(),
    "reshaped": lambda t: t.reshape(-1),
    "expanded": lambda t: t.unsqueeze(0).expand(2, *t.shape)[1],
    "clone": lambda t: t.clone(),
    "same_type": lambda t: t.to(torch.float32),
    "float": lambda t: t.float(),
    "doubled": lambda t: t * 2,
    "sin": lambda t: t.sin(),
    "relu": lambda t: t.relu(),
    "sums": lambda t: t.sum(-1, keepdim=True).expand_as(t),
    "cat": lambda t: torch.cat([t, t])[: t.size(0)],
    "where": lambda t: torch.where(t > 0, t, 0.5),
    "flat": lambda t: t.flatten(),
    "moved": lambda t: t.movedim(0, -1),
    "dropout": lambda t: F.dropout(t, 0.5, training=False),
    "checkpointed": _checkpointed,
    "writing_body": _writing_body,
    "branches": _branches,
    "opted_out": _opted_out,
    "opted_out_view": lambda t: _opted_out_view(t) if t.is_contiguous() else t,
}

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda t: t.add_(0.5),
    "mul_": lambda t: t.mul_(0.5),
    "relu_": lambda t: t.relu_(),
    "clamp_": lambda t: t.clamp_(-1.0, 1.0),
    "inplace_relu": lambda t: F.relu(t, inplace=True),
    "fill_row": lambda t: t[0].fill_(0.25),
    "set_row": lambda t: t.__setitem__(0, t[-1] * 2),
    "shift": _swap_rows,
    "through_view": lambda t: _write_through_view(t) if t.is_contiguous() else t.add_(0.5),
    "out": _add_out,
    "iadd": _increment,
    "copy_": lambda t: t.copy_(t.flip(0)),
    "copy_product": lambda t: t.copy_((_square(t) @ w).reshape(-1)[: t.numel()].view(t.shape)) if t.numel() <= 32 else None,
    "data": lambda t: t.data.mul_(2.0),
    "masked_fill_": lambda t: t.masked_fill_(t > 1.0, 0.0),
    "detach_": lambda t: t.detach().add_(0.125),
    "zero_half": lambda t: t.chunk(2)[0].zero_(),
    "sigmoid_": lambda t: t.sigmoid_(),
}


@dataclass(frozen=True)
class Program:
    """Statements over a pool that begins with the two inputs: (name, index of the tensor it works on)."""

    statements: tuple[tuple[str, int], ...]
    outputs: tuple[int, ...]

    def __call__(self, x: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pool = [x, buffer]
        for name, index in self.statements:
            if name in READS:
                pool.append(READS[name](pool[index]))
            else:
                WRITES[name](pool[index])
        return tuple(pool[i] for i in self.outputs)


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    statements: list[tuple[str, int]] = [("product", 0)]
    size = 3
    for _ in range(rng.randint(3, 9)):
        writes = rng.random() < 0.4
        index = rng.randrange(size) if rng.random() < 0.4 else size - 1
        statements.append((rng.choice(sorted(WRITES if writes else READS)), index))
        size += not writes
    outputs = tuple(rng.choice(range(size)) for _ in range(rng.randint(1, 3)))
    return Program(tuple(statements), (*outputs, size - 1))


# ---- comparing --------------------------------------------------------------------------------------------------------------
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


def memory(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Which tensors share memory, and how far apart in it they begin, in bytes."""
    return [
        (i, j, b.data_ptr() - a.data_ptr())
        for i, a in enumerate(tensors)
        for j, b in enumerate(tensors[:i])
        if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() and b.numel()
    ]


def run(fn: Callable[..., Any]) -> list[torch.Tensor]:
    """Outputs and inputs after one call."""
    x, buffer = inputs()
    return [*fn(x, buffer), x, buffer]


def difference(fn: Callable[..., Any], backend: Any, *, tol: float) -> str | None:
    """How a compiled program differs from its eager twin; None if it does not. Raises what compiling raises."""
    want = run(fn)
    torch._dynamo.reset()
    got = run(torch.compile(fn, backend=backend, fullgraph=True))
    return differs(got, want, tol)


def differs(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], tol: float) -> str | None:
    for i, (g, t) in enumerate(zip(got, want, strict=True)):
        if (g.dtype, g.shape) != (t.dtype, t.shape):
            return f"{i} is {g.dtype}{list(g.shape)}, eager {t.dtype}{list(t.shape)}"
        if not (torch.equal(g, t) if tol == 0 else relative_error(g, t) <= tol):
            return f"{i} is off by {relative_error(g, t):.2g}"
    if memory(got) != memory(want):
        return f"memory {memory(got)}, eager {memory(want)}"
    return None


def amp(precision: str, lower: str = "aot_eager") -> fxamp.Amp:
    return fxamp.Amp(precision=precision, lower=lower)


def verdict(fn: Callable[..., Any], lower: str = "aot_eager") -> str | None:
    """What fxamp gets wrong in a program that PyTorch's own backend gets right; "skip" where eager or stock fail."""
    stock = {"aot_eager": "aot_eager", "inductor": "inductor", "eager": "eager"}[lower]
    with torch.no_grad():
        try:
            run(fn)
        except Exception:
            return "skip: eager"
        failures = [
            f"{precision}: {found}"
            for precision, tol in (("fp32", 0.0), ("bf16", 5e-2))
            if (found := _attempt(fn, amp(precision, lower), tol)) is not None
        ]
        if failures and _attempt(fn, stock, 0.0) is not None:
            return "skip: stock"
    return "; ".join(failures) or None


def _attempt(fn: Callable[..., Any], backend: Any, tol: float) -> str | None:
    try:
        with contextlib.redirect_stderr(None):
            return difference(fn, backend, tol=tol)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
