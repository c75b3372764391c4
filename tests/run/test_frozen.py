"""Low copies hold what the weights hold, whoever writes to those, in whatever way."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import re
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fxamp
from fxamp import errors
from fxamp.run import writes
from fxamp.run.frozen import WeightCopies

BF16 = torch.bfloat16


def layers() -> nn.Sequential:
    """Of two equal square layers, so that weights can take each other's place."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


class Reader:
    """Reads a model's weights as a compiled graph does, which is handed them at every call."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = BF16) -> None:
        self.model, self.dtype, self.notes = model, dtype, list[str]()
        self.copies = WeightCopies(self.notes.append)
        positions = dict.fromkeys(range(len(list(model.parameters()))), dtype)
        self._program = self.copies.around(lambda *lows: list(lows), positions)

    def lows(self) -> list[Tensor]:
        return self._program(*self.model.parameters())

    def is_current(self) -> bool:
        lows, weights = self.lows(), list(self.model.parameters())
        return all(torch.equal(low, weight.to(self.dtype)) for low, weight in zip(lows, weights, strict=True))

    def num_updates(self) -> int:
        before = self.copies.num_updates
        self.lows()
        return self.copies.num_updates - before


# ---- ways to write ---------------------------------------------------------------------------------------------------------
def weight(model: nn.Module) -> nn.Parameter:
    return model[0].weight  # pyright: ignore


def noise(*shape: int) -> Tensor:
    return torch.randn(shape or (8, 8))


def overwrite(storage: torch.UntypedStorage) -> None:
    storage.copy_(noise(storage.nbytes() // 4).untyped_storage())


def step(model: nn.Module, kind: Callable[..., optim.Optimizer] = optim.AdamW, **settings: Any) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    kind(model.parameters(), lr=0.1, **settings).step()


def flip_through_data(model: nn.Module) -> None:
    """As an average of weights that keeps two sets of tensors does."""
    for p in model.parameters():
        p.data = torch.randn_like(p)


def exchange(model: nn.Module) -> None:
    """Both are frozen, both memories unwritten; each is another weight's now."""
    a, b = weight(model), model[1].weight  # pyright: ignore
    a.data, b.data = b.data, a.data


def swap_averages(model: nn.Module) -> None:
    average = optim.swa_utils.AveragedModel(model)
    for p in average.parameters():
        p.data.add_(torch.randn_like(p))
    for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
        p.data.copy_(q.data)


def replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(noise())  # pyright: ignore


def transposed_in_place(model: nn.Module) -> None:
    """The same memory, unwritten, read otherwise."""
    p = weight(model)
    p.set_(p.untyped_storage(), 0, (8, 8), (1, 8))  # pyright: ignore


def into_larger_memory(model: nn.Module) -> None:
    memory = noise(16, 8)
    weight(model).data = memory[:8]
    memory[4:].normal_()


