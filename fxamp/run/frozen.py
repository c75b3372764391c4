"""Low copies of frozen weights: one for each weight and format, brought up to date when the weight has been written.

A copy is never trusted: before every call of a graph that reads it, it is asked whether the weight still is the memory that
was copied, and whether that memory was written since (`fxamp.run.writes`). What cannot be known, because somebody else may
hold an address of the memory, is copied at every call.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxamp import errors, formats
from fxamp.run import skipping, stepping, writes

Compiled = Callable[..., Any]


class Memory:
    """The memory that one weight, or several, lie in."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: Final = storage
        """Also keeps the address from becoming that of something else."""
        self.num_writes = 0
        """How often it was found written."""
        self.exposure: str | None = None
        """Why it may be written without leaving a mark."""


@dataclass(eq=False)
class Copy:
    """A weight in a low format."""

    low: Tensor
    alias: Tensor
    """The memory that was copied, as the weight lay in it: `weight.data`, which does not keep the weight itself."""
    memory: Memory
    num_writes: int
    """Of the memory, when it was copied."""
    epoch: int
    """Of all copies, then."""
    version: int = -1
    """Autograd's count of writes to the weight, then."""

    def is_of(self, weight: Tensor, epoch: int) -> bool:
        """Does it hold what the weight holds?"""
        return (
            self.num_writes == self.memory.num_writes
            and self.epoch == epoch
            and self.version == _version(weight)
            and self.memory.exposure is None
            and writes.is_marked(weight)
            and self.alias.is_set_to(weight)
        )


@dataclass(eq=False)
class Slot:
    """A place in a module that holds a frozen weight."""

    module: weakref.ref[nn.Module]
    name: str
    path: str
    weight: Tensor
    """A reference that keeps it: tensors with weak ones cannot be swapped (`torch.utils.swap_tensors`)."""
    trains: bool
    """Did the weight require a gradient?"""
    refusal: Any = None
    """What raises where a backward reaches it."""

    def now(self) -> Tensor | None:
        """The weight that is there now."""
        module = self.module()
        return None if module is None else module._parameters.get(self.name)


class Frozen:
    """The weights that one call of `Amp.freeze` froze. As a context manager it thaws them at the end."""

    def __init__(self, copies: WeightCopies, slots: Sequence[Slot]) -> None:
        self._copies, self._slots = copies, tuple(slots)

    def thaw(self) -> None:
        """Frees the copies; the weights require gradients again, where they did. May be called again."""
        self._copies.release(self._slots)

    @property
    def num_weights(self) -> int:
        """Weights that are frozen; a shared one counts once."""
        return len({id(weight) for weight in self._weights()})

    @property
    def num_bytes(self) -> int:
        """Memory of the copies now, in bytes: two for each number of a weight that a graph has read in bf16 or fp16."""
        return self._copies.num_bytes({id(weight) for weight in self._weights()})

    def _weights(self) -> Iterator[Tensor]:
        return (slot.weight for slot in self._slots if self._copies.holds(slot))

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()

    def __repr__(self) -> str:
        return f"Frozen({self.num_weights} weights, {self.num_bytes} bytes of copies)"


