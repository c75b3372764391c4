"""Random programs of views, writes and nested graphs do what they do uncompiled: values, dtypes, and which memory is shared.

In fp32 bit for bit, in bf16 within the format's tolerance (5e-2 of the norm: up to nine operations, each within 2**-8).
"""

from __future__ import annotations

import pytest
import torch

from tests import aliasing


@pytest.mark.parametrize("seed", range(10))
def test_random_programs(seed: int):
    verdict = aliasing.verdict(aliasing.random_program(seed))
    assert verdict is None or verdict.startswith("skip"), aliasing.random_program(seed)


@pytest.mark.deep
@pytest.mark.parametrize("block", range(15))
def test_300_random_programs(block: int):
    seeds = range(40 + 20 * block, 60 + 20 * block)
    verdicts = {seed: aliasing.verdict(aliasing.random_program(seed)) for seed in seeds}
    wrong = {seed: v for seed, v in verdicts.items() if v is not None and not v.startswith("skip")}
    assert wrong == {}
    assert sum(v is None for v in verdicts.values()) >= 10  # the rest raise uncompiled, or differ under PyTorch's own backend


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 404))
def test_random_programs_through_inductor(seed: int):
    verdict = aliasing.verdict(aliasing.random_program(seed), lower="inductor")
    assert verdict is None or verdict.startswith("skip"), aliasing.random_program(seed)


def test_a_difference_is_seen():
    """The comparison itself: a copy where eager shares, a value off, another dtype."""
    x = torch.ones(4)
    assert aliasing.differs([x, x.view(2, 2)], [x, x.view(2, 2)], 0.0) is None
    assert "memory" in (aliasing.differs([x, x.clone()], [x, x.view(4)], 0.0) or "")
    assert "off" in (aliasing.differs([x * 2], [x], 5e-2) or "")
    assert "float16" in (aliasing.differs([x.half()], [x], 5e-2) or "")
