"""`amp.report()`: what runs in which format and why, as a table for people and as fields for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fxamp import _patches
from fxamp.coverage import Replay
from fxamp.explain import printed
from fxamp.explain.fast_paths import FastPath
from fxamp.explain.leaks import Leak
from fxamp.explain.record import GraphRecord, VariantRecord
from fxamp.explain.rules import RuleUse
from fxamp.optable import OpClass

if TYPE_CHECKING:  # imported where a report is printed: `import fxamp` stays light
    from rich.console import RenderableType
    from rich.table import Table

MAX_LEAKS: Final = 12
"""Places that a printed report shows. A model has hundreds of additions to its residual stream."""


MAX_FAST_PATHS: Final = 16
"""Rows of fast paths that a printed report shows; those that were missed come first."""


MAX_CHANGES: Final = 12
"""Changes of precision that a printed report shows: the last ones."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A summary of all graphs of an Amp. `print(report)` shows tables."""

    options: str
    graphs: tuple[GraphRecord, ...]
    notes: tuple[str, ...]
    """Notes that concern no graph in particular."""
    rules: tuple[RuleUse, ...] = ()
    """What became of each rule of the policy, in its order."""
    scaling: tuple[tuple[str, str], ...] = ()
    """(what, value) of the loss scale: the scale, skipped steps, how each optimizer skips, what health() finds."""
    weights: tuple[tuple[str, str], ...] = ()
    """(what, value) of frozen weights: how many, and the memory of their low copies."""
    scheduling: tuple[tuple[str, str, str], ...] = ()
    """(from which step on, precision, why) of each change of the scheduler's; `Amp.history` has the numbers."""
    steps: tuple[str, ...] = ()
    """How the calls of each train step ran: replayed, or why not."""
    num_fallbacks: int = 0
    """Graphs that were compiled untouched after a failure, with on_error="eager"."""

    @property
    def variants(self) -> tuple[VariantRecord, ...]:
        return tuple(v for g in self.graphs for v in g.variants.values())

    @property
    def precisions(self) -> tuple[str, ...]:
        """What the graphs were planned for: ("bf16",). Where an autocast around the call decided instead, a note says so, and
        `formats` has what runs."""
        return tuple(sorted({v.precision for v in self.variants}))

    @property
    def formats(self) -> tuple[str, ...]:
        """Short names of all formats that some operation computes in: ("bf16", "fp32")."""
        return tuple(sorted({name for v in self.variants for name in v.plan.formats}))

    @property
    def num_low_ops(self) -> int:
        """Operations that compute in less than fp32, over all graphs; of a ladder, in the lowest precision."""
        return sum(g.lowest.plan.num_low_ops for g in self.graphs)

    @property
    def num_casts(self) -> int:
        """Casts that fxamp has in its graphs, forward and backward, over all graphs; of a ladder, in the lowest precision."""
        return sum(len(g.lowest.casts) for g in self.graphs)

    @property
    def cuda_graphs(self) -> tuple[tuple[int, str, Replay], ...]:
        """(graph, what it runs in, what of it replays as a CUDA graph, or why not), for each forward and backward."""
        variants = [(g.index, v) for g in self.graphs for v in g.variants.values()]
        return tuple((index, v.precision, replay) for index, v in variants for replay in v.cuda_graphs)

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """Promotion leaks, over all graphs: where a low value meets a wider one, and the result is wide. Of a ladder, in the
        lowest precision."""
        return tuple(leak for g in self.graphs for leak in g.lowest.leaks)

    @property
    def fast_paths(self) -> tuple[FastPath, ...]:
        """Each matrix product, convolution and attention, over all graphs: can the fast kernels of CUDA take it, and if not,
        why, at which line, and what to change? Of a ladder, in the lowest precision."""
        return tuple(path for g in self.graphs for path in g.lowest.fast_paths)

    def __str__(self) -> str:
        return printed.text(self._parts(), printed.width())

    def _parts(self) -> Iterator[RenderableType]:
        yield f"fxamp: {self.options}"
        if not self.graphs:
            yield (
                "No graph was compiled yet. If the model has been called: Dynamo found nothing to capture in it "
                "(a bare functional layer compiled by itself, a graph break before the first operation, nn.LSTM, nn.GRU or "
                "nn.RNN, unless torch._dynamo.config.allow_rnn is True, or layers and "
                "containers of torch.nn behind one, as in DistributedDataParallel(nn.Sequential(...)): wrap a class of your "
                "own, or compile first, DistributedDataParallel(torch.compile(model, backend=amp))), or a torch.func "
                "transform was applied around it, which PyTorch runs eagerly: compile the transform instead. Or Dynamo has "
                "compiled the same code 8 times before (torch._dynamo.config.recompile_limit), as for several Amps in one "
                "process: it then runs that eagerly for whoever comes next."
            )
        else:
            yield _graph_table(self.graphs)
            yield _operation_table(self.graphs)
            paths = self.fast_paths
            if paths:
                yield _fast_path_table(paths, self.graphs)
            if self.leaks:
                yield _leak_table(self.leaks)
            if self.rules:
                yield _rule_table(self.rules)
            if self.scaling:
                yield _pairs_table("loss scaling", self.scaling)
            if self.weights:
                yield _pairs_table("weights", self.weights)
            if self.scheduling:
                yield _scheduling_table(self.scheduling)
            yield from _notes(self.graphs)
        yield from (f"- train step: {step}" for step in self.steps)
        told = {note for v in self.variants for note in v.notes}
        yield from (f"- {note}" for note in self.notes if note not in told)


