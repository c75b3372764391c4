"""Where compiled backwards leave what is known of each gradient that they hand out: its largest magnitude, and, if asked for,
the share of its numbers that fp16 could not hold."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from fxamp.ops import SMALLEST_NORMAL
from fxamp.run import recorder
from fxamp.run.health import Slot

if TYPE_CHECKING:
    from fxamp.ladder import Ladder
    from fxamp.watched import Watched

ROOM_AT_FIRST: Final = 1024
"""Slots of a new store; it doubles when they are taken."""


@dataclass(frozen=True, kw_only=True)
class ProbedGraph:
    """A compiled graph that has a probe."""

    index: int
    positions: tuple[int, ...]
    """Of the inputs that have slots, in the order of the slots."""
    names: tuple[str, ...]
    """Of these inputs."""
    are_parameters: tuple[bool, ...]
    """Which of them are parameters; the others are activations and other tensors of the call."""
    has_shares: bool
    """Does the probe's gradient hold shares behind the magnitudes?"""
    num_regions: int = 0
    """Regions of which it says, behind these, whether they overflowed by themselves."""
    regions: tuple[int, ...] = ()
    """Of these inputs, by number; none: nobody asks."""
    watched: tuple[Watched, ...] = ()
    """What is watched in it; the probe's gradient holds three numbers for each behind all others, four with shares."""

    @property
    def num_slots(self) -> int:
        """One for each input, and one for all other gradients."""
        return len(self.names) + 1

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """How many numbers of the probe's gradient are magnitudes, shares, about regions, and about what is watched."""
        return (
            self.num_slots,
            self.num_slots if self.has_shares else 0,
            self.num_regions,
            len(self.watched) * (4 if self.has_shares else 3),
        )


@dataclass(frozen=True, kw_only=True)
class Aside:
    """What had arrived somewhere, and was taken out."""

    tensors: tuple[Tensor, ...]
    arrivals: set[int]


def kernels_run_on(device: torch.device) -> bool:
    """Is there a Triton for our kernels?"""
    return device.type == "cuda" and has_triton()


