"""What a run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Config:
    """One call of the command."""

    device_type: Literal["cpu", "cuda"]
    protocol: Literal["full", "quick"]
    workloads: tuple[str, ...]
    systems: tuple[str, ...]
    num_repetitions: int
    """How often each system gets its turn."""
    block_ms: float
    """How long a turn lasts, about."""
    num_jobs: int
    """Systems that are compiled at the same time."""
    num_threads: int | None
    """Of a system on the CPU; None is torch's default, all cores."""
    compiles_again: bool
    """Is every system compiled a second time, from warm caches?"""
    build_timeout_s: float
    budget_s: float | None
    """What cannot be done within this long is not begun; what is built is still timed and written."""
    is_fresh: bool
    """Measure again what the results have already?"""
    retries_errors: bool
    """Measure again what the results have as an error?"""
    reuses_peers: bool
    """Do results of peers count although the source of fxamp or of the benchmark has changed since?"""
    does_scaling: bool
    results: Path
    record: Path
    """Folder of earlier results, which say what a workload takes of memory and time."""
    command: str
    commit: str | None
    """Of git, where there is none to ask."""

    @property
    def measures_compile(self) -> bool:
        """Systems of a quick run share their caches: that saves time, and leaves no compile time worth reporting."""
        return self.protocol == "full"
