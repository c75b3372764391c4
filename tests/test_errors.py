from __future__ import annotations

import pytest

from fxamp import errors


def test_the_text_says_what_where_and_the_way_out():
    error = errors.StageFailed("the pass broke", where="train.py:3", way_out="Do this")
    assert str(error) == "ERROR[StageFailed]: the pass broke, at train.py:3. Do this"
    assert (error.what, error.where, error.way_out) == ("the pass broke", "train.py:3", "Do this")


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.UnknownOption, ValueError), (errors.InvalidOption, ValueError), (errors.NotYet, NotImplementedError),
        (errors.NotFloating, TypeError), (errors.StageFailed, RuntimeError), (errors.IllegalGraph, RuntimeError),
        (errors.CudaGraphsUnavailable, RuntimeError), (errors.NeedsCaptured, LookupError),
    ],
)  # fmt: skip
def test_errors_are_caught_by_the_class_that_python_users_expect(error: type[Exception], base: type[Exception]):
    assert issubclass(error, base)
    assert issubclass(error, errors.FxampError)
