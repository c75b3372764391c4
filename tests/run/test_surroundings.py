"""What a recorded step looks at before each replay: a glance must not miss what a look sees, and has to be cheap."""

from __future__ import annotations

import copy
import enum
import gc
import sys
from collections import ChainMap, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import fxamp
from fxamp.run import capturable, surroundings, unchanged
from fxamp.run.surroundings import NUM_RIGHT, Glance, Surroundings
from tests.run.tape import taped


class Kind(enum.Enum):
    ONE = 1
    OTHER = 2


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.norm, self.nothing = nn.Linear(4, 4), nn.BatchNorm1d(4), None
        self.word, self.sizes, self.nested, self.kind = "a", [1, 2], ([1], 2), Kind.ONE
        self.gain, self.plain = 1.0, torch.ones(4)


class Everything:
    """All that a step depends on."""

    def __init__(self) -> None:
        self.model: Any = Part()
        for x in (self.model.f.weight, self.model.plain):  # half of a piece of memory
            x.data = torch.cat((x.data, x.data))[: len(x)]
        self.optimizer: Any = optim.AdamW(self.model.parameters(), lr=0.1, betas=(0.9, 0.99))
        self.factor, self.offset = 2.0, torch.ones(4)
        self.masks = (torch.zeros(3),)
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["exp_avg"].data = torch.zeros(8, 4)[:4]
        self.state["later"], self.group["extra"] = None, 1

        self.settled_version: int | None = None
        self.num_settled = 0
        self.surroundings = Surroundings(
            lambda: list(self.model.modules()),
            self.optimizer,
            self.loss,
            self.settled,
            settled_version=lambda: self.settled_version,
        )
        assert self.surroundings.watch([self.model.plain]) == []

    def settled(self) -> tuple[Tensor, ...]:
        self.num_settled += 1
        return self.masks

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out + self.offset, target) * self.factor

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.model.f.weight]


def _second_half(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, x.stride(), x.numel())


def _hook(w: Everything) -> None:
    w.model.f.weight.register_post_accumulate_grad_hook(lambda _: None)


def _load_group(w: Everything) -> None:
    state = w.optimizer.state_dict()
    state["param_groups"][0]["weight_decay"] = 0.5
    w.optimizer.load_state_dict(state)


def _pop(w: Everything) -> None:
    w.optimizer.state.popitem()


