"""One workload: its systems are built in groups, take turns, and are profiled behind all timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bench import systems
from bench.crew import Crew
from bench.measure import Launches
from bench.needs import Needs
from bench.rows import Timing
from bench.systems import ANCHOR
from bench.worker import NUM_UNTIMED_STEPS, Reply
from bench.workloads import Workload

MAX_STEPS_PER_BLOCK: Final = 2000

MIN_BUILD_S: Final = 20.0
"""With less time than this left, nothing is begun of which it is not known how long it takes."""

MIN_REPETITIONS: Final = 3
"""Where time runs out, turns end behind this many: fewer have no spread worth the name."""


@dataclass(kw_only=True)
class Outcome:
    """What is known of a workload so far, by system."""

    replies: dict[str, Reply] = field(default_factory=dict)
    """What building answered, or the first error behind it."""
    turns: dict[str, Timing] = field(default_factory=dict)
    launches: dict[str, Launches | None] = field(default_factory=dict)
    warm_compile_s: dict[str, float | None] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    crowded_out: set[str] = field(default_factory=set)
    """Systems that once ran out of memory in company."""
    alone: list[str] = field(default_factory=list)
    """Those of them that wait for a group of their own, beside the anchor only."""

    def crowd_out(self, name: str, reply: Reply) -> bool:
        """Puts a system off that lacked memory for the first time. Returns whether it did."""
        if not reply.is_out_of_memory or name in self.crowded_out or name == ANCHOR:
            return False
        self.crowded_out.add(name)
        self.alone.append(name)
        self.replies.pop(name, None)
        return True

    def is_built(self, name: str) -> bool:
        return name in self.replies and self.replies[name].status == "ok"

    def finished(self) -> list[str]:
        """Systems with a time, and those that will never have one, less those whose rows are written."""
        return [n for n, r in self.replies.items() if n not in self.written and (r.status != "ok" or n in self.turns)]


def rotated(names: Sequence[str], repetition: int) -> list[str]:
    """The order of a repetition: who begins moves on by one each time."""
    first = repetition % len(names) if names else 0
    return [*names[first:], *names[:first]]


def tunes(name: str) -> bool:
    """Does a system time kernels on the device while it compiles? Then nothing else may run there."""
    return systems.all_systems()[name].mode == "max-autotune"


def _built(reply: Reply) -> str:
    if reply.status != "ok":
        return str(reply.reason)
    compile_s = reply.value.cold_compile_s
    return "ready" if compile_s is None else f"compiled in {compile_s:.1f} s"


class Contest:
    """Systems on a workload, beside the anchor."""

    def __init__(self, crew: Crew, workload: Workload, needs: Needs) -> None:
        self.crew, self.config, self.workload = crew, crew.config, workload
        self.outcome, self.needs = Outcome(), needs

    def build_and_time(self, names: Sequence[str]) -> Generator[None]:
        """The anchor stays; the others come in groups, as many at once as the memory holds. Yields behind each group."""
        # The anchor tells how much memory the others need. Those that tune kernels come last, and one by one.
        todo = [ANCHOR, *sorted((n for n in names if n != ANCHOR), key=tunes)]
        while todo or self.outcome.alone:
            if not todo:
                todo, self.outcome.alone = self.outcome.alone, []
            group = self._build_group(todo)
            present = [n for n in dict.fromkeys((ANCHOR, *group)) if self.outcome.is_built(n)]
            self._take_turns(present)
            self._finish([n for n in group if n != ANCHOR])
            yield
        self._finish([ANCHOR])  # in every group: nothing but its time is measured before the last is timed

    # ---- time --------------------------------------------------------------------------------------------------------
    def has_time_for(self, names: Sequence[str], beside: Sequence[str] = ()) -> bool:
        """Can systems be built, and take turns with those they come beside?"""
        return self.crew.left_s() >= self.needs.time_s(names, MIN_BUILD_S) + self._turns_s((*beside, *names))

    def _turns_s(self, names: Iterable[str]) -> float:
        """What the fewest turns of systems will need, about; those that are not yet built count like the anchor."""
        num_untimed = NUM_UNTIMED_STEPS[self.config.device_type]
        known_ms = {n: r.value.rough_step_ms for n, r in self.outcome.replies.items() if r.status == "ok"}
        steps_ms = [known_ms.get(name, known_ms.get(ANCHOR, 0.0)) for name in names]
        turn_ms = sum(max(self.config.block_ms, step_ms) + num_untimed * step_ms for step_ms in steps_ms)
        return (min(MIN_REPETITIONS, self.config.num_repetitions) + 1) * turn_ms / 1e3

    # ---- building ----------------------------------------------------------------------------------------------------
    def _build_group(self, todo: list[str]) -> list[str]:
        """Builds systems of `todo`, and takes them off it, until memory or time is short."""
        group: list[str] = []
        while todo:
            beside = [n for n in dict.fromkeys((ANCHOR, *group)) if self.outcome.is_built(n)]
            batch = self._next_batch(todo, beside)
            is_crowded_out = batch[:1] == todo[:1] and todo[0] in self.outcome.crowded_out
            if group and (not batch or is_crowded_out):
                break
            batch = batch or todo[:1]  # whoever does not fit even alone has to try
            if not self.has_time_for(batch, beside):
                self.crew.say(f"  no time to build {', '.join(todo + self.outcome.alone)}: left for another run")
                todo.clear()
                self.outcome.alone.clear()
                break
            del todo[: len(batch)]
            replies = self._build(batch, beside)
            if len(batch) > 1 and ANCHOR in replies and replies[ANCHOR].is_out_of_memory:
                todo[:0] = [name for name in batch if name != ANCHOR]
                batch, replies = [ANCHOR], self._build_anchor_again(replies)
            has_company = bool(group) or len(batch) > 1
            replies = {n: reply for n, reply in replies.items() if not (has_company and self.outcome.crowd_out(n, reply))}
            self.outcome.replies |= replies
            group.extend(replies)
            if is_crowded_out or len(replies) < len(batch):
                break
        return group

    def _next_batch(self, todo: list[str], beside: Sequence[str]) -> list[str]:
        """The first of `todo`, as many as memory and time allow to build at once; none if memory allows none."""
        is_single = todo[0] in self.outcome.crowded_out or tunes(todo[0])
        together = todo[:1] if is_single else [name for name in todo if not tunes(name)]
        free_bytes = self.crew.ask_device("device_facts")["free_bytes"]
        if free_bytes is not None:  # what the others gave back, one of them at a time takes again
            free_bytes -= max((self.needs.returned_bytes.get(name, 0) for name in beside), default=0)
        batch = together[: self.needs.num_that_fit(together, free_bytes, self.config.num_jobs)]
        while len(batch) > 1 and not self.has_time_for(batch, beside):
            batch.pop()
        return batch

    def _build_anchor_again(self, replies: Mapping[str, Reply]) -> dict[str, Reply]:
        """Builds the anchor alone, which ran out of memory in company, after that has given back its memory."""
        self._release([name for name, reply in replies.items() if reply.status == "ok"])
        self.needs.reserved_bytes.clear()  # they were wrong
        return self._build([ANCHOR])

    def _build(self, names: Sequence[str], beside: Sequence[str] = ()) -> dict[str, Reply]:
        """Builds systems at the same time, each in its process, and all with the same time to do it. Leaves out those that
        the budget was too short for."""
        left_s = self.crew.left_s() - self._turns_s((*beside, *names))
        timeout_s = min(self.config.build_timeout_s, max(left_s, 1.0))
        is_cut_short = timeout_s < self.config.build_timeout_s
        begin_s = time.monotonic()

        def learn(name: str, reply: Reply) -> None:
            if reply.status == "ok":
                self.needs.build_s[name] = time.monotonic() - begin_s
                if reply.value.memory is not None:
                    memory = reply.value.memory
                    self.needs.reserved_bytes[name] = memory.reserved_bytes
                    self.needs.returned_bytes[name] = memory.reserved_bytes - memory.idle_bytes
            self.crew.say(f"  {name}: {_built(reply)}{', left for another run' if is_left(reply) else ''}")

        def is_left(reply: Reply) -> bool:
            return is_cut_short and reply.is_late

        replies = self.crew.ask_at_once(names, "build", self.workload.name, len(names), timeout_s=timeout_s, then=learn)
        return {name: reply for name, reply in replies.items() if not is_left(reply)}

    # ---- timing ------------------------------------------------------------------------------------------------------
    def _take_turns(self, names: Sequence[str]) -> None:
        """Times systems in turns; who begins moves on by one each time. Who fails drops out."""
        num_steps = {name: self._num_steps(self.outcome.replies[name].value.rough_step_ms) for name in names}
        times_ms: dict[str, list[float]] = {name: [] for name in names}

        def take_turn(name: str) -> float | None:
            if name not in num_steps:  # it has made room
                return None
            num = num_steps[name] if is_calibrated else min(num_steps[name], 3)
            reply = self.crew.ask(name, "time", num)
            while name == ANCHOR and reply.is_out_of_memory and len(num_steps) > 1:
                self._make_room(list(num_steps)[-1], reply)
                num_steps.popitem()
                reply = self._build([ANCHOR]).get(ANCHOR, reply)  # its process has ended
                if reply.status == "ok":
                    self.outcome.replies[ANCHOR] = reply
                    reply = self.crew.ask(name, "time", num)
            if reply.status != "ok":
                self.crew.say(f"  {name}: {reply.reason}")
                del num_steps[name]
                if len(names) <= 2 or not self.outcome.crowd_out(name, reply):
                    self.outcome.replies[name] = reply
            return reply.value

        is_calibrated = False
        for name in names:  # rough times were taken while others compiled, or with clones of every loss
            time_ms = take_turn(name)
            if time_ms is not None:
                num_steps[name] = self._num_steps(time_ms)
        is_calibrated = True
        min_repetitions = min(MIN_REPETITIONS, self.config.num_repetitions)
        round_s = 0.0
        try:
            for repetition in range(self.config.num_repetitions):
                if repetition >= min_repetitions and self.crew.left_s() < round_s:
                    self.crew.say(f"  time is up: {repetition} turns instead of {self.config.num_repetitions}")
                    break
                begin_s = time.monotonic()
                for name in rotated(list(num_steps), repetition):
                    time_ms = take_turn(name)
                    if time_ms is not None:
                        times_ms[name].append(time_ms)
                round_s = time.monotonic() - begin_s
        finally:
            num_complete = min((len(times_ms[name]) for name in num_steps), default=0)
            if num_complete >= min_repetitions:
                self._note({name: times_ms[name][:num_complete] for name in num_steps}, num_steps)

    def _make_room(self, name: str, reply: Reply) -> None:
        """Releases a system for an anchor whose turn had this reply: it lacked memory. One that has had a group of its own
        already will have no time."""
        self.crew.say(f"  {name}: makes room for {ANCHOR}")
        self._release([name])
        if not self.outcome.crowd_out(name, reply):
            self.outcome.replies[name] = replace(reply, reason=f"{ANCHOR} beside it: {reply.reason}")

    def _note(self, times_ms: Mapping[str, Sequence[float]], num_steps: Mapping[str, int]) -> None:
        """Keeps what systems that took turns were timed at."""
        for name, own_ms in times_ms.items():
            timing = Timing(
                step_ms=tuple(own_ms),
                anchor_ratios=tuple(a / b for a, b in zip(own_ms, times_ms.get(ANCHOR, ()), strict=False)),
                num_steps_per_block=num_steps[name],
                together=tuple(times_ms),
            )
            self.outcome.turns.setdefault(name, timing)  # the anchor is in every group: its first one counts
            self.crew.say(f"  {name}: {statistics.median(timing.step_ms):.3f} ms")

    def _num_steps(self, step_ms: float) -> int:
        return max(1, min(MAX_STEPS_PER_BLOCK, round(self.config.block_ms / step_ms)))

    # ---- behind all timing -------------------------------------------------------------------------------------------
    def _finish(self, names: Sequence[str]) -> None:
        """Profiles, one by one; compiles again from warm caches, if that is measured and there is time; releases."""
        names = [name for name in names if self.outcome.is_built(name)]
        for name in names if self.workload.sweep is None else ():  # of sweeps only the times are shown
            reply = self.crew.ask(name, "profile")
            self.outcome.launches[name] = reply.value
            if reply.status != "ok":
                self.crew.say(f"  {name}, profiled: {reply.reason}")
        cold_s = sum(self.outcome.replies[n].value.cold_compile_s or 0.0 for n in names) / self.config.num_jobs
        if not (self.config.compiles_again and self.crew.left_s() > cold_s + MIN_BUILD_S):
            self._release(names)
            return
        for name, reply in self.crew.ask_at_once(names, "warm_compile").items():
            self.outcome.warm_compile_s[name] = reply.value
            if reply.status != "ok":
                self.crew.say(f"  {name}, compiled again: {reply.reason}")

    def _release(self, names: Sequence[str]) -> None:
        """Lets workers forget what they built."""
        for name, reply in self.crew.ask_at_once(names, "release").items():
            if reply.status != "ok":
                self.crew.say(f"  {name}, released: {reply.reason}")
