"""The options of an Amp: frozen, total, and checked when they are made."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from fxamp import errors, formats, scaling
from fxamp.ladder import Ladder
from fxamp.policy import Policy
from fxamp.scaling import DynamicScale, StaticScale

if TYPE_CHECKING:  # `import fxamp` stays light
    from fxamp.scheduler import Scheduler

MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Inductor's modes, as torch.compile documents them."""

RELAXED: Final = ("min_cut", "low_residual", "attention_masks", "padded_logits", "grouped_queries")
"""Names of what changes numerics beyond the policy, and is asked for by name."""

LOWERINGS: Final = ("inductor", "aot_eager", "eager")
CUDA_GRAPHS: Final = ("auto", True, False, "require")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `fxamp.Amp(...)` and `torch.compile(..., backend="fxamp", options={...})` take.

    Raises, when built: UnknownOption for a name that does not exist, InvalidOption for a value of the wrong kind, NotYet for
    what this version does not do yet.
    """

    precision: str = "auto"
    """The lowest precision: "auto", "fp32", "tf32", "bf16", "fp16", "fp8". "auto" is bf16 where the device computes it in
    hardware, else fp32; decided per graph, and reported."""
    ladder: tuple[str, ...] | None = None
    """All precisions that may be switched between, low to high: ("fp16", "fp32"). Each graph is compiled in all of them; the
    run begins in the first. See `Amp.set_precision`."""
    policy: Policy = field(default_factory=Policy)
    """Operation, module path, module class or region -> precision. Given as a preset ("autocast", "conservative",
    "matmul_only", "pure"), a `Policy`, the path of a TOML file, or a mapping such as {"softmax": "bf16", "layers.0.*": "fp32",
    "class:RMSNorm": "fp32", "region:early": "fp32", "mylib::*": "low"}."""
    regions: Mapping[str, str] | None = None
    """Named parts of the model: name -> module path glob. With a rule "region:NAME" the rule speaks of the part; without one,
    and with a ladder, the part changes its precision on its own, and with `DynamicScale(per_region=True)` its loss scale."""
    scheduler: Scheduler | None = None
    """What changes the precision by what `Amp.observe` is told: a `CurvatureScheduler`, a `FixedSchedule`, or any object with
    `decide(signal, state)`. Without a ladder that is (precision, "fp32")."""
    scaling: str | float | DynamicScale | StaticScale | None = "auto"
    """Loss scaling: "auto" is "dynamic" where a precision is fp16, else None. "dynamic" is `DynamicScale()`, a number a scale
    that stays. None with fp16 trains without protection, and is the user's explicit choice."""
    on_overflow: str = "skip"
    """What an overflowed step does: "skip" leaves it out; "retry", in `Amp.train_step` alone, computes it again in the next
    higher precision of the ladder, at the price of one wait a step."""
    relaxed: tuple[str, ...] = ()
    """Names of RELAXED passes, which change numerics; docs/relaxed.md has the error that each adds. "min_cut": operations that
    follow their operands run in the formats that move the fewest bytes. "low_residual": x + f(x) is low if f(x) is.
    "attention_masks": masks that are causal, or empty, by proof, reach the kernels as is_causal=True, or not at all.
    "padded_logits": a vocabulary that matrix units cannot take is padded up to the loss, and masked there. "grouped_queries":
    keys and values that are repeated for groups of queries are not, where attention takes enable_gqa=True."""
    numerics: Literal["eager", "fast"] = "eager"
    """"eager" keeps the roundings of the user's own casts, which Inductor alone drops; "fast" gives that up."""
    output_dtype: Literal["traced", "low"] = "traced"
    """"traced": what leaves a graph has the dtype of the program as written. "low": what leaves the compiled program
    may stay in the low format; between its graphs values have the traced dtypes."""
    mode: str | None = None
    """Inductor's mode, as of torch.compile."""
    lower: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """What compiles the rewritten graph. "aot_eager" runs the same joint passes without Inductor, "eager" only the rewrite of
    Dynamo's graph."""
    cuda_graphs: str | bool = "auto"
    """"auto": inference graphs replay as CUDA graphs and hand out copies; training is left to `mode`. True: Inductor's own
    behaviour, as in mode="reduce-overhead". "require": a graph that cannot be captured is an error."""
    stats: str | None = None
    """What is gathered for `Amp.health` beyond the largest number of each gradient: None; "overflow": which operation made the
    first inf or NaN, forward or backward, at the price of reading the results of all of them once more; "full": that, and
    which share of each gradient is below what fp16 holds. Both need loss scaling, in any precision; scaling=1.0 will do."""
    on_error: Literal["raise", "eager"] = "raise"
    """What an internal failure of fxamp does: "raise" a typed error, or compile the "eager", untouched graph, count it in the
    report, and warn once."""
    process_group: object | None = None
    """The `torch.distributed` group whose ranks skip a step together; None is the default group, if there is one."""

    def __post_init__(self) -> None:
        policy: Any = self.policy  # what people give is not what it becomes
        object.__setattr__(self, "policy", Policy.of(Policy() if policy is None else policy).with_regions(self.regions or {}))
        self.policy.check_regions()
        object.__setattr__(self, "ladder", _rungs(self.ladder))
        object.__setattr__(self, "relaxed", _names(self.relaxed))
        _check_choices(self)
        _check_landed(self)
        _check_regions(self)

    @property
    def rungs(self) -> Ladder:
        """The precisions that a run changes between, one if there is no ladder, and the regions that change on their own."""
        ruled = {rule.pattern for rule in self.policy.rules if rule.kind == "region"}
        regions = tuple(r for r in self.policy.regions if r[0] not in ruled)
        if self.ladder is None and self.scheduler is None:
            return Ladder(rungs=(self.precision,), regions=regions if self.has_scales_of_regions else ())
        rungs = (self.precision, "bf16" if self.precision == "fp8" else "fp32") if self.ladder is None else tuple(self.ladder)
        return Ladder(rungs=rungs, regions=regions)

    @property
    def has_scales_of_regions(self) -> bool:
        """Has each region a loss scale of its own?"""
        return isinstance(self.scaling, DynamicScale) and self.scaling.per_region

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """Options from keyword arguments or from the `options=` of torch.compile."""
        known = [f.name for f in fields(Options)]
        for name in given:
            if name not in known:
                raise errors.unknown("option", name, known)
        return Options(**given)

    def __str__(self) -> str:
        """Only what differs from the defaults, in the form of a call."""
        default = {f.name: f.default for f in fields(self)} | {"policy": Policy()}
        parts = [
            f"{f.name}={(str(value) if f.name == 'policy' else value)!r}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != default[f.name]
        ]
        return f"Amp({', '.join(parts)})"

    def key(self) -> tuple[tuple[str, str], ...]:
        """Every field, hashable: two equal keys are one Amp in `fxamp.shared`."""
        return tuple((f.name, str(getattr(self, f.name))) for f in fields(self))


