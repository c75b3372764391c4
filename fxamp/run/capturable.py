"""Which optimizers a CUDA graph can hold, and what of them it holds fast."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from fxamp import errors
from fxamp.run import skipping

CAPTURABLE: Final = (
    optim.Adadelta, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip
"""Those of torch that count their steps on the device, with capturable=True."""

FUSED: Final = (optim.SGD, optim.Adam, optim.AdamW)
"""Those of torch that do with fused=True, and read the learning rate there."""

CHANGES: Final = frozenset({"params", "lr", "initial_lr", "max_lr", "min_lr", "base_lr"})
"""Keys of a group that no recording holds fast: parameters are looked at by themselves, the learning rate is a tensor, and
the others belong to schedules."""


def check(optimizer: Optimizer) -> None:
    """Raises: CannotCapture for an optimizer whose step a CUDA graph cannot hold, on the CPU too; InvalidOption for one
    without parameters, or with parameters on several devices."""
    devices = {p.device for p in skipping.parameters(optimizer)}
    if len(devices) != 1:
        raise errors.InvalidOption(
            f"the parameters of the optimizer are on {len(devices)} devices", way_out="A train step has one device"
        )
    on_cuda = devices.pop().type == "cuda"
    known = (*CAPTURABLE, *FUSED)
    says_so = all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    if (says_so or not on_cuda) and (isinstance(optimizer, known) or _declares(optimizer)):
        return
    if isinstance(optimizer, optim.LBFGS):
        raise errors.CannotCapture(
            "LBFGS evaluates the loss many times within one step, which a recording of one step cannot do",
            way_out="Use another optimizer, or LBFGS in a plain loop in bf16: steps of it cannot be left out either",
        )
    raise errors.CannotCapture(
        f"the step of {type(optimizer).__name__}{'' if isinstance(optimizer, known) else ', as it is,'} cannot be part of a "
        "CUDA graph: it keeps its count of steps, or its learning rate, on the host",
        way_out=f"Build {_names(FUSED)} with fused=True, or {_names(CAPTURABLE)} with capturable=True. Any other optimizer "
        "works in a plain loop, with amp.attach(optimizer)",
    )


def _declares(optimizer: Optimizer) -> bool:
    """Does an optimizer that is not torch's say that it can be captured?"""
    return all(group.get("capturable") for group in optimizer.param_groups)


def _names(classes: tuple[type[Optimizer], ...]) -> str:
    *first, last = sorted(c.__name__ for c in classes)
    return f"{', '.join(first)} or {last}"


def hyperparameters(optimizer: Optimizer) -> Hashable:
    """What a recording holds fast of an optimizer, to be compared: numbers by value, tensors by address."""
    return tuple(
        (len(group["params"]), *(_frozen(group[key]) for group, key in held_fast(group))) for group in optimizer.param_groups
    )


def held_fast(group: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The places in a group of an optimizer that a recording holds fast."""
    return [(group, key) for key in group if key not in CHANGES]


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value if isinstance(value, (bool, int, float, str, type(None), torch.dtype)) else id(value)


def state_of(optimizer: Optimizer) -> dict[Any, frozenset[Any]]:
    """Which state each parameter has."""
    return {p: frozenset(state) for p, state in optimizer.state.items()}


def forget_new(optimizer: Optimizer, known: Mapping[Any, frozenset[Any]]) -> bool:
    """Drops state that has been made since. Was there any?"""
    new = [(p, key) for p, state in optimizer.state.items() for key in state if key not in known.get(p, ())]
    for p, key in new:
        del optimizer.state[p][key]
    for p in [p for p, state in optimizer.state.items() if not state and p not in known]:
        del optimizer.state[p]
    return bool(new)
