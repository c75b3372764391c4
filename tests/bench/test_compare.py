from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench import compare
from bench.systems import ANCHOR, REFERENCE
from tests.bench.make import CPU, FALLING, ceilings, facts, measurement, run

TOGETHER = (ANCHOR, "a", "fxamp-bf16")


def on(*measurements):
    return compare.OnWorkload(measurements)


# ---- ratios ----------------------------------------------------------------------------------------------------------
def test_ratio_of_those_who_took_turns_pairs_repetitions():
    """The machine slows down to a third in the last repetition; the ratio does not notice."""
    a = measurement("a", (10.0, 10.0, 30.0), together=TOGETHER)
    b = measurement("fxamp-bf16", (5.0, 6.0, 15.0), together=TOGETHER)
    ratio = compare.ratio(b, a)
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 0.6)


def test_ratio_across_runs_goes_through_the_anchor():
    """The second run's machine was half as fast, for everybody."""
    a = measurement("a", (20.0,) * 3, anchor_ms=(10.0,) * 3)
    b = measurement("fxamp-bf16", (20.0,) * 3, anchor_ms=(20.0,) * 3, run=run("r2"))
    ratio = compare.ratio(b, a)
    assert ratio is not None
    assert ratio.median == 0.5


def test_ratio_across_groups_of_one_run_goes_through_the_anchor():
    a = measurement("a", (20.0,) * 3, anchor_ms=(10.0,) * 3, together=(ANCHOR, "a"))
    b = measurement("fxamp-bf16", (20.0,) * 3, anchor_ms=(20.0,) * 3, together=(ANCHOR, "fxamp-bf16"))
    ratio = compare.ratio(b, a)
    assert ratio is not None
    assert ratio.median == 0.5


def test_no_ratio_without_a_common_yardstick():
    a = measurement("a", (20.0,) * 3, anchor_ms=(), together=("a",))
    b = measurement("fxamp-bf16", (20.0,) * 3, run=run("r2"))
    assert compare.ratio(b, a) is None
    assert compare.ratio(measurement("a", None), b) is None


def test_without_an_anchor_rows_of_different_runs_meet_in_a_peer():
    """The second run's machine was half as fast, for everybody; fxamp's own rows, of different sources, are no yardstick."""
    peers = [measurement("a", (t,) * 3, together=("a", "fxamp-bf16", name), anchor_ms=(), run=run(r))
             for t, name, r in ((10.0, "fxamp-fp16", "r1"), (20.0, "b", "r2"))]  # fmt: skip
    ours = [measurement("fxamp-bf16", (t,) * 3, together=p.timing.together, anchor_ms=(), run=p.run)
            for t, p in zip((8.0, 99.0), peers, strict=True) if p.timing]  # fmt: skip
    one = measurement("fxamp-fp16", (5.0,) * 3, together=("a", "fxamp-bf16", "fxamp-fp16"), anchor_ms=(), run=run("r1"))
    other = measurement("b", (40.0,) * 3, together=("a", "fxamp-bf16", "b"), anchor_ms=(), run=run("r2"))
    rows = on(*peers, *ours, one, other)
    assert compare.ratio(one, other) is None
    found = compare.ratio(one, other, rows)
    assert found is not None
    assert (found.median, found.low) == (0.25, 0.25)  # 5 / 10 over 40 / 20
    assert compare.ratio(one, other, on(*ours, one, other)) is None
    # Another peer says 5 / 20 over 40 / 20; between the two lies their median.
    names = [(*x.timing.together, "c") for x in (one, other) if x.timing]
    runs = (run("r1"), run("r2"))
    more = [measurement("c", (20.0,) * 3, together=n, anchor_ms=(), run=r) for n, r in zip(names, runs, strict=True)]
    one = measurement("fxamp-fp16", (5.0,) * 3, together=names[0], anchor_ms=(), run=run("r1"))
    other = measurement("b", (40.0,) * 3, together=names[1], anchor_ms=(), run=run("r2"))
    found = compare.ratio(one, other, on(*peers, one, other, *more))
    assert found is not None
    assert found.median == (0.25 + 0.125) / 2
    found = compare.ratio(one, peers[1], rows)  # the peer itself, of another run
    assert found is not None
    assert found.median == 0.5


# ---- results and non-results -----------------------------------------------------------------------------------------
REFERENCE_ROW = measurement(REFERENCE, precision="fp32")


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (FALLING, None),
        ((5.0, *[3.1] * 7), None),  # 95 % of the drop
        ((5.0, *[3.5] * 7), "trains worse"),
        ((5.0, *[5.0] * 7), "trains worse"),
        ((5.0, *[math.nan] * 7), "not finite"),
        ((math.inf, *[3.0] * 7), "not finite"),
    ],
)
def test_training(losses, says):
    m = measurement("fxamp-bf16", facts=facts(losses=losses))
    found = compare.problem(m, on(m, REFERENCE_ROW))
    assert (found is None) == (says is None)
    assert says is None or says in str(found)


def test_a_gap_below_one_rounding_is_none():
    reference = measurement(REFERENCE, facts=facts(losses=(5.0, *[4.99] * 7)))
    m = measurement("fxamp-bf16", facts=facts(losses=(5.0, *[5.001] * 7)))
    assert compare.problem(m, on(m, reference)) is None


def test_other_lengths_are_not_compared():
    m = measurement("fxamp-bf16", facts=facts(losses=(5.0, 5.0)))
    assert compare.problem(m, on(m, REFERENCE_ROW)) is None


