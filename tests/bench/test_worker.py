from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxamp
from bench import measure, systems, worker, workloads
from bench.measure import CountCasts
from bench.rows import Facts
from bench.systems import NotApplicable
from bench.worker import Reply, Server, Worker, answer

SYSTEMS = systems.all_systems()


# ---- inside the process ----------------------------------------------------------------------------------------------
class Broken:
    """Methods that fail in all ways."""

    def fine(self, x: int) -> int:
        return x + 1

    def wrong(self) -> None:
        raise ValueError("bad thing in /home/someone/project/train.py, line 3\nand more")

    def not_yet(self) -> None:
        raise fxamp.errors.not_yet("precision", "fp8", "Use another")

    def not_applicable(self) -> None:
        raise NotApplicable("nothing to convert")

    def full(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def ask(method: str, *arguments: Any) -> Reply:
    server: Any = Broken()
    return answer(server, method, arguments)


def test_whatever_goes_wrong_is_an_answer():
    assert ask("fine", 1) == Reply(status="ok", value=2)
    assert ask("wrong") == Reply(status="error", reason="ValueError: bad thing in train.py, line 3")
    assert ask("full").is_out_of_memory
    assert ask("full").status == "error"
    assert ask("not_applicable") == Reply(status="unavailable", reason="nothing to convert")
    not_yet = ask("not_yet")
    assert not_yet.status == "unavailable"
    assert "precision='fp8'" in str(not_yet.reason)


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("File /usr/lib/python3/site.py: no", "File site.py: no"),
        ("ratio 3/4, https://pytorch.org/docs/stable", "ratio 3/4, https://pytorch.org/docs/stable"),
        ("at /tmp/tmpab12/graph.py:33", "at graph.py:33"),
    ],
)
def test_folders_stay_at_home(text, without):
    assert worker.without_folders(text) == without


def test_build_time_and_forget():
    server = Server(SYSTEMS["fp32-eager"], "cpu")
    facts = server.build("mlp-small", 1)
    assert len(facts.losses) == workloads.find("mlp-small").num_loss_steps
    assert facts.losses[-1] < facts.losses[0]
    assert facts.cold_compile_s is None
    assert (facts.memory, facts.num_casts, facts.fxamp) == (None, None, None)
    assert server.time(2) > 0
    assert server.profile() is None
    server.release()
    with pytest.raises(AssertionError, match="nothing was built"):
        server.time(1)


def test_losses_of_micro_batches_are_of_the_same_size(monkeypatch):
    """The loss of a step is the mean of its micro-batches'."""
    find = workloads.find
    monkeypatch.setattr(workloads, "find", lambda name: replace(find(name), num_loss_steps=4))
    whole, parts = (
        Server(SYSTEMS["fp32-eager"], "cpu").build(name, 1) for name in ("gpt-small", "gpt-accumulate-small")
    )
    assert parts.losses[0] == pytest.approx(whole.losses[0], rel=0.05)


def test_inference_is_compared_with_eager_fp32():
    error = Server(SYSTEMS["bf16-autocast-eager"], "cpu").build("mlp-infer-small", 1).output_error
    assert error is not None
    assert 1e-4 < error < 0.05
    assert Server(SYSTEMS["fp32-eager"], "cpu").build("mlp-infer-small", 1).output_error == 0


def test_fxamp_says_what_it_did(monkeypatch):
    """Without Inductor, which the whole command is tested with."""
    monkeypatch.setattr(systems, "amp_for", lambda *_: fxamp.Amp(precision="bf16", lower="aot_eager"))
    facts = Server(SYSTEMS["fxamp-bf16"], "cpu").build("mlp-small", 1)
    assert facts.num_graphs == 1
    assert facts.fxamp is not None
    assert facts.fxamp.precisions == ("bf16",)
    assert facts.fxamp.num_low_ops == 5
    assert facts.fxamp.num_own_casts >= 6
    # Each of three weights is cast once, from 4 bytes to 2, and that alone is this much.
    assert facts.fxamp.own_cast_bytes is not None
    assert facts.fxamp.own_cast_bytes > 3 * 256 * 256 * 6
    assert facts.fxamp.pass_ms > 0


