"""Which parts of a compiled graph replay as CUDA graphs and, for those that do not, why, and at which line of the user's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from fxamp import capture

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The forward or the backward of one variant of a graph."""

    phase: Phase
    is_captured: bool
    """Does it replay as a CUDA graph, wholly or in pieces? Recorded it is in the second call."""
    num_pieces: int = 0
    """CUDA graphs that it is made of."""
    reason: str = ""
    """Why it is not captured, or not as a whole."""
    where: str = ""
    """The user's line that the reason is about, "train.py:33"; "" if nobody knows."""

    @property
    def is_whole(self) -> bool:
        return self.is_captured and not self.reason

    def __str__(self) -> str:
        at = f" ({self.where})" if self.where else ""
        if not self.is_captured:
            return f"the {self.phase} is not captured{at}: {self.reason}"
        if self.is_whole:
            return f"the {self.phase} is captured"
        pieces = "1 piece" if self.num_pieces == 1 else f"{self.num_pieces} pieces"
        return f"the {self.phase} is captured in {pieces}; the rest is not{at}: {self.reason}"


class Coverage:
    """What Inductor made of the wish to capture a graph, filled in as it compiles and runs forward and backward."""

    def __init__(self, *, off: str = "") -> None:
        self.off: Final = off
        """Why nobody wished it."""
        self._replays: dict[Phase, Replay] = {}

    def add(self, replay: Replay) -> None:
        """What is known of one phase, from now on."""
        self._replays[replay.phase] = replay

    def lose(self, phase: Phase, message: str) -> Replay:
        """What was captured runs as it is after all, for the reason that Inductor gives."""
        reason, where = explained(message)
        self._replays[phase] = lost = replace(
            self._replays[phase], is_captured=False, num_pieces=0, reason=f"{reason}, found while it ran", where=where
        )
        return lost

    def replays(self, *, trains: bool) -> tuple[Replay, ...]:
        """The phases of a graph. A backward may be compiled as late as it first runs."""
        phases: tuple[Phase, ...] = ("forward", "backward") if trains else ("forward",)
        unknown = self.off or "it was not compiled yet"
        return tuple(self._replays.get(p) or Replay(phase=p, is_captured=False, reason=unknown) for p in phases)


_PREFIX: Final = re.compile(r"^(?:skipping cudagraphs? due to\s+)+", re.IGNORECASE)
_TRACE: Final = re.compile(r"\.?\s*Found from\s*:\s*", re.IGNORECASE)


def explained(message: str) -> tuple[str, str]:
    """(the reason, the user's line) in what Inductor says of a skip.

    >>> 'skipping cudagraphs due to cpu device (x). Found from : \\n   File "/home/me/train.py", line 33, in forward\\n ...'
    ->  ("cpu device (x)", "train.py:33")
    """
    reason, *trace = _TRACE.split(_PREFIX.sub("", message.strip()), maxsplit=1)
    return reason.strip() or "Inductor gives no reason", capture.line_of("".join(trace))
