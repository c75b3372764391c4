"""Every operation of PyTorch's operator database, done to a gradient: scaled or not, what comes out is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxamp.joint import linearity
from fxamp.joint.scale import TRUE, Factors, Gradients

SCALE = 2.0**8
NUM_SAMPLES = 4
RANDOM = ("normal", "rand", "uniform", "cauchy", "exponential", "geometric", "bernoulli", "multinomial", "dropout", "lowrank")
OTHERS = (
    "jiterator",  # of CUDA
    "linear_cross_entropy",  # an operation of its own, not aten's
    "matrix_power", "cosine_embedding_loss", "multi_head_attention_forward", "scaled_dot_product_attention",  # write in place
    "pad circular",  # here too
    "empty", "rrelu",  # hold anything
    "fractional_max_pool",  # draws
)  # fmt: skip


def samples(info: Any) -> Iterator[tuple[Callable[..., Any], list[Tensor]]]:
    """(function of tensors, tensors); the first one is the gradient."""
    for sample in list(info.sample_inputs("cpu", torch.float32, requires_grad=False))[:NUM_SAMPLES]:
        first = sample.input
        if not isinstance(first, Tensor) or first.dtype != torch.float32 or not first.numel():
            continue
        leaves, spec = tree_flatten((sample.args, sample.kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

        def apply(x: Tensor, *tensors: Tensor, leaves: Any = leaves, spec: Any = spec, places: Any = places) -> Any:
            given = list(leaves)
            for i, tensor in zip(places, tensors, strict=True):
                given[i] = tensor
            args, kwargs = tree_unflatten(given, spec)
            return info.op(x.clone(), *args, **kwargs)

        yield apply, [first.detach().clone(), *(leaves[i].detach().clone() for i in places)]


def scaled(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph of (gradient, scale, others), which takes a scaled gradient for it."""
    gradient, scale, *_ = gm.graph.find_nodes(op="placeholder")
    (output,) = gm.graph.find_nodes(op="output")
    before = next(iter(gradient.users), output)
    gradients = Gradients([gradient], Factors(scale, per_region=False, before=before))
    gradients.walk(gm)
    results, spec = tree_flatten(output.args[0])
    known = gradients._region
    brought = [gradients.brought(x, TRUE, before=output) if isinstance(x, fx.Node) and x in known else x for x in results]
    output.args = (tree_unflatten(brought, spec),)
    gm.recompile()
    return gm


def tensors_of(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.layout == torch.strided]


def close(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() or a.is_complex():
        return torch.allclose(a.to(torch.complex128), b.to(torch.complex128), rtol=1e-3, atol=1e-4, equal_nan=True)
    return torch.equal(a, b)


def wrong(info: Any, table: Any) -> bool:
    """Does any sample come out differently?"""
    for apply, given in samples(info):
        try:
            want = tensors_of(apply(*given))
            if not all(map(close, want, tensors_of(apply(*given)))):
                continue  # it draws
            traced = make_fx(
                torch.func.functionalize(lambda x, _, *rest, apply=apply: apply(x, *rest), remove="mutations"),
                decomposition_table=table,
                tracing_mode="fake",
            )(given[0], torch.tensor(SCALE), *given[1:])
        except Exception:  # what cannot be traced is in no joint graph
            continue
        got = tensors_of(scaled(traced)(given[0], torch.tensor(SCALE), *given[1:]))
        if len(got) != len(want) or not all(map(close, got, want)):
            return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_operations_on_a_gradient_see_the_true_one_where_it_matters(decomposed: bool, step: int):
    table = select_decomp_table() if decomposed else {}
    infos = [
        info
        for info in op_db
        if torch.float32 in info.dtypes
        and not any(name in f"{info.name} {info.variant_test_name}" for name in (*RANDOM, *OTHERS))
    ]
    assert [f"{info.name} {info.variant_test_name}" for info in infos[::step] if wrong(info, table)] == []


def test_lists_and_composites_are_not_taken_for_linear():
    """Operations that the database does not hold."""
    graph = fx.Graph()
    gradient = graph.placeholder("g")
    for target in (
        torch.ops.aten._foreach_clamp_max.Scalar, torch.ops.aten._foreach_sqrt.default, torch.ops.aten._foreach_add.Scalar,
    ):  # fmt: skip
        node = graph.call_function(target, ([gradient], 0.5) if target._schema.arguments[1:] else ([gradient],))
        assert linearity.is_not_linear(node, {gradient}), target
