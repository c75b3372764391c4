"""fp16 in whole loops: what a user of GradScaler had, in a plain loop."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import fxamp
from fxamp import errors
from tests.programs import Fn, mlp
from tests.run.test_skipping import OPTIMIZERS, everything, same

INF = math.inf


def scaled(**options: Any) -> fxamp.Amp:
    return fxamp.Amp(**{"precision": "fp16", "lower": "aot_eager", **options})


def batches(num_steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        yield torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)


PLANTED = {3: INF, 4: math.nan, 9: INF}
"""Step -> what the loss is multiplied by."""


# ---- beside GradScaler ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Muon"])  # it takes matrices only
def test_skips_and_scale_are_grad_scalers(name: str):
    model = mlp(8, 16, 4)
    peer, config = copy.deepcopy(model), fxamp.DynamicScale(growth_interval_steps=3)
    amp = scaled(scaling=config)
    optimizer, theirs = (OPTIMIZERS[name](list(m.parameters())) for m in (model, peer))
    for o in (optimizer, theirs):
        for group in o.param_groups:
            group["lr"] = 1e-3 if "lr" in group else None
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for step, (x, y) in enumerate(batches(14)):
        factor = PLANTED.get(step, 1.0)
        for o in (optimizer, theirs):
            o.zero_grad()
        before, theirs_before = everything(optimizer), everything(theirs)
        (F.mse_loss(run(x), y) * factor).backward()
        optimizer.step()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(peer(x).float(), y) * factor
        scaler.scale(loss).backward()
        scaler.step(theirs)
        scaler.update()
        assert same(everything(optimizer), before) == same(everything(theirs), theirs_before) == (step in PLANTED), step
        assert amp.read_loss_scale() == scaler.get_scale(), step
    assert amp.read_skipped_steps() == len(PLANTED)
    for p, q in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=5e-3)


# ---- plain loops ----------------------------------------------------------------------------------------------------------
def test_a_run_with_bad_batches_is_the_run_without_them():
    """Skips change nothing: the healthy steps alone, with the same scale, end at the same bits."""
    x_y = list(batches(12))
    ends = []
    for planted in (PLANTED, {}):
        torch.manual_seed(0)
        model = mlp(8, 16, 4)
        amp, optimizer = scaled(scaling=2.0**8), optim.AdamW(model.parameters(), lr=1e-2)
        amp.attach(optimizer)
        run = torch.compile(model, backend=amp)
        for step, (x, y) in enumerate(x_y):
            if not planted and step in PLANTED:
                continue
            optimizer.zero_grad()
            (F.mse_loss(run(x), y) * planted.get(step, 1.0)).backward()
            optimizer.step()
        ends.append(everything(optimizer))
    assert same(*ends)


def test_micro_batches_add_up_and_one_bad_one_spoils_the_step():
    model = mlp(8, 16, 4)
    amp, optimizer = scaled(), optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for bad in (None, 1, 3):
        optimizer.zero_grad()
        before = everything(optimizer)
        for i, (x, y) in enumerate(batches(4)):
            (F.mse_loss(run(x), y) / 4 * (INF if i == bad else 1.0)).backward()
        optimizer.step()
        assert same(everything(optimizer), before) == (bad is not None)
    assert (amp.read_skipped_steps(), amp.read_loss_scale()) == (2, 2.0**14)


@pytest.mark.parametrize("clip", [
    lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    lambda p: nn.utils.clip_grad_value_(p, 1.0),
    lambda p: [x.grad.nan_to_num_(0.0, 0.0, 0.0) for x in p],
])  # fmt: skip
def test_what_clipping_made_finite_is_skipped_all_the_same(clip: Callable[[list[nn.Parameter]], Any]):
    model = mlp(8, 16, 4)
    amp, optimizer = scaled(), optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for (x, y), factor in zip(batches(3), (1.0, 1e30, 1.0), strict=True):
        optimizer.zero_grad()
        before = everything(optimizer)
        (F.mse_loss(run(x), y) * factor).backward()
        clip(list(model.parameters()))
        optimizer.step()
        assert same(everything(optimizer), before) == (factor > 1)
    assert amp.read_skipped_steps() == 1


def test_clipping_sees_true_gradients():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    twin = copy.deepcopy(model)
    norms = []
    for run, m in ((torch.compile(model, backend=scaled()), model), (twin, twin)):
        F.mse_loss(run(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(m.parameters(), 1e-3)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_two_optimizers_of_one_amp_skip_by_their_own_gradients():
    model = Fn(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(8, 4), b=nn.Linear(8, 4))
    amp = scaled()
    first, second = optim.SGD(model.a.parameters(), lr=0.1), optim.Adam(model.b.parameters(), lr=0.1)
    for optimizer in (first, second):
        amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    scales = []
    for (x, y), factor in zip(batches(3), (1.0, INF, 1.0), strict=True):
        before = everything(first), everything(second)
        a, b = run(x)
        (F.mse_loss(a, y) * factor + F.mse_loss(b, y)).backward()
        for optimizer in (first, second):
            optimizer.step()
            scales.append(amp.read_loss_scale())
            optimizer.zero_grad()
        assert same(everything(first), before[0]) == (factor == INF)
        assert not same(everything(second), before[1])
    assert scales == [2.0**16] * 3 + [2.0**15] * 3  # it moves when both have stepped, once
    assert amp.read_skipped_steps() == 1


def test_an_optimizer_that_steps_every_other_time_does_not_hold_the_scale_for_ever():
    model = Fn(lambda m, x: m.b(m.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    amp = scaled(scaling=fxamp.DynamicScale(growth_interval_steps=1))
    often, never = optim.SGD(model.a.parameters(), lr=0.1), optim.SGD(model.b.parameters(), lr=0.1)
    amp.attach(often)
    amp.attach(never)
    run = torch.compile(model, backend=amp)
    for x, y in batches(3):
        F.mse_loss(run(x), y).backward()
        often.step()
    assert amp.read_loss_scale() == 2.0**18


@pytest.mark.parametrize("whose", ["nobody's", "one that waits"])
def test_an_overflow_that_waits_for_a_step_lowers_the_scale_once(whose: str):
    model, other = Fn(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(8, 4), b=nn.Linear(8, 4)), mlp(8, 16, 4)
    amp = scaled()
    often, seldom = optim.SGD(model.a.parameters(), lr=0.1), optim.SGD(other.parameters(), lr=0.1)
    for optimizer in (often, seldom):
        amp.attach(optimizer)
    run, run_other = torch.compile(model, backend=amp), torch.compile(other, backend=amp)
    scales = []
    for i, (x, y) in enumerate(batches(5)):
        factor = {whose: INF} if i == 1 else {}
        (F.mse_loss(run_other(x), y) * factor.get("one that waits", 1.0)).backward()
        often.zero_grad()
        a, b = run(x)
        (F.mse_loss(a, y) + F.mse_loss(b, y) * factor.get("nobody's", 1.0)).backward()
        often.step()
        scales.append(amp.read_loss_scale())
    seldom.step()
    scales.append(amp.read_loss_scale())
    full, half = 2.0**16, 2.0**15
    assert scales == ([full] * 2 + [half] * 4 if whose == "nobody's" else [full] * 5 + [half])
    assert amp.read_skipped_steps() == (whose != "nobody's")


@pytest.mark.parametrize("regions", [None, {"first": "0"}], ids=["", "regions"])
def test_a_train_step_leaves_what_waits_for_another_optimizer(regions: dict[str, str] | None):
    """Flags, too, of gradients that have been made finite since; and one overflow lowers the scale once."""
    amp = scaled(regions=regions, scaling=fxamp.DynamicScale(per_region=regions is not None))
    model, other = mlp(8, 16, 4), mlp(8, 16, 4)
    optimizer = optim.AdamW(other.parameters())
    amp.attach(optimizer)
    run, step = torch.compile(other, backend=amp), amp.train_step(model, F.mse_loss, optim.AdamW(model.parameters()))
    for bad_later, (x, y) in zip((False, True, False), batches(3), strict=True):
        scale = amp.read_loss_scale()
        (F.mse_loss(run(x), y) * INF).backward()
        for p in other.parameters():
            assert p.grad is not None
            p.grad.fill_(1.0)
        step(x * INF if bad_later else x, y)
        assert amp.read_loss_scale() == scale / (2 if bad_later else 1)
        before = everything(optimizer)
        optimizer.step()
        assert same(everything(optimizer), before)
        assert amp.read_loss_scale() == scale / (4 if bad_later else 2)
        optimizer.zero_grad()
    assert amp.read_skipped_steps() == 4


def test_gan():
    """Two Amps in one loop: the discriminator's graph runs in the generator's step too, and its gradients are thrown away."""
    maker, judge = mlp(4, 16, 8), mlp(8, 16, 1)
    amp_m, amp_j = (scaled(scaling=fxamp.DynamicScale(init=2.0**10)) for _ in range(2))
    opt_m, opt_j = optim.Adam(maker.parameters(), lr=1e-3), optim.Adam(judge.parameters(), lr=1e-3)
    amp_m.attach(opt_m)
    amp_j.attach(opt_j)
    make, rate = torch.compile(maker, backend=amp_m), torch.compile(judge, backend=amp_j)
    for step in range(4):
        noise, real = torch.randn(16, 4), torch.randn(16, 8)
        opt_m.zero_grad()
        (rate(make(noise)).mean() * (INF if step == 2 else 1.0)).backward()
        before = everything(opt_m), everything(opt_j)
        opt_m.step()
        assert same(everything(opt_m), before[0]) == (step == 2)
        opt_j.zero_grad()
        (rate(real).mean() - rate(make(noise).detach()).mean()).backward()
        opt_j.step()
        assert not same(everything(opt_j), before[1])  # its own gradients were good
    assert (amp_m.read_skipped_steps(), amp_j.read_skipped_steps()) == (1, 0)
    assert amp_m.read_loss_scale() == amp_j.read_loss_scale() == 2.0**9  # but its graph did overflow


def test_a_scale_that_moves_between_forward_and_backward_scales_nothing_twice():
    model, other = mlp(8, 16, 4), mlp(8, 4)
    twin = copy.deepcopy(model)
    amp = scaled(scaling=fxamp.DynamicScale(growth_interval_steps=1))
    optimizer = optim.SGD(other.parameters(), lr=0.1)
    amp.attach(optimizer)
    run, run_other = torch.compile(model, backend=amp), torch.compile(other, backend=amp)
    x, y = next(batches(1))
    out = run(x)
    F.mse_loss(run_other(x), y).backward()
    optimizer.step()
    assert amp.read_loss_scale() == 2.0**17
    F.mse_loss(out, y).backward()
    F.mse_loss(twin(x), y).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-4)


def test_called_twice_before_one_backward():
    model, twin = (lambda m: (m, copy.deepcopy(m)))(mlp(8, 16, 4))
    run = torch.compile(model, backend=scaled())
    (x, y), (u, v) = batches(2)
    (F.mse_loss(run(x), y) + F.mse_loss(run(u), v)).backward()
    (F.mse_loss(twin(x), y) + F.mse_loss(twin(u), v)).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-3)


def test_blocks_compiled_one_by_one_share_a_graph_and_keep_their_flags_apart():
    blocks = [Fn(lambda m, x: m.lin(x), lin=nn.Linear(8, 8, bias=False)) for _ in range(3)]
    amp = scaled(scaling=2.0**10)
    optimizers = [optim.SGD(block.parameters(), lr=0.1) for block in blocks]
    for block, optimizer in zip(blocks, optimizers, strict=True):
        amp.attach(optimizer)
        block.compile(backend=amp)
    with torch.no_grad():
        for block, size in zip(blocks, (1e-3, 1e3, 1.0), strict=True):
            block.lin.weight.copy_(torch.eye(8) * size)
    h = torch.ones(1, 8) / 8
    for block in blocks:
        h = block(h)
    h.sum().backward()
    bad = [not bool(torch.isfinite(block.lin.weight.grad).all()) for block in blocks]
    assert bad == [True, False, False]
    before = [everything(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.step()
    assert [same(everything(o), b) for o, b in zip(optimizers, before, strict=True)] == bad
    assert len(amp.graphs) < len(blocks)  # the first one's input wants no gradient


def test_gradients_of_autograd_grad_are_true_and_looked_at():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    amp, optimizer = scaled(), optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for factor in (1.0, INF):
        found = torch.autograd.grad(F.mse_loss(run(x), y) * factor, list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            p.grad = g
        before = everything(optimizer)
        optimizer.step()
        assert same(everything(optimizer), before) == (factor == INF)
    assert amp.read_skipped_steps() == 1


def test_gradients_from_outside_of_compiled_graphs_are_looked_at():
    body, head = mlp(8, 16), nn.Linear(16, 4)
    amp, optimizer = scaled(), optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    amp.attach(optimizer)
    run = torch.compile(body, backend=amp)
    x, y = next(batches(1))
    F.mse_loss(head(run(x)), y).backward()
    head.weight.grad[0, 0] = INF  # pyright: ignore[reportOptionalSubscript]
    before = everything(optimizer)
    optimizer.step()
    assert same(everything(optimizer), before)


def test_parameters_that_no_graph_reads_are_told_of():
    """All of them with a warning, be it that Dynamo has come to its limit; some, which may be meant, in the report."""
    x, y = next(batches(1))
    with torch._dynamo.config.patch(recompile_limit=1):  # pyright: ignore[reportAttributeAccessIssue]
        for amp in (scaled(), scaled()):
            model = mlp(8, 16, 4)
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            amp.attach(optimizer)
            F.mse_loss(torch.compile(model, backend=amp)(x), y).backward()
            if amp.graphs:
                optimizer.step()
                assert "SGD steps without" not in str(amp.report())
            else:
                with pytest.warns(fxamp.FxampWarning, match="an attached SGD steps parameters that no compiled graph"):
                    optimizer.step()
    torch.compiler.reset()
    body, head = mlp(8, 16), nn.Linear(16, 4)
    amp, optimizer = scaled(), optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    amp.attach(optimizer)
    F.mse_loss(head(torch.compile(body, backend=amp)(x)), y).backward()
    optimizer.step()
    assert ("SGD steps without", "2 of 4 parameters, which no compiled graph has read") in amp.report().scaling


# ---- unusual loops --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("route", "fused"), [("select", False), ("wait", False), ("auto", True)])
def test_parameters_that_join_an_attached_optimizer_later(route: str, fused: bool):
    model = Fn(lambda m, x: m.b(m.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    amp, optimizer = scaled(scaling=2.0**8), optim.AdamW(model.b.parameters(), lr=1e-3, fused=fused)
    amp.attach(optimizer, route=route)
    run = torch.compile(model, backend=amp)
    for step, (x, y) in enumerate(batches(6)):
        if step == 2:  # its first step is a bad one
            optimizer.add_param_group({"params": list(model.a.parameters())})
        is_bad = step in (1, 2, 4)
        optimizer.zero_grad()
        (F.mse_loss(run(x), y) * (INF if is_bad else 1.0)).backward()
        before = everything(optimizer)
        optimizer.step()
        assert same(everything(optimizer), before) == is_bad, step
    assert amp.read_skipped_steps() == 3


def test_fp16_parameters_that_join_later_are_refused():
    p, half = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).half())
    amp, optimizer = scaled(), optim.SGD([p], lr=0.1)
    amp.attach(optimizer)
    optimizer.add_param_group({"params": [half]})
    p.grad, half.grad = torch.ones(2), torch.ones(2).half()
    with pytest.raises(errors.CannotScale, match="1 parameters of the SGD are fp16"):
        optimizer.step()
    assert not half.any()
    assert not p.any()


@pytest.mark.parametrize("how", ["data", "object"])
def test_parameters_put_in_place_of_others_later(how: str):
    """Flags go by the tensors of the call: those of the new ones count, what is left of the old ones does not."""
    model = Fn(lambda m, x: m.b(m.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    amp, optimizer = scaled(scaling=2.0**8), optim.SGD(model.parameters(), lr=1e-3)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for step, (x, y) in enumerate(batches(5)):
        if step == 2 and how == "data":
            model.a.weight.data = torch.randn(8, 8) / 8
        elif step == 2:
            old, model.a.weight = model.a.weight, nn.Parameter(torch.randn(8, 8) / 8)
            parameters = optimizer.param_groups[0]["params"]
            parameters[[p is old for p in parameters].index(True)] = model.a.weight
            del old
        optimizer.zero_grad()
        (F.mse_loss(run(x), y) * (INF if step in (1, 3) else 1.0)).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)  # pyright: ignore[reportOptionalMemberAccess]  # the flags alone know
        before = everything(optimizer)
        optimizer.step()
        assert same(everything(optimizer), before) == (step in (1, 3)), step
    assert amp.read_skipped_steps() == 2


def test_averaged_weights_and_their_statistics_stay_finite():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    amp, optimizer = scaled(), optim.AdamW(model.parameters(), lr=1e-2)
    amp.attach(optimizer)
    run: Any = torch.compile(model, backend=amp)
    averages = AveragedModel(model), AveragedModel(run, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        (F.mse_loss(run(x * (INF if step == 3 else 1.0)), y) * (INF if step == 2 else 1.0)).backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(run if average is averages[1] else model)
    assert amp.read_skipped_steps() == 2
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    for average in averages:
        update_bn([x for x, _ in batches(3)], average)
        assert all(torch.isfinite(t).all() for t in average.state_dict().values())
        average.eval()
        assert torch.isfinite(average(torch.randn(4, 8))).all()


@pytest.mark.parametrize("loop", ["accelerate", "lightning", "by hand"])
def test_loops_of_frameworks_that_wrap_the_step(loop: str):
    """Accelerate puts another `step` on the instance for a while, Lightning hands in a closure, others None as one."""
    model = mlp(8, 16, 4)
    amp, optimizer = scaled(scaling=2.0**8), optim.AdamW(model.parameters(), lr=1e-3)
    amp.attach(optimizer)
    schedule = amp.when_stepped(optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))
    run, method, called = torch.compile(model, backend=amp), optimizer.step, []

    def patched(*args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return method(*args, **kwargs)

    for step, (x, y) in enumerate(batches(4)):

        def closure(x: Tensor = x, y: Tensor = y, step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(run(x), y) * (INF if step in (0, 2) else 1.0)
            loss.backward()
            return loss

        before = everything(optimizer)
        if loop == "lightning":
            assert optimizer.step(closure=closure) is not None
        elif loop == "accelerate":
            closure()
            optimizer.step = patched
            optimizer.step()
            optimizer.step = method
        else:
            closure()
            optimizer.step(closure=None)  # pyright: ignore[reportCallIssue, reportArgumentType]
        assert same(everything(optimizer), before) == (step in (0, 2)), step
        schedule.step()
    assert amp.read_skipped_steps() == 2
    assert schedule.get_last_lr() == [1e-3 / 4]
    assert len(called) == (4 if loop == "accelerate" else 0)


def test_a_backward_twice_through_one_graph_adds_up_and_one_bad_one_spoils_the_step():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    amp, optimizer = scaled(scaling=2.0**8), optim.SGD(model.parameters(), lr=1e-3)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for factors in ((1.0, 2.0, 4.0), (1.0, INF, 1.0)):
        optimizer.zero_grad()
        out = run(x)
        apart = [torch.autograd.grad(F.mse_loss(out, y) * f, list(model.parameters()), retain_graph=True) for f in factors]
        for factor in factors:
            (F.mse_loss(out, y) * factor).backward(retain_graph=True)
        for i, p in enumerate(model.parameters()):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, sum(grads[i] for grads in apart), rtol=0, atol=0, equal_nan=True)
        before = everything(optimizer)
        optimizer.step()
        assert same(everything(optimizer), before) == (INF in factors)
    assert amp.read_skipped_steps() == 1


def test_a_backward_that_keeps_a_history_leaves_its_flags():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    amp, optimizer = scaled(), optim.SGD(model.parameters(), lr=1e-3)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for factor in (1.0, INF):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward.. with create_graph")
            (F.mse_loss(run(x), y) * factor).backward(create_graph=True)
        for p in model.parameters():
            p.grad = torch.ones_like(p)  # the flags alone know
        before = everything(optimizer)
        optimizer.step()
        assert same(everything(optimizer), before) == (factor == INF)
    assert amp.read_skipped_steps() == 1


def test_hooks_that_step_within_the_backward_skip_once_and_move_the_scale_once():
    """The flags of a graph may arrive after its gradients: no reason to skip the next step too."""
    model = mlp(8, 16, 4)
    amp = scaled(scaling=fxamp.DynamicScale(growth_interval_steps=2))
    optimizers = {p: optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # pyright: ignore[reportArgumentType]
        optimizers[p].zero_grad()  # pyright: ignore[reportArgumentType]

    for p, optimizer in optimizers.items():
        amp.attach(optimizer)
        p.register_post_accumulate_grad_hook(step)
    run = torch.compile(model, backend=amp)
    seen = []
    for (x, y), factor in zip(batches(6), (1.0, 1.0, INF, 1.0, 1.0, 1.0), strict=True):
        (F.mse_loss(run(x), y) * factor).backward()
        seen.append((amp.read_skipped_steps(), amp.read_loss_scale()))
    low, mid, high = (0, 2.0**16), (4, 2.0**16), (0, 2.0**17)
    assert seen == [low, high, mid, mid, (4, 2.0**17), (4, 2.0**17)]


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_of_two_amps_steps_only_if_both_say_so(fused: bool):
    parts = mlp(8, 16, 4), mlp(8, 16, 4)
    amps = scaled(), scaled()
    optimizer = optim.AdamW([p for part in parts for p in part.parameters()], fused=fused)
    for amp in amps:
        amp.attach(optimizer)
    runs = [torch.compile(part, backend=amp) for part, amp in zip(parts, amps, strict=True)]
    for (x, y), factors in zip(batches(4), ((1, 1), (INF, 1), (1, INF), (1, 1)), strict=True):
        before = everything(optimizer)
        sum((F.mse_loss(run(x), y) * factor for run, factor in zip(runs, factors, strict=True)), x.new_zeros(())).backward()
        for p in (p for part in parts for p in part.parameters()):
            assert p.grad is not None
            p.grad.nan_to_num_(0.0, 0.0, 0.0)  # the flags alone know
        optimizer.step()
        assert same(everything(optimizer), before) == (INF in factors)
        optimizer.zero_grad()
    assert [(amp.read_skipped_steps(), amp.read_loss_scale()) for amp in amps] == [(2, 2.0**15)] * 2


def test_loading_in_the_middle_of_a_round_begins_a_new_one():
    model = Fn(lambda m, x: m.a(x) + m.b(x), a=nn.Linear(8, 4), b=nn.Linear(8, 4))
    amp = scaled()
    first, second = optim.SGD(model.a.parameters(), lr=0.1), optim.SGD(model.b.parameters(), lr=0.1)
    for optimizer in (first, second):
        amp.attach(optimizer)
    x, y = next(batches(1))
    F.mse_loss(torch.compile(model, backend=amp)(x), y).backward()
    first.step()
    amp.load_state_dict(amp.state_dict())
    first.step()
    second.step()
    assert amp.read_skipped_steps() == 0


@pytest.mark.filterwarnings("ignore:an attached .* that no compiled graph")
def test_gradients_are_looked_at_and_left_alone():
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    optimizer, amp = optim.SGD([p, q], lr=1.0), scaled()
    amp.attach(optimizer)
    p.grad = torch.ones(()).expand(3)  # of one number: not to be written to
    q.grad = torch.ones(2)
    weight = torch.ones(2, requires_grad=True)
    loss = (q.grad * weight).sum()  # saves the gradient
    optimizer.step()
    loss.backward()
    assert (p.tolist(), q.tolist()) == ([-1.0] * 3, [-1.0] * 2)


def test_parameters_that_come_and_go_leave_nothing_behind():
    model, amp = mlp(8, 16, 4), scaled()
    run = torch.compile(lambda parts, x: torch.func.functional_call(model, parts, (x,)), backend=amp)
    for _ in range(300):
        parts = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        run(parts, torch.randn(16, 8)).sum().backward()
    del parts
    (flags,) = amp._scaler._flags.values()  # pyright: ignore[reportOptionalMemberAccess]
    assert (len(flags._owners), len(flags._probes), len(flags.arrivals)) == (5, 0, 0)


# ---- what is said ---------------------------------------------------------------------------------------------------------
def test_an_optimizer_that_is_not_attached_is_told_of_once():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    optimizer, run = optim.SGD(model.parameters(), lr=0.1), torch.compile(model, backend=(amp := scaled()))
    F.mse_loss(run(x), y).backward()
    with pytest.warns(fxamp.FxampWarning, match=r"Call amp.attach\(optimizer\) once"):
        optimizer.step()
    optimizer.step()  # a second warning would be an error
    assert any("not attached" in note for note in amp.report().notes)


def test_an_optimizer_of_something_else_is_not_told():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    F.mse_loss(torch.compile(model, backend=scaled())(x), y).backward()
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    optim.SGD([other], lr=0.1).step()


def test_until_something_is_attached_the_scale_is_one_that_has_to_do():
    amp = scaled()
    model = mlp(8, 16, 4)
    run = torch.compile(model, backend=amp)
    run(torch.randn(16, 8)).sum().backward()  # with 2^16 this would overflow, and nobody would lower it
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())  # pyright: ignore
    assert amp.read_loss_scale() == 2.0**8
    amp.attach(optim.SGD(model.parameters(), lr=0.1))
    assert amp.read_loss_scale() == 2.0**16


def test_at_the_floor_it_warns_once():
    model = mlp(8, 16, 4)
    amp, optimizer = scaled(scaling=fxamp.DynamicScale(init=2.0)), optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(4):
            (F.mse_loss(run(x), y) * INF).backward()
            optimizer.step()
    texts = [str(w.message) for w in caught if isinstance(w.message, fxamp.FxampWarning)]
    assert len(texts) == 1
    assert "at its floor, 1" in texts[0]
    assert amp.read_loss_scale() == 1.0


def test_at_the_floor_it_raises_if_asked():
    model = mlp(8, 16, 4)
    amp = scaled(scaling=fxamp.DynamicScale(init=1.0, at_floor="raise"))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    x, y = next(batches(1))
    (F.mse_loss(torch.compile(model, backend=amp)(x), y) * INF).backward()
    with pytest.raises(errors.ScaleAtFloor, match="keep the operations that overflow in fp32"):
        optimizer.step()


def test_half_parameters_are_refused_with_the_way_out():
    model = mlp(8, 16, 4).half()
    with pytest.raises(Exception, match="Keep fp32 parameters"):
        torch.compile(model, backend=scaled())(torch.randn(4, 8).half())


def test_without_scaling_attach_changes_nothing_and_questions_are_errors():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    optimizer = optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    amp.attach(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert amp.state_dict() == {}
    schedule = amp.when_stepped(optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    for wrong in (None, optimizer):
        with pytest.raises(errors.InvalidOption, match="Give it a scheduler of torch.optim.lr_scheduler"):
            amp.when_stepped(wrong)
        with pytest.raises(errors.InvalidOption, match="Give it what state_dict"):
            amp.load_state_dict(wrong)  # pyright: ignore[reportArgumentType]
    for ask in (amp.read_loss_scale, amp.read_skipped_steps, lambda: amp.loss_scale):
        with pytest.raises(errors.NeedsScaling, match="scales no gradients"):
            ask()


def test_no_optimizer_is_refused():
    with pytest.raises(errors.InvalidOption, match="torch.optim.Optimizer itself"):
        scaled().attach(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


# ---- schedules, statistics, state -----------------------------------------------------------------------------------------
def test_a_schedule_counts_the_steps_that_were_taken():
    model = mlp(8, 16, 4)
    amp, optimizer = scaled(), optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(errors.InvalidOption, match="is not attached"):
        amp.when_stepped(optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    amp.attach(optimizer)
    schedule = amp.when_stepped(optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    run = torch.compile(model, backend=amp)
    rates = []
    for step, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        (F.mse_loss(run(x), y) * PLANTED.get(step, 1.0)).backward()
        optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    assert rates == [0.5, 0.25, 0.125, 0.125, 0.125, 0.0625]


def test_statistics_of_an_overflowed_forward_stay_out_of_the_buffers():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    amp, optimizer = scaled(), optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for (x, y), size in zip(batches(3), (1.0, 1e6, 1.0), strict=True):
        optimizer.zero_grad()
        before = everything(optimizer), model[1].running_mean.clone()  # pyright: ignore
        F.mse_loss(run(x * size), y).backward()
        optimizer.step()
        assert same(everything(optimizer), before[0]) == (size > 1)
        assert torch.equal(model[1].running_mean, before[1]) == (size > 1)  # pyright: ignore
    assert all(torch.isfinite(b).all() for b in model.buffers())


def test_a_resumed_run_is_the_whole_run_bit_for_bit():
    def start() -> tuple[nn.Module, fxamp.Amp, optim.Optimizer, Callable[..., Tensor]]:
        torch.manual_seed(0)
        model = mlp(8, 16, 4)
        amp = scaled(scaling=fxamp.DynamicScale(growth_interval_steps=2, hysteresis_steps=2))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        amp.attach(optimizer)
        return model, amp, optimizer, torch.compile(model, backend=amp)

    def train(run: Callable[..., Tensor], optimizer: optim.Optimizer, steps: range) -> None:
        for step, (x, y) in enumerate(batches(14)):
            if step in steps:
                optimizer.zero_grad()
                (F.mse_loss(run(x), y) * PLANTED.get(step, 1.0)).backward()
                optimizer.step()

    model, amp, optimizer, run = start()
    train(run, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    train(run, optimizer, range(5, 14))
    again, amp_again, optimizer_again, run_again = start()
    again.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    amp_again.load_state_dict(saved[2])
    train(run_again, optimizer_again, range(5, 14))
    assert same(everything(optimizer), everything(optimizer_again))
    assert amp.state_dict() == amp_again.state_dict()


def test_what_is_made_under_inference_mode_serves_training_too():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    amp, optimizer = scaled(), optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        amp.attach(optimizer)
        assert amp.read_loss_scale() == 2.0**16
    before = everything(optimizer)
    F.mse_loss(torch.compile(model, backend=amp)(x), y).backward()
    optimizer.step()
    assert not same(everything(optimizer), before)


def test_a_run_without_an_optimizer_saves_the_scale_that_one_would_start_with():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    amp, again = scaled(), scaled()
    F.mse_loss(torch.compile(model, backend=amp)(x), y).backward()
    again.load_state_dict(amp.state_dict())
    again.attach(optim.SGD(model.parameters(), lr=0.1))
    assert again.read_loss_scale() == 2.0**16


@pytest.mark.parametrize("state", [{}, {"param_groups": []}])  # a GradScaler that is not enabled has the first
def test_what_is_no_state_of_a_scale_says_so(state: dict[str, Any]):
    with pytest.raises(errors.InvalidOption, match="is no loss scale's"):
        scaled().load_state_dict(state)
    fxamp.Amp(precision="bf16").load_state_dict({})


def test_an_attached_optimizer_dies_with_its_last_reference():
    import gc
    import weakref

    amp = scaled()
    gc.disable()
    try:
        optimizer = optim.Adam([nn.Parameter(torch.zeros(2))])
        amp.attach(optimizer)
        optimizer.zero_grad()
        known = weakref.ref(optimizer)
        del optimizer
        assert known() is None
    finally:
        gc.enable()


def test_two_threads_with_one_amp_skip_by_their_own_gradients():
    from concurrent.futures import ThreadPoolExecutor

    amp = scaled()
    models = [mlp(8, 16, 4) for _ in range(2)]
    runs = [torch.compile(model, backend=amp) for model in models]
    optimizers = [optim.SGD(model.parameters(), lr=1e-3) for model in models]
    for run, optimizer in zip(runs, optimizers, strict=True):
        amp.attach(optimizer)
        run(torch.randn(16, 8))  # compiles

    def train(i: int) -> list[bool]:
        stood_still = []
        for step, (x, y) in enumerate(batches(40, seed=i)):
            optimizers[i].zero_grad()
            before = everything(optimizers[i])
            (F.mse_loss(runs[i](x), y) * (INF if step % 10 == 5 + i else 1.0)).backward()
            optimizers[i].step()
            stood_still.append(same(everything(optimizers[i]), before))
        return stood_still

    with ThreadPoolExecutor(2) as threads:
        for i, stood_still in enumerate(threads.map(train, range(2))):
            assert stood_still == [step % 10 == 5 + i for step in range(40)]


def test_a_grad_scalers_state_is_taken_over():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    scaler.scale(torch.zeros(()))
    amp = scaled()
    amp.load_state_dict(scaler.state_dict())
    amp.attach(optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    assert amp.read_loss_scale() == 2.0**11


# ---- long runs ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_ten_thousand_steps_with_random_faults_leave_nothing_behind():
    import gc
    import tracemalloc

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    config = fxamp.DynamicScale(growth_interval_steps=20, cap=2.0**16)  # one step in fifty is bad: it recovers in between
    amp, optimizer = scaled(scaling=config), optim.AdamW(model.parameters(), lr=1e-3)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    x, y = next(batches(1))
    faults = torch.rand(10_000, generator=torch.Generator().manual_seed(1))
    sizes = []
    tracemalloc.start()
    for step in range(10_000):
        optimizer.zero_grad()
        factor = 1.0 if faults[step] > 0.02 else (INF, math.nan, 1e38)[step % 3]
        (F.mse_loss(run(x), y) * factor).backward()
        optimizer.step()
        if step in (1_000, 9_999):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert 100 < amp.read_skipped_steps() < 300
    assert sizes[1] < sizes[0] + 100_000


def test_a_copy_of_an_amp_is_itself_and_a_pickle_of_one_is_refused():
    model, (x, y) = mlp(8, 16, 4), next(batches(1))
    amp = scaled()
    F.mse_loss(torch.compile(model, backend=amp)(x), y).backward()
    assert copy.deepcopy(amp) is amp
    with pytest.raises(errors.CannotPickle, match="state_dict"):
        pickle.dumps(amp)
