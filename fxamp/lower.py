"""Rewritten graph -> Program. The only caller of Inductor and AOTAutograd, and the only place that touches torch's config."""

from __future__ import annotations

import contextlib
import functools
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
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.nn.attention import sdpa_kernel

from fxamp import errors, graph, joint, legal, ops, passes, tf32
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
    joint_passes: bool = True
    """False compiles the graph as if fxamp were not there."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled graph, and what its joint passes saw."""

    run: Compiled
    record: JointRecord


def lower(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, digest: str) -> Program:
    """Compiles a graph.

    `gm` is kept, without Dynamo's references to real inputs; compiled is a copy, which the compilers edit. `digest` says
    everything that decided the graph; it becomes part of the keys of PyTorch's caches, which ignore meta.
    Raises: StageFailed if a pass of fxamp fails; whatever Inductor raises otherwise.
    """
    if settings.lower == "eager":
        _check_runs_eagerly(gm)
        return Program(run=graph.forget_inputs(gm).forward, record=JointRecord())
    compiled = graph.clone(gm)
    record = JointRecord(trace=_Retrace(graph.forget_inputs(gm), settings, digest))
    run = _compile(compiled, example_inputs, settings, _joint_steps(settings, record), digest)
    return Program(run=run, record=record)


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, steps: Steps, digest: str
) -> Compiled:
    # Contract 5: the casts in the forward are the user's program now, and the backward follows from them alone.
    early = _early_backward() if settings.compiles_backward else contextlib.nullcontext()
    with functorch_config.patch(backward_pass_autocast="off"), early:
        if settings.lower == "aot_eager":
            return _aot_eager(gm, example_inputs, steps, settings.watch)
        return _inductor(gm, example_inputs, settings, steps, digest)


@contextlib.contextmanager
def _early_backward() -> Generator[None]:
    """Compiles the backward with the forward, such that it may be run twice: `_patches.EARLY_BACKWARD`."""
    nothing = mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[])
    with functorch_config.patch(force_non_lazy_backward_lowering=True), nothing:
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
def _aot_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], steps: Steps, watch: Watch | None
) -> Compiled:
    """AOTAutograd, the same decompositions and the same joint passes as under Inductor, then the graphs as they are."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

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
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, steps: Steps, digest: str
) -> Compiled:
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.output_code import CompiledFxGraph

    patches: dict[str, Any] = dict(torch._inductor.list_mode_options(settings.mode or "default"))
    patches["triton.cudagraphs"] = settings.cuda_graphs
    if settings.require_cuda_graphs:
        patches["triton.cudagraph_or_error"] = True
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
    if not settings.tf32:
        return cast(Compiled, compile_fx(gm, list(example_inputs), config_patches=patches))

    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        with tf32.enabled():
            code = compile_fx_inner(*args, **kwargs)
        assert isinstance(code, CompiledFxGraph)
        assert code.current_callable is not None
        code.current_callable = tf32.around(code.current_callable)
        return code

    # A hit in AOTAutograd's cache would hand out the code without the switch around it. Inductor's own cache still hits.
    with functorch_config.patch(enable_autograd_cache=False):
        run = compile_fx(gm, list(example_inputs), inner_compile=inner_compile, config_patches=patches)
        return cast(Compiled, run)


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