def fused_step_on_data(model: nn.Module) -> None:
    data = [p.data for p in model.parameters()]
    grads, momenta = ([torch.randn_like(p) for p in data] for _ in range(2))
    torch._fused_sgd_(
        data, grads, momenta,
        weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip


DURING: dict[str, Callable[[nn.Module], object]] = {
    "data.copy_": lambda m: weight(m).data.copy_(noise()),
    "data=": flip_through_data,
    "data= of each other": exchange,
    "data= of a part": into_larger_memory,
    "copy_": lambda m: weight(m).copy_(noise()),
    "detach().mul_": lambda m: weight(m).detach().mul_(noise()),
    "foreach": lambda m: torch._foreach_mul_(list(m.parameters()), 2.0),
    "foreach on data": lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 2.0),
    "foreach copy on data": lambda m: torch._foreach_copy_([weight(m).data], [noise()]),
    "a fused optimizer's function on data": fused_step_on_data,
    "setitem": lambda m: weight(m).__setitem__((0, slice(None)), noise(8)),
    "out=": lambda m: torch.mul(noise(), 2, out=weight(m).data),
    "index_put_": lambda m: weight(m).data.index_put_((torch.tensor([1]),), noise(1, 8), accumulate=True),
    "init": lambda m: nn.init.xavier_normal_(weight(m)),
    "set_": lambda m: weight(m).set_(noise()),  # pyright: ignore
    "set_ on its own memory": transposed_in_place,
    "storage.copy_": lambda m: overwrite(weight(m).untyped_storage()),
    "storage setitem": lambda m: weight(m).untyped_storage().__setitem__(3, 7),
    "load_state_dict": lambda m: m.load_state_dict(layers().state_dict()),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(layers().state_dict(), assign=True),
    "vector_to_parameters": lambda m: vector_to_parameters(parameters_to_vector(m.parameters()) * 2, m.parameters()),
    "swap_tensors": lambda m: torch.utils.swap_tensors(weight(m), nn.Parameter(noise(), requires_grad=False)),
    "swap_tensors of each other": lambda m: torch.utils.swap_tensors(weight(m), m[1].weight),  # pyright: ignore
    "another parameter": replace,
    "an average of weights": swap_averages,
    "AdamW fused": lambda m: step(m, fused=True),
    "AdamW foreach": lambda m: step(m, foreach=True),
    "AdamW": lambda m: step(m, foreach=False),
    "SGD fused": lambda m: step(m, optim.SGD, fused=True),
    "clip_": lambda m: [p.clamp_(-0.1, 0.1) for p in m.parameters()],
    "NumPy": lambda m: np.copyto(weight(m).detach().numpy(), noise().numpy()),
    "DLPack": lambda m: torch.from_dlpack(weight(m).detach()).copy_(noise()),
    "apply": lambda m: m.apply(lambda x: x.reset_parameters() if isinstance(x, nn.Linear) else None),
}
"""How a weight may be written, or exchanged, while it is frozen."""

HELD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], object]]] = {
    "view": (lambda w: w.data[2:5], lambda v: v.normal_()),
    "detach": (lambda w: w.detach(), lambda v: v.normal_()),
    "transpose": (lambda w: w.data.t(), lambda v: v.normal_()),
    "view as integers": (lambda w: w.data.view(torch.int32), lambda v: v.copy_(noise().view(torch.int32))),
    "storage": (lambda w: w.untyped_storage(), overwrite),
    "set_ from storage": (lambda w: torch.empty(0).set_(w.untyped_storage()), lambda v: v.normal_()),
    "state_dict": (lambda w: {"w": w.detach()}, lambda v: v["w"].normal_()),
    "NumPy": (lambda w: w.detach().numpy(), lambda v: np.copyto(v, noise().numpy())),
    "NumPy, a part": (lambda w: w.detach().numpy()[3], lambda v: np.copyto(v, noise(8).numpy())),
    "from_numpy": (lambda w: torch.from_numpy(w.detach().numpy()), lambda v: v.normal_()),
    "DLPack": (lambda w: torch.from_dlpack(w.detach()), lambda v: v.normal_()),
}
"""What can be taken of a weight, and how it is written through that much later."""


ON_CPU_ONLY = re.compile("numpy|storage setitem", re.IGNORECASE)
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def skip_what_needs_the_cpu(way: str, device: str) -> None:
    if device != "cpu" and ON_CPU_ONLY.search(way):
        pytest.skip("for memory of the CPU")


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> Generator[str]:
    with torch.device(request.param):
        yield request.param


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("way", DURING)
def test_a_write_is_seen(way: str, inference_mode: bool, device: str):
    skip_what_needs_the_cpu(way, device)
    reader = Reader(layers())
    reader.copies.freeze(reader.model)
    with torch.inference_mode() if inference_mode else torch.no_grad():
        assert reader.is_current()
        before = [low.clone() for low in reader.lows()]
    with torch.no_grad():
        DURING[way](reader.model)
    with torch.inference_mode() if inference_mode else torch.no_grad():
        assert reader.is_current()
        assert any(not torch.equal(a, b) for a, b in zip(before, reader.lows(), strict=True))
        assert reader.is_current()


@pytest.mark.parametrize("way", ["foreach", "AdamW fused", "AdamW foreach", "SGD fused", "clip_"])
def test_a_write_that_leaves_the_mark_is_seen(way: str, monkeypatch: pytest.MonkeyPatch):
    """Kernels for many tensors at once leave it on CUDA: there autograd's count of writes, and a hook on optimizers, tell."""
    reader = Reader(layers())
    reader.copies.freeze(reader.model)
    with torch.no_grad():
        assert reader.is_current()
        monkeypatch.setattr(writes, "is_marked", lambda _: True)
        DURING[way](reader.model)
        assert reader.is_current()


