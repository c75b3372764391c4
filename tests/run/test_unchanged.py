"""The same objects in the same places, asked in C++."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxamp.run.unchanged import NUM_PARTS, Unchanged


class Thing:
    """Compares with nothing: identity alone may be asked for."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __hash__(self) -> int:
        return id(self)


def noted(note: Callable[[Unchanged], object]) -> Unchanged:
    unchanged = Unchanged()
    note(unchanged)
    assert unchanged.holds()
    assert unchanged.holds()
    return unchanged


@pytest.mark.parametrize("kind", [dict, lambda items: defaultdict(Thing, items)])
@pytest.mark.parametrize(
    "change",
    [
        lambda d, a: d.update(a=Thing()),
        lambda d, a: d.update(c=Thing()),
        lambda d, a: d.pop("b"),
        lambda d, a: d.clear(),
        lambda d, a: d.update(a=d["b"], b=d["a"]),
        lambda d, a: d.update(a=d.pop("a")),  # another order
        lambda d, a: (d.pop("b"), d.update(c=a)),
    ],
)
def test_items_of_a_dict(kind: Callable[[Any], dict[str, Any]], change: Callable[[dict[str, Any], Any], object]):
    d = kind({"a": Thing(), "b": Thing()})
    unchanged = noted(lambda u: u.note_dict(d))
    change(d, d["b"])
    assert not unchanged.holds()
    d = kind({})
    unchanged = noted(lambda u: u.note_dict(d))
    d["a"] = None
    assert not unchanged.holds()


def test_a_key_is_another_with_the_same_value():
    thing = Thing()
    d = {"a": thing}
    unchanged = noted(lambda u: u.note_dict(d))
    d.pop("a")
    d["b"] = thing  # as many, in the same order
    assert not unchanged.holds()


def test_dicts_in_a_dict():
    p, q = torch.zeros(3), torch.zeros(3)
    d: Any = defaultdict(dict, {p: {"moment": torch.zeros(3), "step": 1}})
    unchanged = noted(lambda u: u.note_dict_of_dicts(d, Tensor))
    d[p] = dict(d[p], step=2)
    assert unchanged.holds()
    d[p]["step"] = torch.zeros(())  # what was a number is a tensor, which a recording may read
    assert not unchanged.holds()
    d[p]["step"] = 3
    inner = d.pop(p)
    d[q] = inner  # belongs to another now
    assert not unchanged.holds()
    d.pop(q)
    d[p] = inner
    assert unchanged.holds()
    d[p]["moment"] = torch.zeros(3)
    assert not unchanged.holds()


def test_entries():
    d: dict[str, Any] = {"a": Thing(), "b": Thing()}
    entries = noted(lambda u: u.note_entries([(d, "a"), (d, "c")]))
    d["b"] = Thing()
    assert entries.holds()
    d["c"] = None
    assert not entries.holds()
    del d["c"]
    assert entries.holds()
    del d["a"]
    assert not entries.holds()


def test_many():
    """More than one manager has."""
    dicts = [{"a": Thing()} for _ in range(2 * NUM_PARTS + 1)]
    unchanged = Unchanged()
    for d in dicts:
        unchanged.note_dict(d)
    for d in dicts:
        assert unchanged.holds()
        before, d["a"] = d["a"], Thing()
        assert not unchanged.holds()
        d["a"] = before


def test_lists():
    found = [Thing(), Thing()]
    unchanged = noted(lambda u: u.note_list(found))
    found.reverse()
    assert not unchanged.holds()
    found.reverse()
    found.append(found[0])
    assert not unchanged.holds()


def test_gradients_and_hooks():
    x = torch.zeros(3, requires_grad=True)
    bare, ungraded = noted(lambda u: u.note_empty([x], ["_backward_hooks"])), noted(lambda u: u.note_without_gradient([x]))
    hook = x.register_hook(lambda gradient: gradient)
    assert not bare.holds()
    hook.remove()
    assert noted(lambda u: u.note_empty([x], ["_backward_hooks"])).holds()
    x.grad = torch.zeros(3)
    assert not ungraded.holds()
    x.grad = None
    assert ungraded.holds()


def test_what_was_noted_is_kept_as_long_as_it():
    """Else another object could come by its identity."""
    d = {"a": Thing()}
    ref = weakref.ref(d["a"])
    unchanged = noted(lambda u: u.note_dict(d))
    d.clear()
    gc.collect()
    assert ref() is not None
    del unchanged
    gc.collect()
    assert ref() is None
