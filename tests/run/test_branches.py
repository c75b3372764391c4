"""Launches side by side: whoever shares memory with a writer keeps its place, however they are spread."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxamp
from fxamp.run import branches
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
def kernel(mutated=(), **signature):
    return SimpleNamespace(
        triton_meta={"signature": signature}, mutated_arg_names=list(mutated), fn=SimpleNamespace(__name__="triton_")
    )


A, B, C = (torch.zeros(4) for _ in range(3))


@pytest.mark.parametrize(
    ("made", "args", "kwargs", "written", "may_move", "is_known"),
    [
        (kernel(in_ptr0="*fp32", out_ptr0="*fp32", n="i32", XBLOCK="constexpr"), (A, B, 4), {}, [B], True, True),
        (kernel(in_out_ptr0="*fp32", in_ptr0="*fp32", n="i32"), (A, B, 4), {}, [A], True, True),
        (kernel(("in_ptr0",), in_ptr0="*fp32", in_ptr1="*fp32", n="i32"), (A, B, 4), {}, [A], True, True),
        (kernel(in_ptr0="*fp32", ws_ptr="*u8", out_ptr0="*fp32"), (A, B, C), {}, [B, C], True, True),
        (kernel(x="*fp32", y="*fp32", n="i32"), (A, B, 4), {}, [A, B], True, True),  # the user's own
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


# ---- compiled graphs ------------------------------------------------------------------------------------------------------
def test_operations_of_compiled_graphs(monkeypatch):
    """On a CPU too, if they are products alone: kernels in C++ are not seen."""
    streams = Ordered()
    moved = []
    monkeypatch.setattr(streams, "on", lambda branch: moved.append(branch) or contextlib.nullcontext())
    monkeypatch.setattr(branches, "CudaStreams", lambda _: streams)
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
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
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
