"""Launches of a recorded step that need not wait for one another: branches of its CUDA graph.

Small kernels leave most of a GPU idle, and a step of them takes as long as its longest chain, if the others run beside it: the
gradient of a weight is read by nothing but the update, while the next layer waits for that of the input. What is recorded on
one stream is one chain, whoever reads what.

A compiled graph is watched once, in a run as it is (`Watched`): who reads and writes which memory. From that a plan is made
(`plan_of`), and where a step is recorded, the graph's launches follow it (`Planned`). They stay the same launches, with the
same numbers in them; each waits for those that it shares memory with.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._inductor.runtime.hints import HeuristicType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fxamp import tf32
from fxamp.run import recorder
from fxamp.run.writes import address

NUM_BRANCHES: Final = 3
"""Beside the main one. Operations have the first, kernels of Triton's the others: for each stream that it is called on, the
matrix library keeps a workspace (32 MiB on an H200)."""

CHUNK: Final = 6
"""Launches that part from the main branch together. To part takes time, but the first of them waits for the last."""

MIN_SLACK: Final = 2
"""A launch goes into a branch if the graph takes no longer where it comes this many launches later."""

MIN_MOVED: Final = 8
"""For fewer launches in branches a graph has none."""

MAX_BYTES: Final = 8 << 20
"""That a launch in a branch may read and write. Larger ones fill a GPU by themselves; a graph of which half are has no
branches."""

MAX_HELD_BYTES: Final = 256 << 20
"""That the branches of a graph keep from being used again, until they meet."""

_MAY_MOVE: Final = frozenset({"aten::mm.out", "aten::addmm.out", "aten::bmm.out", "aten::baddbmm.out", "aten::_scaled_mm.out"})
"""Operations that write where they are told, and make nothing else that stays."""


class Launch(NamedTuple):
    """A kernel, or an operation of some kernels."""

    name: str
    reads: frozenset[int]
    writes: frozenset[int]
    """Pieces of memory, by whatever tells them apart."""
    num_bytes: int
    may_move: bool


# ---- the plan -------------------------------------------------------------------------------------------------------------
class Plan(NamedTuple):
    """Of a graph's launches, in order."""

    names: tuple[str, ...]
    branches: tuple[int, ...]
    """The branch of each; 0 is the main one."""


def plan_of(launches: Sequence[Launch]) -> Plan | None:
    """Which launches go into branches; None where that is not worth it.

    Those that have slack beside the longest chain do, each behind what it needs, if nothing else has come there since, or
    into the branch that is done first.
    """
    if not launches or statistics.median(launch.num_bytes for launch in launches) > MAX_BYTES:
        return None
    needs = needs_of(launches)
    before, behind = [1] * len(launches), [1] * len(launches)  # of the longest chains that end, and begin, with each
    for i, need in enumerate(needs):
        before[i] += max((before[j] for j in need), default=0)
    for i in reversed(range(len(needs))):
        for j in needs[i]:
            behind[j] = max(behind[j], behind[i] + 1)
    longest = max(before)
    branches, ends = list[int](), list[int]()
    busy_until, last = [0] * (NUM_BRANCHES + 1), [-1] * (NUM_BRANCHES + 1)
    for i, launch in enumerate(launches):
        slack = longest - (before[i] + behind[i] - 1)
        branch, start = 0, max((ends[j] for j in needs[i]), default=0)
        if launch.may_move and slack >= MIN_SLACK and launch.num_bytes <= MAX_BYTES:
            beside = (1,) if launch.name in _MAY_MOVE else range(2, NUM_BRANCHES + 1)
            behind_a_need = [b for b in beside if last[b] in needs[i]]
            branch = min(behind_a_need or beside, key=busy_until.__getitem__)
            start = max(start, busy_until[0])  # the main branch tells it when
        busy_until[branch] = max(busy_until[branch], start) + 1
        last[branch] = i
        branches.append(branch)
        ends.append(busy_until[branch])
    if sum(map(bool, branches)) < MIN_MOVED:
        return None
    return Plan(tuple(launch.name for launch in launches), tuple(branches))


def needs_of(launches: Sequence[Launch]) -> list[frozenset[int]]:
    """For each launch the earlier ones it has to wait for: who wrote what it reads, who read or wrote what it writes."""
    writer, readers = dict[int, int](), defaultdict[int, list[int]](list)
    needs = list[frozenset[int]]()
    for i, launch in enumerate(launches):
        need = {writer[piece] for piece in launch.reads | launch.writes if piece in writer}
        need.update(itertools.chain.from_iterable(readers[piece] for piece in launch.writes))
        needs.append(frozenset(need))
        for piece in launch.reads:
            readers[piece].append(i)
        for piece in launch.writes:
            writer[piece], readers[piece] = i, []
    return needs


