"""Rewritten graph -> Program. The only caller of Inductor and AOTAutograd, and the only place that touches torch's config."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import graph_compile
from torch._guards import TracingContext
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.nn.attention import sdpa_kernel

from fxamp import capture, errors, graph, joint, legal, ops, passes, tf32
from fxamp.coverage import Coverage, Phase, Replay, explained
from fxamp.joint.record import JointGraphs, JointRecord
from fxamp.joint.watch import Watch
from fxamp.passes import Pass

Compiled = Callable[..., Any]

_TAKES_TUPLES: Final = hasattr(custom_graph_pass, "get_custom_graph_passes")
"""Does this torch run a tuple of joint passes, each under the eyes of CompilerBisector? (2.13 does)"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to lower one graph."""

    lower: str
    mode: str | None
    cuda_graphs: bool
    require_cuda_graphs: bool
    keeps_roundings: bool
    """Is Inductor to round where the program rounds?"""
    tf32: bool
    """Do fp32 matrix products and convolutions run as TF32, in this graph alone?"""
    relaxed: tuple[Pass, ...] = ()
    """Passes that change numerics and were asked for."""
    scaling: tuple[Pass, ...] = ()
    """Passes of `joint.scaling`, where gradients are scaled."""
    compiles_backward: bool = False
    """Is the backward compiled now, rather than when the first one runs?"""
    watch: Watch | None = None
    """What is read of the values of the graph, beside computing them."""
    reuses_buffers: bool = True
    """May Inductor write a result where another was? What is read there has to be read before, in whatever order kernels could
    run otherwise."""
    joint_passes: bool = True
    """False compiles the graph as if fxamp were not there."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled graph, and what its joint passes saw."""

    run: Compiled
    record: JointRecord
    coverage: Coverage
    """What replays as a CUDA graph, if `Settings.cuda_graphs` asked for it."""


def lower(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, digest: str) -> Program:
    """Compiles a graph.

    `gm` is kept, without Dynamo's references to real inputs; compiled is a copy, which the compilers edit. `digest` says
    everything that decided the graph; it becomes part of the keys of PyTorch's caches, which ignore meta.
    Raises: StageFailed if a pass of fxamp fails; whatever Inductor raises otherwise.
    """
    if settings.lower == "eager":
        _check_runs_eagerly(gm)
        return Program(run=graph.forget_inputs(gm).forward, record=JointRecord(), coverage=Coverage(off="not compiled"))
    compiled = graph.clone(gm)
    record = JointRecord(trace=_Retrace(graph.forget_inputs(gm), settings, digest))
    coverage = Coverage(off="" if settings.cuda_graphs else "nobody asked for it")
    run = _compile(compiled, example_inputs, settings, _joint_steps(settings, record), digest, coverage)
    return Program(run=run, record=record, coverage=coverage)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    steps: Steps,
    digest: str,
    coverage: Coverage | None = None,
) -> Compiled:
    # Contract 5: the casts in the forward are the user's program now, and the backward follows from them alone.
    early = _early_backward() if settings.compiles_backward else contextlib.nullcontext()
    with functorch_config.patch(backward_pass_autocast="off"), early:
        if settings.lower == "aot_eager":
            return aot_eager(gm, example_inputs, steps, settings.watch)
        return _inductor(gm, example_inputs, settings, steps, digest, coverage or Coverage())


@contextlib.contextmanager
def _early_backward() -> Generator[None]:
    """Compiles the backward with the forward, such that it may be run twice: `_patches.EARLY_BACKWARD`."""
    nothing = mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[])
    with functorch_config.patch(force_non_lazy_backward_lowering=True), nothing:
        yield


@contextlib.contextmanager
def called_later() -> Generator[None]:
    """For a program that nobody calls while its model is still being compiled. DDPOptimizer compiles a model part by part,
    and calls each part for the strides of what it hands to the next: what AOTAutograd compiles there gives fake tensors,
    once."""
    context = TracingContext.try_get()
    with contextlib.nullcontext() if context is None else mock.patch.object(context, "fakify_first_call", False):
        yield


def _check_runs_eagerly(gm: fx.GraphModule) -> None:
    if torch.is_grad_enabled() and any(node.target is torch.ops.higher_order.invoke_subgraph for node in gm.graph.nodes):
        raise errors.InvalidOption(
            "lower='eager' cannot train a nested_compile_region: PyTorch would raise in the backward",
            way_out="Use lower='aot_eager'",
        )


