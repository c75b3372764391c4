"""Masks are replaced only when they are equal: random ones, and those of known libraries."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

import fxamp
from fxamp import graph
from fxamp.passes import Change
from fxamp.rewrite.masks import ReplaceMasks
from tests.programs import graph_of, relative_error
from tests.rewrite.test_attention import qkv, steps

ATTEND: Final = F.scaled_dot_product_attention


def normalized(fn: Any, *inputs: Any) -> tuple[fx.GraphModule, Change]:
    """(Dynamo's graph of fn after the pass, what the pass did)."""
    gm = graph.clone(graph_of(fn, *inputs)[0])
    change = ReplaceMasks()(gm)
    gm.graph.lint()
    return gm, change


def outcome(gm: fx.GraphModule) -> str:
    (node,) = (n for n in gm.graph.nodes if n.target is ATTEND)
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    return "kept" if mask is not None else "causal" if node.kwargs["is_causal"] else "none"


# ---- random masks -------------------------------------------------------------------------------------------------------
@st.composite
def allowed(draw: st.DrawFn) -> Tensor:
    """[.., L, S]: causal, shifted, windowed, padded, full, or one of these with one element wrong; batch dims broadcast."""
    L = draw(st.integers(1, 5))
    S = L if draw(st.booleans()) else draw(st.integers(1, 6))
    i, j = torch.arange(L)[:, None], torch.arange(S)[None, :]
    kinds = {
        "causal": j <= i,
        "shifted": j <= i + draw(st.sampled_from((-1, 1, S - L))),
        "windowed": (j <= i) & (j > i - draw(st.integers(1, 5))),
        "padded": (j <= i) & (j < draw(st.integers(1, S))),
        "full": (i >= 0) & (j >= 0),
        "keys": (i >= 0) & (j < draw(st.integers(1, S))),
    }
    mask = kinds[draw(st.sampled_from(sorted(kinds)))].clone()
    if draw(st.integers(0, 3)) == 0:
        mask.view(-1)[draw(st.integers(0, L * S - 1))] ^= True
    batch = draw(st.sampled_from(((), (1,), (2, 1, 1), (1, 3), (2, 3), (2, 1))))
    batch = batch if len(batch) < 3 else batch[:2]
    mask = mask.repeat(*batch, 1, 1)
    if mask.dim() > 2 and draw(st.integers(0, 3)) == 0:
        mask.view(-1)[draw(st.integers(0, mask.numel() - 1))] ^= True  # in one batch only
    return mask.expand(2, 3, L, S) if draw(st.booleans()) else mask


def attention_graph(mask: Tensor, additive: torch.dtype | None, lowest: float) -> fx.GraphModule:
    """A Dynamo-like graph that makes `mask` of literals, and attends with it. Built by hand: Dynamo takes seconds."""
    L, S = mask.shape[-2:]
    g, fake = fx.Graph(), FakeTensorMode()
    with fake:
        values = {name: torch.empty(2, 3, n, 4) for name, n in (("q", L), ("k", S), ("v", S))}
    inputs = []
    for name, value in values.items():
        inputs.append(node := g.placeholder(name))
        node.meta["example_value"] = value

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = g.call_function(target, args, kwargs)
        with fake:
            values = [graph.value_of(x) for x in graph.operands(node)]
        node.meta["example_value"] = graph.call_on_fakes(node, values) if values else fake_call(target, args, kwargs)
        return node

    def fake_call(target: Any, args: Any, kwargs: Any) -> Any:
        with fake:
            return target(*args, **kwargs)

    bits = call(torch.arange, mask.numel(), device=torch.device("cpu"))
    wanted = mask.contiguous().view(-1).tolist()
    node = call(torch.ne, bits, bits)
    for index, value in enumerate(wanted):  # literals one by one, so that no step but the pass itself knows a mask's kind
        if value:
            node = call(torch.logical_or, node, call(torch.eq, bits, index))
    node = call(torch.reshape, node, tuple(mask.shape))
    if additive is not None:
        zeros = call(torch.zeros, tuple(mask.shape), dtype=additive)
        node = call(torch.masked_fill, zeros, call(torch.logical_not, node), lowest)
    out = call(ATTEND, *inputs, node)
    g.output(out)
    return fx.GraphModule({}, g)


LOWEST: Final = torch.finfo(torch.float32).min
FORMS: Final = ((None, 0.0), (torch.float32, -torch.inf), (torch.float32, LOWEST), (torch.float32, -1e9))


@settings(max_examples=300)
@given(allowed(), st.sampled_from(FORMS))
def test_only_equal_masks_are_replaced(mask: Tensor, form: tuple[torch.dtype | None, float]):
    gm = attention_graph(mask, *form)
    before = graph.clone(gm)
    change = ReplaceMasks()(gm)
    gm.graph.lint()
    L, S = mask.shape[-2:]
    everywhere = mask.all()
    causal = L == S and torch.equal(mask, torch.ones(L, L, dtype=torch.bool).tril().expand(mask.shape))
    is_known = form[1] != -1e9  # -1e9 is a number that scores could outweigh
    want = "none" if everywhere else "causal" if causal and is_known else "kept"
    assert outcome(gm) == want, change
    assert len(change.kept) == (want == "kept")
    again = ReplaceMasks()(gm)
    assert again.num_marked == 0
    assert again.num_removed == 0
    if want != "kept":
        assert all(n.op in ("placeholder", "output") or n.target is ATTEND for n in gm.graph.nodes)
        inputs = [torch.randn(2, 3, n, 4) for n in (L, S, S)]
        assert relative_error(gm(*inputs), before(*inputs)) < 1e-6


# ---- what must stay -----------------------------------------------------------------------------------------------------
def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def test_a_mask_made_in_the_graph():
    gm, change = normalized(lambda q, k, v: ATTEND(q, k, v, torch.ones(8, 8, dtype=torch.bool).tril()), *qkv(2, 2, 8, 4))
    assert outcome(gm) == "causal"
    assert change.num_removed == 2


@pytest.mark.parametrize("kind", ["input", "written", "random"])
def test_what_is_not_proved_stays(kind):
    given_mask = causal(8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kind == "input":
            return ATTEND(q, k, v, given_mask & True)
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        if kind == "written":
            mask[0, 5] = True
        if kind == "random":
            mask = mask & (torch.rand(8, 8) < 2)
        return ATTEND(q, k, v, mask)

    gm, change = normalized(attend, *qkv(2, 2, 8, 4))
    assert outcome(gm) == "kept"
    reasons = {"input": "not made in the graph", "written": "written", "random": "not evaluated"}
    assert reasons[kind] in change.kept[0].reason
    assert change.kept[0].where.startswith("test_masks.py:")


def test_symbolic_sizes_stay_and_the_report_says_so():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[-2]
        return ATTEND(q, k, v, torch.arange(n)[None, :] <= torch.arange(n)[:, None])

    amp = fxamp.Amp(precision="fp32", lower="eager", relaxed="attention_masks")
    torch.compile(attend, backend=amp, dynamic=True)(*qkv(2, 2, 8, 4))
    assert outcome(amp.graphs[0].variants["fp32"].dynamo) == "kept"
    assert "ReplaceMasks left scaled_dot_product_attention (test_masks.py:" in str(amp.report())


def test_a_mask_that_makes_the_result_larger_stays():
    gm = attention_graph(torch.ones(2, 2, 3, 4, 4, dtype=torch.bool), None, 0.0)
    change = ReplaceMasks()(gm)
    assert outcome(gm) == "kept"
    assert "another shape" in change.kept[0].reason


def test_the_masks_that_libraries_make():
    """The steps of the masks that transformers 5.17 makes in the graph for GPT-2, BERT and Llama (packed sequences)."""

    def one_for_all(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        rows = (torch.arange(8, device=q.device) + 0)[None, None, :, None]
        cols = (torch.arange(8, device=q.device) + 0)[None, None, None, :]
        gpt2 = (cols <= rows).expand(2, -1, 8, 8)
        bert = (rows >= 0).expand(2, -1, 8, 8)
        position = (torch.arange(8, device=q.device) + 0).unsqueeze(0).expand(2, -1)
        first = position[:, :1] - 1
        packed = (torch.diff(position, prepend=first, dim=-1) != 1).cumsum(-1)
        batch = torch.arange(2, device=q.device)[:, None, None, None]
        same = packed[batch, rows] == packed[batch, cols]
        llama = rows.new_ones((), dtype=torch.bool) & (cols <= rows).to(q.device) & same.to(q.device)
        return ATTEND(q, k, v, gpt2), ATTEND(q, k, v, bert), ATTEND(q, k, v, llama.expand(2, -1, 8, 8))

    gm, change = normalized(one_for_all, *qkv(2, 2, 8, 4))
    assert change.kept == ()
    attends = [n for n in gm.graph.nodes if n.target is ATTEND]
    assert [n.kwargs["is_causal"] for n in attends] == [True, False, True]
    assert all(n in attends or n.op in ("placeholder", "output") for n in gm.graph.nodes)


# ---- what it is worth, and costs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("additive", [False, True])
def test_results_and_gradients(additive):
    """In bf16 with and without the pass, against float64."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(64, device=q.device)
        mask = i[None, None, None, :] <= i[None, None, :, None]
        if additive:
            mask = torch.zeros(1, 1, 64, 64).masked_fill(~mask, torch.finfo(torch.float32).min)
        return ATTEND(q, k, v, mask.expand(2, -1, 64, 64))

    inputs = qkv(2, 3, 64, 16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = steps(lambda q, k, v: ATTEND(q, k, v, is_causal=True), exact, backend="eager")
    plain, relaxed = (
        steps(attend, inputs, backend=fxamp.Amp(precision="bf16", lower="aot_eager", relaxed=names))
        for names in ((), ("attention_masks",))
    )
    for a, b, exactly in zip(plain, relaxed, want, strict=True):
        print(relative_error(b, a), relative_error(b, exactly), relative_error(a, exactly))
        assert relative_error(b, exactly) < 1.05 * relative_error(a, exactly)
        assert relative_error(b, a) < 2**-8
