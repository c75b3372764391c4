"""Low copies of weights that gradients arrive at: what a train step computes with, in place of casting its weights anew.

A weight that a graph reads in one low format alone becomes a leaf of that format. It is written once a step, for all
micro-batches and graphs together, and its gradients stay low until the update, or until they are added up in fp32.

A step that runs as it is writes all copies anew at its beginning. A recorded one may have them written by its update, behind
the weights; it then asks, before each replay, whether anybody else has written a weight since (`fxamp.run.writes`).
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxamp import errors
from fxamp.run import skipping, stepping, writes
from fxamp.run.own_memory import OwnMemory

Compiled = Callable[..., Any]

NAMES_OF_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS_OF_WEIGHTS: Final = operator.attrgetter(*NAMES_OF_HOOKS)
"""Those that run when its gradient arrives; None, or an empty dict, where there are none."""


@dataclass(kw_only=True, eq=False)
class Leaf:
    """The copy of a weight in one low format."""

    weight: Tensor
    low: Tensor
    """Requires a gradient where the weight does. The same tensor from step to step, as CUDA graphs read it."""
    version: int
    """Autograd's count of writes to the weight, when it was copied."""
    layout: writes.Layout = (0, 0, ())
    """Where the weight lay then."""
    is_marked: bool = False
    """Was the memory of the weight marked when it was copied?"""
    is_known: bool = True
    """Would a write since have left a trace on the weight?"""
    is_read: bool = False
    """Has a graph read it since the step began? It may have saved it for its backward."""
    is_restless: bool = False
    """Does the model write the weight between two graphs that read it?"""
    arrived: list[Tensor] = field(default_factory=list)
    """Gradients, one for each graph and micro-batch: autograd would add them up in the low format."""

    @staticmethod
    def of(weight: Tensor, dtype: torch.dtype) -> Leaf:
        leaf = Leaf(weight=weight, low=torch.empty(()), version=-1)
        leaf.renew(dtype)
        return leaf

    def renew(self, dtype: torch.dtype) -> None:
        """Another tensor, with the numbers of now, beside the one that somebody may still need."""
        self.low = self.weight.detach().to(dtype).requires_grad_(self.weight.requires_grad)
        self.note_copied()
        self.is_known = False  # from step to step: nobody has marked the weight before it was copied
        self._listen(self.low)

    def note_copied(self) -> None:
        """It holds what the weight holds now."""
        weight = self.weight
        self.version, self.layout, self.is_known = weight._version, writes.layout(weight), True
        # Elsewhere kernels that only read a weight take its mark too. One that is not trained may be somebody else's, frozen.
        self.is_marked = weight.device.type == "cpu" and weight.requires_grad and writes.mark(weight)

    def is_behind(self) -> bool:
        """Has the weight been written since it was copied, as far as a step can tell? `weight.data` leaves no version."""
        return not self._stands_as_copied() or (self.is_marked and not writes.is_marked(self.weight))

    def alias(self) -> Tensor:
        """The same memory for another reader: autograd adds the gradients of one leaf up in the low format."""
        another = self.low.detach().requires_grad_(self.low.requires_grad)
        self._listen(another)
        return another

    def is_current(self) -> bool:
        """Does it hold what the weight holds? Of a weight that is not trained, nobody knows: somebody else may have it frozen,
        and whoever marks it anew would hide from the other what was written before."""
        weight = self.weight
        is_same = self.is_known and weight.requires_grad and self._stands_as_copied()
        return is_same and writes.is_marked(weight) and writes.is_alone(weight)

    def _stands_as_copied(self) -> bool:
        return (self.version, self.layout) == (self.weight._version, writes.layout(self.weight))

    def fits(self) -> bool:
        """Is it still a copy of a weight like this one?"""
        return self.low.shape == self.weight.shape and self.low.requires_grad == self.weight.requires_grad

    def _listen(self, low: Tensor) -> None:
        if low.requires_grad:
            taking = weakref.WeakMethod(self._take)  # PyTorch's garbage collection does not see what a hook like this holds

            def take(low: Tensor) -> None:
                taken_by = taking()
                if taken_by is not None:
                    taken_by(low)

            low.register_post_accumulate_grad_hook(take)

    def _take(self, low: Tensor) -> None:
        assert low.grad is not None
        self.arrived.append(low.grad)
        low.grad = None


