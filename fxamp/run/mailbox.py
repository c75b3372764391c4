"""Device values for the host, without a wait for the step that they come from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

LAG_STEPS: Final = 8
"""How far the host may run ahead of an accelerator before it waits. Fixed, so that what is decided from the values repeats."""


class Mailbox:
    """Carries a few numbers a step to the host.

    What arrives is what was posted `lag_steps` posts ago, in every run; the host waits for that one where it has run further
    ahead. Without `lag_steps` that is `LAG_STEPS` on an accelerator, and 0 on the CPU, where nothing runs ahead. Where not all
    that is posted is sent off, what arrives is as old, or older by less than a turn.
    """

    def __init__(self, lag_steps: int | None = None, *, every: int = 1) -> None:
        """Args: every: on an accelerator, where each costs the host a copy and an event, one post in so many is sent off; on a
        CPU all are."""
        self._lag_steps, self._every, self._num_posts = lag_steps, every, 0
        self._posted: deque[_Message] = deque()
        self._spare: list[_Message] = []
        """Read: to be sent off again, for pinned memory and events are dear."""
        self._num_stale = 0
        """Of those on their way, by how many `outdate` has come too late."""
        self.is_outdated = False
        """Was what arrived last sent off before `outdate`?"""

    def post(self, values: Tensor) -> Tensor | None:
        """Sends off values, of any shape, and returns those that arrive with it, on the host; None while none have."""
        self._num_posts += 1
        every, lag = (self._every, LAG_STEPS) if values.is_cuda else (1, 0)
        if self._lag_steps is not None:
            lag = self._lag_steps
        if self._num_posts % every:
            return None
        self._posted.append(self._send(values))
        if (len(self._posted) - 1) * every < lag:
            return None
        message = self._posted.popleft()
        self.is_outdated = self._num_stale > 0
        self._num_stale -= self.is_outdated
        arrived = _wait_for(message)
        self._spare = [message]
        return arrived

    def outdate(self) -> None:
        """Something was done because of what has arrived: what is on its way knows nothing of it."""
        self._num_stale = len(self._posted)

    def read_waiting(self) -> list[Tensor]:
        """What is on its way, oldest first. Waits for the device; it stays on its way."""
        return [_wait_for(message) for message in self._posted]

    def refill(self, values: Iterable[Tensor]) -> None:
        """Puts what was on its way, host tensors, in place of what is."""
        self._posted = deque((value, None) for value in values)

    def state_dict(self) -> dict[str, Any]:
        """All that decides what arrives when, as plain Python. Waits for the device."""
        waiting = [values.tolist() for values in self.read_waiting()]
        return {"num_posts": self._num_posts, "num_stale": self._num_stale, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict()`, with fp64 in place of what it carried."""
        self._num_posts, self._num_stale = state["num_posts"], state["num_stale"]
        self.refill(torch.tensor(values, dtype=torch.float64) for values in state["waiting"])

    def _send(self, values: Tensor) -> _Message:
        values = values.detach()
        if not values.is_cuda:
            return values.clone(), None
        sent, event = self._spare.pop() if self._spare else (None, None)
        if sent is None or event is None or (sent.shape, sent.dtype) != (values.shape, values.dtype):
            sent, event = torch.empty(values.shape, dtype=values.dtype, pin_memory=True), torch.cuda.Event()
        sent.copy_(values, non_blocking=True)
        event.record(torch.cuda.current_stream(values.device))  # an event stays with the device of its first record
        return sent, event


_Message = tuple[Tensor, torch.cuda.Event | None]
"""On the host, and when it has arrived there; None: it has."""


def _wait_for(message: _Message) -> Tensor:
    sent, event = message
    if event is None:
        return sent
    event.synchronize()
    return sent.clone()  # what is sent next overwrites it
