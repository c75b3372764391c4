"""A policy of one's own, checked on random programs; a counter-example prints as source to paste into a test.

Run: python examples/check_policy.py        (needs hypothesis: pip install fxamp[testing]; under pytest, leave out main)
"""

from __future__ import annotations

from hypothesis import given, settings

from fxamp import testing

POLICY = {"softmax": "bf16", "layer_norm": "bf16", "matmul": "fp32"}


@settings(max_examples=30, deadline=None)
@given(testing.programs())
def test_my_policy(program: testing.Program) -> None:
    testing.check(program, POLICY)


def main() -> None:
    test_my_policy()

    # A program of one's own, and what a broken invariant looks like: here, values that are not those of the program.
    program = testing.Program(
        '''
        def forward(x: "f32[4, 4] whole", w: "f32[4, 4] parameter whole"):
            a = x @ w
            a.add_(1.0)
            return a, a.t()
        '''
    )
    testing.check(program, POLICY)
    try:
        testing.check_values(program, lambda x, w: ((a := x @ w), a.t()))
    except testing.InvariantBroken as broken:
        print(broken)


if __name__ == "__main__":
    main()
