"""The loss scale: a few numbers on the device, and the rule that moves them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fxamp import errors
from fxamp.ops import SMALLEST_NORMAL
from fxamp.run.health import NUM_BEFORE_SPIKE, Update
from fxamp.scaling import UNATTACHED, DynamicScale, Scaling

if TYPE_CHECKING:
    from fxamp.run.flags import Flags

NUM_REMEMBERED: Final = 256
"""Updates whose scale and overflow stay on record, for whoever asks how the scale has moved."""

NUM_RECENT: Final = 16
"""Updates that an overflow rate is over: a scale that looks for its place overflows a few times in a row."""


BEYOND_FP32: Final = math.ldexp(2 - 2**-24, 127)
"""The smallest fp64 number that fp32 rounds to inf."""


class State(NamedTuple):
    """What an update reads and writes: three fp32 tensors, [], or [number of regions] with a scale for each."""

    scale: Tensor
    tracker: Tensor
    """Updates without an overflow since the last one with, or since the scale last grew."""
    patience: Tensor
    """Updates with an overflow that are still allowed before the scale falls."""


def next_state(state: State, overflowed: Tensor, config: DynamicScale) -> State:
    """The rule of `DynamicScale`, on the device. `overflowed`: fp32, of the shape of the state, 1 or 0."""
    scale, is_bad = state.scale.double(), overflowed > 0  # GradScaler rounds its products once, from fp64
    # Each operation is a kernel of a small step. Where a number stands in for a tensor, `where` would launch one to make it.
    patience = state.patience - overflowed
    tracker = (state.tracker + 1).masked_fill_(is_bad, 0.0)
    grows = tracker == config.growth_interval_steps
    grown = scale * config.growth_factor
    grown = torch.where(grows & (grown < BEYOND_FP32), grown, scale)
    moved = torch.where(is_bad & (patience <= 0), scale * config.backoff_factor, grown)
    return State(
        scale=moved.clamp_(config.floor, config.cap).float(),
        tracker=tracker.masked_fill_(grows, 0.0),
        patience=patience.masked_fill_(grows, config.hysteresis_steps),
    )


def next_states(state: State, overflowed: Tensor, by_region: Tensor, config: DynamicScale) -> State:
    """The rule of `DynamicScale(per_region=True)`: an update with an overflow lowers the scales of the regions that made it,
    and says nothing about the others; one without counts for all.

    Args: overflowed: fp32 [], 1 or 0; by_region: fp32 [number of regions], the same of each; of all, where nobody made it.
    """
    moved = next_state(state, by_region, config)
    is_held = (overflowed > 0) & (by_region == 0)
    return State(*(torch.where(is_held, before, after) for before, after in zip(state, moved, strict=True)))


def _rule_of(config: Scaling, device: torch.device) -> Tensor:
    """The numbers of `next_state` as its kernel reads them, fp64 [7]: growth and backoff factor, floor, cap, growth interval,
    hysteresis, and what is too large for fp32. Zeros where the scale does not move."""
    numbers = [0.0] * 7
    if isinstance(config, DynamicScale):
        factors, bounds = (config.growth_factor, config.backoff_factor), (config.floor, config.cap)
        numbers = [*factors, *bounds, config.growth_interval_steps, config.hysteresis_steps, BEYOND_FP32]
    return torch.tensor(numbers, dtype=torch.float64).to(device)


def _ratios_of_newest(magnitudes: Tensor) -> Tensor:
    """The last of some magnitudes, fp32 [m, n], over the median of those before, [m]; 0 is one that is not known. -1: too few
    are."""
    before, newest = magnitudes[:, :-1], magnitudes[:, -1]
    num_known = (before > 0).sum(1)
    in_order = torch.where(before > 0, before, torch.inf).sort(dim=1).values
    median = in_order.gather(1, (num_known // 2).clamp(max=before.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where((num_known >= NUM_BEFORE_SPIKE) & (newest > 0), newest / median, -1.0)


class LossScale:
    """The state of the loss scale. All tensors are on the device; nothing here waits for it, but `read` and `state_dict`."""

    def __init__(self, config: Scaling, device: torch.device, regions: tuple[str, ...] = ()) -> None:
        """Args: regions: those that are told apart, by name; with `DynamicScale(per_region=True)` each has a scale."""
        self.config: Final = config
        dynamic = isinstance(config, DynamicScale)
        self.regions: Final = regions
        self.is_per_region: Final = dynamic and config.per_region
        shape = (len(regions),) if self.is_per_region else ()
        self.scale: Final = torch.full(shape, config.init if dynamic else config.value, device=device)
        """fp32 [], or [number of regions]. Graphs read it, forward and backward."""
        # A compiled graph saves the scale for its backward, and an update may fall between the two (GAN, pipelines). The
        # backward reads it where it needs it, once for both products, so that is no error: `data` keeps autograd from raising.
        self._writable = self.scale.data
        self._tracker = torch.zeros(shape, device=device)
        self._patience = torch.full(shape, float(config.hysteresis_steps if dynamic else 1), device=device)
        self.num_skipped: Final = torch.zeros((), dtype=torch.float64, device=device)
        """Optimizer steps that were left out."""
        self.num_calibrating: Final = torch.zeros((), dtype=torch.float64, device=device)
        """Updates with an overflow before the first one without: the scale was looking for its place."""
        self._is_calibrating = torch.ones((), dtype=torch.float64, device=device)
        self._history = torch.zeros((3, 1 + len(regions), NUM_REMEMBERED), dtype=torch.float32, device=device)
        """Of each of the last updates: scale, overflow, largest magnitude; of the whole model, then of each region. Update i
        is in column i % NUM_REMEMBERED."""
        self.num_updates: Final = torch.zeros(1, dtype=torch.int64, device=device)
        """Updates on record so far. On the device, as all that changes from step to step: a step may be a CUDA graph."""
        self._columns = torch.arange(NUM_REMEMBERED, device=device)
        self._untold = torch.full((), -1.0, device=device)
        """fp32 [], 1 if a gradient has overflowed since the last `signs`, 0 if none has; -1: none came."""
        self.num_at_floor: Final = torch.zeros((), dtype=torch.float64, device=device)
        """Updates in which gradients overflowed, and the scale could not fall further."""
        self._rule = _rule_of(config, device)
        self.one: Final = torch.ones((), device=device)
        """fp32 []. Made once, not by a launch in each step."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it. Each stays where it is."""
        return (
            self.scale, self._tracker, self._patience, self.num_skipped, self.num_calibrating, self._is_calibrating,
            self._history, self.num_updates, self._columns, self._untold, self.num_at_floor, self._rule,
            self.one,
        )  # fmt: skip

    def wait_for_attached(self) -> None:
        """Nobody would lower the scale: one that needs no lowering, see `scaling.UNATTACHED`."""
        if isinstance(self.config, DynamicScale):
            self._writable.clamp_(max=UNATTACHED)

    def begin(self) -> None:
        """From now on there is an optimizer whose steps can be skipped."""
        if isinstance(self.config, DynamicScale):
            self._writable.fill_(self.config.init)

    def update(
        self, overflowed: Tensor, largest: Tensor, *, by_region: Tensor | None = None, moves: bool = True
    ) -> None:
        """Takes an update on record, and moves the scale.

        Args:
            overflowed: fp32 [], 1 if any gradient since the last update overflowed, else 0.
            largest: fp32 [], the largest finite magnitude among them.
            by_region: fp32 [2, number of regions], for each whether it made an overflow, and the largest of its gradients.
            moves: did it test the scale?
        """
        facts, made = torch.stack([self._smallest(), overflowed, largest]).unsqueeze(1), None
        if self.regions:
            told = torch.zeros((2, len(self.regions)), device=overflowed.device) if by_region is None else by_region
            made = told[0] * overflowed
            made = torch.maximum(made, overflowed * (1 - made.max()))  # nobody made it: all of them are asked
            facts = torch.cat([facts, torch.stack([self._writable.expand(len(self.regions)), made, told[1]])], dim=1)
        fell = overflowed if made is None or not self.is_per_region else made
        if isinstance(self.config, DynamicScale):
            stuck = fell * (self._writable <= self.config.floor)
            self.num_at_floor.add_(stuck.amax() if self.is_per_region else stuck)
        self._history.index_copy_(2, self.num_updates % NUM_REMEMBERED, facts.unsqueeze(2))
        self.num_updates.add_(1)
        self.note_overflow(overflowed)
        if not moves:
            return
        self._is_calibrating.mul_(overflowed)
        self.num_calibrating.add_(self._is_calibrating)
        if isinstance(self.config, DynamicScale):
            before = State(self._writable, self._tracker, self._patience)
            after = (
                next_states(before, overflowed, fell, self.config)
                if self.is_per_region
                else next_state(before, overflowed, self.config)
            )
            torch._foreach_copy_(list(before), list(after))

    def clear_and_update(self, flags: Flags, overflowed: Tensor, largest: Tensor, *, moves: bool) -> None:
        """`Flags.clear` of all that these flags hold, and `update`, where there are no regions: one launch. All is on the
        device of the flags, which has kernels."""
        from fxamp import kernels  # Triton, which comes with PyTorch for CUDA

        store, record = flags.slots
        kernels.launch_over_slots(
            kernels.clear_and_update, flags.device, store, record, len(store), overflowed, largest, self.scale, self._tracker,
            self._patience, self.num_calibrating, self._is_calibrating, self._history, self.num_updates, self._untold,
            self.num_at_floor, self._rule, int(moves),
            NUM_REMEMBERED=NUM_REMEMBERED, SMALLEST_NORMAL=SMALLEST_NORMAL, DYNAMIC=isinstance(self.config, DynamicScale),
        )  # fmt: skip
        flags.arrivals.clear()

    @torch.no_grad()
    def note_overflow(self, overflowed: Tensor) -> None:
        """Takes note, for the next `signs`, of gradients that came; `overflowed`: fp32 [], 1 if one of them did, else 0."""
        self._untold.copy_(torch.maximum(self._untold, overflowed.to(self._untold.device, non_blocking=True)))

    def calibrates(self, overflowed: Tensor) -> Tensor:
        """fp32 [], 1 if an update with this overflow comes before the first one without, else 0."""
        return overflowed * self._is_calibrating.float()

    def signs(self) -> Tensor:
        """How gradients are doing, without a wait. fp32 [4 + 2 * regions]: the scale, the smallest of several; the share of
        the last `NUM_RECENT` updates that overflowed; the largest magnitude of the newest update over the median of those on
        record before (-1: it has none, or fewer than `NUM_BEFORE_SPIKE` before it have); 1 if a gradient overflowed since the
        last call, else 0 (-1: none came). Then share and ratio of each region."""
        in_order = self._history.index_select(2, (self.num_updates + self._columns) % NUM_REMEMBERED)  # the newest last
        rates, ratios = in_order[1, :, -NUM_RECENT:].sum(1) / NUM_RECENT, _ratios_of_newest(in_order[2])
        whole = torch.stack([self._smallest(), rates[0], ratios[0], self._untold])
        self._untold.fill_(-1.0)
        return torch.cat([whole, torch.stack([rates[1:], ratios[1:]], 1).flatten()])

    def _smallest(self) -> Tensor:
        return self._writable.min() if self.is_per_region else self._writable

    # ---- looking at it: these wait for the device -----------------------------------------------------------------------
    def read_history(self, region: str | None = None) -> list[Update]:
        """The last updates, oldest first, of a region or of the whole model."""
        num_updates = int(self.num_updates)
        row = 0 if region is None else 1 + self.regions.index(region)
        scales, overflows, largest = self._history[:, row].tolist()
        slots = [i % NUM_REMEMBERED for i in range(max(0, num_updates - NUM_REMEMBERED), num_updates)]
        return [Update(scales[i], overflows[i] > 0, largest[i]) for i in slots]

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the scale moves on, as Python numbers. Waits for the device."""
        return {
            "scale": self._named(self.scale.tolist()),
            "growth_tracker": self._named(self._tracker.int().tolist()),
            "patience": self._named(self._patience.tolist()),
            "num_skipped": int(self.num_skipped),
            "num_calibrating": int(self.num_calibrating),
            "is_calibrating": bool(self._is_calibrating),
            "num_at_floor": int(self.num_at_floor),
            "history": [tuple(update) for update in self.read_history()],
        } | (
            {"history_by_region": {name: [tuple(update) for update in self.read_history(name)] for name in self.regions}}
            if self.regions
            else {}
        )

    def _named(self, values: Any) -> Any:
        """Of each region, by its name, where each has its own."""
        return dict(zip(self.regions, values, strict=True)) if self.is_per_region else values

    def _filled(self, target: Tensor, saved: Any) -> None:
        """Takes saved values over: one goes to all regions, and of several the smallest to a scale of all."""
        if not isinstance(saved, Mapping):
            target.fill_(saved)
        elif not self.is_per_region:
            target.fill_(min(saved.values()))
        else:
            for i, name in enumerate(self.regions):
                target[i] = saved.get(name, min(saved.values()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict()`, of this class or of `torch.amp.GradScaler`.

        The rule (growth, backoff, floor) stays that of this scale's configuration.
        Raises: InvalidOption for what is neither.
        """
        keys = set(state) if isinstance(state, Mapping) else set[str]()  # pyright: ignore[reportUnnecessaryIsInstance]
        if "scale" not in keys or not keys & {"growth_tracker", "_growth_tracker"}:
            raise errors.InvalidOption(
                f"a state with the keys {sorted(keys)} is no loss scale's",
                way_out="Give the state_dict() of an Amp or of a torch.amp.GradScaler that was enabled",
            )
        is_ours = "growth_tracker" in state
        self._filled(self._writable, state["scale"])
        self._filled(self._tracker, state["growth_tracker" if is_ours else "_growth_tracker"])
        if not is_ours:
            return
        self._filled(self._patience, state["patience"])
        self.num_skipped.fill_(state["num_skipped"])
        self.num_calibrating.fill_(state["num_calibrating"])
        self._is_calibrating.fill_(state["is_calibrating"])
        self.num_at_floor.fill_(state.get("num_at_floor", 0))  # states before 0.1 have none
        self.num_updates.fill_(len(state["history"]))
        self._history.zero_()
        by_region = state.get("history_by_region", {})
        for row, history in enumerate((state["history"], *(by_region.get(name) for name in self.regions))):
            if history:
                told = torch.tensor(history, dtype=torch.float32).T
                self._history[:, row, : len(history)] = told.to(self._history.device)
