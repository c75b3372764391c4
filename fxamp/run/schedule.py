"""Learning-rate schedules that stand still where the optimizer did."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from fxamp.run.attachment import Attachment
from fxamp.run.mailbox import Mailbox


class SteppedSchedule:
    """A learning-rate scheduler that counts the optimizer's steps that were taken. All but `step` is the scheduler's own.
    Without an attachment, where gradients are not scaled, no step is left out."""

    def __init__(self, schedule: Any, attachment: Attachment | None) -> None:
        self.schedule: Final = schedule
        self._attachment = attachment
        self._mailbox = Mailbox()
        self._num_calls = self._num_steps = 0
        skipped = self._num_skipped
        self._skipped_before = None if skipped is None else skipped.clone()
        """By the optimizer, when this began to count."""

    @property
    def _num_skipped(self) -> Tensor | None:
        """By the optimizer, so far. A copy on the device; None if there is none."""
        return None if self._attachment is None else self._attachment.num_skipped

    def step(self, *args: Any) -> None:
        """Steps the scheduler, unless the optimizer has stood still since."""
        self._num_calls += 1
        skipped = self._num_skipped
        if skipped is not None and self._skipped_before is not None:
            skipped = skipped - self._skipped_before
        known = self._mailbox.post(skipped) if skipped is not None else None
        if self._num_steps < self._num_calls - (0 if known is None else int(known)):
            self._num_steps += 1
            self.schedule.step(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)