def _rungs(ladder: Any) -> tuple[str, ...] | None:
    """What `ladder` says, as a tuple. Raises: InvalidOption for what holds no precisions in an order."""
    if ladder is None or (isinstance(ladder, (tuple, list)) and len(ladder) > 1):
        return None if ladder is None else tuple(ladder)
    raise errors.InvalidOption(
        f"ladder={ladder!r} has no precisions to change between, one after another",
        way_out="Name two precisions or more, the lowest first: ladder=('fp16', 'fp32')",
    )


def _names(relaxed: Any) -> tuple[str, ...]:
    """What `relaxed` says, as names. Raises: InvalidOption for what holds none."""
    if isinstance(relaxed, str):
        return (relaxed,)
    if relaxed is None or isinstance(relaxed, Iterable):
        return tuple(relaxed or ())
    raise errors.InvalidOption(f"relaxed={relaxed!r}", way_out=f"Name the passes that you want, of {', '.join(RELAXED)}")


def _check_choices(options: Options) -> None:
    choices: dict[str, tuple[object, ...]] = {
        "precision": formats.PRECISIONS,
        "on_overflow": ("skip", "retry"),
        "numerics": ("eager", "fast"),
        "output_dtype": ("traced", "low"),
        "mode": (None, *MODES),
        "lower": LOWERINGS,
        "cuda_graphs": CUDA_GRAPHS,
        "stats": (None, "overflow", "full"),
        "on_error": ("raise", "eager"),
    }
    for name, allowed in choices.items():
        value = getattr(options, name)
        if not any(value is x or (isinstance(value, str) and value == x) for x in allowed):
            raise errors.unknown(name, value, [repr(x) if x is None else str(x) for x in allowed])
    for name in options.relaxed:
        if name not in RELAXED:
            raise errors.unknown("relaxed pass", name, RELAXED)
    if "min_cut" in options.relaxed and options.lower == "eager":
        raise errors.InvalidOption(
            "relaxed='min_cut' works on the joint graph, and lower='eager' has none",
            way_out="Leave min_cut out, or use lower='inductor' or 'aot_eager'",
        )
    if options.ladder is not None and options.precision != "auto":
        raise errors.InvalidOption(
            f"both precision={options.precision!r} and ladder={options.ladder!r} are given",
            way_out="A ladder names all precisions: leave precision out",
        )
    known = options.scaling in ("auto", "dynamic", None)
    if not (known or formats.is_number(options.scaling) or isinstance(options.scaling, (DynamicScale, StaticScale))):
        raise errors.unknown("scaling", options.scaling, ("auto", "dynamic", "None", "a number", "a DynamicScale"))
    _check_scheduler(options)
    _check_group(options)
    if options.on_overflow == "retry" and len(options.rungs.rungs) == 1:
        raise errors.InvalidOption(
            "on_overflow='retry', and there is no higher precision", way_out="Give a ladder=('fp16', 'fp32')"
        )
    at_floor = options.scaling.at_floor if isinstance(options.scaling, DynamicScale) else None
    if at_floor == "raise precision" and len(options.rungs.rungs) == 1:
        raise errors.InvalidOption(
            "at_floor='raise precision', and there is no higher precision", way_out="Give a ladder=('fp16', 'fp32')"
        )
    if options.lower == "eager" and scaling.resolve(options.scaling, options.rungs.rungs) is not None:
        raise errors.InvalidOption(
            "gradients are scaled in the joint graph, and lower='eager' has none",
            way_out="Use lower='inductor' or 'aot_eager', or scaling=None",
        )
    if options.stats is not None and scaling.resolve(options.scaling, options.rungs.rungs) is None:
        raise errors.InvalidOption(
            f"stats={options.stats!r} is gathered by loss scaling, and nothing is scaled",
            way_out="scaling=1.0 gathers it and scales nothing, in any precision",
        )
    if options.lower != "inductor" and options.mode is not None:
        raise errors.InvalidOption(
            f"mode={options.mode!r} is Inductor's, and lower={options.lower!r} does not use it",
            way_out="Leave mode out, or use lower='inductor'",
        )
    if options.lower != "inductor" and options.cuda_graphs in (True, "require"):
        raise errors.InvalidOption(
            f"cuda_graphs={options.cuda_graphs!r} needs Inductor, and lower={options.lower!r} does not use it",
            way_out="Leave cuda_graphs out, or use lower='inductor'",
        )


