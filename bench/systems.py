"""What a user could pick: each system as data, and one function that sets any of them up as its documentation
recommends.

What "as recommended" means here: AdamW is the fused one on CUDA; autocast surrounds forward and loss, never the
backward; gradients are set to None after a step; `scaler.scale`, `.step`, `.update` in the order of torch's AMP recipe;
where CUDA graphs replay, `cudagraph_mark_step_begin` opens every iteration, and gradients that have to survive an
iteration (micro-batches) live in buffers of their own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

import fxamp
from bench.workloads import Batch, Parts, Workload
from fxamp import errors

Family = Literal["peer", "control", "ceiling", "fxamp"]
"""A control is a peer that is measured twice, and a ceiling something that a user could not simply pick instead."""
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

DTYPES: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}

REPLAYING_MODES: Final = ("reduce-overhead", "max-autotune")
"""Modes in which Inductor records CUDA graphs."""


RELAXED: Final = ("attention_masks", "padded_logits")
"""Of fxamp's RELAXED passes, those that the `-relaxed` systems ask for."""

_RELAXING: Final = " and ".join(RELAXED)


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to compute a workload."""

    name: str
    about: str
    precision: Precision
    family: Family = "peer"
    compiler: Literal["none", "inductor", "fxamp"] = "inductor"
    mode: str = "default"
    autocast: bool = False
    scaler: bool = False
    """Loss scaling by torch.amp.GradScaler."""
    stores_low: bool = False
    """Are the weights themselves in the low format?"""
    float8_recipe: str | None = None
    """Of torchao."""
    relaxed: tuple[str, ...] = ()
    """Passes of fxamp that are asked for by name."""
    is_train_step: bool = False
    """fxamp's own step, optimizer included."""
    unscaled: bool = False
    """Does fxamp leave the loss as it is? What that spares is the cost of scaling, skipping and checks."""
    freezes: bool = False
    """Does fxamp keep low copies of the weights?"""

    @property
    def is_replaying(self) -> bool:
        return self.compiler != "none" and self.mode in REPLAYING_MODES


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A workload on a system, ready to run."""

    step: Callable[[Sequence[Batch]], Tensor]
    """Trains on micro-batches, or infers. Returns the output, or the mean loss of the micro-batches; the next step may
    overwrite it."""
    amp: fxamp.Amp | None
    model: nn.Module
    note: str | None = None
    """What is special about it."""
    read_skipped: Callable[[], int] | None = None
    """Steps that a loss scaler has left out so far. Waits for the device. None: there is no loss scaler."""


class NotApplicable(Exception):
    """A system has nothing to do for a workload, which shows only once the model is there."""


# ---- the list --------------------------------------------------------------------------------------------------------
def _peers() -> list[System]:
    modes = ("default", "reduce-overhead", "max-autotune")
    return [
        System(name="fp32-eager", about="eager fp32", precision="fp32", compiler="none"),
        System(name="fp32-compile", about="fp32, torch.compile", precision="fp32"),
        System(name="tf32-compile", about='fp32 with matmul precision "high" (TF32), torch.compile', precision="tf32"),
        System(
            name="bf16-autocast-eager", about="autocast bf16, eager", precision="bf16", compiler="none", autocast=True
        ),
        *(
            System(
                name="bf16-autocast-" + ("compile" if mode == "default" else mode),
                about="autocast bf16, torch.compile" + ("" if mode == "default" else f' mode "{mode}"'),
                precision="bf16",
                autocast=True,
                mode=mode,
            )
            for mode in modes
        ),
        *(
            System(
                name="fp16-autocast-" + ("compile" if mode == "default" else mode),
                about="autocast fp16 + GradScaler, torch.compile" + ("" if mode == "default" else f' mode "{mode}"'),
                precision="fp16",
                autocast=True,
                scaler=True,
                mode=mode,
            )
            for mode in modes
        ),
        *(
            System(
                name=f"fp8-torchao-{recipe}",
                about=f"torchao float8 {recipe}, autocast bf16, torch.compile",
                precision="fp8",
                autocast=True,
                float8_recipe=recipe,
            )
            for recipe in ("tensorwise", "rowwise")
        ),
        *(
            System(
                name="bf16-weights-" + ("compile" if mode == "default" else mode),
                about="weights stored in bf16, torch.compile" + ("" if mode == "default" else f' mode "{mode}"'),
                precision="bf16",
                family="ceiling",
                stores_low=True,
                mode=mode,
            )
            for mode in modes[:2]
        ),
    ]


def _fxamp() -> list[System]:
    modes: dict[Precision, tuple[str, ...]] = {
        "fp32": ("default",),
        "tf32": ("default",),
        "bf16": ("default", "reduce-overhead", "max-autotune"),
        "fp16": ("default", "reduce-overhead", "max-autotune"),
        "fp8": ("default", "reduce-overhead"),
    }
    calls = [
        System(
            name=f"fxamp-{precision}" + ("" if mode == "default" else f"-{mode}"),
            about=f"fxamp {precision}" + ("" if mode == "default" else f', mode "{mode}"'),
            precision=precision,
            family="fxamp",
            compiler="fxamp",
            mode=mode,
        )
        for precision in modes
        for mode in modes[precision]
    ]
    calls += [
        replace(call, name=call.name.replace("bf16", "bf16-relaxed"), about=f"{call.about}, {_RELAXING}", relaxed=RELAXED)
        for call in calls
        if call.name in ("fxamp-bf16", "fxamp-bf16-reduce-overhead")
    ]
    calls += [
        replace(call, name=call.name.replace("bf16", "bf16-frozen"), about=f"{call.about}, Amp.freeze", freezes=True)
        for call in calls
        if call.name in ("fxamp-bf16", "fxamp-bf16-reduce-overhead")
    ]
    steps = [
        System(
            name=f"fxamp-{precision}-train-step",
            about=f"fxamp {precision}, Amp.train_step",
            precision=precision,
            family="fxamp",
            compiler="fxamp",
            is_train_step=True,
        )
        for precision in modes
    ]
    step_of = {step.precision: step for step in steps}
    relaxed_step = replace(
        step_of["bf16"],
        name="fxamp-bf16-relaxed-train-step",
        about=f"{step_of['bf16'].about}, {_RELAXING}",
        relaxed=RELAXED,
    )
    residual_step = replace(
        relaxed_step,
        name="fxamp-bf16-relaxed-residual-train-step",
        about=f"{relaxed_step.about} and low_residual",
        relaxed=(*RELAXED, "low_residual"),
    )
    unscaled_step = replace(
        step_of["fp16"],
        name="fxamp-fp16-unscaled-train-step",
        about=f"{step_of['fp16'].about}, scaling=None",
        unscaled=True,
    )
    return [*calls, *steps, relaxed_step, residual_step, unscaled_step]


def all_systems() -> dict[str, System]:
    """Every system by name."""
    peers = {s.name: s for s in _peers()}
    about = f"{peers[ANCHOR].about}, in a second process"
    control = replace(peers[ANCHOR], name=CONTROL, about=about, family="control")
    return {**peers, CONTROL: control, **{s.name: s for s in _fxamp()}}


INIT_SCALE: Final = 2.0**16
"""GradScaler's."""

