from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import fxamp
from fxamp import _patches, formats, graph, optable
from fxamp.capture import name_of
from fxamp.rewrite.composites import SeeIntoComposites
from tests.programs import Fn, captured_of, everything, graph_of, pull, relative_error, step

x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))


def mha(**options):
    return Fn(lambda m, a: m.mha(a, a, a, **options), mha=nn.MultiheadAttention(8, 2, batch_first=True))


def written_weights(m, a):
    y, w = m.mha(a, a, a)
    w.mul_(2.0)
    return y, w


PROGRAMS = {
    "attention": lambda: mha(),
    "attention, masked, without weights": lambda: mha(attn_mask=mask, is_causal=True, need_weights=False),
    "attention, padded": lambda: mha(key_padding_mask=torch.tensor([[False, False, False, True]] * 3)),
    "attention, dropout": lambda: Fn(lambda m, a: m.mha(a, a, a), mha=nn.MultiheadAttention(8, 2, dropout=0.5)),
    "attention, own keys": lambda: Fn(
        lambda m, a: m.mha(a, a[..., :6], a[..., :4]), mha=nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True)
    ),
    "attention, weights written": lambda: Fn(written_weights, mha=nn.MultiheadAttention(8, 2)),
    "tensordot": lambda: Fn(lambda m, a: torch.tensordot(a, m.w, dims=1), w=nn.Parameter(torch.randn(8, 5))),
    "inner": lambda: Fn(lambda m, a: torch.inner(a, m.w), w=nn.Parameter(torch.randn(5, 8))),
    "decoder": lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
}


