from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from fxamp import capture, errors, graph, plan, testing
from fxamp.calls import Calls, Later
from fxamp.capture import Captured
from fxamp.plan import Plan
from fxamp.policy import Policy
from fxamp.testing.checks import capture_of
from tests import aliasing
from tests.programs import Residual, captured_of, graph_of, small_models


# ---- plans with a memory are those without --------------------------------------------------------------------------------
class Uncached(Calls):
    def __call__(self, node: torch.fx.Node, values: Any) -> Any:
        return graph.call_on_fakes(node, [value.make() if isinstance(value, Later) else value for value in values])


def made_with(calls: Calls, captured: Captured, **options: Any) -> Plan:
    with mock.patch.object(plan, "Calls", return_value=calls):
        return plan.plan(captured, Policy(), variant="bf16", **options)


def check_memory(captured: Captured) -> None:
    """Plans a graph without a memory, and twice with one, whose calls the second time are all remembered."""
    want = described(captured, made_with(Uncached(checked=False), captured))
    calls = Calls(checked=False)
    for _ in range(2):
        assert described(captured, made_with(calls, captured)) == want


def described(captured: Captured, made: Plan) -> list[Any]:
    """All decisions, the metadata of all values in program order, and which of them share memory."""
    numbers: dict[Hashable, int] = {}

    def of(tensor: torch.Tensor) -> tuple[Any, ...]:
        key = graph.memory_of(tensor)
        shape, strides = [str(s) for s in tensor.shape], [str(s) for s in tensor.stride()]
        memory = numbers.setdefault(key, len(numbers))
        return type(tensor), tensor.dtype, shape, strides, tensor.device, tensor.requires_grad, memory

    found: list[Any] = [made.outputs]
    for node in captured.gm.graph.nodes:
        decision = made.decisions.get(node.name)
        values = (graph.value_of(node), None if decision is None else decision.value)
        found.append((decision, [(type(value), [of(t) for t in graph.tensors_of(value)]) for value in values]))
    return [*found, *(described(captured.bodies[path], body) for path, body in made.bodies.items())]


@settings(max_examples=50)
@given(testing.programs(max_steps=10))
def test_random_programs(program: testing.Program):
    check_memory(capture_of(program))


@pytest.mark.parametrize("name", small_models())
@pytest.mark.parametrize("dynamic", [False, True])
def test_small_models(name: str, dynamic: bool):
    model, inputs = small_models()[name]
    if dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 0)
    check_memory(captured_of(model, *inputs))


def runs(program: aliasing.Program) -> bool:
    try:
        program(*(x.clone() for x in aliasing.inputs()))
    except RuntimeError:  # writes to what expand() made
        return False
    return True


@pytest.mark.parametrize("seed", [seed for seed in range(14) if runs(aliasing.random_program(seed))])
def test_views_and_writes(seed: int):
    program = aliasing.random_program(seed)
    check_memory(capture.capture(*graph_of(program, *(x.clone() for x in aliasing.inputs()))))


def test_results_in_several_tensors():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        for _ in range(3):
            values, indices = y.max(-1, keepdim=True)
            mean, _ = torch.var_mean(y, 1)
            y = (y - values) @ y + mean.sum() + indices
        return y

    check_memory(captured_of(fn, torch.randn(8, 8)))


# ---- how often is called --------------------------------------------------------------------------------------------------
def num_calls(captured: Captured) -> int:
    """How many calls of PyTorch's a plan takes."""
    real, count = graph.call_on_fakes, 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return real(*args)

    with mock.patch.object(graph, "call_on_fakes", counted):
        made_with(Calls(checked=False), captured)
    return count


@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_layers_are_called_once(dynamic: bool):
    def of(num_layers: int) -> int:
        x = torch.randn(4, 8)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        return num_calls(captured_of(nn.Sequential(*(Residual(8) for _ in range(num_layers))), x))

    assert 0 < of(2) == of(8)


