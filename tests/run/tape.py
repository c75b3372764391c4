"""Recordings on a CPU: what a CUDA graph does, operation by operation.

A tape knows memory, as a graph does, and nothing else: not the Python that launched an operation, nor who owns what it reads.
What a step read without having made it is on the tape by its memory alone, which the tape does not keep: a replay that reads
memory that is gone says so, where a graph would read what others have written there since.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fxamp.run import recorder
from fxamp.run.train_step import TrainStep


@dataclass(frozen=True)
class Elsewhere:
    """A tensor that the tape has not made."""

    storage: StorageWeakRef
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(x: Tensor) -> Elsewhere:
        return Elsewhere(StorageWeakRef(x.untyped_storage()), x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def now(self, what: str) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"{what} reads memory that is gone: {self.dtype} {list(self.shape)}"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


def _found(x: Any, what: str) -> Any:
    return x.now(what) if isinstance(x, Elsewhere) else x


def _is_work(x: Any) -> bool:
    """Is this a collective on its way?"""
    return isinstance(x, torch.ScriptObject) and "c10d.Work" in str(x._type())


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}


class Tape(TorchDispatchMode):
    """What was recorded."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else Dynamo would not run what it has compiled

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: dict[int, torch.UntypedStorage] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """What was there, and a copy of it: what is recorded does not run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise RuntimeError(f"the host asks for numbers while a step is recorded: {func}")
        for key, storage in _storages((args, kwargs)).items():
            if key not in self._made and key not in self._before:
                self._before[key] = storage, storage.clone()
        out = func(*args, **kwargs)
        if func is torch.ops.aten._lazy_clone.default:
            return out  # what the host does
        if func is torch.ops.aten.lift_fresh.default and out.dim() == 0:  # a number of Python's goes with the launch
            self._before.pop(out.untyped_storage()._cdata, None)
            self._made[out.untyped_storage()._cdata] = out.untyped_storage()
            return out
        self._calls.append((func, args, kwargs, out))
        self._made |= {key: storage for key, storage in _storages(out).items() if key not in self._before}
        return out

    def end(self) -> None:
        """Lets go of what others own, as it was."""
        def let_go(x: Any) -> Any:
            is_theirs = isinstance(x, Tensor) and x.untyped_storage()._cdata in self._before
            return Elsewhere.of(x) if is_theirs else x

        self._calls = [(func, *(tree_map(let_go, part) for part in rest)) for func, *rest in self._calls]
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for func, *given in self._calls:
            args, kwargs, out = (tree_map(functools.partial(_found, what=str(func)), part) for part in given)
            owners = _storages((args, kwargs))
            writes = func._schema.is_mutable or func.namespace == "c10d"  # whose schemas do not say so
            is_view = all(key in owners for key in _storages(out)) and not writes
            if is_view or not _storages(out) and not writes:
                continue
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
                made = func(*args, **kwargs)
                for work in filter(_is_work, tree_leaves(made)):
                    torch.distributed.Work.unbox(work).wait()  # whose waits are on no tape
                for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage()._cdata not in owners:
                        old.detach().copy_(new)


    def reset(self) -> None:
        self._calls.clear()
        self._made.clear()


class Recorder:
    """Stands in for `fxamp.run.recorder.Recorder`."""

    is_recording = False

    @contextlib.contextmanager
    def recording(self) -> Generator[Tape]:
        tape, Recorder.is_recording = Tape(), True
        try:
            with torch.random.fork_rng(devices=()), tape:
                yield tape
        finally:
            Recorder.is_recording = False
            tape.end()

    @contextlib.contextmanager
    def aside(self, *given: Tensor) -> Generator[None]:
        yield

    def hand_out(self, made: Tensor) -> Tensor:
        return made

    def forget_random(self) -> None:
        pass


def taped(step: TrainStep, monkeypatch: pytest.MonkeyPatch) -> TrainStep:
    """A step on a CPU, recorded."""
    monkeypatch.setattr(recorder, "is_recording", lambda: Recorder.is_recording)
    step._why_plain, step._recorder = "", Recorder()  # pyright: ignore[reportAttributeAccessIssue]
    return step
