"""From what is observed to the precision of the next step, without a wait for the step that runs."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from fxamp import errors
from fxamp.run import ranks
from fxamp.run.history import NUM_CHANGES, NUM_STEPS, Change, History, Step
from fxamp.run.mailbox import LAG_STEPS, Mailbox
from fxamp.run.variants import Precisions
from fxamp.scheduler import NUM_LOSSES, Gradients, Scheduler, Signal, curvature, decided

NO_NUMBER: Final = -1.0
"""Stands for None in a message. No rate or ratio is negative."""


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """What the host knows of a message on its way."""

    step: int
    precision: dict[str, str]
    is_measured: bool
    """Was a curvature given?"""


class Observer:
    """Takes the loss of each step, and asks the scheduler for the precision of the next one.

    What a scheduler is told for step t was observed in step t - lag and before. Loss, overflows and gradients of a step travel
    in one message; with several ranks all of them have the same message, and so decide alike.
    """

    def __init__(
        self,
        scheduler: Scheduler | None,
        precisions: Precisions,
        *,
        signs: Callable[[], Tensor | None] | None = None,
        group: Any = None,
    ) -> None:
        """Args: signs: what is known about gradients now, fp32 [4 + 2 n] on the device, without a wait: the loss scale,
        overflow rate and ratio of `Gradients`, `Step.overflowed`, and rate and ratio once more for each region, or for none;
        None: nothing.
        group: of torch.distributed; None is the default one, if there is one.
        """
        lag: Any = getattr(scheduler, "lag_steps", LAG_STEPS)
        if not isinstance(lag, int) or lag < 1:
            raise errors.InvalidOption(
                f"a scheduler with lag_steps={lag!r}", way_out="It has to be a whole number from 1 on"
            )
        self._scheduler, self._precisions, self._signs, self._group = scheduler, precisions, signs, group
        self._mailbox = Mailbox(lag - 1)  # posted behind step t, for the decision about step t + 1
        self._sent: deque[_Sent] = deque()
        self._steps: deque[Step] = deque(maxlen=NUM_STEPS)
        self._changes: deque[Change] = deque(maxlen=NUM_CHANGES)
        self._measured: float | None = None
        self._by_region: dict[str, Gradients] = {}
        self._state: Any = None
        self._step = 0
        self._wanted = dict(precisions.current())
        """What was decided last; it comes into effect between two steps."""
        self._decide()

    @property
    def num_observed(self) -> int:
        """Losses so far."""
        return self._step

    @torch.no_grad()
    def observe(self, loss: Tensor | float, measured: Tensor | float | None = None) -> None:
        """See `Amp.observe`."""
        values = self._together(_message(loss, measured, None if self._signs is None else self._signs()))
        self._sent.append(
            _Sent(step=self._step, precision=dict(self._precisions.current()), is_measured=measured is not None)
        )
        arrived = self._mailbox.post(values)
        if arrived is not None:
            self._arrive(self._sent.popleft(), arrived.tolist())
        self._step += 1
        self._decide()

    def _together(self, values: Tensor) -> Tensor:
        """The message of all ranks: the mean of what was given, and of everything else the largest. NaN stays NaN."""
        from torch import distributed

        if not ranks.is_one_of_many():
            return values
        if distributed.get_backend(self._group) == "nccl":
            values = values.cuda()
        gathered = [torch.empty_like(values) for _ in range(distributed.get_world_size(self._group))]
        distributed.all_gather(gathered, values, group=self._group)
        by_rank = torch.stack(gathered)
        return torch.cat([by_rank[:, :_NUM_GIVEN].mean(0), by_rank[:, _NUM_GIVEN:].amax(0)])

    def _arrive(self, sent: _Sent, values: list[float]) -> None:
        loss, measured, *signs = values
        numbers = [None if x == NO_NUMBER else x for x in signs] or [None] * 4
        scale, rate, ratio, overflowed, *by_region = numbers
        if sent.is_measured:
            self._measured = measured
        losses = [*(step.loss for step in islice(reversed(self._steps), 64))][::-1]
        self._steps.append(
            Step(
                step=sent.step,
                loss=loss,
                curvature=abs(measured) if sent.is_measured else curvature([*losses, loss]),
                overflow_rate=rate,
                gradient_ratio=ratio,
                loss_scale=scale,
                precision=sent.precision,
                overflowed=None if overflowed is None else overflowed > 0,
            )
        )
        pairs = zip(by_region[::2], by_region[1::2], strict=True)
        self._by_region = {
            name: Gradients(overflow_rate=rate, ratio=ratio)
            for name, (rate, ratio) in zip(self._precisions.regions, pairs, strict=False)
        }

    # ---- deciding -------------------------------------------------------------------------------------------------------
    def _decide(self) -> None:
        if self._scheduler is None:
            return
        decision, self._state = decided(self._scheduler, self._scheduler.decide(self._signal(), self._state))
        before, wanted = self._wanted, decision.precision
        after = dict.fromkeys(before, wanted) if isinstance(wanted, str) else before | dict(wanted)
        if after == before:
            return
        self._set(after)
        self._changes.append(
            Change(
                step=self._step,
                precision=after,
                before=before,
                reason=decision.reason,
                known=self._steps[-1] if self._steps else None,
            )
        )

    def _signal(self) -> Signal:
        newest = self._steps[-1] if self._steps else None
        return Signal(
            step=self._step,
            ladder=self._precisions.ladder,
            regions=self._precisions.regions,
            losses=tuple(step.loss for step in islice(reversed(self._steps), NUM_LOSSES))[::-1],
            curvature=self._measured,
            gradients=Gradients(overflow_rate=newest.overflow_rate, ratio=newest.gradient_ratio) if newest else Gradients(),
            by_region=self._by_region,
        )

    def _set(self, wanted: Mapping[str, str]) -> None:
        for region, precision in wanted.items():
            if region not in self._wanted:
                raise errors.unknown("region", region, self._wanted)
            if precision not in self._precisions.ladder:
                raise errors.unknown("precision", precision, self._precisions.ladder)
        for region, precision in wanted.items():
            self._precisions.set(precision, region)
        self._wanted = dict(wanted)

    # ---- looking at it --------------------------------------------------------------------------------------------------
    @property
    def history(self) -> History:
        """What has arrived, and what was changed. Waits for nothing."""
        return History(steps=tuple(self._steps), changes=tuple(self._changes))

    def state_dict(self) -> dict[str, Any]:
        """All that later decisions depend on, as plain Python. Waits for the device."""
        waiting = [values.tolist() for values in self._mailbox.read_waiting()]
        newest = list(islice(reversed(self._steps), NUM_LOSSES))[::-1]
        state = asdict(self._state) if is_dataclass(self._state) and not isinstance(self._state, type) else self._state
        return {
            "step": self._step,
            "precision": dict(self._wanted),
            "state": copy.deepcopy(state),
            "measured": self._measured,
            "by_region": {name: asdict(gradients) for name, gradients in self._by_region.items()},
            "waiting": [asdict(sent) | {"values": values} for sent, values in zip(self._sent, waiting, strict=True)],
            "steps": [asdict(step) for step in newest],
            "changes": [asdict(change) for change in self._changes],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict()`. Raises: InvalidOption for what is none; UnknownOption for a state of another ladder."""
        missing = {"step", "precision", "state", "measured", "by_region", "waiting", "steps", "changes"} - set(state)
        if missing:
            raise errors.InvalidOption(
                f"a state without {', '.join(sorted(missing))} is no scheduler's", way_out="Give the state_dict() of an Amp"
            )
        self._set(self._wanted | dict(state["precision"]))
        self._step, self._state, self._measured = state["step"], copy.deepcopy(state["state"]), state["measured"]
        self._by_region = {name: Gradients(**gradients) for name, gradients in state["by_region"].items()}
        self._mailbox.refill(torch.tensor(sent["values"], dtype=torch.float64) for sent in state["waiting"])
        self._sent = deque(
            _Sent(**{name: part for name, part in sent.items() if name != "values"}) for sent in state["waiting"]
        )
        self._steps = deque((Step(**step) for step in state["steps"]), maxlen=NUM_STEPS)
        changes = (Change(**change) for change in state["changes"])
        self._changes = deque(
            (replace(c, known=Step(**c.known) if isinstance(c.known, dict) else c.known) for c in changes), maxlen=NUM_CHANGES
        )


