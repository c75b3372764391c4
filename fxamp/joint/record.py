"""What the joint passes saw and did, also after a warm start.

What they did is noted as they run. What they saw are graphs of tens of thousands of nodes: copying, or even storing, them
would cost every compilation time, for a picture that hardly anybody asks for. And on a warm start PyTorch's caches hand out
compiled code without running a single joint pass. So a graph that somebody wants to see is traced again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from fxamp.graph import Cast
from fxamp.passes import Change


@dataclass(frozen=True, kw_only=True)
class JointGraphs:
    """The joint graph before and after fxamp's passes."""

    before: fx.GraphModule = field(repr=False)
    after: fx.GraphModule = field(repr=False)
    changes: tuple[Change, ...]
    """What each pass did."""
    casts: tuple[Cast, ...]
    """The casts of fxamp that are left."""


@dataclass(kw_only=True)
class JointRecord:
    """Filled by the passes, or, where a cache spared them, when somebody asks."""

    trace: Callable[[], JointGraphs] | None = field(default=None, repr=False)
    """Runs AOTAutograd and the passes once more, as far as the end of the passes. None where there is no joint graph."""
    changes: tuple[Change, ...] = ()
    casts: tuple[Cast, ...] | None = None
    """None if the passes did not run in this process."""

    @functools.cached_property
    def graphs(self) -> JointGraphs | None:
        """Traced when first asked for, which takes as long as it took when the graph was compiled."""
        return None if self.trace is None else self.trace()
