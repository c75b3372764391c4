"""What an autograd.Function declares about autocast with `torch.amp.custom_fwd` and `custom_bwd`.

Dynamo's graph holds the bodies of forward and backward, not the class; so the class is found by where its forward stands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Declared:
    """A Function whose forward and backward are both decorated."""

    cast_inputs: torch.dtype | None
    """What autocast casts the inputs to, before it runs the forward without autocast; None: autocast goes on inside."""


def declared_at(frames: Iterable[tuple[str, int]]) -> Declared | None:
    """The declaration of the Function whose forward contains one of these (file, line)s; None if it has none."""
    places = list(frames)
    for cls in _subclasses(torch.autograd.Function):
        forward, backward = cls.forward, cls.backward
        if not (_is_decorated(forward, "decorate_fwd") and _is_decorated(backward, "decorate_bwd")):
            continue
        if any(_contains(inspect.unwrap(forward), file, line) for file, line in places):
            return Declared(inspect.getclosurevars(forward).nonlocals.get("cast_inputs"))
    return None


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _is_decorated(function: Callable[..., Any], by: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name == by and code.co_filename == inspect.getsourcefile(torch.amp.custom_fwd)


def _contains(function: Callable[..., Any], file: str, line: int) -> bool:
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != file:
        return False
    return code.co_firstlineno <= line <= max((number for *_, number in code.co_lines() if number), default=0)
