"""What a pass is, and how passes are run. Knows no pass.

A pass is a frozen dataclass whose fields are its configuration; called with a graph module it edits it in place, through
`fxamp.graph`, and returns a `Change`. Its docstring says what it requires, changes and keeps, with a before/after.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import fx

from fxamp import errors, garbage, legal


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Something a pass left alone, and why."""

    node: str
    reason: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one pass did to one graph."""

    pass_name: str
    num_added: int = 0
    """Nodes inserted."""
    num_removed: int = 0
    """Nodes erased."""
    num_marked: int = 0
    """Nodes whose meta was changed for the compiler's eyes."""
    kept: tuple[Kept, ...] = ()
    elapsed_ms: float = 0.0

    @property
    def edits(self) -> bool:
        """Is the graph another than before?"""
        return bool(self.num_added or self.num_removed or self.num_marked)

    def __str__(self) -> str:
        parts = [f"+{self.num_added} -{self.num_removed} nodes"]
        if self.num_marked:
            parts.append(f"{self.num_marked} marked")
        return f"{self.pass_name}: {', '.join(parts)}, {self.elapsed_ms:.1f} ms"


@runtime_checkable
class Pass(Protocol):
    """A frozen dataclass with this call."""

    def __call__(self, gm: fx.GraphModule) -> Change: ...


@garbage.collected_later()
def run(gm: fx.GraphModule, passes: Sequence[Pass], check: Callable[[fx.GraphModule], None]) -> tuple[Change, ...]:
    """Runs passes in order, checks the graph behind the last (with FXAMP_CHECK=1 behind each), and returns what each did.

    Raises: StageFailed, naming the pass, for anything that goes wrong in one.
    """
    changes: list[Change] = []
    for pass_ in passes:
        start = time.perf_counter()
        with _blaming(f"pass {pass_!r}"):
            change = pass_(gm)
            if legal.wants_full_check():
                check(gm)
        changes.append(replace(change, elapsed_ms=(time.perf_counter() - start) * 1e3))
    if not legal.wants_full_check():
        with _blaming("one of the passes (FXAMP_CHECK=1 says which)"):
            check(gm)
    return tuple(changes)


@contextlib.contextmanager
def _blaming(who: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise errors.StageFailed(
            f"{who} failed: {error}",
            where=getattr(error, "where", None),
            way_out="Please report this; on_error='eager' compiles the untouched graph meanwhile",
        ) from error


def key(pass_: Pass) -> str:
    """A cache key of a pass: its fields and the text of the file that implements it."""
    return f"{pass_!r}:{file_hash(inspect.getfile(type(pass_)))}"


@functools.cache
def file_hash(path: str) -> str:
    """The hash of a file's text."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
