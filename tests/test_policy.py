from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxamp import Policy, Rule, errors
from fxamp.optable import OpClass
from fxamp.policy import RULE_PRECISIONS

patterns = st.text("abcxyz019_.*?", min_size=1, max_size=8)
rules = st.builds(
    Rule, kind=st.sampled_from(("op", "module")), pattern=patterns, precision=st.sampled_from(RULE_PRECISIONS)
)


@given(st.builds(Policy, rules=st.lists(rules, max_size=4).map(tuple)))
def test_a_policy_reads_its_own_text(policy: Policy):
    assert Policy.parse(str(policy)) == policy


def test_keys_of_a_mapping():
    policy = Policy.of({"softmax": "bf16", "layers.0.*": "fp32", "mylib::*": "low", "module:linear": "keep"})
    assert str(policy) == "autocast; op:softmax=bf16; module:layers.0.*=fp32; op:mylib::*=low; module:linear=keep"


def test_toml(tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text('preset = "autocast"\n[rules]\nsoftmax = "bf16"\n"head*" = "fp32"\n')
    want = Policy.of({"softmax": "bf16", "head*": "fp32"})
    assert Policy.of(path) == Policy.of(str(path)) == want


def test_the_last_rule_that_matches_decides():
    policy = Policy.of({"linear": "fp32", "module:head": "low", "layers.*": "keep"})
    assert policy.decide("linear", "body")[0] is OpClass.HIGH
    assert policy.decide("linear", "head")[0] is OpClass.LOW
    assert policy.decide("linear", "layers.3")[0] is OpClass.KEEP
    assert policy.decide("softmax", "body")[0] is OpClass.HIGH


def test_a_modules_rule_leaves_unlisted_operations_alone():
    policy = Policy.of({"head": "bf16"})
    assert policy.decide("linear", "head") == (OpClass.LOW, "bf16", "rule module:head=bf16")
    assert policy.decide("mylib::scan", "head")[0] is OpClass.KEEP
    assert Policy.of({"mylib::*": "bf16"}).decide("mylib::scan", "head")[0] is OpClass.LOW


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("autocats", errors.UnknownOption, "Did you mean 'autocast'?"),
        ("pure", errors.NotYet, "not implemented yet"),
        ("autocast; op:softmax", errors.InvalidOption, "Write 'op:softmax=bf16'"),
        ("autocast; layer:x=bf16", errors.UnknownOption, "Known: op, module"),
        ({"softmax": "int8"}, errors.UnknownOption, "Known: low, fp32, bf16, fp16, keep"),
    ],
)
def test_what_cannot_be_read_says_so(source: object, error: type[Exception], text: str):
    with pytest.raises(error, match=text.replace("?", r"\?")):
        Policy.of(source)  # pyright: ignore[reportArgumentType]
