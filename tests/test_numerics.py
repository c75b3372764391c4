"""The user's own roundings (contract 4), and what fxamp's casts cost in accuracy."""

from __future__ import annotations

import pytest
import torch

import fxamp
from tests.programs import relative_error


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, backend=fxamp.Amp(**options))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_users_rounding_is_kept(precision: str, low: torch.dtype):
    x = torch.arange(20) / 7

    def fn(x):
        return x.to(low).to(torch.float32)

    assert torch.equal(compiled(fn, precision=precision)(x), fn(x))


def test_numerics_fast_gives_roundings_up_and_says_nothing_else():
    x = torch.arange(20) / 7

    def fn(x):
        return x.to(torch.float16).to(torch.float32)

    amp = fxamp.Amp(precision="fp32", numerics="fast")
    assert torch.equal(torch.compile(fn, backend=amp)(x), torch.compile(fn, backend="inductor")(x))
    assert "keep their roundings" not in str(amp.report())


def test_inductor_still_drops_rounding():
    """When this fails, Inductor rounds by itself: delete HIDDEN_ROUNDING in _patches.py and what serves it."""
    x = torch.arange(20) / 7

    def fn(x):
        return x.to(torch.float16).to(torch.float32)

    assert not torch.equal(torch.compile(fn, backend="inductor")(x), fn(x))


def test_an_overflow_of_the_users_is_seen_by_isfinite():
    def fn(x):
        h = x.to(torch.float16)
        return h, h.isfinite().all()

    h, fine = compiled(fn, precision="fp32")(torch.tensor([1.0, 1e5]))
    assert h.isinf().any()
    assert not fine


@pytest.mark.parametrize("lower", ["inductor", "aot_eager", "eager"])
def test_range_of_fp32_where_the_policy_wants_it(lower: str):
    def fn(x):
        h = x @ torch.eye(4)
        return h.exp(), h.softmax(-1), h.logsumexp(-1), h.pow(4), h.cosh()

    x = torch.tensor([[80.0, 79.0, 78.0, 1.0]])
    for got, want in zip(compiled(fn, precision="bf16", lower=lower)(x), fn(x), strict=True):
        assert got.isfinite().all()
        assert relative_error(got, want) < 1e-2


def test_dropout_draws_the_mask_of_every_other_precision():
    def fn(x, w):
        return torch.nn.functional.dropout(x @ w, 0.1)

    x, w = torch.full((256, 16), 2.0), torch.eye(16)
    masks = []
    for precision in ("fp32", "bf16"):
        torch.manual_seed(3)
        masks.append(compiled(fn, precision=precision)(x, w) == 0)
    assert torch.equal(*masks)
    assert 0.05 < masks[0].float().mean() < 0.15
