"""The tables as pictures. The only file that needs matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports]  # optional

from bench import compare
from bench.compare import Results
from bench.systems import ANCHOR

_COLOURS: Final = {"peer": "#8da0cb", "control": "#8da0cb", "ceiling": "#d9d9d9", "fxamp": "#fc8d62"}


def draw(all_results: Sequence[Results], folder: Path) -> list[Path]:
    """One SVG a machine and protocol: bars of time relative to the anchor for each workload. Returns the files."""
    drawn = [_bars(results, folder) for results in all_results]
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
    figure.tight_layout()
    suffix = "" if results.protocol == "full" else f"-{results.protocol}"
    path = folder / f"{results.machine.slug}{suffix}.svg"
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
