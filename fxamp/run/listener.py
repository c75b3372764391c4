"""What the programs of a step are called with, and what they make: what a recording of it would read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from fxamp.run.programs import Running, is_a_float, running

if TYPE_CHECKING:
    from fxamp.run.leaves import LowLeaves


class Call(NamedTuple):
    """Of a program, which Dynamo has made of the step, or of a part of it between graph breaks."""

    program: Callable[..., Any]
    args: tuple[Any, ...]
    takes_floats: bool
    """Python's, which Dynamo has made inputs."""
    caller: Running | None
    made: tuple[StorageWeakRef, ...]
    """The memory of what it returned, but for that of its arguments."""


class Listener:
    """Listens to the programs of a step. They know of it, and of the Amp, but not of the step, its model and its recordings:
    Dynamo keeps what it has compiled, in caches and in the globals of modules, when the step is long forgotten."""

    def __init__(self, compile_with: Callable[[LowLeaves, Any, Any], Callable[..., Any]], leaves: LowLeaves) -> None:
        self.num_compiled = 0
        self.kept: frozenset[int] = frozenset()
        """Memory, by address of its record, that programs of the last step had made, and somebody keeps."""
        self._calls: list[Call] | None = None
        """None: nobody asks."""
        self._compile, self._leaves = compile_with, weakref.ref(leaves)

    def backend(self) -> Callable[[Any, Any], Callable[..., Any]]:
        """Compiles programs that tell of their calls."""

        def fxamp(gm: Any, examples: Any) -> Callable[..., Any]:  # Dynamo's errors call a backend by its name
            takes_floats = any(is_a_float(node) for node in gm.graph.find_nodes(op="placeholder"))
            self.num_compiled += 1
            leaves = self._leaves()
            assert leaves is not None
            program = self._compile(leaves, gm, examples)

            def call(*args: Any) -> Any:
                if self._calls is None:
                    return program(*args)
                calls, caller = self._calls, running()
                out = program(*args)
                calls.append(Call(program, args, takes_floats, caller, _made(out, args)))
                return out

            return call

        return fxamp

    @contextlib.contextmanager
    def listening(self) -> Generator[list[Call]]:
        """Hands out the calls inside."""
        self._calls = []
        try:
            yield self._calls
        finally:
            self._calls = None

    def read_from_before(self, calls: list[Call], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What programs have read in a step that was there before it, beside its inputs. Forgets the calls.

        Somebody may put another tensor in its place before each step. What Python makes between two graphs is gone behind
        the step; what is not, somebody keeps, and may be from before.
        """
        own, made, kept_before = set(map(id, inputs)), set[int](), self.kept
        found = dict[int, tuple[weakref.ref[Tensor], Tensor | None]]()
        for call in calls:
            for x in call.args:
                if isinstance(x, Tensor) and id(x) not in own and (memory := memory_of(x)) not in made:
                    found[id(x)] = weakref.ref(x), x if memory in kept_before else None
            made.update(ref.cdata for ref in call.made)
        self.kept = frozenset(ref.cdata for call in calls for ref in call.made if not ref.expired())
        calls.clear()
        call = x = None
        return tuple(x for ref, kept in found.values() if (x := kept if kept is not None else ref()) is not None)


def memory_of(x: Tensor) -> int:
    """What tells it from other memory, as long as it is there."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)


def _made(out: Any, args: Iterable[Any]) -> tuple[StorageWeakRef, ...]:
    given = {memory_of(x) for x in args if isinstance(x, Tensor)}
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.layout is torch.strided and memory_of(x) not in given]
    return tuple(StorageWeakRef(x.untyped_storage()) for x in made)
