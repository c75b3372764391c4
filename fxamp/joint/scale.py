"""Loss scaling in the joint graph: the program sees true gradients, the backward computes with scaled ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxamp import errors, formats, graph, ops
from fxamp.joint.descriptors import descriptors, input_of
from fxamp.passes import Change, Kept

_MUL = torch.ops.aten.mul.Tensor
_RECIPROCAL = torch.ops.aten.reciprocal.default


@dataclass(frozen=True)
class ScaleGradients:
    """Multiplies what enters the backward by the scale, divides what leaves it by the same, and says what overflowed.

    requires: joint graph with descriptors, whose input number `scale` is the loss scale, fp32 [], and whose input number
        `probe`, fp32 [number of slots + 1] (twice that with `shares`), takes part in nothing.
    changes: the backward between tangents and gradients.  keeps: every gradient, up to what the format could not hold.

        dx: "f32[B]" = backward(tangent)     ->     s = mul(tangent, scale);  g = backward(s);  dx = mul(g, 1 / scale)
        probe's gradient: None               ->     largest |dx| of each gradient, inf or NaN where dx holds one

    Code of the user's that is not linear in a gradient (a hook that clips it, a Function that normalizes it) reads the true
    one:                 y = clamp(s, -1, 1)     ->     y = mul(clamp(mul(s, 1 / scale), -1, 1), scale)

    A power of two is undone without a trace: both products are exact, but for numbers at the ends of the format of dx.
    Gradients are divided in fp32 and leave in the dtype that they were traced in.
    """

    scale: int
    """Position of the scale among the graph's inputs."""
    probe: int
    """Position of the probe among the graph's inputs."""
    slots: tuple[int, ...]
    """Positions of the inputs whose gradients have slots in the probe's gradient, in the order of the slots. All other
    gradients share a slot behind them."""
    shares: bool = False
    """Does the probe's gradient hold, behind the magnitudes, the share of each gradient that fp16 could not hold?"""

    def __call__(self, gm: fx.GraphModule) -> Change:
        output = next(iter(gm.graph.find_nodes(op="output")))
        inputs = gm.graph.find_nodes(op="placeholder")
        by_index = {d.idx: node for node in inputs if isinstance(d := node.meta.get("desc"), descriptors().PlainAOTInput)}
        scale, probe = by_index[self.scale], by_index[self.probe]
        results = list(output.args[0])
        gradients = dict(_gradients(output, results))
        position = next((i for i, desc in enumerate(output.meta["desc"]) if input_of(desc) == self.probe), None)
        if position is None:  # nothing in the graph is differentiable
            return Change(pass_name=type(self).__name__, kept=(Kept(node=probe.name, reason="the graph has no backward"),))
        _refuse_wrapped(inputs)

        before = len(gm.graph.nodes)
        tangents = [x for x in inputs if isinstance(x.meta.get("desc"), descriptors().TangentAOTInput)]
        inverse = graph.insert_backward(_RECIPROCAL, (scale,), before=_first_user(tangents, output), name="inv_scale")
        _compute_with_true_gradients(gm, tangents, scale, inverse)
        for tangent in tangents:
            if tangent.users:
                _scaled(tangent, scale, before=_first_user((tangent,), output))
        divided: dict[fx.Node, fx.Node] = {}
        for i in gradients:
            node = results[i]
            if node not in divided:
                divided[node] = _product(node, inverse, before=output)
            results[i] = divided[node]
        results[position] = self._facts(gradients, results, scale, output)
        graph.set_arguments(output, (type(output.args[0])(results),), {})
        return Change(pass_name=type(self).__name__, num_added=len(gm.graph.nodes) - before)

    def _facts(self, gradients: dict[int, Any], results: list[Any], scale: fx.Node, output: fx.Node) -> fx.Node:
        slot_of = {position: slot for slot, position in enumerate(self.slots)}
        slots: list[int] = []
        nodes: list[fx.Node] = []
        for i, desc in gradients.items():
            position = input_of(desc)
            slots.append(len(self.slots) if position is None else slot_of.get(position, len(self.slots)))
            nodes.append(results[i])
        num_slots = len(self.slots) + 1
        largest = graph.insert_backward(ops.LARGEST, (nodes, slots, num_slots), before=output, name="largest_gradients")
        if not self.shares:
            return largest
        shares = graph.insert_backward(ops.LOST_SHARES, (nodes, scale, slots, num_slots), before=output, name="lost_shares")
        return graph.insert_backward(torch.ops.aten.cat.default, ([largest, shares],), before=output)


def _gradients(output: fx.Node, results: list[Any]) -> Iterator[tuple[int, Any]]:
    """(position, descriptor) of the gradients among a joint graph's outputs."""
    for i, (result, desc) in enumerate(zip(results, output.meta["desc"], strict=True)):
        if isinstance(desc, descriptors().GradAOTOutput) and isinstance(result, fx.Node):
            yield i, desc


def _refuse_wrapped(inputs: list[fx.Node]) -> None:
    for node in inputs:
        desc: Any = node.meta.get("desc")
        kind = descriptors().TangentAOTInput
        if not isinstance(desc, kind) and isinstance(_innermost(desc), kind):
            raise errors.CannotScale(
                f"an output of the graph is a tensor subclass, whose gradient arrives in parts ({desc.expr()})",
                way_out="Return plain tensors from the compiled part, or use bf16, which needs no loss scaling",
            )


def _innermost(desc: Any) -> Any:
    while hasattr(desc, "base"):
        desc = desc.base
    return desc


def _first_user(tangents: Sequence[fx.Node], default: fx.Node) -> fx.Node:
    return min((user for tangent in tangents for user in tangent.users), default=default)  # nodes of one graph are ordered


