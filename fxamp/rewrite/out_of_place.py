"""Turns in-place operations into ordinary ones where nobody can tell: what is never written may be lowered."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses import FakeTensor

from fxamp import capture, graph, optable
from fxamp.passes import Change, Kept

_OPERATORS: Final[Mapping[Any, Any]] = MappingProxyType(
    {
        operator.iadd: operator.add,
        operator.isub: operator.sub,
        operator.imul: operator.mul,
        operator.itruediv: operator.truediv,
    }
)


_Form = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""(target, args, kwargs) of a node."""


@dataclass(frozen=True)
class OutOfPlace:
    """Replaces an in-place operation whose old value nobody reads any more by its ordinary form.

    requires: Dynamo graph as captured.  changes: targets, and recorded values that lie in the same memory.  keeps: every
    value, in eager execution bit for bit; inputs, parameters and buffers are always written in place.

        y: "f32[B]" = linear(x, w)                y: "f32[B]" = linear(x, w)
        z: "f32[B]" = relu(y, inplace=True)  ->   z: "f32[B]" = relu(y, inplace=False)
    kept: `y.relu_()` where y, or a view of it, is read again: its reader sees the new value; what draws random numbers, since
    compiled `dropout` and `dropout_` draw different ones.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_marked, kept = 0, list[Kept]()
        for part in graph.all_of(gm):
            num, more = _out_of_place(part)
            num_marked, kept = num_marked + num, kept + more
        return Change(pass_name=type(self).__name__, num_marked=num_marked, kept=tuple(kept))


def _out_of_place(gm: fx.GraphModule) -> tuple[int, list[Kept]]:
    """(how many operations of one graph became ordinary, those that stay in place and why)."""
    nodes = list(gm.graph.nodes)
    forms = {node: form for node in nodes if (form := _ordinary_form(node)) is not None}
    if not forms:  # nearly always, and what follows looks at all memory
        return 0, []
    position = {node: i for i, node in enumerate(nodes)}
    modes = capture.mode_indices(nodes)
    members: dict[Hashable, list[fx.Node]] = {}
    for node in nodes:
        for key in graph.storages(node):
            members.setdefault(key, []).append(node)
    num_marked, kept, starts = 0, list[Kept](), dict[Hashable, list[fx.Node]]()
    for node, form in forms.items():
        keys = graph.storages(node)
        group = [n for key in keys for n in members[key]]
        obstacle = _obstacle(node, group, position, modes) or _try(node, form)
        if obstacle is not None:
            kept.append(Kept(node=node.name, reason=obstacle, where=capture.source_line(node)[0]))
            continue
        for key in keys:
            starts.setdefault(key, []).append(node)
        num_marked += 1
    for key, first in starts.items():
        _move(members[key], first)
    if num_marked:
        gm.recompile()
    return num_marked, kept


def _try(node: fx.Node, form: _Form) -> str | None:
    """Gives a node its ordinary form; or leaves it, and says why that would not be the same."""
    in_place = (node.target, node.args, dict(node.kwargs))
    _become(node, form)
    try:
        value = graph.call_on_fakes(node, [graph.value_of(x) for x in graph.operands(node)])
        refusal = graph.difference(value, graph.value_of(node))  # x_f32.add_(y_f64) is f32, x_f32.add(y_f64) is not
        if refusal is None and value.stride() != graph.value_of(node).stride():
            refusal = "its result has other strides"
    except Exception as error:  # whatever the ordinary form raises is its way to say no
        refusal = f"it raises {type(error).__name__}"
    if refusal is not None:
        _become(node, in_place)
        return f"out of place {refusal}"
    return None


def _move(group: list[fx.Node], starts: list[fx.Node]) -> None:
    """Notes that from each of `starts` on, the members of a group lie in memory of their own."""
    part = 0
    for node in group:
        part += node in starts
        graph.set_meta(node, {graph.MEMORY: (group[0].name, part)})


def _become(node: fx.Node, form: _Form) -> None:
    target, args, kwargs = form
    graph.retarget(node, target)
    graph.set_arguments(node, args, kwargs)


def _ordinary_form(node: fx.Node) -> _Form | None:
    """The same operation out of place; None for what is not in place, or has no such form."""
    if node.op not in ("call_function", "call_method") or node.kwargs.get("out") is not None or not node.args:
        return None
    args, kwargs = node.args, dict(node.kwargs)
    if node.op == "call_method":
        name = str(node.target)
        plain = name[:-1] if name.endswith("_") and not name.endswith("__") else ""
        return (plain, args, kwargs) if plain in _SAME_VALUE and hasattr(torch.Tensor, plain) else None
    if node.target in _OPERATORS:
        return _OPERATORS[node.target], args, kwargs
    if kwargs.get("inplace"):
        return node.target, args, kwargs | {"inplace": False}
    position = capture.inplace_position(node.target)
    if position is not None and position < len(args) and args[position] is True:
        return node.target, (*args[:position], False, *args[position + 1 :]), kwargs
    return None


_SAME_VALUE: Final = frozenset(
    ("add", "sub", "mul", "div", "relu", "sigmoid", "tanh", "clamp", "clamp_min", "clamp_max", "neg", "masked_fill")
)
"""Methods whose ordinary form computes what the in-place form writes (not so `copy_`, `zero_`, random fills)."""


def _obstacle(
    node: fx.Node, group: list[fx.Node], position: Mapping[fx.Node, int], modes: Mapping[fx.Node, int]
) -> str | None:
    """Why somebody could tell an in-place operation from its ordinary form; None if nobody can."""
    if capture.name_of(node) is None:
        return "it is not an operation of torch's, and may mean something else by inplace"
    if _draws(node):
        return "compiled, its ordinary form draws other random numbers"
    if any(type(t) is not FakeTensor for n in node.all_input_nodes for t in graph.tensors_of(graph.value_of(n))):
        return "a value is more than a plain tensor"
    if len(graph.storages(node)) != 1:
        return "its result is not one tensor"
    for member in group:
        if member.op in ("placeholder", "get_attr"):
            return f"it writes to {member.name}, which is not the graph's own"
        if position[member] >= position[node]:
            continue
        if modes[member] != modes[node]:
            return f"{member.name} was computed in another grad mode"  # in place it keeps its history, out of place not
        late = [user for user in member.users if position[user] > position[node]]
        if late:
            return f"{late[0].name} reads {member.name} again"
    return None


_RANDOM: Final = frozenset(optable.RANDOM.split())


def _draws(node: fx.Node) -> bool:
    """Does it draw random numbers? Not so in evaluation."""
    name = capture.name_of(node)
    return name in _RANDOM and graph.argument(node, 3 if name == "rrelu" else 2, "training") is not False
