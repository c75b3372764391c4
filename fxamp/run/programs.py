"""What Dynamo knows of the programs that it has compiled of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only


class Running(NamedTuple):
    """A program of Dynamo's that runs."""

    code: CodeType
    """What Dynamo made of a function, or of the rest of one behind a graph break."""
    variables: Mapping[str, Any]
    """Of the function, by name."""

    @property
    def is_behind_a_break(self) -> bool:
        return self.code.co_name.startswith("torch_dynamo_resume_in_")


def running() -> Running | None:
    """The innermost program of Dynamo's that has called the caller; None if none has."""
    from torch._dynamo.utils import orig_code_map  # `import fxamp` stays light

    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in orig_code_map:
        frame = frame.f_back
    return None if frame is None else Running(frame.f_code, dict(frame.f_locals))


def guard_of(programs: Iterable[Running]) -> tuple[Callable[[], bool], bool]:
    """Would Dynamo still run these programs? It knows what they were specialized on: numbers in objects of the user's too,
    which no module and no closure holds.

    What is not seen: what Python computes outside of them, between two; floats that a program takes as inputs (`is_a_float`).
    Variables are held, but for the memory of tensors among them.
    Returns (the question, whether it can be asked of all of them).
    """
    checks, is_whole = list[Callable[[], bool]](), True
    for program in {program.code: program for program in programs}.values():
        check = _guard_of(program)
        is_whole = is_whole and check is not None
        checks += [] if check is None else [check]
    return lambda: all(check() for check in checks), is_whole


def _guard_of(program: Running) -> Callable[[], bool] | None:
    from torch._dynamo.utils import orig_code_map

    variables, stand_ins = dict(program.variables), dict[int, Tensor]()
    for name, value in variables.items():
        variables[name] = tree_map_only(Tensor, lambda x: stand_ins.setdefault(id(x), _without_memory(x)), value)
    for entry in _entries(orig_code_map[program.code]):
        if entry.code is program.code and entry.guard_manager.check(variables):
            return functools.partial(entry.guard_manager.check, variables)
    return None


def _without_memory(x: Tensor) -> Tensor:
    """What guards cannot tell from a plain tensor; anything more than that stays itself."""
    if type(x) is not Tensor or x.layout is not torch.strided or x._is_view() and x.requires_grad:
        return x
    with torch.no_grad():
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        y.untyped_storage().resize_(0)
    return y.requires_grad_(x.requires_grad)


def num_programs(function: Callable[..., Any]) -> int:
    """How many there are."""
    return len(_entries(function.__code__))


def is_a_float(placeholder: fx.Node) -> bool:
    """Is this input of a graph of Dynamo's a float of Python's, which Dynamo hands over as a tensor?"""
    return bool(getattr(placeholder.meta.get("grapharg"), "pass_arg_as_tensor", False))


def _entries(code: CodeType) -> Sequence[Any]:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return _debug_get_cache_entry_list(code)