CHANGES: dict[str, Callable[[Everything], object]] = {
    "a number": lambda w: setattr(w.model, "gain", 1.5),
    "a number that looks the same": lambda w: setattr(w.model, "gain", float("1.0")),
    "a word": lambda w: setattr(w.model, "word", "b"),
    "a constant": lambda w: setattr(w.model, "kind", Kind.OTHER),
    "a list": lambda w: setattr(w.model, "sizes", [1, 3]),
    "a list, in place": lambda w: w.model.sizes.append(3),
    "a list in a tuple, in place": lambda w: w.model.nested[0].append(3),
    "an attribute is gone": lambda w: delattr(w.model, "gain"),
    "None becomes a number": lambda w: setattr(w.model, "nothing", 1),
    "a parameter": lambda w: setattr(w.model.f, "weight", nn.Parameter(torch.ones(4, 4))),
    "a parameter is None": lambda w: setattr(w.model.f, "bias", None),
    "its memory": lambda w: setattr(w.model.f.weight, "data", torch.ones(4, 4)),
    "its place in its memory": lambda w: setattr(w.model.f.weight, "data", _second_half(w.model.f.weight.data)),
    "the place of one that is neither": lambda w: setattr(w.model.plain, "data", _second_half(w.model.plain.data)),
    "the place of a state": lambda w: setattr(w.state["exp_avg"], "data", _second_half(w.state["exp_avg"].data)),
    "its strides": lambda w: setattr(w.model.f.weight, "data", w.model.f.weight.data.t()),
    "a buffer": lambda w: setattr(w.model.norm, "running_mean", torch.ones(4)),
    "a buffer more": lambda w: w.model.register_buffer("more", torch.ones(4)),
    "a tensor that is neither": lambda w: setattr(w.model, "plain", torch.zeros(4)),
    "the memory of one": lambda w: setattr(w.model.plain, "data", torch.zeros(4)),
    "a module": lambda w: setattr(w.model, "norm", nn.BatchNorm1d(4)),
    "a module more": lambda w: w.model.add_module("more", nn.ReLU()),
    "all modules": lambda w: setattr(w.model, "_modules", dict(w.model._modules, norm=nn.BatchNorm1d(4))),
    "all parameters": lambda w: setattr(w.model.f, "_parameters", {"weight": nn.Parameter(torch.ones(4, 4)), "bias": None}),
    "all buffers": lambda w: setattr(w.model.norm, "_buffers", dict(w.model.norm._buffers, running_mean=torch.ones(4))),
    "modules in another order": lambda w: w.model._modules.update(f=w.model._modules.pop("f")),
    "a module is gone": lambda w: delattr(w.model, "norm"),
    "a hyperparameter": lambda w: w.group.update(weight_decay=0.5),
    "a hyperparameter more": lambda w: w.group.update(more=1),
    "a hyperparameter for another": lambda w: (w.group.pop("extra"), w.group.update(more=None)),
    "a hyperparameter that is a list": lambda w: w.group.update(betas=[0.9, 0.9]),
    "a hyperparameter that is a tensor": lambda w: w.group.update(eps=torch.ones(())),
    "a parameter of the group": lambda w: w.group["params"].__setitem__(1, nn.Parameter(torch.ones(4))),
    "a parameter less": lambda w: w.group["params"].pop(),
    "a group more": lambda w: w.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]}),
    "a state": lambda w: w.state.update(exp_avg=torch.ones(4, 4)),
    "the memory of a state": lambda w: setattr(w.state["exp_avg"], "data", torch.ones(4, 4)),
    "a state becomes a tensor": lambda w: w.state.update(later=torch.ones(4)),
    "a state more": lambda w: w.state.update(more=torch.ones(4)),
    "a state less": _pop,
    "the state of another parameter": lambda w: w.optimizer.state.update({nn.Parameter(torch.ones(2)): dict(w.state)}),
    "states in another order": lambda w: w.state.update(step=w.state.pop("step")),
    "all groups": lambda w: setattr(w.optimizer, "param_groups", [dict(w.group, weight_decay=0.5)]),
    "parameters of a group in another order": lambda w: w.group["params"].reverse(),
    "a list of parameters": lambda w: w.group.update(params=list(reversed(w.group["params"]))),
    "no state": lambda w: w.optimizer.state.clear(),
    "all of the state": lambda w: w.optimizer.load_state_dict(copy.deepcopy(w.optimizer.state_dict())),
    "a hyperparameter of a group that was loaded": _load_group,
    "a hook of the optimizer": lambda w: w.optimizer.register_step_post_hook(lambda *_: None),
    "a hook of a weight": _hook,
    "a number of the loss": lambda w: setattr(w, "factor", 3.0),
    "what loss scaling reads": lambda w: setattr(w, "masks", (torch.zeros(3),)),
    "what it reads, too": lambda w: setattr(w, "masks", (*w.masks, torch.zeros(3))),
}

SAME = {"a number that looks the same"}
"""No change: a look sees none, and a glance may."""


@pytest.mark.parametrize("num_glances", [1, NUM_RIGHT + 1])
@pytest.mark.parametrize("what", CHANGES)
def test_a_glance_misses_nothing_that_a_look_sees(what: str, num_glances: int):
    world = Everything()
    before, glance = world.surroundings.look(), Glance(world.surroundings)
    assert all(glance.is_still_right() for _ in range(num_glances))
    with torch.no_grad():
        CHANGES[what](world)
    changed = world.surroundings.look() != before
    assert changed == (what not in SAME)
    assert not (changed and glance.is_still_right())


