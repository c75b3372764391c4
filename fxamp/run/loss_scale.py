"""The loss scale: a few numbers on the device, and the rule that moves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fxamp import errors
from fxamp.run.health import NUM_BEFORE_SPIKE, Update
from fxamp.scaling import UNATTACHED, DynamicScale, Scaling

NUM_REMEMBERED: Final = 256
"""Updates whose scale and overflow stay on record, for whoever asks how the scale has moved."""

NUM_RECENT: Final = 16
"""Updates that an overflow rate is over: a scale that looks for its place overflows a few times in a row."""


class State(NamedTuple):
    """What an update reads and writes: three fp32 tensors, []."""

    scale: Tensor
    tracker: Tensor
    """Updates without an overflow since the last one with, or since the scale last grew."""
    patience: Tensor
    """Updates with an overflow that are still allowed before the scale falls."""


def next_state(state: State, overflowed: Tensor, config: DynamicScale) -> State:
    """The rule of `DynamicScale`, on the device. `overflowed`: fp32 [], 1 or 0."""
    scale, is_bad = state.scale.double(), overflowed > 0  # GradScaler rounds its products once, from fp64
    patience = state.patience - overflowed
    tracker = torch.where(is_bad, 0.0, state.tracker + 1)
    grows = tracker == config.growth_interval_steps
    grown = scale * config.growth_factor
    grown = torch.where(grows & torch.isfinite(grown.float()), grown, scale)
    moved = torch.where(is_bad & (patience <= 0), scale * config.backoff_factor, grown)
    return State(
        scale=moved.clamp(config.floor, config.cap).float(),
        tracker=torch.where(grows, 0.0, tracker),
        patience=torch.where(grows, float(config.hysteresis_steps), patience),
    )


def _ratio_of_newest(magnitudes: Tensor) -> Tensor:
    """The last of some magnitudes, fp32 [n], over the median of those before; 0 is one that is not known. -1: too few are."""
    before, newest = magnitudes[:-1], magnitudes[-1]
    num_known = (before > 0).sum()
    in_order = torch.where(before > 0, before, torch.inf).sort().values
    median = in_order.gather(0, (num_known // 2).clamp(max=len(before) - 1).unsqueeze(0)).squeeze(0)
    return torch.where((num_known >= NUM_BEFORE_SPIKE) & (newest > 0), newest / median, -1.0)


class LossScale:
    """The state of one loss scale. All tensors are on the device; nothing here waits for it, but `read` and `state_dict`."""

    def __init__(self, config: Scaling, device: torch.device) -> None:
        self.config: Final = config
        dynamic = isinstance(config, DynamicScale)
        self.scale: Final = torch.full((), config.init if dynamic else config.value, device=device)
        """fp32 []. Graphs read it, forward and backward."""
        # A compiled graph saves the scale for its backward, and an update may fall between the two (GAN, pipelines). The
        # backward reads it where it needs it, once for both products, so that is no error: `data` keeps autograd from raising.
        self._writable = self.scale.data
        self._tracker = torch.zeros((), device=device)
        self._patience = torch.full((), float(config.hysteresis_steps if dynamic else 1), device=device)
        self.num_skipped: Final = torch.zeros((), dtype=torch.float64, device=device)
        """Optimizer steps that were left out."""
        self.num_calibrating: Final = torch.zeros((), dtype=torch.float64, device=device)
        """Updates with an overflow before the first one without: the scale was looking for its place."""
        self._is_calibrating = torch.ones((), dtype=torch.float64, device=device)
        self._history = torch.zeros((3, NUM_REMEMBERED), dtype=torch.float32, device=device)
        """Of each of the last updates: scale, overflow, largest magnitude; update i is in column i % NUM_REMEMBERED."""
        self.num_updates: Final = torch.zeros(1, dtype=torch.int64, device=device)
        """Updates on record so far. On the device, as all that changes from step to step: a step may be a CUDA graph."""
        self._columns = torch.arange(NUM_REMEMBERED, device=device)
        self._untold = torch.full((), -1.0, device=device)
        """fp32 [], 1 if a gradient has overflowed since the last `signs`, 0 if none has; -1: none came."""
        self.at_floor: Final = torch.zeros((), device=device)
        """fp32 [], 1 if gradients overflowed in the last update, and the scale could not fall further."""

    def wait_for_attached(self) -> None:
        """Nobody would lower the scale: one that needs no lowering, see `scaling.UNATTACHED`."""
        if isinstance(self.config, DynamicScale):
            self._writable.clamp_(max=UNATTACHED)

    def begin(self) -> None:
        """From now on there is an optimizer whose steps can be skipped."""
        if isinstance(self.config, DynamicScale):
            self._writable.fill_(self.config.init)

    def update(self, overflowed: Tensor, largest: Tensor, *, moves: bool = True) -> None:
        """Takes an update on record, and moves the scale. Both fp32 []: `overflowed`: 1 if any gradient since the last update
        overflowed, else 0; `largest`: the largest finite magnitude among them. `moves`: did it test the scale?"""
        if isinstance(self.config, DynamicScale):
            self.at_floor.copy_(overflowed * (self._writable <= self.config.floor))
        facts = torch.stack([self._writable, overflowed, largest]).unsqueeze(1)
        self._history.index_copy_(1, self.num_updates % NUM_REMEMBERED, facts)
        self.num_updates.add_(1)
        self.note_overflow(overflowed)
        if not moves:
            return
        self._is_calibrating.mul_(overflowed)
        self.num_calibrating.add_(self._is_calibrating)
        if isinstance(self.config, DynamicScale):
            after = next_state(State(self._writable, self._tracker, self._patience), overflowed, self.config)
            self._writable.copy_(after.scale)
            self._tracker.copy_(after.tracker)
            self._patience.copy_(after.patience)

    @torch.no_grad()
    def note_overflow(self, overflowed: Tensor) -> None:
        """Takes note, for the next `signs`, of gradients that came; `overflowed`: fp32 [], 1 if one of them did, else 0."""
        self._untold.copy_(torch.maximum(self._untold, overflowed.to(self._untold.device, non_blocking=True)))

    def calibrates(self, overflowed: Tensor) -> Tensor:
        """fp32 [], 1 if an update with this overflow comes before the first one without, else 0."""
        return overflowed * self._is_calibrating.float()

    def signs(self) -> Tensor:
        """How gradients are doing, fp32 [4], without a wait: the scale; the share of the last `NUM_RECENT` updates that
        overflowed; the largest magnitude of the newest update over the median of those on record before (-1: it has none, or
        fewer than `NUM_BEFORE_SPIKE` before it have); 1 if a gradient overflowed since the last call, else 0 (-1: none)."""
        in_order = self._history.index_select(1, (self.num_updates + self._columns) % NUM_REMEMBERED)  # the newest last
        rate = in_order[1, -NUM_RECENT:].sum() / NUM_RECENT
        signs = torch.stack([self._writable, rate, _ratio_of_newest(in_order[2]), self._untold])
        self._untold.fill_(-1.0)
        return signs

    # ---- looking at it: these wait for the device -----------------------------------------------------------------------
    def read_history(self) -> list[Update]:
        """The last updates, oldest first."""
        num_updates = int(self.num_updates)
        scales, overflows, largest = self._history.tolist()
        slots = [i % NUM_REMEMBERED for i in range(max(0, num_updates - NUM_REMEMBERED), num_updates)]
        return [Update(scales[i], overflows[i] > 0, largest[i]) for i in slots]

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the scale moves on, as Python numbers. Waits for the device."""
        return {
            "scale": float(self.scale),
            "growth_tracker": int(self._tracker),
            "patience": float(self._patience),
            "num_skipped": int(self.num_skipped),
            "num_calibrating": int(self.num_calibrating),
            "is_calibrating": bool(self._is_calibrating),
            "history": [tuple(update) for update in self.read_history()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict()`, of this class or of `torch.amp.GradScaler`.

        The rule (growth, backoff, floor) stays that of this scale's configuration.
        Raises: InvalidOption for what is neither.
        """
        if "scale" not in state or not ({"growth_tracker", "_growth_tracker"} & set(state)):
            raise errors.InvalidOption(
                f"a state with the keys {sorted(state)} is no loss scale's",
                way_out="Give the state_dict() of an Amp or of a torch.amp.GradScaler that was enabled",
            )
        is_ours = "growth_tracker" in state
        self._writable.fill_(state["scale"])
        self._tracker.fill_(state["growth_tracker" if is_ours else "_growth_tracker"])
        if not is_ours:
            return
        self._patience.fill_(state["patience"])
        self.num_skipped.fill_(state["num_skipped"])
        self.num_calibrating.fill_(state["num_calibrating"])
        self._is_calibrating.fill_(state["is_calibrating"])
        history = state["history"]
        self.num_updates.fill_(len(history))
        self._history.zero_()
        if history:
            self._history[:, : len(history)] = torch.tensor(history, dtype=torch.float32).T.to(self._history.device)
