"""Marks the casts that the user wrote, so that their rounding can be told from what decompositions do for themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx

from fxamp import graph
from fxamp.capture import Captured
from fxamp.passes import Change

CASTS: Final = frozenset(("to", "type", "type_as", "half", "bfloat16", "float", "double", "_to_copy"))
"""Operations with which a program changes the dtype of a value."""


@dataclass(frozen=True)
class MarkRoundings:
    """Marks each cast between float formats for `joint.repair.KeepRoundings`.

    requires: Dynamo graph.  changes: meta.  keeps: every value.

        h: "f16[B]" = x.half()     ->     h: "f16[B]" = x.half()   # rounds
    """

    captured: Captured = field(repr=False)

    def __call__(self, gm: fx.GraphModule) -> Change:
        return Change(pass_name=type(self).__name__, num_marked=_mark(gm, self.captured))


def _mark(gm: fx.GraphModule, captured: Captured) -> int:
    num_marked = 0
    for node in gm.graph.nodes:
        facts = captured.facts.get(node.name)
        if facts is None or facts.op not in CASTS or not node.all_input_nodes:
            continue
        source, result = graph.value_of(node.all_input_nodes[0]), graph.value_of(node)
        if _is_float(source) and _is_float(result) and source.dtype != result.dtype:
            graph.annotate(node, graph.ROUNDS, True)
            num_marked += 1
    return num_marked + sum(_mark(graph.body(gm, path), body) for path, body in captured.bodies.items())


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
