"""Ladders, regions and who runs in which precision: data alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fxamp import errors
from fxamp.ladder import MAX_VARIANTS, REST, Assignment, Ladder

LADDER = Ladder(rungs=("fp16", "bf16", "fp32"), regions=(("early", "layers.[01]"), ("mlps", "*.mlp")))


@pytest.mark.parametrize(
    ("module", "region"),
    [
        ("", REST),
        ("head", REST),
        ("layers.0", "early"),
        ("layers.0.attn", "early"),
        ("layers.1.mlp.up", "mlps"),
        ("layers.2", REST),
    ],
)
def test_the_last_region_that_holds_a_module_has_it(module: str, region: str):
    assert LADDER.region_of(module) == region


def test_assignments_are_all_that_a_graph_can_meet():
    here = LADDER.assignments(["layers.0", "layers.0.attn"])
    assert [str(a) for a in here] == ["fp16", "bf16", "fp32"]
    assert [a.precisions for a in here] == [(("early", p),) for p in LADDER.rungs]
    both = LADDER.assignments(["head", "layers.1"])
    assert len(both) == len(set(both)) == 9
    assert str(both[0]) == "fp16"
    assert str(both[1]) == "model=fp16, early=bf16"
    assert [str(a) for a in LADDER.assignments([])] == ["fp16", "bf16", "fp32"]


def test_more_than_the_bound_is_an_error():
    with pytest.raises(errors.TooManyVariants, match=f"3 regions .* make 27 programs, and {MAX_VARIANTS} is the most"):
        LADDER.assignments(["", "layers.0", "layers.0.mlp"])


def test_parts_are_what_differs():
    on = {rung: rung for rung in LADDER.rungs}
    uniform = Assignment(precisions=((REST, "bf16"), ("early", "bf16")))
    mixed = Assignment(precisions=((REST, "fp32"), ("early", "bf16")))
    assert LADDER.parts(uniform, on) == ("bf16", ())
    assert LADDER.parts(mixed, on) == ("bf16", (("*", "fp32"), ("layers.[01]", "bf16")))
    assert LADDER.parts(mixed, on | {"bf16": "fp32"}) == ("fp32", (("*", "fp32"), ("layers.[01]", "fp32")))


def test_one_rung_up_and_no_further():
    assert [LADDER.above(rung) for rung in LADDER.rungs] == ["bf16", "fp32", "fp32"]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"rungs": ("fp32", "bf16")}, errors.InvalidOption, "does not go up. Name each precision once, the lowest first"),
        ({"rungs": ("bf16", "bf16")}, errors.InvalidOption, "does not go up"),
        ({"rungs": ("bf16", "fp23")}, errors.UnknownOption, "Did you mean 'fp32'?"),
        ({"rungs": ("bf16", "tf32"), "regions": (("a", "a"),)}, errors.InvalidOption, "tf32 is a switch for a whole graph"),
        ({"rungs": ("bf16", "fp32"), "regions": ((REST, "a"),)}, errors.InvalidOption, "choose another"),
    ],
)
def test_a_ladder_that_cannot_be_climbed_says_why(given: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=re.escape(text)):
        Ladder(**given)
