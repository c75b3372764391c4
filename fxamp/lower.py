"""Rewritten graph -> Program. The only caller of Inductor and AOTAutograd, and the only place that touches torch's config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch._functorch.config as functorch_config
import torch._inductor
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from fxamp import errors, graph, joint, legal, passes, tf32
from fxamp.joint.record import JointRecord
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
    joint_passes: bool = True
    """False compiles the graph as if fxamp were not there."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled graph, and what its joint passes saw."""

    run: Compiled
    record: JointRecord


def lower(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, digest: str) -> Program:
    """Compiles a graph.

    `digest` says everything that decided the graph; it becomes part of the keys of PyTorch's caches, which ignore meta.
    Raises: StageFailed if a pass of fxamp fails; whatever Inductor raises otherwise.
    """
    chosen = (*joint.repairs(keeps_roundings=settings.keeps_roundings), *joint.EXACT)
    record = JointRecord(path=_record_path(digest) if settings.lower == "inductor" else None, passes=chosen)
    if settings.lower == "eager":
        _check_runs_eagerly(gm)
        return Program(run=gm.forward, record=record)
    # Contract 5: the casts in the forward are the user's program now, and the backward follows from them alone.
    with functorch_config.patch(backward_pass_autocast="off"):
        if settings.lower == "aot_eager":
            run = _aot_eager(gm, example_inputs, settings, record)
        else:
            run = _inductor(gm, example_inputs, settings, record, digest)
    return Program(run=run, record=record)


def _check_runs_eagerly(gm: fx.GraphModule) -> None:
    if torch.is_grad_enabled() and any(node.target is torch.ops.higher_order.invoke_subgraph for node in gm.graph.nodes):
        raise errors.InvalidOption(
            "lower='eager' cannot train a nested_compile_region: PyTorch would raise in the backward",
            way_out="Use lower='aot_eager'",
        )


# ---- the joint passes ---------------------------------------------------------------------------------------------------
class _Begin:
    """Takes the picture before the first pass, and starts the checks against it."""

    def __init__(self, record: JointRecord) -> None:
        self.record = record

    def __call__(self, gm: fx.GraphModule) -> None:
        self.record.before = graph.clone(gm)
        self.record.after, self.record.changes, self.record.from_cache = None, (), False


class _Step:
    """One pass, run and checked."""

    def __init__(self, record: JointRecord, pass_: Pass) -> None:
        self.record, self.pass_ = record, pass_

    def __call__(self, gm: fx.GraphModule) -> None:
        assert self.record.before is not None
        check = legal.checker(legal.JOINT, self.record.before)
        self.record.changes += passes.run(gm, (self.pass_,), check)


class _End:
    """Takes the picture after the last pass, and keeps both for warm starts."""

    def __init__(self, record: JointRecord) -> None:
        self.record = record

    def __call__(self, gm: fx.GraphModule) -> None:
        self.record.after = graph.clone(gm)
        self.record.save()


def _joint_steps(record: JointRecord) -> list[tuple[Callable[[fx.GraphModule], None], str]]:
    """(step, cache key) for everything that runs on the joint graph, in order."""
    steps = [(_Step(record, p), passes.key(p)) for p in record.passes]
    return [(_Begin(record), "begin"), *steps, (_End(record), "end")]


# ---- aot_eager ----------------------------------------------------------------------------------------------------------
def _aot_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, record: JointRecord
) -> Compiled:
    """AOTAutograd, the same decompositions and the same joint passes as under Inductor, then the graphs as they are."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def optimize(joint_gm: fx.GraphModule) -> None:
        if not settings.joint_passes:
            return
        for step, _ in _joint_steps(record):
            step(joint_gm)
        joint_gm.recompile()

    def as_is(aot_gm: fx.GraphModule, _: Sequence[Any]) -> Compiled:
        return make_boxed_func(aot_gm.forward)

    def infer(aot_gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        optimize(aot_gm)
        return as_is(aot_gm, inputs)

    def partition(joint_gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        optimize(joint_gm)
        return min_cut_rematerialization_partition(joint_gm, inputs, **kwargs)

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
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, record: JointRecord, digest: str
) -> Compiled:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.output_code import CompiledFxGraph

    patches: dict[str, Any] = dict(torch._inductor.list_mode_options(settings.mode or "default"))
    patches["triton.cudagraphs"] = settings.cuda_graphs
    if settings.require_cuda_graphs:
        patches["triton.cudagraph_or_error"] = True
    if settings.keeps_roundings:
        patches["emulate_precision_casts"] = True
    steps = [_InductorPass(step, f"fxamp:{key}:{digest}") for step, key in _joint_steps(record)]
    theirs = inductor_config.joint_custom_pre_pass
    patches["joint_custom_pre_pass"] = _chained(steps, theirs)
    if not settings.joint_passes:
        del patches["joint_custom_pre_pass"]
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


def _record_path(digest: str) -> Path | None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if inductor_config.force_disable_caches or not functorch_config.enable_autograd_cache:
        return None
    return Path(cache_dir()) / "fxamp" / digest[:2] / f"{digest}.joint"
