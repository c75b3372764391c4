"""What is watched is computed as if nobody looked; and who made an inf is told from who was handed one."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp import graph
from fxamp import watch_ops as ops
from fxamp.joint.watch import Watch
from fxamp.run.health import Finding
from tests.programs import Fn, pull, small_models

INF, NAN = math.inf, math.nan


# ---- the program is what it was -------------------------------------------------------------------------------------------
def end_of_training(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """Results, gradients, parameters and scale of four steps, of which the second overflows."""
    model = copy.deepcopy(model)
    amp, optimizer = fxamp.Amp(**{"precision": "fp16", **options}), torch.optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    seen: list[Tensor] = []
    for factor in (1.0, INF, 1.0, 1e3):
        optimizer.zero_grad()
        out = run(*inputs)
        (out.float().square().mean() * factor).backward()
        seen += [out, *(p.grad for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*seen, *model.parameters(), *model.buffers(), amp.loss_scale, amp.skipped_steps]


OFTEN = ("transformer", "batch_norm", "counted")
MODELS = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in small_models()]


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_for_bit_the_one_that_nobody_watches(name: str):
    model, inputs = small_models()[name]
    watched, alone = (end_of_training(model, inputs, stats=stats, lower="aot_eager") for stats in ("full", None))
    for got, want in zip(watched, alone, strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert torch.equal(got.isfinite(), want.isfinite())


@pytest.mark.slow
@pytest.mark.parametrize("name", OFTEN)
def test_under_inductor_fp32_is_bit_for_bit_the_one_that_nobody_watches(name: str):
    """Of fp16 it is not: which values Inductor rounds into memory hangs on how much it has to compute."""
    model, inputs = small_models()[name]
    options = {"precision": "fp32", "scaling": fxamp.DynamicScale()}
    watched, alone = (end_of_training(model, inputs, stats=stats, **options) for stats in ("full", None))
    for got, want in zip(watched, alone, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def outputs(gm: fx.GraphModule) -> list[str]:
    return [x.name for x in graph.operands(gm.graph.output_node())]


def test_what_is_saved_is_the_same_but_for_one_vector_and_values_are_read_where_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[tuple[list[str], fx.GraphModule, list[str]]] = []
    original = Watch.partition

    def partition(self: Watch, split: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        alone: list[str] = []

        def spy(*a: Any, **k: Any) -> Any:
            forward, backward = split(*a, **k)
            alone[:] = outputs(forward)
            return forward, backward

        forward, backward = original(self, spy, *args, **kwargs)
        seen.append((alone, forward, [x.name for x in backward.graph.find_nodes(op="placeholder")]))
        return forward, backward

    monkeypatch.setattr(Watch, "partition", partition)
    model, inputs = small_models()["transformer"]
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", stats="overflow")
    torch.compile(model, backend=amp)(*inputs).sum().backward()
    ((alone, forward, arrives),) = seen
    after = outputs(forward)
    (added,) = [name for name in after if name not in alone]
    assert [name for name in after if name != added] == alone
    assert added in arrives
    reads = forward.graph.find_nodes(op="call_function", target=ops.MAGNITUDE)
    assert len(reads) > 20
    nodes = list(forward.graph.nodes)
    for read in reads:
        (value,) = read.all_input_nodes
        between = nodes[nodes.index(value) + 1 : nodes.index(read)]
        assert value.op == "placeholder" or between == []


def test_nothing_is_marked_and_nothing_is_read_unless_somebody_asks():
    model, inputs = small_models()["mlp"]
    sizes: list[int] = []
    for stats in (None, "overflow"):
        amp, twin = fxamp.Amp(precision="fp16", lower="aot_eager", stats=stats), copy.deepcopy(model)
        torch.compile(twin, backend=amp)(*inputs).sum().backward()
        (flags,) = amp._scaler._flags.values()  # pyright: ignore[reportOptionalMemberAccess]
        (probe,) = flags._probes.values()
        sizes.append(len(probe))
        assert (amp._scaler._read_sightings() == []) == (stats is None)  # pyright: ignore[reportOptionalMemberAccess]
    num_slots = len(list(model.parameters())) + 1
    assert sizes[0] == num_slots < sizes[1]


@pytest.mark.slow
def test_cost_of_watching():
    """Prints how much longer a training step takes."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True), 2)
    x = torch.randn(8, 64, 128)
    steps: dict[str | None, Callable[[], None]] = {}
    for stats in (None, "overflow", "full"):
        amp, twin = fxamp.Amp(precision="fp16", stats=stats), copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1e-6)
        amp.attach(optimizer)
        steps[stats] = functools.partial(train_once, torch.compile(twin, backend=amp), optimizer, x)
    fastest: dict[str | None, float] = {}
    for _ in range(20):
        for stats, step in steps.items():
            start = time.perf_counter()
            step()
            fastest[stats] = min(fastest.get(stats, INF), time.perf_counter() - start)
    ratios = {stats: seconds / fastest[None] for stats, seconds in fastest.items()}
    print(ratios)
    assert max(ratios.values()) < 10


