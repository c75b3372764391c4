"""What is kept of a compilation for people to read: every stage of every variant of every graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from torch import fx

from fxamp import errors, formats, graph
from fxamp.capture import Captured
from fxamp.coverage import Coverage, Replay
from fxamp.explain import fast_paths, leaks, text
from fxamp.explain.fast_paths import FastPath
from fxamp.explain.leaks import Leak
from fxamp.graph import Cast
from fxamp.joint.record import JointRecord
from fxamp.passes import Change
from fxamp.plan import Plan

Stage = Literal["captured", "plan", "dynamo", "joint_before", "joint"]
STAGES: Final[tuple[Stage, ...]] = ("captured", "plan", "dynamo", "joint_before", "joint")


@dataclass(frozen=True, kw_only=True)
class VariantRecord:
    """One graph in one precision: every stage of it."""

    precision: str
    shown: fx.GraphModule = field(repr=False)
    """The graph as Dynamo captured it."""
    captured: Captured = field(repr=False)
    """The graph that was planned, with the facts of its nodes: as captured, but for in-place operations made ordinary."""
    plan: Plan = field(repr=False)
    """A format and a reason for every operation."""
    dynamo: fx.GraphModule = field(repr=False)
    """Dynamo's graph with fxamp's casts in it, as handed to autograd."""
    changes: tuple[Change, ...] = field(repr=False)
    """What each pass on the Dynamo graph did."""
    joint_record: JointRecord = field(repr=False)
    coverage: Coverage = field(repr=False)
    lower: str = "inductor"
    """What compiled it, as of `Options`."""
    notes: tuple[str, ...] = field(repr=False)
    """What was not lowered, not captured in a CUDA graph, or fell back, and why."""

    @property
    def joint_before(self) -> fx.GraphModule:
        """The joint graph of forward and backward before fxamp's joint passes, traced again when first asked for.
        Raises NeedsCaptured where there is none."""
        return self._joint("before")

    @property
    def joint(self) -> fx.GraphModule:
        """The joint graph after fxamp's joint passes, traced again when first asked for.
        Raises NeedsCaptured where there is none."""
        return self._joint("after")

    def _joint(self, which: Literal["before", "after"]) -> fx.GraphModule:
        graphs = self.joint_record.graphs
        if graphs is None:
            raise errors.NeedsCaptured(
                f"there is no joint graph of this {self.precision} variant",
                way_out="lower='eager' has none: leave it out, or use 'aot_eager'",
            )
        return graphs.before if which == "before" else graphs.after

    @property
    def joint_changes(self) -> tuple[Change, ...]:
        """What each pass on the joint graph did."""
        return self._of_joint_passes[0]

    @property
    def casts(self) -> tuple[Cast, ...]:
        """The casts that fxamp has in the graph: of the joint graph if there is one, else of Dynamo's."""
        return self._of_joint_passes[1]

    @property
    def _of_joint_passes(self) -> tuple[tuple[Change, ...], tuple[Cast, ...]]:
        record = self.joint_record
        if record.casts is not None:
            return record.changes, record.casts
        graphs = record.graphs  # a warm start: no pass ran
        return ((), graph.own_casts(self.dynamo)) if graphs is None else (graphs.changes, graphs.casts)

    @property
    def cuda_graphs(self) -> tuple[Replay, ...]:
        """Forward and, if it trains, backward: does it replay as a CUDA graph, and if not, why, and at which line."""
        return self.coverage.replays(trains=self.captured.trains)

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """Where a low value meets a wider one, and the result is wide."""
        return leaks.find(self.captured, self.plan)

    @property
    def fast_paths(self) -> tuple[FastPath, ...]:
        """Each matrix product, convolution and attention: can the fast kernels of CUDA take it, and if not, why?"""
        return fast_paths.find(self.captured, self.plan, self.dynamo, lower=self.lower)

    def text(self, stage: Stage = "dynamo") -> str:
        """One stage as readable text.

        Raises: UnknownOption for a stage that does not exist, NeedsCaptured for one that did not run.
        """
        if stage not in STAGES:
            raise errors.unknown("stage", stage, STAGES)
        if stage == "plan":
            return text.plan(self.captured, self.plan)
        graphs = {"captured": lambda: self.shown, "dynamo": lambda: self.dynamo,
                  "joint_before": lambda: self.joint_before, "joint": lambda: self.joint}  # fmt: skip
        return text.code(graphs[stage]())

    def diff(self, before: Stage = "captured", after: Stage = "dynamo") -> str:
        """A unified diff of two stages."""
        return text.diff(self.text(before), self.text(after), names=(before, after))


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """One graph that Dynamo captured, and its variants."""

    index: int
    captured: fx.GraphModule = field(repr=False)
    """The graph as Dynamo captured it."""
    trains: bool
    """Does it have a backward?"""
    variants: Mapping[str, VariantRecord]
    """By the precision of the ladder, or of each region; the lowest everywhere comes first."""

    @property
    def lowest(self) -> VariantRecord:
        """The variant in the lowest precision of the ladder: what the graph can gain."""
        return next(iter(self.variants.values()))

    @property
    def of_ladder(self) -> dict[str, VariantRecord]:
        """The variants in which all regions have one precision, by that."""
        return {precision: v for precision, v in self.variants.items() if precision in formats.PRECISIONS}

    def dump(self, directory: Path) -> Path:
        """Writes every stage that exists to `directory/graph_<index>/<variant>/`, and returns that folder."""
        folder = directory / f"graph_{self.index}"
        for precision, variant in self.variants.items():
            target = folder / precision
            target.mkdir(parents=True, exist_ok=True)
            for stage in STAGES:
                with contextlib.suppress(errors.NeedsCaptured):
                    suffix = "txt" if stage == "plan" else "py"
                    (target / f"{STAGES.index(stage)}_{stage}.{suffix}").write_text(variant.text(stage))
            (target / "captured_to_dynamo.diff").write_text(variant.diff() + "\n")
        return folder
