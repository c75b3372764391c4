"""EXACT passes: bit for bit the same results from fewer casts, by fx.Interpreter in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxamp import graph, joint
from fxamp.joint.casts import CancelCasts, DropDeadCasts, ShareCasts
from fxamp.passes import Pass

CAST = torch.ops.prims.convert_element_type.default
LOW = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def build(steps: list[tuple[int, torch.dtype, bool]], src: torch.dtype) -> fx.GraphModule:
    """A graph of casts: each step casts an earlier value (by index) to a dtype, ours or the user's. All are read, negated."""
    g = fx.Graph()
    nodes = [g.placeholder("x")]
    for index, dtype, ours in steps:
        node = g.call_function(CAST, (nodes[index % len(nodes)], dtype))
        if ours:
            node.meta["custom"] = {graph.MARK: {"src": "", "dst": "", "why": "test", "where": ""}}
        nodes.append(node)
    g.output(tuple(g.call_function(torch.ops.aten.neg.default, (node,)) for node in nodes))
    gm = fx.GraphModule({}, g)
    fake = FakeTensorMode()
    FakeTensorProp(gm, fake).propagate(torch.zeros(8, dtype=src))
    return gm


values = torch.tensor([0.0, -0.0, 1.0, 1 + 2**-9, 65504.0, 1e5, 1e-7, -3.3e38, float("inf"), float("nan")])
steps_strategy = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(LOW), st.booleans()), max_size=8)


@given(steps_strategy, st.sampled_from(LOW))
def test_exact_passes_keep_every_bit(steps, src: torch.dtype):
    gm = build(steps, src)
    want = fx.Interpreter(graph.clone(gm)).run(values.to(src))
    num_users_casts = sum(n.target is CAST and graph.own_cast(n) is None for n in gm.graph.nodes)
    for pass_ in joint.EXACT:
        pass_(gm)
        gm.graph.lint()
        got = fx.Interpreter(gm).run(values.to(src))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            assert torch.equal(g.nan_to_num(7.0), w.nan_to_num(7.0))
            assert torch.equal(g.isnan(), w.isnan())
    assert sum(n.target is CAST and graph.own_cast(n) is None for n in gm.graph.nodes) == num_users_casts


@given(steps_strategy, st.sampled_from(LOW))
def test_afterwards_nothing_is_left_to_do(steps, src: torch.dtype):
    gm = build(steps, src)
    for pass_ in joint.EXACT:
        pass_(gm)
    for pass_ in joint.EXACT:
        change = pass_(gm)
        assert (change.num_added, change.num_removed) == (0, 0)


@pytest.mark.parametrize(
    ("pass_", "steps", "src", "num_left"),
    [
        (CancelCasts(), [(0, torch.float32, True), (1, torch.bfloat16, True)], torch.bfloat16, 1),
        (CancelCasts(), [(0, torch.bfloat16, True), (1, torch.float32, True)], torch.float32, 2),  # rounds
        (CancelCasts(), [(0, torch.float32, False), (1, torch.bfloat16, True)], torch.bfloat16, 2),  # the user's
        (ShareCasts(), [(0, torch.bfloat16, True), (0, torch.bfloat16, True)], torch.float32, 1),
        (ShareCasts(), [(0, torch.bfloat16, True), (0, torch.float16, True)], torch.float32, 2),
        (DropDeadCasts(), [(0, torch.bfloat16, True)], torch.float32, 1),
    ],
)
def test_each_does_its_own(pass_: Pass, steps, src: torch.dtype, num_left: int):
    gm = build(steps, src)
    pass_(gm)
    assert sum(n.target is CAST for n in gm.graph.nodes) == num_left


@pytest.mark.parametrize("pass_", [CancelCasts(), ShareCasts()])
def test_what_leaves_the_graph_keeps_memory_of_its_own(pass_: Pass):
    gm = build([(0, torch.float32, True), (1, torch.bfloat16, True), (0, torch.float32, True)], torch.bfloat16)
    gm.graph.output_node().args = (tuple(n for n in gm.graph.nodes if n.target is CAST),)
    pass_(gm)
    x = values.bfloat16()
    got = fx.Interpreter(gm).run(x)
    assert len({t.data_ptr() for t in (x, *got)}) == 4


def test_a_chain_is_shortened():
    gm = build([(0, torch.float32, True), (1, torch.float16, True)], torch.bfloat16)
    CancelCasts()(gm)
    last = [n for n in gm.graph.nodes if n.target is CAST][-1]
    assert last.args[0].op == "placeholder"
    assert graph.own_cast(last) is not None


def test_dead_casts_go():
    gm = build([(0, torch.bfloat16, True), (1, torch.float16, True)], torch.float32)
    output = gm.graph.output_node()
    first, *rest = output.all_input_nodes[1:]
    output.args = ((first,),)
    for node in rest:
        gm.graph.erase_node(node)
    assert DropDeadCasts()(gm).num_removed == 1


def test_the_order_of_passes():
    assert [type(p).__name__ for p in joint.order(keeps_roundings=True)] == [
        "KeepRoundings", "CancelCasts", "ShareCasts", "DropDeadCasts", "SinkWidenings", "HoistNarrowings",
        "NarrowMovement", "CancelCasts", "ShareCasts", "DropDeadCasts", "AbsorbWidenings", "SaveReadsOfMutated",
    ]  # fmt: skip
    assert [type(p).__name__ for p in joint.relaxed(("min_cut", "low_residual"), torch.bfloat16)] == ["MinCut"]
