"""Rows -> RESULTS.md and the README's table. A pure function of the JSON lines and of the causes written by hand."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench import compare, rows
from bench.compare import Defeat, OnWorkload, Ratio, Results
from bench.rows import Distributed, Measurement, Run, ScheduledRun
from bench.systems import ANCHOR, REFERENCE, SWEPT
from bench.workloads import CROSSINGS, NUM_BATCHES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BEGIN: Final = "<!-- bench:begin -->"
END: Final = "<!-- bench:end -->"

Pictures = Mapping[str, str]
NONE_DRAWN: Final[Pictures] = {}

Causes = Mapping[str, Mapping[str, str]]
"""Workload -> system -> why it loses, written by hand."""

HOW: Final = f"""\
Every system runs in a process of its own. Systems take turns: in each repetition every one runs a block of steps, and
who begins moves on by one each time. A ratio is the median over repetitions of the quotient of two blocks of the same
repetition, with its range in brackets, so that what slows the whole machine down cancels. Weights and data are random,
never zeros, from the same seeds for all. Every run measures `{ANCHOR}` too: rows of different runs are
compared through it. torch's settings are its defaults: on a GPU, fp32 means TF32 for convolutions, not for products.

- **time**: of a step (forward, backward, optimizer; of inference: forward), by CUDA events. Absolute times are given
  for GPUs only.
- **vs peer**: against the fastest peer of the same precision whose result is one (fp8: against bf16 too). **vs same
  mode**: against the fastest of them in the same mode of torch.compile.
- **matrix, copy**: the step's operations (attention counted in full) per second, as a share of the measured rate of
  matrix products in that precision ("?": the device only emulates it); and the bytes that any step has to move
  (training: 28 a parameter, what AdamW reads and writes; inference: 2 a weight), as a share of the measured copy
  bandwidth.
- **memory**: peak of a step, allocated / reserved by the allocator of that process. What CUDA graphs hold for themselves is
  reserved and not allocated. In the table of the best: peak reserved memory over that of the fastest peer of that precision
  that replays CUDA graphs where fxamp does, and launches kernels where fxamp does; a train step replays.
- **commit**: of fxamp. † marks rows of a source older than that of another row of fxamp on the workload.
- **compile**: beyond the steps themselves. Cold: with empty caches, in a process that has compiled something else
  before; `*`: while other systems compiled too. Warm: in the same process after `torch.compiler.reset()`, with the
  caches on disk.
- **launches**: kernel launches + CUDA-graph launches of a step. **waits**: calls in which the host waits for the
  device.
- **casts**: between float formats in the joint graphs, whoever asked for them, and the bytes they would move if none
  were fused.
- **loss**: mean over the last {NUM_BATCHES} of the first steps, all systems from the same weights. Of inference:
  relative error of the output against eager fp32. ✗ marks what is no result, such as a loss that fell by less than nine
  tenths of what fp32's did after as many updates, skipped steps left out; its reason is below the table.
"""


# ---- files -----------------------------------------------------------------------------------------------------------
def load(folder: Path) -> list[Results]:
    """All results in a folder: GPUs first, full runs before quick ones; jobs of several processes last."""
    all_rows = [row for path in sorted(folder.glob("*.jsonl")) for row in rows.read(path)]
    return sorted(
        compare.results_of(all_rows),
        key=lambda r: (not r.measurements, r.machine.device_type != "cuda", r.protocol != "full", r.machine.device),
    )


def read_causes(path: Path) -> Causes:
    """None if there is no such file."""
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def with_table(readme: str, table: str) -> str:
    """A README with the table between its markers; unchanged if it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{end}{after}" if begin and end else readme


def write(folder: Path, page_path: Path, readme: Path | None, causes: Causes) -> None:
    """Writes RESULTS.md, and the table into the README if that has the markers."""
    all_results = load(folder)
    page_path.write_text(page(all_results, causes, pictures(folder, page_path)), encoding="utf-8")
    if readme is not None and readme.exists() and any(r.measurements for r in all_results):
        old = readme.read_text(encoding="utf-8")
        readme.write_text(with_table(old, readme_table(all_results, pictures(folder, readme))), encoding="utf-8")


def pictures(folder: Path, page_path: Path) -> Pictures:
    """Of `bench.plots`, as far as they are drawn: name -> link from a page."""
    return {p.name: Path(os.path.relpath(p, page_path.parent)).as_posix() for p in sorted(folder.glob("*.svg"))}


def picture_stem(results: Results) -> str:
    return results.machine.slug + ("" if results.protocol == "full" else f"-{results.protocol}")