# ---- a run of a graph -----------------------------------------------------------------------------------------------------
class Given(NamedTuple):
    """A launch that a graph asks for."""

    name: str
    tensors: Sequence[Tensor]
    """All that it reads or writes."""
    written: Sequence[Tensor]
    may_move: bool
    """Does it make nothing but what it writes?"""
    is_known: bool
    """Is that all that it reads and writes?"""
    go: Callable[[], Any]

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)


class Watched:
    """A run whose launches are listed."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._pieces: dict[int, tuple[StorageWeakRef, int]] = {}
        self._numbers = itertools.count()

    def launch(self, given: Given) -> Any:
        """Launches it, and returns what it makes."""
        reads, writes = (frozenset(map(self._piece, some)) for some in (given.tensors, given.written))
        self.launches.append(Launch(given.name, reads, writes, given.num_bytes(), given.may_move))
        return given.go()

    def _piece(self, x: Tensor) -> int:
        """A number for its memory: another one for what comes to lie there when that has been given back."""
        storage = x.untyped_storage()
        known = self._pieces.get(storage._cdata)
        if known is None or known[0].expired():
            known = self._pieces[storage._cdata] = StorageWeakRef(storage), next(self._numbers)
        return known[1]


class Streams(Protocol):
    """Those of a device that a graph runs on, by branch."""

    def mark(self, branch: int) -> Any:
        """What has been launched there until now."""
        ...

    def wait(self, branch: int, mark: Any) -> None:
        """What is launched there from now on comes behind it."""
        ...

    def on(self, branch: int) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside goes there."""
        ...


class _Mark(NamedTuple):
    """A place in a branch."""

    branch: int
    num_before: int
    """Launches of the branch."""
    event: Any
    seen: dict[int, int]
    """How many launches of each other branch come before it."""


class _PutOff(NamedTuple):
    given: Given
    branch: int
    touches: Mapping[int, bool]


