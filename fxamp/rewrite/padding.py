"""RELAXED: logits over a number of classes that the matrix units cannot take become a few more, which no loss sees.

A vocabulary of 50257 misses every alignment there is. Inductor pads such products too, but hands on the slice: kernels then
read rows that start anywhere, and in the backward the gradient of the logits, the largest value of the model, is copied once
more to be padded again. Here the padding stays up to the loss, and its gradient comes out padded.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxamp import capture, graph
from fxamp.passes import Change, Kept

MULTIPLE: Final = 64
"""What the number of classes is brought to: rows of 128 bytes in 16 bits, and whole tiles of a matrix product. The fastest of
8, 64 and 128 on an H200, for 50257 classes."""

MIN_CLASSES: Final = 1024
"""Fewer are not worth the mask."""

ALIGNMENT: Final = 8
"""In numbers of 16 bits: what matrix units take without padding."""

_ROWS_STAY: Final = frozenset(("float", "to", "type", "contiguous", "clone", "view", "reshape", "flatten", "getitem"))
"""What may stand between the logits and the loss, where it leaves the last dimension as it is."""


@dataclass(frozen=True)
class PadLogits:
    """Pads the classes of a product that only a cross entropy reads, and masks the padding by -inf.

    requires: Dynamo graph.  changes: the weight, and bias, of the product are padded by 0; what the loss reads has -inf there.
    keeps: the loss and its gradients, up to the order of sums: exp(-inf) adds 0.

        y: "f32[N, 50257]" = linear(h, w)     ->     p = constant_pad_nd(w, (0, 0, 0, 47));  y: "f32[N, 50304]" = linear(h, p)
        z = cross_entropy(y, t)                      z = cross_entropy(masked_fill(y, arange(50304) >= 50257, -inf), t)
    kept: logits that anything else reads, class weights, label smoothing, classes in another dimension, or a symbolic number
    of them.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_added, kept = 0, list[Kept]()
        for part in graph.all_of(gm):
            losses = [node for node in part.graph.nodes if capture.name_of(node) in ("cross_entropy", "cross_entropy_loss")]
            for loss in losses:
                try:
                    num_added += _pad(_chain(loss), loss)
                except Unfit as reason:
                    kept.append(Kept(node=loss.name, reason=str(reason), where=capture.source_line(loss)[0]))
            if losses:
                part.recompile()
        return Change(pass_name=type(self).__name__, num_added=num_added, kept=tuple(kept))


class Unfit(Exception):
    """Why logits stay as they are."""


# ---- what is looked for -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Chain:
    """A product, and what stands between it and a loss, each read by the next one alone."""

    product: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    classes_of_weight: int
    """Which dimension of the weight counts the classes, from the end: -2 of a linear, -1 of a matmul."""
    rest: tuple[fx.Node, ...]
    num_classes: int


def _chain(loss: fx.Node) -> _Chain:
    """The product whose rows a loss reads. Raises Unfit."""
    logits, target = graph.argument(loss, 0, "input", "self"), graph.argument(loss, 1, "target")
    if not isinstance(logits, fx.Node) or not isinstance(target, fx.Node):
        raise Unfit("its operands are not computed here")
    if graph.value_of(logits).dim() > 2 or graph.value_of(target).is_floating_point():
        raise Unfit("classes are not the last dimension, or the targets are probabilities")
    if graph.argument(loss, 2, "weight") is not None or _smoothing(loss):
        raise Unfit("it weighs classes, or smooths labels")
    num_classes = graph.value_of(logits).shape[-1]
    if type(num_classes) is not int:
        raise Unfit("the number of classes is symbolic")
    if num_classes < MIN_CLASSES or num_classes % ALIGNMENT == 0:
        raise Unfit(f"{num_classes} classes are few, or aligned")
    rest = list[fx.Node]()
    node = logits
    while capture.name_of(node) in _ROWS_STAY and isinstance(source := graph.argument(node, 0, "input", "self"), fx.Node):
        rest.append(node)
        node = source
    for x in (node, *rest):
        if len(x.users) > 1 or graph.MEMORY in x.meta:
            raise Unfit(f"{x.name} is read by more than the loss")
    weight, bias, dim = _weight(node)
    if graph.value_of(weight).shape[dim] != num_classes:
        raise Unfit(f"the product {node.name} has other classes")
    return _Chain(
        product=node, weight=weight, bias=bias, classes_of_weight=dim, rest=tuple(reversed(rest)), num_classes=num_classes
    )