# ---- pages -----------------------------------------------------------------------------------------------------------
def page(all_results: Sequence[Results], causes: Causes, drawn: Pictures = NONE_DRAWN) -> str:
    """RESULTS.md."""
    parts = [
        "# Results",
        "",
        "Written by `python -m bench --report` from the JSON lines in `bench/results`. Do not edit.",
        "",
    ]
    for results in all_results:
        parts += [f"## {_title(results)}", ""]
        if results.measurements:
            parts += [*_origin(results), "", *headline(results), "", *_picture(results, "", drawn)]
            parts += _defeats(results, causes)
            parts += _memory_defeats(results, causes)
        for workload in _plain_workloads(results):
            parts += _workload(results, workload)
        parts += _not_measured(results) + _scaling(results, drawn) + _scheduled(results) + _distributed(results)
    return "\n".join([*parts, "## How it is measured", "", HOW])


def _picture(results: Results, suffix: str, drawn: Pictures) -> list[str]:
    name = f"{picture_stem(results)}{suffix}.svg"
    return [f"![{_PICTURED[suffix]}, {_title(results)}]({drawn[name]})", ""] if name in drawn else []


_PICTURED: Final[Mapping[str, str]] = {
    "": "Time of a step over that of the best peer",
    "-passes": "Time of passes against the size of the graph",
    "-variants": "Memory against the number of variants",
    "-sweeps": "Time of a step against layers and batch size",
}


def readme_table(all_results: Sequence[Results], drawn: Pictures = NONE_DRAWN) -> str:
    """The headline of the first machine: a GPU, if one was measured."""
    first = all_results[0]
    versions = next(iter(_measurements(first))).run.versions
    lines = [
        f"{_title(first)}, torch {versions['torch']}; time of a step, less than 1 is faster; peak reserved memory beside the "
        "fastest peer that replays CUDA graphs if fxamp does, less than 1 is less:",
        "",
        *headline(first),
    ]
    lines += ["", *_picture(first, "", drawn), "[All systems, memory, losses, and where fxamp loses](bench/RESULTS.md)"]
    return "\n".join(lines)


def _title(results: Results) -> str:
    machine = results.machine
    name = machine.device if machine.device_type != "cpu" else f"{machine.device}, {machine.num_cpus} CPUs"
    return name + (" (quick)" if results.protocol == "quick" else "")


def _measurements(results: Results) -> list[Measurement]:
    return [m for on_workload in results.measurements.values() for m in on_workload.values()]


def _plain_workloads(results: Results) -> list[str]:
    return [name for name, on in results.measurements.items() if all(m.sweep_over is None for m in on.values())]


def _origin(results: Results) -> list[str]:
    """Versions, commits and commands of the rows that are shown."""
    runs = {m.run.id: m.run for m in _measurements(results)}.values()
    versions = dict.fromkeys(", ".join(f"{name} {v}" for name, v in sorted(r.versions.items())) for r in runs)
    commits = dict.fromkeys(
        f"{(r.commit or 'no git')[:12]}{' with changes' if r.is_dirty else ''} (source {r.fxamp_source}, {r.date})"
        for r in runs
    )
    threads = dict.fromkeys(f"CPU threads: {r.num_threads}" for r in runs if r.num_threads is not None)
    lines = [f"- versions: {'; '.join([*versions, *threads])}", f"- fxamp: {'; '.join(commits)}"]
    lines += [f"- command: `{command}`" for command in dict.fromkeys(r.command for r in runs)]
    if results.ceilings is not None:
        rates = results.ceilings.ceilings
        products = ", ".join(f"{name} {_rate(value)}" for name, value in rates.matmul_flops_per_s.items())
        copy = f"{rates.copy_bytes_per_s / 1e9:.3g} GB/s"
        lines.append(f"- ceilings measured here: products of matrices of {rates.matmul_size}: {products}; copy {copy}")
    return lines


# ---- the headline ----------------------------------------------------------------------------------------------------
CLASSES: Final[tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("16 bit", ("bf16", "fp16"), ("bf16", "fp16")),
    ("fp8", ("fp8",), ("fp8", "bf16")),
    ("fp32", ("fp32",), ("fp32",)),
    ("tf32", ("tf32",), ("tf32",)),
)
"""Title, precisions of fxamp, precisions of the peers it stands against."""


def headline(results: Results) -> list[str]:
    """The best of fxamp against the best peer, for each workload and class of precision that has both."""
    on_gpu = results.machine.device_type == "cuda"
    lines = _table_head(
        ["workload", "precision", "best peer", "best of fxamp", "fxamp / peer", *(["memory"] if on_gpu else []), "commit"]
    )
    for workload, title, fxamp, peer in best_of_both(results):
        ratio = _ratio(compare.ratio(fxamp, peer, results.measurements[workload]), bold=True)
        cells = [workload, title, _named(peer, on_gpu), _named(fxamp, on_gpu), ratio]
        cells += [_memory_ratio(fxamp, results.measurements[workload])] if on_gpu else []
        lines.append(_line([*cells, _commit(fxamp.run) + _age_mark(fxamp, results)]))
    return lines


