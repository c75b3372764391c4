from __future__ import annotations

import pytest
import torch

from bench import scaling


def test_stages_of_a_small_graph():
    facts = scaling.measure_passes(33)
    assert abs(facts.num_dynamo_nodes - 33) < 5
    assert facts.num_joint_nodes > facts.num_dynamo_nodes
    stages = facts.stage_ms
    assert set(stages) == {"capture", "plan", "rewrite", "copies and digests", "joint", "min_cut"}
    assert all(time_ms > 0 for time_ms in stages.values())
    assert 0 < facts.compile_s < 600


class Owner:
    @staticmethod
    def work(x: int) -> int:
        return x + 1

    @staticmethod
    def fail() -> None:
        raise LookupError("planned")


def test_time_spent_in_functions_adds_up():
    with scaling._timed({"a": (Owner, "work"), "b": (Owner, "fail")}) as spent_ms:
        assert Owner.work(1) == 2
        once_ms = spent_ms["a"]
        assert Owner.work(2) == 3
        with pytest.raises(LookupError, match="planned"):
            Owner.fail()
    assert 0 < once_ms < spent_ms["a"]
    assert spent_ms["b"] > 0
    before_ms = dict(spent_ms)
    Owner.work(3)
    assert spent_ms == before_ms


def test_calls_of_both_programs_are_timed(monkeypatch):
    monkeypatch.setattr(scaling, "NUM_CALLS", 5)
    monkeypatch.setattr(scaling, "NUM_REPETITIONS", 3)
    for what in scaling.DISPATCHES:
        facts = scaling.measure_dispatch("cpu", what, lower="aot_eager")
        assert facts.what == what
        assert len(facts.inductor_us) == len(facts.fxamp_us) == 3
        assert min(*facts.inductor_us, *facts.fxamp_us) > 0


@pytest.mark.parametrize("what", scaling.SWAPS)
def test_calls_run_in_both_precisions_as_often_with_few_changes_as_with_many(monkeypatch, what):
    monkeypatch.setattr(scaling, "NUM_CALLS", 20)
    monkeypatch.setattr(scaling, "NUM_REPETITIONS", 3)
    asked: list[str | None] = []
    make = scaling.SWAPS[what]

    def recording(device_type: str, lower: str):
        amp, call, num_calls = make(device_type, lower)
        set_precision = amp.set_precision

        def swap(precision):
            asked.append(precision)
            set_precision(precision)

        monkeypatch.setattr(amp, "set_precision", swap)

        def counted() -> object:
            asked.append(None)
            return call()

        return amp, counted, num_calls

    monkeypatch.setattr(scaling, "SWAPS", {what: recording})
    facts = scaling.measure_swaps("cpu", what, lower="aot_eager")
    assert len(facts.kept_us) == len(facts.swapped_us) == 3
    num_calls = 4 if what == "a train step" else 20
    kept = ["bf16", *[None] * (num_calls // 2), "fp32", *[None] * (num_calls // 2)]
    swapped = ["bf16", None, "fp32", None] * (num_calls // 2)
    assert asked[: len(kept) + len(swapped)] == kept + swapped
    assert sorted(asked[len(kept) + len(swapped) :], key=str) == sorted((kept + swapped) * 4, key=str)


def test_programs_compute_the_layer():
    program = scaling._program(torch._dynamo.lookup_backend("eager"), "cpu", trains=True)
    outputs = program()
    assert isinstance(outputs, (tuple, list))
    (output,) = outputs
    assert output.shape == (8, 8)
    assert output.requires_grad


@pytest.mark.slow  # compiles four train steps
def test_memory_of_train_steps_with_more_and_more_variants():
    meter = scaling.VariantMeter("cpu", lower="aot_eager")
    found = [meter.measure(num_regions) for num_regions in (None, 1)]
    assert [f.num_variants for f in found] == [1, 4]
    assert {f.device_bytes for f in found} == {None}
    assert found[0].num_parameters == 3 * (2 * 256 * 256 + 4 * 256)
    assert all(f.compile_s > 0 and f.host_bytes is not None for f in found)