def test_low_weights_get_low_inputs():
    parts = workloads.find("mlp-small").parts("cpu")
    low = worker._low_inputs(parts.batches, SYSTEMS["bf16-weights-compile"])
    assert {x.dtype for x, _ in low} == {torch.bfloat16}
    assert worker._low_inputs(parts.batches, SYSTEMS["bf16-autocast-compile"]) is parts.batches


def test_micro_batches_go_round():
    one, two, three = ((torch.tensor(i), torch.tensor(i)) for i in range(3))
    rounds = worker._rounds([one, two, three], 2)
    assert [next(rounds) for _ in range(3)] == [(one, two), (three, one), (two, three)]


def test_casts_are_observed_while_building_only(monkeypatch):
    from torch._inductor import config

    seen: list[Any] = []
    time_block_ms = measure.time_block_ms

    def noted(*args: Any) -> float:
        seen.append(config.joint_custom_pre_pass)
        return time_block_ms(*args)

    monkeypatch.setattr(measure, "time_block_ms", noted)
    server = Server(SYSTEMS["fp32-eager"], "cpu")
    server.build("mlp-small", 1)
    assert {type(observer) for observer in seen} == {CountCasts}
    seen.clear()
    server.time(1)
    assert seen == [None]


# ---- the process -----------------------------------------------------------------------------------------------------
def hired(tmp_path: Path) -> Worker:
    return Worker(
        SYSTEMS["fp32-eager"], "cpu", log=tmp_path / "log", cache=tmp_path / "cache", num_threads=1, num_jobs=1
    )


def test_a_real_process_answers_and_survives_errors(tmp_path):
    hand = hired(tmp_path)
    try:
        reply = hand.ask("build", "mlp-small", 1, timeout_s=120)
        assert isinstance(reply.value, Facts)
        assert hand.ask("time", 2, timeout_s=60).value > 0
        failed = hand.ask("build", "no-such-workload", 1, timeout_s=60)
        assert (failed.status, failed.reason) == ("error", "KeyError: 'no-such-workload'")
        # A new process, which knows nothing of the workload.
        assert "nothing was built" in str(hand.ask("time", 2, timeout_s=120).reason)
    finally:
        hand.stop()


def test_silence_and_death_are_answers(tmp_path, monkeypatch):
    """The process runs what these stand-ins for `serve` do."""
    silent = hired(tmp_path)
    monkeypatch.setattr(worker, "serve", sleep_on)
    start_s = time.monotonic()
    reply = silent.ask("build", "mlp-small", 1, timeout_s=1)
    assert (reply.status, reply.reason) == ("error", "no answer to start_up within 1 s")
    assert time.monotonic() - start_s < 60

    monkeypatch.setattr(worker, "serve", die)
    reply = hired(tmp_path).ask("build", "mlp-small", 1, timeout_s=60)
    assert reply.status == "error"
    assert "the process ended (7) in start_up: the last line" in str(reply.reason)


def test_an_interruption_is_an_answer_to_whoever_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "serve", sleep_on)
    silent = hired(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(silent.ask, "build", "mlp-small", 1, timeout_s=600)
        while silent._process is None:
            time.sleep(0.01)
        silent.interrupt()
        reply = waiting.result(timeout=60)
    assert reply.status == "error"
    assert silent.ask("build", "mlp-small", 1, timeout_s=600).reason == "interrupted"


def sleep_on(*_: Any) -> None:
    time.sleep(600)


def die(connection: Any, system: Any, device_type: Any, cache: Any, log: Path, *_: Any) -> None:
    log.write_text("a line\nthe last line\n")
    os._exit(7)