def best_of_both(results: Results) -> Iterator[tuple[str, str, Measurement, Measurement]]:
    """(workload, class of precision, the fastest of fxamp, the fastest peer)."""
    for workload in _plain_workloads(results):
        on = results.measurements[workload]
        for title, ours, theirs in CLASSES:
            fxamp = compare.best((m for m in on.values() if m.family == "fxamp" and m.precision in ours), on)
            peer = None if fxamp is None else compare.best_peer(fxamp, on, theirs)
            if fxamp is not None and peer is not None:
                yield workload, title, fxamp, peer


def _named(m: Measurement, on_gpu: bool) -> str:
    time_ms = compare.median_ms(m)
    return f"{m.system}, {_ms(time_ms)}" if on_gpu and time_ms is not None else m.system


def _memory_ratio(m: Measurement, on: OnWorkload) -> str:
    found = compare.memory_ratio(m, compare.memory_peer(m, on))
    return "" if found is None else f"{found:.2f}"


def _commit(run: Run) -> str:
    return (run.commit or run.fxamp_source)[:7]


def _age_mark(m: Measurement, results: Results) -> str:
    return " †" if compare.newer(m, results) else ""


# ---- where fxamp loses -----------------------------------------------------------------------------------------------
def _defeats(results: Results, causes: Causes) -> list[str]:
    lines = ["### Where fxamp loses", ""]
    found = compare.defeats(results)
    if not found:
        return [
            *lines,
            f"No row of fxamp takes more than {compare.LOSS_RATIO} times the time of its best comparable peer.",
            "",
        ]
    lines += [
        f"Rows of fxamp that take more than {compare.LOSS_RATIO} times the time of the fastest comparable peer.",
        "",
    ]
    for defeat in sorted(found, key=lambda d: bool(compare.newer(d.fxamp, results))):
        m = defeat.fxamp
        unexplained = " ".join(filter(None, (_doubt(defeat), _outdated(defeat)))) or "*not explained yet*"
        cause = causes.get(m.workload, {}).get(m.system, unexplained)
        of_peer = f"{_ratio(defeat.ratio)} of {defeat.peer.system} ({_commit(m.run)}, {m.run.date})"
        lines.append(f"- **{m.workload} / {m.system}**{_age_mark(m, results)}: {of_peer}. {cause}{_kernels(defeat)}")
    return [*lines, ""]


def _outdated(defeat: Defeat) -> str:
    """What fxamp took on the workload since, where a row is of an older source."""
    since = compare.newer(defeat.fxamp, defeat.results)
    if not since:
        return ""
    on = defeat.results.measurements[defeat.fxamp.workload]
    took = dict.fromkeys(
        f"{m.system} {_ratio(compare.ratio(m, peer, on))} of {peer.system} ({_commit(m.run)}, {m.run.date})"
        for m in since
        if (peer := compare.best_peer(m, on)) is not None
    )
    return f"Not measured since, and says nothing of fxamp as it is; newer rows here: {', '.join(took)}."


def _memory_defeats(results: Results, causes: Causes) -> list[str]:
    if results.machine.device_type != "cuda":
        return []
    found = compare.memory_defeats(results)
    lines = ["### Where fxamp holds more memory", ""]
    if not found:
        return [*lines, f"No row of fxamp reserves more than {compare.LOSS_RATIO} times the memory of its peer.", ""]
    lines += [
        f"Rows of fxamp whose peak reserved memory is more than {compare.LOSS_RATIO} times that of the fastest peer of their "
        "precision that replays CUDA graphs where they do.",
        "",
    ]
    for defeat in sorted(found, key=lambda d: bool(compare.newer(d.fxamp, results))):
        m, peer = defeat.fxamp, defeat.peer
        sizes = " / ".join(f"{x.facts.memory.reserved_bytes / 2**30:.2f}" for x in (m, peer) if x.facts and x.facts.memory)
        cause = causes.get(m.workload, {}).get(memory_of(m.system), _outdated_memory(m, results) or "*not explained yet*")
        lines.append(
            f"- **{m.workload} / {m.system}**{_age_mark(m, results)}: {defeat.ratio:.2f} of {peer.system}, {sizes} GiB "
            f"({_commit(m.run)}, {m.run.date}). {cause}"
        )
    return [*lines, ""]


def _outdated_memory(m: Measurement, results: Results) -> str:
    """What fxamp holds on the workload since, where a row is of an older source."""
    on = results.measurements[m.workload]
    over = {x.system: _memory_ratio(x, on) for x in compare.newer(m, results)}
    since = ", ".join(f"{name} {ratio}" for name, ratio in over.items() if ratio)
    return f"Not measured since; newer rows here, over their peers: {since}." if since else ""


def memory_of(system: str) -> str:
    """The key of a cause that is about memory."""
    return f"memory of {system}"


def _doubt(defeat: Defeat) -> str:
    """Why a defeat may be none, or one of the mode and not of the precision."""
    of_mode = _of_mode(defeat)
    if of_mode:
        return of_mode
    noise = compare.process_noise(defeat.results.measurements[defeat.fxamp.workload])
    if noise is not None and defeat.ratio.median <= noise:
        return f"Within noise: two processes of one system differ by {noise:.2f}."
    return "Undecided: in some repetitions fxamp was the faster one." if defeat.ratio.low < 1 else ""


