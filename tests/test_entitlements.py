"""What a user of mixed precision is entitled to: programs that a pass which only inserts casts gets silently wrong.

Each runs beside its eager fp32 twin: outputs, mutated inputs, parameters, buffers and gradients, dtypes included.
"""

from __future__ import annotations

import collections
import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

import fxamp
from tests.programs import Fn, everything, mlp, pull, relative_error

ROUNDED = 1 + 2**-10
"""bf16 has no such number and makes it 1: shows whether an operand was really lowered."""


def compiled(model, **options):
    return torch.compile(model, backend=fxamp.Amp(**{"precision": "bf16", "lower": "aot_eager", **options}))


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def check(model, *inputs, calls: int = 1, tol: float = 3e-2, grads: bool = True):
    """Compares with the eager twin and returns the outputs."""
    twin, twin_inputs = copy.deepcopy(model), copy.deepcopy(inputs)
    f = compiled(model)
    got = want = None
    for _ in range(calls):
        got, want = f(*inputs), twin(*twin_inputs)
        if grads:
            pull(got), pull(want)
    got_leaves, got_spec = tree_flatten(got)
    want_leaves, want_spec = tree_flatten(want)
    assert got_spec == want_spec
    pairs = {f"output {i}": pair for i, pair in enumerate(zip(got_leaves, want_leaves, strict=True))}
    pairs |= {f"input {i}": pair for i, pair in enumerate(zip(inputs, twin_inputs, strict=True))}
    for i, (a, b) in enumerate(zip(inputs, twin_inputs, strict=True)):
        pairs[f"input {i}.grad"] = (a.grad, b.grad)
    if isinstance(model, nn.Module):
        mine, theirs = everything(model, got), everything(twin, want)
        assert mine.keys() == theirs.keys()
        pairs |= {name: (mine[name], theirs[name]) for name in theirs}
    for name, (g, w) in pairs.items():
        if not isinstance(w, torch.Tensor):
            assert g == w, name
            continue
        assert (g.dtype, g.shape) == (w.dtype, w.shape), name
        if w.is_floating_point():
            assert relative_error(g, w) <= tol, name
        elif not w.is_complex():
            assert torch.equal(g, w), name
    return got


def linear_then(fn, **parts) -> Fn:
    """fn(module, y, *rest) on the result y of a linear."""
    return Fn(lambda m, x, *rest: fn(m, m.lin(x), *rest), lin=nn.Linear(8, 8), **parts)


# ---- aliasing and mutation ---------------------------------------------------------------------------------------------
def add_in_place(m, y):
    before = y * 2
    y.add_(1)
    return y, before, y.sum(0)


def view_sees_base(m, y):
    view = y.view(-1)
    y.mul_(2).add_(1)
    return view, view.sum()


def slice_assignment(m, y):
    y[1:3] = y[0] * 2
    return y.relu(), y[1]


def in_place_activations(m, y):
    early = y * 2
    y.relu_()
    late = F.leaky_relu(m.lin(y), 0.1, inplace=True)
    return early, y, late * 2


def running_buffers(m, y):
    m.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    m.steps += 1
    return y - m.mean, m.mean / m.steps


def accumulated_rows(m, y):
    out = torch.zeros_like(y)
    out[0] += y[1]
    out.select(0, 2).copy_(y[0])
    return out


@pytest.mark.parametrize(
    "fn", [add_in_place, view_sees_base, slice_assignment, in_place_activations, running_buffers, accumulated_rows]
)
def test_mutation(fn):
    parts = {"mean": torch.zeros(8), "steps": torch.zeros((), dtype=torch.long)} if fn is running_buffers else {}
    check(linear_then(fn, **parts), leaf(4, 8), calls=3 if parts else 1)


def test_out_writes_into_the_callers_tensor():
    def fn(a, b, product, total):
        torch.mm(a, b, out=product)
        torch.add(product, 1, out=total)
        return total * 2

    check(fn, torch.randn(8, 8), torch.randn(8, 8), torch.zeros(8, 8), torch.zeros(8, 8), grads=False)


def test_outputs_that_are_inputs_still_share_their_memory():
    m, x = Fn(lambda m, x: (x, x.view(-1), x[1:], m.lin(x)), lin=nn.Linear(8, 8)), torch.full((4, 8), ROUNDED)
    with torch.no_grad():
        same, flat, tail, _ = compiled(m)(x)
    assert same.data_ptr() == flat.data_ptr() == x.data_ptr()
    assert tail.data_ptr() == x[1:].data_ptr()
    assert (flat == ROUNDED).all()


