"""The tables as pictures. The only file that needs matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports]  # optional

from bench import compare
from bench.compare import Results
from bench.systems import ANCHOR

_COLOURS: Final = {"peer": "#8da0cb", "control": "#8da0cb", "ceiling": "#d9d9d9", "fxamp": "#fc8d62"}


def draw(all_results: Sequence[Results], folder: Path) -> list[Path]:
    """SVGs of each machine and protocol: bars of time relative to the anchor for each workload, the time of fxamp's passes
    against the size of the graph, and memory against the number of variants. Returns the files."""
    drawn = [draw_one(results, folder) for results in all_results for draw_one in (_bars, _passes, _variants)]
    return [path for path in drawn if path is not None]


def _bars(results: Results, folder: Path) -> Path | None:
    bars = {name: _relative(results, name) for name in results.measurements}
    bars = {name: values for name, values in bars.items() if values}
    if not bars:
        return None
    figure, axes = plt.subplots(1, len(bars), figsize=(4 * len(bars), 5), squeeze=False)
    for axis, (workload, values) in zip(axes[0], bars.items(), strict=True):
        families = [results.measurements[workload][system].family for system in values]
        axis.barh(list(values), list(values.values()), color=[_COLOURS[family] for family in families])
        axis.axvline(1, color="black", linewidth=0.5)
        axis.invert_yaxis()
        axis.set_title(workload)
        axis.set_xlabel(f"time / {ANCHOR}")
    return _save(figure, results, folder, "")


def _passes(results: Results, folder: Path) -> Path | None:
    """Lines over the number of nodes, both axes logarithmic: what grows linearly is as steep as the dotted line."""
    times = sorted(results.pass_times, key=lambda p: p.num_dynamo_nodes)
    if len(times) < 2:
        return None
    figure, axis = plt.subplots(figsize=(6, 5))
    nodes = [p.num_dynamo_nodes for p in times]
    for stage in times[-1].stage_ms:
        axis.loglog(nodes, [p.stage_ms.get(stage) for p in times], marker="o", label=stage)
    slowest_ms = max(times[-1].stage_ms.values())
    axis.loglog(nodes, [slowest_ms * n / nodes[-1] for n in nodes], ":", color="black", label="linear")
    axis.set_xlabel("nodes of Dynamo's graph")
    axis.set_ylabel("CPU time, ms")
    axis.legend()
    return _save(figure, results, folder, "-passes")


def _variants(results: Results, folder: Path) -> Path | None:
    """Lines over the number of variants."""
    if len(results.variants) < 2:
        return None
    figure, axis = plt.subplots(figsize=(6, 5))
    numbers = [v.num_variants for v in results.variants]
    for what, sizes in (
        ("host", [v.host_bytes for v in results.variants]),
        ("GPU", [v.device_bytes for v in results.variants]),
    ):
        if None not in sizes:
            axis.plot(numbers, [size / 2**20 for size in sizes if size is not None], marker="o", label=what)
    axis.set_xlabel("variants of a train step")
    axis.set_ylabel("memory, MiB")
    axis.set_ylim(bottom=0)
    axis.legend()
    return _save(figure, results, folder, "-variants")


def _save(figure: Any, results: Results, folder: Path, what: str) -> Path:
    figure.tight_layout()
    suffix = "" if results.protocol == "full" else f"-{results.protocol}"
    path = folder / f"{results.machine.slug}{suffix}{what}.svg"
    figure.savefig(path)
    plt.close(figure)
    return path


def _relative(results: Results, workload: str) -> dict[str, float]:
    """Time of each system over the anchor's, fastest first."""
    on = results.measurements[workload]
    if ANCHOR not in on:
        return {}
    ratios = {name: compare.ratio(m, on[ANCHOR]) for name, m in on.items()}
    known = {name: ratio.median for name, ratio in ratios.items() if ratio is not None}
    return dict(sorted(known.items(), key=lambda item: item[1]))