class Flags:
    """One store of largest gradients for all compiled graphs on a device.

    A graph has a probe for each set of parameters that it is called with: one graph may serve many instances of a module. The
    gradient of the probe is a vector of magnitudes. It goes into the store, by maximum, the moment it arrives: it may lie in
    the memory of a CUDA graph, and it has to add up over micro-batches without turning into a sum.
    """

    def __init__(self, device: torch.device, regions: Ladder | None = None) -> None:
        """Args: regions: what is told apart; None: nothing."""
        from fxamp.run.watch import Watch  # late: it makes `import fxamp` slower

        self.device: Final = device
        self._store = torch.zeros(ROOM_AT_FIRST, device=device)
        self._record = torch.zeros((3, ROOM_AT_FIRST), device=device)
        """Per slot: updates with an overflow, updates in which all of it was lost, largest share of it that was lost."""
        self._regions = torch.zeros(ROOM_AT_FIRST, dtype=torch.int64, device=device)
        """Of each slot, the number of its region."""
        self._overflowed_regions = torch.zeros(len(regions.names) if regions else 0, device=device)
        """fp32, 1 for each region that made an overflow since the last update."""
        self._names: list[str] = []
        self._has_shares = False
        self._owners: list[int | None] = []
        """For each slot, the id of its parameter; None: a gradient of something else."""
        self._probes: dict[tuple[Any, ...], Tensor] = {}
        self._released: dict[int, list[slice]] = {}
        """Slots of probes that are gone, by their number."""
        self._masks: dict[frozenset[int], Tensor] = {}
        """Which slots belong to some parameters, by their ids. What is recorded reads them: each stays where it is while the
        store does, and is written anew before it is read if slots have changed hands."""
        self._is_stale = False
        self.num_changes = 0
        """Of what `settled` returns, or makes ready."""
        self.watch: Final = Watch(device, regions)
        self.arrivals: Final[set[int]] = set()
        """Ids of the parameters whose gradients have arrived, and are not cleared."""

    def probe(self, graph: ProbedGraph, parameters: Sequence[Tensor]) -> Tensor:
        """The probe of a graph, fp32 [sum(graph.parts)], for a call with these parameters, in the order of their slots."""
        key = (graph.index, *map(id, parameters))
        found = self._probes.get(key)
        return self._new_probe(key, graph, parameters) if found is None else found

    def _new_probe(self, key: tuple[Any, ...], graph: ProbedGraph, parameters: Sequence[Tensor]) -> Tensor:
        rest = iter(parameters)
        owners = [id(next(rest)) if is_parameter else None for is_parameter in graph.are_parameters]
        span = self._room_for([*owners, None], (*graph.names, "inputs that share memory"))
        if graph.regions:
            self._regions[span] = _uploaded(self._store.device, torch.tensor([*graph.regions, 0]))
        if graph.watched:
            self.watch.reserve(graph.index, graph.watched)
        probe = torch.zeros(sum(graph.parts), device=self._store.device, requires_grad=True)
        ids = frozenset(owner for owner in owners if owner is not None)
        probe.register_post_accumulate_grad_hook(functools.partial(self._arrive, span, ids, graph))
        self._probes[key] = probe
        this: weakref.ref[Flags] = weakref.ref(self)
        # A backward that is still to come keeps its probe alive, and its parameters.
        weakref.finalize(probe, _call, this, Flags.release, span).atexit = False
        for parameter in parameters:
            weakref.finalize(parameter, _call, this, Flags.forget, key, id(parameter)).atexit = False
        return probe

    def _room_for(self, owners: list[int | None], names: Sequence[str]) -> slice:
        """Slots with these owners and names, with nothing in them and nothing on record."""
        self._is_stale = True
        self.num_changes += 1
        released = self._released.get(len(owners))
        if released:
            span = released.pop()
            self._store[span].zero_()
            self._record[:, span].zero_()
        else:
            span = slice(len(self._owners), len(self._owners) + len(owners))
            while span.stop > len(self._store):
                self._masks.clear()
                self._store = torch.cat([self._store, torch.zeros_like(self._store)])
                self._record = torch.cat([self._record, torch.zeros_like(self._record)], dim=1)
                self._regions = torch.cat([self._regions, torch.zeros_like(self._regions)])
        self._owners[span] = owners
        self._names[span] = names
        return span

    def release(self, span: slice) -> None:
        """A probe is gone: its slots are free."""
        self._owners[span] = [None] * (span.stop - span.start)
        self._is_stale = True
        self.num_changes += 1
        self._released.setdefault(span.stop - span.start, []).append(span)

    def forget(self, key: tuple[Any, ...], owner: int) -> None:
        """A parameter is gone: its id may come back as another tensor's."""
        self._probes.pop(key, None)
        self.arrivals.discard(owner)
        for owners in [owners for owners in self._masks if owner in owners]:
            self._masks.pop(owners, None)
            self.num_changes += 1

    @torch.no_grad()  # with create_graph=True a gradient has a history
    def _arrive(self, span: slice, ids: frozenset[int], graph: ProbedGraph, probe: Tensor) -> None:
        assert probe.grad is not None
        whole, here = probe.grad, self._store[span]
        has_more = len(whole) > graph.num_slots
        largest, shares, regions, watched = whole.split(graph.parts) if has_more else (whole, whole, whole, whole)
        torch.maximum(here, largest, out=here)
        if graph.has_shares:
            torch.maximum(self._record[2, span], shares, out=self._record[2, span])
            self._has_shares = True
        if graph.num_regions:
            torch.maximum(self._overflowed_regions, regions, out=self._overflowed_regions)
        if graph.watched:
            self.watch.arrive(graph.index, graph.watched, watched)
        probe.grad = None
        self.arrivals.update(ids)

    def known(self, parameters: Collection[int]) -> set[int]:
        """Those of these parameters, by id, that have gone into a graph."""
        return {owner for owner in self._owners if owner is not None and owner in parameters}

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """All that backwards write to. They are others once they have grown."""
        return self._store, self._record, self._regions, self._overflowed_regions, *self.watch.stores

    # ---- asking and clearing --------------------------------------------------------------------------------------------
    def largest(self, *, but: Collection[int] = ()) -> Tensor:
        """fp32 [], the largest finite magnitude of any gradient; `but`: other than those of these parameters, by id."""
        return _finite(self._without(but)).max()

    def any_overflow(self, *, but: Collection[int] = ()) -> Tensor:
        """fp32 [], 1 if a gradient of anything overflowed, else 0; `but`: other than those of these parameters, by id."""
        return _not_finite(self._without(but))

    def by_region(self) -> Tensor:
        """fp32 [2, number of regions]: 1 if a gradient overflowed there that was finite when it entered, else 0; the largest
        finite magnitude of the gradients of the region's parameters."""
        magnitudes = _finite(self._store)
        largest = torch.zeros_like(self._overflowed_regions).scatter_reduce(0, self._regions, magnitudes, "amax")
        return torch.stack([self._overflowed_regions, largest])

    def _without(self, others: Collection[int]) -> Tensor:
        """The magnitudes, 0 for those of these parameters."""
        return torch.where(self._mask(others), 0.0, self._store) if others else self._store

    def overflow_of(self, parameters: Iterable[int]) -> Tensor:
        """fp32 [], 1 if a gradient of one of these parameters, by id, overflowed, else 0."""
        return ((self._store < math.inf) < self._mask(parameters)).any().to(torch.float32)

    def look(self, owners: Collection[int], others: Collection[int], found: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`overflow_of` these parameters, by id, and `any_overflow` and `largest` but of `others`; the first two, 1 where
        `found`, fp32 [], is. In one launch where that can be."""
        if self.has_kernels:
            from fxamp import kernels  # Triton, which comes with PyTorch for CUDA

            out, mine = torch.empty(3, device=self.device), self._mask(owners)
            kernels.launch_over_slots(
                kernels.look, self.device, self._store, mine, self._mask(others) if others else mine,
                out if found is None else found, out, len(self._store), int(bool(others)), int(found is not None),
            )  # fmt: skip
            bad, anywhere, largest = out.unbind()
            return bad, anywhere, largest
        bad, anywhere = self.overflow_of(owners), self.any_overflow(but=others)
        if found is not None:
            bad, anywhere = torch.maximum(bad, found), torch.maximum(anywhere, found)
        return bad, anywhere, self.largest(but=others)

    @property
    def has_kernels(self) -> bool:
        """Can one launch do what is many operations of PyTorch, each a launch?"""
        return not len(self._overflowed_regions) and kernels_run_on(self.device)

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Of each slot, its magnitude, fp32 [n], and its record, fp32 [3, n]."""
        return self._store, self._record

    def clear(
        self, scale: Tensor, owners: Collection[int] | None = None, *, but: Collection[int] = (), told: Tensor | None = None
    ) -> None:
        """Takes what arrived for these parameters, by id, into the record, and forgets it; no `owners`: everything, `but` what
        arrived for these, which may tell of regions later if nobody has been `told` of an overflow, fp32 [], 1 or 0.

        Args: scale: fp32 [], or [number of regions], the loss scale that it was computed with."""
        # What no named region holds may have had the scale of any: of none is said that it was lost by too small a one.
        here = scale if scale.ndim == 0 else torch.where(self._regions == 0, scale.max(), scale[self._regions])
        known = torch.stack([~(self._store < math.inf), (self._store > 0) & (self._store * here < SMALLEST_NORMAL)])
        if owners is None and not but:
            self._record[:2].add_(known)
            self._store.zero_()
        else:
            mask = self._mask(but).logical_not() if owners is None else self._mask(owners)
            self._record[:2].add_(known & mask)
            self._store.masked_fill_(mask, 0.0)
        if owners is not None:
            self.arrivals.difference_update(owners)
            return
        self.arrivals.intersection_update(but)
        if told is None:
            self._overflowed_regions.zero_()
        else:
            self._overflowed_regions.mul_(told.to(self.device, non_blocking=True) == 0)

    def put_aside(self) -> Aside:
        """Takes out what has arrived, for later. Waits for nothing."""
        tensors = self._store, self._overflowed_regions, self.watch.arrived
        aside = Aside(tensors=tuple(t.clone() for t in tensors), arrivals=set(self.arrivals))
        torch._foreach_zero_(tensors)
        self.arrivals.clear()
        return aside

    def put_back(self, aside: Aside) -> None:
        """Lets arrive again what was put aside."""
        for now, before in zip((self._store, self._overflowed_regions, self.watch.arrived), aside.tensors, strict=True):
            here = now[..., : before.shape[-1]]  # it may have grown
            torch.maximum(here, before, out=here)
        self.arrivals.update(aside.arrivals)

    def read_slots(self) -> list[Slot]:
        """What is on record of each gradient. Waits for the device."""
        overflows, lost, shares = self._record[:, : len(self._names)].tolist()
        return [
            Slot(name, int(n), int(m), share if self._has_shares else None)
            for name, n, m, share in zip(self._names, overflows, lost, shares, strict=True)
        ]

    def settled(self, owners: Iterable[int], others: Collection[int] = ()) -> tuple[Tensor, ...]:
        """What a step of these parameters, by id, reads and writes, beside `others`. It says who owns each slot now: that
        comes from the host, and cannot be recorded, so this is called before a step is recorded, and before each replay."""
        return *self.stores, self._mask(owners), *((self._mask(others),) if others else ())

    @torch.inference_mode(False)  # steps write what is made here anew
    def _mask(self, owners: Iterable[int]) -> Tensor:
        wanted = frozenset(owners)
        if self._is_stale and not recorder.is_recording():
            self._is_stale = False  # first: the garbage collector may release slots at any time
            for others, mask in self._masks.items():
                mask.copy_(_uploaded(self.device, self._belong(others)))
        found = self._masks.get(wanted)
        if found is None:
            if recorder.is_recording():
                raise RuntimeError("a step is recorded whose flags are not settled")
            found = self._masks[wanted] = _uploaded(self.device, self._belong(wanted))
        return found

    def _belong(self, owners: Collection[int]) -> Tensor:
        """For each slot, whether it belongs to one of these parameters; on the host."""
        mask = [owner in owners for owner in self._owners]
        mask += [False] * (len(self._store) - len(mask))
        return torch.tensor(mask)


def _call(flags: weakref.ref[Flags], method: Callable[..., None], *args: Any) -> None:
    known = flags()
    if known is not None:
        method(known, *args)


def _uploaded(device: torch.device, values: Tensor) -> Tensor:
    """A copy there. From pinned memory the host need not wait for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _not_finite(magnitudes: Tensor) -> Tensor:
    """fp32 [], 1 if one of them is not finite, else 0."""
    return torch.logical_not((magnitudes < math.inf).all(), out=torch.empty((), dtype=torch.float32, device=magnitudes.device))


def _finite(magnitudes: Tensor) -> Tensor:
    """Magnitudes, 0 for those that are not finite."""
    return magnitudes.nan_to_num(nan=0.0, posinf=0.0)