def run(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Results, and gradients of all inputs that want one, from eager."""
    torch.manual_seed(0)
    results = [t for t in tree_leaves(gm(*inputs)) if isinstance(t, torch.Tensor)]
    leaves = [t for t in inputs if t.requires_grad]
    cotangents = [t.detach().sin() for t in results]
    return [*results, *torch.autograd.grad(results, leaves, cotangents, allow_unused=True)]


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_parts_compute_what_the_whole_did_bit_for_bit(name: str):
    gm, inputs = graph_of((lambda m: (lambda *a: m(*a)) if name == "decoder" else m)(PROGRAMS[name]()), *inputs_of(name))
    seen = graph.clone(gm)
    change = SeeIntoComposites()(seen)
    assert change.num_removed >= 1
    assert not change.kept
    assert not any(name_of(node) in optable.SEEN_INTO for node in seen.graph.nodes)
    for got, want in zip(run(seen, inputs), run(gm, inputs), strict=True):
        assert (got is None) == (want is None)
        assert got is None or want is None or torch.equal(got, want)


def inputs_of(name: str) -> tuple[torch.Tensor, ...]:
    return (x, x.flip(0)) if name == "decoder" else (x,)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_values_are_those_that_the_parts_compute(name: str):
    captured = captured_of(PROGRAMS[name](), *inputs_of(name))
    SeeIntoComposites()(captured.gm)
    for node in captured.gm.graph.nodes:
        if node.op == "call_function" and graph.tensors_of(graph.value_of(node)):
            again = graph.call_on_fakes(node, [graph.value_of(n) for n in graph.operands(node)])
            assert graph.difference(again, graph.value_of(node)) is None


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_attention_runs_its_products_low_and_its_softmax_high(precision: str):
    model = mha()
    amp = fxamp.Amp(precision=precision, lower="aot_eager", scaling=None)
    got = step(model, (x,), backend=amp)
    decisions = list(amp.graphs[0].variants[precision].plan.decisions.values())
    computed = {op: {d.computes for d in decisions if d.op == op} for op in ("linear", "bmm", "baddbmm", "softmax")}
    assert computed["linear"] == {precision}
    assert computed["bmm"] | computed["baddbmm"] == {precision}
    assert computed["softmax"] == {"fp32"}
    assert {d.facts.module for d in decisions if d.op == "linear"} == {"mha"}
    assert all(d.facts.where.startswith("test_composites.py") for d in decisions if d.op == "linear")

    exact = copy.deepcopy(model).double()
    outputs = exact(x.double())
    pull(outputs)
    want = everything(exact, outputs)
    assert all(relative_error(got[name], want[name]) < 0.03 for name in want)


def test_what_is_written_behind_a_composite_is_pinned():
    model = PROGRAMS["attention, weights written"]()
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    got = torch.compile(model, backend=amp)(x)
    for mine, theirs in zip(got, model(x), strict=True):
        assert mine.dtype == torch.float32
        assert relative_error(mine, theirs) < 0.03
    variant = amp.graphs[0].variants["bf16"]
    written = [d for d in variant.plan.decisions.values() if d.node in variant.captured.pinned]
    assert "mean" in {d.op for d in written}  # the weights, averaged over the heads, are the memory that is written
    assert all(d.computes in ("fp32", "-") for d in written)


def test_sizes_may_be_symbols():
    model = mha()
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    compiled = torch.compile(model, backend=amp, dynamic=True)
    for length in (4, 7, 5):
        a = torch.randn(3, length, 8)
        assert relative_error(compiled(a)[0], model(a)[0]) < 0.03
    assert len(amp.graphs) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_inside_an_autocast_region_a_composite_stays(enabled: bool):
    def fn(a):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return torch.tensordot(a, a[0].t(), dims=1)

    gm, _ = graph_of(fn, x)
    change = SeeIntoComposites()(graph.clone(gm))
    assert [k.reason for k in change.kept] == ["inside an autocast region"]


# ---- composites that have one class as a whole ----------------------------------------------------------------------------
WHOLES = {
    "cross_entropy": (lambda a: F.cross_entropy(a[0] @ a[1].t(), torch.tensor([0, 1, 2, 3])), {"cross_entropy": "fp32"}),
    "multi_dot": (lambda a: torch.linalg.multi_dot([a[0], a[1].t(), a[2]]), {"linalg_multi_dot": "bf16"}),
    "einsum": (lambda a: torch.einsum("abc,dbc->ad", a, a), {"einsum": "bf16"}),
    "masked attention": (lambda a: F.scaled_dot_product_attention(a, a, a, mask), {"scaled_dot_product_attention": "bf16"}),
    "interpolate": (lambda a: F.interpolate(a @ a[0].t(), scale_factor=2.0), {"interpolate": "fp32"}),
    "cosine_similarity": (lambda a: F.cosine_similarity(a @ a[0].t(), a[..., :4]), {"cosine_similarity": "fp32"}),
    "normalize": (lambda a: F.normalize(a @ a[0].t()), {"normalize": "fp32"}),
}


@pytest.mark.parametrize("name", list(WHOLES))
def test_a_whole_computes_in_the_class_of_its_parts(name: str):
    fn, want = WHOLES[name]
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    got = torch.compile(fn, backend=amp)(x)
    computed = {d.op: d.computes for d in amp.graphs[0].variants["bf16"].plan.decisions.values()}
    assert {op: computed[op] for op in want} == want
    assert relative_error(got, fn(x.double())) < 0.03


@dynamo_config.patch(allow_rnn=True)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_low(kind, precision: str):
    model = kind(8, 8, batch_first=True)
    amp = fxamp.Amp(precision=precision, lower="aot_eager", scaling=None)
    with torch.no_grad():  # torch itself cannot train a compiled fp32 LSTM on a CPU
        got = torch.compile(model, backend=amp)(x)
    (layer,) = [d for d in amp.graphs[0].variants[precision].plan.decisions.values() if d.op in optable.RECURRENT.split()]
    is_native = formats.native_support(torch.device("cpu"), "bf16")[0] or precision != "bf16"
    kept = kind is nn.LSTM and (not is_native or _patches.lstms_stay_wide("cpu"))
    assert (layer.computes, layer.why.startswith(f"has no {precision} kernel")) == (("fp32" if kept else precision), kept)
    want = copy.deepcopy(model).double()(x.double())
    for mine, theirs in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert mine.dtype == torch.float32
        assert relative_error(mine, theirs) < (1e-5 if kept else 0.01)


@dynamo_config.patch(allow_rnn=True)
def test_a_recurrent_layer_trains_low():
    model = nn.GRU(8, 8)
    got = step(model, (x,), backend=fxamp.Amp(precision="bf16", lower="aot_eager"))
    exact = copy.deepcopy(model).double()
    outputs = exact(x.double())
    pull(outputs)
    want = everything(exact, outputs)
    assert all(relative_error(got[name], want[name]) < 0.03 for name in want)
