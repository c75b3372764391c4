from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fxamp import errors, graph
from tests.programs import Fn, captured_of, graph_of, mlp


def test_a_clone_is_apart_and_complete():
    gm, _ = graph_of(mlp(8, 8), torch.randn(2, 8))
    copied = graph.clone(gm)
    assert [n.name for n in copied.graph.nodes] == [n.name for n in gm.graph.nodes]
    old, new = next(iter(gm.graph.nodes)), next(iter(copied.graph.nodes))
    assert new._dynamo_source is old._dynamo_source
    assert copied.meta["dynamo_compile_id"] is gm.meta["dynamo_compile_id"]
    assert copied._param_name_to_source is gm._param_name_to_source
    graph.set_meta(new, {"mine": 1})
    assert "mine" not in old.meta


def test_a_clone_is_a_graph_like_any_other():
    """Its nodes are put in past `create_node`: readers, order, indices and names must be what that would have made of them."""
    gm, _ = graph_of(mlp(8, 8, 8, 8), torch.randn(2, 8))
    copied = graph.clone(gm)
    copied.graph.lint()
    made = torch.fx.Graph()
    output = made.graph_copy(gm.graph, {})
    made.output(output)
    assert str(made) == str(copied.graph)
    assert len(copied.graph.nodes) == len(made.nodes)
    for ours, theirs in zip(copied.graph.nodes, made.nodes, strict=True):
        assert [x.name for x in ours.users] == [x.name for x in theirs.users]
        assert str((ours.args, ours.kwargs)) == str((theirs.args, theirs.kwargs))
        assert ours in copied.graph.find_nodes(op=ours.op, target=ours.target)
    taken = {node.name for node in copied.graph.nodes}
    for name in sorted(taken):
        with copied.graph.inserting_before(copied.graph.output_node()):
            one_more = copied.graph.create_node("call_function", torch.relu, name=name)
        assert one_more.name not in taken
        taken.add(one_more.name)


def test_nested_graphs_are_cloned_too():
    def forward(m, x):
        return checkpoint(m.lin, x, use_reentrant=False)

    gm, _ = graph_of(Fn(forward, lin=nn.Linear(8, 8)), torch.randn(2, 8))
    inner = [name for name, m in gm.named_children() if isinstance(m, torch.fx.GraphModule)]
    assert inner, "checkpoint is no longer a nested graph: use another higher-order op here"
    assert getattr(graph.clone(gm), inner[0]) is not getattr(gm, inner[0])


def test_a_cast_carries_its_facts():
    gm = graph.clone(graph_of(lambda x: x.exp(), torch.randn(2, 3))[0])
    node = gm.graph.output_node().prev
    cast = graph.insert_cast(node.all_input_nodes[0], torch.bfloat16, before=node, why="a test", where="here:1")
    assert graph.own_cast(cast) == graph.Cast("fp32", "bf16", "a test", "here:1")
    assert graph.value_of(cast).dtype == torch.bfloat16
    assert cast.meta["stack_trace"] == node.meta["stack_trace"]
    assert cast.name.endswith("_bf16")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_float_is_never_cast(dtype: torch.dtype):
    gm = graph.clone(graph_of(lambda x: x * 1, torch.ones(2).to(dtype))[0])
    node = gm.graph.output_node().prev
    with pytest.raises(errors.NotFloating, match=str(dtype)):
        graph.insert_cast(node.all_input_nodes[0], torch.bfloat16, before=node, why="")
    value = graph_of(lambda x: x * 1, torch.ones(2))[0].graph.output_node().prev
    with pytest.raises(errors.NotFloating):
        graph.insert_cast(value.all_input_nodes[0], dtype, before=value, why="")


def test_a_users_cast_is_not_ours():
    gm, _ = graph_of(lambda x: torch.ops.aten.to.dtype(x, torch.float16), torch.randn(2))
    assert graph.own_casts(gm) == ()


def test_operands_come_in_order_and_repeat():
    captured = captured_of(lambda x, y: torch.addcmul(y, x, x, value=2) + torch.stack([x, y, x]).sum(0), *torch.randn(2, 3))
    stack = next(n for n in captured.gm.graph.nodes if n.target is torch.stack)
    assert [n.name for n in graph.operands(stack)] == ["l_x_", "l_y_", "l_x_"]
    seen: list[tuple[int, str]] = []
    graph.map_operands(stack, lambda i, n: (seen.append((i, n.name)), n)[1])
    assert seen == [(0, "l_x_"), (1, "l_y_"), (2, "l_x_")]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 8), (8, 1)), ((4, 8), (1, 4)), ((1, 8), (100, 1)), ((4, 1), (1, 7)), ((4, 8), (16, 1)), ((4, 8), (1, 0))],
)
def test_a_retyped_value_is_laid_out_as_a_cast_lays_it_out(shape: tuple[int, ...], strides: tuple[int, ...]):
    with FakeTensorMode():
        value = torch.empty_strided(shape, strides)
        assert graph.retyped(value, torch.bfloat16).stride() == value.to(torch.bfloat16).stride()
