"""Do the same objects still stand in the same places? Asked before each replay of all that a recording holds fast, and so in
C++: by guards of Dynamo, which answer such questions before each call of a compiled program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch._C._dynamo.guards import DictGuardManager, GuardManager, RootGuardManager
from torch._dynamo.guards import GuardManagerType

_PLAIN: Final = GuardManagerType.GUARD_MANAGER
_DICT: Final = GuardManagerType.DICT_GUARD_MANAGER
NUM_PARTS: Final = 50
"""Of one manager, which looks for each of its parts among all of them while they are noted."""
_SOURCE: Final = ""
_REASON: Final = ([""], None)
"""What Dynamo prints of guards that fail: where values come from; the code of the guard, and who asked for it. Nobody reads
them here."""


class Unchanged:
    """Says whether everything stands as it did when it was noted.

    What was noted is kept alive, so that nothing else comes by its identity. To note a thing takes some 20 us, to ask for it
    some 30 ns.
    """

    def __init__(self) -> None:
        self._root = RootGuardManager()
        self._given, self._kept = list[list[Any]](), list[Any]()
        self._last: GuardManager = self._root
        """Of the last list of `_given`."""

    def holds(self) -> bool:
        """Reads no memory of tensors."""
        return self._root.check(self._given)

    def note_dict(self, found: Mapping[Any, Any]) -> None:
        """Its items, in their order: the same keys and values. Not of an `OrderedDict`, whose order guards do not know."""
        self._note_items(self._manager_of(found, _DICT), found, object)

    def note_dict_of_dicts(self, found: Mapping[Any, Mapping[Any, Any]], kind: type) -> None:
        """Its keys, and the items of its values, in their order; of what is not of a kind among these, the type alone."""
        manager = self._manager_of(found, _DICT)
        self._kept += found
        for i, (key, inner) in enumerate(found.items()):
            _note(manager.get_key_manager(i, _SOURCE, key, _PLAIN), key)
            self._note_items(manager.get_value_manager(i, _SOURCE, inner, _DICT), inner, kind)

    def note_entries(self, entries: Iterable[tuple[Mapping[Any, Any], Any]]) -> None:
        """The values at some keys of dicts; that there is none, where there is none."""
        managers = dict[int, GuardManager]()
        for found, key in entries:
            if id(found) not in managers:
                managers[id(found)] = self._manager_of(found)
            manager = managers[id(found)]
            if key in found:
                self._kept.append(found[key])
                _note(manager.dict_getitem_manager(key, _SOURCE, found[key], _PLAIN), found[key])
            else:
                manager.add_dict_contains_guard(False, key, *_REASON)

    def note_list(self, found: list[Any]) -> None:
        """Its items."""
        self._kept += found
        manager = self._manager_of(found)
        manager.add_length_check_guard(len(found), *_REASON)
        for i, value in enumerate(found):
            _note(manager.list_getitem_manager(i, _SOURCE, value, _PLAIN), value)

    def note_empty(self, tensors: Iterable[Tensor], attributes: Sequence[str]) -> None:
        """That attributes of tensors, each a dict or None, have no items."""
        for tensor in tensors:
            manager = self._manager_of(tensor)
            for name in attributes:
                value = getattr(tensor, name)
                of_value = manager.getattr_manager(name, _SOURCE, value, _PLAIN)
                if value is None:
                    of_value.add_none_match_guard(*_REASON)
                else:
                    of_value.add_dict_length_check_guard(0, *_REASON)

    def note_without_gradient(self, tensors: Iterable[Tensor]) -> None:
        """That tensors have no gradient."""
        for tensor in tensors:
            self._manager_of(tensor).grad_manager(_SOURCE, None, _PLAIN).add_none_match_guard(*_REASON)

    def _manager_of(self, value: object, kind: GuardManagerType = _PLAIN) -> Any:
        if not self._given or len(self._given[-1]) == NUM_PARTS:
            self._given.append([])
            self._last = self._root.list_getitem_manager(len(self._given) - 1, _SOURCE, self._given[-1], _PLAIN)
        self._given[-1].append(value)
        return self._last.list_getitem_manager(len(self._given[-1]) - 1, _SOURCE, value, kind)

    def _note_items(self, manager: DictGuardManager, found: Mapping[Any, Any], kind: type) -> None:
        self._kept += (*found, *found.values())
        for i, (key, value) in enumerate(found.items()):
            _note(manager.get_key_manager(i, _SOURCE, key, _PLAIN), key)
            of_value = manager.get_value_manager(i, _SOURCE, value, _PLAIN)
            if isinstance(value, kind):
                _note(of_value, value)
            else:
                of_value.add_type_match_guard(id(type(value)), *_REASON)


def _note(manager: GuardManager, value: object) -> None:
    manager.add_id_match_guard(id(value), *_REASON)