def _of_mode(defeat: Defeat) -> str:
    """The peer runs in another mode, and the best peer in fxamp's own mode is no faster."""
    m, on = defeat.fxamp, defeat.results.measurements[defeat.fxamp.workload]
    peer = compare.best_peer(m, _in_mode_of(m, on))
    found = None if peer is None or peer.mode == defeat.peer.mode else compare.ratio(m, peer, on)
    if found is None or peer is None or found.median > compare.LOSS_RATIO:
        return ""
    return (
        f'The peer runs in another mode, "{defeat.peer.mode}"; in its own, "{m.mode}", fxamp takes '
        f"{_ratio(found)} of {peer.system}."
    )


def _kernels(defeat: Defeat) -> str:
    """Where the time of both goes, if it was profiled."""
    ours, theirs = (m.facts.launches if m.facts else None for m in (defeat.fxamp, defeat.peer))
    if ours is None or theirs is None:
        return ""
    names = sorted(ours.kernel_ms.keys() | theirs.kernel_ms.keys(), key=lambda n: -ours.kernel_ms.get(n, 0))
    pairs = (f"{n} {_ms(ours.kernel_ms.get(n, 0))} / {_ms(theirs.kernel_ms.get(n, 0))}" for n in names)
    return f" Kernels, fxamp / peer: {', '.join(pairs)}."


# ---- one workload ----------------------------------------------------------------------------------------------------
def _workload(results: Results, workload: str) -> list[str]:
    on = results.measurements[workload]
    measured = [m for m in on.values() if m.timing is not None]
    if not measured:
        return []
    fastest_first = sorted(measured, key=lambda m: (_against(m, on), m.system))
    on_gpu = results.machine.device_type == "cuda"
    columns = {title: cell for title, (cell, needs_gpu) in _COLUMNS.items() if on_gpu or not needs_gpu}
    lines = [f"### {workload}", "", f"{measured[0].workload_about}.", "", *_table_head(["system", *columns])]
    notes: list[str] = []
    for m in fastest_first:
        problem = compare.problem(m, on)
        form = {"fxamp": "**{}**", "ceiling": "*{}*"}.get(m.family, "{}")
        name = form.format(m.system) + (" ✗" if problem else "") + _age_mark(m, results)
        lines.append(_line([name, *(cell(m, results) for cell in columns.values())]))
        notes += [f"- {m.system}: {note}" for note in (problem, *_notes(m)) if note]
    if any(m.family == "ceiling" for m in measured):
        notes.append(
            "- *in italics*: stores its weights low, which changes training and checkpoints. A bound, not a peer."
        )
    old = {m.system: m.run for m in measured if compare.newer(m, results)}
    if old:
        newest = max((m.run for m in measured if m.family == "fxamp"), key=lambda r: results.sources.index(r.fxamp_source))
        which = ", ".join(f"{name} ({_commit(run)}, {run.date})" for name, run in old.items())
        notes.append(f"- † of an older fxamp than {_commit(newest)}, {newest.date}, which other rows here are of: {which}.")
    if measured[0].workload_kind == "train" and not compare.trains_known(on):
        notes.append(f"- no row of {REFERENCE}: whether these losses fall as in fp32 is not known.")
    noise = compare.process_noise(on)
    if noise is not None:
        notes.append(
            f"- two processes of {ANCHOR} differ by a factor of {noise:.2f}: no smaller difference says anything."
        )
    groups = {m.timing.together for m in measured if m.timing is not None}
    if len(groups) > 1:
        why = "not all fitted into memory at once, or they are of several runs"
        num_without = sum(ANCHOR not in group for group in groups)
        which = f"all but {num_without}" if num_without else "each"
        notes.append(f"- measured in {len(groups)} groups, {which} beside {ANCHOR}: {why}.")
    return [*lines, "", *notes, ""] if notes else [*lines, ""]


def _against(m: Measurement, on: OnWorkload) -> float:
    """Time relative to the anchor's if there is one, for sorting."""
    timed = [x for x in on.values() if x.timing is not None]
    yardstick = next((x for x in timed if x.system == ANCHOR), timed[0])
    ratio = compare.ratio(m, on.beside(m).get(yardstick.system, yardstick), on)
    return float("inf") if ratio is None else ratio.median


def _notes(m: Measurement) -> list[str]:
    facts = m.facts
    if facts is None:
        return []
    notes = [facts.note] if facts.note else []
    if facts.fxamp is not None and facts.fxamp.precisions != (m.precision,):
        notes.append(f"ran in {', '.join(facts.fxamp.precisions) or 'no graph at all'}: {'; '.join(facts.fxamp.notes)}")
    if facts.num_skipped:
        notes.append(f"{facts.num_skipped} of the first {len(facts.losses)} steps skipped, while the loss scale was found")
    if facts.num_graph_breaks:
        notes.append(f"{facts.num_graphs} graphs, {facts.num_graph_breaks} graph breaks")
    if facts.num_cuda_graph_skips:
        notes.append(f"{facts.num_cuda_graph_skips} graphs were not recorded as CUDA graphs")
    return notes


