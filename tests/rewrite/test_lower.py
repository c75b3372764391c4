from __future__ import annotations

import copy
import statistics
from typing import Any

import expecttest
import torch
from torch import nn

import fxamp
from fxamp import graph, legal, passes
from fxamp.explain import text
from fxamp.rewrite.lower import LowerOperations
from tests.programs import Fn, planned, pull, relative_error, rewritten


class Golden(expecttest.TestCase):
    def test_a_linear_between_fp32_values(self):
        gm = rewritten(lambda x, w: (x @ w).relu().exp(), torch.rand(4, 8), torch.rand(8, 2))
        lines = [line.strip() for line in text.code(gm).splitlines()]
        self.assertExpectedInline(
            "\n".join(line for line in lines if " = " in line and not line.startswith("#")),
            """\
x_bf16: "bf16[4, 8]" = torch.ops.aten.to.dtype(x, torch.bfloat16)
w_bf16: "bf16[8, 2]" = torch.ops.aten.to.dtype(w, torch.bfloat16)
matmul: "bf16[4, 2]" = x_bf16 @ w_bf16
relu: "bf16[4, 2]" = matmul.relu()
relu_fp32: "f32[4, 2]" = torch.ops.aten.to.dtype(relu, torch.float32)
exp: "f32[4, 2]" = relu_fp32.exp()""",
        )


def casts_of(fn, *inputs, **options) -> list[tuple[str, str]]:
    return [(c.src, c.dst) for c in graph.own_casts(rewritten(fn, *inputs, **options))]


def test_one_cast_serves_all_users_of_a_value():
    assert casts_of(lambda a: a @ a + a.mm(a) @ a, torch.rand(4, 4)) == [("fp32", "bf16"), ("bf16", "fp32")]


def test_no_cast_is_shared_across_a_switch_of_grad_mode():
    def fn(a):
        with torch.no_grad():
            b = a @ a
        return a.mm(a) + b

    # under no_grad the cast has no gradient: the product outside must have one of its own
    assert casts_of(fn, torch.rand(4, 4, requires_grad=True)).count(("fp32", "bf16")) == 2


def test_a_cast_of_what_is_written_is_a_snapshot():
    def fn(w, a):
        before = a @ w
        w.mul_(2)
        return before, a.mm(w)

    assert casts_of(fn, torch.rand(4, 4), torch.rand(4, 4)).count(("fp32", "bf16")) == 3


def test_a_tuple_is_cast_part_by_part():
    def fn(a, b):
        return torch.cat([*(a @ a).chunk(2), b])

    gm = rewritten(fn, torch.rand(4, 4), torch.rand(1, 4))
    cat = next(n for n in gm.graph.nodes if n.target is torch.cat)
    assert {str(graph.value_of(n).dtype) for n in graph.operands(cat)} == {"torch.float32"}

    def whole(a, b):
        return torch.block_diag(*(a @ a).chunk(2))

    gm = rewritten(whole, torch.rand(4, 4), torch.rand(1, 4))
    assert graph.own_casts(gm)[-1].dst == "fp32"


def test_rewriting_is_idempotent():
    model = Fn(lambda m, a: m.lin(a).relu(), lin=nn.Linear(4, 4))
    captured, made = planned(model, torch.rand(2, 4))
    gm = graph.clone(captured.gm)
    first = LowerOperations(captured, made)(gm)
    again = LowerOperations(captured, made)(gm)
    assert first.num_added > 0
    assert again.num_added == 0


def test_the_result_is_legal():
    captured, made = planned(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), torch.rand(2, 4))
    gm = graph.clone(captured.gm)
    check = legal.checker(legal.REWRITTEN, captured.gm)
    changes = passes.run(gm, [LowerOperations(captured, made)], check)
    assert str(changes[0]).startswith("LowerOperations: +4 -0 nodes")


def test_gradients_of_the_readers_of_a_value_are_summed_in_fp32():
    """As under autocast, which casts an activation for each reader, and a weight once."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.heads = nn.LayerNorm(16), nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            return torch.stack([head(h) for head in self.heads]).float()

    def error(seed: int, run: Any) -> float:
        torch.manual_seed(seed)
        model, x = Heads(), torch.randn(32, 16, requires_grad=True)
        exact, x64 = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
        pull(run(model)(x))
        pull(exact(x64))
        assert x.grad is not None
        assert x64.grad is not None
        return relative_error(x.grad, x64.grad)

    def autocast(model: nn.Module) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)(model)

    def fxamp_(model: nn.Module) -> Any:
        torch._dynamo.reset()
        return torch.compile(model, backend=fxamp.Amp(precision="bf16", lower="eager"))

    own, peer = ([error(seed, run) for seed in range(4)] for run in (fxamp_, autocast))
    assert statistics.geometric_mean(own) < 1.02 * statistics.geometric_mean(peer)


def test_activations_are_cast_for_each_reader_and_weights_once():
    def fn(m, a):
        h = a.exp()
        return m.lin(h) + m.lin(h)

    model = Fn(fn, lin=nn.Linear(4, 4, bias=False))
    assert casts_of(model, torch.rand(2, 4)).count(("fp32", "bf16")) == 2, "no gradient, no sum"
    assert casts_of(model, torch.rand(2, 4, requires_grad=True)).count(("fp32", "bf16")) == 3


def test_an_output_shares_a_cast_across_a_switch_of_grad_mode():
    def fn(a):
        b = a @ a
        c = b.view(-1)  # stands where the output is cast, and might hand on what it reads
        loss = b.exp().sum()
        with torch.no_grad():
            loss = loss * (a @ a).sum()
        return b, c.sum() * loss

    assert casts_of(fn, torch.rand(4, 4)).count(("bf16", "fp32")) == 2, "one of b for all, one under no_grad"
