"""The update of `Amp.train_step` in one kernel a group: unscaling, clipping, and Adam, AdamW or SGD, from low gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from fxamp import ops
from fxamp.run import recorder, skipping

KINDS: Final = (optim.Adam, optim.AdamW, optim.SGD)
ALIGNMENT_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What a parameter is updated by."""

    parameter: Tensor
    gradient: Tensor
    """fp32, bf16 or fp16, dense, with the strides of the parameter."""
    is_scaled: bool
    """Has it still to be divided by the loss scale?"""
    low: Tensor | None = None
    """The copy of the parameter in a low format that has to follow it."""

    @property
    def formats(self) -> tuple[torch.dtype, torch.dtype | None, bool]:
        """What one launch has in common."""
        return self.gradient.dtype, None if self.low is None else self.low.dtype, self.is_scaled


def why_not(optimizer: Optimizer) -> str:
    """Why our kernels cannot take the steps of an optimizer; "" if they can."""
    if type(optimizer) not in KINDS:
        return f"{type(optimizer).__name__} has no kernel of fxamp's"
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(not (getattr(hook, "__module__", None) or "").startswith("fxamp.") for of in hooks for hook in of.values()):
        return "a hook on its steps would not run"
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                return f"{option}=True"
        if not group.get("fused"):
            return "fused=True was not asked for"
        if not all(type(p) is torch.nn.Parameter and p.dtype == torch.float32 for p in group["params"]):
            return "parameters are not all plain, and fp32"
    return ""


