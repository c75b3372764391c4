from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxamp import capture, graph
from tests.programs import Fn, captured_of


def ops(fn, *inputs):
    return [f.op for f in captured_of(fn, *inputs).facts.values() if f.op is not None]


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x: x @ x, "matmul"), (lambda x: operator.matmul(x, x), "matmul"), (lambda x: x.matmul(x), "matmul"),
        (lambda x: torch.matmul(x, x), "matmul"), (lambda x: torch.ops.aten.mm.default(x, x), "mm"),
        (lambda x: x.softmax(-1), "softmax"), (lambda x: F.softmax(x, -1), "softmax"),
        (lambda x: torch.softmax(x, -1), "softmax"), (lambda x: torch.special.softmax(x, -1), "softmax"),
        (lambda x: x.exp(), "exp"), (lambda x: x.clone().exp_(), "exp"), (lambda x: torch.exp(x), "exp"),
        (lambda x: x**2, "pow"), (lambda x: x.pow(2), "pow"), (lambda x: x / 2, "div"), (lambda x: x.div(2), "div"),
        (lambda x: F.linear(x, x), "linear"), (lambda x: torch.linalg.vector_norm(x), "linalg_vector_norm"),
        (lambda x: F.relu(x), "relu"), (lambda x: torch.relu(x), "relu"), (lambda x: F.relu_(x.clone()), "relu"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention"),
        (lambda x: torch.special.expm1(x), "expm1"), (lambda x: x + 1, "add"), (lambda x: torch.add(x, 1), "add"),
    ],
)  # fmt: skip
def test_one_name_however_it_is_called(fn, name: str):
    assert name in ops(fn, torch.rand(4, 4))


def test_in_place_operators():
    def fn(x):
        y = x * 2
        y += 1
        y *= 3
        return y

    assert ops(fn, torch.rand(2)) == ["mul", "add", "mul"]


def test_custom_operations_have_their_namespace():
    @torch.library.custom_op("fxamp_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    assert "fxamp_test::twice" in ops(lambda x: twice(x), torch.rand(2))


def test_where_and_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    facts = captured_of(model, torch.randn(2, 4)).facts.values()
    linears = [(f.module, f.where) for f in facts if f.op == "linear"]
    assert linears == [("0", "0 (Linear)"), ("1.1", "1.1 (Linear)")]

    def fn(x):
        return x.exp()  # this line

    f = next(f for f in captured_of(fn, torch.randn(2)).facts.values() if f.op == "exp")
    assert f.where.startswith("test_capture.py:")
    assert f.code == "return x.exp()  # this line"


def test_roles():
    model = Fn(lambda m, x: m.lin(x) + m.shift, lin=nn.Linear(4, 4), shift=torch.zeros(4))
    assert sorted(captured_of(model, torch.randn(2, 4)).roles.values()) == ["buffer", "input", "parameter", "parameter"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_regions_follow_the_device():
    def fn(x):
        a = x.exp()
        with torch.autocast("cpu", enabled=False):
            b = a.sin()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                c = b @ b
        with torch.autocast("cuda", dtype=torch.bfloat16):
            d = c.cos()
        return d.tan()

    regions = {f.op: f.region for f in captured_of(fn, torch.rand(4, 4)).facts.values()}
    assert {op: regions[op] for op in ("exp", "sin", "matmul", "cos", "tan")} == {
        "exp": "none", "sin": "opted_out", "matmul": "users", "cos": "none", "tan": "none",
    }  # fmt: skip


def test_a_switch_of_grad_mode_is_counted():
    def fn(x):
        a = x.exp()
        with torch.no_grad():
            b = x.sin()
        return a + b + x.cos()

    facts = {f.op: f.mode_index for f in captured_of(fn, torch.rand(4)).facts.values()}
    assert (facts["exp"], facts["sin"], facts["cos"]) == (0, 1, 2)


def pinned_ops(fn, *inputs) -> set[str | None]:
    captured = captured_of(fn, *inputs)
    return {captured.facts[name].op for name in captured.pinned} - {None}


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1), lambda y: F.relu(y, inplace=True), lambda y: F.dropout(y, 0.1, True, True),
        lambda y: torch.relu_(y), lambda y: operator.iadd(y, 1), lambda y: y.__setitem__(0, 1.0), lambda y: y[0].zero_(),
        lambda y: y.view(-1).mul_(2), lambda y: torch.mul(y, 2, out=y), lambda y: y.detach().add_(1),
        lambda y: torch._foreach_add_([y], 1), lambda y: torch.ops.aten.add_.Tensor(y, y),
    ],
)  # fmt: skip
def test_whoever_writes_is_seen(write):
    def fn(x):
        y = x.exp()
        z = x.sin()
        write(y)
        return y * 2 + z

    with torch.no_grad():
        assert "exp" in pinned_ops(fn, torch.rand(2, 2))
        assert "sin" not in pinned_ops(fn, torch.rand(2, 2))


