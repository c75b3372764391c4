"""`Amp.freeze`: compiled graphs read low copies of weights. That writes are seen: tests/run/test_frozen.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import fxamp
from fxamp import errors
from tests.waits import no_waits

X = torch.randn(3, 8)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def compiled(model: nn.Module, **options: Any) -> tuple[fxamp.Amp, Callable[..., Tensor]]:
    amp = fxamp.Amp(precision="bf16", lower="aot_eager", **options)
    return amp, torch.compile(model, backend=amp)


def expected(model: nn.Module, x: Tensor = X) -> Tensor:
    """What `layers()` computes, by hand."""
    first, norm, last = (list(m.parameters()) for m in model.children())

    def low(weights: list[nn.Parameter], x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), *(w.bfloat16() for w in weights)).float()

    with torch.no_grad():
        return low(last, F.layer_norm(low(first, x), (8,), norm[0], norm[1]))


def num_casts(amp: fxamp.Amp, graph: int = -1, variant: int = 0) -> int:
    """Casts of weights in a graph."""
    record = list(amp.graphs[graph].variants.values())[variant]
    inputs = record.dynamo.graph.find_nodes(op="placeholder")
    parameters = [node for node in inputs if record.captured.roles[node.name] == "parameter"]
    return sum(user.target is torch.ops.aten.to.dtype for node in parameters for user in node.users)


def test_copies_are_read_and_nothing_is_cast():
    model = layers()
    amp, run = compiled(model)
    with torch.no_grad(), amp.freeze(model) as frozen:
        assert torch.equal(run(X), expected(model))
        assert num_casts(amp) == 0
        assert frozen.num_weights == 6
        assert frozen.num_bytes == 2 * (8 * 8 + 8 + 8 * 4 + 4)  # the norm reads its own as they are
        for _ in range(3):
            assert torch.equal(run(X), expected(model))
        assert amp._weights.num_updates == 4
    assert frozen.num_weights == frozen.num_bytes == 0


def test_without_freeze_weights_are_cast():
    amp, run = compiled(layers())
    with torch.no_grad():
        run(X)
    assert num_casts(amp) == 4
    assert amp.report().weights == ()


def test_training_and_evaluation_take_turns():
    """A second freeze compiles nothing, and neither does a second thaw."""
    model = layers()
    amp, run = compiled(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        run(X)  # in its own graph, compiled before
    for _ in range(3):
        out = run(X)
        assert torch.equal(out, expected(model))
        out.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        with amp.freeze(model):
            with torch.no_grad():
                assert torch.equal(run(X), expected(model))
            with torch.inference_mode():
                assert torch.equal(run(X), expected(model))
        with torch.no_grad():
            assert torch.equal(run(X), expected(model))
        assert len(amp.graphs) == 4
    assert [num_casts(amp, i) for i in range(4)] == [4, 4, 0, 0]
    assert "of 6 frozen weights, 4 are read as low copies" in str(amp.report())


def test_state_is_that_of_the_parameters():
    model, other = layers(), layers()
    amp, run = compiled(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), amp.freeze(model):
        run(X)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) and value.dtype == torch.float32 for name, value in before.items())
        model.load_state_dict(other.state_dict())
        assert torch.equal(run(X), expected(other))
    assert torch.equal(run(X), expected(other))


def test_steps_while_frozen_are_seen():
    model = layers()
    amp, run = compiled(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    run(X).sum().backward()
    with amp.freeze(model), torch.no_grad():
        before = run(X)
        optimizer.step()
        assert torch.equal(run(X), expected(model))
        assert not torch.equal(run(X), before)


# ---- training is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("on_error", ["raise", "eager"])
def test_calls_with_gradients_on_are_refused(on_error: str):
    model = layers()
    amp, run = compiled(model, on_error=on_error)
    run(X).sum().backward()
    with amp.freeze(model), pytest.raises(BackendCompilerFailed, match=r"FrozenWeights.*\(0\.weight, and 5 more\).*amp\.thaw"):
        run(X)
    assert run(X).requires_grad


def test_a_train_step_is_refused_until_thawed():
    model = layers()
    amp, run = compiled(model)
    step = amp.train_step(model, lambda out, y: F.mse_loss(out, y), optim.SGD(model.parameters(), lr=0.1))
    y = torch.randn(3, 4)
    for _ in range(2):
        step(X, y)
        with amp.freeze(model):
            with torch.no_grad():
                assert torch.equal(run(X), expected(model))
            with pytest.raises(errors.FrozenWeights, match="gradients on"):
                step(X, y)
        with amp.freeze(model[0]), pytest.raises(errors.FrozenWeights, match="gradients on"):
            step(X, y)


def test_weights_that_never_required_gradients_may_be_called_with_gradients_on():
    model = layers().requires_grad_(False)
    amp, run = compiled(model)
    amp.freeze(model)
    assert torch.equal(run(X), expected(model))
    assert num_casts(amp) == 0


# ---- what Dynamo cannot tell apart -----------------------------------------------------------------------------------------
def test_thawed_weights_without_gradients():
    model = layers().requires_grad_(False)
    amp, run = compiled(model)
    with amp.freeze(model):
        assert torch.equal(run(X), expected(model))
    with pytest.warns(fxamp.FxampWarning, match="thawed ones that required no gradients before"):
        assert torch.equal(run(X), expected(model))
    next(model.parameters()).normal_()
    assert torch.equal(run(X), expected(model))
    assert len(amp.graphs) == 1
    assert amp._weights.num_bytes() == 0


def test_weights_without_gradients_frozen_late():
    model = layers().requires_grad_(False)
    amp, run = compiled(model)
    run(X)
    with amp.freeze(model):
        with pytest.warns(fxamp.FxampWarning, match=r"compiled before amp\.freeze casts its frozen weights at every call"):
            assert torch.equal(run(X), expected(model))
        torch._dynamo.reset()
        assert torch.equal(run(X), expected(model))
        assert num_casts(amp) == 0


# ---- graphs of several modules, shapes, precisions -----------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_one_graph_of_many_layers():
    blocks = [Block() for _ in range(3)]
    model, amp = nn.Sequential(*blocks), fxamp.Amp(precision="bf16", lower="aot_eager")
    for block in blocks:
        block.compile(backend=amp)
    with torch.no_grad(), amp.freeze(model) as frozen:
        for _ in range(2):
            out, want = model(X), X
            for block in blocks:
                want = F.linear(want.bfloat16(), *(p.bfloat16() for p in block.parameters())).float()
            assert torch.equal(out, want)
            assert amp._weights.num_updates == 6
            assert frozen.num_bytes == 2 * 3 * (64 + 8)
    assert len(amp.graphs) == 1


def test_only_a_part_is_frozen():
    model = layers()
    amp, run = compiled(model)
    with torch.no_grad(), amp.freeze(model[2]) as frozen:
        assert torch.equal(run(X), expected(model))
        assert num_casts(amp) == 2
        assert frozen.num_bytes == 2 * (32 + 4)


def test_dynamic_shapes():
    model = layers()
    amp, _ = compiled(model)
    run = torch.compile(model, backend=amp, dynamic=True)
    with torch.no_grad(), amp.freeze(model):
        for size in (3, 5, 17):
            x = torch.randn(size, 8)
            assert torch.equal(run(x), expected(model, x))
    assert len(amp.graphs) == 1


def test_a_ladder_keeps_copies_of_what_has_run():
    model = layers()
    amp = fxamp.Amp(ladder=("bf16", "fp32"), lower="aot_eager")
    run = torch.compile(model, backend=amp)
    with torch.no_grad(), amp.freeze(model) as frozen:
        amp.set_precision("fp32")
        torch.testing.assert_close(run(X), model(X))
        assert frozen.num_bytes == 0
        amp.set_precision("bf16")
        assert torch.equal(run(X), expected(model))
        assert frozen.num_bytes == 216


class Viewed(nn.Module):
    """Weights that are read through views; of the last one a part that is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Parameter(torch.randn(8, 8)) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.a.t() @ self.b.T @ self.c.view(64)[:].view(8, 8).transpose(0, 1)
        return F.linear(x, self.d[:4].reshape(4, 8)) @ self.e[:4, :4]


