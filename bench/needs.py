"""What building a workload will take of memory and time, going by what was built before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.rows import Measurement, Row
from bench.systems import ANCHOR

MEMORY_MARGIN: Final = 1.4
"""A system is built beside others if this many times what it needs is free: compiling takes more than running, and what was
measured of others takes less than fp32. Who runs out of memory nevertheless gets another try with less company."""

UNKNOWN_SHARE: Final = 0.25
"""Of the free memory, for a system of which nothing is known. As above: a wrong guess costs one try."""

CROWDING: Final = 1.3
"""How much longer a build may take beside others than alone."""


@dataclass
class Needs:
    """Of one workload on one machine, by system. What is not known of a system is taken from the others, the anchor first."""

    reserved_bytes: dict[str, int] = field(default_factory=dict)
    """The peak of a step, as the allocator has it."""
    returned_bytes: dict[str, int] = field(default_factory=dict)
    """What a system that was built gives back behind each turn, and takes again for the next."""
    build_s: dict[str, float] = field(default_factory=dict)
    """From the question to the answer, as long as it took alone or beside others."""

    def num_that_fit(self, names: Sequence[str], free_bytes: int | None, num_jobs: int) -> int:
        """How many of `names`, from the first on, may be built at the same time."""
        left_bytes = float("inf") if free_bytes is None else free_bytes
        fitting = 0
        for name in names[:num_jobs]:
            left_bytes -= self._bytes(name, free_bytes or 0)
            if left_bytes < 0:
                break
            fitting += 1
        return fitting

    def time_s(self, names: Sequence[str], unknown_s: float) -> float:
        """How long it takes to build systems at the same time; `unknown_s` if nothing is known of the workload."""
        crowding = CROWDING if len(names) > 1 else 1.0
        anchor_s = self.build_s.get(ANCHOR, unknown_s)
        return crowding * max(self.build_s.get(name, anchor_s) for name in names)

    def _bytes(self, name: str, free_bytes: int) -> float:
        if not self.reserved_bytes:
            return UNKNOWN_SHARE * free_bytes
        return MEMORY_MARGIN * self.reserved_bytes.get(name, max(self.reserved_bytes.values()))


def on_record(rows: Iterable[Row], workload: str, device: str) -> Needs:
    """What rows of earlier runs say, whichever source and versions they are of: later ones replace earlier ones."""
    needs = Needs()
    for row in rows:
        if isinstance(row, Measurement) and (row.workload, row.run.machine.device) == (workload, device) and row.facts:
            if row.facts.memory is not None:
                needs.reserved_bytes[row.system] = row.facts.memory.reserved_bytes
            if row.facts.cold_compile_s is not None:
                needs.build_s[row.system] = row.facts.cold_compile_s
    return needs
