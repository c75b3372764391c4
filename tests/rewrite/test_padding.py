"""Logits are padded where a loss alone reads them, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxamp
from fxamp import graph
from fxamp.passes import Change
from fxamp.rewrite.padding import PadLogits
from tests.programs import graph_of, relative_error

N, K, V = 6, 16, 1031
H = torch.randn(N, K)
W = (torch.randn(V, K) / 4).requires_grad_()
B = (torch.randn(V) / 4).requires_grad_()
T = torch.randint(0, V, (N,))
IGNORED = int(T[0])
OTHERS = torch.randn(V).abs()

Program = Callable[..., Any]

PADDED: dict[str, Program] = {
    "linear": lambda h, w, b, t: F.cross_entropy(F.linear(h, w), t),
    "with a bias": lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b), t),
    "matmul": lambda h, w, b, t: F.cross_entropy(h @ w.t(), t, reduction="sum"),
    "in fp32, shifted, as transformers does it": lambda h, w, b, t: F.cross_entropy(
        F.linear(h.view(2, 3, K), w).float()[..., :-1, :].contiguous().view(-1, V), t[:4], ignore_index=IGNORED
    ),
    "flattened": lambda h, w, b, t: F.cross_entropy(F.linear(h.view(2, 3, K), w).flatten(0, 1), t),
    "a view that counts the classes by itself": lambda h, w, b, t: F.cross_entropy(
        F.linear(h.view(2, 3, K), w).reshape(6, -1), t, reduction="none"
    ).mean(),
    "by name, in another order": lambda h, w, b, t: F.cross_entropy(
        target=t, input=torch.flatten(input=torch.reshape(input=F.linear(weight=w, input=h), shape=(2, 3, -1)), end_dim=1)
    ),
    "as a module": lambda h, w, b, t: nn.CrossEntropyLoss()(F.linear(h, w), t),
}

KEPT: dict[str, tuple[Program, str]] = {
    "read twice": (lambda h, w, b, t: F.cross_entropy(y := F.linear(h, w), t) + y.sum(), "read by more than the loss"),
    "handed out": (lambda h, w, b, t: (F.cross_entropy(y := F.linear(h, w), t), y), "read by more than the loss"),
    "weights": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w), t, weight=OTHERS), "weighs classes"),
    "smoothing": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w), t, label_smoothing=0.1), "smooths labels"),
    "probabilities": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w), F.one_hot(t, V).float()), "probabilities"),
    "another dimension": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w)[None].transpose(1, 2), t[None]), "last dimension"),
    "few": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w[:37]), t % 37), "few, or aligned"),
    "aligned": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w[:1024]), t % 1024), "few, or aligned"),
    "part of the classes": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w)[:, :1030], t % 1030), "says|other classes|rows"),
    "the last classes": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w)[:, -V:], t), "does not leave rows"),
    "no product": (lambda h, w, b, t: F.cross_entropy(w[:6, :1].expand(6, V), t), "no product with a weight"),
    "by itself": (lambda h, w, b, t: F.cross_entropy((s := w @ w.t() / K) @ s, t.repeat(V)[:V]), "multiplied by"),
    "scaled": (lambda h, w, b, t: F.cross_entropy(F.linear(h, w) * 2, t), "no product with a weight"),
}


def padded(fn: Program) -> tuple[fx.GraphModule, Change]:
    gm = graph.clone(graph_of(fn, H, W, B, T)[0])
    change = PadLogits()(gm)
    gm.graph.lint()
    return gm, change


def steps(fn: Program, **options: Any) -> list[Tensor]:
    """[loss, gradients of what h, w and b are]."""
    leaves = [x.detach().clone().requires_grad_() for x in (H, W, B)]
    torch._dynamo.reset()
    compiled = fn if not options else torch.compile(fn, backend=fxamp.Amp(**options))
    loss = compiled(*leaves, T)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss.detach(), *(torch.zeros(()) if g is None else g for g in gradients)]


@pytest.mark.parametrize("name", PADDED)
def test_padded_logits_give_the_same_loss_and_gradients(name: str):
    fn = PADDED[name]
    _, change = padded(fn)
    assert change.num_added == (5 if name == "with a bias" else 4)
    assert not change.kept
    want = steps(fn)
    got = steps(fn, precision="fp32", relaxed="padded_logits", lower="aot_eager")
    low = steps(fn, precision="bf16", relaxed="padded_logits", lower="aot_eager")
    beside = steps(fn, precision="bf16", lower="aot_eager")
    for g, x, y, w in zip(got, low, beside, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        assert relative_error(g, w) <= 1e-6
        assert relative_error(x, w) <= 1.01 * relative_error(y, w) + 1e-6


@pytest.mark.parametrize("name", KEPT)
def test_other_logits_stay(name: str):
    fn, reason = KEPT[name]
    gm, change = padded(fn)
    assert change.num_added == 0
    assert graph.text_of(gm) == graph.text_of(graph_of(fn, H, W, B, T)[0])
    (kept,) = change.kept
    assert any(part in kept.reason for part in reason.split("|")), kept.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_out_as_before(value: float):
    fn = PADDED["linear"]
    torch._dynamo.reset()
    bad = H.clone()
    bad[2, 3] = value
    compiled = torch.compile(fn, backend=fxamp.Amp(precision="fp32", relaxed="padded_logits", lower="aot_eager"))
    assert torch.equal(compiled(bad, W, B, T).isnan(), fn(bad, W, B, T).isnan())


def test_with_a_dynamic_number_of_rows_and_loss_scaling():
    head, twin = nn.Linear(K, V), nn.Linear(K, V)
    twin.load_state_dict(head.state_dict())
    amp = fxamp.Amp(precision="fp16", relaxed="padded_logits", lower="aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda h, t: F.cross_entropy(head(h).float(), t), backend=amp, dynamic=True)
    for n in (3, 5, 6):
        head.zero_grad()
        twin.zero_grad()
        compiled(H[:n], T[:n]).backward()
        F.cross_entropy(twin(H[:n]), T[:n]).backward()
        for p, q in zip(head.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert relative_error(p.grad, q.grad) < 5e-3
    (record,) = amp.graphs
    change = next(c for c in next(iter(record.variants.values())).changes if c.pass_name == "PadLogits")
    assert change.num_added == 5


def test_the_gradient_of_the_logits_is_padded_by_nothing():
    """The point of it: both products of the backward read what the softmax wrote."""
    amp = fxamp.Amp(precision="bf16", relaxed="padded_logits", lower="aot_eager")
    torch._dynamo.reset()
    torch.compile(PADDED["linear"], backend=amp)(H.clone().requires_grad_(), W, B, T)
    (record,) = amp.graphs
    joint = next(iter(record.variants.values())).joint
    pads = [n for n in joint.graph.nodes if n.target is torch.ops.aten.constant_pad_nd.default]
    assert {tuple(graph.value_of(n).shape) for n in pads} == {(1088, K), (V, K)}  # of the weight, and of its gradient
    products = [n for n in joint.graph.nodes if n.target is torch.ops.aten.mm.default]
    assert len(products) == 3
    assert all(graph.value_of(x).dtype == torch.bfloat16 for n in products for x in n.all_input_nodes)
