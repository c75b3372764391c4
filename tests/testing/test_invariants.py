"""Every invariant finds what it is there for: a fault is planted in a good rewrite, and the error names it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxamp import errors, graph, lower, testing
from fxamp.joint.casts import CancelCasts
from fxamp.passes import Change
from fxamp.policy import Policy
from fxamp.testing import InvariantBroken, Program
from tests.joint.test_casts import build

PROGRAM = Program(
    '''
    def forward(x: "f32[4, 4] whole", i: "i64[4]", h: "f16[4, 4]"):
        a = x @ x
        b = a.softmax(-1)
        c = a.relu()
        d = torch.cat([c, x])
        e = h + 1
        x.add_(1.0)
        return b, d, e, i, c
    '''
)


def find(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def feed(gm: fx.GraphModule, reader: str, index: int, dtype: torch.dtype) -> None:
    """Lets an operand of a node arrive through one more cast."""
    node = gm.graph.output_node() if reader == "output" else find(gm, reader)
    value = list(graph.operands(node))[index]
    cast = graph.insert_cast(value, dtype, before=node, why="planted")
    graph.map_operands(node, lambda i, x: cast if i == index else x)


def low_output(gm: fx.GraphModule) -> None:
    feed(gm, "output", 0, torch.bfloat16)


def low_softmax(gm: fx.GraphModule) -> None:
    node = find(gm, "softmax")
    graph.map_operands(node, lambda _, x: x.all_input_nodes[0])


def mixed_cat(gm: fx.GraphModule) -> None:
    feed(gm, "cat", 1, torch.bfloat16)


def lowered_half(gm: fx.GraphModule) -> None:
    feed(gm, "add", 0, torch.bfloat16)


def written_copy(gm: fx.GraphModule) -> None:
    feed(gm, "add_", 0, torch.float64)


def there_and_back(gm: fx.GraphModule) -> None:
    node = find(gm, "softmax")
    down = graph.insert_cast(node.all_input_nodes[0], torch.bfloat16, before=node, why="planted")
    up = graph.insert_cast(down, torch.float32, before=node, why="planted")
    graph.map_operands(node, lambda _, x: up)


def cast_of_nothing(gm: fx.GraphModule) -> None:
    node = find(gm, "relu")
    cast = graph.insert_cast(node.all_input_nodes[0], torch.bfloat16, before=node, why="planted")
    graph.map_operands(node, lambda _, x: cast)


def twice(gm: fx.GraphModule) -> None:
    node = find(gm, "softmax")
    cast = graph.insert_cast(find(gm, "matmul"), torch.float32, before=node, why="planted")
    graph.map_operands(node, lambda _, x: cast)


def wrong_record(gm: fx.GraphModule) -> None:
    node = find(gm, "softmax")
    graph.set_value(node, graph.value_of(node).t())


@pytest.mark.parametrize(
    ("plant", "invariant", "node", "message"),
    [
        (low_output, "observable dtypes", "softmax", "the output is torch.bfloat16, traced torch.float32"),
        (low_softmax, "allowed formats", "softmax", r"softmax \(high\) reads bf16"),
        (mixed_cat, "allowed formats", "cat", r"cat \(widest\) reads bf16"),
        (lowered_half, "allowed formats", "add", r"add \(follow\) reads bf16"),
        (written_copy, "observable dtypes", "add_", "the written x is torch.float64"),
        (there_and_back, "casts", "matmul", "is cast to fp32, and that again to bf16"),
        (cast_of_nothing, "casts", "matmul", "is cast from bf16 to bf16"),
        (twice, "casts", "matmul", "is cast to fp32 twice"),
        (wrong_record, "recorded values", "softmax", r"recorded as .*32\[4, 4\] with strides \[1, 4\], and is .*\[4, 1\]"),
    ],
)
def test_a_planted_fault_is_found(plant: Callable[[fx.GraphModule], None], invariant: str, node: str, message: str):
    captured = testing.capture_of(PROGRAM)
    rewritten = testing.rewrite_of(captured, Policy())
    testing.check_invariants(captured, rewritten, Policy())
    plant(rewritten)
    rewritten.recompile()
    with pytest.raises(InvariantBroken, match=message) as caught:
        testing.check_invariants(captured, rewritten, Policy())
    assert (caught.value.invariant, caught.value.where is not None) == (invariant, True)
    assert node in caught.value.node
    assert f"ERROR[InvariantBroken]: {invariant}: " in str(caught.value)


def test_a_rewrite_by_another_policy_is_found():
    captured = testing.capture_of(PROGRAM)
    rewritten = testing.rewrite_of(captured, Policy.of({"softmax": "bf16"}))
    with pytest.raises(InvariantBroken, match=r"allowed formats: softmax: softmax \(high\) reads bf16, at program_\w+.py:3"):
        testing.check_invariants(captured, rewritten, Policy())


def test_an_unstable_plan_is_found(monkeypatch):
    """Idempotence and identity, by a planner that lowers what the user made low once more."""
    captured = testing.capture_of(PROGRAM)
    rewritten = testing.rewrite_of(captured, Policy())
    wrong = testing.rewrite_of(captured, Policy.of({"softmax": "bf16"}))
    monkeypatch.setattr("fxamp.testing.invariants.rewrite_of", lambda *_, **__: wrong)
    for name in ("idempotence", "identity"):
        state = testing.Rewrite(
            captured=captured, rewritten=rewritten, policy=Policy(), variant="bf16", output_dtype="traced"
        )
        with pytest.raises(InvariantBroken, match=f"{name}: "):
            testing.INVARIANTS[name](state)


# ---- joint graphs -------------------------------------------------------------------------------------------------------
class Rounds:
    """A pass that is not EXACT."""

    def __call__(self, gm: fx.GraphModule) -> Change:
        feed(gm, "output", 0, torch.bfloat16)
        return Change(pass_name="Rounds")


def test_a_pass_that_changes_bits_is_found():
    before = build([(0, torch.float32, True)], torch.float32)
    with pytest.raises(InvariantBroken, match="exact bits: .*Rounds.* changed an output"):
        testing.check_exact(Rounds(), before)
    testing.check_exact(CancelCasts(), build([(0, torch.float32, True), (1, torch.bfloat16, True)], torch.bfloat16))


@pytest.mark.parametrize(
    ("steps", "src", "message"),
    [
        ([(0, torch.float32, True), (1, torch.bfloat16, True)], torch.bfloat16, "goes bf16 to fp32 to bf16 without need"),
        ([(0, torch.float32, True), (1, torch.float16, True)], torch.bfloat16, "goes bf16 to fp32 to fp16 without need"),
        ([(0, torch.bfloat16, True), (0, torch.bfloat16, True)], torch.float32, "once more"),
        ([(0, torch.float32, True)], torch.float32, "casts fp32 to fp32"),
    ],
)
def test_needless_casts_of_a_joint_graph_are_found(steps, src, message: str):
    gm = build(steps, src)
    with pytest.raises(InvariantBroken, match=message):
        testing.check_joint(gm, gm)


def test_a_joint_graph_that_lost_a_rounding_of_the_users_is_found():
    before = build([(0, torch.bfloat16, False), (1, torch.float32, False)], torch.float32)
    after = build([(0, torch.float32, False)], torch.float32)
    with pytest.raises(InvariantBroken, match="users' casts: 2 casts of the user's became 1"):
        testing.check_joint(before, after)


# ---- values -------------------------------------------------------------------------------------------------------------
SMALL = Program(
    '''
    def forward(x: "f32[4, 4] grad whole", m: "f32[4, 4] buffer whole"):
        m.add_(1.0)
        a = x @ m
        return a, a.t(), m
    '''
)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x, m: (x @ m.add_(1.0), (x @ m).t(), m), "these share memory: "),
        (lambda x, m: ((a := x @ m.add_(1.0)), a.t(), m.clone()), "these share memory: "),
        (lambda x, m: ((a := x @ (m + 1.0)), a.t(), m), "argument m: differs from eager by 1|output 2: differs"),
        (lambda x, m: ((a := x.detach() @ m.add_(1.0)), a.t(), m), "output 0: has requires_grad=False"),
        (lambda x, m: ((a := x @ m.add_(1.0)), a.t().double(), m), "output 1: is torch.float64"),
        (lambda x, m: ((a := x @ m.add_(1.0).clone() + x * 0.0625), a.t(), m), "output 0: .* by 0.125, allowed are 0"),
        (lambda x, m: ((a := x @ m.add_(1.0) + x - x.detach()), a.t(), m), "gradient of x: differs"),
    ],
)
def test_a_wrong_run_is_found(fn, message: str):
    testing.check_values(SMALL, SMALL.function())
    with pytest.raises(InvariantBroken, match=f"values: {message}|{message}"):
        testing.check_values(SMALL, fn)


def test_what_rounds_may_differ_a_little_and_no_more():
    program = Program('def forward(x: "f32[4, 4]"):\n    return x @ x,')
    testing.check_values(program, lambda x: ((x.bfloat16() @ x.bfloat16()).float(),))
    with pytest.raises(InvariantBroken, match="output 0: differs from eager"):
        testing.check_values(program, lambda x: (x @ x * 1.1,))
    with pytest.raises(InvariantBroken, match="output 0: differs from eager"):
        testing.check_values(program, lambda x: ((x.bfloat16() @ x.bfloat16()).float(),), precision="fp32")


REGION = Program(
    '''
    def forward(x: "f32[4, 4] grad"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x @ x
            b = (x @ a).tanh() @ a
        return b,
    '''
)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_region_of_the_users_rounds_in_its_own_format_and_no_more(precision: str):
    stock = torch.compile(REGION.function(), backend="aot_eager", fullgraph=True)
    (want,), (got,) = (testing.run(REGION, fn).gradients.values() for fn in (None, stock))
    assert want is not None
    assert got is not None
    ulp = torch.finfo(torch.bfloat16).eps * float(want.abs().max())
    assert 0.0 < float((got - want).abs().max()) < ulp, "stock does not round otherwise: choose another program"
    testing.check_values(REGION, stock, precision=precision, is_partitioned=True)
    with pytest.raises(InvariantBroken, match="gradient of x: differs from eager"):
        testing.check_values(REGION, lambda x: stock(x + (x - x.detach()) * 0.1), precision=precision, is_partitioned=True)


def test_where_aot_autograd_breaks_a_program_what_it_makes_of_it_counts():
    program = Program(
        '''
        def forward(x: "f32[4, 4]"):
            a = F.batch_norm(x, x[0].detach(), x[1].detach().abs(), None, None, True)
            return a,
        '''
    )
    stock = torch.compile(program.function(), backend=lower.aot_eager, fullgraph=True)
    with pytest.raises(InvariantBroken, match="output 0: differs from eager"):
        testing.check_values(program, stock)
    testing.check_values(program, stock, is_partitioned=True)
    with pytest.raises(InvariantBroken, match="output 0: differs from eager"):
        testing.check_values(program, lambda x: (stock(x)[0] * 1.5,), is_partitioned=True)


@pytest.mark.parametrize(("writes", "error"), [(True, None), (False, RuntimeError)])
def test_a_run_may_fail_only_where_aot_autograd_does(writes: bool, error: type[Exception] | None):
    program = Program(
        f'''
        def forward(x: "f32[4, 4] grad"):
            a = checkpoint(lambda x: (x @ x).relu(), x)
            {"a.add_(1.0)" if writes else "b = a + 1.0"}
            return a,
        '''
    )

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("modified by an inplace operation")

    with pytest.raises(error) if error else contextlib.nullcontext():
        testing.check_values(program, fails, is_partitioned=True)
    with pytest.raises(RuntimeError):
        testing.check_values(program, fails)

    def is_wrong(x: torch.Tensor) -> torch.Tensor:
        raise errors.IllegalGraph("a fault of fxamp's", way_out="")

    with pytest.raises(errors.IllegalGraph):
        testing.check_values(program, is_wrong, is_partitioned=True)
