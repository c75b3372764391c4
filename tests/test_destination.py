"""output_dtype="low" is for what leaves the compiled program: where Dynamo cuts it, values keep their traced dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp import destination
from tests.programs import Fn, graph_of, relative_error

BF16, F32 = torch.bfloat16, torch.float32


class Cut(nn.Module):
    """Behind each cut stands code that was written for fp32: PyTorch refuses a product of a bf16 value and an fp32 weight."""

    def __init__(self, num_cuts: int) -> None:
        super().__init__()
        self.num_cuts, self.a, self.b = num_cuts, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        y = self.b(y)
        if self.num_cuts > 1:
            torch._dynamo.graph_break()
            y = self.a(y)
        return y


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Cut(1), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.inner(x))


class HandsOn(nn.Module):
    """Through a decorator, as in transformers, and a function that returns what another gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Cut(1)

    @staticmethod
    def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(self: Any, *args: Any, return_tuple: bool = False) -> Any:
            output = fn(self, *args)
            if return_tuple and not isinstance(output, tuple):
                output = output.to_tuple()
            return output

        return wrapper

    @decorated
    def forward(self, x):
        return self.inner(x)


def low(model: nn.Module) -> tuple[torch.Tensor, fxamp.Amp]:
    amp = fxamp.Amp(precision="bf16", output_dtype="low", lower="aot_eager")
    x = torch.randn(4, 8)
    y = torch.compile(model, backend=amp)(x)
    assert relative_error(y, model(x)) < 3e-2
    return y, amp


@pytest.mark.parametrize("num_graphs", [2, 3])
def test_the_last_of_several_graphs_hands_out_low_values(num_graphs: int):
    y, amp = low(Cut(num_graphs - 1))
    assert y.dtype == BF16
    outputs = [g.variants["bf16"].plan.outputs for g in amp.graphs]
    assert outputs == [(F32,)] * (num_graphs - 1) + [(None,)]
    notes = [" ".join(g.variants["bf16"].notes) for g in amp.graphs]
    assert ["a graph break follows" in note for note in notes] == [True] * (num_graphs - 1) + [False]


def test_what_a_function_hands_to_its_caller_inside_the_program_is_as_traced():
    y, amp = low(Around())
    assert y.dtype == BF16
    first, second, last = [g.variants["bf16"] for g in amp.graphs]
    assert (first.plan.outputs, second.plan.outputs, last.plan.outputs) == ((F32,), (F32,), (None,))
    assert "a function returns them to one with a graph break" in " ".join(second.notes)


def test_what_functions_only_hand_on_leaves_the_program():
    y, amp = low(HandsOn())
    assert y.dtype == BF16
    assert [g.variants["bf16"].plan.outputs for g in amp.graphs] == [(F32,), (None,)]


def test_a_module_compiled_by_its_own_method_is_a_program():
    amp = fxamp.Amp(precision="bf16", output_dtype="low", lower="aot_eager")
    model = Fn(lambda m, x: m.a(x).relu(), a=nn.Linear(8, 8))
    model.compile(backend=amp)
    assert model(torch.randn(4, 8)).dtype == BF16


def test_a_graph_that_was_handed_over_by_hand():
    gm, _ = graph_of(lambda x: x * 2, torch.ones(2))
    assert destination.within_program(gm) is None
    found: list[str | None] = []

    def splitting(gm, inputs):
        part = torch.fx.GraphModule(gm, gm.graph)  # as DDPOptimizer does
        found.append(destination.within_program(part))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x * 3, backend=splitting)(torch.ones(2))
    assert found == ["the graph was split into parts"]
