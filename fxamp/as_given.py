"""Nested graphs run as PyTorch runs them: each operation takes what it is given, in whatever format, and no policy is asked.

That is what `torch.amp.custom_fwd(cast_inputs=...)` wants of autocast: the inputs of an autograd.Function are cast, and its
forward and backward then run without autocast. And it is what becomes of a Function in which autocast casts nothing, since
all that it does is to move values, or to work element by element. The graphs of both were traced for fp32, so they are run
once more, on fake tensors, to see what comes out for other formats; whatever would be another program is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxamp import formats, graph, optable

if TYPE_CHECKING:
    from fxamp.capture import Captured


@dataclass(frozen=True)
class Given:
    """A graph whose inputs arrive in other formats."""

    inputs: Mapping[fx.Node, torch.dtype]
    """The format that each input is cast to before it is read; others are read as they come."""
    values: Mapping[fx.Node, Any]
    """The fake value of every node behind those casts."""

    def wanted(self, node: fx.Node) -> tuple[torch.dtype | None, ...]:
        """The format that each operand of a call is cast to; a cast of fxamp's own is there already."""
        if graph.is_own_cast(node):
            return tuple(None for _ in graph.operands(node))
        return tuple(self.inputs.get(x) for x in graph.operands(node))


@dataclass(frozen=True)
class Function:
    """Forward and backward of an autograd.Function."""

    forward: Given
    backward: Given


def casting(caller: fx.Node, captured: Captured, traced: torch.dtype) -> Function | str:
    """What forward and backward of a Function compute if its inputs are cast as it declares; or why they keep their formats.

    Args: `caller` calls both; `traced` is the format of the inputs to cast.
    """
    bodies = _bodies(caller, captured)
    if isinstance(bodies, str):
        return bodies
    forward, backward = bodies
    assert forward.function is not None
    assert forward.function.cast_inputs is not None
    arguments = _arguments(caller, forward, backward, traced, forward.function.cast_inputs)
    return arguments if isinstance(arguments, str) else _function(forward, backward, arguments)


def following(caller: fx.Node, captured: Captured, arriving: Mapping[fx.Node, torch.dtype]) -> Function | str:
    """What forward and backward of a Function compute that nobody casts anything in: given operands in these formats, where
    they differ from those that were traced. Or why they keep their formats."""
    bodies = _bodies(caller, captured)
    if isinstance(bodies, str):
        return bodies
    forward, backward = bodies
    inputs = forward.gm.graph.find_nodes(op="placeholder")
    pairs = zip(inputs, caller.args[len(caller.args) - len(inputs) :], strict=True)
    return _function(forward, backward, {x: arriving[y] for x, y in pairs if isinstance(y, fx.Node) and y in arriving})


def _bodies(caller: fx.Node, captured: Captured) -> tuple[Captured, Captured] | str:
    paths = list(graph.bodies(caller))
    if len(paths) != 2 or any(len(captured.callers[path]) != 1 for path in paths):
        return "its forward or backward serves several calls"
    # Only what is taken out counts: before torch 2.13 the operation also returns values that nobody but its backward reads.
    if any(x.target is not operator.getitem or x.name in captured.pinned for x in caller.users):
        return "its result is written in place, or shares memory with another output"
    return captured.bodies[paths[0]], captured.bodies[paths[1]]


def _function(forward: Captured, backward: Captured, inputs: Mapping[fx.Node, torch.dtype]) -> Function | str:
    first = _given(forward, inputs)
    if isinstance(first, str):
        return first
    handed = _handed_to_backward(forward, backward, first)
    if isinstance(handed, str):
        return handed
    second = _given(backward, handed)
    return second if isinstance(second, str) else Function(first, second)