@pytest.mark.parametrize("num_glances", [1, NUM_RIGHT + 1])
@pytest.mark.parametrize("what", CHANGES)
def test_a_glance_after_a_change_is_content_again(what: str, num_glances: int):
    """Behind an empty state and behind a full one: a glance that compares only as much as there was would be."""
    world = Everything()
    with torch.no_grad():
        CHANGES[what](world)
    world.surroundings.refresh()
    before, glance = world.surroundings.look(), Glance(world.surroundings)
    assert all(glance.is_still_right() for _ in range(num_glances))
    assert world.surroundings.look() == before
    for p in world.model.parameters():
        p.grad = torch.ones_like(p)
    if world.group["eps"] == 1e-8:
        world.optimizer.step()  # makes state where there is none
    assert world.surroundings.look() == before or not glance.is_still_right()


def looked_at(num: int) -> tuple[Everything, Glance]:
    world = Everything()
    glance = Glance(world.surroundings)
    assert all(glance.is_still_right() for _ in range(num))
    return world, glance


def test_what_does_not_last_is_compared_in_python_for_longer():
    """To note it takes milliseconds: a number that is written now and then, equal each time, must not cost that again and
    again."""
    world, glance = looked_at(NUM_RIGHT)
    assert glance._unchanged is not None
    for i in range(1, 4):
        world.model.gain = float("1.0")
        assert not glance.is_still_right()
        glance = Glance(world.surroundings)
        assert all(glance.is_still_right() for _ in range(2**i * NUM_RIGHT - 1))
        assert glance._unchanged is None
        assert glance.is_still_right()
        assert glance._unchanged is not None


