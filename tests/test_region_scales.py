"""A loss scale for each region: gradients are what they were, and a scale follows the gradients of its own region."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import fxamp
from fxamp import DynamicScale, errors
from fxamp.ladder import Ladder
from tests.joint.test_scale import PROGRAMS, gradients, same
from tests.programs import Fn, small_models
from tests.run.test_skipping import everything
from tests.run.test_skipping import same as equal

INF = math.inf


def scaled(regions: dict[str, str] | None, **options: Any) -> fxamp.Amp:
    scaling = options.pop("scaling", DynamicScale(per_region=True))
    return fxamp.Amp(**{"precision": "fp16", "lower": "aot_eager", "regions": regions, "scaling": scaling, **options})


def with_scales(amp: fxamp.Amp, scales: dict[str, float]) -> fxamp.Amp:
    amp.load_state_dict({"scale": scales, "_growth_tracker": 0})
    return amp


def scales_of(amp: fxamp.Amp) -> list[float]:
    return amp.loss_scale.tolist()


OFTEN = ("alias_of_an_intermediate", "tied", "graph_break", "users_low", "normalized_inside", "batch_norm", "residual")
"""Programs and models that are not only tested with --slow."""


# ---- gradients are what they were ------------------------------------------------------------------------------------------
def plain_and_by_region(
    model: nn.Module, inputs: tuple[Tensor, ...], regions: dict[str, str], scales: dict[str, float]
) -> tuple[list[Any], list[Any]]:
    """Gradients without scaling, and with these scales."""
    amps = fxamp.Amp(precision="fp32", lower="aot_eager"), with_scales(scaled(regions, precision="fp32"), scales)
    found: list[list[Any]] = []
    for amp in amps:
        twin = copy.deepcopy(model)
        found.append(gradients(twin, torch.compile(twin, backend=amp), inputs))
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("program", [p if p.__name__ in OFTEN else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS])
def test_gradients_that_cross_borders_on_unusual_ways_keep_every_bit(program: Callable[..., Any]):
    model = Fn(program, lin=nn.Linear(4, 4))
    scales = {"model": 2.0**3, "lin": 2.0**12}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # see there
        want, got = plain_and_by_region(model, (torch.randn(4, 4),), {"lin": "lin"}, scales)
    assert same(got, want)


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in small_models()])
def test_wherever_the_borders_are_no_bit_of_a_gradient_depends_on_them(name: str, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(name)
    monkeypatch.setattr(Ladder, "number_of", lambda *_: draw.randrange(3))  # every operation in a region of its own
    model, inputs = small_models()[name]
    scales = {"model": 2.0**3, "one": 2.0**12, "two": 2.0**-5}
    want, got = plain_and_by_region(model, inputs, {"one": "a", "two": "b"}, scales)
    assert same(got, want)
    assert any(w is not None for w in want)


# ---- what one scale cannot do -----------------------------------------------------------------------------------------------
class Vanishing(nn.Module):
    """A deep net of sigmoids, whose slope is 1/4 at most: what comes back to its beginning is 2^-50 of what enters."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(depth))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=0.25)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_deep_model_whose_two_ends_no_single_scale_serves(lower: str):
    torch.manual_seed(3)
    model, x = Vanishing(12), torch.randn(8, 16)
    exact = copy.deepcopy(model).double()
    (exact(x.double()).square().sum() * 64).backward()
    want: list[Any] = [layer.weight.grad for layer in exact.layers]
    regions = {"early": "layers.[0-3]", "middle": "layers.[4-7]"}
    lost: list[list[float]] = []
    scales: list[Tensor] = []
    for per_region in (False, True):
        config = DynamicScale(per_region=per_region, growth_interval_steps=1)
        amp = scaled(regions if per_region else None, scaling=config, lower=lower)
        twin = copy.deepcopy(model)
        optimizer = optim.SGD(twin.parameters(), lr=0.0)
        amp.attach(optimizer)
        run = torch.compile(twin, backend=amp)
        grads: list[Tensor] = []
        for step in itertools.count():
            optimizer.zero_grad()
            scale = amp.loss_scale
            (run(x).square().sum() * 64).backward()
            grads = [layer.weight.grad for layer in twin.layers]  # pyright: ignore
            if step >= 32 and all(bool(torch.isfinite(g).all()) for g in grads):
                scales.append(scale)
                break
            optimizer.step()
        lost.append([float((g - w).norm() / w.norm()) for g, w in zip(grads, want, strict=True)])
    one, each = lost
    assert min(one[:2]) > 0.5, "the first layers' gradients are flushed to 0"
    assert float(scales[0]) < 2.0**12, "and the last layers allow no larger scale"
    assert max(each) < 1e-2
    assert scales[1][1] >= 2.0**16 * scales[1][0]


