"""What the joint passes saw and did, also after a warm start.

On a warm start PyTorch's caches hand out compiled code without running a single joint pass. So the record is stored beside
those caches, under the digest that is also part of their key, and read from there when it is asked for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import fx

from fxamp import graph, legal
from fxamp.passes import Change, Pass, run


@dataclass(kw_only=True)
class JointRecord:
    """The joint graph before and after fxamp's passes, filled while they run or made again from what `path` holds.

    Only the graph before the passes is stored: they are functions of it, and part of the key that it is stored under.
    """

    path: Path | None
    """Where it is kept for warm starts; None if PyTorch's caches are off."""
    passes: tuple[Pass, ...]
    """The passes that run on the joint graph, in order."""
    before: fx.GraphModule | None = None
    after: fx.GraphModule | None = None
    changes: tuple[Change, ...] = ()
    from_cache: bool = False

    def save(self) -> None:
        """Writes the record beside PyTorch's caches. A disk that refuses costs the dump of a later start, nothing else."""
        if self.path is None or self.before is None:
            return
        data = pickle.dumps(_pack(self.before))
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                file.write(data)
            os.replace(file.name, self.path)  # atomic: another process may be compiling the same graph

    def load(self) -> None:
        """Makes the record of an earlier process again, if the passes did not run in this one."""
        if self.after is not None or self.path is None or not self.path.exists():
            return
        self.before, self.from_cache = _unpack(pickle.loads(self.path.read_bytes())), True
        self.after = graph.clone(self.before)
        self.changes = run(self.after, self.passes, legal.checker(legal.JOINT, self.before))


_KEPT_META: Final = frozenset(("val", "custom", "stack_trace", "partitioner_tag"))


def _pack(gm: fx.GraphModule) -> tuple[str, bytes]:
    from torch.fx._graph_pickler import GraphPickler, Options

    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: key in _KEPT_META)
    return type(gm).__name__, GraphPickler.dumps(gm, options)


def _unpack(packed: tuple[str, bytes]) -> fx.GraphModule:
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    name, data = packed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch unpickles its own tree specs with a deprecated check
        gm = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(gm, fx.GraphModule)
    type(gm).__name__ = name  # every GraphModule has a class of its own; dumps print its name
    return gm