ANCHOR: Final = "bf16-autocast-compile"
"""The system that every run measures, beside which all others are timed: what most people use."""

CONTROL: Final = f"{ANCHOR}-again"
"""The anchor in another process. That two processes of one system differ is what no repetition of either shows."""

REFERENCE: Final = "fp32-eager"
"""The system whose losses the others are compared with."""

CORE: Final = (
    REFERENCE,
    ANCHOR,
    "bf16-autocast-reduce-overhead",
    "fp16-autocast-compile",
    "fp16-autocast-reduce-overhead",
    "fp8-torchao-tensorwise",
    "fp8-torchao-rowwise",
    *(f"fxamp-{p}{variant}" for p in ("bf16", "fp16", "fp8") for variant in ("", "-reduce-overhead", "-train-step")),
)
"""What the headline needs: `--systems core`."""

SWEPT: Final = (
    ANCHOR,
    "bf16-autocast-reduce-overhead",
    "fxamp-bf16",
    "fxamp-bf16-reduce-overhead",
    "fxamp-bf16-train-step",
)
"""Systems whose growth with batch and depth is measured."""

QUICK: Final = ("fp32-eager", "fp32-compile", ANCHOR, CONTROL, "fxamp-fp32", "fxamp-bf16")


# ---- can it run? -----------------------------------------------------------------------------------------------------
def unavailable(system: System, workload: Workload, device_type: str) -> str | None:
    """Why a system cannot run a workload here, or None. Costs nothing but the making of an Amp."""
    if workload.kind == "infer" and (system.is_train_step or system.float8_recipe):
        return "for training"
    if workload.kind == "train" and system.freezes:
        return "for inference"
    if system.is_replaying and device_type != "cuda":
        return f"no CUDA graphs on {device_type}"
    if system.float8_recipe is not None:
        return _without_torchao(device_type)
    return _without_fxamp(system, workload) if system.compiler == "fxamp" else None


