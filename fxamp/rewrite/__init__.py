"""Passes on the Dynamo graph, before autograd sees it. Their order is the tuple that `passes_for` returns."""

from __future__ import annotations

from typing import Final

from fxamp.capture import Captured
from fxamp.passes import Pass
from fxamp.plan import Plan
from fxamp.rewrite.attention import LowAttention
from fxamp.rewrite.composites import SeeIntoComposites
from fxamp.rewrite.following import MarkFollowing
from fxamp.rewrite.lower import LowerOperations
from fxamp.rewrite.out_of_place import OutOfPlace
from fxamp.rewrite.roundings import MarkRoundings

NORMALIZE: Final[tuple[Pass, ...]] = (
    SeeIntoComposites(),  # before OutOfPlace, which looks at every operation
    OutOfPlace(),
)
"""Passes before the plan is made: the same program, in a form that leaves the plan more freedom."""


def passes_for(captured: Captured, plan: Plan, *, marks_following: bool = False) -> tuple[Pass, ...]:
    """The passes that turn a captured graph into the planned one, in order."""
    return (
        *((MarkFollowing(plan.decisions),) if marks_following else ()),
        MarkRoundings(captured),  # before LowerOperations: it knows the nodes of the captured graph by name
        LowerOperations(captured, plan),
        LowAttention(plan),  # behind LowerOperations: the plan counts operands of the captured call
    )
