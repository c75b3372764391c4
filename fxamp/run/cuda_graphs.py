"""Whether a graph is replayed as a CUDA graph, why, and what its outputs need so that a plain loop never breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fxamp import errors


@dataclass(frozen=True, kw_only=True)
class CudaGraphs:
    """The decision for one graph."""

    on: bool
    reason: str
    copies: tuple[bool, ...] = ()
    """For each output: hand out a copy, because the memory of the output belongs to the graph's pool. Empty: none."""

    def __str__(self) -> str:
        return f"CUDA graph: {'on' if self.on else 'off'} ({self.reason})"


MODES: Final = ("reduce-overhead", "max-autotune")
"""Modes of Inductor in which graphs are replayed."""


def decide(
    wish: str | bool,
    mode: str | None,
    *,
    device: torch.device,
    trains: bool,
    fresh_outputs: Sequence[bool],
    in_step: bool = False,
) -> CudaGraphs:
    """The decision for one graph. `fresh_outputs` says which outputs own their memory; `in_step`: does a train step run it?

    Raises: CudaGraphsUnavailable if capture is required and the device has no CUDA graphs.
    """
    asked_by_mode = mode in MODES
    if device.type != "cuda":
        if wish == "require":
            raise errors.CudaGraphsUnavailable(
                f"cuda_graphs='require', and this graph computes on {device}",
                way_out="Move the model and its inputs to a CUDA device, or use cuda_graphs='auto'",
            )
        return CudaGraphs(on=False, reason=f"no CUDA graphs on {device.type}")
    if in_step:
        return CudaGraphs(on=False, reason="by itself: it is part of the CUDA graph of a whole step")
    if wish is False:
        return CudaGraphs(on=False, reason="cuda_graphs=False")
    if wish in (True, "require") or asked_by_mode:
        asker = f"mode={mode!r}" if asked_by_mode and wish == "auto" else f"cuda_graphs={wish!r}"
        return CudaGraphs(on=True, reason=f"{asker}: as Inductor does it, outputs are valid until the next step")
    if trains:
        return CudaGraphs(
            on=False,
            reason="auto: in a plain training loop gradients would lie in the graph's memory; where no gradient or output is "
            "held across steps, mode='reduce-overhead' turns it on",
        )
    if not all(fresh_outputs):
        return CudaGraphs(on=False, reason="auto: an output shares memory with an input or another output")
    return CudaGraphs(on=True, reason="auto: inference, outputs are handed out as copies", copies=tuple(fresh_outputs))


def copying(program: Callable[..., Sequence[Any]], copies: tuple[bool, ...]) -> Callable[..., Sequence[Any]]:
    """`program` with copies of those of its outputs that lie in a CUDA graph's memory pool."""

    def call(*args: Any) -> Sequence[Any]:
        outputs = program(*args)
        return tuple(
            out.clone() if copy and isinstance(out, torch.Tensor) else out
            for out, copy in zip(outputs, copies, strict=True)
        )

    return call
