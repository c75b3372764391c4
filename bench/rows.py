"""What a run leaves: lines of JSON, each complete in itself, appended as soon as they are known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from bench.measure import Ceilings, Launches, Memory, Work

Status = Literal["ok", "error", "unavailable"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it ran, without anything that names the machine itself."""

    device: str
    """What computes: "NVIDIA H200", or the model of the CPU."""
    device_type: str
    num_cpus: int

    @property
    def slug(self) -> str:
        """For file names: "nvidia-h200", "amd-epyc-2-cpus"."""
        name = self.device if self.device_type != "cpu" else f"{self.device} {self.num_cpus} cpus"
        return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of the command."""

    id: str
    date: str
    command: str
    protocol: Literal["full", "quick"]
    """quick: few repetitions, and compilations that share their caches."""
    machine: Machine
    num_threads: int | None
    """Of a system on the CPU; None: torch's default."""
    versions: dict[str, str]
    commit: str | None
    """Of git; None outside of a checkout."""
    is_dirty: bool
    """Did files differ from that commit?"""
    fxamp_source: str
    """Digest of fxamp's Python files: says what ran, also where there is no git."""
    bench_source: str
    """Digest of those files of the benchmark that a measurement depends on."""


@dataclass(frozen=True, kw_only=True)
class Fxamp:
    """What only fxamp can say of itself."""

    precisions: tuple[str, ...]
    """What its graphs really ran in."""
    num_low_ops: int
    num_own_casts: int
    own_cast_bytes: int | None
    pass_ms: float
    """All passes, on Dynamo's and on the joint graph."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was measured of a system beside its time."""

    losses: tuple[float, ...]
    """One for each of the first steps. Of inference: none."""
    output_error: float | None
    """Of inference: |output - output in eager fp32| / |output in eager fp32|."""
    cold_compile_s: float | None
    """Beyond the steps themselves, with empty caches, in a process that has compiled something else before."""
    num_parallel_builds: int
    """Systems that were compiled at the same time: more than one makes the cold time a bound."""
    memory: Memory | None
    launches: Launches | None
    num_casts: int | None
    """Casts between float formats in all joint graphs, whoever asked for them."""
    cast_bytes: int | None
    rough_step_ms: float
    """Of the first steps behind compilation; for planning, not for comparing."""
    num_graphs: int
    """Graphs that Dynamo captured."""
    num_graph_breaks: int
    num_cuda_graph_skips: int
    fxamp: Fxamp | None
    note: str | None
    num_skipped: int | None = None
    """Of the steps that `losses` are of, those that a loss scaler left out. None: there is none, or nobody asked (rows before
    2026-12-01)."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Steps, in repetitions that took turns with the other systems."""

    step_ms: tuple[float, ...]
    """Per repetition: mean over a block of steps."""
    anchor_ratios: tuple[float, ...]
    """Per repetition: step_ms over that of the anchor in the same repetition."""
    num_steps_per_block: int
    together: tuple[str, ...]
    """The systems that took turns. Several groups mean that not all fitted into memory at once."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One system on one workload."""

    run: Run
    workload: str
    workload_about: str
    workload_kind: str
    unit: str
    num_items_per_step: int
    sweep_over: str | None
    sweep_value: int | None
    work: Work | None
    system: str
    system_about: str
    precision: str
    family: str
    mode: str
    status: Status
    reason: str | None = None
    """Of what is not "ok"."""
    timing: Timing | None = None
    facts: Facts | None = None
    warm_compile_s: float | None = None
    """In the same process after a reset of Dynamo, with the caches on disk."""
    kind: Literal["measurement"] = "measurement"


@dataclass(frozen=True, kw_only=True)
class CeilingsRow:
    """What the device reaches at best."""

    run: Run
    ceilings: Ceilings
    kind: Literal["ceilings"] = "ceilings"


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """CPU time of fxamp's own stages on one graph."""

    run: Run
    num_dynamo_nodes: int
    num_joint_nodes: int
    stage_ms: dict[str, float]
    """By the name of the stage."""
    compile_s: float
    """Of Dynamo and AOTAutograd, up to where the joint passes begin."""
    kind: Literal["pass_time"] = "pass_time"


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """What calling a compiled graph costs the host."""

    run: Run
    what: str
    inductor_us: tuple[float, ...]
    """Per repetition: mean time of a call."""
    fxamp_us: tuple[float, ...]
    kind: Literal["dispatch"] = "dispatch"


