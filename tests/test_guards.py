"""Each guard: a program that is wrong without it and right with it, and programs at which it must not fire."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxamp
from fxamp import capture, guards, plan
from fxamp.guards import Known
from fxamp.policy import Policy
from tests.programs import Fn, captured_of, decisions, planned, relative_error

FP32_MIN = torch.finfo(torch.float32).min


def run(fn: Callable[..., torch.Tensor], x: torch.Tensor, policy: object, precision: str, guarded: bool = True):
    """(result, gradient of x) through fxamp, with the guards or without."""
    torch._dynamo.reset()
    amp = fxamp.Amp(precision=precision, scaling=None, policy=policy, lower="eager")
    with mock.patch.object(guards, "GUARDS", guards.GUARDS if guarded else ()):
        return result_and_gradient(torch.compile(fn, backend=amp), x)


def result_and_gradient(fn: Callable[..., torch.Tensor], x: torch.Tensor):
    x = x.clone().requires_grad_()
    out = fn(x)
    out.sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = relative_error(got, want) if want.norm() > 0 else (got.double() - want).norm().item()
    return math.inf if math.isnan(difference) else difference


W = torch.eye(8)
ZERO, ONES = torch.zeros(2, 8), torch.ones(2, 8)


def eye(x: torch.Tensor) -> torch.Tensor:
    return W.to(x.dtype)


def low(x: torch.Tensor) -> torch.Tensor:
    """x itself, in the low format."""
    return x.mm(eye(x))


@pytest.mark.parametrize(
    ("fn", "x", "policy", "precision", "guard"),
    [
        # an eps that the format does not hold
        (lambda x: low(x) / (low(x).abs() + 1e-12), ZERO, {}, "fp16", "constant_below"),
        (lambda x: low(x) / low(x).abs().clamp_min(1e-12), ZERO, {}, "fp16", "constant_below"),
        (lambda x: low(x) / (low(x).abs() + torch.tensor(1e-12)), ZERO, {}, "fp16", "constant_below"),
        (lambda x: low(x) / (low(x).norm(dim=-1, keepdim=True) + 1e-12), ZERO, {"norm": "low"}, "fp16", "constant_below"),
        (lambda x: low(x) * (low(x).pow(2).sum(-1, keepdim=True) + 1e-12).rsqrt(), ZERO, "pure", "fp16", "operand_below"),
        (lambda x: low(x) / (low(x).norm(dim=-1, keepdim=True) + 1e-12), ZERO, "pure", "fp16", "operand_below"),
        (lambda x: F.normalize(low(x), dim=-1), ZERO, {"normalize": "low"}, "fp16", "eps_of_a_norm"),
        (lambda x: F.cosine_similarity(low(x), low(x)), ZERO, {"cosine_similarity": "low"}, "fp16", "eps_of_a_norm"),
        # constants beyond the format
        (lambda x: low(x).masked_fill(x < 0.5, -1e9).amax(-1), ZERO, {}, "fp16", "constant_beyond"),
        (lambda x: low(x).masked_fill(x < 0.5, -(10**9)).amax(-1), ZERO, {}, "fp16", "constant_beyond"),
        (lambda x: torch.where(x < 0.5, FP32_MIN, low(x)).amax(-1), ZERO, {}, "bf16", "constant_beyond"),
        (lambda x: torch.softmax(low(x) + torch.full((8,), FP32_MIN), -1), ONES, "pure", "fp16", "operand_beyond"),
        (lambda x: torch.softmax(low(x) + torch.full((8,), FP32_MIN), -1), ONES, "pure", "bf16", "operand_beyond"),
        (lambda x: torch.softmax(torch.baddbmm((1.0 - (x[None] > 5).to(x.dtype)) * FP32_MIN, x[None], eye(x)[None]), -1),
         ONES, {}, "bf16", "operand_beyond"),
        # reductions longer than the format can count
        (lambda x: low(x).expand(9000, 2, 8).sum((0, 1)) * 1e-5, 9 * ONES, {"sum": "low"}, "fp16", "long_reduction"),
        (lambda x: low(x).expand(300, 2, 8).cumsum(0)[256] - 256.0, ONES, {"cumsum": "low"}, "bf16", "long_reduction"),
        (lambda x: (low(x).repeat(1, 375).softmax(-1).sum(-1) - 1).abs() * 1e3 + 1, ONES, {"softmax": "low"}, "bf16",
         "long_reduction"),
        (lambda x: (low(x + torch.tensor([0, 2**-7] * 4)).repeat(1, 64).mean(-1) - 1) * 256, ONES, {"op:mean": "low"}, "bf16",
         "long_reduction"),
        # a mean written as sum / length
        (lambda x: low(x * 2e4).sum(-1) / 8, ONES, {"sum": "low"}, "fp16", "sum_of_a_mean"),
        # a norm written as the root of a mean of squares
        (lambda x: low(x * 300) * torch.rsqrt((lambda y: y * y)(low(x * 300)).mean(-1, keepdim=True) + 1e-6), ONES, {}, "fp16",
         "squares_of_a_norm"),
    ],
)  # fmt: skip
def test_without_the_guard_it_is_wrong(fn, x, policy, precision, guard):
    want, _ = result_and_gradient(fn, x.double())
    assert error(run(fn, x, policy, precision)[0], want) < 0.02
    try:
        unguarded = error(run(fn, x, policy, precision, guarded=False)[0], want)
    except RuntimeError as refusal:  # PyTorch's own word for a constant that the format does not hold
        assert "without overflow" in str(refusal)  # noqa: PT017
    else:
        assert unguarded > 0.1
    assert guard in guards_of(fn, x, policy=policy, precision=precision)


def test_without_the_guard_a_gradient_is_nan():
    fn, policy = lambda x: F.layer_norm(low(x), (8,), eps=1e-12), {"layer_norm": "low"}
    _, want = result_and_gradient(fn, ONES.double())
    assert error(run(fn, ONES, policy, "fp16")[1], want) < 1e-3
    assert error(run(fn, ONES, policy, "fp16", guarded=False)[1], want) == math.inf
    assert guards_of(fn, ONES, policy=policy) == {"eps_of_a_norm"}


def guards_of(fn, *inputs, policy: object = None, precision: str = "fp16") -> set[str]:
    """Names of the guards that fire when fn is planned."""
    fired: set[str] = set()

    def listening(guard):
        def ask(call):
            why = guard(call)
            if why is not None:
                fired.add(guard.__name__)
            return why

        return ask

    with mock.patch.object(guards, "GUARDS", tuple(map(listening, guards.GUARDS))):
        planned(fn, *inputs, policy=policy or None, variant=precision)
    return fired


@pytest.mark.parametrize("policy", [None, "pure", {"op:*": "low"}])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: F.layer_norm(low(x), (8,)) + 1e-3, (2, 8)),
        (lambda x: F.group_norm(low(x), 2), (2, 8)),
        (lambda x: F.rms_norm(low(x), (8,), eps=1e-6), (2, 8)),
        (lambda x: F.batch_norm(low(x), torch.zeros(8), torch.ones(8), training=True), (2, 8)),
        (lambda x: low(x) / 2.5 * 8 ** -0.5 + 1.0, (2, 8)),
        (lambda x: low(x).masked_fill(x < 0, -1e4).softmax(-1), (2, 8)),
        (lambda x: low(x).masked_fill(x < 0, -math.inf).softmax(-1), (2, 8)),
        (lambda x: low(x).view(-1).unsqueeze(0).expand(100000, -1), (2, 8)),  # sizes are no values
        (lambda x: low(x).sum(-1) + low(x).softmax(-1).mean(-1), (2, 8)),
        (lambda x: F.gelu(low(x), approximate="tanh").clamp(-30, 30), (2, 8)),
    ],
)  # fmt: skip
def test_where_nothing_is_lost_no_guard_fires(fn, shape, precision, policy):
    assert guards_of(fn, torch.rand(shape), policy=policy, precision=precision) == set()


def test_bf16_has_the_range_of_fp32_and_its_eps():
    for fn in (lambda x: low(x) / (low(x).abs() + 1e-12), lambda x: F.normalize(low(x)), lambda x: low(x) / low(x).norm()):
        assert guards_of(fn, ZERO, policy="pure", precision="bf16") == set()


# ---- single numbers -------------------------------------------------------------------------------------------------------
def test_a_single_number_computed_in_fp32_stays_there_in_fp16():
    fn = lambda x: low(x) / low(x).sum()  # noqa: E731
    assert guards_of(fn, ZERO) == {"computed_scalar"}
    assert guards_of(fn, ZERO, precision="bf16") == set()
    d = decisions(fn, ZERO, variant="fp16")["div"]
    assert (d.computes, d.why) == ("fp32", "guard: sum_1, a single fp32 number computed here, may be beyond fp16")


def test_a_learned_temperature_is_not_computed():
    model = Fn(lambda m, x: low(x) * m.scale.view(()), scale=nn.Parameter(torch.ones(1)))
    assert guards_of(model, ZERO) == set()


# ---- dynamic shapes -------------------------------------------------------------------------------------------------------
def test_lengths_that_are_not_known_are_too_long():
    amp = fxamp.Amp(precision="bf16", policy={"softmax": "low", "sum": "low"}, lower="eager")
    fn = torch.compile(lambda x: low(x).softmax(0) + low(x).sum(-1, keepdim=True), backend=amp)
    for n in (9, 500):
        x = torch.rand(n, 8)
        torch._dynamo.mark_dynamic(x, 0)
        fn(x)
    assert len(amp.graphs) == 1  # asking adds no guard
    got = {d.op: (d.computes, d.why) for d in amp.graphs[0].variants["bf16"].plan.decisions.values()}
    assert got["softmax"] == (
        "fp32", "guard: it adds up a number of values not known when compiling, and bf16 counts to 256"
    )  # fmt: skip
    assert got["sum"] == ("bf16", "rule op:sum=low")


# ---- masks of attention ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("hidden", [FP32_MIN, -1e9, -1e5, -math.inf])
@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_attention_stays_low_and_its_mask_right(precision: str, hidden: float, lower: str):
    q, k, v = torch.randn(3, 2, 2, 6, 8).unbind()
    keep = torch.rand(2, 1, 6, 6) > 0.5
    keep[..., 0] = True
    keep[0, :, 3] = False  # a row that sees nothing
    bias = torch.randn(1, 2, 6, 6)

    def attend(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(keep, bias, hidden))

    inputs = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    amp = fxamp.Amp(precision=precision, scaling=None, lower=lower)
    out = torch.compile(attend, backend=amp)(*inputs)
    out.square().sum().backward()
    exact = [x.clone().requires_grad_() for x in (q, k, v, bias)]  # in fp32, in which a score vanishes beside -1e9
    want = attend(*exact)
    want.square().sum().backward()
    plan = amp.graphs[0].variants[precision].plan
    (decision,) = [d for d in plan.decisions.values() if d.op == "scaled_dot_product_attention"]
    assert decision.computes == precision
    seen = torch.ones(2, 1, 6, 1, dtype=torch.bool)
    if precision == "fp16" and hidden != -math.inf:
        seen[0, :, 3] = False  # fp16 has no number beside which a score vanishes: such a row averages by score
        assert out[0, :, 3].isfinite().all()
    assert error(out.where(seen, 0), want.where(seen, 0)) < 0.02
    for x, y in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert x.grad.isfinite().all()
        if seen.all():
            assert error(x.grad, y.grad) < 0.03


def test_a_mask_that_fits_is_cast_as_it_is():
    fn = lambda x: F.scaled_dot_product_attention(low(x), low(x), low(x), torch.where(x[:, :2] > 0.5, 0.0, -1e4))  # noqa: E731
    d = decisions(fn, ONES, variant="fp16")["scaled_dot_product_attention"]
    assert (d.computes, d.saturated) == ("fp16", frozenset())
    fn = lambda x: F.scaled_dot_product_attention(low(x), low(x), low(x), x[:, :2])  # noqa: E731
    assert decisions(fn, ONES, variant="fp16")["scaled_dot_product_attention"].saturated == {3}


# ---- what is known of values ----------------------------------------------------------------------------------------------
STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "1 - x": lambda x: 1.0 - x,
    "x * min": lambda x: x * FP32_MIN,
    "x * -1e4": lambda x: x * -1e4,
    "x + 0.1": lambda x: x + 0.1,
    "x / 3": lambda x: x / 3,
    "x + x": lambda x: x + x.flip(0),
    "x * x": lambda x: x * x.t(),
    "tril": lambda x: x.tril(),
    "t": lambda x: x.t(),
    "fill": lambda x: x.masked_fill(x > 0.5, 7.0),
    "where": lambda x: torch.where(x > 0.5, x, -3.0),
    "method": lambda x: x.where(x > 0.5, torch.full_like(x, 2.5)),
    "cat": lambda x: torch.cat([x, torch.ones(4, 4)])[:4],
    "pad": lambda x: F.pad(x, (1, 0), value=0.3)[:, :4],
    "float": lambda x: x.float(),
    "clamp": lambda x: x.clamp(-5.0, 5.0),
    "expand": lambda x: x.unsqueeze(0).expand(2, 4, 4)[1],
    "sin": lambda x: x.sin(),
}


def test_what_is_known_is_true():
    """Over every pair of steps, in one graph."""

    def fn(flags: torch.Tensor):
        x = flags.to(torch.float32)
        firsts = [x, *(step(x) for step in STEPS.values())]
        seconds = [step(y) for y in firsts for step in STEPS.values()]
        return tuple(y.clone() for y in (*firsts, *seconds))  # two outputs in one memory would be pinned

    flags = torch.rand(4, 4) > 0.5
    captured = captured_of(fn, flags)
    nodes = list(captured.gm.graph.nodes)
    found = guards.known(nodes, {node: captured.facts[node.name].op for node in nodes}, captured.pinned)
    outputs, num_known = fn(flags), 0
    for node, actual in zip(nodes[-1].args[0], outputs, strict=True):
        values = found.get(node, guards.UNKNOWN).values
        if values is not None:
            num_known += 1
            assert {v for v in actual.flatten().tolist() if not math.isnan(v)} <= set(values), node.name
    assert num_known > 0.8 * len(outputs)


@pytest.mark.parametrize(
    "fn",
    [
        lambda zeros, x: torch.slice_scatter(zeros, x[:1], 0, 0, 1),
        lambda zeros, x: torch.select_scatter(zeros, x[0], 0, 0),
        lambda zeros, x: torch.diagonal_scatter(zeros, x[:, 0]),
        lambda zeros, x: zeros.index_copy(0, torch.tensor([0]), x[:1]),
        lambda zeros, x: zeros.masked_scatter(x > 0, x),
        lambda zeros, x: zeros.where(x < 0.5, x),
        lambda zeros, x: F.embedding(torch.zeros(2, dtype=torch.long), x),
        lambda zeros, x: torch.constant_pad_nd(zeros[:, :4], (0, 4), 1e6),
        lambda zeros, x: torch.cartesian_prod(zeros[0], x[0])[:8].t(),
    ],
)
def test_a_value_put_into_zeros_is_not_taken_for_zero(fn):
    program = lambda x: low(x) + fn(torch.zeros(2, 8), x * 1e6)  # noqa: E731
    out, gradient = run(program, ONES, {}, "fp16")
    want = result_and_gradient(program, ONES)
    assert error(out, want[0]) < 1e-3
    assert error(gradient, want[1]) < 1e-3


def test_movement_holds_values_of_its_first_operand_alone():
    """Over PyTorch's own samples: in memory filled with 3, whatever else there is with 7, the result is 3 throughout."""
    from tests.ops.sweep import Program, database

    seen = set[str]()
    for info in database().values():
        name = capture.canonical(info.name)
        if name not in guards.MOVES_ALL:
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 3):
            if not isinstance(sample.input, torch.Tensor):
                continue
            program = Program.of(info, sample)
            first, *others = program.inputs
            memory = first.new_full((first.untyped_storage().nbytes() // 4,), 3.0)  # as_strided reads what lies around
            fills = [torch.full_like(x, 7.0) for x in others]
            fills.insert(0, memory.as_strided(first.shape, first.stride(), first.storage_offset()))
            result = program.call(fills)
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                seen.add(name)
                assert result.unique().tolist() in ([3.0], []), name
    assert len(seen) > 50


def test_memory_that_is_written_is_not_known():
    def fn(x):
        m = torch.zeros(8)
        m[0] = 3.14159
        return low(x) * m

    captured = captured_of(fn, ONES)
    nodes = list(captured.gm.graph.nodes)
    found = guards.known(nodes, {n: captured.facts[n.name].op for n in nodes}, captured.pinned)
    assert all(said.values is None for said in found.values())


@given(st.floats(width=32, allow_nan=False), st.sampled_from((torch.float16, torch.bfloat16)))
def test_exactness_is_torchs(value: float, dtype: torch.dtype):
    number = torch.tensor(value)
    kept = number.to(dtype).float() == number
    assert Known(values=frozenset((value,))).exists_in(dtype) == bool(kept)


# ---- real models ----------------------------------------------------------------------------------------------------------
def tiny(name: str, attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32),
        "llama": lambda: transformers.LlamaConfig(**small, num_key_value_heads=2),
        "bert": lambda: transformers.BertConfig(**small),
    }
    config = configs[name]()
    config.use_cache = False
    return transformers.AutoModel.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_ordinary_models_lose_no_product(name: str, attention: str):
    model = tiny(name, attention).eval()
    tokens, padding = torch.randint(0, 50, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    padding[1, :2] = 0
    captured = captured_of(lambda ids, seen: model(ids, attention_mask=seen)[0], tokens, padding)
    products = {"linear", "addmm", "matmul", "bmm", "baddbmm", "scaled_dot_product_attention"}
    for precision in ("bf16", "fp16"):
        made = plan.plan(captured, Policy(), variant=precision)
        computed = [(d.op, d.computes, d.why) for d in made.decisions.values() if d.op in products]
        assert len(computed) >= 2 * (4 if name == "gpt2" else 6)
        assert not [row for row in computed if row[2].startswith("guard: ")]
        assert sum(formats == precision for _, formats, _ in computed) >= len(computed) - 1  # Llama's frequencies stay fp32
