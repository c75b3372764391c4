"""The rule that moves the scale, beside GradScaler's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxamp import DynamicScale, StaticScale, errors
from fxamp.run.loss_scale import LossScale

CPU = torch.device("cpu")
ONE = torch.ones(())
overflows = st.lists(st.booleans(), max_size=60)


def moved(config: DynamicScale, sequence: list[bool]) -> list[float]:
    state = LossScale(config, CPU)
    scales = []
    for is_bad in sequence:
        state.update(torch.tensor(float(is_bad)), ONE)
        scales.append(float(state.scale))
    return scales


def grad_scalers(config: DynamicScale, sequence: list[bool]) -> list[float]:
    """The scales of a real GradScaler whose only parameter has the gradients that make it see `sequence`."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=config.init,
        growth_factor=config.growth_factor,
        backoff_factor=config.backoff_factor,
        growth_interval=config.growth_interval_steps,
    )
    scaler.scale(torch.zeros(()))  # makes its state
    scales = []
    for is_bad in sequence:
        parameter.grad = torch.tensor([math.inf if is_bad else 1.0])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@given(
    overflows,
    st.sampled_from((1, 2, 3, 7)),
    st.sampled_from((2.0, 1.5, 4.0)),
    st.sampled_from((0.5, 0.25, 0.9)),
    st.sampled_from((2.0**16, 1.0, 1e30, 2.0**127)),
)
def test_without_a_floor_it_is_grad_scalers(
    sequence: list[bool], interval: int, growth: float, backoff: float, init: float
):
    config = DynamicScale(
        init=init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval_steps=interval,
        floor=torch.finfo(torch.float32).smallest_normal,
    )
    assert moved(config, sequence) == grad_scalers(config, sequence)


@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from((0, 1, 2)))), max_size=60),
    st.sampled_from((1, 2, 7)),
    st.sampled_from((1, 3)),
)
def test_the_scale_of_a_region_moves_as_if_its_own_updates_were_all_there_are(
    updates: list[tuple[bool, set[int]]], interval: int, hysteresis: int
):
    """Updates: (did anything overflow, the regions that made it). Not its own are those in which others overflowed alone."""
    config = DynamicScale(growth_interval_steps=interval, hysteresis_steps=hysteresis, per_region=True)
    state = LossScale(config, CPU, ("model", "a", "b"))
    for overflowed, makers in updates:
        made = torch.tensor([float(i in makers) for i in range(3)])
        state.update(torch.tensor(float(overflowed)), ONE, by_region=torch.stack([made, torch.ones(3)]))
    alone = DynamicScale(growth_interval_steps=interval, hysteresis_steps=hysteresis)
    for i, scale in enumerate(state.scale.tolist()):
        own = [bad for bad, makers in updates if not bad or not makers or i in makers]
        assert scale == ([alone.init, *moved(alone, own)])[-1]
    assert [update.overflowed for update in state.read_history()] == [bad for bad, _ in updates]
    for i, name in enumerate(state.regions):
        fell = [bad and (not makers or i in makers) for bad, makers in updates]
        assert [update.overflowed for update in state.read_history(name)] == fell


def test_the_defaults_are_grad_scalers():
    sequence = [True] * 3 + [False] * 2000 + [True] + [False] * 2001
    assert moved(DynamicScale(), sequence) == grad_scalers(DynamicScale(), sequence)


@given(overflows)
def test_it_stays_between_floor_and_cap(sequence: list[bool]):
    config = DynamicScale(init=8.0, floor=2.0, cap=32.0, growth_interval_steps=1)
    scales = moved(config, sequence)
    assert all(2.0 <= scale <= 32.0 for scale in scales)
    if len(sequence) >= 4 and all(sequence[-4:]):  # 32, 16, 8, 4, 2
        assert scales[-1] == 2.0


