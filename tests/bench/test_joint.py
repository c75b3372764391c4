from __future__ import annotations

import torch
from torch import nn

from bench import joint
from bench.joint import Traffic

X = torch.randn(4, 8)


def train(compiled) -> None:
    compiled(X).float().sum().backward()


def test_what_is_counted():
    """Down: x, weight, bias. Up: the gradients of weight and bias. All of a layer that is saved is the low input."""
    num_bytes = (X.numel() + 2 * (5 * 8 + 5)) * (4 + 2)
    low_input_bytes = X.numel() * 2
    want = Traffic(num_graphs=1, num_casts=5, cast_bytes=num_bytes, saved_bytes=low_input_bytes)
    assert joint.of_autocast(nn.Linear(8, 5), train) == want
    assert joint.of_fxamp(nn.Linear(8, 5), train, precision="bf16", output_dtype="low") == want


def test_a_widened_output_is_cast_both_ways():
    low = joint.of_fxamp(nn.Linear(8, 5), train, precision="bf16", output_dtype="low")
    traced = joint.of_fxamp(nn.Linear(8, 5), train, precision="bf16")
    assert traced.num_casts == low.num_casts + 2
    assert traced.cast_bytes == low.cast_bytes + 2 * 4 * 5 * (4 + 2)


def test_inference():
    def infer(compiled) -> None:
        with torch.no_grad():
            compiled(X)

    want = Traffic(num_graphs=1, num_casts=3, cast_bytes=(X.numel() + 5 * 8 + 5) * (4 + 2))
    assert joint.of_autocast(nn.Linear(8, 5), infer) == want
    assert joint.of_fxamp(nn.Linear(8, 5), infer, precision="bf16", output_dtype="low") == want


def test_graphs_add_up_and_common_subexpressions_count_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x) + self.layer(x)
            torch._dynamo.graph_break()
            return self.layer(y)

    got = joint.of_autocast(Twice(), train)
    assert got.num_graphs == 2
    # x, weight and bias once in the first graph, though autocast casts each twice; y is low when it comes to the second
    assert got.num_casts == 3 + 2 + 2 * 2


def test_sizes_that_are_symbols_count_as_in_the_example():
    def dynamic(compiled) -> None:
        torch._dynamo.mark_dynamic(X, 0)
        compiled(X).float().sum().backward()

    for found in (joint.of_autocast(nn.Linear(8, 5), dynamic), joint.of_fxamp(nn.Linear(8, 5), dynamic, precision="bf16")):
        assert type(found.cast_bytes) is type(found.saved_bytes) is int
    assert joint.of_autocast(nn.Linear(8, 5), dynamic).cast_bytes == joint.of_autocast(nn.Linear(8, 5), train).cast_bytes