def _without_torchao(device_type: str) -> str | None:
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    # torchao's own condition for anything but emulation.
    if device_type != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        return "needs a GPU of compute capability 8.9"
    return None


def _without_fxamp(system: System, workload: Workload) -> str | None:
    try:
        amp_for(system, workload)
    except errors.NotYet as error:
        return f"not in this version of fxamp: {error.what}"
    return None


def amp_for(system: System, workload: Workload) -> fxamp.Amp:
    options: dict[str, Any] = {"precision": system.precision}
    if system.mode != "default":
        options["mode"] = system.mode
    if system.relaxed:
        options["relaxed"] = system.relaxed
    if system.unscaled or (workload.kind == "infer" and system.precision == "fp16"):
        options["scaling"] = None  # or there is no gradient to scale
    return fxamp.Amp(**options)


# ---- setting up ------------------------------------------------------------------------------------------------------
class WithLoss(nn.Module):
    """Model and loss in one graph."""

    def __init__(self, model: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self.model(x), y)


def as_it_is(module: nn.Module) -> nn.Module:
    """A module, in one process."""
    return module


def prepare(
    system: System,
    workload: Workload,
    parts: Parts,
    device_type: str,
    around: Callable[[nn.Module], nn.Module] = as_it_is,
) -> Runner:
    """Sets a system up; nothing is compiled before its first step. Sets this process's matmul precision. `around`: what goes
    around model and loss before they are compiled, such as DDP.

    Raises: NotApplicable; NotYet of fxamp for a train_step that exists in name only.
    """
    torch.set_float32_matmul_precision(
        "high" if system.compiler == "inductor" and system.precision == "tf32" else "highest"
    )
    note = _change_model(system, parts.model)
    amp = amp_for(system, workload) if system.compiler == "fxamp" else None
    read_skipped = None
    if workload.kind == "infer":
        step = _inference(system, parts, device_type, amp)
    else:
        scaler = torch.amp.GradScaler(device_type, enabled=system.scaler)
        if system.is_train_step:
            step = _fxamp_step(workload, parts, device_type, amp, around)
        else:
            step = _training(system, workload, parts, device_type, amp, around, scaler)
        if system.scaler:
            read_skipped = functools.partial(_read_skipped, scaler)
        elif amp is not None and system.precision == "fp16" and not system.unscaled:
            read_skipped = amp.read_skipped_steps
    return Runner(step=step, amp=amp, model=parts.model, note=note, read_skipped=read_skipped)


def _read_skipped(scaler: torch.amp.GradScaler) -> int:
    """Of a scaler with its defaults, which halves the scale for each, as long as it has not grown: in the first 2000 steps."""
    return round(math.log2(INIT_SCALE / scaler.get_scale()))


def compiled(system: System, module: nn.Module, amp: fxamp.Amp | None) -> Callable[..., Tensor]:
    if system.compiler == "none":
        return module
    if amp is not None:
        return torch.compile(module, backend=amp)
    return torch.compile(module, mode=None if system.mode == "default" else system.mode)