def train_once(run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    run(x).square().mean().backward()
    optimizer.step()


# ---- the judge ------------------------------------------------------------------------------------------------------------
def judged(numbers: Sequence[float], parents: Sequence[Sequence[int]]) -> str:
    """A letter for each value: "." finite, "m" made it, "t" turned an inf into a NaN, "p" passed it on."""
    n, width = len(numbers), max(map(len, parents))
    padded = torch.tensor([[*row, *[n] * (width - len(row))] for row in parents])
    rows = ops.JUDGE(torch.tensor(numbers), padded, torch.arange(n), n).view(3, n)
    return "".join("mtp"[int(column.argmax())] if column.any() else "." for column in rows.T)


def test_who_made_it_has_finite_operands():
    assert judged([1.0, INF, INF, 2.0], [[], [0], [1], [2]]) == ".mp."
    assert judged([INF, NAN, NAN, INF], [[], [0], [1, 0], [1]]) == "mtpp"
    assert judged([1.0, NAN, INF, NAN], [[], [0], [0], [1, 2]]) == ".mmp"


def test_entries_count_their_values():
    entries = torch.tensor([0, 1, 1, 1])
    parents = torch.tensor([[4], [0], [0], [1]])
    found = ops.JUDGE(torch.tensor([1.0, INF, NAN, INF]), parents, entries, 2).view(3, 2)
    assert found.tolist() == [[0, 2], [0, 0], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_magnitude(dtype: torch.dtype):
    assert float(ops.MAGNITUDE(torch.tensor([1.0, -3.0]).to(dtype))) == 3.0
    assert float(ops.MAGNITUDE(torch.tensor([1.0, -INF]).to(dtype))) == INF
    assert math.isnan(float(ops.MAGNITUDE(torch.tensor([NAN, INF, 1.0]).to(dtype))))
    assert float(ops.MAGNITUDE(torch.empty(0, dtype=dtype))) == 0.0


def test_what_a_register_holds_and_fp16_would_not_is_an_inf():
    for value in (65504.0, 65519.9, 65520.0, 1e6):
        x = torch.tensor([value])
        assert bool(ops.MAGNITUDE(x, 65520.0).isinf()) == bool(x.half().isinf().any())


def test_a_gradient_that_is_all_flushed_is_lost_and_one_that_was_0_before_is_not():
    numbers, parents = torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.tensor([[4], [0], [1], [0]])
    shares, places = [torch.tensor([x]) for x in (0.0, 0.0, 0.25)], torch.tensor([1, 2, 3])
    found = ops.LOST_OF_EACH(shares, numbers, parents, places, torch.tensor([0, 1, 2]), 4)
    assert found.tolist() == [1.0, 0.0, 0.25, 0.0]
    assert float(ops.SMALL_SHARE(torch.tensor([0.0, 1e-6, 1.0, 1e-7, 1e-5]))) == 0.75


# ---- who is named ---------------------------------------------------------------------------------------------------------
def lin(**options: Any) -> nn.Linear:
    return nn.Linear(8, 8, **options)


def square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def health_of(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    loss: Callable[[Tensor], Tensor] = square,
    num_micro: int = 1,
    **options: Any,
) -> list[Finding]:
    """What health() says of an operation after training on these inputs; the scale is 1 unless told."""
    given = {"precision": "fp16", "lower": "aot_eager", "stats": "overflow", "scaling": 1.0, **options}
    amp, optimizer = fxamp.Amp(**given), torch.optim.SGD(model.parameters(), lr=1e-6)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for i, x in enumerate(inputs):
        loss(run(x)).backward()
        if (i + 1) % num_micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [finding for finding in amp.health() if "operation" in finding.evidence]


def culprit(findings: list[Finding]) -> tuple[str, str, str]:
    (finding,) = findings
    return tuple(finding.evidence[key] for key in ("phase", "operation", "module"))  # pyright: ignore


def with_weights(model: nn.Module, **sizes: float) -> nn.Module:
    for name, size in sizes.items():
        nn.init.constant_(getattr(model, name).weight, size)
    return model


ONES = torch.ones(4, 8)


def divided(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h / (h - h).detach()).softmax(-1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_division_by_0_in_every_precision(precision: str):
    findings = health_of(Fn(divided, a=lin(), b=lin()), [ONES, ONES], precision=precision)
    assert culprit(findings) == ("forward", "div", "")
    assert findings[0].evidence["where"].startswith("test_watch.py:")
    assert findings[0].evidence["num_produced"] == 2
    assert findings[0].evidence["num_propagators"] > 5
    assert "h / (h - h).detach()" in findings[0].what
    assert "divisor" in findings[0].way_out


def test_a_product_beyond_fp16_and_the_way_out_of_it():
    model = with_weights(Fn(lambda m, x: m.b(m.a(x) * 1e-3), a=lin(), b=lin()), a=3e4, b=1e-2)
    finding = health_of(copy.deepcopy(model), [ONES])[0]
    assert culprit([finding]) == ("forward", "linear", "a")
    assert "overflowed fp16" in finding.what
    assert "policy={'a': 'fp32'}" in finding.way_out
    assert "b" not in {f.evidence["module"] for f in health_of(copy.deepcopy(model), [ONES])}
    assert not health_of(copy.deepcopy(model), [ONES], policy={"a": "fp32"})


def test_a_cast_beyond_fp16():
    large = nn.Parameter(torch.tensor(1e6))
    model = Fn(lambda m, x: m.b(m.norm(m.a(x)) * m.large), a=lin(), b=lin(), norm=nn.LayerNorm(8), large=large)
    finding = health_of(model, [torch.randn(4, 8)])[0]
    assert culprit([finding]) == ("forward", "linear", "b")
    assert "its cast made an inf" in finding.what


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_bad_batch_is_its_own_producer(value: float):
    bad = ONES.clone()
    bad[1, 2] = value
    findings = health_of(Fn(lambda m, x: m.b(m.a(x).softmax(-1)), a=lin(), b=lin()), [ONES, bad, ONES])
    assert culprit(findings) == ("input", "", "")
    assert findings[0].evidence["first_update"] == findings[0].evidence["last_update"] == 1
    assert "the data of update 1" in findings[0].way_out


def test_a_bad_parameter_is_its_own_producer():
    model = Fn(lambda m, x: m.b(m.a(x)).softmax(-1), a=lin(), b=lin())
    nn.init.constant_(model.b.bias, NAN)
    (finding,) = health_of(model, [ONES])
    assert "the parameter b.bias" in finding.what


def test_a_loss_outside_that_is_bad():
    findings = health_of(Fn(lambda m, x: m.b(m.a(x)), a=lin(), b=lin()), [ONES], loss=lambda y: y.sum() * INF)
    assert culprit(findings) == ("arriving", "linear", "b")


def test_a_derivative_that_does_not_exist():
    findings = health_of(Fn(lambda m, x: (m.a(x) * 0).sqrt(), a=lin()), [ONES], precision="fp32", loss=lambda y: y.sum())
    assert culprit(findings) == ("backward", "sqrt", "")
    assert "epsilon" in findings[0].way_out


def test_masks_are_not_to_blame():
    def attend(m: Any, x: Tensor) -> Tensor:
        scores = m.a(x) @ m.b(x).T
        scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -INF)
        return scores.softmax(-1) @ x

    model = Fn(attend, a=lin(), b=lin())
    assert not health_of(copy.deepcopy(model), [ONES])
    findings = health_of(with_weights(model, a=100.0, b=100.0), [ONES])
    assert culprit(findings) == ("forward", "matmul", "")


def test_in_place():
    def program(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.mul_(2)
        h.div_(torch.zeros_like(h))
        return m.b(h)

    assert culprit(health_of(Fn(program, a=lin(), b=lin()), [ONES])) == ("forward", "div", "")


def test_what_is_recomputed_is_watched():
    def program(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(lambda y: (m.a(y) * 0 + 9).exp().exp().sin(), x, use_reentrant=False))  # pyright: ignore

    findings = health_of(Fn(program, a=lin(), b=lin()), [ONES], precision="fp32")
    assert culprit(findings) == ("forward", "exp", "")


def broken(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) / torch.zeros_like(x)
    torch._dynamo.graph_break()
    return m.b(h)


def broken_behind(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    torch._dynamo.graph_break()
    return (m.b(h) * 0).sqrt()


def test_an_inf_that_comes_from_another_graph_is_the_other_graphs():
    assert culprit(health_of(Fn(broken, a=lin(), b=lin()), [ONES])) == ("forward", "div", "")
    assert culprit(health_of(Fn(broken_behind, a=lin(), b=lin()), [ONES]))[:2] == ("backward", "sqrt")


def test_micro_batches_are_judged_one_by_one():
    """The one made an inf in `a`, the other in what comes behind: neither is the other's."""
    model = Fn(lambda m, x: m.b(m.a(x).clamp(-1e3, 1e3) / x[0, 0]), a=lin(), b=lin())
    nn.init.constant_(model.a.weight, 0.0)
    first, second = ONES.clone(), ONES.clone()
    first[1, 1], second[0, 0] = NAN, 0.0
    found = health_of(model, [ONES, first, ONES, second], num_micro=4, precision="fp32")
    assert {(f.evidence["phase"], f.evidence["operation"]) for f in found} == {("input", ""), ("forward", "div")}


def test_inside_of_a_branch_nothing_is_watched_and_it_says_so():
    def program(m: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > -1e9, lambda h: (h / 0).sin(), lambda h: h.cos(), (m.a(x),))

    findings = health_of(Fn(program, a=lin()), [ONES])
    assert culprit(findings) == ("forward", "higher_order::cond", "")
    assert "Nothing inside of it is watched" in findings[0].way_out


def test_what_the_scale_alone_does_is_calibration():
    model = Fn(lambda m, x: m.b(m.a(x)), a=lin(), b=lin())
    found = health_of(model, [ONES] * 12, loss=lambda y: (y * 3).square().sum(), scaling="dynamic")
    assert {f.kind for f in found} == {"calibration"}
    assert {f.evidence["phase"] for f in found} == {"backward"}
    assert "the loss scale alone did it" in found[0].way_out


def test_an_overflow_of_the_backward_that_a_scale_brings_back():
    model = Fn(lambda m, x: m.b(m.a(x)), a=lin(), b=lin())
    config = fxamp.DynamicScale(init=2.0**8, growth_interval_steps=1)
    found = health_of(model, [ONES] * 12, loss=lambda y: (y * 3).square().sum(), scaling=config)
    assert {f.kind for f in found} == {"overflow"}
    assert all(f.evidence["phase"] == "backward" and f.evidence["smallest_scale"] > 2.0**8 for f in found)


def test_underflow_names_the_operation():
    model = Fn(lambda m, x: m.b(m.a(x)), a=lin(), b=lin())
    amp, optimizer = (
        fxamp.Amp(precision="fp16", lower="aot_eager", stats="full", scaling=1.0),
        torch.optim.SGD(model.parameters(), lr=1e-6),
    )
    amp.attach(optimizer)
    F.mse_loss(torch.compile(model, backend=amp)(ONES) * 1e-5, torch.zeros(4, 8)).backward()
    optimizer.step()
    (finding,) = amp.health()
    assert finding.kind == "underflow"
    assert any("`linear` in b" in place for place in finding.evidence["share_by_operation"])


def test_a_calm_run_has_nothing_to_say():
    for name in ("mlp", "residual", "attention"):
        model, (x,) = small_models()[name]
        assert not health_of(model, [x] * 3, loss=lambda y: y.float().sum())


def test_stats_without_loss_scaling_are_refused_with_the_way_out():
    with pytest.raises(fxamp.errors.InvalidOption, match=r"scaling=1\.0"):
        fxamp.Amp(precision="bf16", stats="overflow")


def test_results_of_many_kinds_are_watched_too():
    def program(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = m.a(x)
        return h, h.view(-1), torch.fft.rfft(h).abs(), h.double().exp(), x

    model = Fn(program, a=lin())
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", stats="full")
    pull(torch.compile(model, backend=amp)(ONES.clone().requires_grad_()))
    assert [finding.kind for finding in amp.health()] == ["unknown"], "no optimizer is attached, and nothing is wrong"


def test_every_precision_of_a_ladder_is_watched():
    model = with_weights(Fn(lambda m, x: m.b(m.a(x) * 1e-3), a=lin(), b=lin()), a=3e4, b=1e-2)
    amp, optimizer = (
        fxamp.Amp(ladder=("fp16", "fp32"), lower="aot_eager", stats="overflow", scaling=1.0),
        torch.optim.SGD(model.parameters(), lr=1e-9),
    )
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for precision in ("fp16", "fp32", "fp16"):
        amp.set_precision(precision)
        run(ONES).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert amp.read_skipped_steps() == 2
    finding = next(f for f in amp.health() if f.kind == "overflow")
    assert culprit([finding]) == ("forward", "linear", "a")
    assert (finding.evidence["num_produced"], finding.evidence["first_update"], finding.evidence["last_update"]) == (2, 0, 2)


def test_a_nan_of_the_loss_that_no_gradient_comes_by_is_named():
    """What is detached makes the loss NaN, the step is taken, and a mask that is meant is not to blame."""

    def program(m: Any, x: Tensor, divisor: Tensor) -> Tensor:
        h = m.a(x)
        scores = (h @ h.T) + torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf)
        return scores.softmax(-1).square().sum() + (h.detach() * 0).sum() / divisor

    model = Fn(program, a=lin())
    amp = fxamp.Amp(precision="fp16", lower="aot_eager", stats="overflow", scaling=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for step in range(15):
        loss = run(ONES * (math.inf if step == 6 else 1.0), torch.tensor(0.0 if step in (2, 5) else 1.0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        amp.observe(loss)
    assert amp.read_skipped_steps() == 1
    found = {finding.kind: finding for finding in amp.health()}
    broken = found["broken loss"]
    assert list(broken.evidence["loss_by_step"]) == [2, 5]
    (place,) = broken.evidence["operations"]
    assert place.startswith("`div` (test_watch.py:")
    assert "inf or NaN in 2 steps, nan in step 5, although every gradient was finite" in broken.what
    assert list(found["loss spike"].evidence["loss_by_step"]) == [6], "this one did overflow"


@pytest.mark.slow
def test_flags_and_culprits_are_right_after_a_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No joint pass runs then: the table of what is watched, and the slots, are those of this process."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    told: list[Any] = []
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Fn(lambda m, x: m.b(m.a(x) / x[0, 0]), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
        amp = fxamp.Amp(precision="fp16", stats="overflow", scaling=16.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        amp.attach(optimizer)
        run = torch.compile(model, backend=amp)
        for x in (ONES, ONES - 1, ONES):
            run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert amp.read_skipped_steps() == 1
        told.append((amp.health(), amp._scaler.read_slots()))  # pyright: ignore[reportOptionalMemberAccess]
    assert told[0] == told[1]
    assert culprit([f for f in told[1][0] if f.kind == "overflow"])[:2] == ("forward", "div")
    assert {slot.name for slot in told[1][1] if slot.num_overflows} >= {"a.weight", "b.weight"}
