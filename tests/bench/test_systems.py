from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from bench import systems, workloads
from bench.models import MLP
from bench.systems import ANCHOR, System
from bench.workloads import Parts, Workload

SYSTEMS = systems.all_systems()
MLP_WORKLOAD = workloads.find("mlp-small")


def tiny(**changes: Any) -> Workload:
    made = replace(MLP_WORKLOAD, model=lambda: MLP(width=16, num_layers=2), batch=workloads.features(4, 16))
    return replace(made, **changes)


def eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set up, without what it compiles to."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)


class Spy(nn.Module):
    """A linear layer that notes under which autocast it runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(16, 16), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(("forward", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        y = self.linear(x)
        y.register_hook(lambda _: self.seen.append(("backward", torch.is_autocast_enabled("cpu"), None)))
        return y


def test_everything_that_users_would_pick_is_there_in_every_mode():
    known = systems.all_systems()
    modes = ("compile", "reduce-overhead", "max-autotune")
    assert known.keys() >= {f"{p}-autocast-{mode}" for p in ("bf16", "fp16") for mode in modes}
    assert all(known[f"fp16-autocast-{mode}"].scaler for mode in modes)
    for precision in get_args(systems.Precision):
        ours = [s for s in known.values() if s.family == "fxamp" and s.precision == precision]
        assert {s.is_train_step for s in ours} == {True, False}


def test_names():
    assert all(system.name == name for name, system in SYSTEMS.items())
    for named in (systems.QUICK, systems.CORE, systems.SWEPT, (ANCHOR, systems.REFERENCE)):
        assert set(named) <= SYSTEMS.keys()


@pytest.mark.parametrize("name", ["fxamp-bf16-relaxed", "fxamp-bf16-relaxed-reduce-overhead"])
def test_relaxed_systems_ask_for_passes_by_name(name):
    runner = systems.prepare(SYSTEMS[name], MLP_WORKLOAD, tiny().parts("cpu"), "cpu")
    assert runner.amp is not None
    assert runner.amp.options.relaxed == systems.RELAXED
    assert runner.amp.options.mode == ("reduce-overhead" if name.endswith("overhead") else None)
    plain = SYSTEMS[name.replace("-relaxed", "")]
    assert replace(SYSTEMS[name], name=plain.name, about=plain.about, relaxed=()) == plain


def test_the_control_is_the_anchor_but_no_peer():
    control, anchor = SYSTEMS[systems.CONTROL], SYSTEMS[ANCHOR]
    assert replace(control, name=anchor.name, about=anchor.about, family="peer") == anchor
    assert control.family != "peer"


def test_eager_reference_is_the_plain_loop():
    workload, parts, theirs = tiny(), tiny().parts("cpu"), tiny().parts("cpu")
    runner = systems.prepare(SYSTEMS["fp32-eager"], workload, parts, "cpu")
    optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=workload.learning_rate)
    for batch in parts.batches:
        loss = runner.step([batch])
        expected = F.mse_loss(theirs.model(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, expected.detach())
    for a, b in zip(parts.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_micro_batches_add_up_to_the_large_batch():
    workload, parts, theirs = tiny(num_micro_batches=4), tiny().parts("cpu"), tiny().parts("cpu")
    systems.prepare(SYSTEMS["fp32-eager"], workload, parts, "cpu").step(parts.batches)
    optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=workload.learning_rate)
    x, y = (torch.cat([batch[i] for batch in parts.batches]) for i in (0, 1))
    F.mse_loss(theirs.model(x), y).backward()
    optimizer.step()
    for a, b in zip(parts.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bf16-autocast-eager", ANCHOR, "fp16-autocast-compile"])
@pytest.mark.parametrize("is_loss_in_graph", [True, False])
def test_autocast_surrounds_the_forward_only(monkeypatch, name, is_loss_in_graph):
    eagerly(monkeypatch)
    spy, system = Spy(), SYSTEMS[name]
    workload = tiny(is_loss_in_graph=is_loss_in_graph)
    parts = Parts(model=spy, criterion=F.mse_loss, batches=workload.parts("cpu").batches)
    systems.prepare(system, workload, parts, "cpu").step(parts.batches[:1])
    assert spy.seen == [("forward", True, systems.DTYPES[system.precision]), ("backward", False, None)]


def test_scaler_follows_the_recipe(monkeypatch):
    eagerly(monkeypatch)
    calls: list[str] = []
    for name in ("scale", "step", "update"):
        original = getattr(torch.amp.GradScaler, name)

        def noted(self: Any, *args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            calls.append(name if self.is_enabled() else "off")
            return original(self, *args)

        monkeypatch.setattr(torch.amp.GradScaler, name, noted)
    parts = tiny().parts("cpu")
    systems.prepare(SYSTEMS["fp16-autocast-compile"], tiny(), parts, "cpu").step(parts.batches[:1])
    assert calls == ["scale", "step", "update"]
    calls.clear()
    systems.prepare(SYSTEMS[ANCHOR], tiny(), parts, "cpu").step(parts.batches[:1])
    assert set(calls) == {"off"}


@pytest.mark.parametrize("name", ["fp16-autocast-compile", "fxamp-fp16", "fxamp-fp16-train-step"])
def test_skipped_steps_are_counted(monkeypatch, name):
    """A step that changes no parameter."""
    if name.startswith("fxamp"):
        monkeypatch.setattr(systems, "amp_for", lambda *_: fxamp.Amp(precision="fp16", lower="aot_eager"))
    else:
        eagerly(monkeypatch)
    parts = tiny().parts("cpu")
    runner = systems.prepare(SYSTEMS[name], tiny(), parts, "cpu")
    weight, num_unchanged = next(parts.model.parameters()), 0
    for i in range(8):
        x, y = parts.batches[0]
        before = weight.detach().clone()
        runner.step([(x * (100.0 if i < 5 else 1.0), y)])
        num_unchanged += torch.equal(before, weight)
    assert runner.read_skipped is not None
    assert 0 < runner.read_skipped() == num_unchanged < 8


def test_without_a_scaler_nothing_is_counted():
    for name in (ANCHOR, "fxamp-bf16", "fxamp-fp16-unscaled-train-step"):
        assert systems.prepare(SYSTEMS[name], tiny(), tiny().parts("cpu"), "cpu").read_skipped is None


@pytest.mark.parametrize(("name", "num_expected"), [("bf16-autocast-reduce-overhead", 3), (ANCHOR, 0)])
def test_replayed_iterations_are_marked(monkeypatch, name, num_expected):
    """As on a GPU: everything on the CPU but what the set-up thinks."""
    eagerly(monkeypatch)
    marks: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(None))
    parts = tiny().parts("cpu")
    system = replace(SYSTEMS[name], autocast=False)  # autocast of CUDA would warn here
    monkeypatch.setattr(systems, "optimizer_for", lambda *_: torch.optim.AdamW(parts.model.parameters()))
    runner = systems.prepare(system, tiny(num_micro_batches=3), parts, "cuda")
    runner.step(parts.batches[:3])
    assert len(marks) == num_expected
    # Gradients that a replay would overwrite have buffers of their own, which stay.
    has_buffers = all(p.grad is not None for p in parts.model.parameters())
    assert has_buffers == (num_expected > 0)


def test_low_weights_are_low():
    parts = tiny().parts("cpu")
    systems.prepare(SYSTEMS["bf16-weights-compile"], tiny(), parts, "cpu")
    assert {p.dtype for p in parts.model.parameters()} == {torch.bfloat16}


def test_matmul_precision_is_set_and_put_back():
    parts = tiny().parts("cpu")
    systems.prepare(SYSTEMS["tf32-compile"], tiny(), parts, "cpu")
    assert torch.get_float32_matmul_precision() == "high"
    systems.prepare(SYSTEMS["fxamp-tf32"], tiny(), parts, "cpu")
    assert torch.get_float32_matmul_precision() == "highest"


def test_modes_reach_the_compiler(monkeypatch):
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: given.append(options) or module)
    for name in ("fp32-compile", "bf16-autocast-max-autotune", "fxamp-bf16-reduce-overhead"):
        systems.prepare(SYSTEMS[name], tiny(), tiny().parts("cpu"), "cpu")
    assert given[:2] == [{"mode": None}, {"mode": "max-autotune"}]
    amp = given[2]["backend"]
    assert isinstance(amp, fxamp.Amp)
    assert (amp.options.precision, amp.options.mode) == ("bf16", "reduce-overhead")


def test_inference_has_no_gradient_and_no_optimizer(monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", None)
    workload = tiny(kind="infer")
    parts = workload.parts("cpu")
    output = systems.prepare(SYSTEMS["fp32-eager"], workload, parts, "cpu").step(parts.batches[:1])
    assert output.grad_fn is None
    assert torch.equal(output, parts.model(parts.batches[0][0]))


def test_frozen_weights_are_read_as_copies():
    workload = tiny(kind="infer")
    parts = workload.parts("cpu")
    runner = systems.prepare(SYSTEMS["fxamp-bf16-frozen"], workload, parts, "cpu")
    runner.step(parts.batches[:1])
    assert runner.amp is not None
    assert dict(runner.amp.report().weights)["low copies"].startswith("4 in bf16")


# ---- what cannot run -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("system", "workload", "reason"),
    [
        ("bf16-autocast-reduce-overhead", "gpt-small", "no CUDA graphs on cpu"),
        ("fxamp-bf16-train-step", "decode-small", "for training"),
        ("fp8-torchao-rowwise", "decode-small", "for training"),
        ("fxamp-bf16-frozen", "gpt-small", "for inference"),
    ],
)
def test_reasons(system, workload, reason):
    assert reason in str(systems.unavailable(SYSTEMS[system], workloads.find(workload), "cpu"))


@pytest.mark.parametrize("name", ["fp32-eager", "fp32-compile", ANCHOR, "fxamp-fp32", "fxamp-bf16"])
def test_available(name):
    assert systems.unavailable(SYSTEMS[name], MLP_WORKLOAD, "cpu") is None


def test_what_fxamp_cannot_do_yet_appears_by_itself(monkeypatch):
    system = System(name="fxamp-new", about="", precision="fp16", family="fxamp", compiler="fxamp", is_train_step=True)

    def not_yet(**_: Any) -> fxamp.Amp:
        raise fxamp.errors.not_yet("precision", "fp16", "Use another")

    monkeypatch.setattr(systems.fxamp, "Amp", not_yet)
    assert "not in this version" in str(systems.unavailable(system, MLP_WORKLOAD, "cpu"))

    monkeypatch.undo()
    assert systems.unavailable(system, MLP_WORKLOAD, "cpu") is None


def test_train_step_gets_model_loss_and_optimizer(monkeypatch):
    given: list[Any] = []

    class Amp:
        def __init__(self, **_: Any) -> None: ...

        def train_step(self, *args: Any, accumulate: int) -> Callable[..., torch.Tensor]:
            given.extend(args)
            assert accumulate == 1
            return lambda x, y: x.sum() + y.sum()

    monkeypatch.setattr(systems.fxamp, "Amp", Amp)
    parts = tiny().parts("cpu")
    runner = systems.prepare(SYSTEMS["fxamp-bf16-train-step"], tiny(), parts, "cpu")
    model, criterion, optimizer = given
    assert (model, criterion) == (parts.model, F.mse_loss)
    assert isinstance(optimizer, torch.optim.AdamW)
    x, y = parts.batches[0]
    assert torch.equal(runner.step([(x, y)]), x.sum() + y.sum())
