"""Calls on fake tensors, remembered: equal operations on equal operands are called once, and give tensors of their own each.

A layer stack repeats the same few calls, each of which takes PyTorch up to a millisecond. What a call gives depends on the
operation, on its arguments that are no tensors, and on the metadata of those that are. Only calls that give new memory and
write none are remembered: what they give can be made again. Views and whatever is unusual are called every time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode

from fxamp import errors, graph


class Calls:
    """`graph.call_on_fakes` with a memory. Lives as long as global state that operations read (default dtype, kernels that
    may be chosen) stays the same: for one plan."""

    def __init__(self, *, checked: bool) -> None:
        """`checked`: what is remembered is called all the same, and compared."""
        self._recipes: dict[Hashable, _Recipe | None] = {}
        self._checked = checked

    def __call__(self, node: fx.Node, values: Sequence[Any]) -> Any:
        """What a node whose operation is PyTorch's own gives for these values of its operands, which may be `Later`. Raises
        whatever the operation raises."""
        try:
            key, mode = _key(node, values)
        except _Unusual:
            return graph.call_on_fakes(node, _made(values))
        recipe = self._recipes.get(key)
        if recipe is not None and not self._checked:
            return recipe.make(mode)
        result, again = _call(node, _made(values), mode)
        if key in self._recipes and not _are_same(again, recipe, mode):
            raise errors.IllegalGraph(
                f"{node.name} gives {again}, and an equal call gave {recipe}", way_out="Please report this as a bug"
            )
        self._recipes[key] = again
        return result


@dataclass(frozen=True, eq=False)
class Later:
    """A cast of a tensor, which is made when a call needs it: most calls are remembered, and need none."""

    node: fx.Node
    """Whose value is cast; all casts of one node to one dtype are one tensor."""
    value: FakeTensor
    dtype: torch.dtype
    make: Callable[[], Any]


def _made(values: Sequence[Any]) -> list[Any]:
    return [value.make() if isinstance(value, Later) else value for value in values]


def _call(node: fx.Node, values: Sequence[Any], mode: FakeTensorMode) -> tuple[Any, _Recipe | None]:
    """(what a call gives, how to make it again if that can be told)."""
    tensors = graph.tensors_of(list(values))
    memory, before = {t.untyped_storage()._cdata for t in tensors}, [t._version for t in tensors]
    result = graph.call_on_fakes(node, values)
    return result, _recipe(result, memory, mode) if [t._version for t in tensors] == before else None


def _are_same(one: _Recipe | None, other: _Recipe | None, mode: FakeTensorMode) -> bool:
    with graph.quietly(mode):  # compares symbolic sizes
        return one == other


class _Unusual(Exception):
    """Something about a call that its key would not tell."""


# ---- what a call depends on ---------------------------------------------------------------------------------------------
_OPERAND: Final = "operand"
"""Stands for a node among arguments; the operands' values follow in the same order."""

