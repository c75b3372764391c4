"""The precisions that a run changes between, the parts of the model that change on their own, and who runs in which."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from fxamp import errors, formats
from fxamp.policy import Rule

REST: Final = "model"
"""The region of everything that no named region holds: of the whole model, if there are none."""

MAX_VARIANTS: Final = 16
"""Programs of one graph. Each is compiled as a whole, and its time is paid before the first step."""

_ORDER: Final = ("fp8", ("fp16", "bf16"), "tf32", ("fp32", "auto"))
"""Low to high. fp16 and bf16 stand side by side: one has the range, the other the digits."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A precision for each region of a graph."""

    precisions: tuple[tuple[str, str], ...]
    """(region, precision); later regions win where two hold the same module. `REST` comes first."""

    def __str__(self) -> str:
        """ "fp16", or "model=fp16, early=fp32" where regions differ."""
        different = dict.fromkeys(precision for _, precision in self.precisions)
        return next(iter(different)) if len(different) == 1 else ", ".join(f"{r}={p}" for r, p in self.precisions)

    def is_of(self, current: Mapping[str, str]) -> bool:
        """Are these the precisions of its regions?"""
        return all(current[region] == precision for region, precision in self.precisions)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Precisions from low to high, and the regions that climb on their own.

    Raises, when built: InvalidOption for rungs out of order, given twice, or that regions cannot have.
    """

    rungs: tuple[str, ...]
    regions: tuple[tuple[str, str], ...] = ()
    """(name, glob of module paths), beside `REST`."""

    def __post_init__(self) -> None:
        ranks = [_rank(rung) for rung in self.rungs]
        if len(set(self.rungs)) < len(self.rungs) or ranks != sorted(ranks):
            raise errors.InvalidOption(
                f"the ladder {self.rungs} does not go up",
                way_out="Name each precision once, the lowest first: ('fp16', 'fp32')",
            )
        if self.regions and "tf32" in self.rungs:
            raise errors.InvalidOption(
                "tf32 is a switch for a whole graph, and regions part it",
                way_out="Leave the regions or tf32 out",
            )
        if REST in dict(self.regions):
            raise errors.InvalidOption(
                f"a region is called {REST!r}", way_out="That is the name of what no region holds: choose another"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The regions by name, `REST` first."""
        return (REST, *dict(self.regions))

    def check(self, precision: str) -> None:
        """Raises UnknownOption for a precision that is no rung."""
        if precision not in self.rungs:
            raise errors.UnknownOption(
                f"precision {precision!r} is not on the ladder {self.rungs}",
                way_out="All that a run changes between is compiled ahead: name it in ladder=(...) when the Amp is made",
            )

    def named(self, region: str | None) -> tuple[str, ...]:
        """The regions that a user's name, or glob, means; all of them for None. Raises: UnknownOption."""
        if region is None:
            return self.names
        globs = {glob: name for name, glob in self.regions}
        name = globs.get(region, region)
        if name not in self.names:
            raise errors.unknown("region", region, (*self.names, *globs))
        return (name,)

    def above(self, precision: str) -> str:
        """The next rung up; the highest has none above, and stays."""
        return self.rungs[min(self.rungs.index(precision) + 1, len(self.rungs) - 1)]

    # ---- a graph ----------------------------------------------------------------------------------------------------------
    def region_of(self, module: str) -> str:
        """The region of a module, by its path: the last one that holds it."""
        return next((name for name, rule in reversed(self._rules) if rule.matches("", module)), REST)

    def number_of(self, module: str) -> int:
        """Where the region of a module stands in `names`."""
        return self.names.index(self.region_of(module))

    def assignments(self, modules: Iterable[str]) -> tuple[Assignment, ...]:
        """All that can occur in a graph with operations in these modules; the first has the lowest precision everywhere.

        Raises: TooManyVariants if there are more than `MAX_VARIANTS`.
        """
        present = {self.region_of(module) for module in set(modules)} or {REST}
        here = [name for name in self.names if name in present]
        count = len(self.rungs) ** len(here)
        if count > MAX_VARIANTS:
            raise errors.TooManyVariants(
                f"{len(here)} regions of one graph, each in any of {len(self.rungs)} precisions, make {count} programs, and "
                f"{MAX_VARIANTS} is the most",
                way_out="Have fewer regions, or a shorter ladder; regions that may change together can be one",
            )
        choices = itertools.product(self.rungs, repeat=len(here))
        return tuple(Assignment(precisions=tuple(zip(here, chosen, strict=True))) for chosen in choices)

    def parts(self, assignment: Assignment, resolved: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
        """(the lowest precision of an assignment, (glob, precision) of each region if they differ, later ones first to be
        asked). `resolved`: what a rung is on the device."""
        used = [rung for rung in self.rungs if rung in dict(assignment.precisions).values()]
        if len(used) == 1:
            return resolved[used[0]], ()
        globs = {REST: "*", **dict(self.regions)}
        return resolved[used[0]], tuple((globs[region], resolved[precision]) for region, precision in assignment.precisions)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The regions as rules about modules, for those who ask whether a graph knows them."""
        return tuple(rule for _, rule in self._rules)

    @property
    def _rules(self) -> list[tuple[str, Rule]]:
        return [(name, Rule(kind="module", pattern=glob, precision="low")) for name, glob in self.regions]


def _rank(rung: str) -> int:
    known = [name for names in _ORDER for name in ((names,) if isinstance(names, str) else names)]
    assert set(known) == set(formats.PRECISIONS)
    if rung not in known:
        raise errors.unknown("precision in the ladder", rung, known)
    return next(i for i, names in enumerate(_ORDER) if rung == names or (isinstance(names, tuple) and rung in names))