class Planned:
    """A run whose launches follow a plan, as long as they are those that it was made for; others go into the main branch.

    Launches for branches are put off until there are `CHUNK` of them, or one in the main branch shares memory with them. Then
    they wait for all that the main branch has been told. What they read and write is held until the branches meet, so that no
    memory that was given back is ever that of a launch which may still run. A launch waits for those in other branches
    that it shares memory with, if one of the two writes.
    """

    def __init__(self, plan: Plan, streams: Streams) -> None:
        self._plan, self._streams = plan, streams
        self._num_given = 0
        self._follows = True
        self._put_off: list[_PutOff] = []
        self._touched: dict[int, dict[tuple[int, bool], _Mark]] = defaultdict(dict)
        """By address of the memory: (branch, does it write?) -> the last launch of these that touches it."""
        self._held: dict[int, torch.UntypedStorage] = {}
        self._num_held_bytes = 0
        self._counts = [0] * (NUM_BRANCHES + 1)
        self._seen: list[dict[int, int]] = [{} for _ in self._counts]
        """For each branch, how many launches of each other come before whatever it is told next."""
        self._marks: dict[int, _Mark] = {}

    def launch(self, given: Given) -> Any:
        """Launches it, now or later, and returns what it makes."""
        i, plan = self._num_given, self._plan
        self._num_given += 1
        self._follows = self._follows and i < len(plan.names) and plan.names[i] == given.name
        if not given.is_known:
            self.meet()
        touches = _touches(given)
        if self._follows and given.may_move and given.is_known and plan.branches[i]:
            self._put_off.append(_PutOff(given, plan.branches[i], touches))
            if len(self._put_off) == CHUNK:
                self._part()
            return given.written[0]
        if any(
            where in touches and (touches[where] or writes)
            for put in self._put_off
            for where, writes in put.touches.items()
        ):
            self._part()
        self._wait_for_sharers(0, touches)
        made = given.go()
        self._counts[0] += 1
        return made

    def break_off(self) -> None:
        """After an error, for whoever ends the recording: it has to find all streams joined."""
        self._put_off.clear()
        with contextlib.suppress(RuntimeError):
            self._join()

    def meet(self) -> None:
        """What the main branch is told next comes behind all others."""
        self._part()
        self._join()

    def _join(self) -> None:
        self._counts[0] += 1  # what parts later has to wait for what the main branch waits for here
        for branch, count in enumerate(self._counts):
            if branch and count:
                self._wait(0, self._mark(branch))
        self._touched.clear()
        self._held.clear()
        self._num_held_bytes = 0

    def _part(self) -> None:
        for given, branch, touches in self._put_off:
            self._wait(branch, self._mark(0))
            self._wait_for_sharers(branch, touches)
            self._counts[branch] += 1  # if it fails halfway, something may be there to wait for
            with self._streams.on(branch):
                given.go()
            mark = self._mark(branch)
            for where, writes in touches.items():
                self._touched[where][branch, writes] = mark
            self._hold(given.tensors)
        self._put_off.clear()
        if self._num_held_bytes > MAX_HELD_BYTES:
            self._join()

    def _wait_for_sharers(self, branch: int, touches: Mapping[int, bool]) -> None:
        for where, writes in touches.items():
            for (_, wrote), mark in self._touched.get(where, {}).items():
                if writes or wrote:
                    self._wait(branch, mark)

    def _hold(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            if address(x) not in self._held:
                storage = self._held[address(x)] = x.untyped_storage()
                self._num_held_bytes += storage.nbytes()

    def _mark(self, branch: int) -> _Mark:
        """Where a branch is now."""
        mark = self._marks.get(branch)
        if mark is None or mark.num_before != self._counts[branch]:
            mark = _Mark(branch, self._counts[branch], self._streams.mark(branch), dict(self._seen[branch]))
            self._marks[branch] = mark
        return mark

    def _wait(self, branch: int, mark: _Mark) -> None:
        seen = self._seen[branch]
        if branch == mark.branch or seen.get(mark.branch, -1) >= mark.num_before:
            return
        self._streams.wait(branch, mark.event)
        for other, count in {**mark.seen, mark.branch: mark.num_before}.items():
            seen[other] = max(seen.get(other, -1), count)


def _touches(given: Given) -> dict[int, bool]:
    """Address of the memory -> is it written?"""
    return dict.fromkeys(map(address, given.tensors), False) | dict.fromkeys(map(address, given.written), True)


# ---- what Inductor compiles -----------------------------------------------------------------------------------------------
class Branches:
    """Of the graphs that Inductor has compiled for a step."""

    def __init__(self) -> None:
        self._plans: dict[int, tuple[Any, Plan]] = {}
        """By id of the compiled graph, which is held."""

    def num_moved(self) -> int:
        """Launches that plans have in branches, of all graphs."""
        return sum(map(bool, itertools.chain.from_iterable(plan.branches for _, plan in self._plans.values())))

    def forget(self) -> None:
        """Drops all plans."""
        self._plans.clear()

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Makes a plan for each graph that runs inside."""

        @contextlib.contextmanager
        def watch(code: Any) -> Generator[Watched]:
            watched = Watched()
            yield watched
            plan = plan_of(watched.launches)
            self._plans.pop(id(code), None)
            if plan is not None:
                self._plans[id(code)] = code, plan

        ours = _stream_of_now()  # where autograd runs the backward too; what others call meanwhile is theirs

        def run_of(code: Any) -> contextlib.AbstractContextManager[Watched] | None:
            return watch(code) if _stream_of_now() == ours and _launches_are_seen(code) else None

        with _intercepted(run_of):
            yield

    @contextlib.contextmanager
    def followed(self) -> Generator[None]:
        """Graphs that run inside follow their plans."""

        @contextlib.contextmanager
        def follow(plan: Plan) -> Generator[Planned]:
            run = Planned(plan, CudaStreams(torch.cuda.current_stream()))
            try:
                yield run
                run.meet()
            except BaseException:
                run.break_off()
                raise

        def run_of(code: Any) -> contextlib.AbstractContextManager[Planned] | None:
            known = self._plans.get(id(code))
            return follow(known[1]) if known is not None and recorder.is_recording() else None  # another thread may run it too

        with _intercepted(run_of):
            yield


def _stream_of_now() -> torch.cuda.Stream | None:
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


class CudaStreams:
    """The stream of now, and those beside it."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._all = (main, *_beside(main.device))

    def mark(self, branch: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._all[branch])
        return event

    def wait(self, branch: int, mark: torch.cuda.Event) -> None:
        self._all[branch].wait_event(mark)

    def on(self, branch: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._all[branch])


@functools.cache
def _beside(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(NUM_BRANCHES))


@functools.cache
def _lock() -> threading.RLock:
    """Of what Inductor's classes do: one recording at a time."""
    return threading.RLock()


def _launches_are_seen(code: Any) -> bool:
    """Is each launch of a compiled graph one of Triton's, or an operation's, and may it go to another stream?"""
    source = getattr(code, "source_code", "") or ""
    makers = set(re.findall(r"async_compile\.(\w+)\(", source))
    # Streams of the user; and waits of programmatic launches, generated for the order that launches have on one stream.
    is_ordered = any(word in source for word in ("get_external_object_by_index", "torch.ops.streams.", "gdc_wait"))
    return "def call(" in source and makers <= {"triton", "wait"} and not is_ordered


def _overlap(inputs: Sequence[Any]) -> bool:
    """Do inputs share memory that does not look the same, as what came by DLPack may?"""
    ends = dict[int, int]()
    for x in (x for x in inputs if isinstance(x, Tensor)):
        start = address(x)
        ends[start] = max(ends.get(start, 0), start + x.untyped_storage().nbytes())
    spans = sorted(ends.items())
    furthest = itertools.accumulate((end for _, end in spans), max)
    return any(end > start for end, (start, _) in zip(furthest, spans[1:], strict=False))


_Run = Watched | Planned


class _Here(threading.local):
    """What a thread launches goes through this run: a backward runs in a thread of autograd's."""

    run: _Run | None = None

    @contextlib.contextmanager
    def through(self, run: _Run | None) -> Generator[None]:
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before


class _Operations(TorchDispatchMode):
    """Operations that are launched inside, for a run."""

    supports_higher_order_operators = True

    def __init__(self, run: _Run, here: _Here) -> None:
        super().__init__()
        self._run, self._here = run, here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "is_view", False):
            return func(*args, **kwargs)
        is_tf32 = tf32.is_on("matmul")

        def go() -> Any:
            # It may be launched later, from whatever is launched then; and its own launches are no business of the run.
            switch = tf32.enabled() if is_tf32 and not tf32.is_on("matmul") else contextlib.nullcontext()
            with _disable_current_modes(), self._here.through(None), switch:
                return func(*args, **kwargs)

        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator
            return self._run.launch(Given(str(func), (), (), False, False, go))
        named = itertools.chain(zip((a.name for a in schema.arguments), args, strict=False), kwargs.items())
        is_written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
        tensors, written = list[Tensor](), list[Tensor]()
        for name, value in named:
            found = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
            tensors += found
            written += found if is_written[name] else []
        name = f"{schema.name}.{schema.overload_name}"
        return self._run.launch(Given(name, tensors, written, name in _MAY_MOVE, name.startswith("aten::"), go))


