"""Precision changes while training: one program for each precision, chosen by an assignment, never a compilation."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import fxamp
from fxamp import errors
from fxamp.run.mailbox import Mailbox
from tests.programs import Fn, everything, mlp, small_models


def switching(*ladder: str, **options: Any) -> fxamp.Amp:
    return fxamp.Amp(**{"ladder": ladder or ("bf16", "fp32"), "lower": "aot_eager", **options})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.linear(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(F.relu(x))


# ---- a variant is the program that this precision alone gives --------------------------------------------------------------
def trained(model: nn.Module, x: Tensor, amp: fxamp.Amp, precisions: str, **attached: bool) -> list[dict[str, Tensor]]:
    """Outputs, gradients and state after each step; the precision of each step, or "" to leave it alone."""
    model = copy.deepcopy(model)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if attached.get("attached", True):
        amp.attach(optimizer)
    run, seen = torch.compile(model, backend=amp), list[dict[str, Tensor]]()
    for precision in precisions.split():
        if precision != "-":
            amp.set_precision(precision)
        optimizer.zero_grad()
        out = run(x)
        (out.float().square().mean() * 3).backward()
        optimizer.step()
        seen.append({k: v.clone() for k, v in everything(model, out).items()})
    return seen


@pytest.mark.parametrize("name", ["mlp", "batch_norm", "transformer", "attention", "counted"])
@pytest.mark.parametrize("ladder", [("bf16", "fp32"), ("fp16", "fp32"), ("fp16", "bf16", "fp32")])
def test_each_step_is_that_of_its_precision_alone(name: str, ladder: tuple[str, ...]):
    model, (x,) = small_models()[name]
    amp = switching(*ladder)
    order = [ladder[i % len(ladder)] for i in range(5)] + [ladder[-1], ladder[0]]
    mixed = trained(model, x, amp, " ".join(order))
    # Whoever is in the same state, and computes in one precision only, does the same.
    model = copy.deepcopy(model)
    optimizers = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    alone: dict[str, Any] = {}
    for precision in ladder:
        single = fxamp.Amp(precision=precision, lower="aot_eager", scaling="dynamic" if "fp16" in ladder else None)
        single.attach(optimizers)
        alone[precision] = torch.compile(Fn(lambda self, *xs: self.model(*xs), model=model), backend=single)
    for precision, expected in zip(order, mixed, strict=True):
        optimizers.zero_grad()
        out = alone[precision](x)
        (out.float().square().mean() * 3).backward()
        optimizers.step()
        assert same(everything(model, out), expected), precision


def test_precisions_differ():
    model, (x,) = small_models()["mlp"]
    low, high = trained(model, x, switching(), "bf16 -"), trained(model, x, switching(), "fp32 -")
    assert not same(low[0], high[0])
    assert not same(low[1], high[1])


@pytest.mark.slow
@pytest.mark.parametrize("ladder", [("bf16", "fp32"), ("fp16", "fp32")])
def test_each_step_is_that_of_its_precision_alone_in_inductor(ladder: tuple[str, ...]):
    model, (x,) = small_models()["transformer"]
    scaling = "dynamic" if "fp16" in ladder else None
    mixed = trained(model, x, switching(*ladder, lower="inductor"), f"{ladder[0]} {ladder[1]} {ladder[0]}")
    first = trained(model, x, fxamp.Amp(precision=ladder[0], scaling=scaling), "-")
    assert same(first[0], mixed[0])
    (high,) = trained(model, x, switching(*ladder, lower="inductor"), ladder[1])
    (alone,) = trained(model, x, fxamp.Amp(precision=ladder[1], scaling=scaling), "-")
    assert same(high, alone)


# ---- a swap compiles nothing -----------------------------------------------------------------------------------------------
def test_a_thousand_swaps_compile_nothing():
    model, amp = mlp(4, 4), switching()
    run, x = torch.compile(model, backend=amp), torch.randn(2, 4)
    run(x).sum().backward()
    with torch.no_grad():
        run(x)
    before = copy.deepcopy(counters)
    outputs = dict[str, list[Tensor]](bf16=[], fp32=[])
    with dynamo_config.patch(error_on_recompile=True):
        for _ in range(500):
            for precision in ("fp32", "bf16"):
                amp.set_precision(precision)
                out = run(x)
                out.sum().backward()
                with torch.no_grad():
                    assert torch.equal(run(x), out)
                outputs[precision].append(out.detach())
    assert counters == before
    assert len(amp.graphs) == 2
    for results in outputs.values():
        assert all(torch.equal(out, results[0]) for out in results)
    assert not torch.equal(outputs["bf16"][0], outputs["fp32"][0])


@pytest.mark.parametrize("amp", [switching(), fxamp.Amp(precision="bf16", lower="aot_eager")], ids=["ladder", "alone"])
def test_a_ladder_leaves_no_backward_to_compile_later(amp: fxamp.Amp):
    run, later = torch.compile(mlp(4, 4, 4), backend=amp), list[Any]()
    outputs = [run(torch.randn(2, 4))]
    if len(amp.options.rungs.rungs) > 1:
        amp.set_precision("fp32")
        outputs.append(run(torch.randn(2, 4)))
    callback_handler.register_start_callback(later.append)
    try:
        for out in outputs:
            out.sum().backward()
    finally:
        callback_handler.remove_start_callback(later.append)
    assert [args.callback_trigger for args in later] == [CallbackTrigger.LAZY_BACKWARD] * (len(outputs) == 1)


def test_a_graph_may_be_walked_twice():
    run, x = torch.compile(mlp(4, 4), backend=switching(lower="inductor")), torch.randn(2, 4, requires_grad=True)
    loss = run(x).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)


@pytest.mark.slow
def test_upstream_still_wrong():
    """When this fails, delete EARLY_BACKWARD in _patches.py and what serves it."""
    x = torch.randn(2, 4, requires_grad=True)
    with functorch_config.patch(force_non_lazy_backward_lowering=True, donated_buffer=False):
        loss = torch.compile(mlp(4, 4, 4))(x).square().sum()
    with pytest.raises(RuntimeError, match="non-empty donated buffers"):
        loss.backward(retain_graph=True)


def test_where_nothing_is_lowered_there_is_one_program(monkeypatch: pytest.MonkeyPatch):
    from fxamp import lower

    calls, really = [], lower.lower
    monkeypatch.setattr(lower, "lower", lambda *args: calls.append(args) or really(*args))
    amp = switching("fp16", "bf16", "fp32", scaling=None)
    torch.compile(lambda x: x.sin() + 1, backend=amp)(torch.randn(3))
    assert list(amp.graphs[0].variants) == ["fp16", "bf16", "fp32"]
    assert len(calls) == 1


def test_shapes_may_be_dynamic():
    model, amp = mlp(4, 4), switching("fp16", "fp32")
    run, eager = torch.compile(model, backend=amp, dynamic=True), copy.deepcopy(model)
    for size, precision in [(2, "fp32"), (5, "fp16"), (3, "fp32"), (7, "fp16")]:
        amp.set_precision(precision)
        x = torch.randn(size, 4)
        out = run(x)
        out.sum().backward()
        assert torch.allclose(out, eager(x), atol=1e-2)
        assert torch.allclose(out, eager(x), atol=1e-6) == (precision == "fp32")
    assert len(amp.graphs) == 1


# ---- when ------------------------------------------------------------------------------------------------------------------
def test_a_change_waits_for_the_end_of_the_step():
    """Of two micro-batches, and of two graphs, both compute alike."""
    first, second = mlp(4, 4), mlp(4, 4)
    amp = switching()
    one, two = torch.compile(first, backend=amp), torch.compile(second, backend=amp)
    optimizer = optim.SGD([*first.parameters(), *second.parameters()], lr=0.0)
    amp.attach(optimizer)
    amp.attach(optimizer)
    x = torch.randn(2, 4)
    low, high = two(x), nn.Sequential(second)(x)
    low.sum().backward()
    optimizer.step()
    one(x)
    amp.set_precision("fp32")
    assert amp.precisions == {"model": "bf16"}
    assert torch.equal(two(x), low)
    optimizer.step()
    assert amp.precisions == {"model": "fp32"}
    assert torch.equal(two(x), high)


def test_between_steps_a_change_comes_at_once():
    model, amp = mlp(4, 4), switching()
    run, optimizer, x = torch.compile(model, backend=amp), optim.SGD(model.parameters(), lr=0.0), torch.randn(2, 4)
    amp.attach(optimizer)
    run(x).sum().backward()
    optimizer.step()
    amp.set_precision("fp32")
    with torch.no_grad():
        assert torch.equal(run(x), model(x))  # evaluation too


def test_a_backward_is_that_of_its_forward():
    model, amp = mlp(4, 8, 4), switching()
    run, x = torch.compile(model, backend=amp), torch.randn(2, 4, requires_grad=True)
    expected = {}
    for precision in ("bf16", "fp32"):
        amp.set_precision(precision)
        expected[precision] = torch.autograd.grad(run(x).square().sum(), x)[0]
    assert not torch.equal(expected["bf16"], expected["fp32"])
    high = run(x).square().sum()
    amp.set_precision("bf16")
    low = run(x).square().sum()
    amp.set_precision("fp32")
    assert torch.equal(torch.autograd.grad(low, x)[0], expected["bf16"])
    amp.set_precision("bf16")
    assert torch.equal(torch.autograd.grad(high, x)[0], expected["fp32"])


def test_graphs_on_both_sides_of_a_break_change_together():
    def forward(self: Fn, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)

    model, amp = Fn(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), switching()
    run, x = torch.compile(model, backend=amp), torch.randn(2, 4)
    low = run(x)
    amp.set_precision("fp32")
    assert torch.equal(run(x), model(x))
    amp.set_precision("bf16")
    assert torch.equal(run(x), low)
    assert len(amp.graphs) == 2


# ---- warming ---------------------------------------------------------------------------------------------------------------
def test_warming_leaves_no_trace():
    """Not in gradients, running statistics, random numbers, loss scale, precisions; and a step after it is the one without."""

    def build() -> tuple[nn.Module, fxamp.Amp, optim.Optimizer]:
        torch.manual_seed(1)
        model = Fn(
            lambda self, x: self.tail(F.dropout(F.relu(self.norm(self.head(x))), 0.5)),
            head=nn.Linear(4, 8),
            norm=nn.BatchNorm1d(8),
            tail=nn.Linear(8, 2),
        )
        amp, optimizer = switching("fp16", "fp32", regions={"tail": "tail"}), optim.SGD(model.parameters(), lr=0.1)
        amp.attach(optimizer)
        return model, amp, optimizer

    def train(model: nn.Module, amp: fxamp.Amp, optimizer: optim.Optimizer) -> dict[str, Tensor]:
        torch.manual_seed(2)
        amp.set_precision("fp32", region="tail")
        run = torch.compile(model, backend=amp)
        for _ in range(3):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
        return {k: v.clone() for k, v in everything(model, run(x)).items()}

    x = torch.randn(6, 4)
    cold, (model, amp, optimizer) = train(*build()), build()
    (first,) = list(model.parameters())[:1]
    first.grad = torch.ones_like(first)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert amp.warm(torch.compile(model, backend=amp), x) == 4
    assert same(dict(model.state_dict()), dict(before))
    assert torch.equal(torch.get_rng_state(), rng)
    assert [p.grad is None for p in model.parameters()] == [False] + [True] * 5
    assert first.grad is not None
    assert torch.equal(first.grad, torch.ones_like(first))
    assert amp.precisions == {"model": "fp16", "tail": "fp16"}
    assert (amp.read_loss_scale(), amp.read_skipped_steps()) == (2.0**16, 0)
    with dynamo_config.patch(error_on_recompile=True):
        assert same(train(model, amp, optimizer), cold)


def test_warming_is_bounded():
    """Each of the three graphs has four programs or two, and all of them together thirty-two combinations."""

    def forward(self: Fn, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        torch._dynamo.graph_break()
        x = self.d(self.c(x))
        torch._dynamo.graph_break()
        return self.e(x)

    amp = switching(regions={name: name for name in "abcde"})
    model = Fn(forward, **{name: nn.Linear(8, 8) for name in "abcde"})
    with pytest.raises(errors.TooManyVariants, match="make 32 combinations to warm, and 16 is"):
        amp.warm(torch.compile(model, backend=amp), torch.randn(2, 8))
    with pytest.raises(errors.InvalidOption, match="Give it the compiled"):
        amp.warm(lambda x: x, torch.randn(2, 8))
    assert [len(g.variants) for g in amp.graphs] == [4, 4, 2]


@pytest.mark.gpu
def test_after_warming_no_cuda_graph_is_recorded():
    model = mlp(16, 32, 4).cuda()
    amp = fxamp.Amp(ladder=("bf16", "fp32"), mode="reduce-overhead")
    run, x = torch.compile(model, backend=amp), torch.randn(8, 16, device="cuda")
    amp.warm(run, x)
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(0).tree_manager
    assert manager is not None
    recorded = manager.new_graph_id().id
    for i in range(20):
        amp.set_precision("fp32" if i % 2 else "bf16")
        torch.compiler.cudagraph_mark_step_begin()
        run(x).square().mean().backward()
        model.zero_grad()
    assert manager.new_graph_id().id == recorded + 1


# ---- regions ---------------------------------------------------------------------------------------------------------------
def regional(**options: Any) -> fxamp.Amp:
    return switching(regions={"early": "layers.[01]*", "head": "head"}, **options)


@pytest.mark.parametrize("high", [(), ("early",), ("head",), ("early", "head"), ("model",), ("model", "head")])
def test_a_region_computes_as_a_rule_for_it_would(high: tuple[str, ...]):
    torch.manual_seed(0)
    model, x, amp = Stack(), torch.randn(5, 8), regional()
    for name in high:
        amp.set_precision("fp32", region=name)
    (got,) = trained(model, x, amp, "-")
    globs = {"early": "layers.[01]*", "head": "head", "model": "*"}
    lows = [name for name in ("early", "head") if name not in high] if "model" in high else []
    policy = {"*": "fp32"} if "model" in high else {}
    policy |= {globs[name]: "fp32" for name in high if name != "model"}
    want = trained(model, x, fxamp.Amp(precision="bf16", lower="aot_eager", policy=policy), "-")[0]
    if not lows:  # nothing in a policy says "as without a rule"
        assert same(got, want)
    variant = amp.graphs[0].variants[label(amp, high)]
    for decision in variant.plan.everywhere:
        if decision.op == "linear":
            module = decision.facts.module
            region = "head" if module == "head" else "model" if "layers.2" in module else "early"
            assert decision.computes == ("fp32" if region in high else "bf16"), decision


def label(amp: fxamp.Amp, high: tuple[str, ...]) -> str:
    precisions = {name: "fp32" if name in high else "bf16" for name in ("model", "early", "head")}
    different = set(precisions.values())
    return different.pop() if len(different) == 1 else ", ".join(f"{k}={v}" for k, v in precisions.items())


def test_nothing_in_a_high_region_follows_a_low_one():
    model, x = Stack(), torch.randn(5, 8)
    amp = regional(relaxed="min_cut")
    amp.set_precision("fp32", region="early")
    trained(model, x, amp, "-")
    variant = amp.graphs[0].variants["model=bf16, early=fp32, head=bf16"]
    for decision in variant.plan.everywhere:
        if decision.facts.module.startswith(("layers.0", "layers.1")):
            assert decision.computes in ("fp32", "-"), decision


def test_two_low_formats_in_one_graph():
    model, x = Stack(), torch.randn(5, 8)
    amp = switching("fp16", "bf16", regions={"early": "layers.[01]*"})
    amp.set_precision("bf16", region="early")
    trained(model, x, amp, "-")
    (variant,) = [v for name, v in amp.graphs[0].variants.items() if name == "model=fp16, early=bf16"]
    formats = {(d.facts.module[:8], d.computes) for d in variant.plan.everywhere if d.op == "linear"}
    assert formats == {("layers.0", "bf16"), ("layers.1", "bf16"), ("layers.2", "fp16"), ("head", "fp16")}


def test_a_region_may_be_named_by_its_glob():
    amp = regional()
    amp.set_precision("fp32", region="layers.[01]*")
    assert amp.precisions == {"model": "bf16", "early": "fp32", "head": "bf16"}


# ---- what cannot be --------------------------------------------------------------------------------------------------------
def test_a_region_that_nothing_is_in_is_told_of():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    amp = fxamp.Amp(ladder=("bf16", "fp32"), regions={"last": "1", "early": "layer.[0-3]"}, lower="aot_eager")
    assert amp.report().notes == ()
    torch.compile(Fn(lambda self, x: self.model(x), model=model), backend=amp)(torch.randn(2, 4))
    told = r"no operation so far is in: last \(1\), early \(layer.\[0-3\]\). There are the modules model.0, model.1"
    with pytest.warns(fxamp.FxampWarning, match=told):
        notes = amp.report().notes
    assert amp.report().notes == notes


def test_what_is_not_on_the_ladder_is_an_error():
    amp = regional()
    with pytest.raises(errors.UnknownOption, match=r"'fp16' is not on the ladder \('bf16', 'fp32'\). .* in ladder="):
        amp.set_precision("fp16")
    with pytest.raises(errors.UnknownOption, match="Did you mean 'early'"):
        amp.set_precision("fp32", region="earl")
    with pytest.raises(errors.UnknownOption, match="'fp32' is not on the ladder"):
        fxamp.Amp(precision="bf16").set_precision("fp32")
    assert set(amp.precisions.values()) == {"bf16"}


def test_too_many_variants_are_an_error():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    amp = switching("fp16", "bf16", "fp32", regions={f"r{i}": str(i) for i in range(3)})
    with pytest.raises(BackendCompilerFailed, match="TooManyVariants.*make 81 programs, and 16 is"):
        torch.compile(model, backend=amp)(torch.randn(2, 4))


def test_a_region_that_a_part_cannot_tell_is_an_error():
    model = Stack()
    for layer in model.layers:
        layer.compile(backend=regional())
    with pytest.raises(BackendCompilerFailed, match="RuleOutOfReach.*layers.0, layers.1 of Stack"):
        model(torch.randn(2, 8))


def test_a_change_comes_into_effect_behind_a_step_that_somebody_compiles():
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    amp = switching("bf16", "fp32")
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    amp.attach(optimizer)
    run, step = torch.compile(model, backend=amp), torch.compile(optimizer.step, backend="eager")
    found: list[str] = []
    for precision in ("fp32", "bf16", "fp32", "fp32"):
        loss = run(torch.ones(2, 4)).sum()
        amp.set_precision(precision)
        found.append(amp.precisions["model"])
        loss.backward()
        step()
    assert found == ["bf16", "fp32", "bf16", "fp32"]


# ---- the scale -------------------------------------------------------------------------------------------------------------
def test_only_what_computes_in_fp16_moves_the_scale():
    model, (x,) = mlp(4, 4), (torch.randn(2, 4),)
    amp = switching("fp16", "fp32", scaling=fxamp.DynamicScale(init=2.0**8, growth_interval_steps=2))
    optimizer, run = optim.SGD(model.parameters(), lr=1e-3), torch.compile(model, backend=amp)
    amp.attach(optimizer)
    scales, inf = [], float("inf")
    for precision, factor in [("fp16", 1), ("fp32", 1), ("fp32", 1), ("fp32", inf), ("fp16", 1), ("fp16", inf)]:
        amp.set_precision(precision)
        optimizer.zero_grad()
        (run(x).square().mean() * factor).backward()
        optimizer.step()
        scales.append(amp.read_loss_scale())
    assert scales == [2.0**8] * 4 + [2.0**9, 2.0**8]
    assert amp.read_skipped_steps() == 2


# ---- the floor -------------------------------------------------------------------------------------------------------------
def test_a_scale_at_its_floor_raises_the_precision():
    """A sum that fp16 cannot hold overflows at every scale; fp32 holds it."""
    model = Fn(lambda self, x: (self.linear(x) * 1e-6).square(), linear=nn.Linear(4, 4, bias=False))
    nn.init.constant_(model.linear.weight, 3e4)
    amp = switching("fp16", "fp32", scaling=fxamp.DynamicScale(init=2.0, at_floor="raise precision"))
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)

    def step() -> None:
        optimizer.zero_grad()
        run(torch.full((2, 4), 3e4)).mean().backward()
        optimizer.step()

    step()  # the scale comes down to its floor
    assert amp.precisions == {"model": "fp16"}
    with pytest.warns(fxamp.FxampWarning, match="its floor, 1: the next higher precision takes over"):
        step()
    assert amp.precisions == {"model": "fp32"}
    skipped = amp.read_skipped_steps()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert amp.read_skipped_steps() == skipped


def test_a_floor_is_heard_of_behind_retries():
    """What arrives within one would raise a precision that is put back behind it."""

    class OneInTwo(Mailbox):
        """As on an accelerator, where not all that is posted is sent."""

        num = 0

        def post(self, values: Tensor) -> Tensor | None:
            self.num += 1
            return None if self.num % 2 else super().post(values)

    model = nn.Linear(8, 4)
    amp = switching(
        "fp16", "fp32", on_overflow="retry", scaling=fxamp.DynamicScale(init=1.0, floor=1.0, at_floor="raise precision")
    )
    step = amp.train_step(model, lambda out, _: (out * 3e5).sum(), optim.SGD(model.parameters(), lr=0.0, fused=True))
    assert amp._scaler is not None
    amp._scaler._at_floor = OneInTwo()
    found: list[str] = []
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(torch.ones(2, 8), torch.ones(2, 4))
        found.append(amp.precisions["model"])
    assert found == ["fp16", "fp32", "fp32", "fp32"]


def test_what_was_told_of_the_floor_before_the_precision_rose_does_not_raise_it_again():
    """On an accelerator answers are on their way for some steps."""
    amp = switching("fp16", "bf16", "fp32", scaling=fxamp.DynamicScale(init=1.0, at_floor="raise precision"))
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = optim.SGD([parameter], lr=1e-3)
    amp.attach(optimizer)
    assert amp._scaler is not None
    amp._scaler._at_floor = Mailbox(2)
    found: list[str] = []
    for step in range(12):
        parameter.grad = torch.full((4,), torch.inf if step in (0, 1, 2, 6) else 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        found.append(amp.precisions["model"])
    # Heard of at step 2 is the overflow of step 0; those of steps 1 and 2 are on their way. That of step 6 is another matter.
    assert found == ["fp16"] * 2 + ["bf16"] * 6 + ["fp32"] * 4


@pytest.mark.parametrize("at", range(12))
def test_a_run_that_is_resumed_hears_of_the_floor_as_the_uninterrupted_one(at: int):
    """The precision is part of what is saved, and so are answers on their way to the host."""

    def start() -> tuple[fxamp.Amp, optim.Optimizer]:
        amp = switching("fp16", "bf16", "fp32", scaling=fxamp.DynamicScale(init=2.0, at_floor="raise precision"))
        optimizer = optim.SGD([nn.Parameter(torch.zeros(4))], lr=1e-3)
        amp.attach(optimizer)
        assert amp._scaler is not None
        amp._scaler._at_floor = Mailbox(3)
        return amp, optimizer

    def train(amp: fxamp.Amp, optimizer: optim.Optimizer, steps: range) -> list[str]:
        found: list[str] = []
        for step in steps:
            optimizer.param_groups[0]["params"][0].grad = torch.full((4,), torch.inf if step in (0, 1, 2, 3, 7) else 1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            found.append(amp.precisions["model"])
        return found

    amp, optimizer = start()
    whole = train(amp, optimizer, range(14))
    assert set(whole) == {"fp16", "bf16", "fp32"}
    first, first_optimizer = start()
    found = train(first, first_optimizer, range(at))
    again, again_optimizer = start()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + train(again, again_optimizer, range(at, 14)) == whole
    assert json.dumps(again.state_dict()) == json.dumps(amp.state_dict())


def test_what_the_floor_raised_outlasts_what_a_scheduler_had_decided():
    decided = fxamp.FixedSchedule({0: "fp16", 100: "fp32"})
    amp, again = (switching("fp16", "fp32", scheduler=decided, scaling=fxamp.DynamicScale(init=1.0)) for _ in range(2))
    amp._precisions.raise_all()
    assert amp.precisions == {"model": "fp32"}
    again.load_state_dict(json.loads(json.dumps(amp.state_dict())))
    assert again.precisions == {"model": "fp32"}
    again.observe(1.0)  # decides as before
    assert again.precisions == {"model": "fp32"}


def test_a_state_of_another_ladder_is_refused():
    state = switching("fp16", "fp32").state_dict()
    assert state["precision"] == {"model": "fp16"}
    for precision, says in (({"model": "bf16"}, "bf16"), ({"blocks": "fp16"}, "blocks")):
        amp = switching("fp16", "fp32")
        with pytest.raises(errors.UnknownOption, match=says):
            amp.load_state_dict(state | {"precision": precision})
        assert amp.precisions == {"model": "fp16"}
