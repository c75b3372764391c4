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

WIDTH_CHARACTERS: Final = 110

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
        """What the graphs run in: ("bf16",)."""
        return tuple(sorted({v.precision for v in self.variants}))

    @property
    def formats(self) -> tuple[str, ...]:
        """Short names of all formats that some operation computes in: ("bf16", "fp32")."""
        return tuple(sorted({name for v in self.variants for name in v.plan.formats}))

    @property
    def num_low_ops(self) -> int:
        """Operations that run in the low format, over all graphs."""
        return sum(v.plan.num_low_ops for v in self.variants)

    @property
    def num_casts(self) -> int:
        """Casts that fxamp has in its graphs, forward and backward, over all graphs."""
        return sum(len(v.casts) for v in self.variants)

    @property
    def cuda_graphs(self) -> tuple[tuple[int, str, Replay], ...]:
        """(graph, what it runs in, what of it replays as a CUDA graph, or why not), for each forward and backward."""
        variants = [(g.index, v) for g in self.graphs for v in g.variants.values()]
        return tuple((index, v.precision, replay) for index, v in variants for replay in v.cuda_graphs)

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """Promotion leaks, over all graphs: where a low value meets a wider one, and the result is wide."""
        return tuple(leak for v in self.variants for leak in v.leaks)

    @property
    def fast_paths(self) -> tuple[FastPath, ...]:
        """Each matrix product, convolution and attention, over all graphs: can the fast kernels of CUDA take it, and if not,
        why, at which line, and what to change?"""
        return tuple(path for v in self.variants for path in v.fast_paths)

    def __str__(self) -> str:
        return printed.text(self._parts(), WIDTH_CHARACTERS)

    def _parts(self) -> Iterator[RenderableType]:
        yield f"fxamp: {self.options}"
        if not self.graphs:
            yield (
                "No graph was compiled yet. If the model has been called: Dynamo found nothing to capture in it "
                "(a bare functional layer compiled by itself, a graph break before the first operation, or layers and "
                "containers of torch.nn behind one, as in DistributedDataParallel(nn.Sequential(...)): wrap a class of your "
                "own, or compile first, DistributedDataParallel(torch.compile(model, backend=amp))), or a torch.func "
                "transform was applied around it, which PyTorch runs eagerly: compile the transform instead. Or Dynamo has "
                "compiled the same code 8 times before (torch._dynamo.config.recompile_limit), as for several Amps in one "
                "process: it then runs that eagerly for whoever comes next."
            )
        else:
            yield _graph_table(self.graphs)
            yield _operation_table(self.variants)
            paths = self.fast_paths
            if paths:
                yield _fast_path_table(paths, self.variants)
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
        yield from (f"- {note}" for note in self.notes)


def _graph_table(graphs: Sequence[GraphRecord]) -> Table:
    columns = ("graph", "mode", "runs in", "operations", "low", "casts", "CUDA graph", "first line")
    table = printed.table("graphs", columns, numbers=("operations", "low", "casts"))
    for g in graphs:
        for v in g.variants.values():
            decisions = v.plan.everywhere
            lines = [d.facts.where for d in decisions if d.facts.where]
            table.add_row(
                str(g.index),
                "training" if g.trains else "inference",
                v.precision,
                str(len(decisions)),
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


def _operation_table(variants: Sequence[VariantRecord]) -> Table:
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for v in variants:
        for d in v.plan.everywhere:
            if d.computes != "-":
                counts[(d.op or "?", d.computes, d.cls.value, d.why)] += 1
    table = printed.table("operations", ("operation", "computes in", "count", "class", "why"), numbers=("count",))
    order = {cls.value: i for i, cls in enumerate(OpClass)}
    for (op, computes, cls, why), count in sorted(counts.items(), key=lambda item: (order[item[0][2]], item[0])):
        table.add_row(op, computes, str(count), cls, why)
    return table


def _leak_table(leaks: Sequence[Leak]) -> Table:
    title = "promotion leaks: a low value meets a wider one, and the result is wide"
    columns = ("where", "operation", "low", "wide", "widens", "what to change")
    table = printed.table(title, columns, numbers=("widens",), has_lines=True)
    rows = {(leak.where, leak.op, leak.origin): leak for leak in reversed(leaks)}  # the first of each line speaks for all
    counts = Counter((leak.where, leak.op, leak.origin) for leak in leaks)
    for key, leak in list(reversed(rows.items()))[:MAX_LEAKS]:
        times = f" ({counts[key]} times)" if counts[key] > 1 else ""
        table.add_row(f"{leak.where}{times}", leak.op, leak.low, leak.wide, str(leak.num_widened), leak.advice)
    if len(rows) > MAX_LEAKS:
        table.caption = f"and at {len(rows) - MAX_LEAKS} more places: report.leaks has them all"
    return table


def _fast_path_table(paths: Sequence[FastPath], variants: Sequence[VariantRecord]) -> Table:
    elsewhere = sorted({v.captured.device.type for v in variants} - {"cuda"})
    where = f", as they would be on CUDA (this ran on {', '.join(elsewhere)})" if elsewhere else ""
    columns = ("operation", "in", "count", "fast path", "where", "what to change")
    table = printed.table(f"fast paths{where}", columns, numbers=("count",), has_lines=True)
    groups: dict[tuple[object, ...], list[FastPath]] = {}
    for path in sorted(paths, key=lambda p: p.is_taken):
        groups.setdefault((path.kind, path.op, path.computes, path.is_taken, path.why, path.advice), []).append(path)
    for group in list(groups.values())[:MAX_FAST_PATHS]:
        first, lines = group[0], list(dict.fromkeys(p.where for p in group))
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        verdict = "taken" if first.is_taken else "missed:"
        text = f"{verdict}{': ' if first.why and first.is_taken else ' '}{first.why}".rstrip()
        table.add_row(first.op, first.computes, str(len(group)), text, f"{lines[0]}{more}", first.advice)
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
    for g in graphs:
        for v in g.variants.values():
            for note in v.notes:
                yield f"- graph {g.index} ({v.precision}): {note}"
            for replay in () if v.coverage.off else v.cuda_graphs:
                if not replay.is_whole:
                    yield f"- graph {g.index} ({v.precision}): {replay}"
            for change in v.changes:
                for kept in change.kept if change.pass_name in _SPEEDING else ():
                    left = f"{kept.node} ({kept.where})" if kept.where else kept.node
                    yield f"- graph {g.index} ({v.precision}): {change.pass_name} left {left}: {kept.reason}"
            for change in v.joint_changes:
                if change.pass_name == "SaveReadsOfMutated" and change.num_marked:
                    yield f"- graph {g.index} ({v.precision}): repaired: {_patches.MUTATED_READS.symptom}"