@pytest.mark.parametrize(("num_skipped", "is_good"), [(None, False), (0, False), (2, True), (7, True)])
def test_skipped_steps_are_no_updates(num_skipped, is_good):
    """Who has skipped two steps is as far as fp32 was two steps before."""
    falling = tuple(9.0 - 0.5 * i for i in range(12))
    m = measurement("fxamp-fp16", facts=facts(losses=(9.0, 9.0, *falling[:-2]), num_skipped=num_skipped))
    reference = measurement(REFERENCE, facts=facts(losses=falling))
    assert (compare.problem(m, on(m, reference)) is None) == is_good


@pytest.mark.parametrize(("error", "is_good"), [(0.01, True), (0.2, False), (math.nan, False)])
def test_inference(error, is_good):
    m = measurement("fxamp-bf16", workload_kind="infer", facts=facts(losses=(), output_error=error))
    assert (compare.problem(m, on(m)) is None) == is_good


# ---- against whom ----------------------------------------------------------------------------------------------------
def test_best_peer_is_the_fastest_comparable_one_that_trains():
    ours = measurement("fxamp-bf16")
    slow, fast = measurement("slow", (9.0,) * 3), measurement("fast", (8.0,) * 3)
    broken = measurement("broken", (1.0,) * 3, facts=facts(losses=(5.0,) * 8))
    other_precision = measurement("fp16", (2.0,) * 3, precision="fp16")
    ceiling = measurement("ceiling", (3.0,) * 3, family="ceiling")
    failed = measurement("failed", None, status="error", reason="no", facts=None)
    found = on(ours, slow, fast, broken, other_precision, ceiling, failed, REFERENCE_ROW)
    assert compare.best_peer(ours, found) is fast
    assert compare.best_peer(fast, found) is slow  # never itself
    assert compare.best_peer(replace(ours, precision="tf32"), found) is None
    assert compare.best_peer(replace(ours, precision="fp8"), found) is fast  # bf16 counts against fp8


@pytest.mark.parametrize(("later_ms", "is_later"), [(8.0, False), (7.9, False), (7.0, True)])
def test_the_best_peer_is_as_it_was_beside_the_row(later_ms, is_later):
    """One of another run has to be faster by more than a system differs from itself."""
    together = (ANCHOR, "peer", "fxamp-bf16")
    ours, beside = (measurement(name, (8.0,) * 3, together=together) for name in ("fxamp-bf16", "peer"))
    slower = measurement("peer", (9.0,) * 3, run=run("r2"), together=(ANCHOR, "peer", "other"))
    later = measurement("other", (later_ms,) * 3, run=run("r2"), together=(ANCHOR, "peer", "other"))
    assert compare.best_peer(ours, on(ours, beside, slower, later)) is (later if is_later else beside)


def test_a_peer_that_does_not_train_is_no_peer_for_memory_either():
    """Eager fp32, which says so, replays no graphs."""
    ours = measurement("fxamp-bf16")
    flat = measurement("flat", (1.0,) * 3, facts=facts(losses=(5.0,) * 8))
    launches = facts().launches
    assert launches is not None
    eager = facts(launches=replace(launches, num_graph_launches=0))
    good, reference = measurement("good"), measurement(REFERENCE, precision="fp32", facts=eager)
    assert compare.memory_peer(ours, on(ours, flat, good, reference)) is good
    assert compare.memory_peer(ours, on(ours, flat, reference)) is None


def test_a_row_that_was_replaced_is_nobodys_last():
    first, failed = measurement("peer", run=run("r1")), measurement("peer", None, status="error", reason="no", facts=None)
    ours = measurement("fxamp-bf16", run=run("r2"))
    assert compare.best_peer(ours, on(first, failed, ours)) is None
    assert compare.memory_peer(ours, on(first, failed, ours)) is None


@pytest.mark.parametrize(("step_ms", "loses"), [(10.3, True), (10.1, False), (8.0, False)])
def test_defeats(step_ms, loses):
    peer, ours = measurement("peer"), measurement("fxamp-bf16", (step_ms,) * 3)
    (results,) = compare.results_of([peer, ours])
    found = compare.defeats(results)
    assert [(d.fxamp, d.peer) for d in found] == ([(ours, peer)] if loses else [])


def test_worst_defeat_first():
    ours = [measurement(f"fxamp-{i}", (ms,) * 3) for i, ms in enumerate((11.0, 20.0, 12.0))]
    (results,) = compare.results_of([measurement("peer"), *ours])
    assert [d.fxamp.system for d in compare.defeats(results)] == ["fxamp-1", "fxamp-2", "fxamp-0"]


# ---- sorting ---------------------------------------------------------------------------------------------------------
def test_later_rows_replace_earlier_ones_and_machines_stay_apart():
    old, new = measurement("peer", (1.0,) * 3), measurement("peer", (2.0,) * 3)
    elsewhere = measurement("peer", run=run(machine=CPU))
    quick = measurement("peer", run=run(protocol="quick"))
    found = compare.results_of([old, ceilings(), new, elsewhere, quick])
    assert [(r.machine.device_type, r.protocol) for r in found] == [
        ("cuda", "full"),
        ("cpu", "full"),
        ("cuda", "quick"),
    ]
    assert found[0].measurements["tiny-gpt"]["peer"] is new
    assert found[0].ceilings is not None
    assert found[1].ceilings is None
