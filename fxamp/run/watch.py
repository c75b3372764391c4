"""What compiled backwards say of each value that stats="overflow" watches, on record by updates of the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fxamp.ladder import Ladder
from fxamp.watched import Watched

ROOM_AT_FIRST: Final = 4096
"""Entries of a new record; it doubles when they are taken."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What is on record of one entry of the table of a graph. "Bad" updates are those in which a gradient overflowed."""

    graph: int
    watched: Watched
    num_made: int
    """Bad updates in which it made an inf or a NaN of finite operands, those of `num_calibrating` too."""
    num_turned: int
    """Bad updates in which it made a NaN where its operands held an inf at worst."""
    num_passed_on: int
    """Bad updates in which it only handed on what an operand held."""
    num_calibrating: int
    """Of the updates in `num_made`, those in which the scale still looked for its place."""
    num_harmless: int
    """Good updates in which it made, or turned, one too."""
    first: int
    last: int
    """The first and the last bad update, counted from 0, in which it made one or turned one; -1: none."""
    smallest_scale: float
    """The smallest loss scale among them; inf: none."""
    share_lost: float
    """The largest share, in any good update, of the numbers of its gradients that fp16 held with less precision, or not at
    all; 0 if they are not fp16, or nobody asked."""


class _Rows(NamedTuple):
    """The record, row by row, each fp32 [room]."""

    made: Tensor
    turned: Tensor
    passed_on: Tensor
    calibrating: Tensor
    harmless: Tensor
    first: Tensor
    last: Tensor
    smallest_scale: Tensor
    share_lost: Tensor


class Watch:
    """The record for all graphs on a device. Nothing here waits for it but `read`."""

    def __init__(self, device: torch.device, regions: Ladder | None = None) -> None:
        """Args: regions: those that may have a scale each; None: there is one for all."""
        self._device, self._ladder = device, regions
        self._regions = torch.zeros(0, dtype=torch.int64, device=device)
        """Of each entry, the number of its region."""
        self._arrived = torch.zeros((4, 0), device=device)
        """Per entry: how often since the last update it made, turned, and passed on; the largest share."""
        self._record = torch.zeros((len(_Rows._fields), 0), device=device)
        self._entries: list[tuple[int, Watched]] = []
        self._spans: dict[int, slice] = {}

    def arrive(self, graph: int, watched: Sequence[Watched], facts: Tensor) -> None:
        """Takes what a backward says of the entries of its graph, fp32 [3 * entries], or [4 * entries] with shares."""
        span = self._spans[graph]
        rows = facts.view(-1, len(watched))
        self._arrived[:3, span].add_(rows[:3])
        if len(rows) > 3:
            share = self._arrived[3, span]
            torch.maximum(share, rows[3], out=share)

    @torch.inference_mode(False)
    def reserve(self, graph: int, watched: Sequence[Watched]) -> None:
        """Makes room for a graph, once, before anything of it arrives: what arrives may be on its way into a CUDA graph, into
        which nothing of this can go."""
        if graph in self._spans:
            return
        span = self._spans[graph] = slice(len(self._entries), len(self._entries) + len(watched))
        self._entries += [(graph, entry) for entry in watched]
        numbers = [0 if self._ladder is None else self._ladder.number_of(entry.module) for entry in watched]
        missing = span.stop - self._arrived.shape[1]
        if missing > 0:
            size = max(missing, self._arrived.shape[1], ROOM_AT_FIRST)
            self._arrived = torch.cat([self._arrived, self._arrived.new_zeros((4, size))], dim=1)
            nothing = self._record.new_zeros((len(_Rows._fields), size))
            rows = _Rows(*nothing)
            for row, value in ((rows.first, -1.0), (rows.last, -1.0), (rows.smallest_scale, math.inf)):
                row.fill_(value)
            self._record = torch.cat([self._record, nothing], dim=1)
            self._regions = torch.cat([self._regions, self._regions.new_zeros(size)])
        self._regions[span] = torch.tensor(numbers).to(self._device)

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """See `Flags.stores`."""
        return self._arrived, self._record, self._regions

    @property
    def arrived(self) -> Tensor:
        """What backwards have written since the last update; another one once it has grown."""
        return self._arrived

    def _scale_of_each(self, scale: Tensor) -> Tensor:
        return scale if scale.ndim == 0 else scale[self._regions]

    def close(self, scale: Tensor, update: Tensor, overflowed: Tensor, calibrates: Tensor) -> None:
        """Takes what has arrived into the record, as that of an update. All are on this device, fp32 [] but `update`: the
        scale that it was computed with; its number, int64 [1]; 1 if a gradient overflowed, else 0; 1 if the scale still
        looks for its place, else 0. With several scales, `scale` is fp32 [number of regions]."""
        here = self._scale_of_each(scale)
        self._record.copy_(_closed(self._record, self._arrived, here, update, overflowed, calibrates))
        self._arrived.zero_()

    def read(self, scale: Tensor, update: Tensor, overflowed: Tensor) -> list[Sighting]:
        """What is on record, and what has arrived since the last update. Waits for the device."""
        zero = torch.zeros_like(overflowed)
        record = _closed(self._record, self._arrived, self._scale_of_each(scale), update, overflowed, zero)
        columns = record[:, : len(self._entries)].T.tolist()
        return [
            Sighting(
                graph=graph,
                watched=entry,
                num_made=int(row.made),
                num_turned=int(row.turned),
                num_passed_on=int(row.passed_on),
                num_calibrating=int(row.calibrating),
                num_harmless=int(row.harmless),
                first=int(row.first),
                last=int(row.last),
                smallest_scale=float(row.smallest_scale),
                share_lost=float(row.share_lost),
            )
            for (graph, entry), column in zip(self._entries, columns, strict=True)
            for row in (_Rows(*column),)
        ]


def _closed(
    record: Tensor, arrived: Tensor, scale: Tensor, update: Tensor, overflowed: Tensor, calibrates: Tensor
) -> Tensor:
    before = _Rows(*record)
    made, turned, passed_on, share = *(arrived[:3] > 0).float(), arrived[3]
    worst = torch.maximum(made, turned)
    bad = worst * overflowed > 0
    return torch.stack(_Rows(
        made=before.made + made * overflowed,
        turned=before.turned + turned * overflowed,
        passed_on=before.passed_on + passed_on * (1 - worst) * overflowed,
        calibrating=before.calibrating + made * overflowed * calibrates,
        harmless=before.harmless + worst * (1 - overflowed),
        first=torch.where(bad & (before.first < 0), update.float(), before.first),
        last=torch.where(bad, update.float(), before.last),
        smallest_scale=torch.where(bad, torch.minimum(before.smallest_scale, scale), before.smallest_scale),
        share_lost=torch.maximum(before.share_lost, share.clamp(max=1.0) * (1 - overflowed)),
    ))  # fmt: skip