@pytest.mark.gpu
def test_upstream_still_wrong():
    """A copy-on-write clone is written through, unless `writes.watch_lists` was called."""
    write = getattr(torch._foreach_mul_, "__wrapped__", torch._foreach_mul_)
    weights = [torch.ones(8, device="cuda")]
    writes.mark(weights[0])
    write(weights, 2.0)
    assert writes.is_marked(weights[0])


@pytest.mark.parametrize(("num_written", "stays"), [(1, True), (None, False)])
def test_functions_for_lists_take_the_mark_away(num_written: int | None, stays: bool):
    written, read = [torch.ones(8)], [torch.ones(8)]
    for x in (*written, *read):
        writes.mark(x)
    calls = list[Any]()
    writes.taking_marks(lambda *args: calls.append(args), num_written)(written, read, 2.0)
    assert [writes.is_marked(x) for x in (*written, *read)] == [False, stays]
    assert calls == [(written, read, 2.0)]


def test_watched_functions_are_compiled_as_always(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in dir(torch) if name.startswith(("_foreach_", "_fused_"))]:
        monkeypatch.setattr(torch, name, getattr(torch, name))  # puts it back at the end
    writes.watch_lists.cache_clear()
    writes.watch_lists()
    writes.watch_lists.cache_clear()
    assert hasattr(torch._foreach_add_, "__wrapped__")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        torch._foreach_lerp_([x], [y], torch.tensor(0.5))  # pyright: ignore
        torch._foreach_copy_([y], [x])
        return torch._foreach_add([x], 1.0)[0]

    x, y = torch.zeros(4), torch.ones(4)
    assert torch.equal(step(x, y), torch.full((4,), 1.5))
    assert torch.equal(y, torch.full((4,), 0.5))
    p = torch.zeros(4, requires_grad=True)
    p.grad = torch.ones(4)
    optimizer = optim.AdamW([p], lr=0.1, weight_decay=0.0)
    torch.compile(optimizer.step, backend="aot_eager")()
    assert torch.allclose(p.detach(), torch.full((4,), -0.1))


def test_a_step_that_is_compiled_passes_those_who_listen():
    """Whoever is there: an Amp with a scale, low copies, frozen weights."""
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    amp = fxamp.Amp(precision="fp16", lower="aot_eager")
    step = amp.train_step(nn.Linear(4, 4), None, optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1))
    torch.compile(nn.Linear(4, 4), backend=amp)(torch.ones(2, 4)).sum().backward()
    with amp.freeze(nn.Linear(4, 4)):
        before = model.weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.compile(optimizer.step, backend="aot_eager")()
    assert torch.allclose(model.weight.detach(), before - 0.1, atol=1e-6)
    step.close()


@pytest.mark.parametrize("when", ["before", "while frozen"])
@pytest.mark.parametrize("way", HELD)
@torch.no_grad()
def test_a_write_through_what_is_held_is_seen(way: str, when: str, device: str):
    skip_what_needs_the_cpu(way, device)
    take, write = HELD[way]
    reader = Reader(layers())
    held = take(weight(reader.model)) if when == "before" else None
    reader.copies.freeze(reader.model)
    assert reader.is_current()
    held = take(weight(reader.model)) if held is None else held
    for _ in range(3):
        assert reader.is_current()
        before = reader.lows()[0].clone()
        write(held)
        assert reader.is_current()
        assert not torch.equal(before, reader.lows()[0])


@torch.no_grad()
def test_memory_is_resized():
    """PyTorch 2.13 then refuses every later write (it forgets that the memory is new), earlier ones see it."""
    reader = Reader(layers())
    reader.copies.freeze(reader.model)
    assert reader.is_current()
    weight(reader.model).data.resize_(9, 8).resize_(8, 8)
    assert reader.is_current()
    with contextlib.suppress(RuntimeError):
        weight(reader.model).normal_()
    assert reader.is_current()


