from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fxamp
from fxamp import graph
from fxamp.rewrite.out_of_place import OutOfPlace
from tests.programs import Fn, decisions, graph_of, pull, relative_error


def normalized(fn, *inputs):
    gm = graph.clone(graph_of(fn, *inputs)[0])
    return gm, OutOfPlace()(gm)


def relu_after(x):
    y = x.exp()
    return F.relu(y, inplace=True) * 2


def positional(x):
    return F.dropout(x.exp(), 0.5, False, True) * 2  # in evaluation it draws nothing


def method(x):
    return x.exp().clamp_(0, 1).mul_(2)


def operators(x):
    y = x.exp()
    y += 1
    y *= x
    return y


def through_a_view(x):
    y = x.exp()
    return y.view(-1).relu_().sum()


@pytest.mark.parametrize(
    ("fn", "num"), [(relu_after, 1), (positional, 1), (method, 2), (operators, 2), (through_a_view, 1)]
)
def test_what_nobody_reads_again_becomes_ordinary(fn, num: int):
    x = torch.randn(3, 4)
    gm, change = normalized(fn, x)
    assert (change.num_marked, change.kept) == (num, ())
    assert not any(str(n.target)[-1] == "_" for n in gm.graph.nodes if n.op == "call_method")
    (got,) = gm(*[x for n in gm.graph.find_nodes(op="placeholder")])
    assert torch.equal(got, fn(x))


def read_again(x):
    y = x.exp()
    y.relu_()
    return y * 2


def view_read_again(x):
    y = x.exp()
    v = y.t()
    z = y.add_(1)
    return v + z.t()


def base_read_again(x):
    y = x.exp()
    v = y.view(-1)
    v.mul_(2)
    return y


def input_written(x):
    return x.add_(1) * 2


def wider_operand(x):
    y = x.exp()
    return y.add_(torch.ones(4, dtype=torch.float64)) * 2


def copied(x):
    y = x.exp()
    return y.copy_(x) * 2


def drawn(x):
    y = x - x
    return y.bernoulli_() * 0  # y.bernoulli() would draw with the probabilities that y holds


def dropped(x):
    return F.dropout(x.exp(), 0.5, True, True) * 0


def leaked(x):
    return F.rrelu(x.exp(), inplace=True, training=True) * 0


@torch._dynamo.allow_in_graph
def written_and_doubled(x, inplace=False):
    return (x.add_(1) if inplace else x) * 2


def users_function(x):
    return written_and_doubled(x.exp(), inplace=True)


def more_than_a_tensor(x):
    y: Any = TwoTensor(x, x) * 2
    return y.mul_(3).a * 2


@pytest.mark.parametrize("fn", [read_again, view_read_again, base_read_again, input_written, wider_operand, copied, drawn,
                                dropped, leaked, users_function, more_than_a_tensor])  # fmt: skip
def test_what_somebody_could_tell_is_kept(fn):
    x = torch.randn(3, 4)
    want = fn(x.clone())
    gm, change = normalized(fn, x.clone())
    assert change.num_marked == 0
    if fn not in (copied, drawn):
        assert change.kept[0].reason
        assert change.kept[0].where.startswith("test_out_of_place.py:")
    assert torch.equal(gm(x.clone())[0], want)


def test_afterwards_the_values_may_be_lowered():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1))
    x = torch.randn(2, 3, 4, 4)
    assert decisions(model, x)["relu"].computes == "fp32"  # as captured, it is written
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    compiled = torch.compile(copy.deepcopy(model), backend=amp)
    got = compiled(x)
    made = {d.op: d for d in amp.graphs[0].variants["bf16"].plan.decisions.values()}
    assert made["relu"].computes == "bf16"
    assert made["batch_norm"].result is None
    assert relative_error(got, model(x)) < 3e-2


def test_dropout_in_place_draws_what_it_draws_without_fxamp():
    def forward(x):
        return F.dropout(x.exp(), 0.5, True, True)

    def masks(call) -> torch.Tensor:
        torch.manual_seed(0)
        return call(torch.randn(8, 8)) == 0

    want = masks(torch.compile(forward, backend="aot_eager"))
    torch._dynamo.reset()
    amp = fxamp.Amp(precision="fp32", lower="aot_eager")
    assert torch.equal(masks(torch.compile(forward, backend=amp)), want)
    assert want.any()


def test_gradients_of_a_kept_and_a_replaced_one():
    def forward(m, x):
        y = m.lin(x)
        early = y * 2
        y.relu_()  # read again below: stays
        late = F.leaky_relu(m.lin(y), 0.1, inplace=True)  # becomes ordinary
        return early, y, late * 2

    model = Fn(forward, lin=nn.Linear(8, 8))
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    pull(torch.compile(model, backend=fxamp.Amp(precision="fp32", lower="aot_eager"))(x))
    pull(twin(x))
    assert relative_error(model.lin.weight.grad, twin.lin.weight.grad) < 1e-6


def test_more_than_plain_tensors_stay_in_place():
    """What a subclass, or a real tensor, does in place is its own business."""
    gm, _ = graph_of(relu_after, torch.rand(3))
    written = next(node for node in gm.graph.nodes if node.target is F.relu)
    graph.set_value(written.args[0], torch.rand(3))
    graph.set_value(written, written.args[0].meta["example_value"])
    change = OutOfPlace()(gm)
    assert [kept.reason for kept in change.kept] == ["a value is more than a plain tensor"]
    assert written.kwargs["inplace"] is True
