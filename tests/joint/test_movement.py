"""Casts past moves and into operations that widen by themselves: bit for bit, stride for stride, by fx.Interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxamp import graph, joint
from fxamp.joint.absorb import AbsorbWidenings
from fxamp.joint.casts import CancelCasts
from fxamp.joint.movement import HoistNarrowings, NarrowMovement, SinkWidenings

ATEN = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
F32, BF16 = torch.float32, torch.bfloat16

INPUTS = (
    torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).bfloat16(),
    torch.randn(4, 6, generator=torch.Generator().manual_seed(2)) * 1e3 + 1 / 3,
    torch.tensor([[0.0, -0.0, float("inf"), float("nan"), 1e-40, 3e38]] * 4).t().contiguous().t(),
)
MOVES: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (ATEN.permute.default, ([1, 0],)),
    (ATEN.view.default, ([24, 1],)),
    (ATEN.view.default, ([4, 6],)),
    (ATEN.slice.Tensor, (0, 0, 2)),
    (ATEN.slice.Tensor, (1, 1, 5, 2)),
    (ATEN.select.int, (0, 1)),
    (ATEN.unsqueeze.default, (0,)),
    (ATEN.squeeze.dim, (0,)),
    (ATEN.expand.default, ([3, 4, 6],)),
    (ATEN.clone.default, ()),
    (ATEN.alias.default, ()),
    (ATEN.flip.default, ([0],)),
    (ATEN.neg.default, ()),
    (ATEN.abs.default, ()),
    (ATEN.constant_pad_nd.default, ([1, 0, 0, 1], -1.0)),
    (ATEN.constant_pad_nd.default, ([1, 0, 0, 1], 0.1)),
)
SCATTERS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (ATEN.slice_scatter.default, (0, 0, 4)),
    (ATEN.slice_scatter.default, (1, 1, 5, 2)),
    (ATEN.select_scatter.default, (0, 1)),
)
SUMS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (ATEN.sum.dim_IntList, ([0],)),
    (ATEN.sum.dim_IntList, ([-1], True)),
    (ATEN.sum.default, ()),
)
BINARY = (ATEN.cat.default, ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.maximum.default)

move = st.tuples(st.integers(0, 30), st.sampled_from((*MOVES, *SUMS)))
cast = st.tuples(st.integers(0, 30), st.sampled_from((F32, BF16, torch.float16)), st.sampled_from((True, True, False)))
binary = st.tuples(st.integers(0, 30), st.sampled_from(BINARY), st.integers(0, 30))
scatter = st.tuples(st.integers(0, 30), st.sampled_from(SCATTERS), st.integers(0, 30))
constant = st.tuples(st.just(ATEN.full.default), st.sampled_from(((4, 6), (6,), (4, 2))), st.sampled_from((0.0, -2.5, 0.1)))
programs = st.lists(st.one_of(move, cast, cast, binary, st.one_of(scatter, constant)), max_size=14)


def build(steps: list[Any], inputs=INPUTS, outputs: Any = None) -> fx.GraphModule:
    """A joint graph of casts, moves and binary operations on earlier values (by index); steps that do not fit are left out.

    Outputs: those values that `outputs` names by index, else all that nothing reads."""
    g = fx.Graph()
    nodes = [g.placeholder(f"x{i}") for i in range(len(inputs))]
    values = list(inputs)
    for step in steps:
        if not isinstance(step[0], int):
            nodes.append(g.call_function(step[0], step[1:], {"dtype": F32}))
            values.append(step[0](*step[1:], dtype=F32))
            continue
        i = step[0] % len(nodes)
        if len(step) == 2:
            target, args = step[1][0], (nodes[i], *step[1][1])
            real = (values[i], *step[1][1])
        elif isinstance(step[1], torch.dtype):
            target, args, real = CAST, (nodes[i], step[1]), (values[i], step[1])
        else:
            j = step[2] % len(nodes)
            target, more = step[1] if isinstance(step[1], tuple) else (step[1], ())
            args, real = (nodes[i], nodes[j], *more), (values[i], values[j], *more)
            if target is ATEN.cat.default:
                args, real = (args,), (real,)
        try:
            values.append(target(*real))
        except (RuntimeError, IndexError):
            continue
        node = g.call_function(target, args)
        if target is CAST and step[2]:
            node.meta["custom"] = {graph.MARK: {"src": "", "dst": "", "why": "test", "where": ""}}
        nodes.append(node)
    left = [n for n in nodes if not n.users] if outputs is None else [nodes[i] for i in outputs]
    g.output(tuple(left))
    gm = fx.GraphModule({}, g)
    FakeTensorProp(gm, FakeTensorMode()).propagate(*inputs)
    return gm


def run(gm: fx.GraphModule, inputs=INPUTS) -> list[torch.Tensor]:
    return fx.Interpreter(gm).run(*inputs)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    whole = (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    return whole and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.signbit(), want.signbit())


def strides(t: torch.Tensor) -> list[int]:
    """Those that matter: fake and real tensors disagree about the stride of a dimension with one element."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def layouts(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """What the graph says of its outputs, and what they are."""
    told = [graph.value_of(n) for n in gm.graph.output_node().all_input_nodes]
    return [(t.dtype, tuple(t.shape), t.stride()) for t in told]


@given(programs)
def test_exact_passes_keep_every_bit_and_stride(steps):
    gm = build(steps)
    want, told = run(graph.clone(gm)), layouts(gm)
    for pass_ in joint.EXACT:
        pass_(gm)
        gm.graph.lint()
        assert layouts(gm) == told, pass_
        assert all(same(g, w) for g, w in zip(run(gm), want, strict=True)), pass_


@given(programs)
def test_no_more_bytes_are_cast(steps):
    def num_bytes(gm: fx.GraphModule) -> int:
        casts = [n for n in gm.graph.nodes if graph.own_cast(n) is not None]
        return sum(graph.value_of(n).numel() * (n.args[1].itemsize + graph.value_of(n.args[0]).dtype.itemsize) for n in casts)

    gm = build(steps)
    before = num_bytes(gm)
    for pass_ in joint.EXACT:
        pass_(gm)
        assert num_bytes(gm) <= before, pass_
        before = num_bytes(gm)


@given(programs)
def test_values_on_record_are_what_is_computed(steps):
    gm = build(steps)
    for pass_ in joint.EXACT:
        pass_(gm)

    class Compare(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor):
                told = graph.value_of(n)
                assert (told.dtype, told.shape, strides(told)) == (value.dtype, value.shape, strides(value)), n
            return value

    Compare(gm).run(*INPUTS)


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(n.target).split(".")[1] for n in gm.graph.nodes if n.op == "call_function"]


def up(i: int, ours: bool = True) -> tuple[int, torch.dtype, bool]:
    return i, F32, ours


def down(i: int, ours: bool = True) -> tuple[int, torch.dtype, bool]:
    return i, BF16, ours


PERMUTE, EXPAND, SLICE, SELECT, FLIP, NEG = MOVES[0], MOVES[8], MOVES[4], MOVES[5], MOVES[11], MOVES[12]
FLAT = (ATEN.view.default, ([72],))
SELECT_0 = (ATEN.select.int, (0, 0))

MOVED = [
    # what, pass, steps on (bf16, fp32, fp32) inputs, outputs, targets afterwards
    ("sinks past a permute", SinkWidenings(), [up(0), (3, PERMUTE), (4, ATEN.mul.Tensor, 4)], [5],
     ["permute", "convert_element_type", "mul"]),
    ("the user's stays", SinkWidenings(), [up(0, False), (3, PERMUTE), (4, ATEN.mul.Tensor, 4)], [5],
     ["convert_element_type", "permute", "mul"]),
    ("a cast with two readers stays", SinkWidenings(), [up(0), (3, PERMUTE), (3, ATEN.mul.Tensor, 1)], [4, 5],
     ["convert_element_type", "permute", "mul"]),
    ("not past an expand: more bytes", SinkWidenings(), [up(0), (3, EXPAND), (4, ATEN.mul.Tensor, 4)], [5],
     ["convert_element_type", "expand", "mul"]),
    ("past a slice that is read elementwise", SinkWidenings(), [up(0), (3, SLICE), (4, ATEN.mul.Tensor, 4)], [5],
     ["slice", "convert_element_type", "mul"]),
    ("an output keeps its memory", SinkWidenings(), [up(0), (3, SLICE)], [4], ["convert_element_type", "slice"]),
    ("hoists above an expand", HoistNarrowings(), [(1, EXPAND), down(3), (4, ATEN.mul.Tensor, 4)], [5],
     ["convert_element_type", "expand", "mul"]),
    ("not above an expand whose copy is viewed", HoistNarrowings(), [(1, EXPAND), down(3), (4, FLAT)], [5],
     ["expand", "convert_element_type", "view"]),
    ("hoists above a permute", HoistNarrowings(), [(1, PERMUTE), down(3), (4, ATEN.mul.Tensor, 4)], [5],
     ["convert_element_type", "permute", "mul"]),
    ("not above a slice: more bytes", HoistNarrowings(), [(1, SLICE), down(3), (4, ATEN.mul.Tensor, 4)], [5],
     ["slice", "convert_element_type", "mul"]),
    ("what widens by itself needs no cast", AbsorbWidenings(), [up(0), (3, ATEN.add.Tensor, 1)], [4], ["add"]),
    ("not where both would be narrow", AbsorbWidenings(), [up(0), (3, ATEN.mul.Tensor, 3)], [4],
     ["convert_element_type", "mul"]),
    ("one of two", AbsorbWidenings(), [up(0), up(0), (3, ATEN.mul.Tensor, 4)], [5], ["convert_element_type", "mul"]),
    ("also behind moves", AbsorbWidenings(), [up(0), (3, NEG), (3, FLIP), (4, ATEN.cat.default, 5), (6, SUMS[0]),
                                              (3, ATEN.mul.Tensor, 1)], [7, 8], ["neg", "flip", "cat", "sum", "mul"]),
    ("not behind a move that somebody reads", AbsorbWidenings(), [up(0), (3, NEG), (4, ATEN.mul.Tensor, 1)], [4, 5],
     ["convert_element_type", "neg", "mul"]),
    ("a concatenation widens by itself", AbsorbWidenings(), [up(0), (3, ATEN.cat.default, 1)], [4], ["cat"]),
    ("if it holds something wide", AbsorbWidenings(), [up(0), (3, NEG), (3, ATEN.cat.default, 4), (5, NEG)], [6],
     ["convert_element_type", "neg", "cat", "neg"]),
    ("a sum", AbsorbWidenings(), [up(0), (3, SUMS[0])], [4], ["sum"]),
    ("not the user's", AbsorbWidenings(), [up(0, False), (3, SUMS[0])], [4], ["convert_element_type", "sum"]),
    ("a narrowing again, behind movement of two readers", AbsorbWidenings(),
     [up(0), (3, SLICE), (3, NEG), down(4), (6, ATEN.mul.Tensor, 6), (5, ATEN.mul.Tensor, 1)], [7, 8],
     ["slice", "neg", "mul", "mul"]),
    ("a copy where it was laid out anew", AbsorbWidenings(), [up(0), (3, SLICE), down(4), (5, ATEN.cat.default, 5)], [6],
     ["slice", "clone", "cat"]),
    ("into a constant", AbsorbWidenings(),
     [up(0), (ATEN.full.default, (4, 6), 0.0), (4, SCATTERS[0], 3), (5, ATEN.add.Tensor, 1)], [6],
     ["full", "full", "slice_scatter", "add"]),
    ("not into one that would be rounded", AbsorbWidenings(),
     [up(0), (ATEN.full.default, (4, 6), 0.1), (4, SCATTERS[0], 3), (5, ATEN.add.Tensor, 1)], [6],
     ["convert_element_type", "full", "slice_scatter", "add"]),
    ("of two that are read, the smaller stays wide", AbsorbWidenings(),
     [up(0), (3, SELECT), (3, ATEN.mul.Tensor, 4)], [5], ["select", "convert_element_type", "mul"]),
    ("movement of several readers, all narrowed", NarrowMovement(),
     [(1, SLICE), (1, ATEN.cat.default, 1), down(3), down(4), (5, ATEN.mul.Tensor, 5), (6, ATEN.mul.Tensor, 6)], [7, 8],
     ["convert_element_type", "slice", "convert_element_type", "cat", "mul", "mul"]),
    ("not if one of them reads it wide", NarrowMovement(),
     [(1, NEG), (3, ATEN.mul.Tensor, 1), down(3), (5, ATEN.mul.Tensor, 5)], [4, 6],
     ["neg", "mul", "convert_element_type", "mul"]),
    ("not if one of them reads it wide, whatever that spares", NarrowMovement(),
     [(1, EXPAND), (3, ATEN.mul.Tensor, 3), down(3), (5, ATEN.mul.Tensor, 5)], [4, 6],
     ["expand", "mul", "convert_element_type", "mul"]),
    ("not if what goes in is more", NarrowMovement(), [(1, SLICE), down(3), (4, ATEN.mul.Tensor, 4)], [5],
     ["slice", "convert_element_type", "mul"]),
    ("an output of the casts' own memory", CancelCasts(), [up(0), down(3)], [4],
     ["convert_element_type", "convert_element_type"]),
    ("a concatenation with what was widened", NarrowMovement(),
     [up(0), (3, ATEN.cat.default, 1), down(4), (5, ATEN.mul.Tensor, 5)], [6],
     ["convert_element_type", "convert_element_type", "convert_element_type", "cat", "mul"]),
    ("not padded by what would be rounded", NarrowMovement(),
     [(1, (ATEN.constant_pad_nd.default, ([1, 1], 0.1))), down(3), (4, ATEN.mul.Tensor, 4)], [5],
     ["constant_pad_nd", "convert_element_type", "mul"]),
    ("not where the narrow value would decide other strides", AbsorbWidenings(),
     [(0, SELECT), (3, (ATEN.expand.default, ([4, 6],))), up(4), (5, ATEN.mul.Tensor, 2)], [6],
     ["select", "expand", "convert_element_type", "mul"]),
    ("not where only a tensor without dimensions is wide", AbsorbWidenings(),
     [up(0), (1, SELECT), (4, SELECT_0), (3, ATEN.mul.Tensor, 5)], [6], ["convert_element_type", "select", "select", "mul"]),
    ("not where another reader needs it", AbsorbWidenings(), [up(0), (3, ATEN.add.Tensor, 1), (3, PERMUTE)], [4, 5],
     ["convert_element_type", "add", "permute"]),
]  # fmt: skip


@pytest.mark.parametrize(("pass_", "steps", "outputs", "want"), [m[1:] for m in MOVED], ids=[m[0] for m in MOVED])
def test_each_move(pass_, steps, outputs, want):
    gm = build(steps, outputs=outputs)
    before = run(graph.clone(gm))
    pass_(gm)
    assert targets(gm) == want
    assert all(same(g, w) for g, w in zip(run(gm), before, strict=True))


def test_round_trips_meet():
    """bf16 -> fp32 -> moved -> bf16 is moving alone."""
    gm = build([up(0), (3, PERMUTE), (4, (ATEN.clone.default, ())), down(5), (6, ATEN.mul.Tensor, 6)], outputs=[7])
    for pass_ in joint.EXACT:
        pass_(gm)
    assert targets(gm) == ["permute", "clone", "mul"]
