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
    """A Function whose forward is decorated; its backward too, unless inputs are cast: then autocast is off in it anyway."""

    device_type: str
    """The kind of device whose autocast it speaks of: "cuda"."""
    cast_inputs: torch.dtype | None
    """What autocast casts the inputs to, before it runs the forward without autocast; None: autocast goes on inside."""


@dataclass(frozen=True)
class Forward:
    """Where the forward of a declared Function stands."""

    file: str
    first_line: int
    last_line: int
    declared: Declared

    def contains(self, place: tuple[str, int]) -> bool:
        """Is a (file, line) in it?"""
        file, line = place
        return file == self.file and self.first_line <= line <= self.last_line


def forwards(device_type: str) -> tuple[Forward, ...]:
    """The forwards of all Functions that are defined so far, and declare something about autocast on such devices."""
    found = (_forward(cls) for cls in _subclasses(torch.autograd.Function))
    return tuple(x for x in found if x is not None and x.declared.device_type == device_type)


def declared_at(places: Iterable[tuple[str, int]], among: Iterable[Forward]) -> frozenset[Declared]:
    """What is declared where one of these (file, line)s is in a forward; more than one thing where several classes are made by
    the same lines."""
    lines = list(places)
    return frozenset(forward.declared for forward in among if any(map(forward.contains, lines)))


def _forward(cls: type[Any]) -> Forward | None:
    if not _is_decorated(cls.forward, "decorate_fwd"):
        return None
    variables = inspect.getclosurevars(cls.forward).nonlocals
    declared = Declared(variables["device_type"], variables["cast_inputs"])
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or (declared.cast_inputs is None and not _is_decorated(cls.backward, "decorate_bwd")):
        return None
    last = max((number for *_, number in code.co_lines() if number), default=code.co_firstlineno)
    return Forward(code.co_filename, code.co_firstlineno, last, declared)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _is_decorated(function: Callable[..., Any], by: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name == by and code.co_filename == inspect.getsourcefile(torch.amp.custom_fwd)
