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
    assert graphs == Pool(name="private 1", reserved_mib=3200, allocated_mib=800, large_mib=((1600, 2),))
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
    def frames(*made: tuple[str, int, str]) -> list[dict[str, Any]]:
        return [{"filename": f"/here/{file}", "line": line, "name": name} for file, line, name in made]

    def block(size: int, state: str, *made: tuple[str, int, str]) -> dict[str, Any]:
        return {"size": size * MIB, "state": state, "frames": frames(*made)}

    def event(action: str, address: int, *made: tuple[str, int, str]) -> dict[str, Any]:
        return {"action": action, "addr": address * MIB, "size": 40 * MIB, "frames": frames(*made)}

    kept = {
        **segment((0, 0), 148, 3),
        "address": 1000 * MIB,
        "blocks": [
            block(1, "active_allocated", ("adamw.py", 7, "init"), ("train.py", 9, "step")),
            block(145, "inactive"),
            block(2, "active_allocated", ("leaves.py", 5, "of")),
        ],
    }
    free = {**segment((0, 0), 40, 0), "address": 2000 * MIB, "blocks": [block(40, "inactive")]}
    full = {**segment((0, 0), 40, 38), "address": 3000 * MIB, "blocks": []}
    graphs = {**segment((0, 1), 90, 2), "address": 4000 * MIB, "blocks": []}
    own = {**segment((0, 2), 90, 70), "address": 5000 * MIB, "blocks": []}
    events = [
        event("alloc", 2000, ("early.py", 1, "f")),
        event("free_completed", 2000),
        event("alloc", 2000, ("late.py", 2, "g")),
        event("free_completed", 2000),
        event("alloc", 3000, ("other.py", 3, "h")),
    ]
    found = memory.holes_of([free, graphs, own, full, kept, free], events)
    assert [(hole.segment_mib, hole.empty_mib) for hole in found] == [(148, 145), (40, 40), (40, 40), (90, 20)]
    found = found[:3]
    assert found[0].holders == (("leaves.py:5 of", 2), ("adamw.py:7 init < train.py:9 step", 1))
    assert [hole.last for hole in found] == ["unknown", "40 MiB, late.py:2 g", "40 MiB, late.py:2 g"]
    held = Held(peak_reserved_mib=188, pools=(), holders=memory.holders_in([kept, free]), holes=tuple(found))
    assert list(memory.table_of_holders({"fxamp-bf16": held}).columns[1].cells) == ["2.0", "1.0"]
    shown = memory.table_of_holes({"fxamp-bf16": held})
    assert list(shown.columns[1].cells) == ["1 x 148", "2 x 40"]
    assert list(shown.columns[3].cells) == ["2.00 leaves.py:5 of\n1.00 adamw.py:7 init < train.py:9 step", "nothing"]


@pytest.mark.gpu
def test_a_tensor_in_a_large_segment_is_named():
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    try:
        large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del large  # cached: the next one lies in it
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        told: Any = torch.cuda.memory._snapshot()
        holes = memory.holes_of(torch.cuda.memory_snapshot(), told["device_traces"][0])
        holders = {code: hole for hole in holes for code, _ in hole.holders}
        (hole,) = (hole for code, hole in holders.items() if "test_a_tensor_in_a_large_segment_is_named" in code)
        assert hole.last.startswith("64 MiB, ")
        assert "test_a_tensor_in_a_large_segment_is_named" in hole.last
        del kept
    finally:
        torch.cuda.memory._record_memory_history(None)
