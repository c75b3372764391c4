"""Device values for the host, without a wait for the step that they come from."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch
from torch import Tensor

LAG_STEPS: Final = 8
"""How far the host may run ahead of an accelerator before it waits. Fixed, so that what is decided from the values repeats."""


class Mailbox:
    """Carries one number a step to the host.

    What is read is the number posted `LAG_STEPS` posts ago, in every run; the host waits for that one where it has run further
    ahead. On the CPU, where nothing runs ahead, it is the last one.
    """

    def __init__(self) -> None:
        self._posted: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def post(self, value: Tensor) -> float | None:
        """Sends off a value, [], and returns the one that arrives with it; None while none has."""
        self._posted.append(_send(value))
        lag = LAG_STEPS if value.is_cuda else 0
        if len(self._posted) <= lag:
            return None
        sent, event = self._posted.popleft()
        if event is not None:
            event.synchronize()
        return float(sent)


def _send(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if not value.is_cuda:
        return value.detach().clone(), None
    sent = torch.empty((), dtype=value.dtype, pin_memory=True)
    sent.copy_(value.detach(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return sent, event
