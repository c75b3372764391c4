"""How a loss bends along a direction in the space of parameters: d^T H d, measured on the module as it is, uncompiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fxamp import errors

HALF_STEP: Final = 0.5
"""Of the direction, to each side: the difference is over one whole update, as long as the step that was taken."""

METHODS: Final = ("jvp", "difference")


def directional_curvature(
    model: nn.Module,
    closure: Callable[[], Tensor],
    update: Mapping[str, Tensor],
    *,
    method: Literal["jvp", "difference"] = "jvp",
) -> Tensor:
    """d^T H d of a loss at the parameters of a model: what |l[t] - 2 l[t-1] + l[t-2]| is for one batch and two updates d.

        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        update = {name: p.detach() - before[name] for name, p in model.named_parameters()}
        bend = fxamp.directional_curvature(model, lambda: criterion(model(x), y), update)
        amp.observe(loss, curvature=bend)

    Time and memory: docs/scheduler.md has what was measured. Parameters, their gradients, buffers and random number generators
    are left as they are.

    Args:
        model: the module itself, not what torch.compile made of it.
        closure: computes the loss, a tensor of one number, by calling `model`.
        update: d, by name of the parameter, with its shape; those left out do not move.
        method: "jvp" differentiates the gradient in forward mode (Pearlmutter 1994), exact up to rounding. "difference" takes
            that of the gradients at half an update to either side: cheaper, and for losses that forward mode cannot go
            through (an autograd.Function without `jvp`). Both compute attention by its plain formula.
    Returns: a tensor of one number, [], on the device of the loss; nothing waits.
    Raises: InvalidOption for what is no module, a compiled one, what cannot be called, and an update of other names or shapes;
    UnknownOption for another method.
    """
    from torch import func
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if method not in METHODS:
        raise errors.unknown("method", method, METHODS)
    _check(model, closure, update)
    here = {name: p.detach() for name, p in model.named_parameters()}
    ahead = {name: update[name].detach() if name in update else torch.zeros_like(p) for name, p in here.items()}
    devices = {p.device for p in here.values() if p.device.type == "cuda"}
    closing = _Closing(model, closure)

    def loss_at(parameters: dict[str, Tensor]) -> Tensor:
        held: dict[str, Any] = parameters | {name: b.clone() for name, b in model.named_buffers()}
        return func.functional_call(closing, {f"model.{name}": value for name, value in held.items()}).sum()

    def gradient_at(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices):  # the same random numbers in every call, and none taken from the training
            return func.grad(loss_at)(parameters)

    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        if method == "jvp":
            bent = func.jvp(gradient_at, (here,), (ahead,))[1]
        else:
            after, before = (
                gradient_at({name: p + sign * HALF_STEP * ahead[name] for name, p in here.items()}) for sign in (1, -1)
            )
            bent = {name: (after[name] - before[name]) / (2 * HALF_STEP) for name in here}
    return torch.stack([_dot(bent[name], ahead[name]) for name in here]).sum()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """[], at least in fp32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.dot(a.flatten().to(wide), b.flatten().to(wide))


class _Closing(nn.Module):
    """A closure over a model, as a module that holds the model: its parameters can be exchanged for a call."""

    def __init__(self, model: nn.Module, closure: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self._closure = model, closure

    def forward(self) -> Tensor:
        return self._closure()


def _check(model: nn.Module, closure: Callable[[], Tensor], update: Mapping[str, Tensor]) -> None:
    if not isinstance(model, nn.Module) or not callable(closure):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidOption(
            f"directional_curvature() was given a {type(model).__name__} as its model and a {type(closure).__name__} as its "
            "closure",
            way_out="It takes (model, closure, update); the closure computes the loss, lambda: criterion(model(x), y)",
        )
    if not isinstance(update, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidOption(
            f"directional_curvature() was given a {type(update).__name__} as its update",
            way_out="Give {name: parameter now - parameter before} over model.named_parameters()",
        )
    if hasattr(model, "_orig_mod"):
        raise errors.InvalidOption(
            "directional_curvature() was given a compiled module, which cannot be differentiated twice",
            way_out="Give it the module itself, and a closure that calls it",
        )
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for name, tensor in update.items():
        if not isinstance(tensor, Tensor) or shapes.get(name) != tensor.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
            has = f"has shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"is a {type(tensor).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
            wanted = f"has {list(shapes[name])}" if name in shapes else "is no parameter"
            raise errors.InvalidOption(
                f"an update of {name!r} {has}, and {name!r} {wanted}",
                way_out="Give {name: parameter now - parameter before} over model.named_parameters()",
            )
