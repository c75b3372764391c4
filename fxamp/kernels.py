"""Kernels of our own, for CUDA: one launch updates all parameters of a group. Imported only where there is a device for them.

A kernel reads a table, int64 [number of blocks, COLUMNS], of addresses: what is updated together need not lie together.
"""
# ruff: noqa: ANN001, ANN201, ANN202  (arguments are Triton's)
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportPrivateUsage=false

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

BLOCK: Final = 4096
"""Numbers that one program of a kernel updates."""

COLUMNS: Final = 8
"""Of the table: addresses of the parameter, the gradient, two states, the low copy, and the count of steps; the length of the
block; one left free."""

NUM_WARPS: Final = 8


@triton.jit
def _adam_block(
    row, n, rate, factor, correction1, correction2, beta1, beta2, rest1, rest2, eps, weight_decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, DECOUPLED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    mask = at < n if MASKED else None
    p_at = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + at
    g_at = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRAD)), 16) + at
    m_at = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + at
    v_at = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16) + at
    p, g = tl.load(p_at, mask), tl.load(g_at, mask).to(tl.float32) * factor
    m, v = tl.load(m_at, mask), tl.load(v_at, mask)
    if DECOUPLED:
        p -= rate * weight_decay * p
    else:
        g += weight_decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= (rate / correction1) * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    tl.store(p_at, p, mask)
    tl.store(m_at, m, mask)
    tl.store(v_at, v, mask)
    if LOW is not None:
        low_at = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(LOW)), 16) + at
        tl.store(low_at, p.to(LOW), mask)


@triton.jit
def adam(
    table, rate_at, factor_at, overflowed_at, beta1, beta2, rest1, rest2, log_beta1, log_beta2, eps, weight_decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adam, or AdamW if DECOUPLED (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), with bias corrections from the
    count of steps, this one included. Does nothing where `overflowed` is not 0. The gradient is multiplied by `factor`;
    `rest1` is 1 - beta1, which would be far off as a difference of fp32 numbers."""
    if tl.load(overflowed_at) == 0.0:
        row = table + tl.program_id(0).to(tl.int64) * COLUMNS
        n, rate, factor = tl.load(row + 6), tl.load(rate_at), tl.load(factor_at)
        step = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32))).to(tl.float64)
        correction1 = (1 - tl.exp(step * log_beta1)).to(tl.float32)  # 1 - beta1 ** step, which would cancel in fp32
        correction2 = (1 - tl.exp(step * log_beta2)).to(tl.float32)
        if n == BLOCK:
            _adam_block(
                row, n, rate, factor, correction1, correction2, beta1, beta2, rest1, rest2, eps, weight_decay,
                GRAD, LOW, DECOUPLED, False, BLOCK,
            )  # fmt: skip
        else:
            _adam_block(
                row, n, rate, factor, correction1, correction2, beta1, beta2, rest1, rest2, eps, weight_decay,
                GRAD, LOW, DECOUPLED, True, BLOCK,
            )  # fmt: skip


@triton.jit
def _sgd_block(
    row, n, rate, factor, momentum, dampening, weight_decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    mask = at < n if MASKED else None
    p_at = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + at
    g_at = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRAD)), 16) + at
    p, g = tl.load(p_at, mask), tl.load(g_at, mask).to(tl.float32) * factor
    g += weight_decay * p
    if MOMENTUM:
        m_at = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + at
        m = momentum * tl.load(m_at, mask) + (1 - dampening) * g
        tl.store(m_at, m, mask)
        g = g + momentum * m if NESTEROV else m
    p -= rate * g
    tl.store(p_at, p, mask)
    if LOW is not None:
        low_at = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(LOW)), 16) + at
        tl.store(low_at, p.to(LOW), mask)


@triton.jit
def sgd(
    table, rate_at, factor_at, overflowed_at, momentum, dampening, weight_decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """SGD, with torch's momentum, whose buffers have to be there. Does nothing where `overflowed` is not 0."""
    if tl.load(overflowed_at) == 0.0:
        row = table + tl.program_id(0).to(tl.int64) * COLUMNS
        n, rate, factor = tl.load(row + 6), tl.load(rate_at), tl.load(factor_at)
        if n == BLOCK:
            _sgd_block(
                row, n, rate, factor, momentum, dampening, weight_decay, GRAD, LOW, MOMENTUM, NESTEROV, False, BLOCK
            )
        else:
            _sgd_block(
                row, n, rate, factor, momentum, dampening, weight_decay, GRAD, LOW, MOMENTUM, NESTEROV, True, BLOCK
            )
