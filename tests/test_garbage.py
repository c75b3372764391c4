"""When Python looks for garbage: `fxamp.garbage`."""

from __future__ import annotations

import gc

import pytest

from fxamp import garbage


def test_is_off_inside_and_on_again_whatever_happens():
    assert gc.isenabled()
    with garbage.collected_later():
        with pytest.raises(ZeroDivisionError), garbage.collected_later():
            _fail(gc.isenabled())
        assert not gc.isenabled()  # the outer one decides
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), garbage.collected_later():
        _fail(gc.isenabled())
    assert gc.isenabled()


def _fail(is_on: bool) -> None:
    assert not is_on
    raise ZeroDivisionError


def test_stays_off_for_who_has_switched_it_off():
    gc.disable()
    try:
        with garbage.collected_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_decorates():
    assert not garbage.collected_later()(gc.isenabled)()
    assert gc.isenabled()