class LowLeaves:
    """The copies that belong to one train step."""

    def __init__(self, weights: Iterable[Tensor], own_memory: OwnMemory) -> None:
        self._own_memory = own_memory
        self._eligible = {id(w): w for w in weights if _is_plain(w)}
        self._leaves: dict[tuple[int, torch.dtype], Leaf] = {}
        self._ever: weakref.WeakSet[Leaf] = weakref.WeakSet()
        """Those too that only recordings read."""
        self.num_copied = 0
        """Copies that were found stale before a replay."""
        stepping.after().add(self)

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._leaves.values())

    # ---- graphs ---------------------------------------------------------------------------------------------------------
    def positions(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Which inputs of a graph can be leaves."""
        return tuple(i for i, value in enumerate(inputs) if id(value) in self._eligible)

    def around(self, program: Compiled, taken: Mapping[int, torch.dtype]) -> Compiled:
        """A graph that takes leaves at these positions, as one that takes the weights. It may live longer than they do, and is
        not to keep them."""
        wanted, whose = tuple(taken.items()), weakref.ref(self)

        def call(*args: Any) -> Any:
            leaves = whose()
            assert leaves is not None
            given = list(args)
            is_new = any((id(args[i]), dtype) not in leaves._leaves for i, dtype in wanted)
            with leaves._own_memory.used() if is_new else contextlib.nullcontext():
                for i, dtype in wanted:
                    given[i] = leaves._read(args[i], dtype)
            return program(*given)

        return call

    def _read(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = id(weight), dtype
        leaf = self._leaves.get(key)
        if leaf is None or not leaf.fits():
            leaf = self._leaves[key] = Leaf.of(weight, dtype)
            self._ever.add(leaf)
        elif leaf.is_behind():  # written since, by the model itself
            if leaf.is_read:
                leaf.renew(dtype)
                leaf.is_read, leaf.is_restless = False, True
            else:
                _copy([leaf])
        is_first, leaf.is_read = not leaf.is_read, True
        return leaf.low if is_first else leaf.alias()

    # ---- a step ---------------------------------------------------------------------------------------------------------
    def begin(self, *, copies: bool = True) -> None:
        """Before a step: forgets what has arrived, and writes all copies anew, however the weights have changed; not where
        they are known to be current."""
        self._leaves = {key: leaf for key, leaf in self._leaves.items() if leaf.fits()}
        self.drop_gradients()
        for leaf in self:
            leaf.is_read = False
        if copies:
            _copy(list(self))

    @property
    def read(self) -> tuple[Leaf, ...]:
        """Those that graphs have read since the step began."""
        return tuple(leaf for leaf in self if leaf.is_read)

    def can_be_followed(self) -> bool:
        """Can the update write the copies, for the next step?"""
        return not any(leaf.is_restless for leaf in self)

    def bring_up_to_date(self, leaves: Collection[Leaf], layouts: Mapping[int, writes.Layout] | None = None) -> None:
        """Before a step that does not write these copies itself: copies what may have been written since. Reads no memory.
        `layouts`: of now, of the weights, by id, where somebody knows them."""
        if _are_current(leaves, layouts):
            return
        stale = [leaf for leaf in leaves if not leaf.is_current()]
        for leaf in stale:
            writes.mark(leaf.weight)  # what is written behind the mark is seen
        _copy(stale)
        self.num_copied += len(stale)
        for leaf in stale:
            leaf.is_known = writes.is_alone(leaf.weight)  # who has an address from before leaves the mark

    def forget(self, *, but: Collection[Leaf] = ()) -> None:
        """After a step: the weights have been written, by address; `but`: and these copies with them, of its own."""
        if len(but) == len(self._ever):
            return
        kept = set(but)
        for leaf in self._ever:
            leaf.is_known = leaf.is_known and leaf in kept

    def note_step(self, optimizer: Optimizer) -> None:
        """Somebody else's optimizer has stepped. Fused ones leave neither a mark on CUDA nor a new version."""
        if self._ever and not self._eligible.keys().isdisjoint(skipping.ids(optimizer)):
            self.forget()

    def refuse_hooks(self) -> None:
        """Raises: InvalidOption for a hook that was put on a weight since, and would never run."""
        if any(map(any, map(HOOKS_OF_WEIGHTS, self._eligible.values()))):
            raise errors.InvalidOption(
                "a hook was registered on a weight after its train step was made, which computes with a copy of the weight",
                way_out="Register hooks first, then call amp.train_step(...): such weights are then computed with themselves",
            )

    @torch.no_grad()
    def widen_gradients(self, inverse_scale: Tensor | None) -> None:
        """Moves the gradients of the copies to their weights, in fp32, added to what is there. `inverse_scale`: fp32 [], what
        they are multiplied by; None: they are true."""
        arrived = [(leaf.weight, gradient) for leaf in self for gradient in leaf.arrived]
        if not arrived:
            return
        if inverse_scale is None:  # a true gradient is widened where it is added
            for weight, gradient in [(w, g) for w, g in arrived if w.grad is not None]:
                assert weight.grad is not None
                weight.grad.add_(gradient)
            arrived = [(w, g) for w, g in arrived if w.grad is None]
        wide = [torch.empty_like(weight, requires_grad=False) for weight, _ in arrived]
        if wide:
            torch._foreach_copy_(wide, [gradient for _, gradient in arrived])
        if wide and inverse_scale is not None:
            torch._foreach_mul_(wide, inverse_scale)
        for (weight, _), gradient in zip(arrived, wide, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forgets what has arrived."""
        for leaf in self:
            leaf.arrived.clear()


@torch.no_grad()
def _copy(leaves: Sequence[Leaf]) -> None:
    if leaves:
        torch._foreach_copy_([leaf.low.detach() for leaf in leaves], [leaf.weight.detach() for leaf in leaves])
    for leaf in leaves:
        leaf.note_copied()


def _are_current(leaves: Collection[Leaf], layouts: Mapping[int, writes.Layout] | None) -> bool:
    """Is every one of them? As `Leaf.is_current`, in loops that run in C: each replay asks it of all."""
    weights = list(map(operator.attrgetter("weight"), leaves))
    now = zip(*writes.layouts(weights), strict=True) if layouts is None else map(layouts.get, map(id, weights))
    told = map(operator.attrgetter("is_known", "version"), leaves)
    return (
        list(told) == [(True, weight._version) for weight in weights]
        and all(map(operator.attrgetter("requires_grad"), weights))
        and list(map(operator.attrgetter("layout"), leaves)) == list(now)
        and writes.are_marked_and_alone(weights)
    )


def _is_plain(weight: Tensor) -> bool:
    """Is it a weight whose gradient nobody but the optimizer waits for?"""
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and _has_no_hooks(weight)


def _has_no_hooks(weight: Tensor) -> bool:
    return not any(HOOKS_OF_WEIGHTS(weight))
