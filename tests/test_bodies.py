"""Graphs nested in higher-order operations: what is rewritten inside, what is a barrier, and what both compute."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxamp
from fxamp import capture, custom_function, graph, legal, optable, passes, plan, rewrite, testing
from fxamp.policy import Policy
from tests.programs import Fn, graph_of, planned, pull, relative_error

w = torch.randn(8, 8, generator=torch.Generator().manual_seed(5)) / 3
x8 = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))


def product(x):
    return (x @ w).sin()


@torch.compiler.nested_compile_region
def region(x):
    return (x @ w).sin() @ w


def save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)

INSIDE = {
    "checkpoint": lambda x: checkpoint(product, x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(product, x, use_reentrant=True),
    "selective": lambda x: checkpoint(product, x, use_reentrant=False, context_fn=SELECTIVE),
    "cond": lambda x: torch.cond(x.sum() > 0, product, lambda x: x * 2, (x,)),
    "while_loop": lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, product(x)), (torch.tensor(0), x))[1],
    "scan": lambda x: scan(lambda carry, row: (product(carry + row), row * 2), torch.zeros(1, 8), x[:, None])[0],
    "map": lambda x: map_(product, x[:, None]),  # pyright: ignore[reportArgumentType]  # its stub names no parameter so
    "nested_compile_region": lambda x: region(region(x)),
}


# ---- decisions -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", INSIDE)
def test_products_inside_run_low(name: str):
    captured, made = planned(INSIDE[name], x8)
    assert made.num_low_ops == sum(body.num_low_ops for body in made.bodies.values()) > 0
    gm = graph.clone(captured.gm)
    passes.run(gm, rewrite.passes_for(captured, made), legal.checker(legal.REWRITTEN, captured.gm))
    assert {cast.dst for cast in graph.own_casts(gm)} == {"bf16", "fp32"}
    assert graph.own_casts(captured.gm) == ()  # the captured graph, and all in it, stays as it was


def test_every_row_is_an_operation_of_torch():
    known = {op.name() for op in torch._ops._higher_order_ops.values()}  # pyright: ignore[reportPrivateUsage]
    assert set(optable.HIGHER_ORDER) - known <= {"wrap_with_autocast", "wrap_with_set_grad_enabled", "hints_wrapper"}


def test_a_combine_function_keeps_its_dtypes():
    def fn(x):
        return associative_scan_op(lambda a, b: [a * b], [x], ())  # pyright: ignore[reportArgumentType]

    _, made = planned(fn, x8, policy={"op:mul": "bf16"})
    (body,) = made.bodies.values()
    assert {d.op: d.computes for d in body.decisions.values()} == {"mul": "fp32"}
    assert "associative" in body.note


def test_an_unknown_operation_keeps_its_dtypes_inside(monkeypatch: pytest.MonkeyPatch):
    rows = {k: v for k, v in optable.HIGHER_ORDER.items() if k != "cond"}
    monkeypatch.setattr(optable, "HIGHER_ORDER", rows)
    _, made = planned(INSIDE["cond"], x8)
    assert made.num_low_ops == 0
    assert {body.note for body in made.bodies.values()} == {"inside cond: not listed"}


def test_flex_attention_takes_low_operands_and_scores_stay():
    def fn(q, bias):
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[h] * (i - j))

    captured, _ = planned(fn, torch.randn(1, 2, 16, 8), torch.randn(2))
    accelerated = dataclasses.replace(captured, device=torch.device("cuda"))
    made = plan.plan(accelerated, Policy(), variant="bf16")
    (attention,) = (d for d in made.decisions.values() if d.op == "higher_order::flex_attention")
    assert attention.computes == "bf16+fp32"  # query, key and value; the bias of score_mod as traced
    assert attention.operands.count(torch.bfloat16) == 3
    assert attention.value[0].dtype == torch.bfloat16
    assert all(d.computes in ("fp32", "-") for body in made.bodies.values() for d in body.everywhere)
    cpu = plan.plan(captured, Policy(), variant="bf16")
    assert cpu.num_low_ops == 0


def test_a_body_that_two_calls_share_is_planned_once():
    captured, made = planned(INSIDE["nested_compile_region"], x8)
    assert list(made.bodies) == list(captured.bodies) == ["subgraph_0"]
    assert len(captured.callers["subgraph_0"]) == 2


def test_policy_rules_reach_inside():
    block = Fn(lambda m, x: checkpoint(m.lin, x, use_reentrant=False), lin=nn.Linear(8, 8))
    assert planned(block, x8)[1].num_low_ops == 1
    assert planned(block, x8, policy={"lin": "fp32"})[1].num_low_ops == 0
    assert planned(block, x8, policy={"op:linear": "fp32"})[1].num_low_ops == 0
    assert planned(block, x8, policy={"op:higher_order::*": "keep"})[1].num_low_ops == 0
    low = planned(block, x8, policy={"op:higher_order::*": "bf16"})[1]
    assert {d.computes for d in low.decisions.values()} == {"fp32"}  # the boundary stays as it was traced


def test_bodies_are_part_of_the_digest():
    captured, made = planned(INSIDE["checkpoint"], x8)
    other = plan.plan(captured, Policy.of({"matmul": "fp32"}), variant="bf16")
    outside = [(d.operands, d.result) for d in made.decisions.values()]
    assert outside == [(d.operands, d.result) for d in other.decisions.values()]
    assert made.digest() != other.digest()


def test_bodies_are_shown():
    amp = fxamp.Amp(precision="bf16", lower="eager")
    torch.compile(INSIDE["checkpoint"], backend=amp)(x8)
    variant = amp.graphs[0].variants["bf16"]
    assert 'matmul: "bf16[4, 8]" = ' in variant.text("dynamo")
    assert 'matmul: "f32[4, 8]" = ' in variant.text("captured")
    assert "# wrap_body_0, inside tag_activation_checkpoint (test_bodies.py:" in variant.text("plan")
    assert re.search(r"│ bf16 +│ +1 │ matmul ", str(amp.report()))


def test_names_in_a_body_are_annotated_with_its_own_values():
    def fn(x):
        h = x @ torch.zeros(8, 2)
        return h, torch.cond(x.sum() > 0, product, lambda x: x * 2, (x,))

    amp = fxamp.Amp(precision="fp32", lower="eager")
    torch.compile(fn, backend=amp)(x8)
    text = amp.graphs[0].variants["fp32"].text("captured")
    assert 'matmul: "f32[4, 8]"' in text


# ---- regions -------------------------------------------------------------------------------------------------------------
def opted_out_around(x):
    with torch.autocast("cpu", enabled=False):
        return checkpoint(product, x, use_reentrant=False)


def opted_out_inside(x):
    def body(x):
        with torch.autocast("cpu", enabled=False):
            return product(x)

    return checkpoint(body, x, use_reentrant=False)


def opted_out_in_one_of_two_calls(x):
    with torch.autocast("cpu", enabled=False):
        y = region(x)
    return region(y)


@pytest.mark.parametrize("fn", [opted_out_around, opted_out_inside])
def test_a_region_holds_inside_too(fn):
    assert planned(fn, x8)[1].num_low_ops == 0


def test_a_shared_body_obeys_the_strictest_call():
    captured, made = planned(opted_out_in_one_of_two_calls, x8)
    shared = [path for path in captured.bodies if len(captured.callers.get(path, ())) == 2]
    assert all(made.bodies[path].num_low_ops == 0 for path in shared)


# ---- memory --------------------------------------------------------------------------------------------------------------
def writes_inside(x):
    def body(y):
        before = y @ w
        y.add_(1.0)
        return before, y @ w

    return checkpoint(body, x * 2, use_reentrant=False)


def views_out_of_a_body(x):
    def body(y):
        h = y @ w
        return h, h.view(-1), y[:1]

    a, b, c = checkpoint(body, x * 2, use_reentrant=False)
    a = a * 2
    return a, b, c


def written_around_a_body(x):
    y = x @ w
    early = checkpoint(product, y, use_reentrant=False)
    y.mul_(2.0)
    return early, checkpoint(product, y, use_reentrant=False), y


@pytest.mark.parametrize("fn", [writes_inside, views_out_of_a_body, written_around_a_body])
def test_memory_in_and_around_bodies(fn):
    with torch.no_grad():
        for precision, tol in (("bf16", 3e-2), ("fp32", 0.0)):
            torch._dynamo.reset()
            got = torch.compile(fn, backend=fxamp.Amp(precision=precision, lower="aot_eager"))(x8)
            for g, t in zip(got, fn(x8), strict=True):
                assert g.dtype == t.dtype
                assert relative_error(g, t) <= tol


def test_a_body_that_is_handed_memory_twice_and_writes_it():
    gm, examples = graph_of(lambda x: torch.cond(x.sum() > 0, lambda a: (a @ w).sin(), lambda a: a * 2, (x,)), x8)
    (true, false) = graph.nested(gm).values()
    for body in (true, false):
        first = body.graph.find_nodes(op="placeholder")[0]
        with body.graph.inserting_after(first):
            written = body.graph.call_method("add_", (first, 1.0))
        written.meta["example_value"] = first.meta["example_value"]
    cond = next(node for node in gm.graph.nodes if node.target is torch.ops.higher_order.cond)
    x = gm.graph.find_nodes(op="placeholder")[0]
    cond.args = (*cond.args[:3], (x, x))
    captured = capture.capture(gm, examples)
    for body in captured.bodies.values():
        assert set(body.pinned) >= {node.name for node in body.gm.graph.nodes}
    assert x.name in captured.pinned


# ---- values --------------------------------------------------------------------------------------------------------------
def block(m, x):
    return F.dropout(m.down(F.gelu(m.up(m.norm(x)))), 0.5, training=True) + x


def gradients(fn, lower: str, precision: str = "bf16") -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = Fn(fn, up=nn.Linear(8, 16), down=nn.Linear(16, 8), norm=nn.LayerNorm(8))
    x = x8.clone().requires_grad_()
    torch._dynamo.reset()
    torch.manual_seed(11)
    y = torch.compile(model, backend=fxamp.Amp(precision=precision, lower=lower))(x)
    (y * y).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


LOWERINGS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("lower", LOWERINGS)
@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": False, "context_fn": SELECTIVE}])
def test_recomputation_repeats_the_decisions_of_the_forward(options, lower: str):
    plain = gradients(block, lower)
    again = gradients(lambda m, x: checkpoint(functools.partial(block, m), x, **options), lower)
    assert len(plain) == len(again) == 8
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["checkpoint", "cond", "while_loop", "map", "nested_compile_region"])
@pytest.mark.parametrize("lower", ["aot_eager"])
def test_values_and_gradients(name: str, lower: str):
    fn = INSIDE[name]
    mine, theirs = (x8.clone().requires_grad_(name != "while_loop") for _ in range(2))
    got, want = torch.compile(fn, backend=fxamp.Amp(precision="bf16", lower=lower))(mine), fn(theirs)
    assert got.dtype == want.dtype
    assert relative_error(got, want) < 3e-2
    if mine.requires_grad:
        pull(got)
        pull(want)
        assert mine.grad is not None
        assert theirs.grad is not None
        assert relative_error(mine.grad, theirs.grad) < 3e-2


def test_eager_lowering_cannot_train_a_nested_region():
    amp = fxamp.Amp(precision="bf16", lower="eager")
    with pytest.raises(BackendCompilerFailed, match=r"InvalidOption.*Use lower='aot_eager'"):
        torch.compile(INSIDE["nested_compile_region"], backend=amp)(x8.clone().requires_grad_())


# ---- autograd.Function -----------------------------------------------------------------------------------------------------
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class DeclaredProduct(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class HighProduct(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize(("function", "num_low"), [(Product, 0), (DeclaredProduct, 3), (HighProduct, 0)])
def test_forward_and_backward_of_a_function_are_rewritten_together_or_not_at_all(function, num_low: int):
    leaf = x8.clone().requires_grad_()
    _, made = planned(lambda x: function.apply(x, w), leaf)
    assert [body.num_low_ops for body in made.bodies.values()] == ([1, 2] if num_low else [0, 0])
    twin = x8.clone().requires_grad_()
    torch._dynamo.reset()
    got = torch.compile(lambda x: function.apply(x, w), backend=fxamp.Amp(precision="bf16", lower="aot_eager"))(leaf)
    want = function.apply(twin, w)
    got.cos().sum().backward()
    want.cos().sum().backward()
    assert leaf.grad is not None
    assert twin.grad is not None
    assert leaf.grad.dtype == torch.float32
    assert torch.equal(leaf.grad, twin.grad) == (num_low == 0)
    assert relative_error(leaf.grad, twin.grad) < 3e-2


def test_a_declaration_is_found_by_its_line():
    on_cpu, on_cuda = custom_function.forwards("cpu"), custom_function.forwards("cuda")

    def declared(function, among=on_cpu, line: int = 2):
        code = inspect.unwrap(function.forward).__code__
        return custom_function.declared_at([("elsewhere.py", 1), (code.co_filename, code.co_firstlineno + line)], among)

    assert declared(DeclaredProduct) == {custom_function.Declared("cpu", None)}
    assert declared(HighProduct) == {custom_function.Declared("cpu", torch.float32)}
    assert declared(Product) == set()
    assert declared(HighProduct, on_cuda) == set()  # it speaks of the autocast of another device
    assert declared(HighProduct, line=-5) == set()


# ---- autograd.Function whose inputs are cast -------------------------------------------------------------------------------
BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""There the operation returns what its forward wrote too, and counts as written itself: it keeps its formats."""


