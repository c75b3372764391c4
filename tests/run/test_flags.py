"""Flags of gradients: what a recorded step reads of them stays where it is, and stays true."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.run import flags as module
from fxamp.run.flags import ROOM_AT_FIRST, Flags, ProbedGraph
from tests.run.test_train_step import CUDA, batches, made, same, state_of

CPU = torch.device("cpu")


def of_two(index: int) -> ProbedGraph:
    """A graph of two parameters."""
    return ProbedGraph(
        index=index, positions=(0, 1), names=("a", "b"), are_parameters=(True, True), has_shares=False, num_regions=0
    )


def arrive(flags: Flags, graph: ProbedGraph, parameters: list[Tensor], values: list[float]) -> None:
    """As the backward of a graph tells it."""
    probe = flags.probe(graph, parameters)
    (probe * torch.tensor(values)).sum().backward()


def test_what_a_recording_reads_stays_where_it_is_and_says_who_owns_a_slot_now():
    """A recording knows addresses: another graph of the same parameters moves nothing, and counts once its room is settled."""
    flags, (a, b) = Flags(CPU), (torch.zeros(1), torch.zeros(1))
    flags.probe(of_two(0), [a, b])
    flags.settled([id(a)])
    mask = flags._mask([id(a)])
    where = mask.data_ptr()
    flags.probe(of_two(1), [b, a])
    assert mask.tolist() == [True] + [False] * (ROOM_AT_FIRST - 1)
    flags.settled([id(a)])
    assert [i for i, x in enumerate(mask.tolist()) if x] == [0, 4]
    arrive(flags, of_two(1), [b, a], [1.0, torch.inf, 0.0])
    assert bool(flags.overflow_of([id(a)]))
    assert not bool(flags.overflow_of([id(b)]))
    assert flags._mask([id(a)]).data_ptr() == where


def test_slots_of_probes_that_are_gone_belong_to_nobody():
    flags, kept = Flags(CPU), torch.zeros(1)
    gone = torch.zeros(1)
    flags.probe(of_two(0), [kept, gone])
    flags.settled([id(kept)])
    mask, owner = flags._mask([id(kept)]), id(kept)
    del gone
    flags.settled([owner])
    assert not bool(mask.any())
    assert flags._mask([owner]) is mask


def test_what_is_settled_is_another_only_where_a_change_was_counted():
    """A train step asks for it anew only then."""
    flags, (a, b) = Flags(CPU), (torch.zeros(1), torch.zeros(1))
    found, changes = flags.settled([id(a)]), [flags.num_changes]

    def settles() -> None:
        """Something has changed, and was counted."""
        nonlocal found
        assert flags.num_changes not in changes
        found = flags.settled([id(a)])
        changes.append(flags.num_changes)
        again = flags.settled([id(a)])
        assert all(x is y for x, y in zip(found, again, strict=True))
        assert flags.num_changes == changes[-1], "asking changes nothing"

    flags.probe(of_two(0), [a, b])
    settles()
    kept = [torch.zeros(1) for _ in range(ROOM_AT_FIRST)]
    flags.probe(of_two(1), kept[:2])
    settles()
    many = ProbedGraph(
        index=2,
        positions=tuple(range(len(kept))),
        names=("x",) * len(kept),
        are_parameters=(True,) * len(kept),
        has_shares=False,
    )
    flags.probe(many, kept)  # the store grows
    settles()
    del kept  # slots become free
    gc.collect()
    settles()
    before = found
    flags.forget((9, id(a)), id(a))  # somebody else may come by the id; a probe may be held by a backward
    settles()
    assert found[-1] is not before[-1]


def test_with_other_optimizers_loss_scaling_is_always_asked():
    """Which slots are theirs decides what an update reads."""
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    one, other = (torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=0.1) for _ in range(2))
    amp.attach(one)
    assert amp._scaler is not None
    assert amp._scaler.settled_version(one) == amp._scaler.settled_version(one) is not None
    amp.attach(other)
    assert amp._scaler.settled_version(one) is None


def test_kernels_are_for_where_there_is_triton(monkeypatch: pytest.MonkeyPatch):
    for has_triton in (True, False):
        monkeypatch.setattr(module, "has_triton", lambda has=has_triton: has)
        assert module.kernels_run_on(CUDA) == has_triton
        assert not module.kernels_run_on(CPU)


def test_a_store_that_grows_is_somewhere_else():
    """And says so: what is recorded is forgotten."""
    flags, parameters = Flags(CPU), [torch.zeros(1) for _ in range(ROOM_AT_FIRST)]
    before = {t.data_ptr() for t in flags.stores}
    for i, p in enumerate(parameters):
        arrive(flags, of_two(i), [p, p], [torch.inf if i == 1000 else 1.0, 1.0, 0.0])
    assert before.isdisjoint(t.data_ptr() for t in flags.stores[:2])
    assert bool(flags.overflow_of([id(parameters[1000])]))
    assert not bool(flags.overflow_of([id(parameters[999])]))


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("stats", [None, "overflow"])
def test_a_step_is_left_out_in_every_precision(stats: str | None, device: torch.device):
    """Of several programs only the first has run as a whole before they are recorded; what is recorded of the others must need
    nothing of the host, where somebody else may write later."""
    scaling = fxamp.DynamicScale(init=16.0)
    model, optimizer, amp = made(device, ladder=("fp16", "bf16", "fp32"), scaling=scaling, stats=stats)
    step = amp.train_step(model, nn.MSELoss(), optimizer)
    model.eval()  # a batch is counted by its norm, overflow or not
    good, bad = list(batches(device, 4)), next(batches(device, 1, bad=(0,)))
    for x, y in good:
        step(x, y)
    junk = [torch.zeros(ROOM_AT_FIRST, dtype=torch.bool, device=device) for _ in range(64)]
    if device.type == "cuda":
        junk += [torch.zeros(ROOM_AT_FIRST, dtype=torch.bool).pin_memory() for _ in range(64)]
        assert step.summary().num_recordings == 3
    for i, precision in enumerate(("fp16", "bf16", "fp32")):
        amp.set_precision(precision)
        step(*good[0])
        before = state_of(model, optimizer)
        step(*bad)
        assert same(before, state_of(model, optimizer)), precision
        assert amp.read_skipped_steps() == i + 1, precision
    assert not any(bool(x.any()) for x in junk)