@torch.no_grad()
def test_a_write_through_what_a_parameter_shares_with_another():
    memory = noise(2, 8, 8)
    model = layers()
    model[0].weight.data, model[1].weight.data = memory[0], memory[1]
    reader = Reader(model)
    reader.copies.freeze(model)
    assert reader.is_current()
    for target in (model[0].weight.data, model[1].weight.data, memory, memory[1]):
        nn.init.normal_(target)
        assert reader.is_current()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 40))])
@torch.no_grad()
def test_random_lives(seed: int):
    """Writes of all kinds, and everything that may come in between."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    reader = Reader(layers())
    frozen, held = reader.copies.freeze(reader.model), list[tuple[Any, Callable[[Any], object]]]()

    def hold() -> None:
        take, write = draw.choice(list(HELD.values()))
        held.append((take(weight(reader.model)), write))

    def refreeze() -> None:
        nonlocal frozen
        frozen.thaw()
        frozen = reader.copies.freeze(reader.model)

    ways = [write for way, write in DURING.items() if way != "set_ on its own memory"]  # others want rows one by one
    others = [hold, refreeze, held.clear, reader.copies.expire, lambda: weight(reader.model).data_ptr(), gc.collect]
    for _ in range(150):
        action = draw.randrange(6)
        if action < 2:
            draw.choice(ways)(reader.model)
        elif action < 4 and held:
            target, write = draw.choice(held)
            write(target)
        elif action == 4:
            draw.choice(others)()
        if draw.random() < 0.7:
            assert reader.is_current()
    assert reader.is_current()


# ---- what it costs ---------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_what_was_not_written_is_not_copied(device: str):
    reader = Reader(layers())
    frozen = reader.copies.freeze(reader.model)
    assert frozen.num_bytes == 0
    first = reader.lows()
    assert frozen.num_bytes == 2 * 2 * (64 + 8)
    for _ in range(3):
        nn.functional.linear(noise(), weight(reader.model))  # reading is not writing
        weight(reader.model).to(BF16)
        copy.deepcopy(reader.model)
        assert reader.num_updates() == 0
    nn.init.normal_(weight(reader.model))
    assert reader.num_updates() == 1
    assert reader.num_updates() == 0
    lows = reader.lows()
    assert all(a is b for a, b in zip(first, lows, strict=True))  # the memory that a CUDA graph reads stays where it is
    reader.copies.expire()
    assert reader.num_updates() == 4


@torch.no_grad()
def test_marking_moves_and_copies_nothing(device: str):
    model = layers()
    addresses = [p.data_ptr() for p in model.parameters()]
    reader = Reader(model)
    frozen = reader.copies.freeze(model)
    reader.lows()
    step(model)
    reader.lows()
    frozen.thaw()
    assert [p.data_ptr() for p in model.parameters()] == addresses


@torch.no_grad()
def test_a_weight_that_others_hold_is_copied_at_every_call_until_they_let_go():
    reader = Reader(layers())
    held = weight(reader.model).detach().numpy()
    reader.copies.freeze(reader.model)
    reader.lows()
    assert [reader.num_updates() for _ in range(3)] == [1, 1, 1]
    text = dict(reader.copies.summary())["copied at every call"]
    assert text.startswith("1: 0.weight, for one, since something beside the model has its memory")
    del held
    reader.lows()
    assert reader.num_updates() == 0
    assert "copied at every call" not in dict(reader.copies.summary())


@torch.no_grad()
def test_memory_that_cannot_be_marked_is_copied_at_every_call():
    array = noise().numpy()
    model = layers()
    weight(model).data = torch.from_numpy(array)
    model[1].get_parameter("weight").data.share_memory_()
    reader = Reader(model)
    reader.copies.freeze(model)
    for _ in range(3):
        array += 1
        assert reader.is_current()
        assert reader.num_updates() == 2


@torch.no_grad()
def test_two_formats():
    model = layers()
    bf16, copies = Reader(model), None
    copies = bf16.copies
    fp16 = copies.around(lambda *lows: lows, dict.fromkeys(range(4), torch.float16))
    frozen = copies.freeze(model)
    for _ in range(2):
        assert bf16.is_current()
        assert all(torch.equal(low, p.half()) for low, p in zip(fp16(*model.parameters()), model.parameters(), strict=True))
        step(model)
        assert frozen.num_bytes == 4 * 2 * (64 + 8)


# ---- freezing and thawing --------------------------------------------------------------------------------------------------
def test_thawing_gives_back_what_was():
    model = layers()
    model[1].requires_grad_(False)
    before = {name: (id(p), p.requires_grad, p.dtype, p.detach().clone()) for name, p in model.named_parameters()}
    reader = Reader(model)
    with reader.copies.freeze(model) as frozen, torch.no_grad():
        reader.lows()
        assert not any(p.requires_grad for p in model.parameters())
        assert {k: v.dtype for k, v in model.state_dict().items()} == {k: v[2] for k, v in before.items()}
    assert frozen.num_weights == frozen.num_bytes == reader.copies.num_bytes() == 0
    assert list(model.state_dict()) == list(before)
    for name, p in model.named_parameters():
        key, trains, dtype, values = before[name]
        assert (id(p), p.requires_grad, p.dtype) == (key, trains, dtype)
        assert torch.equal(p, values)


def test_freezing_twice_and_in_parts():
    model = layers()
    copies = Reader(model).copies
    part, whole = copies.freeze(model[0]), copies.freeze(model)
    assert (part.num_weights, whole.num_weights) == (2, 2)  # each thaws what it froze
    whole.thaw()
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    copies.thaw(model)
    copies.thaw(model)
    assert all(p.requires_grad for p in model.parameters())
    part.thaw()
    assert not copies.is_active


def test_a_shared_weight_is_copied_once_and_thawed_last():
    model = layers()
    model[1].weight = model[0].weight
    reader = Reader(model)
    first, second = reader.copies.freeze(model[0]), reader.copies.freeze(model[1])
    with torch.no_grad():
        reader.lows()
        assert reader.copies.num_bytes() == 2 * (64 + 16)
        first.thaw()
        reader.lows()
        assert second.num_bytes == 2 * (64 + 8)
    second.thaw()
    assert weight(model).requires_grad


@torch.no_grad()
def test_what_comes_into_a_frozen_place_is_thawed_with_it():
    model = layers()
    reader = Reader(model)
    frozen = reader.copies.freeze(model)
    model.load_state_dict(layers().state_dict(), assign=True)
    assert not weight(model).requires_grad  # as PyTorch does it: like the one before
    frozen.thaw()
    assert all(p.requires_grad for p in model.parameters())


def test_thawed_weights_are_cast():
    reader = Reader(layers())
    reader.copies.freeze(reader.model).thaw()
    with torch.no_grad():
        assert reader.is_current()
    assert reader.copies.num_bytes() == 0
    assert "They are cast at every call" in reader.notes[0]


def test_a_model_that_is_gone_takes_its_copies_along():
    model = layers()
    reader = Reader(model)
    reader.copies.freeze(model)
    with torch.no_grad():
        low = weakref.ref(reader.lows()[0])
    copies = reader.copies
    watch = weakref.ref(weight(model))
    del reader, model
    gc.collect()
    assert low() is None
    assert watch() is None
    assert copies.num_bytes() == 0
    assert not copies.is_active


def test_a_backward_under_way_is_refused():
    model = layers()
    loss, twice = model(noise()).sum(), model(noise()).sum()
    frozen = Reader(model).copies.freeze(model)
    with pytest.raises(errors.FrozenWeights, match=r"a backward reaches the frozen weight [01]\.\w+\. Call backward"):
        loss.backward()
    frozen.thaw()
    twice.backward()
    assert all(p.grad is not None for p in model.parameters())


class Special(nn.Parameter):
    pass


class FullyShardedDataParallel(nn.Sequential):
    """By this name, and no other, FSDP is known without importing it."""


def test_other_parameters_are_refused_and_nothing_is_frozen():
    model = layers()
    model[1].weight = Special(noise())
    copies = Reader(model).copies
    with pytest.raises(errors.CannotFreeze, match=r"1\.weight is a Special, and cannot be frozen"):
        copies.freeze(model)
    assert weight(model).requires_grad
    assert not copies.is_active
    with pytest.raises(errors.CannotFreeze, match="FullyShardedDataParallel is sharded, and cannot be frozen"):
        copies.freeze(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))))
