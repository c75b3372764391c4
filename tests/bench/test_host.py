"""What the host does in a step."""

from __future__ import annotations

import pytest
import torch

from bench import host
from bench.host import Function, Host


def test_functions_stand_under_their_system():
    def of(*us: float) -> Host:
        functions = tuple(Function(name=f"f{i}", us=x, num_calls=2) for i, x in enumerate(us))
        return Host(host_us=100, step_us=300, functions=functions)

    shown = host.table({"a": of(9.0, 8.0, 7.0), "b": of(5.0), "c": of()}, num_rows=2)
    assert list(shown.columns[0].cells) == ["a", "", "b", "c"]
    assert list(shown.columns[1].cells) == ["100", "", "100", "100"]
    assert list(shown.columns[4].cells) == ["f0 (2)", "f1 (2)", "f0 (2)", ""]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the host does not compute")
def test_the_host_computes_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "NUM_GROUPS", 5)
    monkeypatch.setattr(host, "NUM_TOGETHER", 60)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads on shared cores wait for each other: steps took fifteen times as long
    try:
        found = host.measured("mlp-small", "fp32-eager")
    finally:
        torch.set_num_threads(num_threads)
    assert 0.2 < found.host_us / found.step_us < 5
    assert found.functions[0].us >= found.functions[1].us > 0
    linear = next(f for f in found.functions if f.name.startswith("<built-in") and "linear" in f.name)
    assert linear.num_calls == 3


@pytest.mark.gpu
def test_the_host_is_not_slower_than_its_steps():
    found = host.measured("mlp", "fxamp-bf16-train-step")
    assert 0 < found.host_us < 1.5 * found.step_us
    assert any("is_still_right" in f.name for f in found.functions)