def written_operands(fn, *inputs) -> list[list[str]]:
    """For each node that writes: the operations that made what it writes, or the inputs."""
    captured = captured_of(fn, *inputs)
    found = [capture.writes(node) for node in captured.gm.graph.nodes]
    return [[captured.facts[x.name].op or captured.roles.get(x.name, "") for x in written] for written in found if written]


@pytest.mark.parametrize(
    ("write", "want"),
    [
        (lambda y, z: y.add_(z), ["exp"]), (lambda y, z: torch.relu_(y), ["exp"]),
        (lambda y, z: F.relu(y, inplace=True), ["exp"]),
        (lambda y, z: F.relu(y, True), ["exp"]), (lambda y, z: operator.iadd(y, z), ["exp"]),
        (lambda y, z: y.__setitem__(0, z[0]), ["exp"]), (lambda y, z: torch.mul(z, 2, out=y), ["exp"]),
        (lambda y, z: torch.ops.aten.add_.Tensor(y, z), ["exp"]),
        (lambda y, z: torch._foreach_add_([y, z], 1), ["exp", "sin"]),
        (lambda y, z: torch.ops.aten.add.out(z, z, out=y), ["exp"]),
        (lambda y, z: torch.ops.aten.add_.Tensor(self=y, other=z), ["exp"]),
        (lambda y, z: F.batch_norm(z, y[0], y[1], None, None, True), ["getitem", "getitem"]),
        (lambda y, z: F.batch_norm(z, running_mean=y[0], running_var=y[1], training=True), ["getitem", "getitem"]),
    ],
)  # fmt: skip
def test_writers_name_what_they_write(write, want: list[str]):
    """Not only that the memory is written, which the versions of the values show too: who writes what."""

    def fn(x):
        y, z = x.exp(), x.sin()
        write(y, z)
        return y * 2 + z

    with torch.no_grad():
        assert [sorted(set(names)) for names in written_operands(fn, torch.rand(2, 2))] == [sorted(set(want))]


def test_who_has_no_body_to_look_into_may_write_anything():
    graph_ = torch.fx.Graph()
    x = graph_.placeholder("x")
    opaque = graph_.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation, (), {"x": x})
    torch.fx.GraphModule({}, graph_)
    assert capture.writes(opaque) == [x]


@pytest.mark.parametrize(
    ("target", "is_inside_func", "reason"),
    [
        (torch.as_strided, False, "reads its memory by stride"),
        (torch.autograd.grad, False, "differentiated by the program"),
        (torch.exp, True, "used inside a torch.func transform"),
        (torch.exp, False, None),
    ],
)
def test_operands_that_must_be_the_traced_value_itself(target, is_inside_func: bool, reason: str | None):
    built = torch.fx.Graph()
    x = built.placeholder("x")
    watched = list(capture._watched(built.call_function(target, (x,)), is_inside_func))
    assert [operand for operand, _ in watched] == ([x] if reason else [])
    assert all(reason in text for _, text in watched if reason)


def test_a_base_is_written_through_its_view_and_a_view_through_its_base():
    def base(x):
        y = x.exp()
        v = y.t()
        y.add_(1)
        return v.sum()

    def view(x):
        y = x.exp()
        y.t().add_(1)
        return y.sum()

    assert "exp" in pinned_ops(base, torch.rand(2, 2))
    assert "t" in pinned_ops(base, torch.rand(2, 2))
    assert "exp" in pinned_ops(view, torch.rand(2, 2))


def test_running_statistics_are_written():
    captured = captured_of(nn.BatchNorm1d(4), torch.rand(3, 4))
    assert {name for name in captured.pinned if "running" in name} == {
        name for name in captured.roles if "running" in name
    } != set()


