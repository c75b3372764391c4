"""Passes on the Dynamo graph, before autograd sees it. Their order is the tuple that `passes_for` returns."""

from __future__ import annotations

from fxamp.capture import Captured
from fxamp.passes import Pass
from fxamp.plan import Plan
from fxamp.rewrite.lower import LowerOperations
from fxamp.rewrite.roundings import MarkRoundings


def passes_for(captured: Captured, plan: Plan) -> tuple[Pass, ...]:
    """The passes that turn a captured graph into the planned one, in order."""
    return (
        MarkRoundings(captured.facts),  # before LowerOperations: it knows the nodes of the captured graph by name
        LowerOperations(plan, frozenset(captured.pinned)),
    )