def test_views_of_weights():
    model = Viewed()
    amp, run = compiled(model)
    with torch.no_grad():
        want = run(X)
    with torch.no_grad(), amp.freeze(model) as frozen:
        assert torch.equal(run(X), want)
        assert frozen.num_bytes == 2 * 4 * 64
        assert len(amp.graphs[-1].variants["bf16"].casts) == 3  # of x, of the result, and of e
        model.a.data.neg_()
        assert torch.equal(run(X), -want)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.mixed = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(self.embed(x)) @ self.mixed
        return F.linear(h, self.embed.weight) + self.mixed.sum()


def test_weights_that_something_reads_as_they_are_stay_and_the_report_says_so():
    model, x = Tied(), torch.tensor([1, 2])
    amp, run = compiled(model)
    with torch.no_grad(), amp.freeze(model) as frozen:
        run(x)
        assert frozen.num_bytes == 2 * (64 + 8)
        report = " ".join(str(amp.report()).split())
        model.embed.weight.normal_()
        want = run(x)
    assert "TakeLowWeights left embed.weight (test_freeze.py:" in report
    assert "is cast at every call, since it is read as it is too, by embedding" in report
    assert "is cast at every call, since it is read as it is too, by sum" in report
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(compiled(model)[1](x), want)


def test_captured_by_hand_the_casts_are_part_of_the_capture(monkeypatch: pytest.MonkeyPatch):
    """A replay asks nobody whether a weight was written: what is captured must read the weight itself."""
    from fxamp.run.frozen import WeightCopies

    class Cuda(Tensor):  # its device says that it is on a GPU
        device = torch.device("cuda", 0)  # pyright: ignore

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = nn.Linear(2, 2)
    copies = WeightCopies(print)
    copies.freeze(model)
    weight = model.weight.detach().as_subclass(Cuda)
    (low,) = copies.around(lambda *lows: lows, {0: torch.bfloat16})(weight)
    assert torch.equal(low.as_subclass(Tensor), model.weight.bfloat16())
    assert copies.num_updates == 0


