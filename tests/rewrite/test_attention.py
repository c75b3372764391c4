"""Attention that falls to PyTorch's decomposition runs its products low; attention that does not is left alone."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp import capture, graph, ops, plan, rewrite
from fxamp.policy import Policy
from fxamp.rewrite.attention import LowAttention
from tests.programs import planned, pull, relative_error, rewritten

Program = Callable[..., Tensor]
MATH = SDPBackend.MATH


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def qkv(*shape: int) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def steps(fn: Program, inputs: list[Any], **compile_options: Any) -> list[Tensor]:
    """[output, gradients of the inputs] of a compiled step."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    torch._dynamo.reset()
    out = torch.compile(fn, **compile_options)(*leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    cotangent = torch.arange(out.numel(), device=out.device).cos().view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, wanted, cotangent)]


def products(amp: fxamp.Amp) -> list[tuple[str, bool]]:
    """(format of the operands, is it in the backward?) for each batched product of the joint graph."""
    (record,) = amp.graphs
    joint = next(iter(record.variants.values())).joint
    found = [n for n in joint.graph.nodes if n.target is torch.ops.aten.bmm.default]
    return [
        (str(graph.value_of(n.args[0]).dtype), n.meta.get("partitioner_tag") == "is_backward" or _is_behind_tangents(n))
        for n in found
    ]


def _is_behind_tangents(node: torch.fx.Node) -> bool:
    seen, todo = set[torch.fx.Node](), [node]
    while todo:
        x = todo.pop()
        todo += [y for y in x.all_input_nodes if y not in seen]
        seen.add(x)
    return any("tangents" in str(x.target) for x in seen)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_backward_of_the_decomposition_has_no_fp32_product(precision):
    amp = fxamp.Amp(precision=precision, scaling=None, lower="aot_eager")
    with sdpa_kernel(MATH):
        steps(attend, qkv(2, 2, 8, 4), backend=amp)
    low = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert sorted(products(amp)) == sorted([("torch.float32", False), (low, False), *[(low, True)] * 4])


def test_autocast_runs_the_same_forward_in_fp32():
    """What this module is for. Where this fails, PyTorch's own decomposition has become low, and ours can go."""
    seen: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        from functorch.compile import make_boxed_func

        seen.append(gm)
        return make_boxed_func(gm.forward)

    from torch._dynamo.backends.common import aot_autograd

    with sdpa_kernel(MATH), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(attend, backend=aot_autograd(fw_compiler=keep))(*qkv(2, 2, 8, 4))
    bmms = [n for n in seen[0].graph.nodes if n.target is torch.ops.aten.bmm.default]
    assert [n.meta["val"].dtype for n in bmms] == [torch.float32] * 2


def test_a_fused_kernel_is_called_as_before():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    got = steps(attend, qkv(2, 2, 8, 4), backend=amp)
    assert products(amp) == []
    (record,) = amp.graphs
    targets = {str(n.target) for n in record.variants["bf16"].joint.graph.nodes}
    assert any("flash" in t for t in targets)
    assert len(got) == 4


def test_operands_whose_strides_keep_fused_kernels_away_are_laid_out_anew():
    def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.mT, k.mT, v.mT)

    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    steps(transposed, qkv(2, 2, 4, 8), backend=amp)
    assert products(amp) == []


def test_what_is_repeated_stays_repeated():
    mask = torch.ones(2, 1, 1, 1, dtype=torch.bool).expand(2, 3, 8, 8)
    dense = ops._with_dense_rows(mask)
    assert dense.stride() == (8, 0, 0, 1)
    assert torch.equal(dense, mask)
    assert ops._with_dense_rows(dense) is dense


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_without_a_low_format_nothing_changes(precision):
    gm = rewritten(attend, *qkv(2, 2, 8, 4), variant=precision)
    assert not any(n.target is ops.ATTENTION for n in gm.graph.nodes)