def _graph_table(graphs: Sequence[GraphRecord]) -> Table:
    columns = ("graph", "mode", "runs in", "ops", "low", "casts", "CUDA graph", "first line")
    table = printed.table("graphs", columns, numbers=("ops", "low", "casts"))
    for g in graphs:
        for v in g.variants.values():
            lines = [d.facts.where for d in v.plan.everywhere if d.facts.where]
            table.add_row(
                str(g.index),
                "training" if g.trains else "inference",
                "as traced" if v.plan.note else v.precision,
                str(len(v.plan.operations)),
                str(v.plan.num_low_ops),
                str(len(v.casts)),
                _coverage(v),
                lines[0] if lines else "",
            )
    return table


def _coverage(variant: VariantRecord) -> str:
    """"yes", "no", or what of a graph replays as a CUDA graph: "forward", "in pieces"."""
    replays = variant.cuda_graphs
    captured = [replay for replay in replays if replay.is_captured]
    if len(captured) < len(replays):
        return captured[0].phase if captured else "no"
    return "yes" if all(replay.is_whole for replay in replays) else "in pieces"


def _operation_table(graphs: Sequence[GraphRecord]) -> Table:
    """Operations that compute in one format for one reason share a row. In each precision of the ladder: where regions differ,
    each runs as its own precision says."""
    precisions = list(dict.fromkeys(precision for g in graphs for precision in g.of_ladder))
    found: dict[tuple[OpClass, str, str], dict[str, Counter[str]]] = {}
    for precision, v in (item for g in graphs for item in g.of_ladder.items()):
        for d in v.plan.operations:
            counts = found.setdefault((d.cls, d.computes, d.why), {}).setdefault(precision, Counter())
            counts[d.op or "?"] += 1
    several = ("precision",) if len(precisions) > 1 else ()
    columns = (*several, "in", "count", "operations", "why")
    table = printed.table("operations", columns, numbers=("count",), has_lines=True)
    order = list(OpClass)
    for (_, computes, why), by_precision in sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1:])):
        for counts in [c for i, c in enumerate(by_precision.values()) if c not in list(by_precision.values())[:i]]:
            alike = [precision for precision in precisions if by_precision.get(precision) == counts]
            names = ("all" if alike == precisions else ", ".join(alike),) if several else ()
            ops = ", ".join(f"{op} x{count}" if count > 1 else op for op, count in sorted(counts.items()))
            table.add_row(*names, computes, str(counts.total()), ops, why)
    num_mixed = sum(len(g.variants) - len(g.of_ladder) for g in graphs)
    if num_mixed:
        table.caption = f"and {num_mixed} with regions apart: amp.graphs[i].variants[...].text('plan') has each"
    return table


def _leak_table(leaks: Sequence[Leak]) -> Table:
    title = "promotion leaks: a low value meets a wider one, and the result is wide"
    columns = ("where", "what meets", "widens", "what to change")
    table = printed.table(title, columns, numbers=("widens",), has_lines=True)
    rows = {(leak.where, leak.op, leak.origin): leak for leak in reversed(leaks)}  # the first of each line speaks for all
    counts = Counter((leak.where, leak.op, leak.origin) for leak in leaks)
    for key, leak in list(reversed(rows.items()))[:MAX_LEAKS]:
        times = f" ({counts[key]} times)" if counts[key] > 1 else ""
        meets = f"{leak.op}: {leak.low} with {leak.wide}"
        table.add_row(f"{leak.where}{times}", meets, str(leak.num_widened), leak.advice)
    if len(rows) > MAX_LEAKS:
        table.caption = f"and at {len(rows) - MAX_LEAKS} more places: report.leaks has them all"
    return table


