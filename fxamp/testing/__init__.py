"""Random programs, and the invariants that a rewrite of them keeps under any policy. Needs hypothesis: fxamp[testing].

    from hypothesis import given
    from fxamp import testing

    @given(testing.programs())
    def test_my_policy(program):
        testing.check(program, "my_policy.toml")

A counter-example prints as a `Program` to paste into a test of its own. The pieces work alone too: `check_invariants` looks at
a rewritten Dynamo graph, where the operations have the user's names, `check_joint` at the joint graph of forward and backward,
where the passes over casts have run.
"""

from __future__ import annotations

from fxamp.errors import InvariantBroken
from fxamp.testing.checks import capture_of, check, check_values
from fxamp.testing.invariants import INVARIANTS, Rewrite, check_exact, check_invariants, check_joint, rewrite_of
from fxamp.testing.program import Argument, Program
from fxamp.testing.strategies import programs
from fxamp.testing.values import Run, run

__all__ = [
    "INVARIANTS",
    "Argument",
    "InvariantBroken",
    "Program",
    "Rewrite",
    "Run",
    "capture_of",
    "check",
    "check_exact",
    "check_invariants",
    "check_joint",
    "check_values",
    "programs",
    "rewrite_of",
    "run",
]