_NAMES = """
    clamp clamp_min clamp_max hardtanh nan_to_num maximum minimum pow sqrt rsqrt reciprocal exp exp2 expm1 log log2 log1p
    sigmoid tanh sign sgn round floor ceil trunc relu lt le gt ge eq ne isnan isinf cumprod prod
"""
_NOT_LINEAR = frozenset(getattr(torch.ops.aten, name) for name in _NAMES.split())
"""What does not commute with a factor. Some only ask for a sign; it is no loss to ask the true value."""

_PRODUCTS = frozenset((torch.ops.aten.mul, torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.dot, torch.ops.aten.addcmul))
_SUMS = frozenset((torch.ops.aten.add, torch.ops.aten.sub, torch.ops.aten.rsub, torch.ops.aten.where))


def _compute_with_true_gradients(
    gm: fx.GraphModule, tangents: Sequence[fx.Node], scale: fx.Node, inverse: fx.Node
) -> None:
    """Lets what is not linear in a gradient read the true one, and scales what comes out."""
    gradients = set(tangents)
    for node in list(gm.graph.nodes):
        operands = [x for x in node.all_input_nodes if x in gradients]
        if node.op != "call_function" or not operands:
            continue
        result: fx.Node = node
        if _is_not_linear(node, operands):
            true = {x: _product(x, inverse, before=node) for x in operands}
            graph.map_operands(node, lambda _, x, true=true: true.get(x, x))
            value = graph.value_of(node)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and node.users:
                result = _scaled(node, scale, before=graph.after(node))
        values = graph.tensors_of(graph.value_of(result))
        if any(value.is_floating_point() or value.is_complex() for value in values):  # a mask says the same of both
            gradients.add(result)


def _scaled(value: fx.Node, scale: fx.Node, *, before: fx.Node) -> fx.Node:
    """Lets all users of a value read it scaled. Returns the product, which is fp32, or as wide as the value."""
    scaled = _product(value, scale, before=before)
    graph.replace(value, scaled, except_in=frozenset(_made_from(value, scaled)))
    return scaled


def _is_not_linear(node: fx.Node, gradients: Sequence[fx.Node]) -> bool:
    """Is it a product of two gradients, a quotient by one, a sum of one and something else, or of `_NOT_LINEAR`?"""
    packet = getattr(node.target, "overloadpacket", None)
    terms = node.args[1:] if packet is torch.ops.aten.where else node.args
    is_mixed = packet in _SUMS and any(not _is_zero(x) for x in terms if x not in gradients)
    is_product = packet in _PRODUCTS and sum(x in gradients for x in node.args) > 1
    is_quotient = packet is torch.ops.aten.div and node.args[1] in gradients
    return packet in _NOT_LINEAR or is_mixed or is_product or is_quotient


def _is_zero(x: Any) -> bool:
    """Is it a number or a tensor of zeros, which no factor changes?"""
    if not isinstance(x, fx.Node):
        return isinstance(x, (int, float)) and x == 0
    packet = getattr(x.target, "overloadpacket", None)
    if packet in (torch.ops.aten.zeros, torch.ops.aten.zeros_like):
        return True
    value = x.args[1] if packet is torch.ops.aten.full else x.args[0] if packet is torch.ops.aten.scalar_tensor else None
    return isinstance(value, (int, float)) and value == 0


def _made_from(value: fx.Node, scaled: fx.Node) -> Iterator[fx.Node]:
    """The nodes between a value and its product that were put there for it."""
    node = scaled
    while node is not value:
        yield node
        node = node.all_input_nodes[0]


def _product(value: fx.Node, factor: fx.Node, *, before: fx.Node) -> fx.Node:
    """`value * factor` in fp32, or what is wider, rounded once to the dtype of `value`."""
    dtype = graph.value_of(value).dtype
    narrow = dtype.is_floating_point and dtype != torch.float32 and formats.is_lossless(dtype, torch.float32)
    wide = graph.insert_backward(graph.JOINT_CAST, (value, torch.float32), before=before) if narrow else value
    product = graph.insert_backward(_MUL, (wide, factor), before=before)
    return graph.insert_backward(graph.JOINT_CAST, (product, dtype), before=before) if narrow else product


@dataclass(frozen=True)
class KeepFiniteStatistics:
    """Keeps the inf and NaN of an overflowed forward out of running statistics: the step is going to be left out, but what a
    buffer has taken in once stays in every average after it.

    requires: joint graph with descriptors.  changes: what is written to the inputs at these positions.
    keeps: every finite value.

        copy_(running_mean, new)     ->     copy_(running_mean, where(abs(new) < inf, new, running_mean))
    """

    inputs: tuple[int, ...]
    """Positions of running statistics among the graph's inputs."""

    def __call__(self, gm: fx.GraphModule) -> Change:
        before = len(gm.graph.nodes)
        for write in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            old, new = write.args[:2]
            desc: Any = old.meta.get("desc") if isinstance(old, fx.Node) else None
            is_input = isinstance(desc, descriptors().PlainAOTInput)
            if not (is_input and desc.idx in self.inputs and isinstance(new, fx.Node)):
                continue
            size = graph.insert_beside(torch.ops.aten.abs.default, (new,), before=write)
            is_finite = graph.insert_beside(torch.ops.aten.lt.Scalar, (size, math.inf), before=write)
            kept = graph.insert_beside(torch.ops.aten.where.self, (is_finite, new, old), before=write)
            graph.set_arguments(write, (old, kept, *write.args[2:]), dict(write.kwargs))
        return Change(pass_name=type(self).__name__, num_added=len(gm.graph.nodes) - before)
