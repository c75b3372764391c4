"""A whole training step as one CUDA graph: forward, loss, backward, clipping, update, and what moves the loss scale.

What is recorded is the plain loop of a user, with the hooks of `Attachment` in it: nothing of it waits, and all that changes
from step to step is a tensor on the device, or part of the key under which a recording is found again. On a CPU, and wherever
nothing can be recorded, the same loop runs as it is.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fxamp import errors
from fxamp.run import (
    arguments,
    capturable,
    data_parallel,
    ranks,
    reach,
    reduction,
    skipping,
    stepping,
    update,
    warming,
    writes,
)
from fxamp.run.agreement import Agreement
from fxamp.run.batch import Batch
from fxamp.run.branches import Branches
from fxamp.run.learning_rates import LearningRates
from fxamp.run.leaves import Leaf, LowLeaves
from fxamp.run.listener import Listener, memory_of
from fxamp.run.own_memory import OwnMemory
from fxamp.run.programs import Running, guard_of, num_programs
from fxamp.run.recorder import Graph, Recorder
from fxamp.run.surroundings import Glance, Surroundings, World
from fxamp.run.update import FusedUpdate, Gradient
from fxamp.run.variants import Precisions

if TYPE_CHECKING:
    from types import TracebackType

    from fxamp.run.scaler import Scaler

MAX_SHAPES: Final = 8
"""Shapes of batches that are recorded. Each holds static inputs, and a graph for each precision."""

MAX_CONSTANT: Final = 3
"""Programs of a step that have Python's floats as constants: Dynamo compiles a function 8 times at most."""

MAX_WORLDS: Final = 8
"""How often everything is recorded anew, because tensors moved or a hyperparameter changed, before nothing is any more."""


_TAKES_FLOATS: Final = "it reads a float of Python's that has changed several times: give it with the batch, as a tensor"
_TOO_LATE: Final = "torch.distributed was initialized after the step was made"

