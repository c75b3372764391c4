from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bench import compare, report, rows, scheduler
from bench.rows import ScheduledRun
from bench.scheduler import SYSTEMS, Trainer, Workload
from fxamp.demo import Corpus
from tests.bench.make import CPU, run

SMALL = Workload(num_steps=12, width=8, num_context_bytes=2, batch_size=2, learning_rate=0.1, restart_steps=3)


def a_row(system: str, seed: int, **changes: Any) -> ScheduledRun:
    made = ScheduledRun(
        run=run(machine=CPU, protocol="quick"), workload="a net", system=system, system_about="when it is hard", seed=seed,
        num_steps=100, num_interruptions=10, num_high_steps=0, num_changes=2, heldout_loss=2.0, step_ms=10.0,
    )  # fmt: skip
    return replace(made, **changes)


def test_batches_are_of_the_seed_and_bursts_are_noise():
    corpus, workload = Corpus.of_stdlib(), Workload()
    train, heldout = scheduler.batches_of(workload, corpus, 3)
    again, same = scheduler.batches_of(workload, corpus, 3)
    assert torch.equal(train, again)
    assert torch.equal(heldout, same)
    batches = torch.stack([scheduler.batches_of(workload, corpus, seed)[0] for seed in range(8)])
    is_noise = (batches >= 128).flatten(2).float().mean(2) > 0.25  # of noise that is half, of the text next to nothing
    assert not is_noise[:, :100].any()
    assert 0 < is_noise[:, 100:].float().mean() < 0.4


def test_the_learning_rate_is_restarted():
    rates = [Workload().learning_rate_at(step) for step in range(200)]
    assert rates[9] == max(rates)
    assert rates[99] < 0.1 * rates[9]
    assert rates[:100] == rates[100:]


def test_a_trainer_repeats_itself():
    corpus = Corpus.of_stdlib()
    trainer = Trainer(name="start", workload=SMALL, lower="aot_eager", device="cpu")
    first, other, again = (trainer.train(corpus, seed) for seed in (0, 1, 0))
    for facts in (first, other, again):
        assert facts.pop("step_ms") > 0
    assert first == again != other
    assert first["num_high_steps"] == SMALL.num_steps


def test_the_table_says_what_is_spared_and_whether_the_aim_is_reached(tmp_path):
    made = [
        *(a_row("low", seed, num_interruptions=10 + seed) for seed in range(2)),
        *(a_row("high", seed, num_interruptions=0, num_high_steps=100, heldout_loss=1.0 + seed) for seed in range(2)),
        *(a_row("start", seed, num_interruptions=5, num_high_steps=20, heldout_loss=1.0 + seed) for seed in range(2)),
        *(a_row("gradients", seed, num_interruptions=1, num_high_steps=21, heldout_loss=1.0) for seed in range(2)),
    ]
    rows.append(tmp_path / "rows.jsonl", made)
    page = report.page(compare.results_of(rows.read(tmp_path / "rows.jsonl")), {})
    cells = {
        line.split("|")[1].strip(" `"): [cell.strip() for cell in line.split("|")[3:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    }
    assert "a net. 2 seeds of 100 steps." in page
    assert cells["low"][:3] == ["21", "", "0.0%"]
    assert cells["start"] == ["10", "52%", "20.0%", "1.500", "1.000 [1.000..1.000]", "2.0", "1.00", "yes"]
    assert cells["gradients"][-1] == "no"


def test_systems_say_what_they_look_at():
    assert {name for name, (_, given) in SYSTEMS.items() if given is None} == {"low", "high"}
    assert all(about for about, _ in SYSTEMS.values())