Cell = Callable[[Measurement, Results], str]


def _time(m: Measurement, results: Results) -> str:
    assert m.timing is not None
    times = m.timing.step_ms
    return f"{_ms(statistics.median(times))} [{_ms(min(times))}..{_ms(max(times))}]"


def _vs_peer(m: Measurement, results: Results) -> str:
    return _against_best_of(results.measurements[m.workload], m)


def _vs_same_mode(m: Measurement, results: Results) -> str:
    return _against_best_of(_in_mode_of(m, results.measurements[m.workload]), m)


def _in_mode_of(m: Measurement, on: OnWorkload) -> OnWorkload:
    """What ran in the mode of `m`, and the reference, which says whether the others train."""
    return on.only(lambda p: p.mode == m.mode or (p.system == REFERENCE and p.precision != m.precision))


def _against_best_of(on: OnWorkload, m: Measurement) -> str:
    """For what is no peer itself: the ratio to the best comparable peer."""
    peer = compare.best_peer(m, on) if m.family in ("fxamp", "ceiling") else None
    return "" if peer is None else _ratio(compare.ratio(m, peer, on))


def _vs_anchor(m: Measurement, results: Results) -> str:
    on = results.measurements[m.workload]
    anchor = on.beside(m).get(ANCHOR) or on.get(ANCHOR)
    return "" if anchor is None else _ratio(compare.ratio(m, anchor, on))


def _throughput(m: Measurement, results: Results) -> str:
    time_ms = compare.median_ms(m)
    return "" if time_ms is None else f"{_si(m.num_items_per_step / (time_ms / 1e3))} {m.unit}/s"


def _shares(m: Measurement, results: Results) -> str:
    time_ms, rates = compare.median_ms(m), results.ceilings and results.ceilings.ceilings
    if time_ms is None or m.work is None or rates is None:
        return ""
    copying = m.work.num_min_bytes / rates.copy_bytes_per_s / (time_ms / 1e3)
    if m.precision not in rates.matmul_flops_per_s:
        return f"?, {copying:.0%}"
    return f"{m.work.num_flops / rates.matmul_flops_per_s[m.precision] / (time_ms / 1e3):.0%}, {copying:.0%}"


def _memory(m: Measurement, results: Results) -> str:
    memory = m.facts and m.facts.memory
    return f"{memory.allocated_bytes / 2**30:.2f} / {memory.reserved_bytes / 2**30:.2f} GiB" if memory else ""


def _compile(m: Measurement, results: Results) -> str:
    if m.facts is None or m.facts.cold_compile_s is None:
        return ""
    mark = "*" if m.facts.num_parallel_builds > 1 else ""
    warm = "" if m.warm_compile_s is None else f", {m.warm_compile_s:.1f} s"
    return f"{m.facts.cold_compile_s:.1f}{mark} s{warm}"


def _launches(m: Measurement, results: Results) -> str:
    launches = m.facts and m.facts.launches
    return f"{launches.num_kernel_launches:.0f} + {launches.num_graph_launches:.0f}" if launches else ""


def _waits(m: Measurement, results: Results) -> str:
    launches = m.facts and m.facts.launches
    return f"{launches.num_host_syncs:.3g}" if launches else ""


def _casts(m: Measurement, results: Results) -> str:
    if m.facts is None or m.facts.num_casts is None or m.facts.cast_bytes is None:
        return ""
    return f"{m.facts.num_casts}, {m.facts.cast_bytes / 1e6:.3g} MB"


def _loss(m: Measurement, results: Results) -> str:
    if m.facts is None:
        return ""
    if m.workload_kind == "infer":
        return "" if m.facts.output_error is None else f"{m.facts.output_error:.1e}"
    return f"{compare.last_loss(m.facts.losses):.4f}" if m.facts.losses else ""


_COLUMNS: Final[Mapping[str, tuple[Cell, bool]]] = {
    "time, ms": (_time, True),
    f"vs {ANCHOR}": (_vs_anchor, False),
    "vs peer": (_vs_peer, False),
    "vs same mode": (_vs_same_mode, False),
    "throughput": (_throughput, True),
    "matrix, copy": (_shares, False),
    "memory": (_memory, True),
    "compile": (_compile, False),
    "launches": (_launches, True),
    "waits": (_waits, True),
    "casts": (_casts, False),
    "loss": (_loss, False),
}
"""Title -> (cell, does it exist on GPUs only?)."""


