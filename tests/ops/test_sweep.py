"""A fixed quarter of PyTorch's operator database; all of it by `make test-ops`."""

from __future__ import annotations

import pytest

from tests.ops.sweep import PRECISIONS, database, sweep

ROTATION = tuple(enumerate(sorted(database())[1::4]))
"""Every fourth operation, with the number that picks its precision."""


@pytest.mark.parametrize(("number", "name"), ROTATION, ids=[name for _, name in ROTATION])
def test_operation(number: int, name: str):
    (verdict,) = sweep(database()[name], precisions=[PRECISIONS[number % 2]], num_samples=1)
    assert verdict.status != "fault", "\n".join(verdict.faults)


def test_the_rotation_is_large_enough():
    assert len(ROTATION) >= 150
