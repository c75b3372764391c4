"""What fxamp does to a graph takes time in proportion to its size. Calls of functions are counted, Python's and C's: no busy
machine disturbs that. `python -m bench --scaling --only none` measures the time."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

import fxamp
from bench import scaling
from fxamp import graph, lower


@contextmanager
def counted(found: dict[str, int], what: str) -> Generator[None]:
    profile = cProfile.Profile()
    with profile:
        yield
    found[what] = pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]


def num_calls(num_layers: int) -> dict[str, int]:
    """Calls made in front of AOTAutograd, and by each pass on the joint graph."""
    found: dict[str, int] = {}
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]):
        joint_gm, steps = scaling._trace(amp, gm, inputs)
        with mock.patch.object(lower, "_compile", return_value=gm.forward), counted(found, "plan and rewrite"):
            amp._compile(gm, inputs, amp.options)
        with counted(found, "copy"):
            graph.clone(joint_gm)
        for i, (step, key) in enumerate(steps):
            with counted(found, f"{i} {key.partition('(')[0]}"):
                step(joint_gm)
        return gm.forward

    model = nn.Sequential(*(scaling._Residual(8) for _ in range(num_layers)))
    torch.compile(model, backend=backend)(torch.randn(4, 8))
    return found


def test_four_times_the_layers_are_four_times_the_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXAMP_CHECK", "0")
    few = num_calls(2)
    torch._dynamo.reset()
    many = num_calls(8)
    assert few.keys() == many.keys()
    assert {what: many[what] / few[what] for what in few if many[what] > 4.4 * few[what] + 100} == {}
