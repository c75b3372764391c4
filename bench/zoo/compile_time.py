"""What fxamp adds to the compile time of Inductor, cold and from warm caches.

Every measurement is a process of its own. Cold, it begins with an empty cache directory; warm, with the one that the cold
process of the same system left. The systems take turns, so that what else the machine does falls on all of them. Timed are
forward and backward of the first step, less those of the second: imports, and Inductor's first use in a process, are paid by
a small program before. Times are CPU seconds of the process and of the C++ compilers that it started, on one thread: on an
idle machine those are the seconds on the clock, on a busy one they are still right.

`own_s` is the time inside fxamp, measured in the same process: the call of the backend and the joint passes, less Inductor. It
is a better figure than a difference of two compile times, which the C++ compiler decides.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

from bench import origin

PEER: Final = "autocast-bf16"
"""The CPU's own autocast: kernels in Python, as for the zoo's errors, would slow its tracing down."""

STOCK: Final = "inductor-fp32"
"""The peer where PyTorch's autocast does not run the model: an operation there refuses the dtypes that it makes."""

OWN: Final = "fxamp-bf16"
SYSTEMS: Final = (PEER, STOCK, OWN)
USUAL: Final = (PEER, OWN)

LARGEST_COLD: Final = 0.05
"""What fxamp may add to a cold start, relative to its peer."""

LARGEST_WARM: Final = 0.20
"""The same for a warm start."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first step of one process."""

    model: str
    system: str
    is_warm: bool
    compile_s: float
    own_s: float
    """Of which inside fxamp; 0 for the others."""
    fx_hits: int
    fx_misses: int
    autograd_hits: int
    autograd_misses: int
    versions: dict[str, str]


def measure_all(
    names: Sequence[str], repetitions: int, path: Path, tell: Callable[[str], object], systems: Sequence[str] = USUAL
) -> None:
    """Cold and warm starts of every system, in turns, `repetitions` times; written to `path` model by model."""
    for name in names:
        found: list[Start] = []
        chosen = list(systems)
        for _ in range(repetitions):
            for i, system in enumerate(chosen):
                try:
                    found += _pair(name, system)
                except RuntimeError:
                    if system != PEER:
                        raise
                    chosen[i] = STOCK
                    found += _pair(name, STOCK)
        write(path, found)
        tell(_line(name, read(path)) if OWN in chosen else f"{name}: {', '.join(chosen)}")


def _pair(name: str, system: str) -> list[Start]:
    """A cold start, and a warm one from what it cached."""
    with tempfile.TemporaryDirectory(prefix="fxamp-zoo-") as cache:
        return [_start(name, system, cache, is_warm=is_warm) for is_warm in (False, True)]


def _start(name: str, system: str, cache: str, *, is_warm: bool) -> Start:
    fixed = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1",
             "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "bench.zoo.compile_time", name, system]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **fixed}, cwd=origin.ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"{name} under {system}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Start(model=name, system=system, is_warm=is_warm, versions=origin.versions(), **found)


# ---- results ------------------------------------------------------------------------------------------------------------
def write(path: Path, starts: Iterable[Start]) -> None:
    """Replaces the rows of the models and systems in `starts`, keeps the others."""
    new = list(starts)
    measured = {(start.model, start.system) for start in new}
    kept = [start for start in read(path) if (start.model, start.system) not in measured]
    path.write_text("".join(json.dumps(asdict(start), sort_keys=True) + "\n" for start in (*kept, *new)))


