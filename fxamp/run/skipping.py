"""Leaving an optimizer's step out, bit for bit: three routes, of which two never wait for the device.

- "fused": the optimizer's own kernels read the flag (`found_inf`, the protocol of `torch.amp.GradScaler`).
- "select": the step is taken, and parameters and state are put back where the flag is set. Costs a copy of both.
- "wait": the host reads the flag, and hides the gradients from a step that has to be left out.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxamp import errors

RouteName = Literal["fused", "select", "wait"]
ROUTES: Final = get_args(RouteName)


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the steps of an optimizer are left out, and why so."""

    name: RouteName
    why: str

    @property
    def num_waits(self) -> int:
        """How often a step waits for the device."""
        return 1 if self.name == "wait" else 0

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, those without a gradient too."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@functools.cache
def _known_ids() -> weakref.WeakKeyDictionary[Optimizer, tuple[list[int], frozenset[int]]]:
    return weakref.WeakKeyDictionary()


def ids(optimizer: Optimizer) -> frozenset[int]:
    """The ids of all its parameters, by which flags know them. The same object as long as the parameters are the same: what
    is found by it need not be hashed anew in each step."""
    now, known = list(map(id, parameters(optimizer))), _known_ids().get(optimizer)
    if known is None or known[0] != now:
        known = _known_ids()[optimizer] = now, frozenset(now)
    return known[1]


def check(optimizer: Optimizer) -> None:
    """Raises: CannotSkip for an optimizer whose step cannot be left out, CannotScale for fp16 parameters."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise errors.CannotSkip(
            "LBFGS evaluates the loss many times within one step, and line search compares losses of steps already taken",
            way_out="Use bf16, which needs no loss scaling, or another optimizer",
        )
    half = [p for p in parameters(optimizer) if p.dtype == torch.float16]
    if half:
        raise half_parameters(f"{len(half)} parameters of the {type(optimizer).__name__}")


def half_parameters(whose: str) -> errors.CannotScale:
    """The error for parameters that are fp16 themselves."""
    return errors.CannotScale(
        f"{whose} are fp16: updates below 2^-11 of a weight are lost, and true gradients are rounded to multiples of 2^-24",
        way_out="Keep fp32 parameters (model.float()): fxamp computes in fp16 and updates fp32 master weights. Or use bf16 "
        "without scaling",
    )


def half_gathered(num: int, name: str) -> errors.CannotScale:
    """The error for parameters that FSDP2 hands out in fp16: true gradients would travel, and be stored, in fp16."""
    return errors.CannotScale(
        f"{num} parameters of the graph, {name} for one, are fp16, as FSDP2's MixedPrecisionPolicy(param_dtype=torch.float16) "
        "gathers them: their gradients are fp16 too, and true gradients are rounded to multiples of 2^-24",
        way_out="Leave param_dtype out: FSDP2 then gathers fp32 parameters, which fxamp casts to fp16 in the graph, and "
        "gradients travel in reduce_dtype or fp32. Or use param_dtype=torch.bfloat16 with precision='bf16'",
    )


# ---- choosing -------------------------------------------------------------------------------------------------------------
def choose(optimizer: Optimizer, wish: str) -> Route:
    """The route that an optimizer takes from now on. `wish`: "auto" or the name of one.

    Raises: UnknownOption for another name, CannotSkip for a route that the optimizer cannot take.
    """
    if wish not in ("auto", *ROUTES):
        raise errors.unknown("route of a skipped step", wish, ("auto", *ROUTES))
    reads_flag = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    obstacle = _why_not_select(optimizer)
    if wish == "fused" and not reads_flag:
        raise errors.CannotSkip(
            f"{type(optimizer).__name__} does not read found_inf",
            way_out="Build it with fused=True, or leave the route to fxamp",
        )
    if wish == "select" and obstacle:
        raise errors.CannotSkip(f"{type(optimizer).__name__}: {obstacle}", way_out="Leave the route to fxamp")
    if wish != "auto":
        return Route(name=wish, why="asked for")  # pyright: ignore[reportArgumentType]
    if reads_flag:
        return Route(name="fused", why="its kernels read found_inf")
    if all(p.device.type == "cpu" for p in parameters(optimizer)):
        return Route(name="wait", why="nothing runs ahead of the CPU")
    if obstacle:
        return Route(name="wait", why=obstacle)
    return Route(name="select", why="its state is on the device")


def _why_not_select(optimizer: Optimizer) -> str:
    """Why steps of the optimizer cannot be undone on the device; "" if they can. What its state will look like is known from
    what torch's optimizers have in common: `step` counts on the host but where a group says `capturable`."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "it counts steps on the host"
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != p.device:
                return f"its state {key!r} is on the host: capturable=True, where it exists, keeps it on the device"
            if not isinstance(value, Tensor) and value is not None:
                return f"its state {key!r} is a Python {type(value).__name__}"
    return ""


# ---- taking ---------------------------------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class Skip:
    """One step that is left out if `overflowed`, fp32 [], is 1. `begin` goes before it, `end` after it."""

    optimizer: Optimizer
    route: Route
    overflowed: Tensor
    _hidden: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Prepares the step."""
        if self.route.name == "fused":
            self.optimizer.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.found_inf = self.overflowed  # pyright: ignore[reportAttributeAccessIssue]
        elif self.route.name == "select":
            self._copies = [(t, t.detach().clone()) for t in _written(self.optimizer)]
        elif bool(self.overflowed):  # waits
            self._hidden = [(p, p.grad) for p in parameters(self.optimizer) if p.grad is not None]
            for p, _ in self._hidden:
                p.grad = None

    def abandon(self) -> None:
        """In place of `end`, for a step that has raised, as late as the next one: gradients that it hid, which overflowed, are
        no longer anybody's, and parameters may have been written since."""
        if self.route.name == "fused":
            del self.optimizer.grad_scale, self.optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def was_left_out(self) -> bool:
        """Does the host know that nothing was stepped?"""
        return bool(self._hidden)

    @torch.no_grad()
    def end(self) -> None:
        """Puts back what the step was not to change."""
        self.abandon()
        is_bad = self.overflowed > 0
        for t, old in self._copies:
            t.copy_(torch.where(is_bad, old, t))
        for p, grad in self._hidden:
            p.grad = grad


def has_its_state(optimizer: Optimizer) -> bool:
    """Has every parameter that is to be stepped its state? What a step makes anew, nobody can put back on the device."""
    return all(p in optimizer.state for p in parameters(optimizer) if p.grad is not None)


def _written(optimizer: Optimizer) -> Iterator[Tensor]:
    for p in parameters(optimizer):
        if p.grad is not None:
            yield p
            yield from (t for t in optimizer.state.get(p, {}).values() if isinstance(t, Tensor))
