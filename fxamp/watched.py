"""What stats="overflow" watches: a table of the values of a graph, made before it is lowered, so that a warm start has it too.

The values themselves are found in the joint graph, by `joint.watch`, through marks that AOTAutograd carries there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import fx

from fxamp import capture, formats, graph
from fxamp.capture import Role

Phase = Literal["input", "forward", "backward", "arriving", "scaled"]

INLINED: Final = frozenset(("tag_activation_checkpoint", "autograd_function_apply", "wrap_activation_checkpoint"))
"""Higher-order operations whose bodies AOTAutograd traces into the graph around them, so that what is inside is watched."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A value, or several of one operation, in which inf and NaN are looked for."""

    phase: Phase
    """"input": of the graph. "forward": results of an operation. "backward": gradients that an operation hands on. "arriving":
    the gradient of an output of the graph. "scaled": that, times the loss scale."""
    name: str = ""
    """Of an input, as the user knows it."""
    op: str = ""
    """Canonical operation, "" for an input. Of a cast of fxamp's: the operation that it serves; of the gradient of an output:
    the operation that made the output."""
    module: str = ""
    where: str = ""
    code: str = ""
    format: str = ""
    """Short name of the format: of the result, in the backward of what the operation read."""
    role: Role | None = None
    """Of an input."""
    is_cast: bool = False
    """Is it a cast of fxamp's, forward of what `op` reads, or backward of the gradient of its result?"""
    is_meant: bool = False
    """Does the program write an infinity there by itself, as masks of attention have them?"""
    hides: bool = False
    """Is it a higher-order operation, inside of which nothing is watched?"""


@dataclass(frozen=True, kw_only=True)
class Table:
    """All that is watched in one graph: its inputs, two entries for each output, then two for each operation."""

    entries: tuple[Watched, ...]
    num_inputs: int
    num_outputs: int

    def arriving(self, output: int | None) -> int:
        """The entry of the gradient that arrives for an output; behind it is the one of its scaled value. None: of something
        else, such as memory that several outputs share."""
        return self.num_inputs + 2 * (self.num_outputs if output is None else output)


def mark(gm: fx.GraphModule, roles: Mapping[str, Role]) -> Table:
    """Marks every operation of a rewritten Dynamo graph, and of the graphs nested in it, with its entry. The entry of its
    gradients is the next one."""
    inputs = gm.graph.find_nodes(op="placeholder")
    outputs = list(graph.operands(gm.graph.output_node()))
    entries = [
        Watched(
            phase="input",
            name=_input_name(node),
            role=roles[node.name],
            where=_first_use(node),
            format=_format(node),
        )
        for node in inputs
    ]
    for node in (*outputs, None):
        facts = {} if node is None else _facts(node)
        entries += [Watched(phase="arriving", **facts), Watched(phase="scaled", format="fp32", **facts)]
    for node in _operations(gm):
        graph.annotate(node, graph.WATCHED, len(entries))
        entries += _of_operation(node)
    return Table(entries=tuple(entries), num_inputs=len(inputs), num_outputs=len(outputs))


def _operations(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for part in graph.all_of(gm):
        for node in part.graph.nodes:
            if node.op in ("call_function", "call_method"):
                yield node


def _of_operation(node: fx.Node) -> tuple[Watched, Watched]:
    facts, is_cast = _facts(node), graph.is_own_cast(node)
    is_meant = any(map(_is_infinite, graph.constants(node)))
    return (
        Watched(phase="forward", format=_format(node), is_meant=is_meant, is_cast=is_cast, **facts),
        Watched(phase="backward", format=_format(*node.all_input_nodes), is_cast=is_cast, **facts),
    )


def _facts(node: fx.Node) -> dict[str, Any]:
    """What the entries of a node have in common."""
    node = _served(node) if graph.is_own_cast(node) else node
    if node.op == "placeholder":
        return {"name": _input_name(node)}
    op = capture.name_of(node) or node.name
    where, code = capture.source_line(node)
    hides = op.startswith("higher_order::") and op.removeprefix("higher_order::") not in INLINED
    return {"op": op, "module": capture.module_path(node), "where": where, "code": code, "hides": hides}


def _served(cast: fx.Node) -> fx.Node:
    """The operation that a narrowing prepares an operand for, or whose result a widening hands on."""
    source, result = (graph.value_of(x).dtype for x in (cast.all_input_nodes[0], cast))
    if formats.is_lossless(source, result):
        return cast.all_input_nodes[0]
    return next((user for user in cast.users if user.op != "output"), cast)


def _input_name(node: fx.Node) -> str:
    """"layers.0.weight" of a parameter, "x" or "batch['ids']" of what the user calls the function with."""
    name = graph.input_name(node)
    source: Any = getattr(getattr(node, "_dynamo_source", None), "name", "")
    argument = _ARGUMENT.match(str(source() if callable(source) else source))
    return argument["name"] + argument["rest"] if name == node.name and argument else name


_ARGUMENT: Final = re.compile(r"[LG]\['(?P<name>\w+)'\](?P<rest>.*)")


def _first_use(node: fx.Node) -> str:
    return next((where for user in node.users if (where := capture.source_line(user)[0])), "")


def _is_infinite(constant: object) -> bool:
    return isinstance(constant, float) and math.isinf(constant)


def _format(*nodes: fx.Node) -> str:
    """Short name of the narrowest float format among the values of nodes; "" if there is none."""
    tensors = graph.tensors_of([graph.value_of(node) for node in nodes])
    floats = [t.dtype for t in tensors if t.is_floating_point()]
    return formats.name(min(floats, key=lambda dtype: torch.finfo(dtype).bits)) if floats else ""
