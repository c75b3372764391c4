"""What a recorded step holds fast beside its batch: a recording knows addresses and numbers, and asks nobody. All of it is
looked at before each replay, on the host, without reading any memory."""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import CellType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxamp.run import capturable, writes

_SIMPLE: Final = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})
MAX_LENGTH: Final = 64
"""Of sequences that are looked at number by number."""


class World(NamedTuple):
    """What a recording was made with, to be compared. The names are what people read."""

    modules: Hashable
    """Which there are; the model that a step was made for may get others in their places."""
    parameters_or_buffers: Hashable
    attributes: Hashable
    """Python's numbers and words, of modules and of the loss function, which programs are specialized on."""
    tensors: Hashable
    """Those that are neither."""
    hyperparameters: Hashable
    optimizer_state: Hashable
    hooks: Hashable
    loss_scaling: Hashable

    def changed_since(self, before: World) -> str:
        """What is another."""
        names = [name for name, a, b in zip(self._fields, before, self, strict=True) if a != b]
        return " and ".join(name.replace("_", " ") for name in names)


class Surroundings:
    """Of one train step. Holds its modules, so that no other one comes by the id of one of them."""

    def __init__(
        self,
        modules: Callable[[], Sequence[nn.Module]],
        optimizer: Optimizer,
        loss_fn: Callable[..., Any] | None,
        settled: Callable[[], Sequence[Tensor]],
    ) -> None:
        """Args: modules: all of now; settled: makes ready, and returns, what loss scaling reads and writes."""
        self._find, self._optimizer, self._loss_fn, self._settled = modules, optimizer, loss_fn, settled
        self.modules: Sequence[nn.Module] = ()
        self._attributes: list[tuple[dict[str, Any], str]] = []
        self.watched: Sequence[nn.Module] = ()
        """Those too that the loss function finds in its closure."""
        self._numbers: list[Callable[[], Any]] = []
        """Where the loss function finds numbers, and modules."""
        self._places: list[Callable[[], Any]] = []
        """Where tensors stand that are neither parameters nor buffers."""
        self.refresh()

    def refresh(self) -> None:
        """Looks for modules, and their attributes, anew."""
        self.modules = self._find()
        named = list(_places_of(self._loss_fn))
        roots = [value for place in named if isinstance(value := place(), nn.Module)]
        self.watched = list(dict.fromkeys((*self.modules, *(m for root in roots for m in root.modules()))))
        self._children = [m._modules for m in self.watched]
        self._own = [of for m in self.watched for of in (m._parameters, m._buffers)]
        self._attributes = [
            (vars(m), name)
            for m in self.watched
            for name, value in vars(m).items()
            if name not in _OF_EVERY_MODULE and _is_plain(value)
        ]
        self._numbers = [place for place in named if isinstance(value := place(), nn.Module) or _is_plain(value)]

    def look(self) -> World:
        """What there is now. Called before each replay: what it walks along is at hand."""
        states = itertools.chain.from_iterable(map(dict.values, self._optimizer.state.values()))
        return World(
            modules=tuple(map(id, itertools.chain.from_iterable(map(dict.values, self._children)))),
            parameters_or_buffers=writes.layouts(self.owns()),
            attributes=(
                *[value if type(value := d.get(name)) in _SIMPLE else _frozen(value) for d, name in self._attributes],
                *(_frozen(place()) for place in self._numbers),
            ),
            tensors=tuple(_of_tensor(place()) for place in self._places),
            hyperparameters=capturable.hyperparameters(self._optimizer),
            optimizer_state=writes.addresses([t for t in states if isinstance(t, Tensor)]),
            hooks=(
                *self._optimizer._optimizer_step_pre_hooks,
                *self._optimizer._optimizer_step_post_hooks,
                *(len(hooks) for hooks in self._hooks_of_weights()),
            ),
            loss_scaling=writes.addresses(self._settled()),
        )

    def _hooks_of_weights(self) -> Iterator[Sequence[Any]]:
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                for hooks in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)):
                    if hooks:
                        yield hooks

    def owns(self) -> list[Tensor]:
        """Parameters and buffers, of now."""
        return [t for t in itertools.chain.from_iterable(map(dict.values, self._own)) if t is not None]

    def watch(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """From now on looks at the places where these stand, too. Returns those for which it has found none."""
        missing = list(tensors)
        if missing:
            forwards = dict.fromkeys(type(m).forward for m in self.watched)
            places = itertools.chain(
                (functools.partial(vars(m).get, name) for m in self.watched for name in vars(m)),
                *map(_places_of, (*forwards, self._loss_fn)),
            )
            where = {id(value): place for place in places if isinstance(value := place(), Tensor)}
            self._places += [where[id(t)] for t in missing if id(t) in where]
            missing = [t for t in missing if id(t) not in where]
        return missing


def _places_of(function: Any) -> Iterator[Callable[[], Any]]:
    """Where a function finds what it names: in its closure, among globals, in what it is a method of."""
    while isinstance(function, functools.partial):
        function = function.func
    spaces: list[dict[str, Any]] = []
    if inspect.ismethod(function):
        spaces.append(getattr(function.__self__, "__dict__", {}))
        function = function.__func__
    if not inspect.isfunction(function):
        return
    yield from (functools.partial(_contents, cell) for cell in function.__closure__ or ())
    for space in (*spaces, function.__globals__):
        yield from (functools.partial(space.get, name) for name in function.__code__.co_names if name in space)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= MAX_LENGTH and all(map(_is_plain, value))  # pyright: ignore[reportUnknownArgumentType]
    return type(value) in _SIMPLE or isinstance(value, enum.Enum)


def _frozen(value: Any) -> Hashable:
    """To be compared: by value what Python holds by value, anything else by identity."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, itertools.islice(value, MAX_LENGTH)))  # pyright: ignore[reportUnknownArgumentType]
    return value if type(value) in _SIMPLE else id(value)


def _of_tensor(value: Any) -> Hashable:
    return (id(value), *writes.layout(value)) if isinstance(value, Tensor) else id(value)
