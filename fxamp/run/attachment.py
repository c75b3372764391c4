"""The hooks on one optimizer: when a step begins, when it has ended, and when gradients are thrown away."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxamp import errors
from fxamp.run import capturable, recorder, skipping
from fxamp.run.skipping import Route, Skip
from fxamp.run.stepping import untraced

if TYPE_CHECKING:
    from fxamp.run.scaler import Scaler


@dataclass(kw_only=True)
class _Running:
    """The outermost call of `step` that runs; left behind by one that raised. A frame knows its optimizer: only a hook of that
    holds this one, a circle that can be collected."""

    step: FrameType | None = None


@dataclass(kw_only=True)
class Attachment:
    """The hooks on one optimizer."""

    optimizer: weakref.ref[Optimizer]
    wish: str
    route: Route
    scalers: tuple[weakref.ref[Scaler], ...] = ()
    """Those of all Amps that it is attached to: a step is left out if any of them says so, and all of them learn of it."""
    _skip: Skip | None = None
    _running: weakref.ref[_Running] | None = None
    num_skipped: Tensor | None = None
    """Steps left out, fp32 []; None before the first step."""
    _num_states: int | None = None
    """Entries of the optimizer's state when the route was chosen; None: before the first step that was taken."""
    _numbers: Hashable = None
    """The hyperparameters of the last step that left no state."""

    @staticmethod
    def of(optimizer: Optimizer) -> Attachment | None:
        """The one that an optimizer has already."""
        hooks = [getattr(inspect.unwrap(hook), "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
        return next((owner for owner in hooks if isinstance(owner, Attachment)), None)

    @staticmethod
    def hooked(optimizer: Optimizer, wish: str) -> Attachment:
        """A new one, with its hooks. Raises: as `skipping.choose`."""
        made = Attachment(optimizer=weakref.ref(optimizer), wish=wish, route=skipping.choose(optimizer, wish))
        before, running = untraced(made.before), _Running()
        before.running = running  # pyright: ignore[reportFunctionMemberAccess]
        made._running = weakref.ref(running)
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(untraced(made.after))
        optimizer.zero_grad = _telling(optimizer, untraced(made.dropped))
        return made

    def join(self, scaler: Scaler) -> None:
        """Lets a scaler have its say, and learn of steps."""
        self.scalers += (weakref.ref(scaler),)

    def choose(self, wish: str) -> None:
        """Chooses the route anew. Raises: as `skipping.choose`; then nothing has changed."""
        optimizer = self.optimizer()
        if optimizer is not None:
            self.route = skipping.choose(optimizer, wish)
            self.wish = wish

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Step pre-hook. A closure makes the gradients within the step: there the flags are read behind it."""
        caller, running = _caller(), self._calls()
        if running.step is not None and _is_running(running.step, caller):
            return None  # a subclass's step, which runs hooks of its own, has called its parent's
        running.step = caller
        if self._skip is not None:  # left behind by a step that raised
            self._skip.abandon()
            self._skip = None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._begin(optimizer)
            return None

        begin = untraced(self._begin)

        def evaluated() -> Any:
            loss = closure()
            begin(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _calls(self) -> _Running:
        running = None if self._running is None else self._running()
        assert running is not None  # a hook that holds it has called
        return running

    def _begin(self, optimizer: Optimizer) -> None:
        if hasattr(optimizer, "found_inf"):
            raise errors.CannotSkip(
                f"a GradScaler steps this {type(optimizer).__name__}, whose gradients fxamp has already unscaled",
                way_out="Leave the GradScaler out: loss.backward(); optimizer.step()",
            )
        verdicts = [verdict for scaler in self._live() if (verdict := scaler.verdict(optimizer)) is not None]
        if not verdicts:
            self.dropped()  # what has arrived was for gradients that are gone
            return
        route = self.route
        # A recording that makes state is not kept.
        if route.name != "wait" and not recorder.is_recording() and self._makes_state(optimizer):
            # Nobody can unmake it on the device. (Fused SGD even leaves a momentum buffer that was never written.)
            route = Route(name="wait", why="this step would make state")
        self._skip = Skip(optimizer=optimizer, route=route, overflowed=functools.reduce(torch.maximum, verdicts))
        self._skip.begin()

    def _makes_state(self, optimizer: Optimizer) -> bool:
        """May the step make state? Not if each parameter has its own, or none had one after a step with the same numbers."""
        if self._num_states == 0 and not optimizer.state:
            return self._numbers != capturable.hyperparameters(optimizer)
        return self._num_states is None or not skipping.has_its_state(optimizer)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook."""
        running = self._calls()
        if _caller() is not running.step:
            return
        running.step = None
        skip, self._skip = self._skip, None
        if skip is None:
            return
        skip.end()
        if not skip.was_left_out:
            if len(optimizer.state) != self._num_states:
                self._num_states = len(optimizer.state)
                self.choose(self.wish)
            if not optimizer.state:
                self._numbers = capturable.hyperparameters(optimizer)
        self.took(optimizer, skip.overflowed)

    def judge(self, optimizer: Optimizer) -> Tensor:
        """See `Scaler.judge`."""
        verdicts = [scaler.verdict(optimizer, has_low=True) for scaler in self._live()]
        return functools.reduce(torch.maximum, [verdict for verdict in verdicts if verdict is not None])

    def took(self, optimizer: Optimizer, overflowed: Tensor) -> None:
        """Takes note of a step, left out if `overflowed`, fp32 [], is 1."""
        if self.num_skipped is None:
            self.num_skipped = torch.zeros_like(overflowed)
        self.num_skipped.add_(overflowed)
        for scaler in self._live():
            scaler.stepped(optimizer, overflowed)

    def settled(self, optimizer: Optimizer) -> tuple[Tensor, ...]:
        """See `Scaler.settled`."""
        ids, device = skipping.ids(optimizer), skipping.parameters(optimizer)[0].device
        tensors = [t for scaler in self._live() for t in scaler.settled_for(ids, device)]
        return (*tensors, *(() if self.num_skipped is None else (self.num_skipped,)))

    def settled_version(self) -> Hashable:
        """See `Scaler.settled_version`."""
        versions = [scaler.version for scaler in self._live()]
        return None if None in versions else (len(self.scalers), self.num_skipped is None, *versions)

    def round_of(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """See `Scaler.round_of`."""
        for scaler in self._live():
            scaler.leave_looking_to_step(optimizer)
        unfinished = [scaler for scaler in self._live() if scaler.is_amid_a_round]
        return self._alone(optimizer, unfinished) if unfinished else contextlib.nullcontext()

    @contextlib.contextmanager
    def _alone(self, optimizer: Optimizer, unfinished: Sequence[Scaler]) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for scaler in unfinished:
                stack.enter_context(scaler.round_alone(optimizer))
            yield

    def end_round(self) -> None:
        """See `Scaler.round_of`."""
        for scaler in self._live():
            scaler.close_round()

    def after_replay(self) -> None:
        """See `Scaler.after_replay`."""
        for scaler in self._live():
            scaler.forget_arrivals()

    def forgive(self, num_steps: int) -> None:
        """See `Scaler.forgive`."""
        if self.num_skipped is not None:
            self.num_skipped.sub_(num_steps)

    @property
    def is_settled(self) -> bool:
        """Has a step been taken, so that state is there, and every later one of the same parameters goes by the route?"""
        return self._num_states is not None

    def dropped(self) -> None:
        """Before zero_grad."""
        optimizer = self.optimizer()
        if optimizer is not None:
            for scaler in self._live():
                scaler.dropped(optimizer)

    def known(self, ids: Collection[int]) -> set[int]:
        """Those of these parameters, by id, that graphs of some Amp have read."""
        return {known for scaler in self._live() for known in scaler.known(ids)}

    def _live(self) -> list[Scaler]:
        return [scaler for ref in self.scalers if (scaler := ref()) is not None]


def _caller() -> FrameType | None:
    """The frame that called the function that asks, but for Dynamo's between the two: of a hook, its optimizer's step."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch._dynamo"):
        frame = frame.f_back
    return frame


def _is_running(call: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call


def _telling(optimizer: Optimizer, dropped: Callable[[], None]) -> Callable[..., None]:
    """`optimizer.zero_grad`, which says so first. It knows its optimizer weakly: in a circle with it, the state of an
    optimizer that nobody needs any more would stay on the device until Python looks for circles."""
    somebodys: Callable[..., None] | None = optimizer.__dict__.get("zero_grad")
    method, this = type(optimizer).zero_grad, weakref.ref(optimizer)

    @functools.wraps(method)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        dropped()
        known = this()
        if somebodys is not None:
            somebodys(*args, **kwargs)
        elif known is not None:
            method(known, *args, **kwargs)

    return zero_grad