NUM_WARMUPS: Final = 2
"""Steps of each shape that run as they are, on the stream of the recording, before it: kernels are loaded, and tuned."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a step computes."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    """(output, target) -> loss; None: the model returns its loss, or something that has a `.loss`, or a "loss"."""
    optimizer: Optimizer
    clip_grad_norm: float | None
    accumulate: int

    def objective(self) -> Callable[..., Tensor]:
        """The loss of one micro-batch, divided by their number, as a function that can be compiled. `model` is one of its
        variables: the paths of modules are then what they are in the model."""
        model, loss_fn, share = self.model, self.loss_fn, 1.0 / self.accumulate

        def objective(*batch: Any, **named: Any) -> Tensor:
            if loss_fn is None:
                outputs = model(*batch, **named)
                in_dict = isinstance(outputs, dict) and "loss" in outputs
                loss: Any = outputs["loss"] if in_dict else getattr(outputs, "loss", outputs)
            else:
                loss = loss_fn(model(*batch[:-1], **named), batch[-1])
            return loss * share if share != 1.0 and isinstance(loss, Tensor) else loss

        # Dynamo counts recompilations by code object: all train steps of a process would share one limit.
        objective.__code__ = objective.__code__.replace(co_name=f"objective_of_{type(model).__name__}")
        return objective

    def modules(self) -> list[nn.Module]:
        """Every module whose state a recording depends on."""
        roots = [m for m in (self.model, self.loss_fn) if isinstance(m, nn.Module)]
        return list(dict.fromkeys(m for root in roots for m in root.modules()))


@dataclass(kw_only=True)
class _Recording:
    graph: Graph
    loss: Tensor
    """In the memory of the graph: the next replay overwrites it."""
    room: Tensor | None
    """What kernels of the update read."""
    held: tuple[object, ...]
    """What it reads beside that and has no other owner for sure: programs, whose constants it reads; stores and masks of
    flags, which grow and are made anew; tensors that somebody may replace."""
    is_what_would_run: Callable[[], bool]
    """Would Dynamo run these programs, as things stand?"""
    switches: Any
    """Those of PyTorch that programs are compiled for: autocast, deterministic algorithms, and so on; with `.check()`."""
    leaves: tuple[Leaf, ...]
    """Low copies of weights that it reads."""
    lows: tuple[Tensor, ...]
    """Their memory."""
    followed: tuple[Leaf, ...]
    """Those that its update writes; () where it writes all of them anew at its beginning."""


class _CannotRecord(RuntimeError):
    """A recording would not be the step for long."""


class _CannotFollow(Exception):
    """The update does not write the low copies that the step was to find current."""


@dataclass(kw_only=True)
class _Shape:
    """What belongs to the batches of one shape."""

    inputs: list[Tensor]
    """Static: the recordings read them."""
    num_warm: int = 0
    """Steps that ran as they are."""
    recordings: dict[Hashable, _Recording] = field(default_factory=dict)
    num_prepared: dict[Hashable, int] = field(default_factory=dict)
    """Steps that ran as they are, by what their recording would be found by; where there are other ranks."""


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """A recording that this rank is ready for, and makes when the others are."""

    key: Hashable
    shape: _Shape
    place: Hashable
    batch: Batch
    precision: Mapping[str, str]
    strangers: tuple[Tensor, ...]
    """What graphs read beside the batch, parameters, buffers, and what the step itself computes."""


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """What became of the calls of a step."""

    num_recordings: int
    num_replayed: int
    num_plain: Mapping[str, int]
    """Why a call was not a replay -> how often."""
    num_ranks: int = 1
    """Whose collectives are part of the CUDA graphs."""
    num_beside: int = 0
    """Launches of the compiled graphs, of all precisions and shapes, that have a place beside the main branch."""

    def __str__(self) -> str:
        plain = "".join(f"; {count} as they are: {why}" for why, count in self.num_plain.items())
        collectives = f", with the collectives of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        beside = f", {self.num_beside} launches in branches" if self.num_beside else ""
        return f"{self.num_replayed} replayed from {self.num_recordings} CUDA graphs{beside}{collectives}{plain}"


class TrainStep:
    """A training step; see `Amp.train_step`."""

    def __init__(
        self,
        task: Task,
        *,
        backend: Callable[..., Any],
        may_copy: bool,
        is_one_of_many: bool,
        group: Any,
        scaler: Scaler | None,
        precisions: Precisions,
        retries: bool,
        refuse_frozen: Callable[[Sequence[Tensor]], None],
        note: Callable[[str], None],
        wish: str | bool,
        is_lowered: bool,
    ) -> None:
        arguments.check_parts(task.model, task.loss_fn, task.optimizer)
        arguments.check_numbers(task.clip_grad_norm, task.accumulate)
        capturable.check(task.optimizer)
        self._task, self._scaler, self._precisions = task, scaler, precisions
        self._retries, self._note, self._must_record = retries, note, wish == "require"
        self._refuse_frozen = refuse_frozen
        self._device = self._parameters[0].device
        self._own_memory = OwnMemory(self._device)
        # DDP and FSDP wait for the gradients of parameters, by hooks that no one can see.
        self._leaves = LowLeaves(self._parameters if may_copy and not is_one_of_many else (), self._own_memory)
        self._surroundings = Surroundings(
            task.modules, task.optimizer, task.loss_fn, self._settled, note, settled_version=self._settled_version
        )
        self._objective, self._listener = task.objective(), Listener(backend, self._leaves)
        self._loss = torch.compile(self._objective, backend=self._listener.backend())
        self._update: FusedUpdate | None = None
        self._rates = LearningRates(task.optimizer)
        self._on_cuda = self._device.type == "cuda"
        self._why_plain = "cuda_graphs=False" if wish is False else ""
        if not self._on_cuda:
            self._why_plain = f"no CUDA graphs on {self._device.type}"
        if is_one_of_many and not self._why_plain:
            self._why_plain = data_parallel.why_not_recorded(task.modules(), self._device, group)
        if is_one_of_many and self._why_plain and wish == "require":
            raise errors.CudaGraphsUnavailable(
                f"cuda_graphs='require', and the train step of these ranks is not recorded: {self._why_plain}",
                way_out="Use cuda_graphs='auto': the step then runs as it is",
            )
        self._agreement: Agreement | None = None
        """With the other ranks, on when to record; None: there are none, or nothing is recorded."""
        self._wishes: dict[Hashable, _Wish] = {}
        self._reducers: list[Any] = []
        """Of DDP, in the last step that prepared a recording."""
        self._num_reduced = 0
        """Such steps since these are there."""
        self._shapes: dict[Hashable, _Shape] = {}
        self._world: World | None = None
        self._glance: Glance | None = None
        """Of the same time; None: the world has to be looked at."""
        self._num_worlds = 0
        self._recorder = None if self._why_plain else Recorder(self._device)
        self._branches = Branches()
        if is_one_of_many and self._recorder is not None:
            self._agreement = Agreement(self._device, group)
            data_parallel.move_to(self._ddps(), self._recorder.aside)
            data_parallel.call_before_groups_end(self.close)
        if self._on_cuda and not update.why_not(task.optimizer):
            self._update = FusedUpdate(task.optimizer)
            writes.watch_lists()
        self._room: Tensor | None = None
        """Of the step that is being recorded."""
        self._num_recordings = self._num_replayed = self._num_beside = 0
        self._num_plain: Counter[str] = Counter()
        self._looks_outside = is_lowered  # else autograd sees single operations
        self._has_told_of_breaks = self._has_looked_for_gradients = self._has_taken = False
        self._is_closed = False
        self._forms: set[tuple[int | str, ...]] = set()
        """Numbers of arguments, and their names, that the step was called with."""

    @property
    def _parameters(self) -> list[Tensor]:
        """Those of the optimizer now: groups may be added."""
        return skipping.parameters(self._task.optimizer)

    def _own_ids(self) -> frozenset[int]:
        """Of the parameters whose gradients a step computes, and drops."""
        return frozenset(map(id, self._task.model.parameters())) | skipping.ids(self._task.optimizer)

    # ---- what people call -----------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Takes one step. Returns the loss, detached, fp32 or whatever the loss is, []: a tensor of the caller's own.

        Args: as `Amp.train_step` says. Tensors are copied to the device of the model, without a wait where they are there
        or pinned.
        Raises: InvalidOption for arguments that model and loss cannot be called with; for a batch that cannot be split,
        requires a gradient, or holds something else than tensors, numbers, strings and None; for hooks on weights that are
        younger than the step; with gradients off; after `close()`. FrozenWeights where `Amp.freeze` holds a weight.
        """
        if self._is_closed:
            raise errors.InvalidOption("the train step is closed", way_out="Make a new one: amp.train_step(...)")
        if not torch.is_grad_enabled():
            raise errors.InvalidOption(
                "a train step was called under torch.no_grad() or torch.inference_mode()", way_out="Call it outside of them"
            )
        form = len(args), *kwargs
        if form not in self._forms:
            arguments.check_call(self._task.model, self._task.loss_fn, len(args), kwargs)
            self._forms.add(form)
        batch = Batch.of(args, kwargs)
        self._refuse_frozen(self._parameters)
        if not self._retries:
            loss = self._step(batch)
            self._precisions.end_step()
            return loss
        before = self._read_skipped()
        loss = self._step(batch)
        self._precisions.end_step()
        return self._retry(batch, loss, before)

    def summary(self) -> StepSummary:
        """How the calls ran. Waits for nothing."""
        return StepSummary(
            num_recordings=self._num_recordings,
            num_replayed=self._num_replayed,
            num_plain=dict(self._num_plain),
            num_ranks=1 if self._agreement is None else self._agreement.num_ranks,
            num_beside=self._num_beside,
        )

    def __repr__(self) -> str:
        return f"<TrainStep of {type(self._task.model).__name__}: {self.summary()}>"

    def close(self) -> None:
        """Gives the memory of the CUDA graphs back. May be called again."""
        self._is_closed = True
        self._own_memory.close()
        self._forget_recordings()
        self._wishes.clear()
        self._glance = None
        self._recorder = None

    def __enter__(self) -> TrainStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- a step ---------------------------------------------------------------------------------------------------------
    def _step(self, batch: Batch) -> Tensor:
        if self._scaler is None:
            return self._step_alone(batch)
        with self._scaler.round_of(self._task.optimizer):
            return self._step_alone(batch)

    def _step_alone(self, batch: Batch) -> Tensor:
        if self._agreement is None and not self._why_plain and ranks.is_one_of_many():
            self._give_up(_TOO_LATE)
        loss = self._replay_or_launch(batch)
        if self._agreement is not None and self._agreement.hear():
            self._record_together(self._agreement, batch)
        return loss

    def _replay_or_launch(self, batch: Batch) -> Tensor:
        if self._why_plain:
            self._leaves.refuse_hooks()
            return self._plain(batch, self._why_plain)
        if self._glance is None and any(map(is_lazy, self._surroundings.owns())):
            return self._plain(batch, "warming up")  # the first forward makes weights
        glance = self._look_around()
        if not glance.has_no_gradients():
            self._drop_gradients()  # somebody's, of which a replay knows nothing
        key = batch.key()
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) == MAX_SHAPES:
                return self._plain(batch, f"more than {MAX_SHAPES} shapes of batches")
            batch.parts(batch.tensors, self._task.accumulate)  # what is refused has no place here
            shape = self._shapes[key] = _Shape(inputs=[_static(x, self._device) for x in batch.tensors])
        place = self._place()
        if place not in shape.recordings:
            if self._agreement is not None:
                return self._prepare(self._agreement, batch, key, shape)
            if shape.num_warm < NUM_WARMUPS or not self._has_state():
                shape.num_warm += 1
                return self._plain(batch, "warming up")
            self._record_all(batch, shape)
            glance = self._look_around()  # what is recorded may need more room than was there
            if self._why_plain or place not in shape.recordings or key not in self._shapes:
                return self._plain(batch, self._why_plain or "warming up")
        recording = shape.recordings[place]
        if not recording.switches.check():
            return self._plain(batch, "autocast, or another switch of PyTorch, stands otherwise than when it was recorded")
        if not recording.is_what_would_run():
            self._begin_anew("values that its program was compiled for")
            return self._plain(batch, self._why_plain or "warming up")
        if shape.inputs:
            torch._foreach_copy_(shape.inputs, list(batch.tensors), non_blocking=True)
        self._rates.refresh()
        if recording.followed:
            self._leaves.bring_up_to_date(recording.leaves, glance.layouts)
        recording.graph.replay()
        self._leaves.forget(but=recording.followed)
        stepping.tell(self._task.optimizer, by=self._leaves)
        self._num_replayed += 1
        self._task.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # what learning-rate schedules ask
        if self._scaler is not None:
            self._scaler.after_replay(self._task.optimizer)
        return recording.loss.clone()

    def _plain(self, batch: Batch, why: str, into: Sequence[Tensor] | None = None) -> Tensor:
        """The step as it is; where it is to be recorded later, on the stream of that. `into`: what its tensors are copied to;
        None: they are taken themselves."""
        self._num_plain[why] += 1
        self._surroundings.modules = self._task.modules()  # some may be others'
        if into:
            torch._foreach_copy_(list(into), list(batch.tensors), non_blocking=True)
        tensors = [x.to(self._device, non_blocking=True) for x in batch.tensors] if into is None else into
        if self._on_cuda:
            self._rates.refresh()
        if self._recorder is None:
            return self._launch(batch, tensors)
        with self._recorder.aside(*tensors):
            loss = self._launch(batch, tensors)
        return self._recorder.hand_out(loss)

    def _launch(self, batch: Batch, tensors: Sequence[Tensor], *, follows: bool = False) -> Tensor:
        """The plain loop. Nothing of it waits, once the optimizer has its state.

        With `follows`, low copies of weights are current when it begins, and the update writes them too.
        """
        travelling = contextlib.nullcontext() if self._agreement is None else self._agreement.travelling()
        with travelling, contextlib.closing(self._own_memory):
            return self._compute(batch, tensors, follows=follows)

    def _compute(self, batch: Batch, tensors: Sequence[Tensor], *, follows: bool) -> Tensor:
        task, total = self._task, None
        self._drop_gradients()
        self._leaves.begin(copies=not follows)
        # The scale that gradients are computed with: the update moves it.
        inverse = None if self._scaler is None else self._scaler.scale_on(self._device).reciprocal()
        for i, (args, kwargs) in enumerate(batch.parts(tensors, task.accumulate), 1):
            with reduction.put_off(self._surroundings.modules if i < task.accumulate else ()):
                with self._specializing():
                    loss = self._loss(*args, **kwargs)
                _check_loss(loss)
                self._look_outside(loss)
                # DDP and FSDP wait for gradients of their own, and take them away.
                is_alone = not ranks.is_one_of_many()
                with reach.kept_gradients(loss, self._own_ids()) if is_alone else contextlib.nullcontext():
                    loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            if task.accumulate > 1:
                self._leaves.widen_gradients(inverse)
        assert total is not None
        if not self._has_looked_for_gradients:
            self._look_for_gradients()
        with self._rates.on_device() if self._on_cuda else contextlib.nullcontext():
            self._take(inverse, follows=follows)
        if self._scaler is not None:
            self._scaler.end_round(self._task.optimizer)
        self._leaves.forget()
        self._drop_gradients()
        return total

    @torch.no_grad()
    def _take(self, inverse: Tensor | None, *, follows: bool) -> None:
        """The update, with the gradients that have arrived."""
        takes_all = self._update is not None and self._has_state() and not update.why_not(self._task.optimizer)
        gradients = self._gradients(follows=follows) if takes_all else []
        if self._update is None or not gradients or not self._update.takes(gradients):
            if follows:
                raise _CannotFollow
            self._leaves.widen_gradients(inverse)
            if self._task.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, self._task.clip_grad_norm)
            optimizer = self._task.optimizer
            is_known = type(optimizer) in (*capturable.CAPTURABLE, *capturable.FUSED)  # others may record something
            makes_state = is_known and not self._has_taken and not optimizer.state
            with self._own_memory.used() if makes_state else contextlib.nullcontext():
                optimizer.step()
            self._has_taken = True
            return
        optimizer = self._task.optimizer
        bad = None if self._scaler is None else self._scaler.judge(optimizer)
        self._update.launch(
            gradients,
            self._rates.tensors,
            self._update.reserve() if self._room is None else self._room,
            inverse_scale=inverse,
            clip=self._task.clip_grad_norm,
            overflowed=bad,
        )
        if self._scaler is not None and bad is not None:
            self._scaler.took(optimizer, bad)

    def _gradients(self, *, follows: bool) -> list[Gradient]:
        """What each parameter is updated by: a low gradient where it has no other."""
        read = self._leaves.read if follows else ()
        copies = {id(leaf.weight): leaf.low for leaf in read}
        low = [leaf for leaf in self._leaves if leaf.arrived]
        alone = {id(leaf.weight): leaf for leaf in low if leaf.weight.grad is None and len(leaf.arrived) == 1}
        if len(alone) < len(low) or len(copies) < len(read):
            return []  # a weight that is read in two formats, or by two graphs
        return [
            Gradient(
                parameter=p,
                gradient=gradient,
                is_scaled=leaf is not None and self._scaler is not None,
                low=copies.get(id(p)),
            )
            for p in self._parameters
            for leaf in (alone.get(id(p)),)
            if (gradient := p.grad if leaf is None else leaf.arrived[0]) is not None
        ]

    def _look_outside(self, loss: Tensor) -> None:
        """Tells, once, of parameters that no graph reads."""
        if self._looks_outside and (outside := reach.read_outside(loss)):
            names = {id(p): name for name, p in self._task.model.named_parameters()}
            self._note(reach.note_of(outside, names))
        self._looks_outside = False

    def _look_for_gradients(self) -> None:
        """Tells, once, of an optimizer that has nothing to step by."""
        arrived = any(leaf.arrived for leaf in self._leaves) or any(p.grad is not None for p in self._parameters)
        if not arrived:
            self._note(
                f"train_step: none of the {len(self._parameters)} parameters of the {type(self._task.optimizer).__name__} got "
                "a gradient: nothing is trained. Is it the optimizer of this model?"
            )
        self._has_looked_for_gradients = True

    def _tell_of_breaks(self, programs: Sequence[Running], *, can_ask: bool) -> None:
        """What the user's Python computes between programs is seen by no guard. Breaks around DDP's forward are DDP's."""
        breaks = [program for program in programs if program.is_behind_a_break]
        if self._ddps():
            breaks = [program for program in breaks if self._objective.__code__.co_name not in program.code.co_name]
        if (breaks or not can_ask) and not self._has_told_of_breaks:
            self._has_told_of_breaks = True
            num_graphs = len({id(program.code) for program in programs})
            self._note(
                f"train_step: a micro-batch runs {num_graphs} graphs, not one: numbers that Python computes between them are "
                "recorded as they are now. torch._dynamo.explain(model)(*batch) says where graphs break"
            )

    def _drop_gradients(self) -> None:
        self._task.optimizer.zero_grad(set_to_none=True)
        self._leaves.drop_gradients()
        for p in self._task.model.parameters():
            p.grad = None

    def _retry(self, batch: Batch, loss: Tensor, num_skipped: int) -> Tensor:
        """A step that was left out, again, in ever higher precision. Returns the loss of the last attempt. A step is left out
        once at most, however often it was tried."""
        with self._precisions.kept():
            num_failed = 0
            while self._read_skipped() > num_skipped + num_failed and self._precisions.climb():
                num_failed += 1
                loss = self._step(batch)
        if self._scaler is not None and num_failed:
            self._scaler.forgive(self._task.optimizer, num_failed)
        return loss

    def _has_state(self) -> bool:
        """Has an update been taken, so that the optimizer has its state?"""
        if self._scaler is not None:
            return self._scaler.is_settled(self._task.optimizer)
        return bool(self._task.optimizer.state) or sum(self._num_plain.values()) > 1

    def _read_skipped(self) -> int:
        """Steps left out so far. Waits for the device: the price of on_overflow="retry"."""
        return 0 if self._scaler is None else self._scaler.read_skipped(self._task.optimizer)

    # ---- recording ------------------------------------------------------------------------------------------------------
    def _look_around(self) -> Glance:
        """Forgets what was recorded with tensors that are elsewhere now, or with other numbers."""
        if self._glance is not None and self._glance.is_still_right():
            return self._glance
        self._leaves.refuse_hooks()
        world, before = self._surroundings.look(), self._world
        if world != before:
            self._surroundings.refresh()
            self._world = self._surroundings.look()
        glance = self._glance = Glance(self._surroundings)
        if world != before and any(shape.recordings for shape in self._shapes.values()):
            assert before is not None
            self._begin_anew(world.changed_since(before))
        return glance

    def _begin_anew(self, what: str) -> None:
        """All recordings were made with other values of `what`."""
        self._num_worlds += 1
        self._forget_recordings()
        if self._num_worlds == MAX_WORLDS:
            self._give_up(f"it was to be recorded anew {MAX_WORLDS} times, at last for other {what}")

    def _specializing(self) -> contextlib.AbstractContextManager[Any]:
        """What is compiled inside has Python's floats as constants, where it may be recorded. By itself Dynamo makes one that
        has changed before an input, whose guard takes any value; such a program cannot be recorded."""
        is_constant = not self._why_plain and num_programs(self._objective) < MAX_CONSTANT
        return torch._dynamo.config.patch(specialize_float=True) if is_constant else contextlib.nullcontext()

    def _ddps(self) -> list[nn.parallel.DistributedDataParallel]:
        return [m for m in self._task.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]

    def _settled(self) -> tuple[Tensor, ...]:
        """What loss scaling reads and writes."""
        return () if self._scaler is None else self._scaler.settled(self._task.optimizer)

    def _settled_version(self) -> Hashable:
        return () if self._scaler is None else self._scaler.settled_version(self._task.optimizer)

    def _place(self) -> Hashable:
        """What may change without anything being recorded anew for good: a recording for each."""
        return tuple(self._precisions.current().items()), *self._surroundings.switches()

    def _record_all(self, batch: Batch, shape: _Shape) -> None:
        """Records the step in every precision that can occur. Recording runs nothing on the device."""
        torch._foreach_copy_(shape.inputs, list(batch.tensors)) if shape.inputs else None
        with self._giving_up(), self._precisions.kept(), self._keeping_buffers():
            missing, read = list[Mapping[str, str]](), dict[int, Tensor]()  # by id
            for chosen in self._precisions.combinations():
                self._precisions.force(chosen)
                if self._place() not in shape.recordings:
                    read |= {id(x): x for x in self._warm(batch, shape)}
                    missing.append(chosen)
            strangers = self._strangers(read.values())
            for chosen in missing:  # not before all have run: the first call of a graph makes room for its flags
                self._precisions.force(chosen)
                recording = self._record(batch, shape, strangers)
                if recording is None:
                    return
                shape.recordings[self._place()] = recording

    def _prepare(self, agreement: Agreement, batch: Batch, key: Hashable, shape: _Shape) -> Tensor:
        """The step as it is, in the precision that it has; when that has run often enough, it may be recorded.

        No run of its own prepares a recording where there are other ranks: each call of a step has the collectives of one."""
        place, precision = self._place(), dict(self._precisions.current())
        reducers = [ddp.reducer for ddp in self._ddps()]
        if reducers != self._reducers:  # they are equal to themselves alone
            self._reducers, self._num_reduced = reducers, 0
        self._num_reduced += 1
        # What Dynamo compiles now, for the tensors that a recording reads, it need not compile while it is made: they have
        # other strides than those of the caller, and are never the same tensor twice.
        is_waiting = (key, place) in self._wishes
        with self._listener.listening() as calls:
            loss = self._plain(batch, "other ranks are not ready" if is_waiting else "warming up", shape.inputs)
        if any(call.takes_floats for call in calls):
            self._give_up(_TAKES_FLOATS)
            return loss
        read = self._listener.read_from_before(calls, shape.inputs)
        num_prepared = shape.num_prepared[place] = shape.num_prepared.get(place, 0) + 1
        is_warm = self._num_reduced > (data_parallel.NUM_TIMED if reducers else NUM_WARMUPS - 1)
        if num_prepared >= NUM_WARMUPS and is_warm and self._has_state():
            why_not = data_parallel.why_not_reduced(self._ddps())  # since the step was made
            if why_not:
                self._give_up(why_not)
                return loss
            with self._giving_up():  # now, and not when the others count on this rank
                self._wishes[key, place] = _Wish(
                    key=key,
                    shape=shape,
                    place=place,
                    batch=replace(batch, tensors=()),
                    precision=precision,
                    strangers=self._strangers(read),
                )
                agreement.say(True)
        return loss

    def _record_together(self, agreement: Agreement, batch: Batch) -> None:
        """Records what was wished for first, as all ranks do now; where that has become useless meanwhile, what has just run,
        for nothing: the others count on this rank. Where one of them fails, none goes on with what was recorded."""
        wish = self._wishes.pop(next(iter(self._wishes)))
        agreement.say(bool(self._wishes))
        error, before = None, self._why_plain
        try:
            self._record_wish(wish, batch)
        except Exception as raised:
            error = raised
        if not agreement.is_so_everywhere(error is None and self._why_plain == before):
            self._renew_reducers()  # one that waits for the rest of a backward would refuse every step to come
            if error is None and not self._why_plain:
                self._give_up("another rank cannot record it")
                if self._must_record:
                    error = errors.CudaGraphsUnavailable(
                        "cuda_graphs='require', and another rank cannot record the training step",
                        way_out="See what that rank says",
                    )
        if error is not None:
            raise error

    def _record_wish(self, wish: _Wish, batch: Batch) -> None:
        is_current = True
        with self._giving_up(), self._precisions.kept():
            self._precisions.force(wish.precision)
            is_current = self._shapes.get(wish.key) is wish.shape and self._place() == wish.place and not self._why_plain
            is_current = is_current and self._surroundings.sees(wish.strangers)
            if is_current:
                recording = self._record(wish.batch, wish.shape, wish.strangers)
                if recording is not None:
                    wish.shape.recordings[wish.place] = recording
        if is_current:
            return
        with self._giving_up():
            inputs = [_static(x, self._device) for x in batch.tensors]
            recording = self._record(replace(batch, tensors=()), _Shape(inputs=inputs), ())
            if recording is not None:
                recording.graph.reset()
                self._num_recordings -= 1

    def _renew_reducers(self) -> None:
        if self._recorder is not None:
            data_parallel.move_to(self._ddps(), self._recorder.aside)

    @contextlib.contextmanager
    def _giving_up(self) -> Generator[None]:
        """Where what is recorded inside cannot be, steps run as they are from then on."""
        try:
            yield
        except BaseException as error:
            self._forget_half_a_step()
            from torch._dynamo.exc import TorchDynamoException

            if not isinstance(error, RuntimeError) or isinstance(error, TorchDynamoException):
                raise  # what cannot be compiled does not run as it is either
            if self._must_record:
                raise errors.CudaGraphsUnavailable(
                    f"cuda_graphs='require', and the training step cannot be recorded: {error}",
                    way_out="See what the step does that needs the host, or leave cuda_graphs out",
                ) from error
            self._give_up(f"it cannot be recorded: {str(error).strip().splitlines()[0]}")

    def _warm(self, batch: Batch, shape: _Shape) -> list[Tensor]:
        """Runs forward and backward of the precisions that are forced, and leaves no trace: kernels are loaded and tuned.
        Returns what graphs read beside the batch and what the step itself computes."""
        assert self._recorder is not None
        seen, again = list[dict[int, Tensor]](), list[Tensor]()
        self._listener.kept = frozenset()
        with self._recorder.aside():
            for _ in range(NUM_WARMUPS):
                args, kwargs = batch.parts(shape.inputs, self._task.accumulate)[0]
                self._leaves.begin()  # weights that were written since the last step are no model's writes in a step
                with self._branches.watching(), self._listener.listening() as calls, self._specializing():
                    warming.step(self._loss, args, kwargs)
                if any(call.takes_floats for call in calls):
                    raise _CannotRecord(_TAKES_FLOATS)
                seen.append({id(x): x for call in calls for x in call.args if isinstance(x, Tensor)})
                before = self._listener.kept  # what the model keeps from one step to the next
                again = [x for x in self._listener.read_from_before(calls, shape.inputs) if memory_of(x) in before]
            if self._update is not None:
                self._update.load({leaf.low.dtype for leaf in self._leaves}, self._rates.tensors)
        own = {id(x) for x in shape.inputs}
        # What one graph computes for another is a new tensor in each run.
        return [*again, *(x for key, x in seen[-1].items() if key in seen[0] and key not in own)]

    def _strangers(self, read: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """What is neither a parameter nor a buffer of all that is read; from now on, where it stands is looked at.

        Raises: _CannotRecord for what a replay would read as it is now, whatever becomes of it."""
        known, read = set(map(id, self._surroundings.owns())), list(read)
        elsewhere = next((t for t in read if t.device != self._device), None)
        if elsewhere is not None:
            raise _CannotRecord(
                f"it reads a tensor of shape {list(elsewhere.shape)} on {elsewhere.device}: move it to the model's device"
            )
        strangers = tuple(t for t in read if id(t) not in known)
        missing = self._surroundings.watch(strangers)
        if missing:
            raise _CannotRecord(
                f"it reads a tensor of shape {list(missing[0].shape)} that is neither a parameter nor a buffer, and nobody "
                "would see another in its place: register it as a buffer, or give it with the batch"
            )
        if strangers and self._world is not None:
            self._world = self._world._replace(tensors=self._surroundings.look().tensors)
            self._glance = None
        return strangers

    def _record(self, batch: Batch, shape: _Shape, read: Sequence[Tensor]) -> _Recording | None:
        """None: the optimizer has made state, which each replay would make anew, or a program was compiled. A step that is not
        recorded has to."""
        if self._update is not None and self._leaves.can_be_followed():
            try:
                return self._record_one(batch, shape, read, follows=True)
            except _CannotFollow:
                self._forget_half_a_step()
        return self._record_one(batch, shape, read, follows=False)

    def _record_one(self, batch: Batch, shape: _Shape, read: Sequence[Tensor], *, follows: bool) -> _Recording | None:
        assert self._recorder is not None
        known = capturable.state_of(self._task.optimizer)
        if follows:
            self._leaves.bring_up_to_date(tuple(self._leaves))
        settled, num_compiled = self._settled(), self._listener.num_compiled
        room = self._room = None if self._update is None else self._update.reserve()
        try:
            with self._branches.followed(), self._listener.listening() as calls, self._recorder.recording() as graph:
                loss = self._launch(batch, shape.inputs, follows=follows)
        finally:
            self._room = None
            has_new_state = capturable.forget_new(self._task.optimizer, known)  # it lies where a recording put it
        if self._update is not None:
            self._update.fill()
        if has_new_state or self._listener.num_compiled != num_compiled:  # a program's first call makes room that stays
            return None
        self._num_recordings += 1
        self._num_beside = self._branches.num_moved()
        programs = [call.caller for call in calls if call.caller is not None]
        is_what_would_run, can_ask = guard_of(programs)
        if self._on_cuda:
            torch.cuda.empty_cache()  # what guards were asked with had as much memory as the batch, for a moment
        self._tell_of_breaks(programs, can_ask=can_ask)
        leaves = self._leaves.read
        agreed = () if self._agreement is None else self._agreement.state
        return _Recording(
            graph=graph,
            loss=loss,
            room=room,
            held=(*settled, *read, *agreed, *(call.program for call in calls)),
            is_what_would_run=is_what_would_run,
            switches=GlobalStateGuard(),
            leaves=leaves,
            lows=tuple(leaf.low for leaf in leaves),
            followed=leaves if follows else (),
        )

    @contextlib.contextmanager
    def _keeping_buffers(self) -> Generator[None]:
        """What warming runs write, buffers and random numbers, is put back."""
        with contextlib.ExitStack() as stack:
            for module in (self._task.model, self._task.loss_fn):
                if isinstance(module, nn.Module):
                    stack.enter_context(warming.untouched(module))
            yield

    def _forget_half_a_step(self) -> None:
        assert self._recorder is not None
        self._recorder.forget_random()
        self._drop_gradients()
        if self._scaler is not None:
            self._scaler.forget_round()

    def _forget_recordings(self) -> None:
        for shape in self._shapes.values():
            for recording in shape.recordings.values():
                recording.graph.reset()  # whoever else holds it
        self._shapes.clear()
        self._branches.forget()

    def _give_up(self, why: str) -> None:
        self._forget_recordings()
        self._glance = None
        self._why_plain = why
        self._note(f"train_step: from now on each step runs as it is, not as a CUDA graph: {why}")


def _static(x: Tensor, device: torch.device) -> Tensor:
    """A tensor like `x`, strides too, that belongs to nobody else."""
    return torch.empty_like(x, device=device, requires_grad=False)


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise errors.InvalidOption(
            f"the loss of the training step is {what}, not a tensor with one number",
            way_out="loss_fn(output, target) has to return one number; with loss_fn=None the model returns its loss, or "
            'something that has it as `.loss` or ["loss"]',
        )
    if not loss.requires_grad:
        raise errors.InvalidOption(
            "the loss of the training step does not depend on a parameter that requires a gradient",
            way_out="Unfreeze what is to be trained, and take care that nothing on the way is detached",
        )