def test_outputs_that_share_memory_are_pinned():
    def fn(x):
        y = x.exp()
        return y, y.view(-1), x.sin()

    captured = captured_of(fn, torch.rand(2, 2))
    assert captured.fresh_outputs == (False, False, True)
    assert "exp" in pinned_ops(fn, torch.rand(2, 2))


def test_narrow_floats_of_the_users_own_are_noticed():
    assert captured_of(lambda x: x.half().float(), torch.rand(2)).narrows
    assert not captured_of(lambda x: x.double().float(), torch.rand(2)).narrows


def test_ambient_autocast_is_noticed():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert captured_of(lambda x: x @ x, torch.rand(2, 2)).ambient == "cpu: bfloat16"
    assert captured_of(lambda x: x @ x, torch.rand(2, 2)).ambient is None


def test_training_or_not():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.rand(2, 2)
    assert captured_of(model, x).trains
    with torch.no_grad():
        assert not captured_of(model, x).trains


def test_dynamos_graph_is_left_as_it_was():
    def backend(gm, examples):
        before = gm.code, [(n.name, dict(n.meta)) for n in gm.graph.nodes]
        graph.forget_inputs(capture.capture(gm, examples).gm)
        after = gm.code, [(n.name, dict(n.meta)) for n in gm.graph.nodes]
        assert before[0] == after[0]
        assert [(name, list(meta)) for name, meta in before[1]] == [(name, list(meta)) for name, meta in after[1]]
        assert any("grapharg" in meta for _, meta in after[1])
        return gm.forward

    torch.compile(nn.Sequential(nn.Linear(2, 2)), backend=backend)(torch.rand(2, 2))


def test_operators_named_after_keywords_write_nothing():
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ~((a > 0) & (b > 0) | (a > b))

    gm = captured_of(fn, torch.rand(3), torch.rand(3)).gm
    assert [capture.writes(n) for n in gm.graph.nodes] == [[]] * len(gm.graph.nodes)


def test_a_read_by_stride_is_watched_until_its_operand_is_contiguous():
    def reads(x, dense: bool):
        y = x.exp()
        return (y.permute((0,)).contiguous() if dense else y).as_strided((2, 2), (1, 1)) * 2

    for dense in (False, True):
        captured = captured_of(lambda x, dense=dense: reads(x, dense), torch.rand(4))
        assert any("by stride" in reason for reason in captured.pinned.values()) == (not dense)
        assert bool(captured.read_by_stride) == (not dense)


def test_who_writes_without_saying_so_is_seen_by_the_version():
    def fn(i, w):
        y = w * 1
        z = F.embedding(i, y, max_norm=0.5)  # nothing but its documentation says that it writes
        return z.sum() + y.sum()

    with torch.no_grad():
        captured = captured_of(fn, torch.tensor([0, 2]), torch.rand(4, 3))
    (written,) = [name for name, facts in captured.facts.items() if facts.op == "mul"]
    assert captured.pinned[written] == "its memory is written in place"


def test_what_is_not_dense_keeps_its_strides_for_a_custom_operation():
    @torch.library.custom_op("fxamp_test::reads_strides", mutates_args=())
    def reads_strides(x: torch.Tensor) -> torch.Tensor:
        return x * x.stride(0)

    reads_strides.register_fake(lambda x: torch.empty_like(x))

    def fn(x, is_dense: bool):
        y = x.exp()
        return reads_strides(y if is_dense else y[:, ::2])

    for is_dense in (False, True):
        reasons = captured_of(lambda x, is_dense=is_dense: fn(x, is_dense), torch.rand(4, 4)).pinned.values()
        assert any("may read its strides" in reason for reason in reasons) == (not is_dense)


def test_who_hands_on_memory_here_though_the_table_does_not_say_so():
    def fn(x):
        y = x.exp()
        return (y + 1) * y.mul_(2)

    captured = captured_of(fn, torch.rand(2))
    assert [captured.facts[name].code.count("mul_") for name in captured.hands_on] == [1]
    assert {captured.facts[name].op for name in captured.hands_on} == {"mul"}
    assert len(captured.hands_on) == 1 < [f.op for f in captured.facts.values()].count("mul")


def test_no_name_is_remembered_of_what_may_hold_a_tensor():
    x = torch.ones(2)
    functions = torch.relu, F.gelu, operator.add, F.linear, torch.ops.aten.relu.default
    assert all(map(capture._holds_nothing, functions))
    assert not any(map(capture._holds_nothing, (x.relu, functools.partial(torch.add, x), lambda: x)))
