from __future__ import annotations

from dataclasses import replace

import pytest

from bench.zoo import compile_time
from bench.zoo.compile_time import Start


def start(system: str, is_warm: bool, compile_s: float, own_s: float, misses: int = 0) -> Start:
    return Start(
        model="net", system=system, is_warm=is_warm, compile_s=compile_s, own_s=own_s, fx_hits=1, fx_misses=misses,
        autograd_hits=1, autograd_misses=0, versions={"torch": "2"},
    )  # fmt: skip


def starts(warm_misses: int = 0) -> list[Start]:
    peer = [start(compile_time.PEER, False, 10.0, 0.0), start(compile_time.PEER, True, 2.0, 0.0)]
    return [*peer, start(compile_time.OWN, False, 10.5, 0.5), start(compile_time.OWN, True, 3.0, 1.0, warm_misses)]


def test_added_is_relative_to_the_rest_of_the_same_start():
    assert compile_time.added(starts(), is_warm=False) == pytest.approx(0.05)
    assert compile_time.added(starts(), is_warm=True) == pytest.approx(0.5)


def test_a_miss_where_the_peer_hits_is_told():
    assert compile_time.hits_like_peer(starts())
    assert not compile_time.hits_like_peer(starts(warm_misses=1))


def test_where_autocast_does_not_run_a_model_the_peer_is_inductor_alone(tmp_path, monkeypatch):
    def measured(name: str, system: str, cache: str, *, is_warm: bool) -> Start:
        if system == compile_time.PEER:
            raise RuntimeError("scatter(): Expected self.dtype to be equal to src.dtype")
        return start(system, is_warm, 4.0, 1.0 if system == compile_time.OWN else 0.0)

    monkeypatch.setattr(compile_time, "_start", measured)
    path = tmp_path / "compile_time.jsonl"
    told: list[str] = []
    compile_time.measure_all(["net"], 2, path, told.append)
    assert [s.system for s in compile_time.read(path)] == [*[compile_time.STOCK] * 2, *[compile_time.OWN] * 2] * 2
    assert told == ["| net (peer: fp32) | 4.00 | 4.00 | 1.00 | 33.3% | 4.00 | 4.00 | 1.00 | 33.3% | yes |"]


def test_without_a_peer_what_fxamp_adds_is_told_still(tmp_path, monkeypatch):
    path = tmp_path / "compile_time.jsonl"
    compile_time.write(path, [s for s in starts() if s.system == compile_time.OWN])
    assert compile_time.hits_like_peer(compile_time.read(path))
    text = compile_time.markdown(compile_time.read(path))
    assert "| net | - | 10.50 | 0.50 | 5.0% | - | 3.00 | 1.00 | 50.0% | yes |" in text
    monkeypatch.setattr(compile_time, "_start", lambda name, system, cache, *, is_warm: start(system, is_warm, 10.0, 0.0))
    told: list[str] = []
    compile_time.measure_all(["other", "net"], 1, path, told.append, [compile_time.PEER])
    assert told == ["other: autocast-bf16", "net: autocast-bf16"]
    assert "other" not in compile_time.markdown(compile_time.read(path))
    assert "| net | 10.00 | 10.50 | 0.50 |" in compile_time.markdown(compile_time.read(path))
    assert not compile_time.hits_like_peer([s for s in starts(warm_misses=1) if s.system == compile_time.OWN])


def test_rows_of_other_models_are_kept(tmp_path):
    path = tmp_path / "compile_time.jsonl"
    compile_time.write(path, starts())
    compile_time.write(path, [])
    assert compile_time.read(path) == starts()
    assert "| net | 10.00 | 10.50 | 0.50 | 5.0% |" in compile_time.markdown(starts())


def test_what_is_beyond_a_limit_is_named():
    cold, warm, caches = compile_time.summary([*starts(warm_misses=1), *(replace(s, model="slow") for s in starts())])
    assert cold == (
        "- A cold start of 2 architectures: fxamp adds 5.0% (median), 5.0% at most (net); beyond 5%: none. "
        "Whole starts take 1.05 times the peer's (geometric mean of 2)."
    )
    assert "50.0% at most (net); beyond 20%: net (50.0%), slow (50.0%). Whole starts take 1.50 times" in warm
    assert caches.endswith("which the peer's hits: net.")


def test_clock_counts_the_innermost(monkeypatch):
    """Inductor inside fxamp inside Inductor: only fxamp's own time counts, however often they call each other."""
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(compile_time, "cpu_s", lambda: next(now))
    clock = compile_time._Clock()
    with clock.inside(True), clock.inside(False), clock.inside(True):  # fxamp from 0, Inductor from 1, fxamp from 3 to 6
        pass
    assert clock.own_s == (1 - 0) + (6 - 3) + (15 - 10)
