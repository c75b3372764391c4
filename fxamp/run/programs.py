"""What Dynamo knows of the programs that it has compiled of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx


def guard_of(function: Callable[..., Any], variables: Mapping[str, Any]) -> Callable[[], bool]:
    """Would Dynamo still run the program of a compiled function that it runs now? It knows what its program was specialized
    on: numbers in objects of the user's too, which no module and no closure holds.

    Args: function: as it was given to `torch.compile`; variables: its arguments and free variables, by name, which are held.
    What lies behind a graph break is not seen, for it has frames of its own; nor are floats that the program takes as inputs
    (`is_a_float`).
    """
    for entry in _entries(function):
        check: Callable[[Mapping[str, Any]], bool] = entry.guard_manager.check
        if check(variables):  # the first one is the one that runs
            return lambda: check(variables)
    return lambda: True


def num_programs(function: Callable[..., Any]) -> int:
    """How many there are."""
    return len(_entries(function))


def is_a_float(placeholder: fx.Node) -> bool:
    """Is this input of a graph of Dynamo's a float of Python's, which Dynamo hands over as a tensor?"""
    return bool(getattr(placeholder.meta.get("grapharg"), "pass_arg_as_tensor", False))


def _entries(function: Callable[..., Any]) -> Sequence[Any]:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # `import fxamp` stays light

    return _debug_get_cache_entry_list(function.__code__)
