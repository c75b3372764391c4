"""Random programs: 1,000 in every run of the suite, and many more with --deep, which keeps what it found for the next time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fxamp import testing

DEEP = settings().max_examples >= 1000


def examples(num: int):
    """`num` examples in a usual run, twenty times as many with --deep, where programs may also be longer."""
    return settings(
        max_examples=num * (20 if DEEP else 1), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )


POLICY = {"softmax": "bf16", "exp": "low", "relu": "fp32", "matmul": "keep", "mm": "fp16", "cat": "fp32"}
"""Every kind of rule, on operations of every class."""


@examples(640)
@given(testing.programs(max_steps=12 if DEEP else 8))
def test_in_bf16(program: testing.Program):
    testing.check(program)


@examples(120)
@given(testing.programs())
def test_in_fp16(program: testing.Program):
    testing.check(program, precision="fp16")


@examples(100)
@given(testing.programs())
def test_in_fp32_bit_for_bit(program: testing.Program):
    testing.check(program, precision="fp32")


@examples(100)
@given(testing.programs())
def test_under_a_policy_of_ones_own(program: testing.Program):
    testing.check(program, POLICY)


@examples(25)
@given(testing.programs(max_steps=6))
def test_behind_dynamo(program: testing.Program):
    testing.check(program, lower="eager")


@examples(15)
@given(testing.programs(max_steps=6))
def test_through_autograd_and_the_joint_passes(program: testing.Program):
    testing.check(program, lower="aot_eager")


@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
def test_checkpoint_and_cond(lower):
    @settings(examples(6 if lower == "eager" else 4))
    @given(testing.programs(higher_order=True, max_steps=4))
    def search(program: testing.Program):
        testing.check(program, lower=lower)

    search()
    torch._dynamo.reset()