def test_two_outputs_in_one_memory():
    y, v = compiled(linear_then(lambda m, y: (y, y.view(-1))))(torch.randn(4, 8))
    assert y.data_ptr() == v.data_ptr()


def test_a_weight_written_in_forward_is_used_as_written():
    def forward(m, x):
        with torch.no_grad():
            m.lin.weight.clamp_(-0.05, 0.05)
        return m.lin(x)

    check(Fn(forward, lin=nn.Linear(8, 8)), leaf(4, 8), calls=2)


def test_weights_written_between_calls_are_used_by_the_next():
    m, x = nn.Linear(16, 1), torch.randn(64, 16)
    f, optimizer = compiled(Fn(lambda s, x: s.lin(x), lin=m)), torch.optim.SGD(m.parameters(), lr=0.1)
    target = x @ torch.randn(16, 1)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(f(x), target)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    m.weight.data.copy_(torch.full((1, 16), 2.0)), m.bias.data.zero_()
    with torch.no_grad():
        assert relative_error(f(x), 2 * x.sum(1, keepdim=True)) < 3e-2


def test_the_bits_of_a_float_are_those_of_the_traced_dtype():
    def fn(m, y):
        bits = y.detach().view(torch.int32)
        return (bits >> 31) & 1, (bits & 0x7FFFFFFF).view(torch.float32)

    m, x = linear_then(fn), torch.randn(4, 8)
    sign, size = compiled(m)(x)
    y = m.lin(x)
    assert sign.shape == y.shape
    assert relative_error(size, y.abs()) < 3e-2


# ---- types and structure -----------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: object = None


Pair = collections.namedtuple("Pair", "first second")


def test_structures_come_back_as_they_were():
    def nested(m, y):
        return {"y": y, "n": None, "t": (y + 1, [y * 2]), "k": 3, "s": "text", "p": Pair(y, None)}

    check(linear_then(nested), leaf(4, 8))
    out = compiled(linear_then(lambda m, y: Output(y, [y * 2])))(torch.randn(4, 8))
    assert isinstance(out, Output)
    assert out.logits.dtype == torch.float32


def test_other_types_pass_exactly():
    def forward(m, x, ids, mask, z, d):
        y = m.lin(m.table(ids) + x)
        return y * mask, ids * 2**20 + 1, ~mask, z * z.conj() + 1j, d @ d + 1e-9

    m = Fn(forward, lin=nn.Linear(8, 8), table=nn.Embedding(5, 8))
    inputs = (torch.randn(4, 8), torch.tensor([0, 4, 2, 2]), torch.rand(4, 8) > 0.5,
              torch.randn(4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.float64))  # fmt: skip
    want, got = m(*inputs), compiled(m)(*inputs)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for g, w in zip(got[1:], want[1:], strict=True):
        assert torch.equal(g, w)


def test_cat_rounds_only_the_lowered_side():
    a, b = compiled(Fn(lambda m, x: (torch.cat([x, m.lin(x)], -1), torch.stack([m.lin(x), x])), lin=nn.Linear(8, 8)))(
        torch.full((4, 8), 1 + 2**-12)
    )
    assert (a[:, :8] == 1 + 2**-12).all()
    assert (b[1] == 1 + 2**-12).all()


def test_attributes_set_in_forward_have_the_traced_dtype():
    def forward(m, x):
        y = m.lin(x)
        m.last = y.detach()
        return y, y.relu(), y.mean(), y.max(-1).values

    m = Fn(forward, lin=nn.Linear(8, 8))
    out = compiled(m)(torch.randn(4, 8))
    assert {t.dtype for t in (*out, m.last)} == {torch.float32}


