"""What a graph may look like after each stage, and the check of it.

`check` is always cheap; with FXAMP_CHECK=1 it also lints the graph, re-propagates the values of casts and compares.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from fxamp import errors, graph


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The rules of one stage."""

    name: str
    cast: Any
    """The one target that a cast of fxamp may have here."""


REWRITTEN: Final = Stage(name="Dynamo rewrite", cast=graph.DYNAMO_CAST)
JOINT: Final = Stage(name="joint graph", cast=graph.JOINT_CAST)


def wants_full_check() -> bool:
    """Is FXAMP_CHECK=1 set?"""
    return os.environ.get("FXAMP_CHECK", "0") not in ("", "0")


def checker(
    stage: Stage, before: fx.GraphModule, *, output_dtypes: bool = True
) -> Callable[[fx.GraphModule], None]:
    """`check` for a graph that was `before` when the stage began; output_dtypes=False lets outputs change format."""
    signature = _signature(before, output_dtypes)
    return lambda gm: check(gm, stage, signature, output_dtypes=output_dtypes)


Signature = tuple[tuple[str, ...], tuple[tuple[Any, ...], ...], tuple[Any, ...]]
"""Names of the inputs, dtypes and ranks of the outputs, and the same of the graphs nested inside."""


def check(gm: fx.GraphModule, stage: Stage, signature: Signature, *, output_dtypes: bool = True) -> None:
    """Raises IllegalGraph where a graph breaks the rules of its stage: well-formed, every cast of fxamp from float to float,
    and the same inputs and outputs as before the stage. With FXAMP_CHECK=1 recorded values are recomputed and compared too.
    """
    for part in graph.all_of(gm):
        _check_order(part, stage)
        _check_casts(part, stage)
        if wants_full_check():
            part.graph.lint()
    now = _signature(gm, output_dtypes)
    if now != signature:
        raise errors.IllegalGraph(
            f"the {stage.name} has inputs and outputs {now}, before it {signature}", way_out="Please report this as a bug"
        )
    if wants_full_check() and stage is REWRITTEN:
        for part in graph.all_of(gm):
            _check_values(part, stage)


def _check_order(gm: fx.GraphModule, stage: Stage) -> None:
    """Every node stands behind its operands."""
    seen = set[fx.Node]()
    for node in gm.graph.nodes:
        if not seen.issuperset(node._input_nodes):
            late = [x.name for x in node.all_input_nodes if x not in seen]
            raise _illegal(stage, node, f"reads {', '.join(late)}, which comes later")
        seen.add(node)


def _check_casts(gm: fx.GraphModule, stage: Stage) -> None:
    for node in graph.nodes_of_own_casts(gm):
        if node.target is not stage.cast:
            continue
        source, result = graph.value_of(graph.source_of(node)), graph.value_of(node)
        if not (source.is_floating_point() and result.is_floating_point() and node.args[1] == result.dtype):
            raise _illegal(stage, node, f"casts {source.dtype} to {node.args[1]} but claims {result.dtype}")


def _signature(gm: fx.GraphModule, output_dtypes: bool) -> Signature:
    inputs = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
    output = next(iter(gm.graph.find_nodes(op="output")))
    values = [graph.tensors_of(graph.value_of(x)) for x in graph.operands(output)]
    outputs = tuple((str(t.dtype) if output_dtypes else "", t.dim()) for tensors in values for t in tensors)
    return inputs, outputs, tuple((path, _signature(body, True)) for path, body in graph.nested(gm).items())


def _check_values(gm: fx.GraphModule, stage: Stage) -> None:
    """Every operation that reads or writes something changed, called again on the recorded values of its operands, gives the
    recorded value. In-place operations and whatever has no tensor result are left out: calling them again is not neutral."""
    for node in gm.graph.nodes:
        if graph.own_cast(node) is None or not isinstance(graph.value_of(node), torch.Tensor):
            continue
        want = graph.retyped(graph.value_of(graph.source_of(node)), node.args[1])
        got = graph.value_of(node)
        if want.dtype != got.dtype or tuple(want.shape) != tuple(got.shape):
            raise _illegal(stage, node, f"recorded as {got.dtype}{list(got.shape)}, is {want.dtype}{list(want.shape)}")


def _illegal(stage: Stage, node: fx.Node, what: str) -> errors.IllegalGraph:
    return errors.IllegalGraph(f"{node.name} in the {stage.name} {what}", way_out="Please report this as a bug")
