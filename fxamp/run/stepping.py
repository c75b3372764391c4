"""Who hears of optimizers' steps: one hook for all of them, never removed. One that goes with its listener would be removed by
the garbage collector, while an optimizer walks along its hooks.

Hooks are not for Dynamo where somebody compiles a step (PyTorch itself breaks the graph there): it loses what they delete, and
guards on the places of what they keep in weak sets, some of which may be gone by then."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class BeforeSteps(Protocol):
    def expect_step(self, optimizer: Optimizer) -> None: ...


class AfterSteps(Protocol):
    def note_step(self, optimizer: Optimizer) -> None: ...


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook as it is to be registered."""
    return torch.compiler.disable(hook, reason="hooks of fxamp on optimizers keep books")


@functools.cache
def before() -> weakref.WeakSet[BeforeSteps]:
    """Those that hear of a step before it is taken."""
    listeners: weakref.WeakSet[BeforeSteps] = weakref.WeakSet()

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for listener in listeners:
            listener.expect_step(optimizer)

    register_optimizer_step_pre_hook(untraced(hook))
    return listeners


@functools.cache
def after() -> weakref.WeakSet[AfterSteps]:
    """Those that hear of a step when it has been taken."""
    listeners: weakref.WeakSet[AfterSteps] = weakref.WeakSet()

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for listener in listeners:
            listener.note_step(optimizer)

    register_optimizer_step_post_hook(untraced(hook))
    return listeners


def tell(optimizer: Optimizer, *, by: AfterSteps) -> None:
    """Says that a step was taken past `optimizer.step`, to everyone but who took it."""
    for listener in after():
        if listener is not by:
            listener.note_step(optimizer)