# ---- what is missing, and what grows ---------------------------------------------------------------------------------
def _not_measured(results: Results) -> list[str]:
    """Errors one by one; what is not available by its reason."""
    everything = _measurements(results)
    errors = [f"- **{m.workload} / {m.system}**: {m.reason}" for m in everything if m.status == "error"]
    by_reason: dict[str, dict[str, list[str]]] = {}
    for m in everything:
        if m.status == "unavailable":
            by_reason.setdefault(str(m.reason), {}).setdefault(m.workload, []).append(m.system)
    absent = [
        f"- {reason}: {', '.join(dict.fromkeys(s for names in by_workload.values() for s in names))}"
        f" ({', '.join(by_workload)})"
        for reason, by_workload in by_reason.items()
    ]
    lines = ["### Errors", "", *errors, ""] if errors else []
    return lines + (["### Not measured", "", *absent, ""] if absent else [])


def _scaling(results: Results, drawn: Pictures) -> list[str]:
    lines = _passes(results) + _picture(results, "-passes", drawn) + _dispatch(results) + _swaps(results)
    lines += _variants(results) + _picture(results, "-variants", drawn)
    for over in dict.fromkeys(m.sweep_over for m in _measurements(results) if m.sweep_over is not None):
        lines += _sweep(results, over)
    lines += _picture(results, "-sweeps", drawn)
    if not lines:
        return []
    return ["### How costs grow", "", *_scaling_origin(results), *lines]


def _scaling_origin(results: Results) -> list[str]:
    """Commits and commands of what is measured of no workload."""
    rows_of = {
        "passes": results.pass_times,
        "calls": results.dispatches,
        "changes of precision": results.swaps,
        "variants": results.variants,
    }
    lines = [
        f"- {what}: {_commit(run)}{' with changes' if run.is_dirty else ''} (source {run.fxamp_source}, {run.date}), "
        f"`{run.command}`"
        for what, rows_here in rows_of.items()
        for run in {row.run.id: row.run for row in rows_here}.values()
    ]
    return [*lines, ""] if lines else []


def _passes(results: Results) -> list[str]:
    if not results.pass_times:
        return []
    stages = [stage for stage in results.pass_times[-1].stage_ms if stage != "min_cut"]
    lines = [
        "CPU time on one core of all that fxamp does to graphs that train, in ms; and of Dynamo and AOTAutograd, up to where "
        "the joint passes begin. `relaxed=min_cut` comes on top, where it is asked for.",
        "",
    ]
    lines += _table_head(["nodes (Dynamo, joint)", *stages, "all", "all, microseconds a node", "min_cut", "PyTorch, s"])
    for p in results.pass_times:
        all_ms = sum(p.stage_ms.get(stage, 0) for stage in stages)
        lines.append(
            _line(
                [
                    f"{p.num_dynamo_nodes}, {p.num_joint_nodes}",
                    *(f"{p.stage_ms.get(stage, 0):.0f}" for stage in stages),
                    f"{all_ms:.0f}",
                    f"{all_ms * 1e3 / p.num_dynamo_nodes:.0f}",
                    f"{p.stage_ms['min_cut']:.0f}" if "min_cut" in p.stage_ms else "",
                    f"{p.compile_s:.1f}",
                ]
            )
        )
    return [*lines, ""]


def _dispatch(results: Results) -> list[str]:
    about = (
        "A call of a compiled graph of one layer, in microseconds of the host, Dynamo's guards left out; differences by "
        "repetition, median and range:"
    )
    timed = [(d.what, d.inductor_us, d.fxamp_us) for d in results.dispatches]
    return _side_by_side(about, ["graph", "Inductor", "fxamp", "difference"], timed)


def _swaps(results: Results) -> list[str]:
    about = (
        "What a change of precision costs, in microseconds of a call. Half of the calls run in bf16 and half in fp32: "
        "one half after the other, and by turns."
    )
    timed = [(s.what, s.kept_us, s.swapped_us) for s in results.swaps]
    return _side_by_side(about, ["calls of", "half after half", "by turns", "a change"], timed)


def _side_by_side(
    about: str, head: Sequence[str], timed: Sequence[tuple[str, Sequence[float], Sequence[float]]]
) -> list[str]:
    """(what, times of one way, times of the other), in microseconds: the median of each, and of what the other takes more."""
    lines = [about, "", *_table_head(head)] if timed else []
    for what, one, other in timed:
        medians = (f"{statistics.median(times):.1f}" for times in (one, other))
        lines.append(_line([what, *medians, _differences(other, one)]))
    return [*lines, ""] if timed else []


def _differences(times: Sequence[float], others: Sequence[float]) -> str:
    found = [a - b for a, b in zip(times, others, strict=True)]
    return f"{statistics.median(found):+.1f} [{min(found):+.1f}..{max(found):+.1f}]"