def _weight(product: fx.Node) -> tuple[fx.Node, fx.Node | None, int]:
    """(weight, bias, dimension of the weight that counts the classes) of a product. Raises Unfit for anything else."""
    name = capture.name_of(product)
    if name not in ("linear", "matmul", "mm"):
        raise Unfit(f"the logits are made by {name or product.name}, which is no product with a weight")
    weight = graph.argument(product, 1, "weight", "other", "mat2")
    bias = graph.argument(product, 2, "bias") if name == "linear" else None
    if not isinstance(weight, fx.Node) or graph.value_of(weight).dim() != 2:
        raise Unfit(f"the weight of {product.name} is no matrix")
    if list(graph.operands(product)).count(weight) > 1:
        raise Unfit(f"the weight of {product.name} is also what it is multiplied by")
    values = [graph.value_of(x) for x in graph.operands(product)]
    if not all(isinstance(v, Tensor) and v.layout == torch.strided and type(v) in graph.PLAIN for v in values):
        raise Unfit(f"an operand of {product.name} is more than a plain tensor")
    return weight, bias if isinstance(bias, fx.Node) else None, -2 if name == "linear" else -1


def _smoothing(loss: fx.Node) -> bool:
    is_aten = capture.name_of(loss) == "cross_entropy_loss" or isinstance(loss.target, torch._ops.OpOverload)
    return bool(graph.argument(loss, 5 if is_aten else 7, "label_smoothing"))


# ---- the edit -----------------------------------------------------------------------------------------------------------
def _pad(chain: _Chain, loss: fx.Node) -> int:
    """Pads a product, and what follows it, up to the loss. Returns how many nodes that adds. Raises Unfit, and leaves the
    graph as it was, where something between them does not take more classes."""
    product, wide = chain.product, -(-chain.num_classes // MULTIPLE) * MULTIPLE
    made = list[fx.Node]()

    def put(target: Any, *args: Any, before: fx.Node, **kwargs: Any) -> fx.Node:
        made.append(graph.insert_call(target, args, kwargs, before=before))
        return made[-1]

    more = wide - chain.num_classes
    padding = (0, 0, 0, more) if chain.classes_of_weight == -2 else (0, more)
    padded = {chain.weight: put(torch.ops.aten.constant_pad_nd.default, chain.weight, padding, before=product)}
    if chain.bias is not None:
        padded[chain.bias] = put(torch.ops.aten.constant_pad_nd.default, chain.bias, (0, more), before=product)
    path = (product, *chain.rest)
    before = {node: (node.args, node.kwargs, graph.value_of(node)) for node in path}
    try:
        graph.map_operands(product, lambda _, x: padded.get(x, x))
        for node in path:
            _widen(node, chain.num_classes, wide)
    except Unfit:
        for node, (args, kwargs, value) in before.items():
            graph.set_arguments(node, args, dict(kwargs))
            graph.set_value(node, value)
        for node in reversed(made):
            graph.erase(node)
        raise
    logits = path[-1]
    columns = put(torch.arange, wide, device=graph.value_of(logits).device, before=loss)
    is_padding = put(operator.ge, columns, chain.num_classes, before=loss)
    masked = put(torch.ops.aten.masked_fill.Scalar, logits, is_padding, float("-inf"), before=loss)
    graph.map_operands(loss, lambda _, x: masked if x is logits else x)
    return len(made)


def _widen(node: fx.Node, num_classes: int, wide: int) -> None:
    """Lets a node whose operands have become wider yield rows of `wide` numbers. Raises Unfit if it would be anything else."""
    old = graph.value_of(node)
    if capture.name_of(node) in ("view", "reshape"):
        sizes = node.args[1:] if len(node.args) > 2 else graph.argument(node, 1, "shape", "size")
        sizes = list(sizes) if isinstance(sizes, (tuple, list)) else [sizes]
        if sizes[-1:] not in ([-1], [num_classes]):
            raise Unfit(f"{node.name} says how many classes there are in a way of its own")
        graph.set_arguments(node, (graph.argument(node, 0, "input", "self"), (*sizes[:-1], wide)), {})
    try:
        new = graph.call_on_fakes(node, [graph.value_of(x) for x in graph.operands(node)])
    except (RuntimeError, TypeError, ValueError) as error:
        raise Unfit(f"{node.name} does not take more classes: {str(error).splitlines()[0]}") from None
    if new.dtype != old.dtype or (*new.shape[:-1], num_classes) != tuple(old.shape) or new.shape[-1] != wide:
        raise Unfit(f"{node.name} does not leave rows as they are")
    graph.set_value(node, graph.with_history_of(old, new))
