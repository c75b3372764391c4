"""The tables as pictures: what is drawn, which is a pure function of the rows, and the drawing, which alone needs matplotlib.

A picture says in its metadata of which values it is, so that a test without matplotlib finds one that is out of date.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import compare, report
from bench.compare import Results

_COLOURS: Final = {"peer": "#4c72b0", "control": "#4c72b0", "ceiling": "#8c8c8c", "fxamp": "#dd5f2a"}

SLOWEST: Final = 4
"""Times over that of the best peer that are greater stand at the edge."""

MIN_ROWS: Final = 3
"""Fewer workloads are a table of numbers, and no picture."""

Values = Any
"""What JSON can hold."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture to be."""

    name: str
    """Of its file."""
    values: Values
    draw: Callable[[Any, Values], None]
    """With pyplot."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.values).encode()).hexdigest()[:12]


def figures(all_results: Sequence[Results]) -> list[Figure]:
    """All that the rows have enough for, of each machine and protocol."""
    found: list[Figure] = []
    for results in all_results:
        stem = report.picture_stem(results)
        for suffix, values, draw in (
            ("", _times(results), _draw_times),
            ("-passes", _passes(results), _draw_passes),
            ("-variants", _variants(results), _draw_variants),
            ("-sweeps", _sweeps(results), _draw_sweeps),
        ):
            if values:
                found.append(Figure(name=f"{stem}{suffix}.svg", values=values, draw=draw))
    return found


def draw(all_results: Sequence[Results], folder: Path) -> list[Path]:
    """Writes the pictures as SVG, and returns the files."""
    from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports]  # optional

    drawn: list[Path] = []
    for figure in figures(all_results):
        path = folder / figure.name
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fxamp", "font.size": 9}):
            figure.draw(plt, figure.values)
            plt.tight_layout()
            plt.savefig(path, metadata={"Date": None, "Description": f"values {figure.digest}"})
            plt.close()
        drawn.append(path)
    return drawn


def are_due(folder: Path) -> bool:
    """Are there pictures, which new rows may have made old, and can they be drawn?"""
    return importlib.util.find_spec("matplotlib") is not None and any(folder.glob("*.svg"))


def digest_in(path: Path) -> str | None:
    """Of the values that a picture shows."""
    found = re.search(r"values ([0-9a-f]{12})", path.read_text(encoding="utf-8"))
    return found[1] if found else None


# ---- times -----------------------------------------------------------------------------------------------------------
def _times(results: Results) -> Values:
    """Of each workload and class of precision: the ratio of fxamp's best to the best peer, and times of all systems of that
    class over that of the best peer."""
    precisions = {title: (*ours, *theirs) for title, ours, theirs in report.CLASSES}
    rows: list[Values] = []
    for workload, title, ours, peer in report.best_of_both(results):
        dots: list[Values] = []
        on = results.measurements[workload]
        for m in ({**on, peer.system: peer}).values():  # as it was beside the best of fxamp
            over = compare.ratio(m, peer, on) if m.precision in precisions[title] else None
            if over is not None and not compare.problem(m, on):
                dots.append([m.family, round(over.median, 4), bool(compare.newer(m, results))])
        over = compare.ratio(ours, peer, on)
        label = workload if title == "16 bit" else f"{workload}, {title}"
        rows.append({"workload": label, "best": round(over.median, 4) if over else None, "dots": dots})
    return rows if len(rows) >= MIN_ROWS else None


def _draw_times(plt: Any, rows: Values) -> None:
    _, axis = plt.subplots(figsize=(8, 0.8 + 0.3 * len(rows)))
    for y, row in enumerate(rows):
        for family, over, is_old in sorted(row["dots"], key=lambda dot: (dot[0] == "fxamp", not dot[2])):
            style = _style(family, is_old=is_old)
            if over > SLOWEST:
                style["marker"] = ">"
            axis.plot(min(over, SLOWEST), y, clip_on=False, zorder=3, **style)
        if row["best"] is not None:
            axis.text(1.02, y, f"{row['best']:.2f}", transform=axis.get_yaxis_transform(), va="center", weight="bold")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xlim(min(0.6, *(over for row in rows for _, over, _ in row["dots"])) * 0.9, SLOWEST)
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3) if tick >= axis.get_xlim()[0]]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_yticks(range(len(rows)), [row["workload"] for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("time of a step over that of the best peer; on the right that of fxamp's best")
    seen = {family for row in rows for family, *_ in row["dots"]}
    for family, label in (("peer", "peers"), ("fxamp", "fxamp"), ("ceiling", "weights stored low")):
        if family in seen:
            axis.plot([], [], label=label, **_style(family, is_old=False))
    if any(is_old for row in rows for *_, is_old in row["dots"]):
        axis.plot([], [], label="fxamp, older rows", **_style("fxamp", is_old=True))
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _style(family: str, *, is_old: bool) -> dict[str, Any]:
    """A ceiling is a frame around whatever reaches it."""
    colour, is_ceiling = _COLOURS[family], family == "ceiling"
    return {
        "linestyle": "",
        "marker": "s" if is_ceiling else "o",
        "markersize": 12 if is_ceiling else 7,
        "markeredgecolor": colour,
        "markerfacecolor": "none" if is_ceiling else "white" if is_old else colour,
    }


# ---- growth ----------------------------------------------------------------------------------------------------------
def _passes(results: Results) -> Values:
    if len(results.pass_times) < 2:
        return None
    stages = {stage: [p.stage_ms.get(stage) for p in results.pass_times] for stage in results.pass_times[-1].stage_ms}
    return {"nodes": [p.num_dynamo_nodes for p in results.pass_times], "stages": stages}


def _draw_passes(plt: Any, values: Values) -> None:
    """Both axes logarithmic: what grows linearly is as steep as the dotted line."""
    _, axis = plt.subplots(figsize=(6, 4.5))
    nodes, stages = values["nodes"], values["stages"]
    for stage, times_ms in stages.items():
        is_asked_for = stage == "min_cut"
        label = f"{stage}, where asked for" if is_asked_for else stage
        axis.loglog(nodes, times_ms, marker="o", linestyle="--" if is_asked_for else "-", label=label)
    always = [sum(times[i] or 0 for stage, times in stages.items() if stage != "min_cut") for i in range(len(nodes))]
    axis.loglog(nodes, always, marker="o", color="black", label="all but min_cut")
    axis.loglog(nodes, [always[0] * n / nodes[0] for n in nodes], ":", color="black", label="linear")
    axis.set_xticks(nodes, [f"{n:,}" for n in nodes])
    axis.minorticks_off()
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_xlabel("nodes of Dynamo's graph")
    axis.set_ylabel("CPU time of fxamp's stages, ms")
    axis.legend(fontsize=8)


def _variants(results: Results) -> Values:
    if len(results.variants) < 2:
        return None
    sizes = {
        "host": [v.host_bytes for v in results.variants],
        "GPU": [v.device_bytes for v in results.variants],
    }
    known = {where: values for where, values in sizes.items() if None not in values}
    return {"variants": [v.num_variants for v in results.variants], "bytes": known} if known else None


def _draw_variants(plt: Any, values: Values) -> None:
    _, axis = plt.subplots(figsize=(5, 3.5))
    for where, sizes in values["bytes"].items():
        axis.plot(values["variants"], [size / 2**20 for size in sizes], marker="o", label=where)
    axis.set_xticks(values["variants"])
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_xlabel("variants of a train step")
    axis.set_ylabel("memory, MiB")
    axis.set_ylim(bottom=0)
    axis.legend()


def _sweeps(results: Results) -> Values:
    """By what is varied, and by system: (value, time in ms). Of GPUs: of a CPU no absolute times are published."""
    if results.machine.device_type != "cuda":
        return None
    lines: dict[str, dict[str, list[Values]]] = {}
    for over in ("layers", "batch size"):
        for value, on in compare.swept(results, over).items():
            for name, m in on.items():
                time_ms = compare.median_ms(m)
                if time_ms is not None:
                    lines.setdefault(over, {}).setdefault(name, []).append([value, round(time_ms, 4)])
    return lines if any(len(points) > 1 for by_system in lines.values() for points in by_system.values()) else None


def _draw_sweeps(plt: Any, lines: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
    _, axes = plt.subplots(1, len(lines), figsize=(4.6 * len(lines), 4), squeeze=False, sharey=True)
    for axis, (over, by_system) in zip(axes[0], lines.items(), strict=True):
        for name, points in by_system.items():
            style = "-" if name.startswith("fxamp") else "--"
            axis.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=name)
        ticks = sorted({value for points in by_system.values() for value, _ in points})
        axis.set_xscale("log")
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_xlabel(over)
        axis.set_yscale("log")
    axes[0][0].set_ylabel("time of a step, ms")
    axes[0][-1].legend(fontsize=8)