def _variants(results: Results) -> list[str]:
    if not results.variants:
        return []
    num_parameters = results.variants[0].num_parameters
    lines = [
        f"What a train step of a network of {num_parameters / 1e6:.1f} million parameters holds, model and optimizer "
        "included, in one precision, and with a ladder of two, between which more and more parts change on their own: each "
        "combination is a variant. Resident memory of the host, what the allocator reserves of a GPU, and CPU seconds to "
        "compile all variants.",
        "",
        *_table_head(["variants", "host, MiB", "a variant more, MiB", "GPU, MiB", "compile, s"]),
    ]
    for before, now in zip((None, *results.variants), results.variants, strict=False):
        more = ""
        if before is not None and now.host_bytes is not None and before.host_bytes is not None:
            more = f"{(now.host_bytes - before.host_bytes) / 2**20 / (now.num_variants - before.num_variants):.1f}"
        sizes = ["" if b is None else f"{b / 2**20:.0f}" for b in (now.host_bytes, now.device_bytes)]
        lines.append(_line([str(now.num_variants), sizes[0], more, sizes[1], f"{now.compile_s:.1f}"]))
    return [*lines, ""]


def _sweep(results: Results, over: str) -> list[str]:
    """Time of a step relative to the anchor's, as one thing grows."""
    rows_of = compare.swept(results, over)
    timed = {m.system for on in rows_of.values() for m in on.values() if m.timing is not None}
    names = [name for name in SWEPT if name in timed]
    crossing = CROSSINGS[results.machine.device_type][0]
    lines = [f"Time of a step of `{crossing}` over that of {ANCHOR}, against {over}:", "", *_table_head([over, *names])]
    for value, on in rows_of.items():
        lines.append(_line([str(value), *(_swept(on.get(name), on, results) for name in names)]))
    return [*lines, ""]


def _swept(m: Measurement | None, on: Mapping[str, Measurement], results: Results) -> str:
    time_ms = None if m is None else compare.median_ms(m)
    if m is None or time_ms is None or ANCHOR not in on:
        return ""
    absolute = f", {_ms(time_ms)} ms" if results.machine.device_type == "cuda" else ""
    return _ratio(compare.ratio(m, on[ANCHOR])) + absolute + _age_mark(m, results)


# ---- precision that changes while training ----------------------------------------------------------------------------
AIM: Final = """\
The aim: at least half of the interruptions of `low` gone, at most 20 % of the steps high, and the held-out loss within
1 % of that of `high`, or below."""


def _scheduled(results: Results) -> list[str]:
    lines: list[str] = []
    for workload in dict.fromkeys(row.workload for row in results.scheduled):
        of = {
            name: {row.seed: row for row in results.scheduled if (row.workload, row.system) == (workload, name)}
            for name in dict.fromkeys(row.system for row in results.scheduled if row.workload == workload)
        }
        lines += [*_scheduled_origin(workload, of), ""]
        columns = ("system", "high where", "interruptions", "spared", "steps high", "held-out loss", "over `high`")
        lines += _table_head([*columns, "changes", "time", "aim"])
        lines += [_line(_scheduled_row(name, of)) for name in of]
        lines.append("")
    return ["### Precision that changes while training", "", AIM, "", *lines] if lines else []


def _scheduled_origin(workload: str, of: Mapping[str, Mapping[int, ScheduledRun]]) -> list[str]:
    """What was trained, with what, how often."""
    all_rows = [row for by_seed in of.values() for row in by_seed.values()]
    runs = {row.run.id: row.run for row in all_rows}.values()
    versions = dict.fromkeys(", ".join(f"{name} {v}" for name, v in sorted(run.versions.items())) for run in runs)
    sources = dict.fromkeys(f"{run.fxamp_source}, {run.date}" for run in runs)
    num_seeds = len({row.seed for row in all_rows})
    return [
        f"{workload}. {num_seeds} seeds of {all_rows[0].num_steps} steps.",
        "",
        f"- versions: {'; '.join(versions)}; fxamp source {'; '.join(sources)}",
        *(f"- command: `{command}`" for command in dict.fromkeys(run.command for run in runs)),
        "- interruptions: steps that were skipped, or whose loss was inf or NaN, over all seeds. Held-out loss: median over "
        "seeds; over `high`: median over seeds of the quotient with the same seed, with its quartiles. changes: of the "
        "precision, per training. time: of a step over that of `low`, same seed; fp16 is emulated on a CPU.",
    ]


def _scheduled_row(name: str, of: Mapping[str, Mapping[int, ScheduledRun]]) -> list[str]:
    by_seed = of[name]
    rows_here = list(by_seed.values())
    steps = sum(row.num_steps for row in rows_here)
    stops, share = sum(row.num_interruptions for row in rows_here), sum(row.num_high_steps for row in rows_here) / steps
    spared = over = time_ratio = None
    if "low" in of:
        both = [(row, of["low"][seed]) for seed, row in by_seed.items() if seed in of["low"]]
        in_low = sum(low.num_interruptions for _, low in both)
        spared = 1 - stops / in_low if in_low else None
        time_ratio = statistics.median(row.step_ms / low.step_ms for row, low in both) if both else None
    if "high" in of:
        pairs = [(row, of["high"][seed]) for seed, row in by_seed.items() if seed in of["high"]]
        ratios = sorted(row.heldout_loss / high.heldout_loss for row, high in pairs)
        over = statistics.median(ratios), ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4] if pairs else None
    aim = ""
    if name not in ("low", "high") and spared is not None and over is not None:
        aim = "yes" if spared >= 0.5 and share <= 0.2 and over[0] <= 1.01 else "no"
    return [
        f"`{name}`",
        rows_here[0].system_about,
        str(stops),
        "" if spared is None or name == "low" else f"{spared:.0%}",
        f"{share:.1%}",
        f"{statistics.median(row.heldout_loss for row in rows_here):.3f}",
        "" if over is None or name == "high" else f"{over[0]:.3f} [{over[1]:.3f}..{over[2]:.3f}]",
        f"{statistics.fmean(row.num_changes for row in rows_here):.1f}",
        "" if time_ratio is None else f"{time_ratio:.2f}",
        aim,
    ]