_NUM_GIVEN: Final = 2
"""Numbers at the head of a message that the user gave: loss and curvature."""


def _message(loss: Tensor | float, measured: Tensor | float | None, signs: Tensor | None) -> Tensor:
    """fp64 [2, or 2 + len(signs)]: the loss, the measured curvature or 0, the signs. On the accelerator, if one of them is."""
    parts = [loss, 0.0 if measured is None else measured, *([] if signs is None else [signs])]
    places = [part.device for part in parts if isinstance(part, Tensor)]
    device = next((place for place in places if place.type != "cpu"), torch.device("cpu"))
    head = [_number(part, name, device) for part, name in ((parts[0], "loss"), (parts[1], "curvature"))]
    return torch.cat([*head, *([] if signs is None else [signs.double().to(device, non_blocking=True)])])


def _number(value: Tensor | float, name: str, device: torch.device) -> Tensor:
    """fp64 [1]. Raises: InvalidOption for what is no single real number."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise errors.InvalidOption(
                f"observe() was given a {name} of shape {list(value.shape)} and {value.dtype}",
                way_out=f"Give it the {name} of the step, one floating-point number",
            )
        if value.device.type != "cpu" or device.type == "cpu":
            return value.detach().reshape(1).double().to(device, non_blocking=True)
        value = float(value)  # it is on the host
    elif not isinstance(value, (float, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidOption(
            f"observe() was given a {type(value).__name__} as {name}", way_out="Give it a tensor of one number, or a float"
        )
    return torch.full((1,), value, dtype=torch.float64, device=device)
