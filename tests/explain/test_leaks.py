"""Promotion leaks: found, with the user's line; and those that lose nothing closed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp.explain import leaks
from fxamp.explain.leaks import Leak
from tests.programs import Fn, decisions, planned

X = torch.randn(4, 4)


def found(fn, *inputs: torch.Tensor, **options: Any) -> tuple[Leak, ...]:
    return leaks.find(*planned(fn, *inputs, **options))


def model(fn) -> Fn:
    weight = nn.Parameter(torch.rand(4))
    return Fn(fn, lin=nn.Linear(4, 4), table=torch.rand(4, 4), weight=weight, temperature=torch.tensor(2.0))


@pytest.mark.parametrize(
    ("fn", "op", "wide", "origin"),
    [
        (lambda m, x: torch.where(x > 0, m.lin(x), x), "where", "inputs_0 (fp32 input)", "input"),
        (lambda m, x: m.lin(x) + m.table, "add", "table (fp32 buffer)", "buffer"),
        (lambda m, x: m.lin(x) * m.weight, "mul", "weight (fp32 parameter)", "parameter"),
        (lambda m, x: m.lin(x) + torch.full((4,), 0.1), "add", "full (fp32 constant)", "constant"),
        (lambda m, x: m.lin(x) + torch.arange(4).float(), "add", "float_1 (fp32 constant)", "constant"),
        (lambda m, x: m.lin(x) + x.softmax(-1), "add", "softmax (fp32, computed by softmax at test_leaks.py:#)", "computed"),
        (lambda m, x: torch.cat([m.lin(x), x]), "cat", "inputs_0 (fp32 input)", "input"),
        (lambda m, x: torch.where(x > 0, m.lin(x), m.temperature), "where", "temperature (fp32 buffer)", "buffer"),
        (lambda m, x: torch.where(x > 0, m.lin(x), torch.tensor(0.1)), "where", "tensor (fp32 constant)", "constant"),
        (lambda m, x: m.lin(x) + (x > 0).float() * 0.1, "add", "mul (fp32, computed by mul at test_leaks.py:#)", "computed"),
    ],
)  # fmt: skip
def test_a_leak_is_found(fn, op: str, wide: str, origin: str):
    (leak,) = found(model(fn), X)
    assert (leak.op, re.sub(r":\d+", ":#", leak.wide), leak.origin) == (op, wide, origin)
    assert leak.low == "linear (bf16)"
    assert leak.where.startswith("test_leaks.py:")
    assert op in leak.code or "+" in leak.code or "*" in leak.code
    assert f"'op:{op}=low'" in leak.advice
    # What the advice says closes it.
    assert not found(model(fn), X, policy={f"op:{op}": "low"})


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda m, x: m.lin(x) * (x > 0).float(), "mul"),
        (lambda m, x: m.lin(x) * (1.0 - (x > 0).to(torch.float32)), "mul"),
        (lambda m, x: torch.where(x > 0, m.lin(x), torch.zeros(4)), "where"),
        (lambda m, x: torch.where(x > 0, m.lin(x), torch.tensor(-2.0)), "where"),
        (lambda m, x: torch.cat([m.lin(x), torch.ones(2, 4)]), "cat"),
        (lambda m, x: m.lin(x) * torch.ones(4, 4).tril(), "mul"),
        (lambda m, x: torch.stack([m.lin(x), torch.eye(4)]), "stack"),
        (lambda m, x: torch.cat([m.lin(x), x[:0]]), "cat"),
        (lambda m, x: torch.cat([m.lin(x), m.table[4:] * 0.1]), "cat"),
    ],
)
def test_a_leak_that_loses_nothing_is_closed(fn, op: str):
    """Bit for bit: autocast, which leaves it open, computes the same numbers in fp32."""
    net = model(fn)
    assert found(net, X) == ()
    assert decisions(net, X)[op].computes == "bf16"
    got = torch.compile(net, backend=fxamp.Amp(precision="bf16", lower="eager"))(X)
    with torch.autocast("cpu", torch.bfloat16):
        want = net(X)
    assert torch.equal(got, want.float())
    got.sum().backward()
    got_grad, net.lin.weight.grad = net.lin.weight.grad, None
    want.sum().backward()
    want_grad = net.lin.weight.grad
    assert got_grad is not None
    assert want_grad is not None
    assert torch.equal(got_grad, want_grad)


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m.lin(x) * m.temperature,  # a 0-dim tensor decides no dtype
        lambda m, x: m.lin(x) * 2 + 1,
        lambda m, x: torch.where(x > 0, m.lin(x), 0.1),
        lambda m, x: m.lin(x).softmax(-1) + x,  # fp32 by its class, not by promotion
        lambda m, x: x + m.table,
        lambda m, x: torch.cat([m.lin(x)[:0], x]),  # nothing low is widened
    ],
)
def test_what_is_none_is_not_reported(fn):
    assert found(model(fn), X) == ()


def test_values_that_can_change_are_never_rounded():
    """A buffer of zeros and ones today is another tomorrow; so is a mask that is written."""

    def written(m, x):
        mask = torch.ones(4)
        mask[0] = 0.1
        return m.lin(x) * mask

    net = model(lambda m, x: m.lin(x) + m.table)
    net.table.fill_(1.0)
    assert [leak.origin for leak in found(net, X)] == ["buffer"]
    d = decisions(model(written), X)["mul"]
    assert d.computes == "fp32"


def test_what_follows_a_leak_is_counted():
    net = model(lambda m, x: (m.lin((m.lin(x) + m.table).relu().neg() * 2).abs() + m.table))
    first, second = found(net, X)
    assert (first.num_widened, second.num_widened) == (3, 0)  # relu, neg, mul; the product is low again


def test_the_report_shows_them():
    net = model(lambda m, x: m.lin(x) + m.table)
    amp = fxamp.Amp(precision="bf16", lower="eager")
    torch.compile(net, backend=amp)(X)
    (leak,) = amp.report().leaks
    with pytest.raises(dataclasses.FrozenInstanceError):
        leak.op = "x"  # pyright: ignore[reportAttributeAccessIssue]
    printed = str(amp.report())
    assert "promotion leaks: a low value meets a wider one" in printed
    for part in (leak.where, "linear (bf16)", "table (fp32", "'op:add=low'"):
        assert part in printed


def test_leaks_of_nested_graphs_are_found():
    from torch.utils.checkpoint import checkpoint

    net = model(lambda m, x: checkpoint(lambda y: m.lin(y) + m.table, x, use_reentrant=False))
    (leak,) = found(net, X)
    assert leak.op == "add"