def low_forward(ctx, x, w):
    """Keeps what it was given and what it made of it, and writes to memory of its own; its sum, which autocast would widen, is
    low."""
    y = torch.tanh(x @ w)
    scaled = y * 3.0
    if not BEFORE_2_13:
        scaled.mul_(1.0)
    ctx.save_for_backward(x, w, y)
    return scaled + 1, y.sum(-1)


def low_backward(ctx, g, h):
    x, w, y = ctx.saved_tensors
    g = g * 3 + h[:, None]
    g = g * (1 - y * y)
    return g @ w.mT, x.mT @ g


class Bf16Function(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x, w):
        return low_forward(ctx, x, w)

    @staticmethod
    def backward(ctx, g, h):
        return low_backward(ctx, g, h)


class Fp16Function(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx, x, w):
        return low_forward(ctx, x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g, h):
        return low_backward(ctx, g, h)


class Fp32Function(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        return low_forward(ctx, x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g, h):
        return low_backward(ctx, g, h)


class CudaFunction(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.bfloat16)
    def forward(ctx, x, w):
        return low_forward(ctx, x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, g, h):
        return low_backward(ctx, g, h)


def one_of_two(cast_inputs: torch.dtype):
    """Classes that the same lines make: which of them a graph came from cannot be told."""

    class Function(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, x, w):
            return low_forward(ctx, x, w)

        @staticmethod
        def backward(ctx, g, h):
            return low_backward(ctx, g, h)

    return Function


def of_function(function, region, compiler=lambda fn: fn) -> list[torch.Tensor]:
    leaves = [x8.clone().requires_grad_(), w.clone().requires_grad_()]
    torch._dynamo.reset()
    run = compiler(function.apply)
    with region:
        outputs = run(*leaves)
    pull([y.float() for y in outputs])
    assert all(x.grad is not None for x in leaves)
    return [*(y.detach().float() for y in outputs), *(x.grad for x in leaves if x.grad is not None)]


def compiling(amp):
    return lambda fn: torch.compile(lambda *leaves: fn(*leaves), backend=amp)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("function", "cast_inputs"), [(Bf16Function, "bf16"), (Fp16Function, "fp16"), (Fp32Function, "fp32")])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_inputs_are_cast_and_autocast_is_off_inside(function, cast_inputs: str, precision: str):
    amp = fxamp.Amp(precision=precision, lower="aot_eager", scaling=None)
    got = of_function(function, contextlib.nullcontext(), compiling(amp))
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    want = of_function(function, torch.autocast("cpu", dtype=low))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    exact = of_function(function, contextlib.nullcontext())
    assert torch.equal(got[0], exact[0]) == (cast_inputs == "fp32")
    plans = amp.graphs[0].variants[precision].plan.bodies.values()
    assert {d.computes for p in plans for d in p.decisions.values()} == {cast_inputs, "-"}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_a_rewritten_function_holds_to():
    captured, made = planned(lambda x: Bf16Function.apply(x, w)[0], x8.clone().requires_grad_())
    gm = graph.clone(captured.gm)
    passes.run(gm, rewrite.passes_for(captured, made), legal.checker(legal.REWRITTEN, captured.gm))
    testing.check_invariants(captured, gm, Policy())