# ---- the joint passes ---------------------------------------------------------------------------------------------------
Step = Callable[[fx.GraphModule], None]
Steps = Sequence[tuple[Step, str]]
"""(what runs on the joint graph, its part of a cache key), in order."""


def _joint_steps(settings: Settings, record: JointRecord) -> Steps:
    """fxamp's passes, each checked; what they did goes into `record`."""
    if not settings.joint_passes:
        return ()
    chosen = joint.order(keeps_roundings=settings.keeps_roundings, relaxed=settings.relaxed)
    checks: list[Callable[[fx.GraphModule], None]] = []

    def begin(gm: fx.GraphModule) -> None:
        checks[:] = [legal.checker(legal.JOINT, gm)]
        record.changes = ()

    def step(pass_: Pass) -> Step:
        def run(gm: fx.GraphModule) -> None:
            each = checks[0] if legal.wants_full_check() else _unchecked
            record.changes += passes.run(gm, (pass_,), each)

        return run

    def check(gm: fx.GraphModule) -> None:
        passes.run(gm, (), checks[0])

    def end(gm: fx.GraphModule) -> None:
        record.casts = graph.own_casts(gm)

    def scale(gm: fx.GraphModule) -> None:
        # What overflowed is one more output, by design: the graph has another signature than before.
        record.changes += passes.run(gm, settings.scaling, lambda scaled: legal.checker(legal.JOINT, scaled)(scaled))

    last = [(scale, repr([passes.key(p) for p in settings.scaling]))] if settings.scaling else []
    return [(begin, "begin"), *((step(p), passes.key(p)) for p in chosen), (check, "check"), *last, (end, "end")]


def _unchecked(_: fx.GraphModule) -> None:
    pass


# ---- looking at joint graphs ----------------------------------------------------------------------------------------------
class _Traced(BaseException):
    """Ends a compilation whose joint graph is all that was wanted."""


class _Retrace:
    """Compiles a graph once more as far as the end of the joint passes, in the modes that it was compiled in."""

    def __init__(self, gm: fx.GraphModule, settings: Settings, digest: str) -> None:
        self.gm, self.settings, self.digest = gm, settings, digest
        self.enables_grad, self.kernels = torch.is_grad_enabled(), ops.allowed_kernels()
        self.autocasts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", torch._C._get_accelerator().type))
            if torch.amp.is_autocast_available(kind)
        ]

    def __call__(self) -> JointGraphs:
        record, pictures = JointRecord(), list[fx.GraphModule]()

        def photograph(gm: fx.GraphModule) -> None:
            pictures.append(graph.clone(gm))

        def stop(_: fx.GraphModule) -> None:
            raise _Traced

        steps = _joint_steps(self.settings, record)
        gm = graph.clone(self.gm)
        inputs = [graph.value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.enables_grad))
            stack.enter_context(sdpa_kernel(self.kernels, set_priority=True))
            for kind, is_on, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))  # a hit would run no pass
            stack.enter_context(contextlib.suppress(_Traced))
            _compile(gm, inputs, self.settings, [(photograph, ""), *steps, (photograph, ""), (stop, "")], self.digest)
        before, after = pictures
        return JointGraphs(before=before, after=after, changes=record.changes, casts=record.casts or ())


