"""A fixed quarter of PyTorch's operator database; all of it by `make test-ops`."""

from __future__ import annotations

import pytest

from tests.ops.sweep import PRECISIONS, database, sweep

NOT_CAPTURED = frozenset(
    ("cauchy", "combinations", "item", "jiterator_binary_return_by_ref", "linalg_lstsq", "masked_select", "normal_in_place")
    + ("nn_functional_alpha_dropout", "nn_functional_dropout", "nn_functional_fractional_max_pool2d", "randint")
    + ("nn_functional_scaled_dot_product_attention", "sparse_mm_reduce", "svd_lowrank")
)
"""Operations of which Dynamo makes no graph (RESULTS.md): most of their samples seed a generator, or read a value."""

DEAR = frozenset(
    ("ormqr", "nn_functional_interpolate_trilinear", "native_group_norm", "nn_functional_adaptive_avg_pool3d")
    + ("nn_functional_linear_cross_entropy_chunked_none",)
)
"""Operations that take a second or more, of kinds that others stand for."""

ROTATION = tuple(enumerate(name for name in sorted(database())[1::4] if name not in NOT_CAPTURED | DEAR))
"""Every fourth operation of the others, with the number that picks its precision."""


@pytest.mark.parametrize(("number", "name"), ROTATION, ids=[name for _, name in ROTATION])
def test_operation(number: int, name: str):
    (verdict,) = sweep(database()[name], precisions=[PRECISIONS[number % 2]], num_samples=1)
    assert verdict.status != "fault", "\n".join(verdict.faults)


def test_the_rotation_is_large_enough():
    assert len(ROTATION) >= 150