def test_large_models_are_compared_in_python(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(surroundings, "MAX_NOTED", 3)
    _, glance = looked_at(2 * NUM_RIGHT)
    assert glance._unchanged is None


class Several(optim.Optimizer):
    """One of several, as people write it."""

    def __init__(self, parts: list[optim.Optimizer]) -> None:
        self.parts = parts
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def param_groups(self) -> Any:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:
        return ChainMap(*(part.state for part in self.parts))


class Merged(Several):
    @property
    def state(self) -> Any:
        return dict(super().state)


class TupleOfGroups(optim.AdamW):
    @property
    def param_groups(self) -> Any:
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self._groups = tuple(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._groups = (*self._groups, param_group | {k: v for k, v in self.defaults.items() if k not in param_group})


@pytest.mark.parametrize(
    "kind",
    [
        lambda w: Several([w.optimizer]),
        lambda w: Merged([w.optimizer]),
        lambda w: TupleOfGroups([nn.Parameter(torch.ones(2))]),
    ],
)
def test_optimizers_with_other_containers_are_compared_in_python(kind: Callable[[Everything], optim.Optimizer]):
    world = Everything()
    world.surroundings.optimizer = kind(world)
    glance = Glance(world.surroundings)
    assert all(glance.is_still_right() for _ in range(2 * NUM_RIGHT))
    assert glance._unchanged is None
    world.surroundings.optimizer.param_groups[0]["weight_decay"] = 0.5
    assert not glance.is_still_right()


def test_an_order_that_guards_do_not_know_is_compared_in_python():
    """`del sequential[0]` leaves an `OrderedDict`."""
    world = Everything()
    modules = world.model._modules = OrderedDict(world.model._modules)
    world.surroundings.refresh()
    before, glance = world.surroundings.look(), Glance(world.surroundings)
    assert all(glance.is_still_right() for _ in range(2 * NUM_RIGHT))
    modules.move_to_end("f")
    assert world.surroundings.look() != before
    assert not glance.is_still_right()


def test_what_cannot_be_noted_is_told(monkeypatch: pytest.MonkeyPatch):
    """Guards of another PyTorch may be others: it is then as slow as before, and right."""
    monkeypatch.delattr(unchanged.Unchanged, "note_dict")
    world, texts = Everything(), list[str]()
    world.surroundings.note = texts.append
    glance = Glance(world.surroundings)
    assert all(glance.is_still_right() for _ in range(2 * NUM_RIGHT))
    (text,) = texts
    assert "compared in Python" in text
    world.group["weight_decay"] = 0.5
    assert not glance.is_still_right()


def test_a_number_in_the_state_may_change():
    """Not what a recording reads, which capturable optimizers have as tensors."""
    world = Everything()
    world.state["num_seen"] = 1
    glance = Glance(world.surroundings)
    for i in range(2 * NUM_RIGHT):
        world.state["num_seen"] = i
        assert glance.is_still_right()
    assert glance._unchanged is not None
    world.state["num_more"] = 1
    assert not glance.is_still_right()


def test_a_hook_that_is_gone_is_no_hook():
    """PyTorch leaves an empty dict behind."""
    world = Everything()
    weight = world.model.f.weight
    weight.register_hook(lambda gradient: gradient).remove()
    glance = Glance(world.surroundings)
    assert all(glance.is_still_right() for _ in range(NUM_RIGHT + 1))
    hook = weight.register_hook(lambda gradient: gradient)
    assert not glance.is_still_right()
    hook.remove()
    assert glance.is_still_right()


def test_a_gradient_is_seen():
    world = Everything()
    glance = Glance(world.surroundings)
    for num_glances in (1, NUM_RIGHT):
        assert all(glance.is_still_right() for _ in range(num_glances))
        for p in world.model.parameters():
            assert glance.has_no_gradients()
            p.grad = torch.ones_like(p)
            assert not glance.has_no_gradients()
            p.grad = None
        assert glance.has_no_gradients()


def test_a_world_names_what_changed():
    world = Everything()
    before = world.surroundings.look()
    world.group["weight_decay"], world.model.gain = 0.5, 2.0
    assert world.surroundings.look().changed_since(before) == "attributes and hyperparameters"


def test_hyperparameters_of_schedules_are_not_held_fast():
    group = Everything().group
    assert "lr" in group
    assert not {"lr", "params"} & {key for _, key in capturable.held_fast(group)}


# ---- what it costs -------------------------------------------------------------------------------------------------------
def num_calls(num_layers: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Python functions that are called in a replayed step, builtins too."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    gc.collect()  # steps of other tests would hear of this one's
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = taped(fxamp.Amp(precision=precision, lower="aot_eager").train_step(model, F.mse_loss, optimizer), monkeypatch)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(8):
        step(*batch)
    assert (step._glance is not None and step._glance._unchanged is not None) == (NUM_RIGHT != surroundings.NUM_RIGHT)
    recordings = [recording for shape in step._shapes.values() for recording in shape.recordings.values()]
    assert len(recordings) == 1
    recordings[0].graph.replay = lambda: None  # the tape's operations are called from Python, a graph's are not
    step(*batch)
    count, before = 0, step.summary().num_replayed

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step(*batch)
    finally:
        sys.setprofile(None)
    assert step.summary().num_replayed == before + 1
    return count


@pytest.mark.parametrize("num_right", [NUM_RIGHT, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_host_does_little_for_a_replay(precision: str, num_right: int, monkeypatch: pytest.MonkeyPatch):
    """On a small model the GPU waits for the host. What is looked at for each parameter is looked at in C."""
    monkeypatch.setattr(surroundings, "NUM_RIGHT", num_right)
    few, many = (num_calls(n, precision, monkeypatch) for n in (4, 24))
    assert (many - few) / 40 < 3, "function calls a parameter"


def test_loss_scaling_is_asked_only_where_it_says_that_something_changed():
    w = Everything()
    glance = Glance(w.surroundings)

    def asks() -> int:
        before = w.num_settled
        assert glance.is_still_right()
        return w.num_settled - before

    assert [asks(), asks()] == [1, 1]  # it says nothing
    w.settled_version = 1
    assert [asks(), asks()] == [1, 0]
    w.settled_version = 2
    assert [asks(), asks()] == [1, 0]
    w.settled_version = None
    assert [asks(), asks()] == [1, 1]
    w.settled_version, w.masks = 3, (torch.zeros(3),)
    assert not glance.is_still_right()
