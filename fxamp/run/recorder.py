"""What records a step: CUDA graphs, and the stream that they are recorded on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor


def is_recording() -> bool:
    """Does what is launched now go into a CUDA graph, instead of running?"""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Lets go of everything; no replay may follow."""
        ...


class Recorder:
    """Records on one device. All that it records shares one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._pool = device, _stream_of(device), torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def recording(self) -> Generator[Graph]:
        """What is launched inside goes into the graph, and does not run."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (of data loaders) may allocate meanwhile: only what this one does may break the recording.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with _own_workspaces(), capture:
            yield graph

    @contextlib.contextmanager
    def aside(self, *given: Tensor) -> Generator[None]:
        """What is launched inside, and reads what is `given`, runs on the stream of recordings, behind all that was launched
        before, and before all that is launched later."""
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            now.wait_stream(self._stream)
            for x in given:
                x.record_stream(self._stream)

    def hand_out(self, made: Tensor) -> Tensor:
        """What was made aside, for the stream of now."""
        made.record_stream(torch.cuda.current_stream(self._device))
        return made

    def forget_random(self) -> None:
        """After a recording that broke off: the random generator still counts what was to be recorded."""
        random = torch.cuda.default_generators[self._device.index or 0]
        random.graphsafe_set_state(random.clone_state())


@contextlib.contextmanager
def _own_workspaces() -> Generator[None]:
    """Inside, the matrix library makes its workspaces anew, in the memory of the graph that is recorded. It would take those
    that it has for the stream, which whoever else records (Inductor) frees: replays would write into memory of others."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that everything is recorded on: each stream more keeps a workspace of the matrix library for good."""
    return torch.cuda.Stream(device)