_PLAIN: Final = frozenset(
    (int, float, bool, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments that are equal where they compare equal and have one type."""


def _key(node: fx.Node, values: Sequence[Any]) -> tuple[Hashable, FakeTensorMode]:
    """(what the result of a call depends on, the mode of its operands). Raises _Unusual for what has no key."""
    if isinstance(node.target, HigherOrderOperator):
        raise _Unusual
    walk = _Operands()
    operands = tuple(walk.key(value) for value in values)
    if walk.mode is None:
        raise _Unusual
    arguments = _argument(node.args), _argument(node.kwargs)
    return (node.op, node.target, arguments, operands, walk.mode), walk.mode


def _argument(argument: Any) -> Hashable:
    kind = type(argument)
    if kind in _PLAIN:
        return kind, argument
    if isinstance(argument, fx.Node):
        return _OPERAND
    if isinstance(argument, (tuple, list)):
        return kind, *map(_argument, argument)
    if isinstance(argument, dict):
        return kind, *((name, _argument(value)) for name, value in argument.items())
    if kind is slice:
        return kind, _argument(argument.start), _argument(argument.stop), _argument(argument.step)
    raise _Unusual


class _Operands:
    """A walk over the values of a call's operands. `memory` numbers the storages in order: which operands share one counts."""

    def __init__(self) -> None:
        self.memory: dict[Hashable, int] = {}
        self.mode: FakeTensorMode | None = None

    def key(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is FakeTensor:
            return (*self._tensor(value), self._number(value.untyped_storage()._cdata))
        if kind is Later:  # the strides of a cast follow from those of what is cast
            return (*self._tensor(value.value), value.dtype, self._number((value.node, value.dtype)))
        if kind in _PLAIN:
            return kind, value
        if kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            return kind, _symbol(value)
        if kind in (tuple, list):
            return kind, *map(self.key, value)
        raise _Unusual

    def _number(self, memory: Hashable) -> int:
        return self.memory.setdefault(memory, len(self.memory))

    def _tensor(self, tensor: FakeTensor) -> tuple[Hashable, ...]:
        is_plain = tensor.layout is torch.strided and tensor.constant is None and not tensor.is_quantized
        if not is_plain or tensor.is_inference() or self.mode not in (None, tensor.fake_mode):
            raise _Unusual
        self.mode = tensor.fake_mode
        sizes: tuple[Any, ...] = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        return (
            tensor.dtype,
            tensor.dim(),
            tuple(map(_size, sizes)) if graph.has_symbols(tensor) else sizes,
            tensor.device,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
            getattr(tensor, "_is_param", False),  # as `isinstance(tensor, torch.nn.Parameter)` asks, at a tenth of its cost
        )


def _size(size: Any) -> Hashable:
    return size if type(size) is int else _symbol(size)


def _symbol(value: Any) -> Hashable:
    from torch.fx.experimental.sym_node import SymNode  # imports sympy

    if type(value.node) is not SymNode:  # sizes of nested tensors
        raise _Unusual
    return value.node.expr


# ---- what it gives --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Fresh:
    """A tensor in memory of its own."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> _Fresh:
        return _Fresh(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def make(self, mode: FakeTensorMode) -> FakeTensor:
        return graph.fresh(mode, self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Recipe:
    """How to make a result again: a tensor, or a tuple or list that holds tensors."""

    kind: type[Any] | None
    """Of the tuple or list; None for a tensor."""
    parts: tuple[_Fresh | None, ...]

    def make(self, mode: FakeTensorMode) -> Any:
        made = [None if part is None else part.make(mode) for part in self.parts]
        return made[0] if self.kind is None else self.kind(made)


def _recipe(result: Any, memory: Collection[int], mode: FakeTensorMode) -> _Recipe | None:
    """How to make the result of a call again; None where that would not be the same."""
    parts: Sequence[Any] = (result,) if isinstance(result, torch.Tensor) else result
    kind = None if isinstance(result, torch.Tensor) else type(result)
    if kind not in (None, tuple, list) and kind.__module__ != "torch.return_types":
        return None
    tensors = [part for part in parts if part is not None]
    if not tensors or not all(type(t) is FakeTensor and t.fake_mode is mode and _is_plain(t) for t in tensors):
        return None
    storages = {t.untyped_storage()._cdata for t in tensors}
    if len(storages) < len(tensors) or not storages.isdisjoint(memory):
        return None
    recipe = _Recipe(kind, tuple(None if part is None else _Fresh.of(part) for part in parts))
    again = recipe.make(mode)
    with graph.quietly(mode):  # compares symbolic sizes
        pairs = zip(tensors, graph.tensors_of(again), strict=True)
        return recipe if all(_described(old) == _described(new) for old, new in pairs) else None


def _is_plain(tensor: FakeTensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_inference()
    return strided and tensor.constant is None and tensor._version == 0 and not _has_unbacked(tensor)


def _has_unbacked(tensor: torch.Tensor) -> bool:
    """Has it a size that only running the operation can tell? Each call makes a new one."""
    if not graph.has_symbols(tensor):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # brings sympy

    return bool(free_unbacked_symbols(tensor))


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a result the recipe does not hold, but must be the same."""
    names = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return (*names, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
