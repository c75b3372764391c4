"""Which program of a graph runs: one for each precision, all compiled beforehand, chosen by an assignment on the host."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final

from torch.optim import Optimizer

from fxamp import errors
from fxamp.ladder import MAX_VARIANTS, Assignment, Ladder
from fxamp.run.stepping import untraced

Compiled = Callable[..., Any]


class Switch:
    """The programs of one graph. `run` is the one whose turn it is."""

    def __init__(self, programs: Mapping[Assignment, Compiled], current: Mapping[str, str]) -> None:
        self._programs = {assignment.precisions: program for assignment, program in programs.items()}
        self.regions = tuple(region for region, _ in next(iter(self._programs)))
        self.turn(current)

    def turn(self, current: Mapping[str, str]) -> None:
        """Chooses the program for these precisions, by region."""
        self.run: Compiled = self._programs[tuple((region, current[region]) for region in self.regions)]


class Precisions:
    """The precision of every region, now and from the next step on.

    All graphs change together, between two steps. A step begins with the first graph that is called for training, and ends
    with the step of an attached optimizer; where none is attached nobody knows, and a change comes at once. A backward is
    always that of its own forward: it belongs to the program that ran.
    """

    def __init__(self, ladder: Ladder) -> None:
        self.structure: Final = ladder
        self._current = dict.fromkeys(ladder.names, ladder.rungs[0])
        self._wanted = dict(self._current)
        self.is_kept = False
        """Is what changes now undone later?"""
        self._switches: weakref.WeakSet[Switch] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._is_under_way = False
        self.num_swaps = 0
        """Changes that came into effect."""

    @property
    def ladder(self) -> tuple[str, ...]:
        """All precisions, low to high."""
        return self.structure.rungs

    @property
    def regions(self) -> tuple[str, ...]:
        """The names of what changes on its own; the first is that of everything outside of named regions."""
        return self.structure.names

    def current(self) -> Mapping[str, str]:
        """Region -> the precision that runs now."""
        return dict(self._current)

    def set(self, precision: str, region: str | None = None) -> None:
        """From the next step on. Raises: UnknownOption for a precision off the ladder, or a region that does not exist."""
        self.structure.check(precision)
        for name in self.structure.named(region):
            self._wanted[name] = precision
        if not (self._optimizers and self._is_under_way):
            self._swap()

    def tests_scale(self) -> bool:
        """Does what computes now say anything about the loss scale? Not where fp16, which it is for, rests on the ladder."""
        return "fp16" not in self.ladder or "fp16" in self._current.values()

    def force(self, current: Mapping[str, str]) -> None:
        """At once, whatever runs, for the regions named."""
        self._wanted = {**self._current, **current}
        self._swap()

    def check(self, saved: Mapping[str, str]) -> None:
        """Of a checkpoint. Raises: UnknownOption for a precision off the ladder, or a region that does not exist."""
        for name, precision in saved.items():
            if name not in self._current or precision not in self.ladder:
                raise errors.UnknownOption(
                    f"the state is of a run with region {name!r} in {precision!r}, and here are the regions "
                    f"{', '.join(self.regions)}, on the ladder {', '.join(self.ladder)}",
                    way_out='Make the Amp with the ladder and regions of that run, or leave "precision" out of the state',
                )

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """What is forced inside is undone behind it."""
        before, was_kept = (self._current, self._wanted, self._is_under_way, self.num_swaps), self.is_kept
        self.is_kept = True
        try:
            yield
        finally:
            self.is_kept = was_kept
            self.force(before[0])
            self._current, self._wanted, self._is_under_way, self.num_swaps = before

    @property
    def regions_of_graphs(self) -> tuple[str, ...]:
        """The regions whose precision some graph depends on."""
        used = {region for switch in self._switches for region in switch.regions}
        return tuple(name for name in self.regions if name in used)

    def combinations(self) -> Iterator[Mapping[str, str]]:
        """All precisions that the graphs so far can meet, together. Raises: TooManyVariants for more than `MAX_VARIANTS`."""
        regions = self.regions_of_graphs
        count = len(self.ladder) ** len(regions)
        if count > MAX_VARIANTS:
            raise errors.TooManyVariants(
                f"{len(regions)} regions, each in any of {len(self.ladder)} precisions, make {count} combinations to warm, "
                f"and {MAX_VARIANTS} is the most",
                way_out="Have fewer regions, or a shorter ladder",
            )
        for chosen in itertools.product(self.ladder, repeat=len(regions)):
            yield dict(zip(regions, chosen, strict=True))

    def raise_all(self) -> bool:
        """One rung up, everywhere. False: all of them are at the top already."""
        before = dict(self._wanted)
        for name, precision in before.items():
            self.set(self.structure.above(precision), name)
        return self._wanted != before

    def climb(self) -> bool:
        """One rung up, everywhere, at once. False: all of them are at the top already."""
        before = self._current
        self.force({name: self.structure.above(precision) for name, precision in before.items()})
        return self._current != before

    # ---- steps ----------------------------------------------------------------------------------------------------------
    def end_steps_of(self, optimizer: Optimizer) -> None:
        """From now on, what was asked for meanwhile comes into effect when the optimizer has stepped."""
        if len(self.ladder) == 1 or optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        this = weakref.ref(self)

        def end(*_: Any) -> None:
            known = this()
            if known is not None:
                known.end_step()

        optimizer.register_step_post_hook(untraced(end))

    def end_step(self) -> None:
        """What was asked for meanwhile comes into effect."""
        self._is_under_way = False
        self._swap()

    def _swap(self) -> None:
        if self._wanted == self._current:
            return
        self._current = dict(self._wanted)
        self.num_swaps += 1
        for switch in self._switches:
            switch.turn(self._current)

    # ---- graphs ---------------------------------------------------------------------------------------------------------
    def around(self, programs: Mapping[Assignment, Compiled], *, trains: bool) -> Compiled:
        """A graph that runs the program of its current precisions."""
        if len(programs) == 1:
            return next(iter(programs.values()))
        switch = Switch(programs, self._current)
        self._switches.add(switch)
        if not trains:
            return lambda *args: switch.run(*args)

        def call(*args: Any) -> Any:
            self._is_under_way = True
            return switch.run(*args)

        return call