# ---- several processes ------------------------------------------------------------------------------------------------
def _distributed(results: Results) -> list[str]:
    lines: list[str] = []
    for workload, strategy in dict.fromkeys((r.workload, r.strategy) for r in results.distributed if r.strategy != "alone"):
        of = {r.system: r for r in results.distributed if (r.workload, r.strategy) == (workload, strategy)}
        alone = {r.system: r for r in results.distributed if (r.workload, r.strategy) == (workload, "alone")}
        first = next(iter(of.values()))
        lines += [f"#### {workload}, {_STRATEGIES[strategy]}, {first.num_ranks} processes", "", f"{first.workload_about}.", ""]
        lines += _distributed_origin([*of.values(), *alone.values()])
        columns = ["system", "time, ms", f"vs {ANCHOR}", "throughput of all", "efficiency", "memory of one", "first steps"]
        lines += _table_head([*columns, "loss"])
        lines += [_line(_distributed_row(row, of, alone)) for row in of.values()]
        lines += ["", *(f"- `{row.system}`: {row.reason or row.note}" for row in of.values() if row.reason or row.note), ""]
    return ["### Several processes", "", *lines] if lines else []


_STRATEGIES: Final[Mapping[str, str]] = {"ddp": "DDP", "fsdp2": "FSDP2"}


def _distributed_origin(rows_here: Sequence[Distributed]) -> list[str]:
    runs = {row.run.id: row.run for row in rows_here}.values()
    versions = dict.fromkeys(", ".join(f"{name} {v}" for name, v in sorted(run.versions.items())) for run in runs)
    sources = dict.fromkeys(f"{run.fxamp_source}, {run.date}" for run in runs)
    return [
        f"- versions: {'; '.join(versions)}; fxamp source {'; '.join(sources)}",
        *(f"- command: `{command}`" for command in dict.fromkeys(run.command for run in runs)),
        "- time: of a step on the slowest rank, of systems that take turns in one job. efficiency: time of the same system "
        "and batch on each device by itself, in the same job, over this one. memory: allocated / reserved beyond what was "
        "there before.",
        "",
    ]


def _distributed_row(row: Distributed, of: Mapping[str, Distributed], alone: Mapping[str, Distributed]) -> list[str]:
    time_ms = statistics.median(row.step_ms) if row.step_ms else None

    def over(other: Distributed | None) -> Ratio | None:
        if other is None or other.run.id != row.run.id:
            return None
        return compare.ratio_of_pairs(row.step_ms, other.step_ms)

    efficiency = over(alone.get(row.system))
    rate = None if time_ms is None else row.num_items_per_rank * row.num_ranks / (time_ms / 1e3)
    return [
        row.system,
        _ms(time_ms),
        _ratio(over(of.get(ANCHOR))),
        "" if rate is None else f"{_si(rate)} {row.unit}/s",
        "" if efficiency is None else f"{1 / efficiency.median:.1%}",
        f"{row.memory.allocated_bytes / 2**30:.2f} / {row.memory.reserved_bytes / 2**30:.2f} GiB" if row.memory else "",
        "" if row.compile_s is None else f"{row.compile_s:.0f} s",
        f"{compare.last_loss(row.losses):.4f}" if row.losses else "",
    ]


# ---- text ------------------------------------------------------------------------------------------------------------
def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table_head(titles: Sequence[str]) -> list[str]:
    return [_line(titles), _line(["---"] * len(titles))]


def _ratio(ratio: Ratio | None, *, bold: bool = False) -> str:
    if ratio is None:
        return ""
    value = f"**{ratio.median:.2f}**" if bold else f"{ratio.median:.2f}"
    return value if ratio.low == ratio.high else f"{value} [{ratio.low:.2f}..{ratio.high:.2f}]"


def _ms(time_ms: float | None) -> str:
    return "" if time_ms is None else f"{time_ms:.3g}" if time_ms < 100 else f"{time_ms:.0f}"


def _si(value: float) -> str:
    """Three digits and a prefix: "412k"."""
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{prefix}"
    return f"{value:.3g}"


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.3g} GFLOP/s"