# ---- one call -------------------------------------------------------------------------------------------------------------
def node_of(fn: Callable[..., Any], *inputs: Any) -> tuple[torch.fx.Node, list[Any]]:
    """The last call of a function's graph, and the values of its operands."""
    node = captured_of(fn, *inputs).gm.graph.output_node().all_input_nodes[0]
    return node, [graph.value_of(x) for x in graph.operands(node)]


def test_each_result_has_its_own_memory():
    node, values = node_of(lambda x: x.exp(), torch.randn(3))
    calls = Calls(checked=False)
    with mock.patch.object(graph, "call_on_fakes", wraps=graph.call_on_fakes) as called:
        results = [calls(node, values) for _ in range(3)]
    assert called.call_count == 1
    assert len({graph.memory_of(t) for t in [*results, *values]}) == 4


@pytest.mark.parametrize(
    "fn", [lambda x: x.t(), lambda x: x[1:], lambda x: x.reshape(-1), lambda x: F.dropout(x, training=False)]
)
def test_a_view_is_one_of_its_own_operand(fn: Callable[..., Any]):
    node, values = node_of(fn, torch.randn(4, 4))
    calls = Calls(checked=False)
    for _ in range(2):
        operand = graph.retyped(values[0], torch.bfloat16)
        assert graph.memory_of(calls(node, [operand])) == graph.memory_of(operand)


def _writes_its_operand(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.exp()


def _gives_one_tensor_twice(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.exp()
    return [y, y.detach()]


@pytest.mark.parametrize("fn", [_writes_its_operand, _gives_one_tensor_twice])
def test_what_cannot_be_made_again_is_called_again(fn: Callable[..., Any]):
    node, values = node_of(torch.exp, torch.randn(4))
    graph.retarget(node, fn)
    calls = Calls(checked=False)
    with mock.patch.object(graph, "call_on_fakes", wraps=graph.call_on_fakes) as called:
        for _ in range(2):
            calls(node, values)
    assert called.call_count == 2


def test_operands_that_share_memory_are_another_call():
    node, (x, y) = node_of(lambda x, y: x + y, torch.randn(3), torch.randn(3))
    calls = Calls(checked=False)
    with mock.patch.object(graph, "call_on_fakes", wraps=graph.call_on_fakes) as called:
        for values in ([x, y], [y, x], [x, x]):
            calls(node, values)
    assert called.call_count == 2


DIFFERENT = {
    "dtype": lambda t: t.to(torch.float16),
    "shape": lambda t: t.new_empty(4, 5),
    "strides": lambda t: t.t(),
    "requires_grad": lambda t: t.detach().requires_grad_(),
    "offset": lambda t: t.new_empty(20)[4:].view(4, 4),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_operands_are_another_call(name: str):
    node, (x,) = node_of(lambda x: x.exp(), torch.randn(4, 4))
    calls = Calls(checked=False)
    with x.fake_mode:
        other = DIFFERENT[name](x)
    with mock.patch.object(graph, "call_on_fakes", wraps=graph.call_on_fakes) as called:
        calls(node, [x])
        calls(node, [other])
    assert called.call_count == 2


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (2.0, 3.0)])
def test_other_arguments_are_another_call(one: Any, other: Any):
    graph_module = captured_of(lambda x: (x * one, x * other), torch.randn(4)).gm
    first, second = graph_module.graph.output_node().all_input_nodes
    calls = Calls(checked=False)
    with mock.patch.object(graph, "call_on_fakes", wraps=graph.call_on_fakes) as called:
        for node in (first, second):
            calls(node, [graph.value_of(x) for x in graph.operands(node)])
    assert called.call_count == 2


def test_a_memory_that_is_wrong_is_noticed():
    node, values = node_of(lambda x: x.exp(), torch.randn(3))
    calls = Calls(checked=True)
    calls(node, values)
    calls(node, values)
    with (
        mock.patch.object(graph, "call_on_fakes", return_value=graph.retyped(values[0], torch.float16)),
        pytest.raises(errors.IllegalGraph, match="an equal call gave"),
    ):
        calls(node, values)
