"""What a model moves because of its formats, read off its joint graphs: casts, and what is saved for the backward.

fxamp and autocast are measured alike: on the graph that AOTAutograd hands to its partitioner, with Inductor's decompositions,
after the partitioner's own elimination of dead and of common subexpressions. Counted is every conversion between two float
formats, whoever wrote it (fxamp, autocast, autograd, a decomposition, the user): read once, written once, as if it were a
kernel of its own. Nothing is generated and nothing is timed, so a model of any size that runs once can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import functorch.compile
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from bench.measure import count_casts
from fxamp import Amp, graph

Step = Callable[[Callable[..., Any]], object]
"""Calls a compiled model as a user would, backward included where it trains."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Sums over all graphs of a model."""

    num_graphs: int = 0
    num_casts: int = 0
    """Conversions between float formats."""
    cast_bytes: int = 0
    """What they read and write."""
    saved_bytes: int = 0
    """What lives from the forward to the backward beyond the inputs of the graphs: memory counts once, views of it do not."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def of_autocast(model: nn.Module, step: Step, dtype: torch.dtype = torch.bfloat16, device_type: str = "cpu") -> Traffic:
    """Traffic of `torch.compile` under autocast. `step(compiled)` runs inside the region, as users write it."""
    compiler = aot_autograd(
        fw_compiler=_as_it_is,
        bw_compiler=_as_it_is,
        inference_compiler=_infer,
        partition_fn=lambda *args, **kwargs: functorch.compile.min_cut_rematerialization_partition(*args, **kwargs),
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with _observed() as found, torch.autocast(device_type, dtype=dtype):
        step(_fresh(model, compiler))
    return sum(found, Traffic())


def of_fxamp(model: nn.Module, step: Step, **options: Any) -> Traffic:
    """Traffic of `torch.compile(model, backend=fxamp.Amp(**options))`. `options` leave `lower` out."""
    amp = Amp(lower="aot_eager", **options)
    with _observed() as found:
        step(_fresh(model, amp))
    trained = sum(record.trains for record in amp.graphs)
    inferred = [v.joint for record in amp.graphs if not record.trains for v in record.variants.values()]
    assert trained == len(found), f"{trained} graphs train, {len(found)} were partitioned"
    return sum((*found, *map(traffic, inferred)), Traffic())


def traffic(joint: fx.GraphModule, saved_bytes: int = 0) -> Traffic:
    """Traffic of one joint graph (or of a graph for inference), which is left as it is."""
    copy = graph.clone(joint).graph
    copy.eliminate_dead_code()
    casts = count_casts(fx_graph_cse(copy))
    return Traffic(num_graphs=1, num_casts=casts.num_casts, cast_bytes=casts.num_bytes, saved_bytes=saved_bytes)


def saved_bytes(forward: fx.GraphModule, num_fwd_outputs: int) -> int:
    """Bytes of the memory that a forward graph leaves to its backward and that no input of the graph holds anyway."""
    held = {key for node in forward.graph.find_nodes(op="placeholder") for key in graph.storages(node)}
    output = forward.graph.output_node()
    sizes: dict[Hashable, int] = {}
    for node in list(output.args[0])[num_fwd_outputs:]:  # pyright: ignore[reportArgumentType, reportCallIssue]
        tensors = graph.tensors_of(graph.value_of(node)) if isinstance(node, fx.Node) else []
        for tensor in tensors:
            (key,) = graph.storages(node)
            if key not in held:
                sizes[key] = max(sizes.get(key, 0), graph.numel(tensor) * tensor.element_size())
    return sum(sizes.values())


# ---- how it is observed -------------------------------------------------------------------------------------------------
@contextmanager
def _observed() -> Iterator[list[Traffic]]:
    """Collects the traffic of every joint graph that is partitioned, or that AOTAutograd compiles for inference."""
    found: list[Traffic] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        whole = traffic(joint)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        found.append(whole + Traffic(saved_bytes=saved_bytes(forward, kwargs["num_fwd_outputs"])))
        return forward, backward

    with (
        mock.patch("functorch.compile.min_cut_rematerialization_partition", partition),
        mock.patch(f"{__name__}._seen_in_inference", lambda gm: found.append(traffic(gm))),
    ):
        yield found


def _seen_in_inference(gm: fx.GraphModule) -> None:
    """Replaced while somebody observes."""


def _infer(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    _seen_in_inference(gm)
    return make_boxed_func(gm.forward)


def _as_it_is(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return make_boxed_func(gm.forward)


def _fresh(model: nn.Module, backend: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend)
