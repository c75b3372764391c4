"""Kernels of our own, for CUDA: one launch updates all parameters of a group, two are a round of the loss scale. Imported only
where there is a device for them.

A kernel of an update reads a table, int64 [number of blocks, COLUMNS], of addresses: what is updated together need not lie
together.
"""
# ruff: noqa: ANN001, ANN201, ANN202  (arguments are Triton's)
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
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


# ---- the loss scale -------------------------------------------------------------------------------------------------------
SLOTS: Final = 1024
"""Of flags, that are looked at together."""

NUM_WARPS_OF_SLOTS: Final = 1
"""A warp loads a number before it stores another in its place; two would not wait for each other."""

# None of the arguments makes a kernel of its own: what was not loaded before cannot be while a step is recorded.
_LOOK: Final = ("store", "mine", "others", "found_at", "out", "num_slots", "has_others", "has_found")


@triton.jit(do_not_specialize=_LOOK, do_not_specialize_on_alignment=_LOOK)
def look(store, mine, others, found_at, out, num_slots, has_others, has_found, BLOCK: tl.constexpr):
    """What `Flags.look` does, with one program. store: fp32 [num_slots]; mine, others: bool [num_slots]; found_at: fp32 [];
    out: fp32 [3]."""
    bad = tl.zeros([BLOCK], tl.float32)
    anywhere, largest = bad, bad
    for start in range(0, num_slots, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_there = at < num_slots
        magnitude = tl.load(store + at, is_there, 0.0)
        is_bad = (magnitude < float("inf")) == 0
        counts = tl.load(others + at, is_there & (has_others != 0), 0) == 0
        bad = tl.where(is_bad & (tl.load(mine + at, is_there, 0) != 0), 1.0, bad)
        anywhere = tl.where(is_bad & counts, 1.0, anywhere)
        largest = tl.maximum(largest, tl.where(counts & (is_bad == 0), magnitude, 0.0))
    found = tl.load(found_at, has_found != 0, 0.0)
    tl.store(out, tl.maximum(tl.max(bad, 0), found))
    tl.store(out + 1, tl.maximum(tl.max(anywhere, 0), found))
    tl.store(out + 2, tl.max(largest, 0))


_CLEAR_AND_UPDATE: Final = (
    "store", "record", "num_slots", "overflowed_at", "largest_at", "scale_at", "tracker_at", "patience_at",
    "num_calibrating_at", "is_calibrating_at", "history", "num_updates_at", "untold_at", "num_at_floor_at", "rule", "moves",
)  # fmt: skip


@triton.jit(do_not_specialize=_CLEAR_AND_UPDATE, do_not_specialize_on_alignment=_CLEAR_AND_UPDATE)
def clear_and_update(
    store, record, num_slots, overflowed_at, largest_at, scale_at, tracker_at, patience_at, num_calibrating_at,
    is_calibrating_at, history, num_updates_at, untold_at, num_at_floor_at, rule, moves,
    NUM_REMEMBERED: tl.constexpr, SMALLEST_NORMAL: tl.constexpr, DYNAMIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `Flags.clear` and `LossScale.update` do with one scale and no regions, with one program.

    store: fp32 [num_slots]; record: fp32 [3, num_slots]; history: fp32 [3, NUM_REMEMBERED]; rule: fp64 [7], in
    the order of `loss_scale._rule_of`; the others are those of `LossScale`.
    """
    scale, overflowed, num_updates = tl.load(scale_at), tl.load(overflowed_at), tl.load(num_updates_at)
    is_bad = overflowed > 0
    for start in range(0, num_slots, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_there = at < num_slots
        magnitude = tl.load(store + at, is_there, 0.0)
        is_finite = magnitude < float("inf")
        is_lost = (magnitude > 0) & (magnitude * scale < SMALLEST_NORMAL)
        overflows, lost = record + at, record + num_slots + at
        tl.store(overflows, tl.load(overflows, is_there, 0.0) + tl.where(is_finite, 0.0, 1.0), is_there)
        tl.store(lost, tl.load(lost, is_there, 0.0) + tl.where(is_lost, 1.0, 0.0), is_there)
        tl.store(store + at, tl.zeros([BLOCK], tl.float32), is_there)
    column = history + num_updates % NUM_REMEMBERED
    tl.store(column, scale)
    tl.store(column + NUM_REMEMBERED, overflowed)
    tl.store(column + 2 * NUM_REMEMBERED, tl.load(largest_at))
    tl.store(num_updates_at, num_updates + 1)
    tl.store(untold_at, tl.maximum(tl.load(untold_at), overflowed))
    floor = tl.load(rule + 2)
    if DYNAMIC:
        is_stuck = is_bad & (scale <= floor.to(tl.float32))
        tl.store(num_at_floor_at, tl.load(num_at_floor_at) + tl.where(is_stuck, 1.0, 0.0))
    if moves != 0:
        is_calibrating = tl.load(is_calibrating_at) * overflowed
        tl.store(is_calibrating_at, is_calibrating)
        tl.store(num_calibrating_at, tl.load(num_calibrating_at) + is_calibrating)
        if DYNAMIC:
            exact = scale.to(tl.float64)
            patience = tl.load(patience_at) - overflowed
            tracker = tl.where(is_bad, 0.0, tl.load(tracker_at) + 1)
            grows = tracker == tl.load(rule + 4).to(tl.float32)
            grown = exact * tl.load(rule)
            moved = tl.where(grows & (grown < tl.load(rule + 6)), grown, exact)
            moved = tl.where(is_bad & (patience <= 0), exact * tl.load(rule + 1), moved)
            moved = tl.minimum(tl.maximum(moved, floor), tl.load(rule + 3))
            tl.store(scale_at, moved.to(tl.float32))
            tl.store(tracker_at, tl.where(grows, 0.0, tracker))
            tl.store(patience_at, tl.where(grows, tl.load(rule + 5).to(tl.float32), patience))


def launch_over_slots(kernel: Any, device: torch.device, *args: object, **constants: object) -> None:
    """Launches `look` or `clear_and_update`, on the current stream of a device."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(1,)](*args, **constants, BLOCK=SLOTS, num_warps=NUM_WARPS_OF_SLOTS)