def test_a_custom_operation_sees_the_dtypes_it_was_traced_with():
    seen: list[torch.dtype] = []

    @torch.library.custom_op("fxamp_test::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x.cumsum(-1)

    scan.register_fake(lambda x: torch.empty_like(x))
    scan.register_autograd(lambda ctx, g: g.flip(-1).cumsum(-1).flip(-1))
    check(Fn(lambda m, x: m.b(scan(m.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8)), leaf(4, 8))
    assert set(seen) == {torch.float32}


# ---- regions -----------------------------------------------------------------------------------------------------------
def test_a_head_that_opted_out_has_finite_right_gradients():
    def forward(m, x):
        h = m.body(x).relu()
        with torch.autocast("cpu", enabled=False):
            return m.head(h.float())

    check(Fn(forward, body=nn.Linear(16, 16), head=nn.Linear(16, 8)), leaf(64, 16))

    def whole(m, x):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ m.w.float().T

    check(Fn(whole, w=nn.Parameter(torch.randn(8, 32))), leaf(16, 32), tol=1e-6)


def test_rotary_angles_computed_in_an_opted_out_region_are_exact():
    def forward(m, x):
        with torch.autocast("cpu", enabled=False):
            angle = torch.arange(8192).float()[:, None] @ m.freq[None]
        return angle.cos(), angle.sin(), m.lin(x)

    m = Fn(forward, lin=nn.Linear(8, 8), freq=1e4 ** (-torch.arange(4) / 4))
    for got, want in zip(compiled(m)(torch.randn(4, 8))[:2], m(torch.randn(4, 8))[:2], strict=True):
        assert relative_error(got, want) < 1e-6


@pytest.mark.filterwarnings("ignore:.*ambient autocast")
def test_autocast_may_stand_around_inside_or_over():
    m, x = mlp(16, 16, 4), torch.randn(4, 16)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x)

    decorated = torch.autocast("cpu", torch.bfloat16)(lambda x: m(x))
    for fn in (inside, decorated):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                y = compiled(fn)(x)
            assert relative_error(y, m(x)) < 3e-2
            assert y.requires_grad == grad


# ---- what runs low -----------------------------------------------------------------------------------------------------
def full(*shape: int) -> torch.Tensor:
    return torch.full(shape, ROUNDED)


@pytest.mark.parametrize(
    ("fn", "inputs", "want"),
    [
        (F.linear, (full(4, 16), torch.ones(8, 16)), 16.0),
        (torch.bmm, (full(2, 4, 16), torch.ones(2, 16, 4)), 16.0),
        (lambda x, w: torch.addmm(torch.zeros(4), x, w), (full(4, 16), torch.ones(16, 4)), 16.0),
        (lambda x, w: torch.einsum("bij,bjk->bik", x, w), (full(2, 4, 16), torch.ones(2, 16, 4)), 16.0),
        (F.conv1d, (full(1, 16, 8), torch.ones(16, 16, 1)), 16.0),
        (F.conv2d, (full(1, 16, 4, 4), torch.ones(16, 16, 1, 1)), 16.0),
        (F.conv3d, (full(1, 16, 2, 2, 2), torch.ones(16, 16, 1, 1, 1)), 16.0),
        (F.conv_transpose2d, (full(1, 16, 4, 4), torch.ones(16, 16, 1, 1)), 16.0),
        (lambda v, q: F.scaled_dot_product_attention(q, q, v), (full(1, 2, 8, 16), torch.ones(1, 2, 8, 16)), 1.0),
    ],
)
def test_heavy_operations_really_run_low(fn, inputs, want: float):
    for precision, size in (("bf16", 1.0), ("fp32", ROUNDED)):
        torch._dynamo.reset()
        with torch.no_grad():
            y = compiled(lambda *a: fn(*a), precision=precision)(*inputs)
        assert y.dtype == torch.float32
        assert abs((y / want).mean().item() - size) < 2e-4


def test_fp32_buffers_between_linears_do_not_widen_the_second():
    m = Fn(lambda m, x: m.b((m.a(x) - m.shift) * m.scale), a=nn.Linear(16, 16), b=nn.Linear(16, 4, bias=False),
           shift=torch.zeros(16), scale=torch.ones(16))  # fmt: skip
    with torch.no_grad():
        m.a.weight.copy_(torch.eye(16)), m.a.bias.zero_(), m.b.weight.fill_(ROUNDED)
        assert (compiled(m)(torch.ones(4, 16)) == 16).all()


# ---- modules -----------------------------------------------------------------------------------------------------------
def test_frozen_tied_and_shared_weights():
    m = mlp(8, 16, 16, 2)
    m[2].requires_grad_(False), m[0].weight.requires_grad_(False)
    check(m, leaf(4, 8))

    tied = Fn(lambda m, ids: m.head(m.mid(m.table(ids)).tanh()), table=nn.Embedding(11, 8), mid=nn.Linear(8, 8),
              head=nn.Linear(8, 11, bias=False))  # fmt: skip
    tied.head.weight = tied.table.weight
    check(tied, torch.randint(0, 11, (3, 5)))
    assert tied.head.weight is tied.table.weight

    check(Fn(lambda m, x: ((x @ m.w).relu() @ m.w.T, m.w.pow(2).sum() * 1e-3), w=nn.Parameter(torch.randn(8, 16))), leaf(4, 8))


def test_scatter_add_into_an_fp32_tensor():
    def forward(m, x, index):
        for _ in range(2):
            x = m.norm(torch.zeros(4, 8).scatter_add(0, index, m.lin(x)))
        return x

    index = torch.tensor([0, 1, 1, 3])[:, None].expand(4, 8)
    check(Fn(forward, lin=nn.Linear(8, 8), norm=nn.LayerNorm(8)), leaf(4, 8), index)


def test_attention_with_a_float_mask_and_causal():
    def forward(m, x, mask):
        q, k, v = m.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        masked = F.scaled_dot_product_attention(q, k, v, mask)
        return masked, F.scaled_dot_product_attention(q, k, v, is_causal=True)

    mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    check(Fn(forward, qkv=nn.Linear(16, 48)), leaf(2, 6, 16), mask)


def test_recurrent():
    def forward(m, x):
        y, (_, c) = m.lstm(x)
        z, _ = m.gru(y)
        state = m.cell(z[0])
        for part in z[1:]:
            state = m.cell(part, state)
        return y, c, state

    check(Fn(forward, lstm=nn.LSTM(8, 8, 2), gru=nn.GRU(8, 8), cell=nn.LSTMCell(8, 8)), leaf(3, 2, 8))


def test_vision():
    def forward(m, x):
        x = m.up(m.norm(m.conv(x)).relu())
        x = F.interpolate(F.max_pool2d(x, 2), scale_factor=1.5, mode="bilinear")
        grid = F.affine_grid(torch.eye(2, 3)[None].repeat(2, 1, 1), [2, 4, 5, 5], align_corners=False)
        return F.grid_sample(x, grid, align_corners=False), F.pad(x, (1, 1, 1, 1), mode="reflect"), F.pixel_shuffle(x, 2)

    m = Fn(forward, conv=nn.Conv2d(4, 8, 3, groups=2), norm=nn.GroupNorm(2, 8), up=nn.ConvTranspose2d(8, 4, 2, 2))
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    check(m.to(memory_format=torch.channels_last), x)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_batch_norm_statistics_over_three_batches_and_in_eval():
    first, second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 3, bias=False)
    m = nn.Sequential(first, nn.BatchNorm2d(8), nn.GELU(), second, nn.BatchNorm2d(4))
    x = torch.randn(4, 3, 8, 8) * 2 + 0.5
    check(m, x, calls=3, tol=6e-2)
    assert m[1].running_mean.dtype == m[4].running_var.dtype == torch.float32
    assert m[1].num_batches_tracked == 3
    for p in m.parameters():
        p.grad = None
    check(m.eval(), x, grads=False)