class WeightCopies:
    """The frozen weights of an Amp, and their copies."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note: Final = note
        self._slots: list[Slot] = []
        self._known: dict[int, Tensor] = {}
        """The frozen weights, by id."""
        self._copies: dict[tuple[int, torch.dtype], Copy] = {}
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._epoch = 0
        self._last: dict[torch.device, tuple[torch.cuda.Stream, Any]] = {}
        """The stream in which copies were last brought up to date, and the event behind it."""
        self.num_updates = 0
        """Copies that were made, or brought up to date."""

    # ---- freezing -------------------------------------------------------------------------------------------------------
    def freeze(self, model: nn.Module) -> Frozen:
        """From now on graphs without gradients read low copies of the weights. Raises: CannotFreeze."""
        taken = {(slot.module(), slot.name) for slot in self._slots}
        end = _end_of_module(self)
        found = [
            Slot(
                weakref.ref(module, end),
                name,
                f"{prefix}.{name}".lstrip("."),
                weight,
                weight.requires_grad,
            )
            for prefix, module in model.named_modules()
            for name, weight in module._parameters.items()
            if weight is not None and (module, name) not in taken
        ]
        for module in model.modules():
            _check_whole(module)
        for slot in found:
            _check_plain(slot)
        for slot in found:
            self._hold(slot)
        if any(slot.weight.is_cuda for slot in found):
            writes.watch_lists()
        self._slots += found
        stepping.after().add(self)
        _forget_guards(found)
        return Frozen(self, found)

    def _hold(self, slot: Slot) -> None:
        weight = slot.weight
        self._known[id(weight)] = weight
        if weight.requires_grad:
            # A backward that is under way would drop the gradient of what no longer requires one, and say nothing.
            slot.refusal = torch.autograd.graph.get_gradient_edge(weight).node.register_prehook(_Refusal(slot.path))
            weight.requires_grad_(False)

    def thaw(self, model: nn.Module) -> None:
        """Undoes every `freeze` of the weights of a model."""
        modules = set(map(id, model.modules()))
        self.release([slot for slot in self._slots if id(slot.module()) in modules])

    def release(self, slots: Iterable[Slot]) -> None:
        """Frees the copies of the weights in these places, which require gradients again where they did."""
        gone = [slot for slot in slots if slot in self._slots]
        self._slots = [slot for slot in self._slots if slot not in gone]
        for slot in gone:
            if slot.refusal is not None:
                slot.refusal.remove()
            for weight in (slot.weight, slot.now()):  # what came into its place has its requires_grad
                if weight is not None and slot.trains:
                    weight.requires_grad_()
        self._forget_others()
        _forget_guards(gone)

    def drop(self, module: object) -> None:
        """A module, by its weak reference, is gone."""
        self._slots = [slot for slot in self._slots if slot.module is not module]
        self._forget_others()

    def _forget_others(self) -> None:
        """Frees what belongs to weights that are in no place any more."""
        self._known = {id(slot.weight): slot.weight for slot in self._slots}
        for of in [of for of in self._copies if of[0] not in self._known]:
            writes.unmark(self._copies.pop(of).alias)

    def expire(self) -> None:
        """Whatever was written, and however: all copies are made anew before they are read again. Costs nothing now."""
        self._epoch += 1

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped. Fused ones leave neither a mark on CUDA nor a new version."""
        if self._slots and not self._known.keys().isdisjoint(skipping.ids(optimizer)):
            self.expire()

    # ---- asking ---------------------------------------------------------------------------------------------------------
    @property
    def is_active(self) -> bool:
        return bool(self._slots)

    def holds(self, slot: Slot) -> bool:
        return slot in self._slots

    def positions(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Which inputs of a graph are frozen weights."""
        if not self._slots:
            return ()
        self._adopt()
        return tuple(i for i, value in enumerate(inputs) if id(value) in self._known)

    def refuse_gradients(self, inputs: Sequence[Any]) -> None:
        """Raises FrozenWeights if a graph that is compiled for calls with gradients has weights that were to get one."""
        if not self._slots:
            return
        trained = {id(slot.weight): slot.path for slot in self._slots if slot.trains}
        paths = [trained[id(value)] for value in inputs if id(value) in trained]
        if paths and torch.is_grad_enabled():
            raise errors.FrozenWeights(
                f"a model with frozen weights ({paths[0]}, and {len(paths) - 1} more) was called with gradients on",
                way_out="To infer, call it under torch.no_grad() or torch.inference_mode(); to train, amp.thaw(model) first",
            )

    def num_bytes(self, keys: Iterable[int] | None = None) -> int:
        """Memory of the copies, in bytes, of these weights, by id, or of all."""
        wanted = self._known if keys is None else set(keys)
        return sum(copy.low.nbytes for (key, _), copy in self._copies.items() if key in wanted)

    def summary(self) -> tuple[tuple[str, str], ...]:
        """(what, value) for the report."""
        if not self._slots:
            return ()
        formats_of = Counter(formats.name(dtype) for _, dtype in self._copies)
        made = ", ".join(f"{count} in {name}" for name, count in sorted(formats_of.items())) or "none yet"
        exposed = [(self._path(key), copy.memory.exposure) for (key, _), copy in self._copies.items() if copy.memory.exposure]
        rows = [
            ("frozen weights", str(len(self._known))),
            ("low copies", f"{made}; {self.num_bytes():,} bytes"),
            ("copied", f"{self.num_updates} times, since weights were frozen or written"),
        ]
        if exposed:
            path, why = exposed[0]
            rows.append(("copied at every call", f"{len(exposed)}: {path}, for one, since {why}"))
        return tuple(rows)

    def _path(self, key: int) -> str:
        return next((slot.path for slot in self._slots if id(slot.weight) == key), "?")

    # ---- running --------------------------------------------------------------------------------------------------------
    def around(self, program: Compiled, taken: Mapping[int, torch.dtype]) -> Compiled:
        """A graph that takes low copies of its inputs at these positions, as one that takes the weights."""
        wanted = tuple(taken.items())

        def call(*args: Any) -> Any:
            given = list(args)
            self._read(given, wanted)
            return program(*given)

        return call

    def telling(self, program: Compiled, positions: Sequence[int]) -> Compiled:
        """A graph that casts its weights, at these positions, and says so where they are frozen."""

        def call(*args: Any) -> Any:
            if self._slots and any(id(args[i]) in self._known for i in positions):
                self._note(
                    "a graph that was compiled before amp.freeze casts its frozen weights at every call, since they required "
                    "no gradients before, and Dynamo sees no change: freeze before the first call, or torch._dynamo.reset()"
                )
            return program(*args)

        return call

    def _read(self, args: list[Any], wanted: Sequence[tuple[int, torch.dtype]]) -> None:
        """Puts the low copies of weights in their places."""
        device = args[wanted[0][0]].device
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():  # a replay asks nobody: the casts become part of what is captured
                for i, dtype in wanted:
                    args[i] = args[i].detach().to(dtype)
                return
            self._wait_for_copies(device)
        stale = list[tuple[int, torch.dtype]]()
        for i, dtype in wanted:
            copy = self._copies.get((id(args[i]), dtype))
            if copy is not None and copy.is_of(args[i], self._epoch):
                args[i] = copy.low
            else:
                stale.append((i, dtype))
        if stale:
            self._bring_up_to_date(args, stale)
            if device.type == "cuda":
                stream = torch.cuda.current_stream(device)
                self._last[device] = stream, stream.record_event()

    def _wait_for_copies(self, device: torch.device) -> None:
        """What copies were made in another stream are there before this one goes on. The host does not wait."""
        known = self._last.get(device)
        if known is not None and known[0] != (stream := torch.cuda.current_stream(device)):
            stream.wait_event(known[1])

    @torch.no_grad()
    @torch.inference_mode(False)  # a copy that is made under it could be read under it only
    def _bring_up_to_date(self, args: list[Any], stale: Sequence[tuple[int, torch.dtype]]) -> None:
        if any(id(args[i]) not in self._known for i, _ in stale):
            self._adopt()
        copies: dict[int, Copy] = {}
        for i, dtype in stale:
            weight = args[i]
            if id(weight) in self._known:
                copies[i] = self._copy_of(weight, dtype)
                continue
            args[i] = weight.detach().to(dtype)
            self._note(
                "a graph that was compiled for frozen weights is called with others: thawed ones that required no gradients "
                "before, or those of another instance of the module. They are cast at every call, outside of the graph"
            )
        self._watch({id(copy.memory): (copy.memory, args[i]) for i, copy in copies.items()}.values())
        for i, copy in copies.items():  # behind the marks: what is written from here on is seen
            copy.low.copy_(args[i])
            copy.num_writes, copy.epoch, copy.version = copy.memory.num_writes, self._epoch, _version(args[i])
            args[i] = copy.low
        self.num_updates += len(copies)

    def _copy_of(self, weight: Tensor, dtype: torch.dtype) -> Copy:
        """The copy of a weight, whose numbers may be old, or not there yet."""
        key = (id(weight), dtype)
        storage = weight.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = Memory(storage)
        copy = self._copies.get(key)
        if copy is None or copy.low.shape != weight.shape or copy.low.device != weight.device:
            low = torch.empty_like(weight, dtype=dtype, requires_grad=False)
            copy = self._copies[key] = Copy(low, weight.data, memory, num_writes=-1, epoch=-1)
        elif not copy.alias.is_set_to(weight):
            copy.alias, copy.memory = weight.data, memory
            if copy.low.stride() != torch.empty_like(weight, dtype=dtype, device="meta").stride():
                copy.low = torch.empty_like(weight, dtype=dtype, requires_grad=False)
        return copy

    def _watch(self, memories: Iterable[tuple[Memory, Tensor]]) -> None:
        """Marks memory as unwritten, and finds out whether somebody could write it without taking the mark away."""
        owners = Counter(weight.untyped_storage()._cdata for weight in self._known.values())
        owners.update(copy.memory.storage._cdata for copy in self._copies.values())
        for memory, weight in memories:
            if not writes.is_marked(weight) or memory.exposure is not None:
                memory.num_writes += 1
            memory.exposure = None
            if not writes.mark(weight):
                memory.exposure = "its memory is not PyTorch's own (shared between processes, mapped from a file, or NumPy's)"
            elif writes.num_owners(memory.storage) > owners[memory.storage._cdata] + 1:
                memory.exposure = "something beside the model has its memory: a view, an old state_dict, a NumPy array"

    def _adopt(self) -> None:
        """Whatever has come into the place of a frozen weight (`load_state_dict(assign=True)`) is frozen too."""
        for slot in self._slots:
            now = slot.now()
            if now is not None and now is not slot.weight and type(now) is nn.Parameter:
                slot.trains |= now.requires_grad
                slot.weight = now
                self._hold(slot)
        self._forget_others()


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


class _Refusal:
    """Stands before the gradient of a frozen weight."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *_: object) -> None:
        raise errors.FrozenWeights(
            f"a backward reaches the frozen weight {self._path}", way_out="Call backward() first, or amp.thaw(model) before it"
        )


def _end_of_module(copies: WeightCopies) -> Callable[[object], None]:
    """What is called with the weak reference of a module that is gone."""
    this = weakref.ref(copies)

    def drop(module: object) -> None:
        known = this()
        if known is not None:
            known.drop(module)

    return drop


_WAY_OUT: Final = "Freeze modules without it; its weights are cast at every call, as without freeze"


def _check_whole(module: nn.Module) -> None:
    if {"FullyShardedDataParallel", "FSDPModule"} & {cls.__name__ for cls in type(module).__mro__}:
        what = f"a {type(module).__name__} is sharded, and cannot be frozen: the weights that its graphs get live for one call"
        raise errors.CannotFreeze(what, way_out=_WAY_OUT)


def _check_plain(slot: Slot) -> None:
    if type(slot.weight) is not nn.Parameter:
        what = f"{slot.path} is a {type(slot.weight).__name__}, and cannot be frozen: only a plain torch.nn.Parameter can be"
        raise errors.CannotFreeze(what, way_out=_WAY_OUT)


def _forget_guards(slots: Iterable[Slot]) -> None:
    """Lets Dynamo look at weights again. It skips them while the dictionary that holds them says that nobody has changed it
    (torch 2.11 also where what they require has)."""
    for module in {id(m): m for slot in slots if slot.trains and (m := slot.module()) is not None}.values():
        for name in list(module._parameters):
            module._parameters[name] = module._parameters.pop(name)