def test_rewriting_again_changes_nothing():
    captured, made = planned(attend, *qkv(2, 2, 8, 4))
    gm = graph.clone(captured.gm)
    first = [pass_(gm) for pass_ in rewrite.passes_for(captured, made)]
    assert first[-1].num_marked == 1
    code = gm.code
    assert LowAttention(made)(gm).num_marked == 0
    assert gm.code == code
    captured = capture.capture(gm, [graph.value_of(n) for n in gm.graph.find_nodes(op="placeholder")])
    made = plan.plan(captured, Policy(), variant="bf16")
    for pass_ in rewrite.passes_for(captured, made):
        pass_(gm)
    assert gm.code == code


def test_attention_inside_a_transform_is_kept():
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.vmap(attend)(q, k, v)

    captured, made = planned(fn, *qkv(2, 2, 8, 4))
    gm = graph.clone(captured.gm)
    changes = [pass_(gm) for pass_ in rewrite.passes_for(captured, made)]
    assert not any(n.target is ops.ATTENTION for n in gm.graph.nodes)
    assert all("transform" in kept.reason for change in changes for kept in change.kept)


def test_the_user_may_turn_it_off_by_rule():
    gm = rewritten(attend, *qkv(2, 2, 8, 4), policy={"scaled_dot_product_attention": "fp32"})
    assert not any(n.target is ops.ATTENTION for n in gm.graph.nodes)


