"""The EXACT passes on joint graphs of layers: outputs and gradients bit for bit as without the passes, from fewer casts."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import functorch.compile
import pytest
import torch
from torch import fx

import fxamp
from fxamp import graph, joint
from tests.programs import everything, pull, small_models

NAMES = ("transformer", "attention", "residual", "gated", "group_norm")


@pytest.mark.parametrize("name", NAMES)
def test_bitwise(name: str, monkeypatch: pytest.MonkeyPatch):
    model, inputs = small_models()[name]

    def run() -> tuple[dict[str, torch.Tensor], int]:
        torch._dynamo.reset()
        mine, amp = copy.deepcopy(model), fxamp.Amp(precision="bf16", lower="aot_eager")
        outputs = torch.compile(mine, backend=amp)(*inputs)
        pull(outputs)
        return everything(mine, outputs), len(amp.graphs[0].variants["bf16"].casts)

    got, num_casts = run()
    monkeypatch.setattr(joint, "EXACT", ())
    want, num_without = run()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert num_casts <= num_without
    assert num_casts < num_without or name not in ("transformer", "residual")


@pytest.mark.parametrize("name", NAMES)
def test_saved_for_the_backward_is_the_low_value_where_there_is_one(name: str):
    """Never what a widening gives, whoever wrote it: its operand is saved, and widened again."""
    saved: list[fx.Node] = []
    split = functorch.compile.min_cut_rematerialization_partition

    def partition(joint_gm, inputs, **kwargs):
        forward, backward = split(joint_gm, inputs, **kwargs)
        outputs: Any = forward.graph.output_node().args[0]
        saved.extend(outputs[kwargs["num_fwd_outputs"] :])
        return forward, backward

    model, inputs = small_models()[name]
    with mock.patch("functorch.compile.min_cut_rematerialization_partition", partition):
        pull(torch.compile(model, backend=fxamp.Amp(precision="bf16", lower="aot_eager"))(*inputs))
    floats = [t.dtype for node in saved for t in graph.tensors_of(graph.value_of(node)) if t.is_floating_point()]
    assert torch.bfloat16 in floats
    casts = [node for node in saved if node.target is graph.JOINT_CAST]
    assert [c.name for c in casts if graph.value_of(graph.source_of(c)).dtype == torch.bfloat16] == []
