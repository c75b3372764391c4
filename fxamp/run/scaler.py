"""Loss scaling at run time: what a step reads, when the scale moves, and which optimizer steps are left out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxamp import errors, ops
from fxamp.run import ranks, recorder, skipping, stepping
from fxamp.run.attachment import Attachment
from fxamp.run.flags import Flags, ProbedGraph
from fxamp.run.health import AT_FLOOR, Finding, Slot, findings
from fxamp.run.loss_scale import LossScale
from fxamp.run.mailbox import LAG_STEPS, Mailbox
from fxamp.run.schedule import SteppedSchedule
from fxamp.run.skipping import Route
from fxamp.run.variants import Precisions
from fxamp.scaling import DynamicScale, Scaling

if TYPE_CHECKING:
    from fxamp.run.watch import Sighting
    from fxamp.watched import Table

Compiled = Callable[..., Any]


class Scaler:
    """The loss scale of an Amp, its flags, and its optimizers.

    A step goes: forward and backward of the compiled graphs leave flags; `optimizer.step()` takes those of its own parameters,
    looks at the gradients it is about to use, and is left out if there is an inf or a NaN; when all attached optimizers that
    got gradients have stepped, the scale moves.
    """

    def __init__(
        self,
        config: Scaling,
        group: Any,
        warn: Callable[[str], None],
        precisions: Precisions,
        *,
        stats: str | None = None,
        tells_regions: bool = False,
    ) -> None:
        """Args: tells_regions: is it to be known of each region how its gradients are?"""
        self.config: Final = config
        self._stats = stats
        self.regions: Final = precisions.regions if tells_regions else ()
        """Those that are told apart, by name."""
        self._group, self._warn, self._precisions = group, warn, precisions
        self._graph_ids = itertools.count()
        self._flags: dict[torch.device, Flags] = {}
        self._loss_scale: LossScale | None = None
        self._replicas: dict[torch.device, Tensor] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._attached: weakref.WeakKeyDictionary[Optimizer, Attachment] = weakref.WeakKeyDictionary()
        self._has_begun = False
        """Has there ever been an optimizer attached? The scale is the model's: it goes on with another one."""
        self._looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those of whose parameters it is known whether graphs read them."""
        self._outside: list[tuple[str, str]] = []
        """(class of an optimizer, how many of its parameters no graph reads)."""
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped_within: set[int] = set()
        """Ids of the parameters that hooks have stepped while a backward still runs."""
        self._waits_for_task = -1
        """The backward, by autograd's number, at whose end a round ends."""
        self._overflowed: Tensor | None = None
        """fp32 [], 1 if a gradient has overflowed since the last update; None: nobody has looked yet."""
        self._largest: Tensor | None = None
        """fp32 [], the largest finite gradient since the last update."""
        self._by_region: Tensor | None = None
        """fp32 [2, number of regions], as `Flags.by_region`, since the last update."""
        self._dropped: tuple[Tensor, Tensor, Tensor] | None = None
        """The same three of gradients that nobody used, which this rank alone knows of: all agree on them in the next step.
        Where there are no other ranks, they are noted at once."""
        self._at_floor, self._told_of_floor = Mailbox(every=LAG_STEPS), False
        self._num_at_floor = 0.0
        """Updates at the floor of the scale that the host has learned of."""
        stepping.before().add(self)

    # ---- graphs ---------------------------------------------------------------------------------------------------------
    @torch.inference_mode(False)  # tensors made under it could not be saved for a backward, ever
    def state_on(self, device: torch.device) -> LossScale:
        """The loss scale, made on the first device that asks."""
        if self._loss_scale is None:
            self._loss_scale = self._new_scale(device)
            if self._loaded is not None:
                self._loss_scale.load_state_dict(self._loaded)
            elif not self._has_begun:
                self._loss_scale.wait_for_attached()
        return self._loss_scale

    def _new_scale(self, device: torch.device) -> LossScale:
        return LossScale(self.config, device, self.regions)

    @torch.inference_mode(False)
    def scale_on(self, device: torch.device) -> Tensor:
        """The scale, fp32 [] or [number of regions], as graphs on a device read it: always the same tensor."""
        state = self.state_on(device)
        if device == state.scale.device:
            return state.scale
        if device not in self._replicas:
            self._replicas[device] = state.scale.to(device)
        return self._replicas[device]

    @property
    def watches(self) -> bool:
        """Is every operation of a graph to be watched?"""
        return self._stats is not None

    def graph(self, names: Mapping[int, str], parameters: Collection[int], regions: tuple[int, ...]) -> ProbedGraph:
        """A graph whose inputs at these positions, with these names, get gradients; `parameters`: which are parameters;
        `regions`: of each, its number."""
        return ProbedGraph(
            index=next(self._graph_ids),
            positions=tuple(names),
            names=tuple(names.values()),
            are_parameters=tuple(i in parameters for i in names),
            has_shares=self._stats == "full",
            num_regions=len(self.regions),
            regions=regions if self.regions else (),
        )

    def watching(self, graph: ProbedGraph, table: Table) -> ProbedGraph:
        """The same graph in a program whose values are watched."""
        return replace(graph, index=next(self._graph_ids), watched=table.entries)

    def inputs(self, graph: ProbedGraph, device: torch.device) -> tuple[Tensor, Tensor]:
        """Examples of the two inputs behind those of a graph: its scale and its probe."""
        return self.scale_on(device), torch.zeros(sum(graph.parts), device=device, requires_grad=True)

    def around(self, program: Compiled, graph: ProbedGraph, device: torch.device) -> Compiled:
        """A compiled graph that takes scale and probe behind its inputs, as one that does not."""
        scale, flags = self.scale_on(device), self._flags_on(device)
        parameters = list(itertools.compress(graph.positions, graph.are_parameters))
        take = operator.itemgetter(*parameters) if len(parameters) > 1 else lambda args: [args[i] for i in parameters]

        def call(*args: Any) -> Any:
            return program(*args, scale, flags.probe(graph, take(args)))

        return call

    @torch.inference_mode(False)
    def _flags_on(self, device: torch.device) -> Flags:
        if device not in self._flags:
            self._flags[device] = Flags(device, self._precisions.structure if self.regions else None)
        return self._flags[device]

    # ---- optimizers -----------------------------------------------------------------------------------------------------
    def attach(self, optimizer: Optimizer, route: str) -> None:
        """Lets the steps of an optimizer be left out. Raises: as `skipping.check` and `skipping.choose`."""
        skipping.check(optimizer)
        if not self._has_begun:
            self._has_begun = True
            if self._loss_scale is not None and self._loaded is None:
                self._loss_scale.begin()
                self._refresh_replicas()
        if optimizer in self._attached:
            self._attached[optimizer].choose(route)
            return
        attachment = Attachment.of(optimizer)
        if attachment is None:
            attachment = Attachment.hooked(optimizer, route)
        else:  # of another Amp, which has compiled another part of the model, or the model as it was before
            attachment.choose(route)
        attachment.join(self)
        self._attached[optimizer] = attachment

    @property
    def routes(self) -> tuple[tuple[str, Route], ...]:
        """(class of the optimizer, its route), for those attached."""
        return tuple((type(optimizer).__name__, attachment.route) for optimizer, attachment in self._attached.items())

    def expect_step(self, optimizer: Optimizer) -> None:
        """Says so if an optimizer steps parameters of this Amp that it is not attached to."""
        if optimizer in self._attached:
            return
        ids = skipping.ids(optimizer)
        if self.known(ids):
            self._warn(
                f"a {type(optimizer).__name__} that is not attached steps parameters whose gradients are scaled: one "
                "that overflows will reach the parameters, and the scale never moves. Call amp.attach(optimizer) once "
                "(for backend='fxamp' by name: fxamp.shared(**options).attach(optimizer))"
            )

    def known(self, ids: Collection[int]) -> set[int]:
        """Those of these parameters, by id, that compiled graphs have read."""
        known = set[int]()
        for flags in self._flags.values():
            known |= flags.known(ids)
        return known

    def _look_outside(self, optimizer: Optimizer) -> None:
        """At the first step, tells of parameters that no graph of any Amp has read which the optimizer is attached to: no
        precision of fxamp's reaches them."""
        self._looked_at.add(optimizer)
        # FSDP2 gathers parameters, and graphs read others than an optimizer has.
        stepped = [p for p in skipping.parameters(optimizer) if p.grad is not None and not hasattr(p, "to_local")]
        known, kind = self._attached[optimizer].known(set(map(id, stepped))), type(optimizer).__name__
        num_outside = sum(id(p) not in known for p in stepped)
        if num_outside:
            self._outside.append((kind, f"{num_outside} of {len(stepped)} parameters, which no compiled graph has read"))
        if num_outside == len(stepped) > 0:
            self._warn(
                f"an attached {kind} steps parameters that no compiled graph of this Amp has read: they train as if fxamp "
                "were not there. Compile the model with the Amp that the optimizer is attached to; where it is, Dynamo had "
                "a reason to run it eagerly: amp.report() lists some"
            )

    # ---- for train steps ------------------------------------------------------------------------------------
    def is_settled(self, optimizer: Optimizer) -> bool:
        """Has an attached optimizer taken a step? Until then each one waits."""
        return self._attached[optimizer].is_settled

    def judge(self, optimizer: Optimizer) -> Tensor:
        """fp32 [], 1 if the update that follows has to be left out, else 0: the caller takes it, in place of `step()`, and
        tells `took`. Some gradients are not those of parameters."""
        return self._attached[optimizer].judge(optimizer)

    def took(self, optimizer: Optimizer, bad: Tensor) -> None:
        """See `judge`."""
        self._attached[optimizer].took(optimizer, bad)

    def forgive(self, optimizer: Optimizer, num_steps: int) -> None:
        """So many attempts that were left out were no steps of their own."""
        self._attached[optimizer].forgive(num_steps)

    def read_skipped(self, optimizer: Optimizer) -> int:
        """Steps of an attached optimizer left out so far. Waits for the device."""
        skipped = self._attached[optimizer].num_skipped
        return 0 if skipped is None else int(skipped)

    def settled(self, optimizer: Optimizer) -> tuple[Tensor, ...]:
        """What a step of an attached optimizer reads and writes of this Amp and others that it is attached to, made ready:
        nothing of it can be made while the step is recorded. A step that is recorded has to be recorded anew where one of them
        is another."""
        return self._attached[optimizer].settled(optimizer) if optimizer in self._attached else ()

    def settled_version(self, optimizer: Optimizer) -> Hashable:
        """Equal as long as `settled` has nothing to make ready and returns the same, for an optimizer whose parameters are the
        same; () where it is not attached; None: ask it. Costs the host less."""
        return self._attached[optimizer].settled_version() if optimizer in self._attached else ()

    @property
    def version(self) -> int | None:
        """Another number wherever `settled_for` may return something else, or have something to make ready. None: with several
        optimizers that depends on the parameters of the others, which nobody counts."""
        if len(self._attached) > 1:
            return None
        return len(self._replicas) + len(self._flags) + sum([flags.num_changes for flags in self._flags.values()])

    def settled_for(self, ids: frozenset[int], device: torch.device) -> tuple[Tensor, ...]:
        """See `settled`; parameters by id, and where they are."""
        tensors = [*self.state_on(device).tensors, *self._replicas.values()]
        others = self._others_than(ids)
        for flags in self._flags.values():
            tensors += flags.settled(ids, others)
        return tuple(tensors)

    def round_of(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """A train step is a round of its own. What is left of another one, and gradients of this optimizer that nobody is
        going to use, tell about the scale before it: nothing of them may go into a recording. What waits for another optimizer
        is put aside, and waits on behind it."""
        return self._attached[optimizer].round_of(optimizer)

    @contextlib.contextmanager
    def round_alone(self, optimizer: Optimizer) -> Generator[None]:
        """See `round_of`."""
        with torch.no_grad():
            self.dropped(optimizer)
            waits = self._somebody_waits()
            if not waits:
                # A rank that moved the scale by what it alone knows would have another one than the others, for good.
                self._dropped = None
                self.close_round()
        if not waits:
            yield
            return
        before, stepped = (self._overflowed, self._largest, self._by_region, self._dropped), list(self._stepped)
        asides = [(flags, flags.put_aside()) for flags in self._flags.values()]
        self._overflowed = self._largest = self._by_region = self._dropped = None
        self._stepped.clear()
        try:
            yield
        finally:
            self._overflowed, self._largest, self._by_region, self._dropped = before
            self._stepped.update(stepped)
            for flags, aside in asides:
                flags.put_back(aside)

    def end_round(self, optimizer: Optimizer) -> None:
        """See `round_of`: the scale moves, whoever else has got gradients in this step."""
        self._attached[optimizer].end_round()

    def after_replay(self, optimizer: Optimizer) -> None:
        """What a step of an attached optimizer does on the host, where it was replayed."""
        self._attached[optimizer].after_replay()
        self.ask_for_floor()

    def leave_looking_to_step(self, optimizer: Optimizer) -> None:
        """A train step of an optimizer tells itself of parameters that no graph reads."""
        self._looked_at.add(optimizer)

    @property
    def is_amid_a_round(self) -> bool:
        """Have gradients arrived, or been looked at, since the scale last moved?"""
        is_noted = self._overflowed is not None or self._dropped is not None
        return is_noted or any(flags.arrivals for flags in self._flags.values())

    @torch.no_grad()
    def close_round(self) -> None:
        """Moves the scale by what has been looked at, if anything has."""
        if self._overflowed is not None:
            self._update()

    def forget_arrivals(self) -> None:
        """All that has arrived was cleared on the device."""
        for flags in self._flags.values():
            flags.arrivals.clear()

    def forget_round(self) -> None:
        """Forgets a step that broke off."""
        self._overflowed = self._largest = self._by_region = self._dropped = None
        self._stepped.clear()
        for flags in self._flags.values():
            flags.clear(self.scale_on(flags.device))

    # ---- a step ---------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def verdict(self, optimizer: Optimizer, *, has_low: bool = False) -> Tensor | None:
        """fp32 [], 1 if this step has to be left out, else 0; None if there is no gradient to step with. `has_low`: there are
        gradients beside those of the parameters, and graphs have flagged them.

        Raises: CannotScale for parameters that are fp16 by now."""
        gradients = [p.grad for p in skipping.parameters(optimizer) if p.grad is not None]
        if not gradients and not has_low:
            return None
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            skipping.check(optimizer)
        if optimizer not in self._looked_at:
            self._look_outside(optimizer)
        if optimizer in self._stepped:  # another optimizer has got gradients, and has not stepped for a whole round
            self._update(clears=False)
        device = skipping.parameters(optimizer)[0].device if not gradients else gradients[0].device
        ids = skipping.ids(optimizer)
        others = self._others_than(ids)  # theirs count when they step: an overflow lowers the scale once
        state = self.state_on(device)
        found = _any_not_finite(gradients, device, state.one)
        arrived = [flags for flags in self._flags.values() if flags.arrivals]
        told = [flags.look(ids, others, None if found is None else _on(flags.device, found)) for flags in arrived]
        if not told:
            nothing = torch.zeros((), device=device)
            told = [(nothing, nothing, nothing) if found is None else (found, found, nothing)]
        bad, *numbers = (functools.reduce(torch.maximum, [_on(device, x) for x in same]) for same in zip(*told, strict=True))
        if self.regions:
            by_region = [_on(device, flags.by_region()) for flags in arrived]
            numbers.append(functools.reduce(torch.maximum, by_region, torch.zeros((2, len(self.regions)), device=device)))
        if self._dropped is not None:
            numbers = [torch.maximum(x, _on(device, dropped)) for x, dropped in zip(numbers, self._dropped, strict=False)]
            self._dropped = None
        bad, *numbers = self._agreed(bad, *numbers)
        self._note(*(_on(state.scale.device, x) for x in numbers))
        return bad

    def _note(self, overflowed: Tensor, largest: Tensor, by_region: Tensor | None = None) -> None:
        self._note_overflow(overflowed)
        self._note_largest(largest)
        if by_region is not None and self.regions:
            self._note_by_region(by_region)

    def _note_dropped(self, overflowed: Tensor, largest: Tensor, by_region: Tensor) -> None:
        if ranks.is_one_of_many():
            before, now = self._dropped, (overflowed, largest, by_region)
            self._dropped = now if before is None else (*map(torch.maximum, before, now),)  # pyright: ignore
            return
        self._note(overflowed, largest, by_region)

    def _note_overflow(self, overflowed: Tensor) -> None:
        self._overflowed = overflowed if self._overflowed is None else torch.maximum(self._overflowed, overflowed)

    def _note_largest(self, largest: Tensor) -> None:
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def _note_by_region(self, by_region: Tensor) -> None:
        self._by_region = by_region if self._by_region is None else torch.maximum(self._by_region, by_region)

    def _agreed(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Of each number, fp32 of any shape, the largest on any rank; so every rank has the same state."""
        from torch import distributed

        if not ranks.is_one_of_many():
            return numbers
        together = torch.cat([x.reshape(-1) for x in numbers])
        distributed.all_reduce(together, distributed.ReduceOp.MAX, group=self._group)
        parts = together.split([x.numel() for x in numbers])
        return tuple(part.view(x.shape) for part, x in zip(parts, numbers, strict=True))

    @torch.no_grad()
    def stepped(self, optimizer: Optimizer, bad: Tensor) -> None:
        """Takes note of a step, and moves the scale after the last optimizer of a round."""
        state = self.state_on(bad.device)
        state.num_skipped.add_(bad)
        ids = skipping.ids(optimizer)
        self._stepped.add(optimizer)
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._end_round(ids)
            return
        # A hook on a parameter steps it within the backward, whose flags may arrive after it.
        self._forget_flags(ids)
        self._stepped_within |= ids
        if task != self._waits_for_task:
            self._waits_for_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore

    @torch.no_grad()
    def _end_backward(self) -> None:
        ids, self._stepped_within = self._stepped_within, set()
        self._end_round(ids)

    def _end_round(self, ids: Collection[int]) -> None:
        """These parameters, by id, have stepped; if nobody else has got gradients, that was the round."""
        for flags in self._flags.values():
            flags.arrivals.difference_update(ids)
        if self._overflowed is None:
            self._forget_flags(ids)
        elif self._somebody_waits():  # all has been counted but what is his
            for flags in self._flags.values():
                flags.clear(self.scale_on(flags.device), but=self._others_than(ids), told=self._overflowed)
        else:
            self._update()

    def _forget_flags(self, ids: Collection[int]) -> None:
        for flags in self._flags.values():
            flags.clear(self.scale_on(flags.device), ids)

    def _somebody_waits(self) -> bool:
        """Has an attached optimizer got gradients?"""
        arrived = [flags.arrivals for flags in self._flags.values() if flags.arrivals]
        return bool(arrived) and any(
            not arrivals.isdisjoint(ids) for ids in map(skipping.ids, self._attached) for arrivals in arrived
        )

    def _others_than(self, ids: Collection[int]) -> frozenset[int]:
        """The ids of all parameters that attached optimizers step, without these, of one of them."""
        if len(self._attached) == 1:
            return frozenset()
        return frozenset(itertools.chain.from_iterable(map(skipping.ids, self._attached))).difference(ids)

    @torch.no_grad()
    def dropped(self, optimizer: Optimizer) -> None:
        """Takes note of gradients that nobody is going to use. They say nothing about the next step, but about the scale."""
        ids = skipping.ids(optimizer)
        for flags in self._flags.values():
            if not flags.arrivals.isdisjoint(ids):
                of_regions = flags.by_region() if self.regions else torch.zeros((2, 0), device=flags.device)
                told = flags.overflow_of(ids), flags.largest(but=self._others_than(ids)), of_regions
                self._note_dropped(*(_on(self.state().scale.device, x) for x in told))
                flags.clear(self.scale_on(flags.device), ids)

    def _update(self, *, clears: bool = True) -> None:
        """Ends a round. `clears`: all flags have been counted."""
        if self._overflowed is None:
            return  # a step of another thread has ended the round
        state, overflowed = self.state_on(self._overflowed.device), self._overflowed
        if self.watches:
            facts = (state.num_updates, overflowed, state.calibrates(overflowed))
            for flags in self._flags.values():
                here = (_on(flags.device, x) for x in facts)
                flags.watch.close(self.scale_on(flags.device), *here)
        largest = torch.zeros_like(overflowed) if self._largest is None else self._largest
        moves, stores = self._precisions.tests_scale(), list(self._flags.values())
        if clears and len(stores) == 1 and stores[0].has_kernels and stores[0].device == state.scale.device:
            state.clear_and_update(stores[0], overflowed, largest, moves=moves)
        else:
            for flags in stores if clears else ():
                flags.clear(self.scale_on(flags.device))
            state.update(overflowed, largest, by_region=self._by_region, moves=moves)
        self._refresh_replicas()
        self._overflowed = self._largest = self._by_region = None
        self._stepped.clear()
        if not recorder.is_recording():
            self.ask_for_floor()

    def ask_for_floor(self) -> None:
        """Asks how often the scale was stuck at its floor, and acts where the answer that arrives is another than the last."""
        if not isinstance(self.config, DynamicScale) or self._precisions.is_kept:  # a retry, which a raise would not outlast
            return
        arrived = self._at_floor.post(self.state().num_at_floor)
        if arrived is None:
            return
        before, self._num_at_floor = self._num_at_floor, float(arrived)
        if self._num_at_floor > before and not self._at_floor.is_outdated:
            self._tell_of_floor()

    def _refresh_replicas(self) -> None:
        for replica in self._replicas.values():
            replica.data.copy_(self.state().scale, non_blocking=True)

    def _tell_of_floor(self) -> None:
        assert isinstance(self.config, DynamicScale)
        what = f"gradients overflow although the loss scale is at its floor, {self.config.floor:g}"
        way_out = f"{AT_FLOOR}: keep the operations that overflow in fp32 by policy={{...}}, or use bf16"
        if self.config.at_floor == "raise precision" and self._precisions.raise_all():
            self._at_floor.outdate()
            self._warn(f"{what}: the next higher precision takes over")
            return
        if self.config.at_floor == "raise":
            raise errors.ScaleAtFloor(what, way_out=way_out)
        if not self._told_of_floor:
            self._told_of_floor = True
            self._warn(f"{what}. {way_out}")

    # ---- what people ask for --------------------------------------------------------------------------------------------
    def state(self) -> LossScale:
        """The loss scale. On the CPU, if neither a graph nor an optimizer has said where they are."""
        return self._loss_scale if self._loss_scale is not None else self.state_on(torch.device("cpu"))

    def signs(self) -> Tensor | None:
        """As `LossScale.signs`; None while there is neither a graph nor an optimizer. Waits for nothing."""
        if self._loss_scale is None:
            return None
        for flags in self._flags.values():
            if flags.arrivals:  # of a step that is still to come
                self._loss_scale.note_overflow(flags.any_overflow())
        return self._loss_scale.signs()

    def when_stepped(self, schedule: Any) -> SteppedSchedule:
        """See `Amp.when_stepped`."""
        attachment = self._attached.get(getattr(schedule, "optimizer", None))  # pyright: ignore[reportArgumentType]
        if attachment is None:
            raise errors.InvalidOption(
                f"the optimizer of {type(schedule).__name__} is not attached", way_out="Call amp.attach(optimizer) first"
            )
        return SteppedSchedule(schedule, attachment)

    def read_health(self) -> tuple[Finding, ...]:
        """See `Amp.health`."""
        from fxamp.run import culprits  # words, of which a run that is well has no need

        state, history, sightings = self.state(), self.state().read_history(), self._read_sightings()
        num_calibrating, num_updates = int(state.num_calibrating), int(state.num_updates)
        regions = self.regions if state.is_per_region else ()
        whole = findings(
            self.config,
            history,
            self.read_slots(),
            num_calibrating,
            culprits.lost(sightings),
            {name: state.read_history(name) for name in regions},
        )
        run = culprits.Run(
            num_updates=num_updates,
            num_bad=sum(update.overflowed for update in history),
            has_settled=num_calibrating < num_updates,
            scale=float(state.scale.min()),
            rank=_rank(),
        )
        named = culprits.findings(sightings, run)
        if any(culprits.is_older(finding, num_calibrating) for finding in named):  # the scale was not all that was wrong
            whole = tuple(finding for finding in whole if finding.kind != "calibration")
        if named:  # which say more
            whole = tuple(finding for finding in whole if finding.kind != "overflow")
        return whole + named

    def read_num_updates(self) -> int:
        """Updates of the scale so far. Waits for the device."""
        return int(self.state().num_updates)

    def read_silent(self, num_updates: int) -> tuple[str, ...]:
        """See `culprits.silent`. Waits for the device."""
        from fxamp.run import culprits

        return culprits.silent(self._read_sightings(), num_updates)

    def _read_sightings(self) -> list[Sighting]:
        """What is on record of each value that is watched. Waits for the device."""
        return [
            sighting
            for flags in self._flags.values()
            for sighting in flags.watch.read(
                self.scale_on(flags.device), self.state().num_updates.to(flags.device), flags.any_overflow()
            )
        ]

    def read_summary(self) -> tuple[tuple[str, str], ...]:
        """(what, value), for people. Waits for the device."""
        state = self.state()
        return (
            *self._read_scales(),
            ("skipped steps", f"{int(state.num_skipped)} in {int(state.num_updates)} updates"),
            *((f"{name} skips by", str(route)) for name, route in self.routes),
            *((f"{name} steps without", what) for name, what in self._outside),
            *((finding.kind, f"{finding.what}. {finding.way_out}") for finding in self.read_health()),
        )

    def _read_scales(self) -> list[tuple[str, str]]:
        state = self.state()
        if not state.is_per_region:
            return [("loss scale", f"{float(state.scale):g}")]
        return [(f"loss scale of {name}", f"{x:g}") for name, x in zip(self.regions, state.scale.tolist(), strict=True)]

    def read_slots(self) -> list[Slot]:
        """What is on record of each gradient of each graph. Waits for the device."""
        return [slot for flags in self._flags.values() for slot in flags.read_slots()]

    def state_dict(self) -> dict[str, Any]:
        """The state of the scale, and what the host knows of its floor; waits for the device."""
        at_floor = {"known": self._num_at_floor, **self._at_floor.state_dict()}
        if self._loss_scale is not None and (self._has_begun or self._loaded is not None):
            return self._loss_scale.state_dict() | {"at_floor": at_floor}
        if self._loaded is not None:
            return dict(self._loaded)
        return self._new_scale(torch.device("cpu")).state_dict() | {"at_floor": at_floor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state. Raises: InvalidOption for a state that is no loss scale's."""
        self._new_scale(torch.device("cpu")).load_state_dict(state)  # raises before anything has changed
        self._loaded = dict(state)
        self._overflowed = self._largest = self._by_region = self._dropped = None
        self._stepped.clear()
        at_floor: Mapping[str, Any] = state.get("at_floor", {"known": 0.0, "num_posts": 0, "num_stale": 0, "waiting": []})
        self._num_at_floor = float(at_floor["known"])
        self._at_floor.load_state_dict(at_floor)
        if self._loss_scale is not None:
            self._loss_scale.load_state_dict(state)
            self._refresh_replicas()


def _rank() -> int | None:
    from torch import distributed

    return distributed.get_rank() if ranks.is_one_of_many() else None


def _any_not_finite(gradients: Sequence[Tensor], device: torch.device, one: Tensor) -> Tensor | None:
    """fp32 [], 1 if a gradient holds an inf or a NaN, else 0; None: there is no gradient. One call a device, GradScaler's,
    which multiplies by `one`, fp32 [], in place. PyTorch counts that as no write: a gradient may be saved for somebody's
    backward. What is expanded is not written."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        numbers = gradient
        is_real = gradient.layout == torch.strided and not gradient.is_complex() and not gradient.is_neg()
        if type(gradient) is not Tensor or not is_real or not gradient.is_contiguous():
            numbers = _numbers_here(gradient)
        by_device.setdefault(numbers.device, []).append(numbers)
    found = list[Tensor]()
    for place, together in by_device.items():
        flag = torch.zeros((), device=place)
        torch._amp_foreach_non_finite_check_and_unscale_(together, flag, _on(place, one))
        found.append(_on(device, flag))
    return functools.reduce(torch.maximum, found) if found else None


def _numbers_here(gradient: Tensor) -> Tensor:
    """The real numbers that one holds, of a DTensor those on this rank; a copy where several places of it are one."""
    numbers = ops.numbers_of(gradient)
    numbers = numbers.to_local() if hasattr(numbers, "to_local") else numbers  # pyright: ignore[reportAttributeAccessIssue]
    overlaps = torch._debug_has_internal_overlap(numbers) == 1  # pyright: ignore[reportAttributeAccessIssue]
    return numbers.clone().contiguous() if overlaps else numbers


def _on(device: torch.device, x: Tensor) -> Tensor:
    """Without a wait; where it is there already, without a call of PyTorch, of which a step would have twenty."""
    return x if x.device == device else x.to(device, non_blocking=True)
