"""Pools of the allocator, as its snapshot lists their segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import memory
from bench.memory import Held, Pool

MIB = 2**20


def segment(pool: tuple[int, int], total: int, allocated: int) -> dict[str, Any]:
    return {"segment_pool_id": pool, "total_size": total * MIB, "allocated_size": allocated * MIB}


def test_segments_are_told_apart_by_pool():
    segments = [segment((0, 3), 1600, 0), segment((0, 0), 20, 5), segment((0, 3), 1600, 800), segment((0, 0), 64, 64)]
    ordinary, graphs = memory.pools_of(segments)
    assert ordinary == Pool(name="ordinary", reserved_mib=84, allocated_mib=69, large_mib=((64, 1),))
    assert graphs == Pool(name="CUDA graphs 1", reserved_mib=3200, allocated_mib=800, large_mib=((1600, 2),))
    shown = memory.table({"fxamp-bf16": Held(peak_reserved_mib=3284, pools=(ordinary, graphs))})
    assert shown.row_count == 2
    assert list(shown.columns[-1].cells) == ["64", "2 x 1600"]


@pytest.mark.gpu
def test_what_the_allocator_reserves_is_in_some_pool():
    x = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    pools = memory.pools_of(torch.cuda.memory_snapshot())
    assert sum(pool.reserved_mib for pool in pools) * MIB == pytest.approx(torch.cuda.memory_reserved())
    assert any(size >= 100 for pool in pools for size, _ in pool.large_mib)
    del x


def test_holes_name_what_keeps_them():
    def block(size: int, state: str, *frames: tuple[str, int, str]) -> dict[str, Any]:
        made = [{"filename": f"/here/{file}", "line": line, "name": name} for file, line, name in frames]
        return {"size": size * MIB, "state": state, "frames": made}

    kept = {
        **segment((0, 0), 148, 3),
        "blocks": [
            block(1, "active_allocated", ("adamw.py", 7, "init"), ("train.py", 9, "step")),
            block(145, "inactive"),
            block(2, "active_allocated", ("leaves.py", 5, "of")),
        ],
    }
    free = {**segment((0, 0), 40, 0), "blocks": [block(40, "inactive")]}
    full = {**segment((0, 0), 40, 38), "blocks": []}
    graphs = {**segment((0, 1), 90, 0), "blocks": []}
    found = memory.holes_of([free, graphs, full, kept])
    assert [(hole.segment_mib, hole.empty_mib) for hole in found] == [(148, 145), (40, 40)]
    assert found[0].holders == (("leaves.py:5 of", 2), ("adamw.py:7 init < train.py:9 step", 1))
    shown = memory.table_of_holes({"fxamp-bf16": Held(peak_reserved_mib=188, pools=(), holes=tuple(found))})
    assert list(shown.columns[-1].cells) == ["leaves.py:5 of", "adamw.py:7 init < train.py:9 step", "nothing"]


@pytest.mark.gpu
def test_a_tensor_in_a_large_segment_is_named():
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
    try:
        large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del large  # cached: the next one lies in it
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        holders = [code for hole in memory.holes_of(torch.cuda.memory_snapshot()) for code, _ in hole.holders]
        assert any("test_a_tensor_in_a_large_segment_is_named" in code for code in holders)
        del kept
    finally:
        torch.cuda.memory._record_memory_history(None)
