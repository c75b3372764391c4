"""What a train step is made of, and called with: checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.loss import _Loss  # pyright: ignore[reportPrivateUsage]  # the base of PyTorch's losses
from torch.optim import Optimizer

from fxamp import errors
from fxamp.formats import is_number

_OF_WHAT = "It takes (model, loss_fn, optimizer); loss_fn=None if the model returns its loss"


def check_parts(model: object, loss_fn: object, optimizer: object) -> None:
    """Raises: InvalidOption for what is no model, no loss and no optimizer, and for those in another order."""
    for what, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind) or (what == "model" and isinstance(given, _Loss) and isinstance(loss_fn, nn.Module)):
            name = getattr(given, "__name__", type(given).__name__)
            raise errors.InvalidOption(f"train_step() was given a {name} as its {what}", way_out=_OF_WHAT)
    if isinstance(loss_fn, type):
        raise errors.InvalidOption(
            f"train_step() was given the class {loss_fn.__name__} as its loss_fn",
            way_out=f"Give an instance, {loss_fn.__name__}()",
        )
    if loss_fn is not None and not callable(loss_fn):
        raise errors.InvalidOption(f"train_step() was given {loss_fn!r} as its loss_fn", way_out=_OF_WHAT)
    why = "" if loss_fn is None else _why_not(loss_fn, 2, ())
    if why:
        raise errors.InvalidOption(
            f"the loss_fn of train_step() cannot be called with an output and a target: {why}",
            way_out="Give lambda output, target: ..., which returns one number",
        )


def check_numbers(clip_grad_norm: object, accumulate: object) -> None:
    """Raises: InvalidOption for numbers that make no sense."""
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise errors.InvalidOption(f"accumulate={accumulate!r}", way_out="Give a number of micro-batches, 1 or more")
    if clip_grad_norm is not None and not (is_number(clip_grad_norm) and clip_grad_norm > 0):  # pyright: ignore[reportOperatorIssue]
        raise errors.InvalidOption(f"clip_grad_norm={clip_grad_norm!r}", way_out="Give a norm above 0, or None")


def check_call(model: nn.Module, loss_fn: Callable[..., Any] | None, num_args: int, names: Iterable[str]) -> None:
    """Raises: InvalidOption for a call of a step that leaves the model, or the loss, without an argument."""
    names, num_inputs = tuple(names), num_args if loss_fn is None else num_args - 1
    if num_inputs < 0:
        why = "there is no target"
    else:
        why = _why_not(model, num_inputs, names)
        why = why and f"{type(model).__name__} cannot be called with {num_inputs} of them{_named(names)}: {why}"
    if why:
        computes = "model(*inputs, **named)" if loss_fn is None else "loss_fn(model(*inputs, **named), target)"
        raises = "step(*inputs, **named)" if loss_fn is None else "step(*inputs, target, **named)"
        raise errors.InvalidOption(
            f"the step was called with {num_args} arguments{_named(names)}, and {why}", way_out=f"{raises} is {computes}"
        )


def _named(names: tuple[str, ...]) -> str:
    return f" and {', '.join(names)} by name" if names else ""


def _why_not(function: Any, num_args: int, names: tuple[str, ...]) -> str:
    """Why a function or module cannot be called with so many arguments, and these by name; "" if it can, or nobody knows."""
    if isinstance(function, nn.Module):
        if function._forward_pre_hooks or type(function).__call__ is not nn.Module.__call__:
            return ""  # which may be given more, or less
        function = function.forward
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*[None] * num_args, **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return ""
