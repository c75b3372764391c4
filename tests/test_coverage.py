"""What replays as a CUDA graph, forward and backward, by Inductor's own records; and what does not, why, and at which line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_utils import PlaceholderInfo, format_default_skip_message, get_mutation_stack_trace

import fxamp
from fxamp import errors, lower
from fxamp.coverage import Coverage, Phase, Replay, explained
from fxamp.run.cuda_graphs import CudaGraphs

TRACE = '  File "/home/me/train.py", line 33, in forward\n    y = self.l(x).cpu()\n'


@pytest.mark.parametrize(
    ("message", "reason", "where"),
    [
        (format_default_skip_message(f"cpu device (cpu_x). Found from : \n {TRACE}"), "cpu device (cpu_x)", "train.py:33"),
        (
            format_default_skip_message(format_default_skip_message("multiple devices: cuda:0, cuda:1")),
            "multiple devices: cuda:0, cuda:1",
            "",
        ),
        ("input storage mutation", "input storage mutation", ""),
        ("", "Inductor gives no reason", ""),
    ],
)
def test_messages_of_inductor(message: str, reason: str, where: str):
    assert explained(message) == (reason, where)


def test_mutations():
    placeholder = PlaceholderInfo(name="x", stack_trace=None, users=[], mutating_use_stack_trace=TRACE)
    message = get_mutation_stack_trace([placeholder, placeholder], [0, 1])
    assert explained(message) == ("mutated inputs (2 instances)", "train.py:33")


# ---- from Inductor's records -------------------------------------------------------------------------------------------
def code(**changes: Any) -> Any:
    """What Inductor knows of a graph that it has compiled."""
    known = {
        "partition_maps": [object()],
        "disabled_cudagraphs_reason": None,
        "cudagraph_info": SimpleNamespace(cudagraph_fail_reasons=[], placeholders=()),
        "mutated_input_idxs": (),
        "fx_kwargs": {"static_input_idxs": ()},
    }
    return SimpleNamespace(**{**known, **changes})


NOT = {"is_captured": False}
UNSAFE = [("unsafe op", "train.py:8"), ("cpu copy", "")]


@pytest.mark.parametrize(
    ("known", "is_on", "between", "expected"),
    [
        ({}, True, (), {"is_captured": True, "num_pieces": 1}),
        ({"partition_maps": None}, True, (), {"is_captured": True, "num_pieces": 1}),
        (
            {"partition_maps": [1, 2, 3]},
            True,
            UNSAFE,
            {"is_captured": True, "num_pieces": 3, "reason": "unsafe op", "where": "train.py:8"},
        ),
        (
            {"partition_maps": [1, 2]},
            True,
            (),
            {
                "is_captured": True,
                "num_pieces": 2,
                "reason": "operations in between cannot be (compiled code from a cache does not say which)",
            },
        ),
        (
            {"disabled_cudagraphs_reason": f"skipping cudagraphs due to cpu device (x). Found from : \n {TRACE}"},
            False,
            (),
            {**NOT, "reason": "cpu device (x)", "where": "train.py:33"},
        ),
        (
            {"cudagraph_info": SimpleNamespace(cudagraph_fail_reasons=["mutated inputs", "non-Tensor inputs"])},
            False,
            (),
            {**NOT, "reason": "mutated inputs, non-Tensor inputs"},
        ),
        ({"partition_maps": []}, False, UNSAFE, {**NOT, "reason": "unsafe op", "where": "train.py:8"}),
        ({"partition_maps": []}, False, (), {**NOT, "reason": "nothing in it computes on the device"}),
    ],
)
def test_what_became_of_a_forward(known: dict[str, Any], is_on: bool, between: Any, expected: dict[str, Any]):
    assert lower._replay(code(**known), "forward", is_on, between) == Replay(phase="forward", **expected)


def test_a_backward_needs_its_forward():
    replay = lower._replay(code(cudagraph_info=None), "backward", False, ())
    assert str(replay) == "the backward is not captured: its forward is not captured"


def test_required():
    observer = lower._Observer(Coverage(), is_required=True)
    observer._finished(code(current_callable=len), {"is_backward": False, "cudagraphs": True})
    message = f"skipping cudagraphs due to cpu device (x). Found from : \n {TRACE}"
    with pytest.raises(errors.CudaGraphsUnavailable) as error:
        observer._finished(code(disabled_cudagraphs_reason=message), {"is_backward": True, "cudagraphs": False})
    assert str(error.value) == (
        "ERROR[CudaGraphsUnavailable]: cuda_graphs='require', and the backward of a graph is not captured: cpu device (x), at "
        "train.py:33. Change what it cannot hold, or use cuda_graphs='auto'"
    )


@pytest.mark.parametrize("is_required", [False, True])
def test_what_is_skipped_as_it_runs(is_required: bool):
    def run(inputs: list[int]) -> list[int]:
        counters["inductor"]["cudagraph_skips"] += inputs[0]
        return inputs

    coverage = Coverage()
    observer = lower._Observer(coverage, is_required)
    written = PlaceholderInfo(name="x", stack_trace=None, users=[], mutating_use_stack_trace=TRACE)
    info = SimpleNamespace(cudagraph_fail_reasons=[], placeholders=(written, written))
    compiled = code(
        cudagraph_info=info, mutated_input_idxs=(0, 1), fx_kwargs={"static_input_idxs": (0,)}, current_callable=run
    )
    observer._finished(compiled, {"is_backward": False, "cudagraphs": True})
    assert compiled.current_callable([0]) == [0]
    assert coverage.replays(trains=False) == (Replay(phase="forward", is_captured=True, num_pieces=1),)
    if is_required:
        with pytest.raises(errors.CudaGraphsUnavailable, match="mutated inputs"):
            compiled.current_callable([1])
    else:
        assert compiled.current_callable([1]) == [1]
    (replay,) = coverage.replays(trains=False)
    assert str(replay) == (
        "the forward is not captured (train.py:33): mutated inputs (1 instances), found while it ran"
    )


def test_in_pieces():
    replay = Replay(phase="forward", is_captured=True, num_pieces=2, reason="unsafe op", where="train.py:8")
    assert str(replay) == "the forward is captured in 2 pieces; the rest is not (train.py:8): unsafe op"


# ---- in the report -----------------------------------------------------------------------------------------------------
def test_without_a_gpu():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    run = torch.compile(lambda x: model(x), backend=amp)
    run(x).sum().backward()
    with torch.no_grad():
        run(x)
    report = amp.report()
    reason = "no CUDA graphs on cpu"
    forward, backward = (Replay(phase=phase, is_captured=False, reason=reason) for phase in get_args(Phase))
    assert report.cuda_graphs == ((0, "bf16", forward), (0, "bf16", backward), (1, "bf16", forward))
    assert "graphs 0-1: CUDA graph: off (no CUDA graphs on cpu)" in str(report)


def on_paper(**_: Any) -> CudaGraphs:
    """The decision that a GPU would get."""
    return CudaGraphs(on=True, reason="test")


@pytest.mark.slow
@pytest.mark.parametrize("num_starts", [1, 2])
def test_inductor_says_no(monkeypatch: pytest.MonkeyPatch, num_starts: int):
    """Inductor itself, asked for CUDA graphs of a graph on the CPU; the second time compiled code comes from its caches."""
    monkeypatch.setattr("fxamp.run.cuda_graphs.decide", lambda *_, **__: on_paper())
    for _ in range(num_starts):
        torch._dynamo.reset()
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        amp = fxamp.Amp(precision="bf16")
        out: Tensor = torch.compile(lambda x, model=model: model(x), backend=amp)(x)
        assert [str(r) for _, _, r in amp.report().cuda_graphs][1] in (
            "the backward is not captured: it was not compiled yet",
            "the backward is not captured: its forward is not captured",  # from the cache, with its forward
        )
        out.sum().backward()
        forward, backward = (replay for _, _, replay in amp.report().cuda_graphs)
        assert not forward.is_captured
        assert forward.reason.startswith(("multiple devices", "cpu device", "nothing in it computes"))
        assert str(backward) == "the backward is not captured: its forward is not captured"
        assert "- graph 0 (bf16): the forward is not captured" in str(amp.report())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_captured(mode: str | None):
    model, x = nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    amp = fxamp.Amp(precision="bf16", mode=mode)
    run = torch.compile(lambda x: model(x).relu(), backend=amp)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        run(x).sum().backward()
        model.zero_grad()  # gradients lie in the graph's memory, and the next step overwrites them
        with torch.no_grad():
            run(x)
    forward, backward, inference = (replay for _, _, replay in amp.report().cuda_graphs)
    assert inference == Replay(phase="forward", is_captured=True, num_pieces=1)
    assert forward.is_captured == backward.is_captured == (mode is not None)
    if mode is None:
        assert forward.reason.startswith("auto: in a plain training loop")


class ThroughTheHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        on_host = self.linear(x).sum(0).cpu()
        return self.linear(x) + (on_host * 2).cuda()


@pytest.mark.gpu
def test_what_the_host_computes_is_named_with_its_line():
    model, x = ThroughTheHost().cuda(), torch.randn(8, 64, device="cuda")
    amp = fxamp.Amp(precision="bf16")
    with torch.no_grad():
        torch.compile(model, backend=amp)(x)
    ((_, _, replay),) = amp.report().cuda_graphs
    assert not replay.is_whole
    assert replay.reason
    assert replay.where.startswith("test_coverage.py:")
    assert str(replay) in " ".join(str(amp.report()).split())


class Counting(nn.Module):
    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(1)
        return x * seen


@pytest.mark.gpu
@pytest.mark.parametrize("wish", [True, "require"])
def test_an_input_that_is_written_is_found_as_it_runs(wish: str | bool):
    amp = fxamp.Amp(precision="bf16", cuda_graphs=wish)
    run = torch.compile(Counting(), backend=amp)
    x = torch.randn(8, device="cuda")

    def call_thrice() -> None:
        with torch.no_grad():
            for _ in range(3):
                run(x, torch.zeros(8, device="cuda"))

    if wish == "require":
        with pytest.raises(errors.CudaGraphsUnavailable, match=r"mutated inputs.*test_coverage\.py"):
            call_thrice()
        return
    call_thrice()
    ((_, _, replay),) = amp.report().cuda_graphs
    assert not replay.is_captured
    assert replay.reason.startswith("mutated inputs")
    assert replay.where.startswith("test_coverage.py:")
