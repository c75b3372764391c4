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