def _arguments(
    caller: fx.Node, forward: Captured, backward: Captured, traced: torch.dtype, to: torch.dtype
) -> dict[fx.Node, torch.dtype] | str:
    """The inputs of the forward that are the Function's arguments, or views of those, with the format that they are cast to.

    Dynamo hands over what the forward reads from elsewhere in the same row. What has a gradient is an argument.
    """
    inputs = forward.gm.graph.find_nodes(op="placeholder")
    gradients = backward.gm.graph.output_node().args[0]
    outer = list(caller.args[len(caller.args) - len(inputs) :])
    if not isinstance(gradients, (tuple, list)) or len(gradients) != len(inputs):
        return "its backward returns something else than a gradient for each input"
    known = [x for x, gradient in zip(outer, gradients, strict=True) if gradient is not None and isinstance(x, fx.Node)]
    memory = {key for x in known for key in graph.storages(x)}
    cast: dict[fx.Node, torch.dtype] = {}
    for inside, outside in zip(inputs, outer, strict=True):
        value = graph.value_of(inside)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype in (torch.float64, to):
            continue
        if value.dtype != traced:
            return f"an input is {formats.name(value.dtype)} in the user's program"
        if not isinstance(outside, fx.Node) or not graph.storages(outside) & memory:
            return "an input without a gradient may be an argument, which is cast, or read from elsewhere, which is not"
        cast[inside] = to
    return cast


def _handed_to_backward(
    forward: Captured, backward: Captured, given: Given
) -> dict[fx.Node, torch.dtype] | str:
    """The formats that the inputs of the backward arrive in: gradients in those of the outputs, saved values in their own."""
    results = forward.gm.graph.output_node().args[0]
    if not isinstance(results, (tuple, list)) or len(results) != 2 or not isinstance(results[0], (tuple, list)):
        return "its forward returns something else than results and saved values"
    outputs, saved = (list(part) if isinstance(part, (tuple, list)) else [part] for part in results)
    memory = {key for node in forward.gm.graph.find_nodes(op="placeholder") for key in graph.storages(node)}
    if any(isinstance(x, fx.Node) and graph.storages(x) & memory for x in outputs):
        return "it returns the memory of an input"
    inputs = backward.gm.graph.find_nodes(op="placeholder")
    if len(inputs) != len(outputs) + len(saved):
        return "its backward takes something else than gradients and saved values"
    pairs = [(x, given.values[y]) for x, y in zip(inputs, (*outputs, *saved), strict=True) if isinstance(y, fx.Node)]
    both = [(x, graph.value_of(x), value) for x, value in pairs]
    return {
        x: value.dtype
        for x, old, value in both
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.dtype != value.dtype
    }


def _given(captured: Captured, inputs: Mapping[fx.Node, torch.dtype]) -> Given | str:
    """Runs a graph whose inputs are cast to these formats; or says why it must not be run so."""
    values: dict[fx.Node, Any] = {}
    nodes: Sequence[fx.Node] = list(captured.gm.graph.nodes)
    if captured.bodies:
        return "it has nested graphs of its own"
    if any(facts.region == "users" for facts in captured.facts.values()):
        return "it has an autocast region of its own"
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            value = graph.called_value(node)
            values[node] = graph.retyped(value, inputs[node]) if node in inputs else value
        elif node.op != "output":
            found = _called(node, captured.facts[node.name].op, values, inputs)
            if isinstance(found, _Refused):
                return found.reason
            values[node] = found
    memory = {graph.memory_of(values[node]) for node in inputs}
    pinned = [values[node] for node in nodes if node.name in captured.pinned and node in values]
    if any(graph.memory_of(t) in memory for value in pinned for t in graph.tensors_of(value)):
        return "it writes to an input, or hands its memory out twice"
    return Given(inputs, values)


@dataclass(frozen=True)
class _Refused:
    reason: str


def _called(
    node: fx.Node, op: str | None, values: Mapping[fx.Node, Any], inputs: Mapping[fx.Node, torch.dtype]
) -> Any:
    """What a call gives for the values of its operands; `_Refused` if it is not what was traced but for the format."""
    operands = list(graph.operands(node))
    if all(values[x] is graph.value_of(x) for x in operands):
        return graph.value_of(node)
    own = graph.is_own_cast(node)
    given = [graph.value_of(x) if own and x in inputs else values[x] for x in operands]
    held = {t.dtype for t in graph.tensors_of(given) if t.is_floating_point()}
    if len(held) > 1 and op not in optable.IN_EITHER_FORMAT:  # rules of shapes do not refuse what kernels may
        return _Refused(f"{node.name} would be given {' and '.join(sorted(map(formats.name, held)))}")
    try:
        value = graph.call_on_fakes(node, given)
    except Exception as error:  # anything the operation raises is its way to say no
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return _Refused(f"{node.name} refuses that: {first_line[:80]}")
    difference = graph.difference(value, graph.value_of(node), format_of=torch.float32)
    if difference is not None:
        return _Refused(f"{node.name}: {difference}")
    return graph.with_history_of(graph.value_of(node), value)
