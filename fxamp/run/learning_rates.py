"""The learning rates of an optimizer, where a CUDA graph reads them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxamp.run import skipping


class LearningRates:
    """A tensor for each group, fp32 [], on the device of the parameters.

    Users and schedules keep their Python numbers in `group["lr"]`: the tensors stand there only while a step is launched.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: list[float] = []
        self.tensors: list[Tensor] = []
        """One for each group, as of the last `refresh`."""

    def refresh(self) -> None:
        """Takes over the rates of now. Waits for nothing."""
        groups, device = self._optimizer.param_groups, skipping.parameters(self._optimizer)[0].device
        for _ in groups[len(self.tensors) :]:
            self.tensors.append(torch.zeros((), device=device))
            self._known.append(math.nan)
        del self.tensors[len(groups) :], self._known[len(groups) :]
        for i, group in enumerate(groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self.tensors[i].copy_(rate, non_blocking=True)
                self._known[i] = math.nan
            elif rate != self._known[i]:
                self.tensors[i].fill_(rate)
                self._known[i] = rate

    @contextlib.contextmanager
    def on_device(self) -> Generator[None]:
        """Inside, `group["lr"]` is the tensor, and groups say that they can be captured, as fused ones can without saying."""
        groups = self._optimizer.param_groups
        before = [(group["lr"], group.get("capturable")) for group in groups]
        for group, tensor in zip(groups, self.tensors, strict=True):
            group["lr"] = tensor
            if group.get("fused") and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, (rate, is_capturable) in zip(groups, before, strict=True):
                group["lr"] = rate
                if is_capturable is not None:
                    group["capturable"] = is_capturable