def test_refresh_copies_anew():
    model = layers()
    amp, run = compiled(model)
    with torch.no_grad(), amp.freeze(model):
        run(X)
        amp.refresh()
        assert amp._weights.num_updates == 4
        run(X)
        assert amp._weights.num_updates == 8


@pytest.mark.parametrize("call", ["freeze", "thaw"])
def test_only_modules_have_weights(call: str):
    with pytest.raises(errors.InvalidOption, match=rf"{call}\(\) was given a function. Give it the torch.nn.Module"):
        getattr(fxamp.Amp(), call)(expected)


# ---- Inductor, CUDA graphs -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_through_inductor():
    model = layers()
    amp = fxamp.Amp(precision="bf16")
    run = torch.compile(model, backend=amp)
    with torch.no_grad(), amp.freeze(model) as frozen:
        for _ in range(2):
            torch.testing.assert_close(run(X), expected(model), atol=2e-2, rtol=2e-2)
            assert amp._weights.num_updates == 4  # nobody took an address of the weights
        assert "copied at every call" not in dict(amp.report().weights)
        nn.init.normal_(model[0].weight)  # pyright: ignore
        torch.testing.assert_close(run(X), expected(model), atol=5e-2, rtol=2e-2)
        assert frozen.num_bytes == 216


@pytest.mark.gpu
def test_with_cuda_graphs():
    """Copies are made once, in memory that stays where it is, whatever replays; nothing waits."""
    model, x = layers().cuda(), X.cuda()
    amp = fxamp.Amp(precision="bf16")
    run = torch.compile(model, backend=amp)
    with torch.no_grad(), amp.freeze(model):
        for _ in range(5):
            torch.testing.assert_close(run(x), expected(model, x), atol=2e-2, rtol=2e-2)
        assert amp._weights.num_updates == 4
        for _ in range(5):
            for p in model.parameters():
                p.data.normal_()
            torch.testing.assert_close(run(x), expected(model, x), atol=0.2, rtol=2e-2)
        with no_waits():
            for _ in range(5):
                run(x)
                next(model.parameters()).data.mul_(0.5)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            out = run(x)
            torch.cuda.current_stream().synchronize()
        torch.testing.assert_close(out, expected(model, x), atol=0.2, rtol=2e-2)
        assert "copied at every call" not in dict(amp.report().weights)


@pytest.mark.gpu
def test_a_capture_of_ones_own_reads_the_weights():
    model, x = layers().cuda(), X.cuda()
    amp = fxamp.Amp(precision="bf16", cuda_graphs=False)
    run = torch.compile(model, backend=amp)
    with torch.no_grad(), amp.freeze(model):
        run(x)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = run(x)
        for p in model.parameters():
            p.data.normal_()
        captured.replay()
        torch.testing.assert_close(out, expected(model, x), atol=0.2, rtol=2e-2)


@pytest.mark.gpu
def test_between_recorded_steps():
    """Their replays write weights by address; the copies are anew all the same, and a frozen model does not train."""
    model, x = layers().cuda(), X.cuda()
    amp = fxamp.Amp(precision="bf16")
    run = torch.compile(model, backend=amp)
    step = amp.train_step(model, lambda out, _: out.square().mean(), optim.AdamW(model.parameters(), lr=0.1, fused=True))
    for _ in range(8):
        step(x, x)
        with torch.no_grad(), amp.freeze(model):
            torch.testing.assert_close(run(x), expected(model, x), atol=0.2, rtol=2e-2)
    assert step.summary().num_replayed > 0
    with amp.freeze(model), pytest.raises(errors.FrozenWeights, match="gradients on"):
        step(x, x)
