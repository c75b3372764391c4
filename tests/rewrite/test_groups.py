"""Keys and values that are repeated for groups of queries are handed on as they are, where they are repeated head by head."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp import graph, ops
from fxamp.passes import Change
from fxamp.rewrite.groups import GroupQueries
from tests.programs import relative_error, rewritten
from tests.rewrite.test_attention import steps

ATTEND: Final = F.scaled_dot_product_attention
NUM_GROUPS: Final = 2


def expanded(x: Tensor) -> Tensor:
    """As transformers does it."""
    B, H, S, E = x.shape
    return x[:, :, None, :, :].expand(B, H, NUM_GROUPS, S, E).reshape(B, H * NUM_GROUPS, S, E)


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(NUM_GROUPS, dim=1)


def flattened(x: Tensor) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, NUM_GROUPS, -1, -1).contiguous().flatten(1, 2)


def tiled(x: Tensor) -> Tensor:
    """The heads one after another, and again: queries of one group would see two heads."""
    B, H, S, E = x.shape
    return x[:, None].expand(B, NUM_GROUPS, H, S, E).reshape(B, H * NUM_GROUPS, S, E)


def turned(x: Tensor) -> Tensor:
    """Every other number repeated, head by head."""
    return x.mT.repeat_interleave(NUM_GROUPS, dim=1).mT


def qkv(S: int = 32, E: int = 16) -> list[Tensor]:
    return [torch.randn(2, H, S, E, requires_grad=True) for H in (4, 2, 2)]


def grouped(fn: Any, *inputs: Tensor, **options: Any) -> tuple[torch.fx.Node, Change]:
    """(the attention of a rewritten graph after the pass, what the pass did)."""
    gm = rewritten(fn, *inputs, **options)
    change = GroupQueries()(gm)
    gm.graph.lint()
    (node,) = (n for n in gm.graph.nodes if n.target in (ops.ATTENTION, ATTEND))
    again = GroupQueries()(gm)
    assert not again.edits
    return node, change


@pytest.mark.parametrize("repeat", [expanded, interleaved, flattened])
def test_repeated_heads_are_handed_on(repeat: Any):
    node, change = grouped(lambda q, k, v: ATTEND(q, repeat(k), repeat(v), is_causal=True), *qkv())
    assert change.num_marked == 1
    assert node.kwargs == {"is_causal": True, "enable_gqa": True}
    assert [graph.value_of(x).shape[1] for x in graph.operands(node)] == [4, 2, 2]
    assert all(graph.value_of(x).dtype == torch.bfloat16 for x in graph.operands(node))
    names = {str(getattr(n.target, "__name__", n.target)) for n in node.graph.nodes}
    assert not names & {"expand", "reshape", "repeat_interleave", "flatten"}


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k * 1, v * 1
    wide = expanded(k), expanded(v)
    k.zero_()
    return ATTEND(q, *wide)


def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        wide = expanded(k), expanded(v)
    return ATTEND(q, *wide)


MASK: Final = torch.ones(32, 32, dtype=torch.bool).tril().triu(-2)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (lambda q, k, v: ATTEND(q, tiled(k), tiled(v)), "no repetition of the heads"),
        (lambda q, k, v: ATTEND(q, expanded(k), tiled(v)), "no repetition of the heads"),
        (lambda q, k, v: ATTEND(q, expanded(k), expanded(v), MASK), "it has a mask"),
        (lambda q, k, v: ATTEND(q[:, :1], expanded(k), expanded(v)), "queries are broadcast"),
        (written, "is written"),
        (detached, "is detached"),
        (lambda q, k, v: ATTEND(q, turned(k), turned(v)), None),
        (lambda q, k, v: ATTEND(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), None),
        (lambda q, k, v: ATTEND(q, k, v, enable_gqa=True), None),
    ],
)
def test_what_stays(attend: Any, reason: str | None):
    inputs = qkv() if reason or "turned" not in attend.__code__.co_names else qkv(32, 32)
    node, change = grouped(attend, *inputs)
    assert change.num_marked == 0
    assert [reason in k.reason for k in change.kept] == [True] * (reason is not None) if reason else change.kept == ()
    assert all(k.where.startswith("test_groups.py:") for k in change.kept)
    assert node.kwargs.get("enable_gqa", False) == (attend.__code__.co_consts.count(("enable_gqa",)) > 0)


def test_attention_in_fp32_stays():
    node, change = grouped(lambda q, k, v: ATTEND(q, expanded(k), expanded(v)), *qkv(), variant="fp32")
    assert (node.target, change.edits) == (ATTEND, False)


def test_results_and_gradients():
    """In bf16 with and without the pass, against float64."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTEND(q, expanded(k), expanded(v), is_causal=True)

    inputs = qkv(64)
    want = steps(attend, [x.detach().double().requires_grad_() for x in inputs], backend="eager")
    plain, relaxed = (
        steps(attend, inputs, backend=fxamp.Amp(precision="bf16", lower="aot_eager", relaxed=names))
        for names in ((), ("grouped_queries",))
    )
    assert torch.equal(plain[0], relaxed[0])
    for a, b, exactly in zip(plain, relaxed, want, strict=True):
        assert relative_error(b, exactly) < 1.25 * relative_error(a, exactly)


def test_where_no_kernel_takes_groups_they_are_repeated():
    q, k, v = (x.detach().bfloat16() for x in qkv())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        got = ops.ATTENTION(q, k, v, enable_gqa=True)
        want = ops.ATTENTION(q, interleaved(k), interleaved(v))
    assert torch.equal(got, want)


class Layer(nn.Module):
    """Four heads of queries, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return ATTEND(q, expanded(k), expanded(v), is_causal=True).transpose(1, 2).flatten(2)


def test_the_report_says_so():
    for relaxed, price in (((), "keys and values are repeated"), ("grouped_queries", "")):
        torch._dynamo.reset()
        amp = fxamp.Amp(precision="bf16", lower="eager", relaxed=relaxed)
        torch.compile(Layer(), backend=amp)(torch.randn(2, 32, 64))
        (path,) = (p for p in amp.report().fast_paths if p.kind == "attention")
        assert path.is_taken
        assert path.why.startswith(price)
        assert ("grouped_queries" in path.advice) == bool(price)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_groups_on_a_gpu():
    """No product outside of a fused kernel, and gradients that are as exact, against float64."""
    inputs = [torch.randn(2, H, 256, 64, device="cuda", requires_grad=True) for H in (8, 4, 4)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTEND(q, expanded(k), expanded(v), is_causal=True)

    want = steps(attend, [x.detach().double().requires_grad_() for x in inputs], backend="eager")
    results = list[list[Tensor]]()
    for names in ((), ("grouped_queries",)):
        amp = fxamp.Amp(precision="bf16", relaxed=names)
        results.append(steps(attend, inputs, backend=amp))
        joint = amp.graphs[0].variants["bf16"].joint
        assert not any(n.target is torch.ops.aten.bmm.default for n in joint.graph.nodes)
        (forward,) = (n for n in joint.graph.nodes if "_attention" in str(n.target) and "backward" not in str(n.target))
        print(names, forward.target, [tuple(graph.value_of(x).shape) for x in graph.operands(forward)])
    for a, b, exactly in zip(*results, want, strict=True):
        print(relative_error(b, exactly), relative_error(a, exactly))
        assert relative_error(b, exactly) < 1.25 * relative_error(a, exactly)
