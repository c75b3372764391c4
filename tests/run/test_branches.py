"""Launches side by side: whoever shares memory with a writer keeps its place, however they are spread."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import fxamp
from fxamp import tf32
from fxamp.run import branches, recorder
from fxamp.run.branches import Branches, Given, Launch, Plan, Planned, Watched, needs_of, plan_of

MIB = 1 << 20


class Ordered:
    """Streams that run nothing, and know what comes before what."""

    def __init__(self):
        self.now = 0
        self.told = [set() for _ in range(branches.NUM_BRANCHES + 1)]
        self.before = {}
        """Launch -> those that are done when it starts."""
        self.num_waits = 0

    def mark(self, branch):
        return frozenset(self.told[branch])

    def wait(self, branch, mark):
        self.told[branch] |= mark
        self.num_waits += 1

    @contextlib.contextmanager
    def on(self, branch):
        before, self.now = self.now, branch
        yield
        self.now = before

    def run(self, i):
        self.before[i] = set(self.told[self.now])
        self.told[self.now].add(i)


def asked(i, memory, reads, writes, run, *, may_move=True, is_known=True):
    tensors = [memory[j] for j in (*reads, *writes)]
    written = [memory[j] for j in writes]
    return Given(f"launch {i}", tensors, written, may_move, is_known, lambda: run(i))


@st.composite
def programs(draw):
    """[(pieces read, pieces written, may it move?, is all known?)] over some pieces of memory."""
    num = draw(st.integers(3, 24))
    some = st.lists(st.integers(0, num - 1), min_size=1, max_size=2, unique=True)
    is_known = st.sampled_from((True,) * 9 + (False,))
    return num, draw(st.lists(st.tuples(some, some, st.booleans(), is_known), min_size=1, max_size=40))


@settings(max_examples=300)  # each takes a millisecond
@given(programs(), st.data())
def test_who_shares_memory_with_a_writer_waits(program, data):
    num, launches = program
    memory = [torch.zeros(4) for _ in range(num)]
    watched = Watched()
    for i, (reads, writes, may_move, is_known) in enumerate(launches):
        watched.launch(asked(i, memory, reads, writes, int, may_move=may_move, is_known=is_known))
    plan = Plan(
        tuple(launch.name for launch in watched.launches),  # any plan is to be right, not those alone that are good
        tuple(data.draw(st.integers(0, branches.NUM_BRANCHES)) for _ in launches),
    )
    streams = Ordered()
    run = Planned(plan, streams)
    for i, (reads, writes, may_move, is_known) in enumerate(launches):
        run.launch(asked(i, memory, reads, writes, streams.run, may_move=may_move, is_known=is_known))
    run.meet()
    assert streams.told[0] == set(range(len(launches)))
    for i, need in enumerate(needs_of(watched.launches)):
        assert need <= streams.before[i]
        if not launches[i][3]:
            assert set(range(i)) <= streams.before[i]


@pytest.mark.parametrize("max_held", [0, 3000, 1 << 40])
@pytest.mark.parametrize("seed", range(60))
def test_memory_that_is_used_again_is_waited_for(seed, max_held, monkeypatch):
    """What is dropped makes room for what comes: who shares an address with an earlier launch comes behind it."""
    monkeypatch.setattr(branches, "MAX_HELD_BYTES", max_held)
    draw = random.Random(seed)
    streams, live, touched = Ordered(), [torch.zeros(64) for _ in range(6)], []
    names = tuple(f"launch {i}" for i in range(60))
    run = Planned(Plan(names, tuple(draw.choice((0, 1, 2, 3)) for _ in names)), streams)
    for i, name in enumerate(names):
        reads, written = draw.sample(live, 2), torch.empty(64)
        touched.append(({x.data_ptr() for x in reads}, written.data_ptr()))
        run.launch(Given(name, (*reads, written), (written,), True, True, lambda i=i: streams.run(i)))
        live.append(written)
        del reads, written
        live.pop(draw.randrange(len(live)))
    run.meet()
    for i, (read, wrote) in enumerate(touched):
        for j, (read_before, wrote_before) in enumerate(touched[:i]):
            if wrote_before in (*read, wrote) or wrote in read_before:
                assert j in streams.before[i]


def chain_with_leaves(num_layers):
    """A backward: the gradient of each input waits for the last one, that of each weight is read by none."""
    launches = []
    for i in range(num_layers):
        launches.append(Launch(f"input {i}", frozenset({i}), frozenset({i + 1}), MIB, True))
        launches.append(Launch(f"weight {i}", frozenset({i}), frozenset({1000 + i}), MIB, True))
    return launches


def test_what_nothing_waits_for_leaves_the_main_branch():
    plan = plan_of(chain_with_leaves(20))
    assert plan is not None
    assert not any(plan.branches[::2])
    assert all(plan.branches[1:-4:2])  # the last have no slack
    assert set(plan.branches[1:-4:2]) == {2, 3}


def test_operations_have_one_branch():
    """Each stream more is a workspace of the matrix library more."""
    name = "aten::mm.out"
    plan = plan_of([launch._replace(name=name) for launch in chain_with_leaves(20)])
    assert plan is not None
    assert set(plan.branches) == {0, 1}


@pytest.mark.parametrize(
    "launches",
    [
        [],
        chain_with_leaves(6),
        [launch._replace(num_bytes=9 * MIB) for launch in chain_with_leaves(20)],
        [launch._replace(may_move=False) for launch in chain_with_leaves(20)],
        chain_with_leaves(40)[::2],
    ],
    ids=["empty", "few", "large", "fixed", "one chain"],
)
def test_where_nothing_is_gained_there_is_no_plan(launches):
    assert plan_of(launches) is None


def test_a_follower_in_a_branch_needs_no_wait():
    launches = [
        *chain_with_leaves(20),
        *(Launch(f"bias {i}", frozenset({1000 + i}), frozenset({2000 + i}), MIB, True) for i in range(6)),
    ]
    plan = plan_of(launches[:1] + launches[1:12] + launches[-6:-3] + launches[12:40])
    assert plan is not None
    where = dict(zip(plan.names, plan.branches, strict=True))
    assert sum(where[f"bias {i}"] == where[f"weight {i}"] for i in range(3)) >= 1


def run_of(plan, program):
    """Runs a program of (name, reads, writes) on its plan; returns its streams."""
    streams = Ordered()
    run = Planned(plan, streams)
    memory = [torch.zeros(4) for _ in range(100)]
    for i, (name, reads, writes) in enumerate(program):
        run.launch(asked(i, memory, reads, writes, streams.run)._replace(name=name))
    run.meet()
    return streams


def test_other_launches_than_those_planned_stay_where_they_are():
    program = [(f"k{i}", [i], [i + 50]) for i in range(20)]
    plan = Plan(tuple(name for name, _, _ in program), (0, *[1] * 19))
    assert run_of(plan, program).num_waits > 0
    other = [("another", [0], [50]), *program[1:]]
    streams = run_of(plan, other)
    assert streams.num_waits == 0
    assert streams.before[19] == set(range(19))


def test_branches_part_in_chunks():
    program = [(f"k{i}", [i], [i + 50]) for i in range(2 * branches.CHUNK + 1)]
    plan = Plan(tuple(name for name, _, _ in program), (0, *[1] * 2 * branches.CHUNK))
    assert run_of(plan, program).num_waits == 2  # to part once, for the main branch is told nothing else, and to meet


def test_what_a_branch_touches_is_held_until_it_meets():
    streams = Ordered()
    run = Planned(Plan(("k",) * 20, (1,) * 20), streams)
    gone = []
    for i in range(branches.CHUNK):
        x, y = torch.zeros(4), torch.zeros(4)
        run.launch(Given("k", (x, y), (y,), True, True, lambda i=i: streams.run(i)))
        gone.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
        del x, y
    assert len(streams.before) == branches.CHUNK
    assert not any(ref.expired() for ref in gone)
    run.meet()
    assert all(ref.expired() for ref in gone)


def test_more_than_may_be_held_makes_branches_meet(monkeypatch):
    monkeypatch.setattr(branches, "MAX_HELD_BYTES", 16)
    streams = Ordered()
    run = Planned(Plan(("k",) * 20, (1,) * 20), streams)
    for i in range(branches.CHUNK):
        run.launch(Given("k", (x := torch.zeros(4),), (x,), True, True, lambda i=i: streams.run(i)))
    assert len(streams.told[0]) == branches.CHUNK


def test_memory_that_was_given_back_is_another_piece():
    watched = Watched()
    for _ in range(3):
        x = torch.zeros(1000)
        watched.launch(Given("k", (x,), (x,), True, True, int))
        del x
    assert len({piece for launch in watched.launches for piece in launch.writes}) == 3


# ---- kernels of Triton's --------------------------------------------------------------------------------------------------
def kernel(mutated=(), *, name="triton_", kind=HeuristicType.POINTWISE, custom=False, do=None, **signature):
    return SimpleNamespace(
        triton_meta={"signature": signature},
        mutated_arg_names=list(mutated),
        fn=SimpleNamespace(__name__=name),
        heuristic_type=kind,
        custom_kernel=custom,
        do=do,
    )


A, B, C = (torch.zeros(4) for _ in range(3))


@pytest.mark.parametrize(
    ("made", "args", "kwargs", "written", "may_move", "is_known"),
    [
        (kernel(in_ptr0="*fp32", out_ptr0="*fp32", n="i32", XBLOCK="constexpr"), (A, B, 4), {}, [B], True, True),
        (kernel(in_out_ptr0="*fp32", in_ptr0="*fp32", n="i32"), (A, B, 4), {}, [A], True, True),
        (kernel(("in_ptr0",), in_ptr0="*fp32", in_ptr1="*fp32", n="i32"), (A, B, 4), {}, [A], True, True),
        (kernel(in_ptr0="*fp32", ws_ptr="*u8", out_ptr0="*fp32"), (A, B, C), {}, [B, C], True, True),
        (kernel(custom=True, in_ptr0="*fp32", y="*fp32", n="i32"), (A, B, 4), {}, [B], False, False),  # the user's own
        (kernel(kind=HeuristicType.TEMPLATE, in_ptr0="*fp32", out_ptr0="*fp32"), (A, B), {}, [A, B], True, True),
        (kernel(in_ptr0="*fp32", out_ptr0="*fp32"), (A, B, 4), {}, [A, B], True, True),  # others than we know
        (kernel(in_ptr0="*fp32", out_ptr0="*fp32"), (A, B), {"n": 4}, [A, B], False, False),
        (kernel(in_ptr0="tensordesc", out_ptr0="*fp32"), (SimpleNamespace(base=A), B), {}, [B], False, False),
        (kernel(in_ptr0="*fp32", n="i32"), (A, 4), {}, [], False, True),
    ],
)
def test_what_a_kernel_writes(made, args, kwargs, written, may_move, is_known):
    found = branches._given(made, args, kwargs, int)
    assert [id(x) for x in found.written] == [id(x) for x in written]
    assert (found.may_move, found.is_known) == (may_move, is_known)
    assert [id(x) for x in found.tensors] == [id(x) for x in args if isinstance(x, torch.Tensor)]


def test_memory_is_counted_once_however_often_it_is_held():
    run = Planned(Plan(("k",) * 20, (1,) * 20), Ordered())
    large = torch.zeros(1000)
    for i in range(branches.CHUNK):
        run.launch(Given("k", (large[i : i + 1], x := torch.zeros(1)), (x,), True, True, int))
    assert run._num_held_bytes == 4000 + 4 * branches.CHUNK


# ---- graphs as Inductor writes them ---------------------------------------------------------------------------------------
class Code:
    """A compiled graph of kernels in Python."""

    source_code = "async_compile.triton(\ndef call("

    def __init__(self, body):
        self.body = body

    def __call__(self, *inputs):
        call: Any = CompiledFxGraph.__call__
        return call(self, list(inputs))


@pytest.fixture
def streams(monkeypatch):
    found = Ordered()
    monkeypatch.setattr(branches, "CudaStreams", lambda _: found)
    monkeypatch.setattr(recorder, "is_recording", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(CompiledFxGraph, "__call__", lambda code, inputs: code.body(*inputs))
    monkeypatch.setattr(CachingAutotuner, "run", lambda kernel, *args, stream: kernel.do(*args))
    return found


def launch(name, do, x):
    made = kernel(name=name, do=lambda x, out: out.copy_(do(x)), in_ptr0="*fp32", out_ptr0="*fp32")
    run: Any = CachingAutotuner.run
    run(made, x, out := torch.empty(4, 4), stream=0)
    return out


def stack(x, extra=lambda i, x: (), num_layers=20):
    """A chain, and of each link something that nothing waits for."""
    leaves = []
    for i in range(num_layers):
        leaves += [launch("leaf", lambda x: x * 2, x), *extra(i, x)]
        x = launch("link", lambda x: x + 1, x)
    return *leaves, x


def in_branches(code, *inputs):
    found = Branches()
    with found.watching():
        code(*inputs)
    with found.followed():
        return found, code(*inputs)


def products(x):
    leaves = []
    for _ in range(20):
        torch.mm(x, x, out=(leaf := torch.empty(4, 4)))
        leaves.append(leaf)
        x = launch("link", lambda x: x + 1, x)
    return *leaves, x


@pytest.mark.parametrize("body", [stack, products])
def test_graphs_compute_what_they_did(body, streams):
    code, x = Code(body), torch.eye(4)
    expected = code(x)
    found, got = in_branches(code, x)
    assert found.num_moved() > 10
    assert streams.num_waits >= 4
    assert all(map(torch.equal, expected, got))


def inner(x):
    return torch.mm(y := launch("leaf", lambda x: x * 3, x), y, out=torch.empty(4, 4))


@pytest.mark.parametrize("source", [Code.source_code, "async_compile.multi_kernel(\ndef call("])
def test_graphs_that_an_operation_calls_are_no_part_of_the_one_around_it(source, streams, monkeypatch):
    """Their kernels may have the names that the plan expects."""
    monkeypatch.setattr(branches, "MIN_MOVED", 1)
    called = Code(inner)
    called.source_code = source
    with torch.library._scoped_library("fxamp_tests_branches", "FRAGMENT") as library:
        library.define("inner(Tensor x) -> Tensor")
        library.impl("inner", called, "CPU")
        operation = torch.ops.fxamp_tests_branches.inner.default
        code, x = Code(lambda x: stack(x, lambda i, x: [operation(x)] if i == 5 else [])), torch.eye(4)
        expected = code(x)
        _, got = in_branches(code, x)
    assert all(map(torch.equal, expected, got))


@pytest.mark.parametrize("num_layers", range(15, 15 + branches.CHUNK))
def test_what_is_launched_later_is_launched_as_it_was_asked_for(num_layers, streams, monkeypatch):
    """The last ones of a graph are, behind the switch that fxamp sets around it."""
    switched = []
    enabled = tf32.enabled
    monkeypatch.setattr(tf32, "enabled", lambda: switched.append(1) or enabled())

    def body(x):
        for _ in range(num_layers):
            torch.mm(x, x, out=torch.empty(4, 4))
            x = launch("link", lambda x: x + 1, x)
        return x

    code = Code(tf32.around(body))
    found = Branches()
    with found.watching():
        code(torch.eye(4))
    with found.followed():
        switched.clear()
        code(torch.eye(4))
    assert len(switched) == 1 + found.num_moved() % branches.CHUNK
    assert not tf32.is_on("matmul")


@pytest.mark.parametrize("at", range(1, 41, 3))
def test_after_an_error_all_branches_are_joined(at, streams, monkeypatch):
    """Also if it is the first of a branch that fails, halfway, or one that is launched when the graph has ended."""
    started = [[], [], [], []]

    def run(kernel, *args, stream):
        started[streams.now].append(num := sum(map(len, started)))
        streams.told[streams.now].add(num)
        if num == streams.fails_at:
            raise torch.cuda.OutOfMemoryError("out of memory")
        kernel.do(*args)

    monkeypatch.setattr(CachingAutotuner, "run", run)
    streams.fails_at = -1
    code, found = Code(stack), Branches()
    with found.watching():
        code(torch.eye(4))
    started, streams.told = [[], [], [], []], [set() for _ in streams.told]
    streams.fails_at = at - 1
    with found.followed(), pytest.raises(torch.cuda.OutOfMemoryError):
        code(torch.eye(4))
    assert streams.told[0] == set(range(at))


def test_a_graph_that_runs_meanwhile_is_not_recorded(streams, monkeypatch):
    code = Code(stack)
    found = Branches()
    with found.watching():
        code(torch.eye(4))
    monkeypatch.setattr(recorder, "is_recording", lambda: False)
    with found.followed():
        code(torch.eye(4))
    assert streams.num_waits == 0


def test_inputs_that_share_memory_at_other_addresses_are_left_alone(streams):
    x = torch.zeros(16)
    shifted = torch.from_dlpack(x[4:8])
    assert branches._overlap([x, 3, shifted])
    assert branches._overlap([x, shifted[:0], torch.from_dlpack(x[:2]), shifted])  # the second hides nothing
    assert not branches._overlap([x, x[4:8], torch.zeros(4), None])
    found = Branches()
    with found.watching():
        Code(lambda x, _, y: stack(y))(x, shifted, torch.eye(4))
    assert not found.num_moved()


@pytest.mark.parametrize(
    "line",
    ["stream1 = get_external_object_by_index(0)", "torch.ops.streams.fork.default(0, 1)", "    tl.extra.cuda.gdc_wait()"],
)
def test_graphs_that_rely_on_an_order_of_launches_are_left_alone(line):
    code = Code(stack)
    assert branches._launches_are_seen(code)
    code.source_code += line
    assert not branches._launches_are_seen(code)


# ---- compiled graphs ------------------------------------------------------------------------------------------------------
def test_operations_of_compiled_graphs(monkeypatch):
    """On a CPU too, if they are products alone: kernels in C++ are not seen."""
    streams = Ordered()
    moved = []
    monkeypatch.setattr(streams, "on", lambda branch: moved.append(branch) or contextlib.nullcontext())
    monkeypatch.setattr(branches, "CudaStreams", lambda _: streams)
    monkeypatch.setattr(recorder, "is_recording", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(branches, "MIN_MOVED", 2)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    compiled = torch.compile(model, options={"allow_buffer_reuse": False, "inplace_buffers": False})
    x = torch.randn(16, 16)

    def gradients():
        loss = compiled(x).sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients()
    found = Branches()
    with found.watching():
        gradients()
    assert found.num_moved() == 4  # those of the last layers have no slack
    with found.followed():
        got = gradients()
    assert len(moved) == 4
    assert all(map(torch.equal, expected, got))
    gradients()
    assert len(moved) == 4  # outside everything is as it was


def test_graphs_with_launches_that_nobody_sees_are_left_alone(monkeypatch):
    monkeypatch.setattr(branches, "MIN_MOVED", 0)
    compiled = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)))
    x = torch.randn(16, 16)
    compiled(x)
    found = Branches()
    with found.watching():
        compiled(x)
    assert not found._plans


def test_higher_order_operators_are_waited_for(streams):
    """Checkpointing with dropout may leave one in the code."""
    save = torch.ops.higher_order.run_and_save_rng_state

    def dropped(i, x):
        return [save(torch.ops.aten.clone.default, x)[1]] if i == 5 else []

    code, x = Code(lambda x: stack(x, dropped)), torch.eye(4)
    expected = code(x)
    found, got = in_branches(code, x)
    assert found.num_moved() > 10
    assert all(map(torch.equal, expected, got))


def test_a_graph_that_has_become_large_has_no_plan(streams, monkeypatch):
    code, found = Code(stack), Branches()
    with found.watching():
        code(torch.eye(4))
    assert found.num_moved()
    monkeypatch.setattr(branches, "MAX_BYTES", 1)
    with found.watching():
        code(torch.eye(4))
    assert not found.num_moved()


def test_an_operation_of_somebody_else_waits_for_all():
    run = Planned(Plan(("k", "mine::op.default"), (1, 0)), streams := Ordered())
    x = torch.zeros(4)
    run.launch(Given("k", (x,), (x,), True, True, lambda: streams.run(0)))
    run.launch(Given("mine::op.default", (), (), False, False, lambda: streams.run(1)))
    assert streams.before[1] == {0}


# ---- on a GPU -------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "tf32"])
def test_a_step_in_branches_is_the_same_step(precision):
    torch.use_deterministic_algorithms(True)
    try:
        weights = {}
        for cuda_graphs in (False, "auto"):
            torch.manual_seed(0)
            model = nn.Sequential(*(Block(128) for _ in range(6)), nn.Linear(128, 1)).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            amp = fxamp.Amp(precision=precision, cuda_graphs=cuda_graphs)
            with amp.train_step(model, nn.functional.mse_loss, optimizer, clip_grad_norm=1.0) as step:
                for i in range(200):
                    generator = torch.Generator("cuda").manual_seed(i)
                    x = torch.randn(256, 128, device="cuda", generator=generator)
                    step(x, x[:, :1])
                assert (step.summary().num_beside > 20) == (cuda_graphs == "auto")
            weights[cuda_graphs] = [p.detach().clone() for p in model.parameters()]
        assert all(map(torch.equal, weights[False], weights["auto"]))
    finally:
        torch.use_deterministic_algorithms(False)
