"""The torch.compile backend: capture, plan, rewrite, lower, run, each a function of what stands before it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import fx

from fxamp import capture, destination, errors, formats, graph, instances, legal, ops, passes, plan, rewrite, scaling
from fxamp.capture import Captured
from fxamp.coverage import Coverage
from fxamp.explain import rules as explain_rules
from fxamp.explain.record import GraphRecord, VariantRecord
from fxamp.explain.report import Report
from fxamp.ladder import REST, Assignment, Ladder
from fxamp.options import Options
from fxamp.passes import Change, Pass
from fxamp.plan import Plan
from fxamp.policy import Policy
from fxamp.run import cuda_graphs, ranks, skipping, transforms, warming
from fxamp.run.cuda_graphs import CudaGraphs
from fxamp.run.flags import ProbedGraph
from fxamp.run.frozen import Frozen, WeightCopies
from fxamp.run.health import NUM_OBSERVED, Finding, broken_losses, loss_spikes, nothing_known
from fxamp.run.scaler import Scaler
from fxamp.run.schedule import SteppedSchedule
from fxamp.run.variants import Precisions

if TYPE_CHECKING:  # Inductor takes a second to import; only compiling needs it
    from fxamp.explain.kernels import Profile
    from fxamp.lower import Program
    from fxamp.run.history import History
    from fxamp.run.leaves import LowLeaves
    from fxamp.run.train_step import TrainStep

Compiled = Callable[..., Any]
__version__: Final = "0.1.0.dev0"


class FxampWarning(UserWarning):
    """What fxamp warns about: once per Amp and cause, and always in the report too."""


class Amp:
    """A precision compiler: a Dynamo backend with a memory of what it compiled.

        amp = fxamp.Amp(precision="bf16")
        model = torch.compile(model, backend=amp)

    Args: the fields of `fxamp.Options`, by keyword.
    Raises: UnknownOption, InvalidOption, NotYet, as `Options` says.
    """

    def __init__(self, **options: Any) -> None:
        self.options: Final = Options.of(options)
        self.__name__: Final = "fxamp"  # torch.compile and its logs call a backend by this name
        self._graphs: list[GraphRecord] = []
        self._notes: list[str] = []
        self._num_fallbacks = 0
        self._steps: weakref.WeakSet[TrainStep] = weakref.WeakSet()
        self._precisions: Final = Precisions(self.options.rungs)
        config = scaling.resolve(self.options.scaling, self._precisions.ladder)
        self._scaler = None if config is None else Scaler(
            config,
            self.options.process_group,
            self._note,
            self._precisions,
            stats=self.options.stats,
            tells_regions=bool(self._precisions.structure.regions)
            and (self.options.has_scales_of_regions or self.options.scheduler is not None),
        )
        from fxamp.run.observer import Observer  # `import fxamp` stays light

        self._observer = Observer(
            self.options.scheduler,
            self._precisions,
            signs=None if self._scaler is None else self._scaler.signs,
            group=self.options.process_group,
        )
        self._weights: Final = WeightCopies(self._note)
        transforms.refuse_around(self)
        self._warned_of_idle_rules = False

    def __repr__(self) -> str:
        return str(self.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Amp:
        """Itself: a copy of a compiled model (weight averaging, say) is compiled by the same compiler."""
        return self

    def __reduce__(self) -> Any:
        raise errors.CannotPickle(
            "an Amp holds compiled programs, and cannot be pickled",
            way_out="Save amp.state_dict(), and load it into a new Amp with the same options",
        )

    # ---- the backend ----------------------------------------------------------------------------------------------------
    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        """Compiles one graph of Dynamo's; called by torch.compile."""
        if options:
            raise errors.InvalidOption(
                f"options={dict(options)!r} were given to torch.compile beside an Amp", way_out="Give them to fxamp.Amp(...)"
            )
        transforms.refuse_around(self)
        chosen = self.options if mode is None else dataclasses.replace(self.options, mode=mode)
        return self._compile_or_fall_back(gm, example_inputs, chosen)

    def _compile_in_step(self, leaves: LowLeaves, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Compiles a graph that a train step runs, with these low copies, and records with everything else."""
        return self._compile_or_fall_back(gm, example_inputs, self.options, leaves)

    def _compile_or_fall_back(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], chosen: Options, leaves: LowLeaves | None = None
    ) -> Compiled:
        untouched = graph.clone(gm) if chosen.on_error == "eager" else None
        try:
            return self._compile(gm, example_inputs, chosen, leaves)
        except Exception as error:
            if untouched is None or isinstance(error, _USERS_TO_SOLVE):
                raise
            self._num_fallbacks += 1
            self._note(f"a graph was compiled untouched, because fxamp failed on it (on_error='eager'): {error}")
            return _compile_untouched(untouched, example_inputs, chosen, in_step=leaves is not None)

    def _compile(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        leaves: LowLeaves | None = None,
    ) -> Compiled:
        self._weights.refuse_gradients(example_inputs)
        normal = graph.clone(gm)
        normalized = passes.run(normal, rewrite.normalize(options.relaxed), legal.checker(legal.REWRITTEN, gm))
        captured = capture.take(normal, example_inputs)
        modules = {facts.module for facts in captured.everywhere}
        ladder = self._precisions.structure
        for policy in (options.policy, Policy(rules=ladder.rules)):
            instances.check(policy, modules)
        assignments = ladder.assignments(facts.module for facts in captured.everywhere if facts.op is not None)
        scaler = self._scaler if captured.trains else None
        shared = _Shared(
            captured=captured,
            shown=graph.forget_inputs(graph.clone(gm) if any(change.edits for change in normalized) else captured.gm),
            normalized=normalized,
            example_inputs=example_inputs,
            options=options,
            ladder=ladder,
            num_variants=len(assignments),
            replay=cuda_graphs.decide(
                options.cuda_graphs,
                options.mode,
                device=captured.device,
                trains=captured.trains,
                fresh_outputs=captured.fresh_outputs,
                in_step=leaves is not None,
            ),
            scaler=scaler,
            probed=None if scaler is None else _probed(captured, scaler, ladder),
            outputs=_output_dtype(gm, options),
            weights=self._weights if leaves is None else leaves,
            copied=() if captured.trains and leaves is None else (leaves or self._weights).positions(example_inputs),
            in_step_on_cuda=leaves is not None and captured.device.type == "cuda",
        )
        variants: dict[str, VariantRecord] = {}
        programs: dict[Assignment, Compiled] = {}
        now = self._precisions.current()
        # The one that runs now comes first: DDPOptimizer calls it before the rest of the model is compiled.
        made = {a: _variant(a, shared) for a in sorted(assignments, key=lambda a: not a.is_of(now))}
        for assignment in assignments:
            record, program = made[assignment]
            if record.plan.note:
                self._note(record.plan.note)
            variants[record.precision if len(assignments) == 1 else str(assignment)] = record
            programs[assignment] = transforms.guarded(program.run)
        graph.forget_inputs(captured.gm)
        self._keep(
            GraphRecord(index=len(self._graphs), captured=shared.shown, trains=captured.trains, variants=variants)
        )
        run, copies = self._precisions.around(programs, trains=captured.trains), shared.replay.copies
        run = cuda_graphs.copying(run, copies) if copies else run
        if scaler is None or shared.probed is None or scaler.watches:  # a watched program has its probe already
            return run
        return scaler.around(run, shared.probed, captured.device)

    def _keep(self, record: GraphRecord) -> None:
        self._graphs.append(record)
        directory = os.environ.get("FXAMP_DUMP")
        if directory:
            record.dump(Path(directory))
        if record.index == 0:
            for told in explain_rules.misspelt(self.options.policy, (record.lowest,)):
                warnings.warn(f"policy: {told}", FxampWarning, stacklevel=2)

    def _note(self, text: str) -> None:
        """Puts a note into the report and, the first time, into a warning."""
        if text not in self._notes:
            self._notes.append(text)
            warnings.warn(text, FxampWarning, stacklevel=2)

    # ---- what people look at --------------------------------------------------------------------------------------------
    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        """Every graph compiled so far, in order."""
        return tuple(self._graphs)

    def report(self) -> Report:
        """What runs in which format and why. `print(amp.report())` shows tables; the fields are for programs. With loss
        scaling it waits for the device, to read the scale.

        Warns, once, of rules of the policy that decided nothing in all graphs so far.
        """
        variants = tuple(g.lowest for g in self.graphs)
        rules = explain_rules.uses(self.options.policy, variants)
        idle = [f"{use.rule} ({use.note})" for use in rules if use.is_idle]
        empty = self._empty_regions(variants)
        if variants and idle and not self._warned_of_idle_rules:
            self._warned_of_idle_rules = True
            warnings.warn(f"rules of the policy that decide nothing: {'; '.join(idle)}", FxampWarning, stacklevel=2)
        if empty:
            self._note(empty)
        return Report(
            options=str(self.options),
            graphs=self.graphs,
            notes=(*self._notes, *self._hints()),
            rules=rules,
            scaling=() if self._scaler is None else self._scaler.read_summary(),
            weights=self._weights.summary(),
            num_fallbacks=self._num_fallbacks,
            steps=tuple(str(step.summary()) for step in self._steps),
            scheduling=tuple((str(c.step), _text_of(c.precision), c.reason) for c in self.history.changes),
        )

    def _hints(self) -> tuple[str, ...]:
        """Notes that are true as long as nobody does what they say."""
        if self.options.scheduler is None or not self._graphs or self._observer.num_observed:
            return ()
        return ("the scheduler has heard of no loss yet: call amp.observe(loss) once a step",)

    def _empty_regions(self, variants: Sequence[VariantRecord]) -> str:
        """What to say of regions whose glob matches no module of any graph; "" if each has one."""
        modules = {decision.facts.module for v in variants for decision in v.plan.decisions.values()}
        ladder = self._precisions.structure
        present = set(map(ladder.region_of, modules))
        empty = [f"{name} ({glob})" for name, glob in ladder.regions if name not in present]
        if not modules or not empty:
            return ""
        known = ", ".join(sorted(filter(None, modules))[:8])
        return f"regions that no operation so far is in: {', '.join(empty)}. There are the modules {known}"

    def profile(self, step: Callable[[], object], *, steps: int = 3) -> Profile:
        """Which kernels a step runs, in which format, on matrix units or not, and their shares; printed it is a table.

            print(amp.profile(lambda: train(batch)))

        Args: step: what is profiled; it runs once before, for what is left to compile, and then `steps` times under PyTorch's
        profiler. On a machine without a GPU it is the CPU's operations that are listed.
        Raises: InvalidOption for a `step` that cannot be called, or fewer steps than one. Waits for the device.
        """
        from fxamp.explain import kernels  # `import fxamp` stays light

        if not callable(step) or not isinstance(steps, int) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidOption(
                f"profile({step!r}, steps={steps})", way_out="Give it a function without arguments, and a number of steps"
            )
        return kernels.profile(step, steps)

    # ---- inference ------------------------------------------------------------------------------------------------------
    def freeze(self, model: torch.nn.Module) -> Frozen:
        """Keeps low copies of a model's weights, so that graphs without gradients read them and cast nothing.

            with amp.freeze(model), torch.no_grad():
                model(x)

        The parameters stay what they are, but that they require no gradient until they are thawed: calling the model with
        gradients on, or a backward that reaches them, raises FrozenWeights. Whoever writes to a weight may: it is seen, and
        copied anew before it is read; docs/inference.md has what cannot be seen, and needs `refresh()`.

        The first call afterwards compiles the model for it, once. Copies are made when a graph first reads them, and take two
        bytes for each number.

        Args: model: a module, compiled or not, as a whole or in parts.
        Returns: what thaws these weights, by `.thaw()` or as a context manager; with `.num_weights` and `.num_bytes`.
        Raises: InvalidOption for what is no module; CannotFreeze for parameters that are no plain `torch.nn.Parameter`, such
        as FSDP's.
        """
        return self._weights.freeze(_module(model, "freeze"))

    def thaw(self, model: torch.nn.Module) -> None:
        """Frees the copies of a model's weights, which require gradients again where they did. Nothing to do is no error.

        Raises: InvalidOption for what is no module.
        """
        self._weights.thaw(_module(model, "thaw"))

    def refresh(self) -> None:
        """All low copies are made anew before they are read again: for writes that go by an address which was handed out
        before the copy was made, as the replay of a CUDA graph of your own does. Costs nothing itself."""
        self._weights.expire()

    # ---- training -------------------------------------------------------------------------------------------------------
    def attach(self, optimizer: torch.optim.Optimizer, *, route: str = "auto") -> None:
        """Lets `optimizer.step()` leave out the steps whose gradients overflowed, bit for bit, parameters and state.

        `optimizer.step()` stays the call it was. Without loss scaling there is nothing to leave out, and nothing changes.

        Args: route: how, see docs/scaling.md: "fused", "select" and "wait", of which the last one waits for the device, once a
        step; "auto" takes the first of them that the optimizer allows.
        Raises: InvalidOption for what is no optimizer; UnknownOption for a route that does not exist; CannotSkip for an
        optimizer, or a route, with which no step can be left out; CannotScale for fp16 parameters.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidOption(
                f"attach() was given a {type(optimizer).__name__}", way_out="Give it the torch.optim.Optimizer itself"
            )
        if self.options.on_overflow == "retry":
            raise errors.InvalidOption(
                "on_overflow='retry' computes a step again, and in a loop of yours only you can",
                way_out="Use amp.train_step(model, loss_fn, optimizer), or on_overflow='skip'",
            )
        self._attach(optimizer, route)

    def _attach(self, optimizer: torch.optim.Optimizer, route: str) -> None:
        if self._scaler is not None:
            self._scaler.attach(optimizer, route)
        self._precisions.end_steps_of(optimizer)

    def train_step(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
    ) -> TrainStep:
        """A callable that takes one whole training step, on CUDA as one CUDA graph: forward, loss, backward, overflow check,
        clipping, the update, and what moves the loss scale. On a CPU it takes the same step, launch by launch.

            step = amp.train_step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), fused=True))
            for x, y in batches:
                loss = step(x, y)

        `step(*inputs, target, **named)` is `loss_fn(model(*inputs, **named), target)`; with `loss_fn=None` it is
        `model(*inputs, **named)`, or the `.loss` or ["loss"] of that. It returns the loss as a tensor on the device, [], and
        never waits, but for the first steps of each shape of batch, which are compiled and recorded, all precisions of a
        ladder together. Gradients are gone after it: `.grad` is None.

        It may be called between evaluations, with a batch of another shape (8 of them are recorded), in `train()` or
        `eval()`; learning-rate schedules work as always. Where parameters are moved, or another hyperparameter changes, the
        step is recorded anew. With `on_overflow="retry"` a step that overflowed is computed again in the next higher
        precision, which waits for the device once a step; dropout draws again, and running statistics see the batch twice.

        Args:
            model: compiled, as a whole, or not; it is compiled together with the loss.
            loss_fn: (output, target) -> one floating-point number, or None.
            optimizer: one that a CUDA graph can hold; it is attached.
            clip_grad_norm: the largest norm of all true gradients together; larger ones are scaled down to it.
            accumulate: micro-batches that each batch is split into, in order, along its first dimension; the loss is the
                mean of theirs.
        Raises: CannotCapture for another optimizer; InvalidOption for a number that makes no sense, no parameters, or
        parameters on several devices; CannotSkip, CannotScale as `attach`.
        """
        from fxamp.run import train_step  # `import fxamp` stays light

        model = getattr(model, "_orig_mod", model)
        task = train_step.Task(
            model=model, loss_fn=loss_fn, optimizer=optimizer, clip_grad_norm=clip_grad_norm, accumulate=accumulate
        )
        step = train_step.TrainStep(
            task,
            backend=self._compile_in_step,
            may_copy=self._scaler is None or not (self._scaler.watches or self._scaler.regions),
            is_one_of_many=ranks.is_one_of_many(),
            group=self.options.process_group,
            scaler=self._scaler,
            precisions=self._precisions,
            retries=self.options.on_overflow == "retry",
            refuse_frozen=self._weights.refuse_gradients,
            note=self._note,
            wish=self.options.cuda_graphs,
            is_lowered=self.options.lower != "eager",
        )
        self._attach(optimizer, "auto")
        self._steps.add(step)
        return step

    def set_precision(self, precision: str, *, region: str | None = None) -> None:
        """Runs in another precision of the ladder, from the next step on, in all graphs together. It compiles nothing.

        A step ends with that of an attached optimizer; where none is, the next call of a graph is the first to change. A
        forward and its backward always have the same precision.

        Args: region: a name, or the glob, of `regions=`; "model" is what none of them holds; None means all.
        Raises: UnknownOption for a precision that is not on the ladder, and for a region that does not exist.
        """
        self._precisions.set(precision, region)

    def warm(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        """Runs a compiled model in every precision that can occur, so that no later step records a CUDA graph.

        Forward, and backward where gradients are on, three times in each combination of precisions. Parameters, gradients,
        buffers, random numbers, loss scale and counters are what they were; attributes that the model itself counts in Python
        are not. An example has to have the shapes of the training, and lie where it lies.

        Args: model: a module, compiled as a whole or in parts; the rest: an example of its inputs.
        Returns: the number of combinations.
        Raises: TooManyVariants for more than 16; InvalidOption for what is no module, whose buffers nobody could put back.
        """
        module = _module(model, "warm", "compiled torch.nn.Module, then its inputs")
        return warming.warm(self._precisions, module, args, kwargs)

    @property
    def precisions(self) -> Mapping[str, str]:
        """Region -> the precision that it runs in now, as `ladder` or `precision` call it."""
        return self._precisions.current()

    def observe(self, loss: torch.Tensor | float, *, curvature: torch.Tensor | float | None = None) -> None:
        """Tells the scheduler the loss of a step. Call it once a step, behind it; it decides the precision of later ones.

        Without a scheduler, losses go into `history` and `health()`, and that is all. With `torch.distributed` initialised all
        ranks have to call it: they decide by the mean of their losses.

        The loss travels in the background and is looked at `lag_steps` (8) steps later, on every device, so that runs repeat;
        the only wait is for the step that is so far back.

        Args:
            loss: one floating-point number of any dtype and device; a copy is taken.
            curvature: measured by `fxamp.directional_curvature`; the scheduler then looks at it, until another one comes, in
                place of what the losses say.
        Raises: InvalidOption for what is no single number.
        """
        self._observer.observe(loss, curvature)

    @property
    def history(self) -> History:
        """What was observed, and what the scheduler changed: `.steps`, `.changes`, `.as_csv()`, `.as_json()`, `.plot(path)`.
        Waits for nothing; the newest steps are still on their way."""
        return self._observer.history

    @property
    def loss_scale(self) -> torch.Tensor:
        """The loss scale, fp32 [], on the device of the first graph or optimizer. A copy; nothing waits. With a scale for each
        region, fp32 [number of regions], in the order of `precisions`.

        Raises: NeedsScaling where gradients are not scaled, here and below.
        """
        return self._scaling.state().scale.clone()

    @property
    def skipped_steps(self) -> torch.Tensor:
        """Optimizer steps left out so far, int64 [], on the device. A copy; nothing waits."""
        return self._scaling.state().num_skipped.long()

    def read_loss_scale(self, region: str | None = None) -> float:
        """The loss scale, on the host. Waits for the device.

        Args: region: by name, where each has a scale; None is "model", what no named region holds.
        Raises: UnknownOption for a region that does not exist.
        """
        scales = dict(zip(self._precisions.regions, self.loss_scale.reshape(-1).tolist(), strict=False))
        known = REST if region is None else self._precisions.structure.named(region)[0]
        return scales.get(known, scales[REST])

    def read_skipped_steps(self) -> int:
        """Optimizer steps left out so far, on the host. Waits for the device."""
        return int(self.skipped_steps)

    def health(self) -> tuple[Finding, ...]:
        """What ails the run: loss spikes and broken losses, where losses are observed; explosion, underflow,
        oscillation, overflows, a scale at its floor; and skips that are calibration. Empty: all that is looked at is well.
        Where nothing is, the one finding, of kind "unknown", says what to ask for. Waits for the device.

        Known are the last 256 losses and updates of the scale, and which gradients overflowed; with stats="overflow" also
        which operation made the first inf or NaN, forward or backward; with stats="full" also which share of each gradient's
        numbers fp16 could not hold.
        """
        steps = self.history.steps
        broken = {step.step: step.loss for step in steps if step.overflowed is False and not math.isfinite(step.loss)}
        spikes = loss_spikes([(step.step, step.loss) for step in steps[-NUM_OBSERVED:] if step.step not in broken])
        if self._scaler is None:
            return spikes if steps else (nothing_known(is_scaled=False),)
        makers = self._scaler.read_silent(len(broken)) if broken else ()
        found = (*spikes, *broken_losses(broken, makers), *self._scaler.read_health())
        is_known = found or steps or self._scaler.read_num_updates()
        return found if is_known else (nothing_known(is_scaled=True),)

    def when_stepped(self, schedule: Any) -> SteppedSchedule:
        """A learning-rate scheduler of torch's, whose `step()` does nothing after an optimizer step that was left out.

        The host learns of it `LAG_STEPS` (8) steps later on an accelerator, at once on the CPU, and never waits for the last
        step: until then the schedule is ahead by one, then it stands still for one.

        Without loss scaling no step is left out, and it steps as it always does.

        Raises: InvalidOption for what is no scheduler, or if its optimizer is not attached.
        """
        optimizer = getattr(schedule, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer) or not callable(getattr(schedule, "step", None)):
            raise errors.InvalidOption(
                f"when_stepped() was given a {type(schedule).__name__}",
                way_out="Give it a scheduler of torch.optim.lr_scheduler, or one that has its `optimizer` and `step()` too",
            )
        return SteppedSchedule(schedule, None) if self._scaler is None else self._scaler.when_stepped(schedule)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain Python: {"scaling": ..., "precision": {region: precision}, "scheduler": ...},
        without what there is not: a precision where there is a ladder. Waits for the device."""
        state: dict[str, Any] = {} if self._scaler is None else {"scaling": self._scaler.state_dict()}
        if len(self._precisions.ladder) > 1:
            state["precision"] = dict(self._precisions.current())
        return state if self.options.scheduler is None else state | {"scheduler": self._observer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict()`, or from the state of a `torch.amp.GradScaler`.

        A scheduler about which the state says nothing goes on as it is, and so do precisions.
        Raises: InvalidOption for a state that is neither, or is of a run with a scheduler where there is none; NeedsScaling
        where gradients are not scaled, and the state's are; UnknownOption for a precision off the ladder, or another region.
        """
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidOption(
                f"load_state_dict() was given a {type(state).__name__}",
                way_out="Give it what state_dict() of an Amp has returned",
            )
        rest = {name: part for name, part in state.items() if name not in ("scheduler", "precision")}
        if "scheduler" in state and self.options.scheduler is None:
            raise errors.InvalidOption(
                f"the state is of a run with a scheduler, and {self} has none",
                way_out='Give scheduler=..., or leave "scheduler" out of the state',
            )
        precision: Mapping[str, str] = state.get("precision", {})
        self._precisions.check(precision)
        if rest or self._scaler is not None:
            self._scaling.load_state_dict(rest.get("scaling", rest))
        if "scheduler" in state:
            self._observer.load_state_dict(state["scheduler"])
        if precision:  # last: the floor of a scale may have raised it above what a scheduler decided
            self._precisions.force(precision)

    @property
    def _scaling(self) -> Scaler:
        if self._scaler is None:
            raise errors.NeedsScaling(
                f"{self} scales no gradients", way_out="precision='fp16' does, and scaling='dynamic' in any precision"
            )
        return self._scaler


def _module(model: object, asker: str, wanted: str = "torch.nn.Module") -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return model
    raise errors.InvalidOption(f"{asker}() was given a {type(model).__name__}", way_out=f"Give it the {wanted}")


def _text_of(precision: Mapping[str, str]) -> str:
    """"fp16", or "model fp16, head fp32" where regions differ."""
    different = set(precision.values())
    return different.pop() if len(different) == 1 else ", ".join(f"{name} {p}" for name, p in precision.items())


_USERS_TO_SOLVE: Final = (
    errors.CudaGraphsUnavailable,
    errors.RuleOutOfReach,
    errors.CannotScale,
    errors.FrozenWeights,
)
"""What raises under on_error="eager" too: a promise was asked for that cannot be kept."""


SMALL_BYTES: Final = 128 << 20
"""Of the values that a recorded graph computes. Up to here its launches may well run side by side (`run.branches`)."""


# ---- the arrows, between this module and the stages -----------------------------------------------------------------------
def _precision_on(device: torch.device, wanted: str) -> tuple[str, tuple[str, ...]]:
    """(the precision that a graph on `device` runs in, notes on why it is another than the one asked for)."""
    if wanted == "auto":
        precision, reason = formats.resolve_auto(device)
        return precision, (reason,)
    native, reason = formats.native_support(device, wanted)
    if wanted == "tf32" and not native:
        return "fp32", (f"tf32 asked for, fp32 used: {reason}",)
    if not native:
        return wanted, (f"{wanted} is emulated on {device.type}: {reason}",)
    return wanted, ()


def _output_dtype(gm: fx.GraphModule, options: Options) -> tuple[Literal["traced", "low"], str]:
    """(the formats that the outputs of a graph leave in, a note if they are not those asked for)."""
    reason = destination.within_program(gm) if options.output_dtype == "low" else None
    if reason is None:
        return options.output_dtype, ""
    return "traced", f"output_dtype='low' is for what leaves the compiled program; these outputs are read inside it: {reason}"


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What the variants of one graph have in common."""

    captured: Captured
    shown: fx.GraphModule
    normalized: Sequence[Change]
    example_inputs: Sequence[Any]
    options: Options
    ladder: Ladder
    num_variants: int
    replay: CudaGraphs
    scaler: Scaler | None
    probed: ProbedGraph | None
    outputs: tuple[Literal["traced", "low"], str]
    """The formats that outputs leave in, and a note if they are not those asked for."""
    weights: WeightCopies | LowLeaves
    copied: tuple[int, ...]
    """Positions of the inputs of which low copies are kept."""
    in_step_on_cuda: bool
    """Is it part of a train step on CUDA? Most are recorded; those that are not are the same program, launch by launch."""
    programs: dict[str, Program] = field(default_factory=dict)
    """Those compiled so far, by their digest: two precisions come to the same where nothing is lowered."""

    @property
    def keeps_roundings(self) -> bool:
        return self.captured.narrows and self.options.numerics == "eager"


def _variant(assignment: Assignment, shared: _Shared) -> tuple[VariantRecord, Program]:
    """One graph in one assignment of precisions: plan, rewrite, joint passes, program."""
    captured, options = shared.captured, shared.options
    resolved = {rung: _precision_on(captured.device, rung) for rung in shared.ladder.rungs}
    lowest, parts = shared.ladder.parts(assignment, {rung: precision for rung, (precision, _) in resolved.items()})
    output_dtype, note_of_outputs = shared.outputs
    made = plan.plan(
        captured, options.policy, variant=lowest, parts=parts, output_dtype=output_dtype, relaxed=options.relaxed
    )
    rewritten = graph.clone(captured.gm)
    check = legal.checker(legal.REWRITTEN, captured.gm, output_dtypes=output_dtype == "traced")
    inputs = captured.gm.graph.find_nodes(op="placeholder")
    copied = [inputs[i].name for i in shared.copied]
    measures = (options.mode or "").startswith("max-autotune")
    steps = rewrite.passes_for(
        captured, made, relaxed=options.relaxed, frozen=copied, measures=measures, is_recorded=shared.in_step_on_cuda
    )
    changes = passes.run(rewritten, steps, check)
    program = _lower(rewritten, made, shared)
    notes = [note for rung in dict.fromkeys(dict(assignment.precisions).values()) for note in resolved[rung][1]]
    notes += filter(None, (made.note, note_of_outputs))
    if copied:
        count, kind = len(rewrite.taken(captured.gm, rewritten)), "weights" if captured.trains else "frozen weights"
        notes.append(f"of {len(copied)} {kind}, {count} are read as low copies, the others in the format they have")
    if shared.keeps_roundings:
        notes.append("the program holds floats narrower than fp32: Inductor is asked to keep their roundings")
    record = VariantRecord(
        precision=str(assignment) if parts else lowest,
        shown=shared.shown,
        captured=captured,
        plan=made,
        dynamo=graph.forget_inputs(rewritten),
        changes=(*shared.normalized, *changes),
        joint_record=program.record,
        coverage=program.coverage if shared.replay.on else Coverage(off=shared.replay.reason),
        lower=options.lower,
        notes=(*notes, str(shared.replay)),
    )
    return record, program


def _lower(gm: fx.GraphModule, made: Plan, shared: _Shared) -> Program:
    """The program of a rewritten graph. One that is watched has values of its own to speak of, and so a probe of its own: it
    takes the graph's inputs alone."""
    from fxamp import joint, lower, watched  # Inductor takes a second to import; only compiling needs it
    from fxamp.joint.watch import Watch

    captured, options, probed = shared.captured, shared.options, shared.probed
    taken = rewrite.taken(captured.gm, gm)
    examples = list(shared.example_inputs)
    low = [_low_example(examples[i], dtype, trains=captured.trains) for i, dtype in taken.items()]
    for i, example in zip(taken, graph.like_examples(low, examples), strict=True):
        examples[i] = example
    scaling: tuple[Pass, ...] = ()
    watch: Watch | None = None
    if shared.scaler is not None and probed is not None:
        gm = graph.clone(gm)  # people look at the one without these inputs
        table = watched.mark(gm, captured.roles) if shared.scaler.watches else None
        probed = probed if table is None else shared.scaler.watching(probed, table)
        scale, probe = shared.scaler.inputs(probed, captured.device)
        marks = _mark_regions(gm, shared.ladder) if probed.num_regions else ""
        first = graph.append_inputs(gm, {"loss_scale": scale, "probe": probe})
        examples = [*examples, *graph.like_examples((scale, probe), examples)]
        scaling = joint.scaling(
            scale=first,
            probe=first + 1,
            slots=probed.positions,
            low=tuple(taken),
            shares=probed.has_shares,
            statistics=captured.running_statistics,
            num_regions=probed.num_regions,
            per_region=options.has_scales_of_regions,
            marks=marks,
        )
        if table is not None:
            fuses = options.lower == "inductor"
            watch = Watch(table, scale=first, probe=first + 1, shares=probed.has_shares, fuses=fuses)
    settings = lower.Settings(
        lower=options.lower,
        mode=options.mode,
        cuda_graphs=shared.replay.on,
        require_cuda_graphs=shared.replay.on and options.cuda_graphs == "require",
        keeps_roundings=shared.keeps_roundings,
        tf32=made.variant == "tf32",
        compiles_backward=shared.num_variants > 1,
        relaxed=joint.relaxed(options.relaxed, made.low),
        scaling=scaling,
        watch=watch,
        reuses_buffers=not (shared.in_step_on_cuda and captured.num_bytes <= SMALL_BYTES),
    )
    digest = _digest(captured, made, (settings, taken))
    if digest not in shared.programs:
        with lower.called_later() if shared.programs else contextlib.nullcontext():
            program = lower.lower(gm, examples, settings, digest)
        if taken:
            program = dataclasses.replace(program, run=shared.weights.around(program.run, taken))
        elif made.lowers and not captured.trains and isinstance(shared.weights, WeightCopies) and not shared.copied:
            parameters = [i for i, role in enumerate(captured.roles.values()) if role == "parameter"]
            program = dataclasses.replace(program, run=shared.weights.telling(program.run, parameters))
        if shared.scaler is not None and probed is not None and watch is not None:
            program = dataclasses.replace(program, run=shared.scaler.around(program.run, probed, captured.device))
        shared.programs[digest] = program
    return shared.programs[digest]


def _low_example(weight: torch.Tensor, dtype: torch.dtype, *, trains: bool) -> torch.Tensor:
    """Like the low copy of a weight."""
    return torch.empty_like(weight, dtype=dtype, requires_grad=trains and weight.requires_grad)


def _probed(captured: Captured, scaler: Scaler, ladder: Ladder) -> ProbedGraph:
    """The graph as loss scaling sees it. Raises: CannotScale for parameters that are fp16 themselves, and for gradients that
    the graph takes itself in fp16: they are part of its forward, where no scale is."""
    inside = [captured.facts[n.name] for n in captured.gm.graph.nodes if n.target in capture.DIFFERENTIATES]
    if inside and "fp16" in ladder.rungs:
        raise errors.CannotScale(
            "a gradient is taken inside of the graph (trace_autograd_ops), where nothing would keep it from underflowing fp16",
            where=inside[0].where,
            way_out="Leave torch._dynamo.config.trace_autograd_ops off: it is then taken between two graphs, and scaled. Or "
            "use bf16",
        )
    inputs = captured.differentiable
    parameters = {i: node for i, node in inputs.items() if captured.roles[node.name] == "parameter"}
    half = [node for node in parameters.values() if graph.value_of(node).dtype == torch.float16]
    if half and graph.is_sharded(half[0]):
        raise skipping.half_gathered(len(half), half[0].name)
    if half:
        raise skipping.half_parameters(f"{len(half)} parameters of the graph, {half[0].name} for one,")
    regions = tuple(ladder.number_of(_module_of(node, captured)) for node in inputs.values())
    return scaler.graph({i: graph.input_name(node) for i, node in inputs.items()}, parameters, regions)


def _module_of(node: fx.Node, captured: Captured) -> str:
    """The module that reads an input first."""
    return next((captured.facts[user.name].module for user in node.users if user.op != "output"), "")


def _mark_regions(gm: fx.GraphModule, ladder: Ladder) -> str:
    """Marks every operation of a named region in a rewritten graph, and in those nested in it. Returns a name of all marks."""
    numbers: list[int] = []
    for node in (x for part in graph.all_of(gm) for x in part.graph.nodes if x.op in ("call_function", "call_method")):
        numbers.append(ladder.number_of(capture.module_path(node)))
        if numbers[-1]:
            graph.annotate(node, graph.REGION, numbers[-1])
    return hashlib.sha256(repr((ladder.names, numbers)).encode()).hexdigest()


def _compile_untouched(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, *, in_step: bool
) -> Compiled:
    """The graph as Dynamo captured it, compiled as if fxamp were not there."""
    from fxamp import lower

    settings = lower.Settings(
        lower=options.lower,
        mode=options.mode,
        cuda_graphs=not in_step and (options.cuda_graphs in (True, "require") or options.mode in cuda_graphs.MODES),
        require_cuda_graphs=False,
        keeps_roundings=False,
        tf32=False,
        joint_passes=False,
    )
    return lower.lower(gm, example_inputs, settings, digest="untouched").run


def _digest(captured: Captured, made: Plan, settings: object) -> str:
    """Names everything that decides the compiled graph and that PyTorch's cache keys do not see; equal across processes."""
    values = [graph.value_of(node) for node in captured.gm.graph.find_nodes(op="placeholder")]
    inputs = [(str(t.dtype), str(tuple(t.shape)), t.requires_grad) for v in values for t in graph.tensors_of(v)]
    calls = [graph.text_of(part) for part in graph.all_of(captured.gm)]
    functions = passes.file_hash(ops.__file__), ops.allowed_kernels()  # the calls have but their names
    text = repr((__version__, torch.__version__, functions, calls, inputs, captured.trains, made.digest(), settings))
    return hashlib.sha256(text.encode()).hexdigest()


# ---- the name "fxamp" -----------------------------------------------------------------------------------------------------
_SHARED: dict[tuple[tuple[str, str], ...], Amp] = {}
"""The Amp behind backend="fxamp", one per set of options."""


def shared(**options: Any) -> Amp:
    """The Amp of all models that were compiled by name with these options; also before the first call.

        model = torch.compile(model, backend="fxamp", options={"precision": "bf16"})
        print(fxamp.shared(precision="bf16").report())
    """
    key = Options.of(options).key()
    if key not in _SHARED:
        _SHARED[key] = Amp(**options)
    return _SHARED[key]


def named_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """What `torch.compile(model, backend="fxamp", options={...})` calls, through the entry point."""
    chosen = dict(options or {})
    if mode is not None:
        chosen["mode"] = mode
    return shared(**chosen)(gm, example_inputs)


def register() -> None:
    """Makes backend="fxamp" known where the package is on the path without being installed. May be called again."""
    from torch._dynamo.backends import registry

    if "fxamp" not in registry.list_backends(exclude_tags=()):
        registry.register_backend(named_backend, name="fxamp")
