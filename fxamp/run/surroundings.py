"""What a recorded step holds fast beside its batch: a recording knows addresses and numbers, and asks nobody. All of it is
looked at before each replay, on the host, without reading any memory."""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import CellType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxamp.run import capturable, skipping, writes
from fxamp.run.leaves import HOOKS_OF_WEIGHTS, NAMES_OF_HOOKS
from fxamp.run.unchanged import Unchanged

_SIMPLE: Final = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})
_Space = dict[str, Any]
_Place = tuple[_Space, str]
MAX_LENGTH: Final = 64
"""Of sequences that are looked at number by number."""
NUM_RIGHT: Final = 32
"""So often a glance is right before it is compared in C++: what that takes to prepare, it saves in a few hundred steps."""
MAX_NOTED: Final = 4000
"""Things to compare, some 14 of each parameter, up to which that is done. Larger models keep the GPU busy, and would not be
compared faster."""
_OF_MODULES: Final = ("_modules", "_parameters", "_buffers")


class World(NamedTuple):
    """What a recording was made with, to be compared. The names are what people read."""

    modules: Hashable
    """Which there are; the model that a step was made for may get others in their places."""
    parameters: Hashable
    """Those that the optimizer has."""
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
    """Of one train step. Holds its modules, so that no other one comes by the id of one of them.

    `look` sees all of it, and says what is another; a `Glance` tells for a part of the price that nothing is.
    """

    def __init__(
        self,
        modules: Callable[[], Sequence[nn.Module]],
        optimizer: Optimizer,
        loss_fn: Callable[..., Any] | None,
        settled: Callable[[], Sequence[Tensor]],
        note: Callable[[str], object] = warnings.warn,
        settled_version: Callable[[], Hashable] = lambda: None,
    ) -> None:
        """Args: modules: all of now; settled: makes ready, and returns, what loss scaling reads and writes; note: tells the
        user; settled_version: as `Scaler.settled_version`."""
        self.settled_version = settled_version
        self._find, self.optimizer, self._loss_fn, self.settled = modules, optimizer, loss_fn, settled
        self.note = note
        self.modules: Sequence[nn.Module] = ()
        self.attributes: list[_Place] = []
        self.watched: Sequence[nn.Module] = ()
        """Those too that the loss function finds in its closure."""
        self.numbers: list[Callable[[], Any]] = []
        """Where the loss function finds numbers, and modules."""
        self.places: list[Callable[[], Any]] = []
        """Where tensors stand that are neither parameters nor buffers."""
        self.num_right = NUM_RIGHT
        """So often a glance is right before it is compared in C++. Twice as often each time that this has not lasted."""
        self.refresh()

    def refresh(self) -> None:
        """Looks for modules, and their attributes, anew."""
        self.modules = self._find()
        named = list(_places_of(self._loss_fn))
        roots = [value for place in named if isinstance(value := place(), nn.Module)]
        self.watched = list(dict.fromkeys((*self.modules, *(m for root in roots for m in root.modules()))))
        self.attributes = [
            (vars(m), name)
            for m in self.watched
            for name, value in vars(m).items()
            if name not in _OF_EVERY_MODULE and _is_plain(value)
        ]
        self.numbers = [place for place in named if isinstance(value := place(), nn.Module) or _is_plain(value)]
        ddps = [m for m in self.watched if isinstance(m, nn.parallel.DistributedDataParallel)]
        # A recording writes the buckets of the reducer that it was made with, and runs its hooks, or none.
        self.numbers += [functools.partial(vars(m).get, name) for m in ddps for name in ("reducer", "_comm_hooks")]

    def look(self) -> World:
        """What there is now."""
        return World(
            modules=tuple(map(id, _values(m._modules for m in self.watched))),
            parameters=tuple(map(id, skipping.parameters(self.optimizer))),
            parameters_or_buffers=writes.layouts(self.owns()),
            attributes=(
                *[value if type(value := d.get(name)) in _SIMPLE else _frozen(value) for d, name in self.attributes],
                *(_frozen(place()) for place in self.numbers),
            ),
            tensors=tuple(_of_tensor(place()) for place in self.places),
            hyperparameters=capturable.hyperparameters(self.optimizer),
            optimizer_state=writes.addresses([t for t in self.states() if isinstance(t, Tensor)]),
            hooks=self.hooks(),
            loss_scaling=writes.addresses(self.settled()),
        )

    def states(self) -> Iterator[Any]:
        return _values(self.optimizer.state.values())

    def hooks(self) -> Hashable:
        of_steps, of_weights = self.hooks_of_steps(), list(map(HOOKS_OF_WEIGHTS, skipping.parameters(self.optimizer)))
        if not any(map(any, of_weights)):
            return of_steps
        return *of_steps, *(tuple(map(tuple, filter(None, hooks))) for hooks in of_weights)

    def hooks_of_steps(self) -> tuple[int, ...]:
        """Of the optimizer."""
        return *self.optimizer._optimizer_step_pre_hooks, *self.optimizer._optimizer_step_post_hooks

    def owns(self) -> list[Tensor]:
        """Parameters and buffers, of now."""
        return [t for t in _values(of for m in self.watched for of in (m._parameters, m._buffers)) if t is not None]

    def switches(self) -> tuple[Sequence[bool], Sequence[bool]]:
        """Which modules are in training, and which parameters of the optimizer are trained."""
        trained = map(_REQUIRES_GRAD, skipping.parameters(self.optimizer))
        return tuple(map(_TRAINING, self.watched)), tuple(trained)

    def sees(self, tensors: Iterable[Tensor]) -> bool:
        """Do these still stand where `watch` has found them?"""
        return {id(place()) for place in self.places}.issuperset(map(id, tensors))

    def watch(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """From now on looks at the places where these stand, too. Returns those for which it has found none."""
        seen = {id(place()) for place in self.places}
        missing = [t for t in tensors if id(t) not in seen]
        if missing:
            forwards = dict.fromkeys(type(m).forward for m in self.watched)
            places = itertools.chain(
                (functools.partial(vars(m).get, name) for m in self.watched for name in vars(m)),
                *map(_places_of, (*forwards, self._loss_fn)),
            )
            where = {id(value): place for place in places if isinstance(value := place(), Tensor)}
            self.places += [where[id(t)] for t in missing if id(t) in where]
            missing = [t for t in missing if id(t) not in where]
        return missing


class Glance:
    """Says whether a look would certainly see what it saw when this was made. Most is told by the same objects standing in the
    same places, in loops that run in C, and once it has often been right, in C++; where one is another, but equal, the answer
    is no.

    What was there is kept alive, so that nothing else comes by its identity or address.
    """

    def __init__(self, at: Surroundings) -> None:
        optimizer = at.optimizer
        self._at = at
        self._num_right = 0
        self._in_optimizer = optimizer.param_groups, optimizer.state
        self._unchanged: Unchanged | None = None
        """What `_stands` compares, and that no weight has a hook, once it has been right so often that noting it pays."""
        self._ungraded: Unchanged | None = None
        """What `has_no_gradients` compares, from then on."""
        self._groups = list(optimizer.param_groups)
        self._keys = list(map(list, self._groups))
        of_groups = [place for group in self._groups for place in capturable.held_fast(group)]
        of_modules = [(vars(m), name) for m in at.watched for name in _OF_MODULES if name in vars(m)]
        fixed = [*of_modules, *(place for place in (*at.attributes, *of_groups) if _is_fixed(_get(place)))]
        self._hyperparameters: Hashable = None
        """None where all of them are fixed."""
        if not all(_is_fixed(_get(place)) for place in of_groups):
            self._hyperparameters = capturable.hyperparameters(optimizer)
        self._spaces, self._names = [space for space, _ in fixed], [name for _, name in fixed]
        self._fixed = list(map(_get, fixed))
        """What cannot be another as long as it is the same object."""
        mutable = [functools.partial(_get, place) for place in at.attributes if not _is_fixed(_get(place))]
        self._places = [*mutable, *at.numbers, *at.places]
        found = self._look_up()
        self._found, self._by_value = found, list(map(_frozen, found))
        self._walked = [space[name] for space, name in of_modules]
        self._walks = list(_values(self._walked))
        """Modules, parameters and buffers."""
        self._parameters = skipping.parameters(optimizer)
        states = list(at.states())
        self._are_tensors = [isinstance(state, Tensor) for state in states]
        self._states = list(itertools.compress(states, self._are_tensors))
        self._settled_version: Hashable = None
        """At which `_settled` was there last; None: it has to be asked for."""
        self._settled = at.settled()
        self._seen = [x for x in (*self._walks, *found) if isinstance(x, Tensor)]
        self._layouts = writes.layouts(self._seen)
        self.layouts: dict[int, writes.Layout] = dict(zip(map(id, self._seen), zip(*self._layouts, strict=True), strict=True))
        """By id, of what was looked at so closely: parameters and buffers are among them."""
        others = [*self._states, *self._settled]
        self._tensors = [x for x in others if type(x) is Tensor]
        self._subclassed = [x for x in others if type(x) is not Tensor]
        self._starts, self._addresses = list(map(Tensor.data_ptr, self._tensors)), writes.addresses(self._subclassed)
        self._hooks = at.hooks()

    def is_still_right(self) -> bool:
        """See the class. Reads no memory."""
        at, found = self._at, self._look_up()
        is_right = (
            (self._stands() if self._unchanged is None else self._unchanged.holds() and self._is_same_optimizer())
            and self._keys == list(map(list, at.optimizer.param_groups))
            and (self._hyperparameters is None or self._hyperparameters == capturable.hyperparameters(at.optimizer))
            and _are_same(self._found, found)
            and self._by_value == list(map(_frozen, found))
            and self._is_settled()
            and self._layouts == writes.layouts(self._seen)
            and self._starts == list(map(Tensor.data_ptr, self._tensors))  # none of them is marked (see `writes`)
            and self._addresses == writes.addresses(self._subclassed)
            and self._hooks == (at.hooks() if self._unchanged is None else at.hooks_of_steps())
        )
        self._num_right += is_right
        if not is_right and self._unchanged is not None:
            at.num_right *= 2
        if is_right and self._num_right == at.num_right and self._num_parts() <= MAX_NOTED:
            self._note()
            if self._unchanged is None:
                at.num_right *= 2
        return is_right

    def _is_settled(self) -> bool:
        """Is everything of loss scaling ready, and where it was? The parameters of the optimizer are the same."""
        now = self._at.settled_version()  # first: slots may change hands at any time
        if now is not None and now == self._settled_version:
            return True
        self._settled_version = now
        return _are_same(self._settled, self._at.settled())

    def has_no_gradients(self) -> bool:
        """Has no parameter or buffer a gradient? To be asked where the glance is right."""
        if self._ungraded is not None:
            return self._ungraded.holds()
        return all(map(operator.is_, map(_GRAD, self._at.owns()), itertools.repeat(None)))

    def _look_up(self) -> list[Any]:
        return [place() for place in self._places]

    def _stands(self) -> bool:
        """Do the same modules, tensors, numbers and words stand in the same places?"""
        states, groups = list(self._at.states()), self._at.optimizer.param_groups
        return (
            _are_same(self._groups, groups)
            and _are_same(self._fixed, map(dict.get, self._spaces, self._names))
            and _are_same(self._walks, _values(self._walked))
            and _are_same(self._parameters, skipping.parameters(self._at.optimizer))
            and self._are_tensors == list(map(isinstance, states, itertools.repeat(Tensor)))
            and _are_same(self._states, itertools.compress(states, self._are_tensors))
        )

    def _is_same_optimizer(self) -> bool:
        optimizer = self._at.optimizer
        return _are_same(self._in_optimizer, (optimizer.param_groups, optimizer.state))

    def _num_parts(self) -> int:
        """Of what would be noted."""
        return len(self._fixed) + len(self._walks) + len(self._are_tensors) + 3 * len(self._parameters)

    def _note(self) -> None:
        """From now on compares in C++, unless that cannot be had: where a weight has a hook, and of an optimizer that makes
        its state or groups anew whenever it is asked, or has other containers than PyTorch's."""
        _, state = self._in_optimizer
        dicts = [*self._walked, state, *state.values()]
        if not self._is_same_optimizer() or not all(map(_has_plain_order, dicts)):
            return
        try:
            unchanged, ungraded = self._noted(), Unchanged()
            ungraded.note_without_gradient(self._at.owns())
        except Exception as error:  # Dynamo's guards may be others in another PyTorch, and somebody's `__eq__` raise
            self._at.num_right = -1  # never again
            self._at.note(
                f"train_step: what stands before a replay is compared in Python, which takes the host longer: {error!r}"
            )
            return
        if unchanged.holds():
            self._unchanged, self._ungraded = unchanged, ungraded

    def _noted(self) -> Unchanged:
        """What `_stands` compares, and that no weight has a hook."""
        unchanged, (groups, state) = Unchanged(), self._in_optimizer
        unchanged.note_list(groups)
        for group in groups:
            unchanged.note_list(group["params"])
        fixed = zip(self._spaces, self._names, strict=True)
        unchanged.note_entries([*fixed, *((group, "params") for group in groups)])
        for walked in self._walked:
            unchanged.note_dict(walked)
        unchanged.note_dict_of_dicts(state, Tensor)
        unchanged.note_empty(self._parameters, NAMES_OF_HOOKS)
        return unchanged


_GRAD: Final = operator.attrgetter("grad")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
_TRAINING: Final = operator.attrgetter("training")


def _values(spaces: Iterable[_Space]) -> Iterator[Any]:
    """Of many dicts, in the order of each: an `OrderedDict` has another than `dict.values` says."""
    return itertools.chain.from_iterable(map(operator.methodcaller("values"), spaces))


def _has_plain_order(found: object) -> bool:
    """Do guards know the order of a dict?"""
    return isinstance(found, dict) and not isinstance(found, OrderedDict)


def _get(place: _Place) -> Any:
    space, name = place
    return space.get(name)


def _are_same(before: Sequence[object], now: Iterable[object]) -> bool:
    """The same objects, in the same order?"""
    found = list(now)
    return len(found) == len(before) and all(map(operator.is_, found, before))


def _is_fixed(value: object) -> bool:
    """Is it what it was as long as it is the same object?"""
    return all(map(_is_fixed, value)) if type(value) is tuple else type(value) in _SIMPLE or isinstance(value, enum.Enum)


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
