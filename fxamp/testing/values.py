"""What a program computes, and how far apart two runs of it may be.

The yardstick is the program itself, run with *every* float32 value rounded to the low format. Where that changes no bit, no
choice of formats may. Where it does, fxamp, which rounds some of these values, may differ a few times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from fxamp import graph
from fxamp.testing.program import Program

SLACK: Final = 4.0
"""How many times the rounded program's own error is allowed. Some of its roundings cancel, which fxamp does not repeat."""
SLACK_ULPS: Final = 4.0
"""Units in the last place, of the largest value that the program computes, that are allowed besides."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Whatever one can see of one call."""

    outputs: tuple[torch.Tensor, ...]
    arguments: Mapping[str, torch.Tensor]
    """As the call left them."""
    gradients: Mapping[str, torch.Tensor | None]
    """Of all outputs together, with a fixed cotangent, by the arguments that want one."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything but gradients, by what people would call it."""
        return {f"output {i}": t for i, t in enumerate(self.outputs)} | {f"argument {n}": t for n, t in self.arguments.items()}


def run(program: Program, call: Callable[..., Any] | None = None, *, made: Mapping[str, torch.Tensor] | None = None) -> Run:
    """Runs a program forward and backward: as it stands, or as `call` of all its arguments in order."""
    made = program.make_arguments() if made is None else made
    torch.manual_seed(0)
    outputs = tuple((call or program.function())(*made.values()))
    return Run(outputs=outputs, arguments=made, gradients=gradients(outputs, made))


def gradients(outputs: Sequence[torch.Tensor], made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Of all outputs with a history, pulled back from small whole numbers without symmetry; None where none arrives."""
    leaves = {id(t): (name, t) for name, t in made.items() if t.is_leaf and t.requires_grad}
    wanted = dict(leaves.values())
    pulled = [o for o in outputs if o.is_floating_point() and o.requires_grad]
    if not pulled or not wanted:
        return dict.fromkeys(wanted)
    cotangents = [(torch.arange(o.numel()) % 5 - 1).to(o.dtype).view(o.shape) for o in pulled]
    found = torch.autograd.grad(pulled, list(wanted.values()), cotangents, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


class Rounded(TorchFunctionMode):
    """Rounds every float32 value that is computed, and every gradient of one, to a lower format; arguments too, at once."""

    def __init__(self, low: torch.dtype, arguments: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.low = low
        self.num_rounded = 0
        self.ulp = self.gradient_ulp = torch.finfo(low).eps
        """A unit in the last place of the largest value, and of the largest gradient, whatever format it has: regions and
        casts of the user's make low values too, which round where fxamp does nothing."""
        for tensor in arguments:
            self._round(tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in graph.tensors_of(result) or graph.tensors_of((args, kwargs)):  # a write may return nothing
            self._round(tensor)
        return result

    def _round(self, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point() or not tensor.numel():
            return
        self.ulp = max(self.ulp, self._ulp_of(tensor))
        if torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(self._round_gradient)
        if tensor.dtype != torch.float32:
            return
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
            rounded = self.round(tensor)
            if not torch.equal(rounded, tensor):
                tensor.copy_(rounded)
                self.num_rounded += 1

    def _round_gradient(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or not gradient.numel():  # None: one of several results, which nothing reads
            return None
        self.note_gradient(gradient)
        return self.round(gradient) if gradient.dtype == torch.float32 else None

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Takes a gradient into account. Those of leaves are sums, which no operation of the program returns."""
        self.gradient_ulp = max(self.gradient_ulp, self._ulp_of(gradient))

    def _ulp_of(self, tensor: torch.Tensor) -> float:
        """Of the largest element; in the lower format if it is float32, which fxamp may have rounded."""
        if not tensor.numel():
            return 0.0
        dtype = self.low if tensor.dtype == torch.float32 else tensor.dtype
        return torch.finfo(dtype).eps * float(tensor.detach().abs().max())

    def round(self, tensor: torch.Tensor) -> torch.Tensor:
        """The nearest values of the lower format, in the tensor's own."""
        return tensor.to(self.low).to(tensor.dtype)


def rounding_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of `want`; infinite where other types differ at all."""
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    return difference(got, want) / max(float(want.detach().abs().max()) if want.numel() else 0.0, 1e-3)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; infinite where one is not a number and the other is, or infinities differ."""
    got, want = got.detach().double(), want.detach().double()
    same = (got == want) | (got.isnan() & want.isnan())
    apart = torch.where(same, 0.0, (got - want).abs())
    return float(apart.nan_to_num(float("inf"), float("inf")).max()) if apart.numel() else 0.0


def same_memory(tensors: Mapping[str, torch.Tensor]) -> frozenset[frozenset[str]]:
    """The sets of tensors that share memory."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return frozenset(frozenset(group) for group in groups.values() if len(group) > 1)
