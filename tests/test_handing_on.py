"""What a function that waits for a call does with its result: read off the source, while it waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest

from fxamp import handing_on


def waits() -> Any:
    """Stands for a call whose result matters: notes what is found out about who waits for it."""
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    FOUND.append(handing_on.hands_on(frame))
    return 1.0


FOUND: list[bool] = []


class Output(tuple):
    def to_tuple(self):
        return tuple(self)


# ---- those that hand on ---------------------------------------------------------------------------------------------------
def returns_it():
    return waits()


def returns_it_from_inside_a_loop():
    for _ in range(2):
        with nullcontext():
            return waits()
    return None


def names_it():
    result = waits()
    other = result
    del_me = 1  # something else happens
    del del_me
    return other


def names_it_in_a_block():
    result = None
    with nullcontext():
        if result is None:
            result = waits()
    return result


def asks_what_it_is(flag=False):
    result = waits()
    if flag and not isinstance(result, tuple):
        result = result.to_tuple()
    if result is None:
        raise RuntimeError
    return result


def returns_something_else():
    result = waits()  # noqa: F841
    return 2.0


# ---- those that do not, or not plainly ------------------------------------------------------------------------------------
def computes_with_it():
    return waits() * 2.0


def computes_with_it_later():
    result = waits()
    return result * 2.0


def computes_with_it_in_the_next_turn():
    result = None
    for _ in range(2):
        if result is not None:
            str(result)
        result = waits()
    return result


def computes_with_it_in_place():
    result = waits()
    result *= 2.0
    return result


def computes_with_it_under_another_name():
    result = waits()
    other = result
    other = other + 1.0
    return 2.0, other


def computes_with_it_on_one_way(flag=False):
    result = waits()
    if flag:
        result = abs(result)
    return result


def asks_for_its_value():
    result = waits()
    if result > 0:
        return None
    return result


def gives_it_to_a_call():
    return float(waits())


def calls_a_method_of_it():
    result = waits()
    result = result.hex()
    return 2.0, result


def stores_it(into: Any = {}):  # noqa: B006
    result = waits()
    into["result"] = result
    return result


def sums_it_up():
    result = 0.0
    for _ in range(2):
        result = waits()
        print(end="" if result else "")
    return result


def adds_it_up():
    total = 0.0
    for _ in range(2):
        total += waits()
    return total


def unpacks_it():
    a, b = waits(), 2.0
    return a * b


def shows_it_to_another_function():
    def reads():
        return result * 2.0

    result = waits()
    return reads()


def reads_all_names():
    result = waits()  # noqa: F841
    return locals()


def tries():
    try:
        result = waits()
    except ValueError:
        result = None
    return result


@pytest.mark.parametrize(
    "function",
    [
        returns_it, returns_it_from_inside_a_loop, names_it, names_it_in_a_block, asks_what_it_is, returns_something_else,
    ],
)  # fmt: skip
def test_it_hands_on(function: Callable[[], Any]):
    FOUND.clear()
    function()
    assert FOUND == [True]


@pytest.mark.parametrize(
    "function",
    [
        computes_with_it, computes_with_it_later, computes_with_it_in_the_next_turn, computes_with_it_in_place,
        computes_with_it_under_another_name,
        computes_with_it_on_one_way, asks_for_its_value, gives_it_to_a_call, calls_a_method_of_it, stores_it, sums_it_up,
        adds_it_up, unpacks_it, shows_it_to_another_function, reads_all_names, tries, lambda: waits(),
    ],
)  # fmt: skip
def test_it_does_more_or_cannot_be_read(function: Callable[[], Any]):
    FOUND.clear()
    function()
    assert set(FOUND) == {False}


def test_code_without_a_source_says_nothing():
    namespace: dict[str, Any] = {"waits": waits}
    exec("def f():\n    return waits()", namespace)
    FOUND.clear()
    namespace["f"]()
    assert FOUND == [False]
