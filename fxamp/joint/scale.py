"""Loss scaling in the joint graph: the program sees true gradients, the backward computes with scaled ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from fxamp import errors, formats, graph, ops
from fxamp.joint import linearity
from fxamp.joint.descriptors import descriptors, input_of
from fxamp.passes import Change, Kept

_MUL = torch.ops.aten.mul.Tensor
_RECIPROCAL = torch.ops.aten.reciprocal.default


@dataclass(frozen=True)
class ScaleGradients:
    """Multiplies what enters the backward by the scale, divides what leaves it by the same, and says what overflowed.

    requires: joint graph with descriptors, whose input number `scale` is the loss scale, fp32 [] or, with `per_region`,
        [number of regions], and whose input number `probe`, fp32 [as many as its gradient holds], takes part in nothing.
    changes: the backward between tangents and gradients.  keeps: every gradient, up to what the format could not hold.

        dx: "f32[B]" = backward(tangent)     ->     s = mul(tangent, scale);  g = backward(s);  dx = mul(g, 1 / scale)
        probe's gradient: None               ->     largest |dx| of each gradient, inf or NaN where dx holds one

    Code of the user's that is not linear in a gradient (a hook that clips it, a Function that normalizes it) reads the true
    one:                 y = clamp(s, -1, 1)     ->     y = mul(clamp(mul(s, 1 / scale), -1, 1), scale)

    Where each region has a scale of its own, what comes from another one is brought to it:
                         g = backward(s)         ->     g = backward(mul(s, scale[here] / scale[there]))
    Which operation belongs where is told by marks. They decide what is scaled how far, and never what comes out.

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
    low: tuple[int, ...] = ()
    """Positions of the inputs whose gradients leave as they are computed, multiplied by the scale: weights in a low format, in
    which a true gradient would be lost."""
    shares: bool = False
    """Does the probe's gradient hold, behind the magnitudes, the share of each gradient that fp16 could not hold?"""
    num_regions: int = 0
    """Regions that are told apart: the probe's gradient says of each, behind all that, whether it overflowed by itself. 0: the
    graph is one."""
    per_region: bool = False
    """Has each region a scale of its own?"""
    marks: str = ""
    """Names the regions of the operations: part of the key that caches know this pass by."""

    def __call__(self, gm: fx.GraphModule) -> Change:
        output = next(iter(gm.graph.find_nodes(op="output")))
        inputs = gm.graph.find_nodes(op="placeholder")
        by_index = {d.idx: node for node in inputs if isinstance(d := node.meta.get("desc"), descriptors().PlainAOTInput)}
        results = list(output.args[0])
        wanted = dict(_gradients(output, results))
        position = next((i for i, desc in enumerate(output.meta["desc"]) if input_of(desc) == self.probe), None)
        if position is None:  # nothing in the graph is differentiable
            probe = by_index[self.probe].name
            return Change(pass_name=type(self).__name__, kept=(Kept(node=probe, reason="the graph has no backward"),))
        _refuse_wrapped(inputs)

        before = len(gm.graph.nodes)
        tangents = [x for x in inputs if isinstance(x.meta.get("desc"), descriptors().TangentAOTInput)]
        factors = Factors(by_index[self.scale], per_region=self.per_region, before=_first_user(tangents, output))
        gradients = Gradients(tangents, factors)
        gradients.walk(gm)
        made = {i: results[i] for i in wanted}
        for i, node in made.items():
            results[i] = gradients.brought(node, 0 if input_of(wanted[i]) in self.low else TRUE, before=output)
        results[position] = self._facts(wanted, results, gradients, factors, made, output)
        graph.set_arguments(output, (type(output.args[0])(results),), {})
        return Change(pass_name=type(self).__name__, num_added=len(gm.graph.nodes) - before)

    def _facts(
        self,
        wanted: Mapping[int, Any],
        results: Sequence[Any],
        gradients: Gradients,
        factors: Factors,
        made: Mapping[int, fx.Node],
        output: fx.Node,
    ) -> fx.Node:
        """What the probe's gradient is."""
        slot_of = {position: slot for slot, position in enumerate(self.slots)}
        slots: dict[int, int] = {}
        for i, desc in wanted.items():
            position = input_of(desc)
            slots[i] = len(self.slots) if position is None else slot_of.get(position, len(self.slots))
        num_slots = len(self.slots) + 1

        def insert(target: Any, *args: Any, name: str | None = None) -> fx.Node:
            return graph.insert_backward(target, args, before=output, name=name)

        scaled = [i for i, desc in wanted.items() if input_of(desc) in self.low]
        true = [i for i in slots if i not in scaled]
        largest = [
            insert(ops.LARGEST, [results[i] for i in those], [slots[i] for i in those], num_slots, name="largest_gradients")
            for those in (true, scaled)
            if those or those is true and not scaled
        ]
        if scaled:
            largest[-1] = insert(_MUL, largest[-1], factors(0, TRUE))
        parts = [functools.reduce(lambda a, b: insert(torch.ops.aten.maximum.default, a, b), largest)]
        if self.shares:
            by_scale: dict[fx.Node, list[int]] = {}
            for i in slots:
                by_scale.setdefault(factors.scale(gradients.region_of(made[i])), []).append(i)
            shares = [
                insert(ops.LOST_SHARES, [results[i] for i in those], scale, [slots[i] for i in those], num_slots)
                for scale, those in by_scale.items()
            ]
            parts.append(functools.reduce(lambda a, b: insert(torch.ops.aten.maximum.default, a, b), shares))
        if self.num_regions:
            passing, sides, regions = gradients.borders({made[i]: results[i] for i in wanted})
            nothing = torch.ops.aten.slice.Tensor, parts[0], 0, 0, 0
            sizes = insert(ops.LARGEST, passing, sides, 2 * len(regions)) if regions else insert(*nothing)
            parts.append(insert(ops.OVERFLOWED_REGIONS, sizes, regions, self.num_regions, name="overflowed_regions"))
        return parts[0] if len(parts) == 1 else insert(torch.ops.aten.cat.default, parts)


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