class Masked(torch.autograd.Function):
    """Nobody can tell from the graph whether the mask was an argument, which autocast casts, or read from elsewhere."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x, mask):
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class WritesItsInput(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x):
        x.view(-1).mul_(2.0)
        return x + 1

    @staticmethod
    def backward(ctx, g):
        return g * 2


class AsksForFp32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x):
        return x @ torch.ones(8, 8, dtype=x.dtype)  # traced as float32

    @staticmethod
    def backward(ctx, g):
        return g @ torch.ones(8, 8, dtype=g.dtype)


def written_afterwards(x):
    y = Bf16Function.apply(x, w)[0]
    y.add_(1.0)
    return y


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: Masked.apply(x, x8.cos()), "without a gradient"),
        (lambda x: WritesItsInput.apply(x * 2), "written in place" if BEFORE_2_13 else "writes to an input"),
        (AsksForFp32.apply, "would be given bf16 and fp32"),
        (written_afterwards, "written in place"),
    ],
)
def test_a_function_that_would_be_another_program_keeps_its_formats(fn, reason: str):
    leaf = x8.clone().requires_grad_()
    _, made = planned(lambda x: fn(x), leaf)
    assert made.bodies
    assert all(reason in body.note for body in made.bodies.values())
    twin = x8.clone().requires_grad_()
    torch._dynamo.reset()
    got = torch.compile(lambda x: fn(x), backend=fxamp.Amp(precision="bf16", lower="aot_eager"))(leaf)
    want = fn(twin)
    pull(got)
    pull(want)
    assert leaf.grad is not None
    assert twin.grad is not None
    assert torch.equal(got, want)
    assert torch.equal(leaf.grad, twin.grad)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_policy_and_regions_go_before_a_declaration():
    function = Bf16Function
    leaf = x8.clone().requires_grad_()

    def opted_out(x):
        with torch.autocast("cpu", enabled=False):
            return function.apply(x, w)[0]

    assert planned(opted_out, leaf)[1].num_low_ops == 0
    kept = {"op:higher_order::autograd_function_apply": "keep"}
    assert planned(lambda x: function.apply(x, w)[0], leaf, policy=kept)[1].num_low_ops == 0
    assert planned(lambda x: CudaFunction.apply(x, w)[0], leaf)[1].num_low_ops == 0
    either = [one_of_two(dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert planned(lambda x: either[0].apply(x, w)[0], leaf)[1].num_low_ops == 0
    assert planned(lambda x: function.apply(x, w)[0], leaf, variant="fp32")[1].num_low_ops == 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("function", [Fp32Function, Bf16Function])
def test_without_gradients_autocast_is_off_in_its_forward_too(function):
    """Dynamo puts the forward into the graph then, and no more than its lines tell what it was."""
    with torch.no_grad():
        _, made = planned(lambda x: function.apply(x @ w, w)[0], x8)
    computes = [d.computes for d in made.decisions.values() if d.op == "matmul"]
    assert computes == ["bf16", "fp32"]


# ---- autograd.Function that works element by element -----------------------------------------------------------------------
class Gelu(torch.autograd.Function):
    """Undecorated: under autocast nothing in it is cast."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)) * g