def autocast(system: System, device_type: str) -> contextlib.AbstractContextManager[object]:
    if not system.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=DTYPES.get(system.precision, torch.bfloat16))  # fp8 swaps run under bf16


def begins_step(system: System, device_type: str) -> Callable[[], object]:
    """What has to be called before each forward: tells CUDA graphs that outputs of the one before may be
    overwritten."""
    if system.is_replaying and device_type == "cuda":
        return torch.compiler.cudagraph_mark_step_begin
    return lambda: None


def optimizer_for(workload: Workload, model: nn.Module, device_type: str) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=workload.learning_rate, fused=device_type == "cuda")


def _inference(
    system: System, parts: Parts, device_type: str, amp: fxamp.Amp | None
) -> Callable[[Sequence[Batch]], Tensor]:
    run, begin = compiled(system, parts.model, amp), begins_step(system, device_type)
    if amp is not None and system.freezes:
        amp.freeze(parts.model)

    def step(batches: Sequence[Batch]) -> Tensor:
        begin()
        with torch.no_grad(), autocast(system, device_type):
            return run(batches[-1][0])

    return step


def _fxamp_step(
    workload: Workload,
    parts: Parts,
    device_type: str,
    amp: fxamp.Amp | None,
    around: Callable[[nn.Module], nn.Module],
) -> Callable[[Sequence[Batch]], Tensor]:
    assert amp is not None
    optimizer, num = optimizer_for(workload, parts.model, device_type), workload.num_micro_batches
    if around is as_it_is:
        run = amp.train_step(parts.model, parts.criterion, optimizer, accumulate=num)
    else:
        run = amp.train_step(around(WithLoss(parts.model, parts.criterion)), None, optimizer, accumulate=num)

    def step(batches: Sequence[Batch]) -> Tensor:
        return run(*batches[0]) if num == 1 else run(*map(torch.cat, zip(*batches, strict=True)))

    return step


def _training(
    system: System,
    workload: Workload,
    parts: Parts,
    device_type: str,
    amp: fxamp.Amp | None,
    around: Callable[[nn.Module], nn.Module],
    scaler: torch.amp.GradScaler,
) -> Callable[[Sequence[Batch]], Tensor]:
    optimizer = optimizer_for(workload, parts.model, device_type)
    if amp is not None:
        amp.attach(optimizer)
    begin, criterion = begins_step(system, device_type), parts.criterion
    if workload.is_loss_in_graph:
        loss_of = compiled(system, around(WithLoss(parts.model, criterion)), amp)
    else:
        run = compiled(system, parts.model, amp)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            return criterion(run(x), y)

    num_micro_batches = workload.num_micro_batches
    # A gradient that a CUDA graph returned is overwritten by the next replay: the sum needs memory of its own.
    keeps_gradients = num_micro_batches > 1 and system.is_replaying
    if keeps_gradients:
        for p in parts.model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None

    def step(batches: Sequence[Batch]) -> Tensor:
        total = None
        for x, y in batches:
            begin()
            with autocast(system, device_type):
                loss = loss_of(x, y)
                if num_micro_batches > 1:
                    loss = loss / num_micro_batches
            scaler.scale(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        assert total is not None
        return total

    return step


def _change_model(system: System, model: nn.Module) -> str | None:
    """Stores weights low, or swaps modules for torchao's; says what is special then."""
    if system.stores_low:
        model.to(DTYPES[system.precision])
    if system.float8_recipe is None:
        return None
    # Not installed where types are checked.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    heads = [name for name in linears if name.rpartition(".")[2] in ("head", "lm_head", "decoder")]
    converted: list[str] = []

    def is_wanted(module: nn.Module, name: str) -> bool:
        """torchao's advice: dimensions divisible by 16, and not the output layer."""
        if not isinstance(module, nn.Linear) or name in heads or module.in_features % 16 or module.out_features % 16:
            return False
        converted.append(name)
        return True

    config = Float8LinearConfig.from_recipe_name(system.float8_recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=is_wanted)
    if not converted:
        raise NotApplicable(f"none of {len(linears)} linear layers can be converted to float8")
    return f"{len(converted)} of {len(linears)} linear layers in float8"