def read(path: Path) -> list[Start]:
    """The rows of a file; none if there is no file."""
    return [Start(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def peer_of(starts: Sequence[Start]) -> str | None:
    """The system that the starts of one model are compared with; None if none was measured."""
    measured = {start.system for start in starts}
    return next((system for system in (PEER, STOCK) if system in measured), None)


def median_s(starts: Sequence[Start], system: str, *, is_warm: bool, own: bool = False) -> float:
    """Median over repetitions, in seconds."""
    some = [s for s in starts if s.system == system and s.is_warm == is_warm]
    return statistics.median(s.own_s if own else s.compile_s for s in some)


def added(starts: Sequence[Start], *, is_warm: bool) -> float:
    """Time inside fxamp relative to the rest of the same start."""
    total, inside = (median_s(starts, OWN, is_warm=is_warm, own=which) for which in (False, True))
    return inside / (total - inside)


def hits_like_peer(starts: Sequence[Start]) -> bool:
    """Does every warm start of fxamp miss no cache that its peer's hits? Without a peer: no cache at all."""
    misses = {
        system: {(s.fx_misses > 0, s.autograd_misses > 0) for s in starts if s.system == system and s.is_warm}
        for system in SYSTEMS
    }
    peer = peer_of(starts)
    return misses[OWN] <= (misses[peer] if peer else {(False, False)})


def _line(name: str, starts: Sequence[Start]) -> str:
    some = [s for s in starts if s.model == name]
    peer = peer_of(some)
    cells = [f"{name} (peer: fp32)" if peer == STOCK else name]
    for is_warm in (False, True):
        cells += [
            f"{median_s(some, peer, is_warm=is_warm):.2f}" if peer else "-",
            f"{median_s(some, OWN, is_warm=is_warm):.2f}",
            f"{median_s(some, OWN, is_warm=is_warm, own=True):.2f}",
            f"{added(some, is_warm=is_warm):.1%}",
        ]
    cells.append("yes" if hits_like_peer(some) else "no")
    return "| " + " | ".join(cells) + " |"


def markdown(starts: Sequence[Start]) -> str:
    """The committed table."""
    starts = [s for s in starts if s.model in {own.model for own in starts if own.system == OWN}]
    names = sorted({s.model for s in starts})
    versions = sorted({", ".join(f"{k} {v}" for k, v in sorted(s.versions.items())) for s in starts})
    columns = ("architecture", *(f"{kind} {what}" for kind in ("cold", "warm")
               for what in ("peer, s", "fxamp, s", "inside fxamp, s", "added")), "warm start hits like peer's")  # fmt: skip
    head = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    text = (
        f"{'; '.join(versions)}. Median CPU seconds of the first step of fresh processes, cold with an empty cache. The "
        'peer of fxamp in bf16 is `torch.autocast("cpu")` and Inductor, or Inductor alone where that autocast does not run '
        "the model. *added* is the time inside fxamp "
        f"relative to the rest; the targets are {LARGEST_COLD:.0%} cold and {LARGEST_WARM:.0%} warm. Made by "
        "`python -m bench.zoo --compile-time --only NAME ...` (three repetitions, or `--repetitions 1`), with "
        f"`--systems {OWN}` where no peer was measured."
    )
    return "\n".join(
        ["## Compile time", "", text, "", *summary(starts), "", *head, *(_line(name, starts) for name in names), ""]
    )


def summary(starts: Sequence[Start]) -> list[str]:
    """The figures over all architectures: what fxamp adds, and how whole starts compare."""
    by_name: dict[str, list[Start]] = {}
    for start in starts:
        by_name.setdefault(start.model, []).append(start)
    lines: list[str] = []
    for kind, is_warm, limit in (("cold", False, LARGEST_COLD), ("warm", True, LARGEST_WARM)):
        shares = {name: added(some, is_warm=is_warm) for name, some in by_name.items()}
        most = max(shares, key=shares.__getitem__)
        beyond = [f"{name} ({share:.1%})" for name, share in shares.items() if share > limit]
        pairs = [(some, peer) for some in by_name.values() if (peer := peer_of(some))]
        totals = [median_s(s, OWN, is_warm=is_warm) / median_s(s, peer, is_warm=is_warm) for s, peer in pairs]
        mean = f"{statistics.geometric_mean(totals):.2f}" if totals else "-"
        lines.append(
            f"- A {kind} start of {len(shares)} architectures: fxamp adds {statistics.median(shares.values()):.1%} (median), "
            f"{shares[most]:.1%} at most ({most}); beyond {limit:.0%}: {', '.join(beyond) or 'none'}. Whole starts take "
            f"{mean} times the peer's (geometric mean of {len(totals)})."
        )
    strays = [name for name, some in by_name.items() if not hits_like_peer(some)]
    lines.append(f"- Warm starts that miss a cache which the peer's hits: {', '.join(strays) or 'none'}.")
    return lines


# ---- inside the process -------------------------------------------------------------------------------------------------
def cpu_s() -> float:
    """CPU seconds so far, of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class _Clock:
    """Seconds inside fxamp: of the backend, less Inductor, and the joint passes, which Inductor calls."""

    def __init__(self) -> None:
        self.own_s = 0.0
        self._since_s = 0.0
        self._is_own = [False]  # who runs, innermost last: Inductor calls fxamp, and itself

    @contextmanager
    def inside(self, is_own: bool) -> Iterator[None]:
        self._switch()
        self._is_own.append(is_own)
        try:
            yield
        finally:
            self._switch()
            self._is_own.pop()

    def _switch(self) -> None:
        now_s = cpu_s()
        if self._is_own[-1]:
            self.own_s += now_s - self._since_s
        self._since_s = now_s

    def around(self, function: Callable[..., Any], *, is_own: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.inside(is_own):
                return function(*args, **kwargs)

        return timed


@contextmanager
def _watched(clock: _Clock) -> Iterator[None]:
    """While it lasts `clock` counts the time inside fxamp."""
    from torch._inductor import compile_fx as inductor

    from fxamp import Amp, lower

    passes = lower._InductorPass
    with (
        mock.patch.object(Amp, "__call__", clock.around(Amp.__call__, is_own=True)),
        mock.patch.object(inductor, "compile_fx", clock.around(inductor.compile_fx, is_own=False)),
        mock.patch.object(passes, "__call__", clock.around(passes.__call__, is_own=True)),
    ):
        yield


def _one(name: str, system: str) -> dict[str, Any]:
    import contextlib

    import torch
    from torch._dynamo.utils import counters

    from bench.zoo import measure, models
    from fxamp import Amp

    torch.set_num_threads(1)
    compiler, _, precision = system.partition("-")
    backend: Any = Amp(precision=precision) if compiler == "fxamp" else "inductor"
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if compiler == "autocast" else contextlib.nullcontext()
    model, inputs = models.make(models.BY_NAME[name], 0), models.inputs(models.BY_NAME[name], 0)
    warm_up = torch.randn(8, 8, requires_grad=True)
    torch.compile(lambda x: (x * 2).sum())(warm_up).backward()
    counters.clear()

    clock = _Clock()
    compiled = torch.compile(model, backend=backend)

    def run(**given: Any) -> Any:
        with autocast:
            return compiled(**given)

    seconds: list[float] = []
    with _watched(clock) if compiler == "fxamp" else contextlib.nullcontext():
        for _ in range(2):
            start = cpu_s()
            measure.step(model, run, inputs, 0)
            seconds.append(cpu_s() - start)
    return {
        "compile_s": seconds[0] - seconds[1],
        "own_s": clock.own_s,
        "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
        "fx_misses": counters["inductor"]["fxgraph_cache_miss"],
        "autograd_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "autograd_misses": counters["aot_autograd"]["autograd_cache_miss"],
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("name")
    arguments.add_argument("system", choices=SYSTEMS)
    given = arguments.parse_args()
    print(json.dumps(_one(given.name, given.system)))