def test_hysteresis_lets_some_overflows_pass():
    config = DynamicScale(init=8.0, hysteresis_steps=3, growth_interval_steps=4)
    bad, good = True, False
    assert moved(config, [bad, bad, bad, bad]) == [8, 8, 4, 2]
    # Only growth restores the patience; an overflow ends the run of clean updates all the same.
    assert moved(config, [bad, bad, good, good, good, bad]) == [8, 8, 8, 8, 8, 4]
    assert moved(config, [bad, bad, good, good, good, good, bad, bad, bad]) == [8, 8, 8, 8, 8, 16, 16, 16, 8]


def test_an_overflow_that_lowers_nothing_grows_nothing():
    config = DynamicScale(init=8.0, hysteresis_steps=2, growth_interval_steps=1)
    assert moved(config, [True]) == [8.0]


def test_a_static_scale_stays():
    state = LossScale(StaticScale(value=3.0), CPU)
    for is_bad in (1.0, 0.0, 1.0):
        state.update(torch.tensor(is_bad), ONE)
    assert float(state.scale) == 3.0
    assert [update.overflowed for update in state.read_history()] == [True, False, True]


def test_skips_before_the_first_clean_update_are_calibration():
    state = LossScale(DynamicScale(), CPU)
    for is_bad in (1.0, 1.0, 0.0, 1.0, 0.0):
        state.update(torch.tensor(is_bad), ONE)
    assert float(state.num_calibrating) == 2


@given(overflows, overflows)
def test_a_resumed_scale_goes_on_as_if_nothing_had_been(before: list[bool], after: list[bool]):
    config = DynamicScale(init=2.0**10, growth_interval_steps=3, hysteresis_steps=2)
    whole, first, second = LossScale(config, CPU), LossScale(config, CPU), LossScale(config, CPU)
    for is_bad in before:
        whole.update(torch.tensor(float(is_bad)), ONE)
        first.update(torch.tensor(float(is_bad)), ONE)
    second.load_state_dict(first.state_dict())
    for is_bad in after:
        whole.update(torch.tensor(float(is_bad)), ONE)
        second.update(torch.tensor(float(is_bad)), ONE)
    assert second.state_dict() == whole.state_dict()


@given(overflows, overflows)
def test_it_goes_on_from_a_grad_scaler(before: list[bool], after: list[bool]):
    config = DynamicScale(growth_interval_steps=3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scaler.scale(torch.zeros(()))
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    state = LossScale(config, CPU)
    for i, is_bad in enumerate([*before, *after]):
        if i == len(before):
            state.load_state_dict(scaler.state_dict())
        parameter.grad = torch.tensor([math.inf if is_bad else 1.0])
        scaler.step(optimizer)
        scaler.update()
        if i >= len(before):
            state.update(torch.tensor(float(is_bad)), ONE)
            assert float(state.scale) == max(scaler.get_scale(), config.floor)
            if scaler.get_scale() < config.floor:
                return


def test_a_state_of_something_else_says_so():
    with pytest.raises(errors.InvalidOption, match="is no loss scale's"):
        LossScale(DynamicScale(), CPU).load_state_dict({"param_groups": []})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"init": 0.0}, "init=0.0. It has to be positive"),
        ({"init": 0.5}, "init=0.5. It has to be in [1.0, inf]"),
        ({"growth_factor": 1.0}, "growth_factor=1.0. It has to be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0. It has to be between 0 and 1"),
        ({"growth_interval_steps": 0}, "growth_interval_steps=0. It has to be a whole number from 1 on"),
        ({"hysteresis_steps": 1.5}, "hysteresis_steps=1.5. It has to be a whole number from 1 on"),
    ],
)
def test_numbers_without_a_meaning_say_so(fields: dict[str, float], text: str):
    with pytest.raises(errors.InvalidOption) as caught:
        DynamicScale(**fields)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == f"ERROR[InvalidOption]: loss scaling with {text}"


def test_what_does_not_exist_says_so():
    with pytest.raises(errors.UnknownOption, match="Did you mean 'raise'"):
        DynamicScale(at_floor="rais")  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InvalidOption, match="positive and finite"):
        StaticScale(value=math.inf)