def _fast_path_table(paths: Sequence[FastPath], graphs: Sequence[GraphRecord]) -> Table:
    elsewhere = sorted({g.lowest.captured.device.type for g in graphs} - {"cuda"})
    where = f", as they would be on CUDA (this ran on {', '.join(elsewhere)})" if elsewhere else ""
    columns = ("operation", "where", "count", "fast path", "what to change")
    table = printed.table(f"fast paths{where}", columns, numbers=("count",), has_lines=True)
    groups: dict[tuple[object, ...], list[FastPath]] = {}
    for path in sorted(paths, key=lambda p: p.is_taken):
        groups.setdefault((path.kind, path.op, path.computes, path.is_taken, path.why, path.advice), []).append(path)
    for group in list(groups.values())[:MAX_FAST_PATHS]:
        first, lines = group[0], list(dict.fromkeys(p.where for p in group))
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        verdict = "taken" if first.is_taken else "missed:"
        text = f"{verdict}{': ' if first.why and first.is_taken else ' '}{first.why}".rstrip()
        table.add_row(f"{first.op} in {first.computes}", f"{lines[0]}{more}", str(len(group)), text, first.advice)
    if len(groups) > MAX_FAST_PATHS:
        table.caption = f"and {len(groups) - MAX_FAST_PATHS} more kinds: report.fast_paths has them all"
    return table


def _rule_table(rules: Sequence[RuleUse]) -> Table:
    columns = ("rule", "matched", "decided", "followed", "note")
    table = printed.table("rules, the last that matches wins", columns, numbers=columns[1:-1])
    for use in rules:
        table.add_row(str(use.rule), str(use.num_matched), str(use.num_decided), str(use.num_followed), use.note)
    return table


def _pairs_table(title: str, pairs: Sequence[tuple[str, str]]) -> Table:
    table = printed.table(title, ("what", "value"))
    table.show_header = False
    for what, value in pairs:
        table.add_row(what, value)
    return table


def _scheduling_table(changes: Sequence[tuple[str, str, str]]) -> Table:
    title = "precision of the steps, as the scheduler changed it"
    table = printed.table(title, ("from step", "precision", "why"), numbers=("from step",))
    for change in changes[-MAX_CHANGES:]:
        table.add_row(*change)
    if len(changes) > MAX_CHANGES:
        table.caption = f"and {len(changes) - MAX_CHANGES} changes before: amp.history.changes has them all"
    return table


_SPEEDING: Final = ("ReplaceMasks", "LowAttention", "GroupQueries", "ChooseAttentionKernels", "TakeLowWeights")
"""Passes that clear the way to a fast kernel: what they leave alone stays slow."""


def _notes(graphs: Sequence[GraphRecord]) -> Iterator[str]:
    """Each note once, with the graphs, and of a ladder the precisions, that it is about."""
    about: dict[str, dict[int, list[str]]] = {}
    for g in graphs:
        for v in g.variants.values():
            for note in dict.fromkeys(_notes_of(v)):
                about.setdefault(note, {}).setdefault(g.index, []).append(v.precision)
    everywhere = {g.index: list(g.variants) for g in graphs}
    for note, found in about.items():
        alike: dict[str, list[int]] = {}
        for index, precisions in found.items():
            is_all = len(precisions) == len(everywhere[index])
            alike.setdefault("" if is_all else f" ({'; '.join(precisions)})", []).append(index)
        for precisions, indices in alike.items():
            yield f"- graph{'s' if len(indices) > 1 else ''} {_ranges(indices)}{precisions}: {note}"


def _notes_of(variant: VariantRecord) -> Iterator[str]:
    yield from variant.notes
    for replay in () if variant.coverage.off else variant.cuda_graphs:
        if not replay.is_whole:
            yield str(replay)
    for change in variant.changes:
        for kept in change.kept if change.pass_name in _SPEEDING else ():
            left = f"{kept.node} ({kept.where})" if kept.where else kept.node
            yield f"{change.pass_name} left {left}: {kept.reason}"
    for change in variant.joint_changes:
        if change.pass_name == "SaveReadsOfMutated" and change.num_marked:
            yield f"repaired: {_patches.MUTATED_READS.symptom}"


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