def _check_scheduler(options: Options) -> None:
    scheduler: object = options.scheduler
    if scheduler is None:
        return
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "decide", None)):
        raise errors.InvalidOption(
            f"scheduler={scheduler!r} has no decide(signal, state)",
            way_out="Give an object that has, such as fxamp.CurvatureScheduler()",
        )
    parameters = inspect.signature(scheduler.decide)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        parameters.bind(None, None)
    except TypeError as error:
        names = ", ".join(parameters.parameters)
        raise errors.InvalidOption(
            f"decide({names}) of {type(scheduler).__name__} cannot be called with a signal and a state: {error}",
            way_out="Define decide(self, signal, state), which returns (fxamp.Decision, state)",
        ) from None
    from fxamp.scheduler import FixedSchedule  # `import fxamp` stays light

    if isinstance(scheduler, FixedSchedule) and isinstance(scheduler.steps, Mapping):
        for precision in scheduler.steps.values():
            by_region = {None: precision} if isinstance(precision, str) else precision
            for region, name in by_region.items():
                options.rungs.check(name)
                options.rungs.named(region)
    if options.ladder is None and options.precision == "fp32":
        raise errors.InvalidOption(
            "a scheduler has nothing to change between in precision='fp32'",
            way_out="Give the lower precision, precision='bf16', or a ladder=('bf16', 'fp32')",
        )


def _check_group(options: Options) -> None:
    if options.process_group is None:
        return
    from torch import distributed

    if distributed.is_available() and not isinstance(options.process_group, distributed.ProcessGroup):
        raise errors.InvalidOption(
            f"process_group={options.process_group!r} is no process group",
            way_out="Give torch.distributed.new_group(...), mesh.get_group(), or None for the default group",
        )


def _check_landed(options: Options) -> None:
    if options.precision == "fp8" or "fp8" in (options.ladder or ()):
        raise errors.not_yet("precision", "fp8", "Use 'bf16', 'tf32' or 'fp32'")


def _check_regions(options: Options) -> None:
    """A region is for something: a rule, a ladder, or a scale. Raises: InvalidOption, and as `Ladder`."""
    if options.has_scales_of_regions and not options.rungs.regions:
        raise errors.InvalidOption(
            "DynamicScale(per_region=True) where no region is free to have a scale",
            way_out="Name parts of the model, regions={'head': 'head'}, without a rule of the policy for them",
        )
    ruled = {rule.pattern for rule in options.policy.rules if rule.kind == "region"}
    idle = [name for name in options.regions or {} if name not in ruled]
    if not idle or options.rungs.regions:
        return
    raise errors.InvalidOption(
        f"region {idle[0]!r} has neither a rule nor a ladder to climb",
        way_out=f"Add a rule, policy={{'region:{idle[0]}': 'fp32'}}, or a ladder=('fp16', 'fp32') that it climbs on its own",
    )