@contextlib.contextmanager
def _intercepted(run_of: Callable[[Any], contextlib.AbstractContextManager[_Run] | None]) -> Generator[None]:
    """Inside, what a compiled graph launches goes through its run; None: as always."""
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with _lock():
        yield from _patched(CompiledFxGraph, CachingAutotuner, run_of)


def _patched(
    graphs: Any, kernels: Any, run_of: Callable[[Any], contextlib.AbstractContextManager[_Run] | None]
) -> Generator[None]:
    here, call_graph, run_kernel = _Here(), graphs.__call__, kernels.run

    def call(code: Any, inputs: Any) -> Any:
        context = None if _overlap(inputs) else run_of(code)
        if context is None:
            return call_graph(code, inputs)
        with context as run, _Operations(run, here), here.through(run):
            return call_graph(code, inputs)

    def run(kernel: Any, *args: Any, stream: Any, **kwargs: Any) -> Any:
        if here.run is None:
            return run_kernel(kernel, *args, stream=stream, **kwargs)

        def go() -> Any:
            with _disable_current_modes():  # the first run may try several forms of it
                return run_kernel(kernel, *args, stream=torch.cuda.current_stream().cuda_stream, **kwargs)

        return here.run.launch(_given(kernel, args, kwargs, go))

    graphs.__call__, kernels.run = call, run
    try:
        yield
    finally:
        graphs.__call__, kernels.run = call_graph, run_kernel


def _given(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any], go: Callable[[], Any]) -> Given:
    """A kernel of Triton's as a launch. What Inductor generates calls `in_ptr` what it only reads, or says that it writes it;
    templates may write through any pointer, and of kernels of the user's nobody knows where their pointers lead."""
    names = [name for name, kind in kernel.triton_meta["signature"].items() if kind != "constexpr"]
    mutated = set(kernel.mutated_arg_names)
    is_clear = len(names) == len(args) and not kwargs and kernel.heuristic_type is not HeuristicType.TEMPLATE
    pointers = [(name if is_clear else "", x) for name, x in zip(names if is_clear else args, args, strict=True)]
    tensors = [x for _, x in pointers if isinstance(x, Tensor)]
    written = [x for name, x in pointers if isinstance(x, Tensor) and (name in mutated or not name.startswith("in_ptr"))]
    is_known = not kwargs and not kernel.custom_kernel and all(x is None or isinstance(x, (Tensor, int, float)) for x in args)
    return Given(kernel.fn.__name__, tensors, written, is_known and bool(written), is_known, go)