class Biased(nn.Module):
    """Attention with a learnt bias and padding, which leave PyTorch no fused kernel for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.bias = nn.Linear(32, 96), nn.Linear(32, 32), nn.Parameter(torch.randn(2, 24, 24))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (2 * self.qkv(x)).view(2, 24, 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, self.bias.masked_fill(~keep, -torch.inf))
        return self.out(y.transpose(1, 2).reshape(2, 24, 32))


def model_step(model: nn.Module, x: Tensor, keep: Tensor, **compile_options: Any) -> list[Tensor]:
    """[output, gradients of x and of the parameters]."""
    torch._dynamo.reset()
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    out = torch.compile(model, **compile_options)(x, keep)
    pull(out)
    return [out.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_error_beside_autocast(lower):
    """One model, compiled under autocast and by fxamp, against float64, over three seeds."""
    sums = torch.zeros(2, 7, dtype=torch.float64)
    for seed in range(3):
        torch.manual_seed(seed)
        model, x, keep = Biased(), torch.randn(2, 24, 32), torch.rand(2, 1, 1, 24) < 0.8
        with sdpa_kernel(MATH):
            want = model_step(model.double(), x.double(), keep, backend="eager")
            ours = model_step(model.float(), x, keep, backend=fxamp.Amp(precision="bf16", lower=lower))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                theirs = model_step(model, x, keep, backend=lower)
        sums += torch.tensor([[relative_error(g, w) for g, w in zip(got, want, strict=True)] for got in (ours, theirs)])
    assert (sums[0] < 1.1 * sums[1]).all(), sums


def test_the_mask_of_dropout_is_pytorchs():
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    inputs = qkv(2, 2, 8, 4)
    found = []
    for precision in ("bf16", "fp32"):
        torch.manual_seed(5)
        found.append(steps(fn, inputs, backend=fxamp.Amp(precision=precision, lower="aot_eager")))
    for got, want in zip(*found, strict=True):
        assert relative_error(got, want) < 0.02


def test_differentiating_twice():
    """lower='eager' leaves autograd to eager execution, where a second derivative works without fxamp too."""
    q, k, v = qkv(1, 2, 4, 4)

    def second(fn: Program) -> Tensor:
        (first,) = torch.autograd.grad(fn(q, k, v).square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    with sdpa_kernel(MATH):
        got = second(torch.compile(attend, backend=fxamp.Amp(precision="bf16", lower="eager")))
        assert relative_error(got, second(attend)) < 0.05


def test_symbolic_shapes():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    with sdpa_kernel(MATH), warnings.catch_warnings():
        compiled = torch.compile(attend, backend=amp, dynamic=True)
        for length in (5, 7):
            q, k, v = qkv(2, 2, length, 4)
            assert relative_error(compiled(q, k, v), attend(q, k, v)) < 0.02
    assert len(amp.graphs) == 1
    assert ("torch.bfloat16", True) in products(amp)


@pytest.mark.parametrize("body", ["checkpoint", "cond"])
def test_attention_in_a_nested_graph(body):
    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(attend, q, k, v, use_reentrant=False)

    def conditional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cond(q.sum() > -1e9, lambda q, k, v: attend(q, k, v) + 1, lambda q, k, v: q * 2 + k + v, (q, k, v))

    fn, inputs = {"checkpoint": checkpointed, "cond": conditional}[body], qkv(2, 2, 8, 4)
    with sdpa_kernel(MATH):
        amp = fxamp.Amp(precision="bf16", lower="aot_eager")
        for got, want in zip(steps(fn, inputs, backend=amp), steps(fn, inputs, backend="eager"), strict=True):
            assert relative_error(got, want) < 0.02
    (record,) = amp.graphs
    parts = graph.all_of(record.variants["bf16"].dynamo)
    assert any(n.target is ops.ATTENTION for part in parts for n in part.graph.nodes)


def test_inductor_and_the_caches_take_it():
    inputs = qkv(2, 2, 8, 4)
    with sdpa_kernel(MATH):
        want = steps(attend, inputs, backend="eager")
        for hits in (0, 1):
            counters.clear()
            for got, exactly in zip(steps(attend, inputs, backend=fxamp.Amp(precision="bf16")), want, strict=True):
                assert relative_error(got, exactly) < 0.02
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
    steps(attend, inputs, backend=fxamp.Amp(precision="bf16"))  # other kernels are allowed: another graph
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


# ---- grouped queries -------------------------------------------------------------------------------------------------------
def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("kernels", [[SDPBackend.FLASH_ATTENTION, MATH], [MATH]], ids=["fused", "products"])
@pytest.mark.parametrize("masked", ["no", "causal", "bool", "float"])
def test_grouped_queries_are_low_and_as_exact_as_a_fused_kernel(kernels: list[SDPBackend], masked: str):
    """Eight heads of queries share two of keys and values: the gradients of those are sums over four."""
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(2, heads, 12, 8, generator=generator, requires_grad=True) for heads in (8, 2, 2)]
    kept = torch.rand(12, 12, generator=generator) < 0.7
    mask = {"bool": kept, "float": torch.zeros(12, 12).masked_fill(~kept, -torch.inf)}.get(masked)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped(q, k, v, mask, masked == "causal")

    def of(inputs: list[Tensor], run: Program, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = run(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.arange(out.numel()).cos().view(out.shape).to(out.dtype))]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped(q, k, v, mask.double() if mask is not None and masked == "float" else mask, masked == "causal")

    with sdpa_kernel(MATH):
        want = of(inputs, exact, torch.float64)
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    torch._dynamo.reset()
    with sdpa_kernel(kernels):
        got = of(inputs, torch.compile(program, backend=amp), torch.float32)

    def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return program(q, k, v)

    peer = of(inputs, under_autocast, torch.float32)
    assert {g.dtype for g in got} == {torch.float32}
    ratios = [relative_error(g, w) / relative_error(p, w) for g, p, w in zip(got, peer, want, strict=True)]
    # The same kernel; or products, whose errors are 0.8 to 1.2 times a fused kernel's on average over draws, grouped or not.
    assert math.prod(ratios) ** (1 / len(ratios)) <= (1.02 if len(kernels) > 1 else 1.3)
    assert min(relative_error(g, w) for g, w in zip(got, want, strict=True)) > 1e-4
    joint = amp.graphs[0].variants["bf16"].joint
    heavy = [n for n in joint.graph.nodes if "attention" in str(n.target) or n.target is torch.ops.aten.bmm.default]
    low = [n for n in heavy if graph.value_of(n.args[1]).dtype == torch.bfloat16]
    assert len(low) >= (2 if len(kernels) > 1 else 5)  # of the products, that of the scores alone has fp32 operands on a CPU