def test_losses_of_large_logits():
    def forward(m, x, t):
        y = m.lin(x) * 20
        soft = (y.detach() * 0.5).softmax(-1)
        return (F.cross_entropy(y, t, ignore_index=-100), F.cross_entropy(y, t.clamp(min=0), label_smoothing=0.1),
                F.cross_entropy(y, t.clamp(min=0), weight=m.w), F.cross_entropy(y, soft),
                F.nll_loss(y.log_softmax(-1), t.clamp(min=0)),
                F.kl_div(y.log_softmax(-1), soft, reduction="sum"))  # fmt: skip

    t = torch.randint(0, 50, (16,))
    t[3:6] = -100
    check(Fn(forward, lin=nn.Linear(8, 50), w=torch.rand(50)), leaf(16, 8), t, tol=5e-2)


def test_train_and_eval_compile_once_each():
    m = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    f, x = torch.compile(m, backend=amp), torch.randn(16, 8)
    for _ in range(3):
        for training in (True, False):
            m.train(training)
            f(x)
    assert len(amp.graphs) == 2


def test_a_state_dict_stays_what_it_was():
    m = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    before = {k: (v.dtype, v.data_ptr()) for k, v in m.state_dict().items()}
    optimizer, f = torch.optim.AdamW(m.parameters(), lr=1e-2), compiled(m)
    for _ in range(2):
        loss = f(torch.randn(4, 8)).pow(2).sum()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    assert {k: (v.dtype, v.data_ptr()) for k, v in m.state_dict().items()} == before
    assert all(t.dtype == torch.float32 for s in optimizer.state.values() for t in tree_leaves(s))