class Large(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1e6

    @staticmethod
    def backward(ctx, g):
        return g * 1e6


def between_products(function, amp=None) -> list[torch.Tensor]:
    leaf = x8.clone().requires_grad_()
    torch._dynamo.reset()
    run = lambda x: function.apply(x @ w) @ w  # noqa: E731
    if amp is not None:
        run = torch.compile(run, backend=amp)
    y = run(leaf)
    pull(y.float())
    assert leaf.grad is not None
    return [y.detach().float(), leaf.grad]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_function_that_works_element_by_element_follows_its_operands():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager", output_dtype="low")
    got = between_products(Gelu, amp)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = between_products(Gelu)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    variant = amp.graphs[0].variants["bf16"]
    assert all(d.computes in ("bf16", "-") for body in variant.plan.bodies.values() for d in body.decisions.values())
    casts = [graph.own_cast(node) for node in graph.nodes_of_own_casts(variant.joint)]
    assert sorted((c.src, c.dst) for c in casts if c is not None) == [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "bf16")]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (Gelu, {"policy": {"op:tanh": "fp32"}}),
        (Gelu, {"policy": {"op:mul": "keep"}}),
        (Large, {"variant": "fp16"}),
        (Product, {}),
    ],
)
def test_a_function_that_a_rule_or_a_number_keeps_wide(function, options):
    rest = (w,) if function is Product else ()
    captured, made = planned(lambda x: function.apply(x @ w, *rest) @ w, x8.clone().requires_grad_(), **options)
    assert all(body.note for body in made.bodies.values())
    assert {d.computes for body in made.bodies.values() for d in body.decisions.values()} == {"fp32", "-"}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_invariants_of_a_function_that_follows():
    captured, made = planned(lambda x: Gelu.apply(x @ w) @ w, x8.clone().requires_grad_())
    gm = graph.clone(captured.gm)
    passes.run(gm, rewrite.passes_for(captured, made), legal.checker(legal.REWRITTEN, captured.gm))
    testing.check_invariants(captured, gm, Policy())