# ---- whose scale falls ----------------------------------------------------------------------------------------------------
class Chain(nn.Module):
    """Three parts one behind the other. `explode(name)`: what comes back through that part is 1e4 times what entered."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (self._part() for _ in range(3))

    @staticmethod
    def _part() -> nn.Sequential:
        part = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        for layer in part:
            nn.init.eye_(layer.weight)  # pyright: ignore[reportArgumentType]
        return part

    def explode(self, name: str) -> Chain:
        first, second = getattr(self, name)
        with torch.no_grad():
            first.weight.mul_(1e-4)
            second.weight.mul_(1e4)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class Broken(Chain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        torch._dynamo.graph_break()
        return self.c(self.b(h))


def train(amp: fxamp.Amp, model: nn.Module, factors: list[float]) -> tuple[list[bool], optim.Optimizer]:
    """Which steps were left out; the optimizer."""
    optimizer = optim.AdamW(model.parameters(), lr=1e-6)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    stood_still: list[bool] = []
    for factor in factors:
        optimizer.zero_grad()
        (run(torch.ones(1, 4)).sum() * factor).backward()
        before = everything(optimizer)
        optimizer.step()
        stood_still.append(equal(everything(optimizer), before))
    return stood_still, optimizer


@pytest.mark.parametrize(("make", "regions", "culprit", "falls"), [
    (Chain, {"first": "a", "last": "c"}, "a", "first"),
    (Chain, {"first": "a", "middle": "b"}, "b", "middle"),
    (Chain, {"middle": "b"}, "c", "model"),
    (Chain, {"turns": "[ac]", "middle": "b"}, "a", "turns"),  # it stands on both sides of the other
    (Chain, {"turns": "[ac]", "middle": "b"}, "b", "middle"),
    (Broken, {"first": "a", "last": "c"}, "a", "first"),
    (Broken, {"first": "a", "last": "c"}, "c", "last"),
])  # fmt: skip
def test_the_scale_of_the_region_that_overflowed_falls_alone_and_the_step_is_left_out(
    make: Callable[[], Chain], regions: dict[str, str], culprit: str, falls: str
):
    amp = scaled(regions, scaling=DynamicScale(per_region=True, init=2.0**4, growth_interval_steps=100))
    stood_still, _ = train(amp, make().explode(culprit), [1.0] * 4)
    assert stood_still == [True, True, False, False]
    assert (amp.read_skipped_steps(), len(amp.graphs)) == (2, 2 if make is Broken else 1)
    for region in ("model", *regions):
        assert amp.read_loss_scale(region) == (2.0**2 if region == falls else 2.0**4), region


def test_what_no_region_made_lowers_all_of_them():
    amp = scaled({"first": "a"}, scaling=DynamicScale(per_region=True, init=2.0**4))
    stood_still, _ = train(amp, Chain(), [1.0, INF, math.nan, 1.0])
    assert stood_still == [False, True, True, False]
    assert scales_of(amp) == [2.0**2] * 2


def test_every_scale_grows_on_its_own():
    """An update in which another one overflows says nothing about a scale."""
    config = DynamicScale(per_region=True, init=2.0**4, growth_interval_steps=3)
    amp = scaled({"first": "a"}, scaling=config)
    _, kept = train(amp, Chain().explode("a"), [1.0] * 4)  # two with an overflow, two without
    assert (amp.read_loss_scale("model"), amp.read_loss_scale("first")) == (2.0**4, 2.0**2)
    train(amp, Chain(), [1.0])
    assert (amp.read_loss_scale("model"), amp.read_loss_scale("first")) == (2.0**5, 2.0**3), kept


def test_micro_batches_and_clipping_are_as_with_one_scale():
    model = Chain()
    amp = scaled({"first": "a"}, scaling=DynamicScale(per_region=True, init=2.0**4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    amp.attach(optimizer)
    run = torch.compile(model, backend=amp)
    for bad in (None, 1):
        before = everything(optimizer)
        for i in range(3):
            (run(torch.ones(1, 4)).sum() * (1e6 if i == bad else 1e-3)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert equal(everything(optimizer), before) == (bad is not None)
    assert (amp.read_loss_scale("model"), amp.read_loss_scale("first")) == (2.0**3, 2.0**4)


# ---- state, and what people look at ---------------------------------------------------------------------------------------
def test_a_resumed_run_is_the_whole_one():
    factors = [1.0, 1.0, INF, 1.0, 1.0, 1.0]
    config = DynamicScale(per_region=True, init=2.0**4, growth_interval_steps=2)

    def made() -> tuple[fxamp.Amp, Chain]:
        return scaled({"first": "a"}, scaling=config), Chain().explode("a")

    whole, model = made()
    _, optimizer = train(whole, model, factors)
    first, half = made()
    _, stopped = train(first, half, factors[:3])
    second, rest = made()
    rest.load_state_dict(half.state_dict())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed = optim.AdamW(rest.parameters(), lr=1e-6)
    resumed.load_state_dict(stopped.state_dict())
    second.attach(resumed)
    run = torch.compile(rest, backend=second)
    for factor in factors[3:]:
        resumed.zero_grad()
        (run(torch.ones(1, 4)).sum() * factor).backward()
        resumed.step()
    assert second.state_dict() == whole.state_dict()
    assert equal(everything(resumed), everything(optimizer))
    assert set(whole.state_dict()["scaling"]["scale"]) == {"model", "first"}


def test_states_of_one_scale_and_of_several_go_into_each_other():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    scaler.scale(torch.zeros(()))
    one = fxamp.Amp(precision="fp16", scaling=DynamicScale(init=2.0**9))
    for state, scale in ((scaler.state_dict(), 2.0**11), (one.state_dict(), 2.0**9)):
        amp = scaled({"first": "a", "last": "c"})
        amp.load_state_dict(state)
        assert scales_of(amp) == [scale] * 3
    amp = with_scales(scaled({"first": "a", "last": "c"}), {"model": 8.0, "first": 4.0, "last": 2.0})
    one.load_state_dict(amp.state_dict())
    assert one.read_loss_scale() == 2.0
    amp = with_scales(scaled({"first": "a", "other": "c"}), {"model": 8.0, "first": 4.0, "last": 2.0})
    assert scales_of(amp) == [8.0, 4.0, 2.0], "a region of which nothing is known begins with the smallest"


def test_the_scale_of_each_region_is_told():
    amp = with_scales(scaled({"first": "a"}), {"model": 8.0, "first": 4.0})
    assert (amp.read_loss_scale(), amp.read_loss_scale("first"), amp.read_loss_scale("a")) == (8.0, 4.0, 4.0)
    with pytest.raises(errors.UnknownOption, match="region"):
        amp.read_loss_scale("last")
    lines = dict(amp.report().scaling)
    assert (lines["loss scale of model"], lines["loss scale of first"]) == ("8", "4")


def test_health_names_the_region_whose_scale_is_not_at_rest():
    amp = scaled({"first": "a"}, scaling=DynamicScale(per_region=True, init=2.0**4, floor=2.0**4))
    with pytest.warns(fxamp.FxampWarning, match="at its floor"):
        train(amp, Chain().explode("a"), [1e-3, 1.0])
    found = {finding.kind: finding for finding in amp.health()}
    assert found["floor"].what.startswith("in region first, gradients overflowed")
    assert found["floor"].evidence["region"] == "first"


@pytest.mark.parametrize("stats", ["overflow", "full"])
def test_what_is_watched_knows_the_scale_of_its_region(stats: str):
    amp = scaled({"first": "a"}, scaling=DynamicScale(per_region=True, init=2.0**4), stats=stats)
    train(amp, Chain().explode("a"), [1.0] * 3)
    (finding,) = (f for f in amp.health() if "operation" in f.evidence)
    assert (finding.evidence["module"], finding.evidence["phase"]) == ("a.1", "backward")
    assert finding.evidence["smallest_scale"] == 2.0**3


def test_a_scale_for_each_region_beside_a_ladder():
    amp = fxamp.Amp(
        ladder=("fp16", "fp32"), regions={"first": "a"}, lower="aot_eager",
        scaling=DynamicScale(per_region=True, init=2.0**4),
    )  # fmt: skip
    model = Chain().explode("a")
    amp.set_precision("fp32", region="first")
    assert train(amp, model, [1.0, 1.0])[0] == [False, False]
    amp.set_precision("fp16", region="first")
    assert train(amp, model, [1.0, 1.0])[0] == [True, True]
    assert scales_of(amp) == [2.0**4, 2.0**2]


def test_a_scale_for_each_region_needs_regions():
    for regions, policy in ((None, "autocast"), ({"head": "head"}, {"region:head": "fp32"})):
        with pytest.raises(errors.InvalidOption, match="where no region is free to have a scale"):
            scaled(regions, policy=policy)