@dataclass(frozen=True, kw_only=True)
class Swap:
    """What a change of precision costs the calls of something that was compiled in two."""

    run: Run
    what: str
    kept_us: tuple[float, ...]
    """Per repetition: mean time of a call, half of them in either precision, with one change between the halves."""
    swapped_us: tuple[float, ...]
    """The same calls, with a change before each."""
    kind: Literal["swap"] = "swap"


@dataclass(frozen=True, kw_only=True)
class VariantMemory:
    """What a train step holds that is compiled in several combinations of precisions."""

    run: Run
    num_variants: int
    num_parameters: int
    host_bytes: int | None
    """Resident memory more than before it was made; None where the system does not tell."""
    device_bytes: int | None
    """The same of a GPU, reserved by the allocator and by CUDA graphs; None without one."""
    compile_s: float
    """Of all variants together, with whatever torch's caches had."""
    kind: Literal["variant_memory"] = "variant_memory"


@dataclass(frozen=True, kw_only=True)
class ScheduledRun:
    """One training of `bench.scheduler`."""

    run: Run
    workload: str
    system: str
    system_about: str
    """What makes its precision go up."""
    seed: int
    num_steps: int
    num_interruptions: int
    """Steps that were skipped, or whose loss was inf or NaN."""
    num_high_steps: int
    num_changes: int
    """Of the precision."""
    heldout_loss: float
    """In nats per byte, computed in fp32."""
    step_ms: float
    """Median."""
    kind: Literal["scheduled_run"] = "scheduled_run"


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """One system in one job of `bench.distributed`, whose processes have a device each."""

    run: Run
    workload: str
    workload_about: str
    strategy: str
    """"ddp", "fsdp2", or "alone": each process by itself, which trains what it has in the others."""
    system: str
    system_about: str
    num_ranks: int
    num_items_per_rank: int
    """In a step."""
    unit: str
    status: Status
    reason: str | None
    step_ms: tuple[float, ...]
    """Per repetition: mean over a block of steps, on the slowest rank."""
    memory: Memory | None
    """Of a step beyond what was there before the system was built, on the rank that takes most."""
    compile_s: float | None
    """The first steps, with whatever torch's caches had."""
    losses: tuple[float, ...]
    """Of the first steps, mean over ranks."""
    note: str | None
    kind: Literal["distributed"] = "distributed"


Row = Measurement | CeilingsRow | PassTime | Dispatch | Swap | VariantMemory | ScheduledRun | Distributed


_KINDS: Final[tuple[type[Row], ...]] = (
    Measurement, CeilingsRow, PassTime, Dispatch, Swap, VariantMemory, ScheduledRun, Distributed,
)  # fmt: skip


# ---- JSON ------------------------------------------------------------------------------------------------------------
def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds lines to a file, which is made if need be. Takes off what a killed run left of a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if not old.endswith("\n"):
        path.write_text(old[: old.rfind("\n") + 1], encoding="utf-8")
    text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read(path: Path) -> Iterator[Row]:
    """The rows of a file, in order; none if there is no such file. Leaves out what a killed run left of a line."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            data = json.loads(line)
            (cls,) = (c for c in _KINDS if c.kind == data["kind"])
            yield load(cls, data)


def load(hint: Any, value: Any) -> Any:
    """A value of JSON as what a type hint says: dataclasses, tuples, dicts and unions with None, nested."""
    if get_origin(hint) in (Union, UnionType):
        if value is None:
            return None
        (hint,) = (h for h in get_args(hint) if h is not NoneType)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return hint(**{name: load(hints[name], item) for name, item in value.items()})
    if get_origin(hint) is dict:
        return {name: load(get_args(hint)[1], item) for name, item in value.items()}
    if get_origin(hint) is tuple:
        return tuple(load(get_args(hint)[0], item) for item in value)
    return value
