"""What Dynamo knows of the programs that it has compiled of a function."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map


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
    """Would Dynamo still run these programs, called as they were? It knows what they were specialized on: numbers in objects
    of the user's too, which no module and no closure holds.

    What is not seen: what Python computes outside of them, between two; floats that a program takes as inputs (`is_a_float`).
    Variables are held, but for the memory of tensors among them.
    Returns (the question, whether it can be asked of all of them).
    """
    programs = list(programs)
    ours = {id(program.variables) for program in programs}
    checks, asked, is_whole = list[Callable[[], bool]](), set[Hashable](), True
    for program in programs:
        stand_in = _StandIns(ours)
        variables = {name: stand_in(value) for name, value in program.variables.items()}
        # One program may serve many objects, each with numbers of its own; code is compared by identity, for Dynamo puts
        # what cannot be hashed among its constants.
        key = id(program.code), tuple(stand_in.told)
        if key not in asked:
            asked.add(key)
            check = _guard_of(program.code, variables)
            is_whole = is_whole and check is not None
            checks += [] if check is None else [check]
    return lambda: all(check() for check in checks), is_whole


def _guard_of(code: CodeType, variables: dict[str, Any]) -> Callable[[], bool] | None:
    from torch._dynamo.utils import orig_code_map

    for entry in _entries(orig_code_map[code]):
        if entry.code is code and entry.guard_manager.check(variables):
            return functools.partial(entry.guard_manager.check, variables)
    return None


class _StandIns:
    """Replaces tensors among the variables of a program by such without memory."""

    def __init__(self, ours: Collection[int]) -> None:
        """Args: ours: by id, what holds variables and is not the user's."""
        self._ours, self._of = set(ours), dict[int, Tensor]()
        self.told: list[Hashable] = []
        """Equal for variables that guards cannot tell apart."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            stand_in = self._of.setdefault(id(value), _without_memory(value))
            is_itself = stand_in is value
            layout = value.shape, value.stride(), value.dtype, value.device, value.requires_grad
            self.told.append(id(value) if is_itself else (list(self._of).index(id(value)), *layout))
            return stand_in
        has_tensors = any(isinstance(x, Tensor) for x in tree_leaves(value))
        if not has_tensors or type(value) in (list, dict) and self._is_somebodys(value):
            self.told.append(id(value))  # of which guards have to see what becomes of it
            return value
        self._ours.add(id(value))
        self.told.append((type(value), len(value) if isinstance(value, (list, tuple, dict)) else None))
        if type(value) in (list, tuple):
            return type(value)(map(self, value))
        if type(value) is dict:
            self.told.append(tuple(map(id, value)))
            return {key: self(x) for key, x in value.items()}
        return tree_map(self, value)

    def _is_somebodys(self, value: object) -> bool:
        """Does anything hold this but calls that run, and variables of theirs?"""
        return any(id(x) not in self._ours and not isinstance(x, FrameType) for x in gc.get_referrers(value))


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