class FusedUpdate:
    """Takes the steps of an optimizer that has its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        from fxamp import kernels  # Triton, which comes with PyTorch for CUDA

        self._optimizer, self._kernels = optimizer, kernels
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._numbers: tuple[Tensor, Tensor] | None = None
        """0 and 1, fp32 [], on the device of the parameters: made once, not by two launches in each step."""

    def takes(self, gradients: Iterable[Gradient]) -> bool:
        """Are these gradients, and what is updated by them, as the kernels need them?"""
        gradients = list(gradients)
        group_of = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        if not all(self._has_state(g.parameter, group_of[id(g.parameter)]) for g in gradients):
            return False
        return all(
            t.data_ptr() % ALIGNMENT_BYTES == 0 and t.stride() == g.parameter.stride() and t.is_cuda
            for g in gradients
            for t in (g.parameter, g.gradient, *self._states(g.parameter), *(() if g.low is None else (g.low,)))
        ) and all(map(_is_dense, (g.parameter for g in gradients)))

    def reserve(self) -> Tensor:
        """Room for the tables of a step. What is recorded has to have its own, made before: the memory that a recording takes
        is written by whatever had it earlier in the step."""
        sizes = [p.numel() for group in self._optimizer.param_groups for p in group["params"]]
        count = sum(math.ceil(size / self._kernels.BLOCK) for size in sizes)
        device = skipping.parameters(self._optimizer)[0].device
        if self._numbers is None or self._numbers[0].device != device:
            self._numbers = torch.zeros((), device=device), torch.ones((), device=device)
        return torch.empty((count, self._kernels.COLUMNS), dtype=torch.int64, device=device)

    def launch(
        self,
        gradients: Sequence[Gradient],
        rates: Sequence[Tensor],
        room: Tensor,
        *,
        inverse_scale: Tensor | None,
        clip: float | None,
        overflowed: Tensor | None,
    ) -> None:
        """Launches the step. Nothing waits.

        Args:
            rates: the learning rate of each group, fp32 [].
            room: from `reserve`; it has to live as long as the kernels may run, and where they are recorded, `fill` has to be
                called before the first one runs.
            inverse_scale: what makes scaled gradients true, fp32 []; None where none is scaled.
            clip: the largest norm of all true gradients together.
            overflowed: fp32 [], 1 to leave the step out, else 0; None to take it in any case.
        """
        assert self._numbers is not None
        zero, one = self._numbers
        steps = [state["step"] for g in gradients if "step" in (state := self._optimizer.state[g.parameter])]
        if steps:
            if overflowed is None:
                torch._foreach_add_(steps, 1.0)
            else:
                torch._foreach_add_(steps, [1 - overflowed] * len(steps))  # one tensor for all would be read by the host
        factors = _factors(gradients, one if inverse_scale is None else inverse_scale, one, clip)
        overflowed = zero if overflowed is None else overflowed
        by_parameter = {id(g.parameter): g for g in gradients}
        start = 0
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            mine = [by_parameter[id(p)] for p in group["params"] if id(p) in by_parameter]
            mine.sort(key=lambda g: str(g.formats))
            for of, same in itertools.groupby(mine, key=lambda g: g.formats):
                rows = [row for g in same for row in self._rows(g)]
                table = room[start : start + len(rows)]
                start += len(rows)
                self._pending.append((table, torch.tensor(rows, dtype=torch.int64)))
                if not recorder.is_recording():
                    self.fill()
                self._run(group, table, (rate, factors[of[2]], overflowed), *of[:2])

    def load(self, low: Iterable[torch.dtype], rates: Sequence[Tensor]) -> None:
        """Loads the kernels for fp32 gradients, and gradients and copies of these formats, by launches that do nothing: no
        kernel can be loaded while something is recorded."""
        formats = [(torch.float32, None), *((grad, copy) for d in low for grad in (torch.float32, d) for copy in (None, d))]
        one = torch.ones_like(rates[0])  # "overflowed": nothing is read
        nothing = torch.zeros((1, self._kernels.COLUMNS), dtype=torch.int64, device=one.device)
        for group, (grad, copy) in itertools.product(self._optimizer.param_groups, formats):
            self._run(group, nothing, (one, one, one), grad, copy)

    def fill(self) -> None:
        """Fills the tables of what was launched: from the host, which a recording would do over and over."""
        for table, rows in self._pending:
            table.copy_(rows.pin_memory(), non_blocking=True)
        self._pending.clear()

    def _run(
        self,
        group: Mapping[str, Any],
        table: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        grad: torch.dtype,
        low: torch.dtype | None,
    ) -> None:
        kernel, numbers, switches = self._kernel(group)
        kernel[(len(table),)](
            table, *tensors, *map(float, numbers),
            GRAD=_triton_dtype(grad), LOW=None if low is None else _triton_dtype(low),
            **switches, BLOCK=self._kernels.BLOCK, COLUMNS=self._kernels.COLUMNS, num_warps=self._kernels.NUM_WARPS,
        )  # fmt: skip

    def _kernel(self, group: Mapping[str, Any]) -> tuple[Any, tuple[float, ...], dict[str, bool]]:
        """(kernel, its numbers, its switches) for a group."""
        if isinstance(self._optimizer, optim.SGD):
            numbers = group["momentum"], group["dampening"], group["weight_decay"]
            return self._kernels.sgd, numbers, {"MOMENTUM": group["momentum"] != 0, "NESTEROV": group["nesterov"]}
        beta1, beta2 = group["betas"]
        logs = math.log(beta1) if beta1 else -math.inf, math.log(beta2) if beta2 else -math.inf
        numbers = beta1, beta2, 1 - beta1, 1 - beta2, *logs, group["eps"], group["weight_decay"]
        is_decoupled = isinstance(self._optimizer, optim.AdamW) or group.get("decoupled_weight_decay", False)
        return self._kernels.adam, numbers, {"DECOUPLED": is_decoupled}

    def _has_state(self, parameter: Tensor, group: Mapping[str, Any]) -> bool:
        """Is the state there that a kernel reads and writes?"""
        of_sgd = ("momentum_buffer",) if group.get("momentum") else ()
        needed = of_sgd if "momentum" in group else ("exp_avg", "exp_avg_sq", "step")
        state = self._optimizer.state.get(parameter, {})
        return all(isinstance(state.get(name), Tensor) for name in needed)

    def _states(self, parameter: Tensor) -> list[Tensor]:
        state = self._optimizer.state.get(parameter, {})
        return [state[name] for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if isinstance(state.get(name), Tensor)]

    def _rows(self, g: Gradient) -> Iterable[list[int]]:
        """A row for each block of a parameter."""
        states = [t.data_ptr() for t in self._states(g.parameter)]
        states += [0] * (2 - len(states))
        step = self._optimizer.state[g.parameter].get("step") if self._optimizer.state else None
        size, block = g.gradient.element_size(), self._kernels.BLOCK
        low = (0, 0) if g.low is None else (g.low.data_ptr(), g.low.element_size())
        for start in range(0, g.parameter.numel(), block):
            yield [
                g.parameter.data_ptr() + 4 * start,
                g.gradient.data_ptr() + size * start,
                *(t + 4 * start if t else 0 for t in states),
                low[0] + low[1] * start,
                0 if step is None else step.data_ptr(),
                min(block, g.parameter.numel() - start),
                0,
            ]


def _factors(
    gradients: Sequence[Gradient], inverse_scale: Tensor, one: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """What true gradients, and scaled ones, are multiplied by, each fp32 []."""
    if clip is None:
        return one, inverse_scale
    scaled, true = (ops.norms([g.gradient for g in gradients if g.is_scaled == is_scaled], 2) for is_scaled in (True, False))
    parts = [torch.stack(scaled) * inverse_scale] if scaled else []
    parts += [torch.stack(true)] if true else []
    # As torch.nn.utils.clip_grad_norm_ does it.
    factor = (clip / (torch.linalg.vector_norm(torch.cat(parts)) + 1e-6)).clamp(max=1.0)
    return factor, factor * inverse_scale


def _is_dense(x: Tensor) -> bool:
    """Does it fill its memory, in whatever order?"""
    return torch.empty_like(x, device="meta").stride() == x.stride()


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
