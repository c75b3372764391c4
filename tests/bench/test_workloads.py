from __future__ import annotations

import pytest
import torch

from bench import systems, workloads
from bench.models import TextModel
from bench.systems import REFERENCE
from bench.workloads import NUM_BATCHES

RUNNABLE = [name for name, w in workloads.all_workloads().items() if w.size == "small"]


def test_names_are_distinct_and_found():
    everything = [workloads.all_workloads(), workloads.sweeps("cpu"), workloads.sweeps("cuda")]
    assert all(w.name == name for group in everything for name, w in group.items())
    crossings = {name for name, _ in workloads.CROSSINGS.values()}
    assert everything[0].keys() & (everything[1].keys() | everything[2].keys()) == crossings
    assert workloads.find("gpt2").name == "gpt2"


def test_sweeps_agree_where_names_do():
    """The same name on both kinds of device has to be the same work, since workers find it by its name."""
    cpu, gpu = workloads.sweeps("cpu"), workloads.sweeps("cuda")
    assert [cpu[n].about for n in cpu if n in gpu] == [gpu[n].about for n in cpu if n in gpu]


@pytest.mark.parametrize("device_type", workloads.CROSSINGS)
def test_a_sweep_changes_one_thing_of_the_workload_that_it_goes_through(device_type):
    crossing, *points = workloads.sweeps(device_type).values()
    name, at = workloads.CROSSINGS[device_type]
    assert (crossing.name, crossing.sweep) == (name, None)
    for point in points:
        assert point.sweep is not None
        over, value = point.sweep
        with torch.device("meta"):
            (x, _), model = point.batch(), point.model()
        assert isinstance(model, TextModel)
        now = {"layers": len(model.blocks), "batch size": len(x)}
        assert now == {**at, over: value}
        assert value != at[over]
        assert point.num_items == x.numel()
    assert {over for over, _ in (p.sweep for p in points if p.sweep)} == set(at)


def test_defaults_by_device():
    assert "gpt2" in workloads.default_names("cuda")
    assert "gpt2" not in workloads.default_names("cpu")
    assert not any(workloads.find(n).is_extra for n in workloads.default_names("cuda"))
    assert all(workloads.find(n).size == "small" for n in workloads.QUICK)


@pytest.mark.parametrize("name", RUNNABLE)
def test_everyone_gets_the_same(name):
    first, second = workloads.find(name).parts("cpu"), workloads.find(name).parts("cpu")
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for (x, y), (x_again, y_again) in zip(first.batches, second.batches, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)


@pytest.mark.parametrize("name", RUNNABLE)
def test_data_is_random_and_never_zero(name):
    batches = workloads.find(name).parts("cpu").batches
    assert len(batches) == NUM_BATCHES
    for x, _ in batches:
        assert x.double().std() > 0.1
    assert not any(torch.equal(batches[0][0], x) for x, _ in batches[1:])


@pytest.mark.parametrize("name", [n for n in RUNNABLE if workloads.find(n).kind == "train"])
def test_loss_falls_in_the_reference(name):
    """Else "does not train" could never be told."""
    workload = workloads.find(name)
    parts = workload.parts("cpu")
    runner = systems.prepare(systems.all_systems()[REFERENCE], workload, parts, "cpu")
    losses = [float(runner.step(parts.batches[: workload.num_micro_batches])) for _ in range(6)]
    assert losses[-1] < losses[0]


def test_channels_last():
    parts = workloads.find("resnet-small").parts("cpu")
    assert parts.batches[0][0].is_contiguous(memory_format=torch.channels_last)
    assert next(parts.model.parameters()).is_contiguous(memory_format=torch.channels_last)


def test_missing_package_is_named():
    absent = workloads.replace(workloads.find("gpt-small"), needs="a_package_that_nobody_has")
    assert absent.missing() == "a_package_that_nobody_has is not installed"
    assert workloads.find("gpt-small").missing() is None