# ---- which gradient carries which scale -----------------------------------------------------------------------------------
TRUE: Final = -1
"""Where gradients belong that carry no scale: those that enter and leave the graph, and those that the user's code reads."""


class Factors:
    """What brings a gradient from one region to another, fp32 []. Nodes are made where they are first asked for."""

    def __init__(self, scale: fx.Node, *, per_region: bool, before: fx.Node) -> None:
        self._scale, self._per_region, self._before = scale, per_region, before
        self._made: dict[tuple[Any, ...], fx.Node] = {}

    def scale(self, region: int) -> fx.Node:
        """The scale of a region; of what belongs to none, that of the first one."""
        if not self._per_region:
            return self._scale
        return self._insert(torch.ops.aten.select.int, self._scale, 0, max(region, 0))

    def __call__(self, there: int, here: int) -> fx.Node | None:
        """The scale here over the one there; None: they are the same."""
        if there == here or (not self._per_region and TRUE not in (there, here)):
            return None
        if there == TRUE:
            return self.scale(here)
        inverse = self._insert(_RECIPROCAL, self.scale(there), name=None if self._per_region else "inv_scale")
        return inverse if here == TRUE else self._insert(_MUL, self.scale(here), inverse)

    def _insert(self, target: Any, *args: Any, name: str | None = None) -> fx.Node:
        key = (target, *args)
        if key not in self._made:
            self._made[key] = graph.insert_backward(target, args, before=self._before, name=name)
        return self._made[key]