# ---- aot_eager ----------------------------------------------------------------------------------------------------------
def aot_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], steps: Steps = (), watch: Watch | None = None
) -> Compiled:
    """AOTAutograd, the same decompositions and the same joint passes as under Inductor, then the graphs as they are.

    Without steps it is the lowering alone, a backend of Dynamo's.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    importlib.import_module("torch._inductor.lowering")  # decompositions of pooling look it up, and import it nowhere

    def optimize(joint_gm: fx.GraphModule) -> None:
        for step, _ in steps:
            step(joint_gm)
        joint_gm.recompile()

    def as_is(aot_gm: fx.GraphModule, _: Sequence[Any]) -> Compiled:
        return make_boxed_func(aot_gm.forward)

    def infer(aot_gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        optimize(aot_gm)
        return as_is(aot_gm, inputs)

    def partition(joint_gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        optimize(joint_gm)
        return split(joint_gm, inputs, **kwargs)

    split = min_cut_rematerialization_partition
    if watch is not None:
        split = functools.partial(watch.partition, split)
    compiler = aot_autograd(
        fw_compiler=as_is,
        bw_compiler=as_is,
        inference_compiler=infer,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return compiler(gm, list(example_inputs))


# ---- inductor -----------------------------------------------------------------------------------------------------------
class _InductorPass(CustomGraphPass):
    """A step in the shape that Inductor calls and keys its caches on."""

    def __init__(self, step: Callable[[fx.GraphModule], None], key: str) -> None:
        self.step, self.key = step, key

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        self.step(gm)

    def uuid(self) -> str:
        return self.key


def _inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    steps: Steps,
    digest: str,
    coverage: Coverage,
) -> Compiled:
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.output_code import CompiledFxGraph

    patches: dict[str, Any] = dict(torch._inductor.list_mode_options(settings.mode or "default"))
    patches["triton.cudagraphs"] = settings.cuda_graphs
    if not settings.reuses_buffers:
        patches |= {"allow_buffer_reuse": False, "inplace_buffers": False}
    if settings.keeps_roundings:
        patches["emulate_precision_casts"] = True
    if steps:
        ours = [_InductorPass(step, f"fxamp:{key}:{digest}") for step, key in steps]
        patches["joint_custom_pre_pass"] = _chained(ours, inductor_config.joint_custom_pre_pass)
    if settings.watch is not None:
        theirs = inductor_config.custom_partitioner_fn
        split = min_cut_rematerialization_partition if theirs is None else theirs
        key = repr((digest, passes.file_hash(inspect.getfile(Watch)), theirs and theirs.uuid()))
        patches["custom_partitioner_fn"] = _WatchedPartition(functools.partial(settings.watch.partition, split), key)
    observe = _Observer(coverage, settings.require_cuda_graphs) if settings.cuda_graphs else contextlib.nullcontext()

    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        with observe, _tf32_if_asked(settings):  # a backward may be compiled late
            code = compile_fx_inner(*args, **kwargs)
        if settings.tf32:
            assert isinstance(code, CompiledFxGraph)
            assert code.current_callable is not None
            code.current_callable = tf32.around(code.current_callable)
        return code

    # A hit in AOTAutograd's cache would hand out the code without the switch around it. Inductor's own cache still hits.
    caches = functorch_config.patch(enable_autograd_cache=False) if settings.tf32 else contextlib.nullcontext()
    # Passes over joint graphs ask for the switch too: padding is timed, and attention is fused, for products as they will be.
    with observe, caches, _tf32_if_asked(settings):  # a hit in that cache is no compilation
        run = compile_fx(gm, list(example_inputs), inner_compile=inner_compile, config_patches=patches)
        return cast(Compiled, run)


def _tf32_if_asked(settings: Settings) -> contextlib.AbstractContextManager[None]:
    return tf32.enabled() if settings.tf32 else contextlib.nullcontext()


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------------
class _Observer:
    """While it is entered, notes which graphs Inductor lets replay as CUDA graphs, whether they are compiled or come from a
    cache, and from then on which of them it leaves after all. May be entered again inside of itself.

    Raises, with `is_required`: CudaGraphsUnavailable for each that does not replay.
    """

    def __init__(self, coverage: Coverage, is_required: bool) -> None:
        self.coverage, self.is_required = coverage, is_required
        self._depth = 0
        self._patched = contextlib.ExitStack()
        self._between: list[tuple[str, str]] = []
        """(reason, the user's line) of what cannot be captured in the graph that is being compiled."""

    def __enter__(self) -> None:
        from torch._inductor.output_code import CompiledFxGraph
        from torch._inductor.scheduler import Scheduler

        self._depth += 1
        if self._depth > 1:
            return
        finish, split = CompiledFxGraph.post_compile, Scheduler._log_graph_partitions

        def post_compile(code: CompiledFxGraph, examples: Any, constants: Any, graph_kwargs: Any) -> None:
            finish(code, examples, constants, graph_kwargs)
            self._finished(code, graph_kwargs)

        def log_graph_partitions(scheduler: Any, partitions: Any, signatures: Any) -> None:
            self._between = list(dict.fromkeys(_obstacles(scheduler, partitions, signatures)))
            split(scheduler, partitions, signatures)

        self._patched.enter_context(mock.patch.object(CompiledFxGraph, "post_compile", post_compile))
        self._patched.enter_context(mock.patch.object(Scheduler, "_log_graph_partitions", log_graph_partitions))

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._patched.close()

    def _finished(self, code: Any, graph_kwargs: Any) -> None:
        phase: Phase = "backward" if graph_kwargs["is_backward"] else "forward"
        between, self._between = self._between, []
        replay = _replay(code, phase, bool(graph_kwargs["cudagraphs"]), between)
        self._note(replay)
        if replay.is_captured:
            code.current_callable = self._watched(code, phase)

    def _note(self, replay: Replay) -> None:
        self.coverage.add(replay)
        if self.is_required and not replay.is_captured:
            raise errors.CudaGraphsUnavailable(
                f"cuda_graphs='require', and the {replay.phase} of a graph is not captured: {replay.reason}",
                where=replay.where or None,
                way_out="Change what it cannot hold, or use cuda_graphs='auto'",
            )

    def _watched(self, code: Any, phase: Phase) -> Compiled:
        """A compiled graph that notes when Inductor, which decides some things as it runs, does not replay it after all."""
        from torch._dynamo.utils import counters

        run, skips = code.current_callable, counters["inductor"]

        def call(*args: Any, **kwargs: Any) -> Any:
            before = skips["cudagraph_skips"]
            outputs = run(*args, **kwargs)
            if skips["cudagraph_skips"] > before:
                self._note(self.coverage.lose(phase, _reason_while_running(code)))
            return outputs

        return call


def _replay(code: Any, phase: Phase, is_on: bool, between: Sequence[tuple[str, str]]) -> Replay:
    """What Inductor decided of a compiled graph. `between`: what it leaves out of its CUDA graphs, and why."""
    if is_on:
        reason, where = between[0] if between else ("", "")
        pieces = len(code.partition_maps or ()) or 1
        if pieces > 1 and not reason:
            reason = "operations in between cannot be (compiled code from a cache does not say which)"
        return Replay(phase=phase, is_captured=True, num_pieces=pieces, reason=reason, where=where)
    info = code.cudagraph_info
    message = code.disabled_cudagraphs_reason or ", ".join([] if info is None else info.cudagraph_fail_reasons)
    if message:
        reason, where = explained(message)
    elif phase == "backward" and info is None:
        reason, where = "its forward is not captured", ""
    elif between:
        reason, where = between[0]
    else:
        reason, where = "nothing in it computes on the device", ""
    return Replay(phase=phase, is_captured=False, reason=reason, where=where)


def _obstacles(scheduler: Any, partitions: Sequence[Any], signatures: Sequence[Any]) -> Generator[tuple[str, str]]:
    """(reason, the user's line) of the operations that Inductor's scheduler keeps out of CUDA graphs."""
    for partition, signature in zip(partitions, signatures, strict=True):
        for node in partition if signature.skip_cudagraph else ():
            reason = scheduler.should_partition(node)
            computed = [part.node for part in node.get_nodes() if part.node is not None]
            origins = [origin for ir_node in computed for origin in ir_node.origins]
            lines = (capture.source_line(origin)[0] for origin in origins)
            if reason:
                yield str(reason), next(filter(None, lines), "")


def _reason_while_running(code: Any) -> str:
    from torch._inductor.cudagraph_utils import get_mutation_stack_trace

    static = set(code.fx_kwargs.get("static_input_idxs") or ())
    written = [i for i in code.mutated_input_idxs if i not in static]
    if written and code.cudagraph_info is not None:
        return get_mutation_stack_trace(code.cudagraph_info.placeholders, written)
    return "its inputs move so often that Inductor gave up recording it anew"


class _WatchedPartition(CustomPartitionerFn):
    """A partitioner in the shape that Inductor calls and keys its caches on."""

    def __init__(self, split: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], key: str) -> None:
        self.split, self.key = split, key

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.split(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self.key


def _chained(steps: list[_InductorPass], theirs: Any) -> Any:
    """Our passes, then those that the user has set in Inductor's config."""
    if _TAKES_TUPLES:
        return (*steps, *custom_graph_pass.get_custom_graph_passes(theirs))

    def all_of_them(gm: fx.GraphModule) -> None:
        for step in steps:
            step(gm.graph)
        if theirs is not None:
            theirs(gm.graph)

    keys = [step.uuid() for step in steps]
    return _InductorPass(all_of_them, repr([*keys, theirs.uuid() if isinstance(theirs, CustomGraphPass) else theirs]))
