"""Marks the operations that may run in either format, for the passes on the joint graph that choose it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import fx

from fxamp import graph, optable
from fxamp.optable import OpClass
from fxamp.passes import Change
from fxamp.plan import Decision

MARKED: Final = frozenset(
    (*optable.MOVEMENT.split(), "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative")
)
"""Those that stay one operation. What decompositions make of the others (gelu, batch_norm) holds steps that need fp32."""


@dataclass(frozen=True)
class MarkFollowing:
    """Marks each operation that follows its operands for `joint.min_cut`.

    requires: Dynamo graph, unedited.  changes: meta.  keeps: every value.

        y: "f32[B]" = x + h     ->     y: "f32[B]" = x + h   # follows
    """

    decisions: Mapping[str, Decision] = field(repr=False)

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_marked = 0
        for node in gm.graph.nodes:
            decision = self.decisions.get(node.name)
            if decision is not None and decision.cls is OpClass.FOLLOW and decision.op in MARKED:
                graph.annotate(node, graph.FOLLOWS, True)
                num_marked += 1
        return Change(pass_name=type(self).__name__, num_marked=num_marked)