class Gradients:
    """The gradients of a joint graph, and the region whose scale each of them carries."""

    def __init__(self, tangents: Sequence[fx.Node], factors: Factors) -> None:
        self._factors = factors
        self._region = dict.fromkeys(tangents, TRUE)
        self._depth = dict.fromkeys(tangents, 0)
        """How many borders lie on the way to it, at most. Gradients of a region at one depth are a part of it; parts hand on
        to deeper ones alone, also where regions take turns."""
        self._brought: dict[tuple[fx.Node, int], fx.Node] = {}
        self._crossings: dict[tuple[fx.Node, tuple[int, int]], fx.Node] = {}
        """(gradient, part that it enters) -> the gradient as it is read there."""

    def region_of(self, gradient: fx.Node) -> int:
        """`TRUE`, or the number of a region."""
        return self._region.get(gradient, 0)

    def walk(self, gm: fx.GraphModule) -> None:
        """Lets every operation read gradients with the scale of its region: true ones, if it is not linear in them."""
        for node in list(gm.graph.nodes):
            operands = [x for x in node.all_input_nodes if x in self._region]
            if node.op != "call_function" or not operands or not linearity.reads_values(node):
                continue
            region = self._region_for(node, operands)
            part = region, max(self._depth[x] + (self._region[x] != region) for x in operands)
            brought = {x: self.brought(x, region, before=node) for x in operands}
            self._crossings |= {(x, part): y for x, y in brought.items() if self._part(x) != part}
            graph.map_operands(node, lambda _, x, brought=brought: brought.get(x, x))
            values = graph.tensors_of(graph.value_of(node))
            if any(value.is_floating_point() or value.is_complex() for value in values):  # a mask says the same of both
                self._region[node], self._depth[node] = part

    def brought(self, gradient: fx.Node, region: int, *, before: fx.Node) -> fx.Node:
        """A gradient with the scale of this region. It is made in front of whoever asks first."""
        key = gradient, region
        if key not in self._brought:
            factor = self._factors(self.region_of(gradient), region)
            self._brought[key] = gradient if factor is None else _product(gradient, factor, before=before)
        return self._brought[key]

    def borders(self, results: Mapping[fx.Node, fx.Node]) -> tuple[list[fx.Node], list[int], list[int]]:
        """(gradients at the borders of parts, for each 2 i if it enters part i and 2 i + 1 if it leaves it, regions of parts).
        What does not survive being brought to a part counts as having left it. `results`: those that leave the graph, and what
        they are there."""
        parts: dict[tuple[int, int], int] = {}
        found: dict[tuple[fx.Node, int], None] = {}

        def note(gradient: fx.Node, part: tuple[int, int], *, leaves: bool) -> None:
            if part[0] != TRUE:
                found[gradient, 2 * parts.setdefault(part, len(parts)) + leaves] = None

        for (gradient, part), read in self._crossings.items():
            if isinstance(graph.value_of(gradient), torch.Tensor):
                note(gradient, part, leaves=False)
                note(gradient, self._part(gradient), leaves=True)
                note(read, part, leaves=True)
        for gradient, result in results.items():
            if gradient in self._region:
                note(result, self._part(gradient), leaves=True)
        return [x for x, _ in found], [side for _, side in found], [region for region, _ in parts]

    def _part(self, gradient: fx.Node) -> tuple[int, int]:
        return self._region[gradient], self._depth[gradient]

    def _region_for(self, node: fx.Node, operands: Sequence[fx.Node]) -> int:
        if linearity.is_not_linear(node, operands):
            return TRUE
        together = next((x for x in operands if not isinstance(graph.value_of(x), torch.Tensor)), None)
        if together is not None:  # of a tuple, which is not brought anywhere
            return self._region[together]
        mark = (node.meta.get("custom") or {}).get(graph.REGION)
        if mark is not None:
            return mark
        # What no named region holds goes with the gradients that it gets. Brought to a scale of its own, what comes out of one
        # region would have to pass through it on its way to the next.
        scaled = [x for x in operands if self._region[x] != TRUE]
        return self._region[max(scaled, key=self._depth.__getitem__)] if scaled else 0


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
