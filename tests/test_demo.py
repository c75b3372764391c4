"""The demo: what it trains on, that it trains, that both runs are comparable, and what it prints."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fxamp
from fxamp import demo, errors
from fxamp.demo import Corpus, DemoConfig, DemoResult, GPTConfig, RunResult, Training

TINY_GPT = GPTConfig(num_layers=1, num_heads=2, width=16, num_context_bytes=16)


def tiny(**changes: object) -> DemoConfig:
    config = DemoConfig(num_steps=6, num_warmup_steps=2, model=TINY_GPT, batch_size=2, num_heldout_batches=3)
    return dataclasses.replace(config, **changes)


def training(before: float = 5.5, after: tuple[float, ...] = (2.4, 2.6), step_ms: float = 20.0) -> Training:
    return Training(
        heldout_losses_before=(before, before),
        heldout_losses_after=after,
        train_losses=(5.5, 3.0),
        step_ms=(step_ms, step_ms, 1000.0),
        compile_s=12.34,
    )


def result(baseline: Training, low: Training, **changes: object) -> DemoResult:
    made = DemoResult(
        config=tiny(),
        num_train_bytes=1000,
        num_heldout_bytes=100,
        missing_files=(),
        baseline=RunResult(
            system="Inductor", training=baseline, precisions=("fp32",), num_low_ops=0, num_casts=0, formats=("fp32",)
        ),
        fxamp=RunResult(
            system="fxamp", training=low, precisions=("bf16",), num_low_ops=22, num_casts=81, formats=("bf16", "fp32")
        ),
        dumped_files=(Path("graph_0/bf16/1_plan.txt"),),
        other_load=0.0,
    )
    return dataclasses.replace(made, **changes)


# ---- the text -------------------------------------------------------------------------------------------------------------
def test_no_heldout_file_is_trained_on():
    assert len({*demo.TRAIN_FILES, *demo.HELDOUT_FILES}) == len(demo.TRAIN_FILES) + len(demo.HELDOUT_FILES)


def test_corpus_is_the_standard_library():
    corpus = Corpus.of_stdlib()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    assert corpus.missing_files == ()
    assert bytes(corpus.heldout.tolist()) == b"".join((stdlib / name).read_bytes() for name in demo.HELDOUT_FILES)
    assert bytes(corpus.train[:10_000].tolist()) == (stdlib / demo.TRAIN_FILES[0]).read_bytes()[:10_000]
    assert len(corpus.train) == sum((stdlib / name).stat().st_size for name in demo.TRAIN_FILES)


def test_missing_files_are_said(tmp_path):
    (tmp_path / demo.TRAIN_FILES[0]).write_text("a" * 50)
    (tmp_path / demo.HELDOUT_FILES[-1]).write_text("b" * 40)
    corpus = Corpus.of_stdlib(tmp_path)
    assert corpus.missing_files == (*demo.TRAIN_FILES[1:], *demo.HELDOUT_FILES[:-1])
    assert (len(corpus.train), len(corpus.heldout)) == (50, 40)


@pytest.mark.parametrize("names", [(), (demo.TRAIN_FILES[0],), (demo.HELDOUT_FILES[0],)])
def test_too_little_text_is_an_error(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("a" * 100)
    with pytest.raises(demo.NoText, match=r"ERROR\[NoText\]: .* of 18 needed.*, at .*\. Run the demo with a Python that has"):
        Corpus.of_stdlib(tmp_path, num_needed_bytes=18)


def test_train_batches_follow_the_seed():
    corpus = Corpus.of_stdlib()
    first, again, other = (corpus.train_batches(tiny(seed=seed)) for seed in (1, 1, 2))
    assert first.shape == (6, 2, 17)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_batches_reach_the_last_byte(part):
    text = torch.arange(20)  # 4 windows of 17 bytes
    corpus = Corpus(train=text, heldout=text, missing_files=())
    batches = getattr(corpus, f"{part}_batches")(tiny(num_steps=100))
    starts = batches[..., 0]
    assert (starts.min(), starts.max(), batches.max()) == (0, 3, 19)
    assert torch.equal(batches, starts.unsqueeze(-1) + torch.arange(17))


def test_every_heldout_batch_samples_all_of_the_text():
    corpus = Corpus(train=torch.empty(0), heldout=torch.arange(1000), missing_files=())
    starts = corpus.heldout_batches(tiny(batch_size=10, num_heldout_batches=5))[..., 0]
    assert starts.shape == (5, 10)
    assert starts.unique().numel() == 50
    assert (starts.min(dim=1).values < 100).all()
    assert (starts.max(dim=1).values > 880).all()


# ---- the model ------------------------------------------------------------------------------------------------------------
def test_initial_model_follows_the_seed_alone():
    state = torch.get_rng_state()
    first, again, other = (demo.initial_model(tiny(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_model_does_not_see_the_future():
    block = demo.initial_model(tiny()).blocks[0]
    x_BTC = torch.randn(2, 16, 16)
    changed_BTC = x_BTC.clone()
    changed_BTC[:, 9] = torch.randn(2, 16)
    moved_BT = (block(x_BTC) - block(changed_BTC)).abs().amax(-1) > 1e-6
    assert not moved_BT[:, :9].any()
    assert moved_BT[:, 9:].all()


def test_loss_is_the_mean_over_bytes():
    model, (batch,) = demo.initial_model(tiny()), Corpus.of_stdlib().train_batches(tiny(num_steps=1, num_warmup_steps=0))
    both = model(batch[:, :-1], batch[:, 1:])
    rows = [model(row[None, :-1], row[None, 1:]) for row in batch]
    torch.testing.assert_close(both, torch.stack(rows).mean())


# ---- the loop, uncompiled -------------------------------------------------------------------------------------------------
def train_eagerly(config: DemoConfig) -> tuple[Training, list[tuple[str, int]]]:
    corpus, events = Corpus.of_stdlib(), []
    model = demo.initial_model(config)
    batches, heldout = corpus.train_batches(config), corpus.heldout_batches(config)
    return demo._train(model, model, batches, heldout, config, lambda *event: events.append(event)), events


def test_loop_learns():
    made, _ = train_eagerly(tiny(num_steps=60))
    # An untrained model spreads its bets over 256 bytes: ln 256 = 5.55. Frequencies of single bytes alone give below 3.5.
    assert made.loss_before > 5
    assert made.loss_after < 4


def test_loop_measures_what_it_says():
    made, events = train_eagerly(tiny())
    assert (len(made.train_losses), len(made.step_ms)) == (6, 4)
    assert (len(made.heldout_losses_before), len(made.heldout_losses_after)) == (3, 3)
    assert all(ms > 0 for ms in made.step_ms)
    assert made.compile_s > 0
    assert events == [("compiling", 0), *(("training", n) for n in range(1, 7)), ("evaluating", 6)]


def test_loop_is_the_same_for_the_same_seed():
    (first, _), (again, _), (other, _) = (train_eagerly(tiny(seed=seed)) for seed in (1, 1, 2))
    assert first.train_losses == again.train_losses
    assert first.heldout_losses_after == again.heldout_losses_after
    assert first.train_losses != other.train_losses


@pytest.mark.parametrize(("num_steps", "num_warmup_steps", "num_measured"), [(1, 0, 1), (3, 0, 2), (3, 1, 2), (3, 2, 1)])
def test_the_step_that_compiles_is_not_measured(num_steps, num_warmup_steps, num_measured):
    made, _ = train_eagerly(tiny(num_steps=num_steps, num_warmup_steps=num_warmup_steps))
    assert len(made.step_ms) == num_measured


# ---- the configuration ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 2}, "num_warmup_steps=2 leaves none of num_steps=2"),
        ({"num_warmup_steps": -1}, "num_warmup_steps=-1"),
        ({"num_heldout_batches": 1}, "num_heldout_batches=1 gives the loss no standard error"),
        ({"precision": "bf61"}, "unknown precision 'bf61'"),
    ],
)
def test_impossible_configuration_is_refused(changes, message):
    with pytest.raises((errors.InvalidOption, errors.UnknownOption), match=message):
        tiny(**changes)


@pytest.mark.parametrize("num_steps", [1, 5, 500])
def test_any_number_of_steps_leaves_some_to_measure(num_steps):
    config = DemoConfig.for_device(torch.device("cpu"), precision="fp32", num_steps=num_steps, seed=3, dump_dir=Path("there"))
    assert (config.num_steps, config.seed, config.precision, config.dump_dir) == (num_steps, 3, "fp32", Path("there"))
    assert config.num_warmup_steps < num_steps


def test_a_gpu_trains_a_bigger_model():
    on_cpu, on_gpu = (
        DemoConfig.for_device(torch.device(device), precision="bf16", num_steps=None, seed=0, dump_dir=Path("there"))
        for device in ("cpu", "cuda")
    )
    assert on_cpu == DemoConfig(dump_dir=Path("there"))
    assert on_gpu.device == "cuda"
    assert on_gpu.model.width > on_cpu.model.width
    assert on_gpu.num_steps > on_cpu.num_steps


# ---- the comparison -------------------------------------------------------------------------------------------------------
# (2.4, 2.6): mean 2.5, standard deviation 0.1414, standard error 0.1.
@pytest.mark.parametrize(
    ("after", "agree"),
    [((2.4, 2.6), True), ((2.49, 2.69), True), ((2.31, 2.51), True), ((2.51, 2.71), False), ((float("nan"),) * 2, False)],
)
def test_losses_agree_within_the_standard_error(after, agree):
    made = result(training(), training(after=after))
    assert made.loss_standard_error == pytest.approx(0.1)
    assert made.losses_agree is agree
    verdict = "The losses agree" if agree else "The losses DO NOT agree"
    assert demo.conclusions(made)[0].startswith(verdict)


def test_speed_is_a_median():
    assert training(step_ms=20.0).steps_per_s == 50


@pytest.mark.parametrize(("before", "is_trained"), [(5.5, True), (2.5, False), (2.55, False)])
def test_untrained_runs_are_said(before, is_trained):
    made = result(training(), training(before=before))
    assert made.is_trained is is_trained
    assert any("did not fall" in line for line in demo.conclusions(made)) is not is_trained


# ---- what is printed ------------------------------------------------------------------------------------------------------
def printed(made: DemoResult, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True)
    console.print(demo.table(made))
    return out.getvalue()


def test_table_shows_both_runs():
    lines = printed(result(training(), training(step_ms=40.0)), 120).splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert "system precision loss before loss after steps/s compile s low ops casts formats" in rows
    assert "Inductor fp32 5.5000 2.5000 50.0 12.3 0 0 fp32" in rows
    assert "fxamp bf16 5.5000 2.5000 25.0 12.3 22 81 bf16, fp32" in rows


def test_table_fits_80_characters():
    text = printed(result(training(step_ms=0.5), training()), 80)
    assert "…" not in text
    for word in ("Inductor", "precision", "before", "steps/s", "compile", "formats", "5.5000", "2000.0", "fp32"):
        assert word in text


def test_nothing_compiled_is_said():
    nothing = dataclasses.replace(result(training(), training()).fxamp, precisions=(), formats=(), num_low_ops=0)
    made = result(training(), training(), fxamp=nothing, dumped_files=())
    assert "nothing compiled" in printed(made, 120)
    assert "fxamp dumped nothing: no graph reached it." in demo.conclusions(made)


def test_conclusions_are_complete():
    made = result(training(), training(step_ms=40.0), missing_files=("wave.py",))
    speed, missing, dumps = demo.conclusions(made)[1:]
    assert speed == "fxamp made 0.50 times the steps per second of fp32."
    assert "lacks 1 of" in missing
    assert "(wave.py)" in missing
    assert dumps.endswith(f"1 files in {Path('fxamp-demo-dump').resolve()}")


def test_loss_scale_and_skipped_steps_are_said():
    plain = result(training(), training())
    assert not any("scaled" in line for line in demo.conclusions(plain))
    scaled = dataclasses.replace(plain.fxamp, loss_scale=2.0**14, num_skipped_steps=2)
    assert "Gradients were scaled by 16384 in the end; 2 of 6 steps overflowed, and were skipped." in demo.conclusions(
        dataclasses.replace(plain, fxamp=scaled)
    )


@pytest.mark.parametrize(("load", "is_busy"), [(None, False), (0.0, False), (1000.0, True)])
def test_speeds_of_a_busy_machine_are_marked(load, is_busy):
    made = result(training(), training(), other_load=load)
    assert any("these speeds say little" in line for line in demo.conclusions(made)) is is_busy


@pytest.mark.parametrize(
    ("precision", "support", "note"),
    [
        ("bf16", (True, "because"), "cpu computes bf16 in hardware (because)."),
        ("bf16", (False, "because"), "cpu only emulates bf16 (because): expect it to be much slower than fp32."),
        ("tf32", (False, "because"), "cpu does not compute tf32 (because): fxamp uses fp32."),
        ("auto", (False, "because"), "Precision auto is fp32 on cpu ("),
        ("auto", (True, "because"), "Precision auto is bf16 on cpu (because)."),
    ],
)
def test_note_on_precision(monkeypatch, precision, support, note):
    monkeypatch.setattr(demo.formats, "native_support", lambda device, precision: support)
    assert demo.precision_note(tiny(precision=precision)).startswith(note)


# ---- dumps ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_dumping_names_new_files_and_restores_the_variable(tmp_path, monkeypatch, before):
    if before is None:
        monkeypatch.delenv("FXAMP_DUMP", raising=False)
    else:
        monkeypatch.setenv("FXAMP_DUMP", before)
    (tmp_path / "old").write_text("left by an earlier run")
    with demo._dumping(tmp_path) as files:
        assert os.environ["FXAMP_DUMP"] == str(tmp_path)
        (tmp_path / "graph_0").mkdir()
        (tmp_path / "graph_0" / "plan.txt").write_text("new")
    assert files == [tmp_path / "graph_0" / "plan.txt"]
    assert os.environ.get("FXAMP_DUMP") == before


# ---- all of it, compiled --------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_demo_in_bf16(tmp_path):
    events: list[tuple[str, str, int]] = []
    made = demo.run(tiny(dump_dir=tmp_path / "dump"), lambda *event: events.append(event))
    assert made.fxamp.precisions == ("bf16",)
    assert made.fxamp.formats == ("bf16", "fp32")
    assert made.fxamp.num_low_ops > 0
    assert made.fxamp.num_casts > 0
    assert made.baseline.precisions == ("fp32",)
    # The same weights and batches, rounded to 8 bits: near each other, and not the same.
    for of_fp32, of_bf16 in zip(made.baseline.training.train_losses, made.fxamp.training.train_losses, strict=True):
        assert of_bf16 == pytest.approx(of_fp32, rel=2**-8)
    assert made.baseline.training.train_losses != made.fxamp.training.train_losses
    assert made.losses_agree
    # One graph serves training and measuring.
    assert [path.parent.parent.name for path in made.dumped_files if path.name.endswith("plan.txt")] == ["graph_0"]
    assert [event for event in events if event[2] == 6 and event[1] == "evaluating"] == [
        ("Inductor", "evaluating", 6),
        ("fxamp", "evaluating", 6),
    ]


@pytest.mark.slow
def test_demo_in_fp16_attaches_its_optimizer(tmp_path):
    made = demo.run(tiny(precision="fp16", dump_dir=tmp_path))
    assert made.fxamp.formats == ("fp16", "fp32")
    assert made.losses_agree
    # GradScaler's first scale, which an optimizer that is not attached does not get, and half of it for each skipped step.
    assert made.fxamp.loss_scale == 2.0 ** (16 - made.fxamp.num_skipped_steps)


BAD_STEPS = {20: math.inf, 21: math.nan, 150: -math.inf, 333: 1e38, 480: math.inf}
"""Step -> what its loss is multiplied by. 1e38 leaves the loss finite, and the gradients overflow."""


@pytest.mark.slow
def test_fp16_ends_where_fp32_does_and_bad_batches_cost_nothing_but_themselves():
    config = DemoConfig(num_steps=500)
    corpus, initial = Corpus.of_stdlib(), demo.initial_model(config)
    good = [(batch, 1.0) for batch in corpus.train_batches(config)]
    with_bad = list(good)
    for step, factor in BAD_STEPS.items():
        with_bad.insert(step, (good[0][0], factor))

    def train(amp: fxamp.Amp | None, batches: list[tuple[torch.Tensor, float]]) -> tuple[demo.GPT, float]:
        """The trained model, and its held-out loss in fp32."""
        torch.compiler.reset()
        model = copy.deepcopy(initial)
        run = torch.compile(model) if amp is None else torch.compile(model, backend=amp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if amp is not None:
            amp.attach(optimizer)
        for batch, factor in batches:
            (run(batch[:, :-1], batch[:, 1:]) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses = [model(batch[:, :-1], batch[:, 1:]).item() for batch in corpus.heldout_batches(config)]
        return model, sum(losses) / len(losses)

    patient = fxamp.DynamicScale(hysteresis_steps=len(BAD_STEPS) + 1)  # no skip lowers the scale
    usual, spoilt, clean = fxamp.Amp(precision="fp16"), *(fxamp.Amp(precision="fp16", scaling=patient) for _ in range(2))
    _, fp32 = train(None, good)
    _, fp16 = train(usual, with_bad)
    assert abs(fp16 / fp32 - 1) < 0.01
    assert (usual.read_skipped_steps(), usual.read_loss_scale()) == (len(BAD_STEPS), 2.0 ** (16 - len(BAD_STEPS)))

    with_skips, _ = train(spoilt, with_bad)
    without, _ = train(clean, good)
    assert (spoilt.read_skipped_steps(), clean.read_skipped_steps()) == (len(BAD_STEPS), 0)
    for p, q in zip(with_skips.parameters(), without.parameters(), strict=True):
        assert torch.equal(p, q)
    print(f"held-out loss after 500 steps: fp32 {fp32:.4f}, fp16 with five bad batches {fp16:.4f}")


@pytest.mark.slow
def test_demo_in_fp32_is_bitwise_inductor(tmp_path):
    made = demo.run(tiny(precision="fp32", dump_dir=tmp_path))
    assert made.fxamp.training.train_losses == made.baseline.training.train_losses
    assert made.fxamp.training.heldout_losses_after == made.baseline.training.heldout_losses_after
    assert (made.fxamp.precisions, made.fxamp.num_low_ops, made.fxamp.num_casts) == (("fp32",), 0, 0)


@pytest.mark.slow
def test_demo_prints_progress_table_and_conclusions(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=100, no_color=True)
    assert demo.main(tiny(dump_dir=tmp_path), console) == 0
    text = out.getvalue()
    for part in ("6 steps on cpu, twice.", "Inductor: evaluating", "6/6", "steps/s", "The losses agree", "tmp"):
        assert part in text


@pytest.mark.slow
@pytest.mark.gpu
def test_demo_on_a_gpu(tmp_path):
    made = demo.run(tiny(device="cuda", dump_dir=tmp_path))
    assert made.fxamp.precisions == ("bf16",)
    assert made.fxamp.training.train_losses == pytest.approx(made.baseline.training.train_losses, rel=2**-8)
    assert made.losses_agree
