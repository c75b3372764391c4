"""RELAXED: keys and values that are repeated for their groups of queries reach attention unrepeated, which repeats nothing.

The kernel sums the gradients of a group, and rounds the sum, where the program sums what was rounded (docs/relaxed.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fxamp import capture, graph, ops
from fxamp.passes import Change, Kept
from fxamp.rewrite.attention import arguments, change_arguments

MAX_ELEMENTS: Final = 2**26
"""Of a repeated tensor that is looked at: 64 Mi."""

_NAMES: Final = "getitem unsqueeze expand broadcast_to reshape view flatten contiguous clone repeat_interleave"
_MOVES: Final = frozenset(_NAMES.split())
"""What programs repeat heads by. Each puts elements of its one operand somewhere, and makes none."""


@dataclass(frozen=True)
class GroupQueries:
    """Hands attention the keys and values that a program repeats, with enable_gqa=True.

    requires: rewritten Dynamo graph, behind LowAttention.  changes: arguments of attention; casts; erases the repetition.
    keeps: shapes and dtypes, and the values that each query sees: the repetition is computed on indices, and compared.

        r: "f32[B, 8, S, E]" = reshape(expand(k[:, :, None], [B, 2, 4, S, E]), [B, 8, S, E]);  r_bf16 = cast(r)
        y = attention(q, r_bf16, v_bf16)     ->     k_bf16 = cast(k);  y = attention(q, k_bf16, u_bf16, enable_gqa=True)
    kept: attention in fp32, or with a mask, which not every version's kernels take with groups; symbolic sizes; memory that
    the graph writes.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_marked, num_removed, kept = 0, 0, list[Kept]()
        for part in graph.all_of(gm):
            repetitions = Repetitions(part)
            for node in [x for x in part.graph.nodes if x.target is ops.ATTENTION]:
                given = arguments(node)
                repeated = [given["key"], given["value"]]
                if given.get("enable_gqa") or not all(repetitions.is_candidate(x) for x in repeated):
                    continue
                try:
                    if given.get("attn_mask") is not None:
                        raise NotRepeated("it has a mask")
                    query, key = graph.value_of(given["query"]), graph.value_of(given["key"])
                    if not _is_plain(query) or query.shape[:2] != key.shape[:2]:
                        raise NotRepeated("its queries are broadcast to the keys, or of symbolic size")
                    sources = [repetitions.source(x) for x in repeated]
                except NotRepeated as reason:
                    kept.append(Kept(node=node.name, reason=str(reason), where=capture.source_line(node)[0]))
                    continue
                if graph.value_of(sources[0]).shape[1] != graph.value_of(sources[1]).shape[1]:
                    continue
                key, value = (_like(x, s, node) for x, s in zip(repeated, sources, strict=True))
                change_arguments(node, key=key, value=value, enable_gqa=True)
                num_marked += 1
                num_removed += sum(graph.erase_unread(x) for x in dict.fromkeys(repeated))
            part.recompile()
        return Change(pass_name=type(self).__name__, num_marked=num_marked, num_removed=num_removed, kept=tuple(kept))


class NotRepeated(Exception):
    """Why keys or values stay as they are."""


# ---- the proof ----------------------------------------------------------------------------------------------------------
@dataclass
class Repetitions:
    """Which values of a graph are others with each head repeated. What was found is kept: layers repeat alike."""

    gm: fx.GraphModule
    _known: dict[Any, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._written = capture.written(self.gm)

    def is_candidate(self, operand: object) -> bool:
        """Is it made by one of the moves, from fewer elements?"""
        return isinstance(operand, fx.Node) and self._narrow(operand) is not None

    def is_repeated(self, operand: object) -> bool:
        """Are its heads those of another value, repeated, by proof?"""
        if not isinstance(operand, fx.Node) or not self.is_candidate(operand):
            return False
        try:
            self.source(operand)
        except NotRepeated:
            return False
        return True

    def source(self, operand: fx.Node) -> fx.Node:
        """The value [B, H, S, E] of which `operand`, or what it is a cast of, is [B, n * H, S, E] with each head n times.
        Raises: NotRepeated."""
        source = self._narrow(operand)
        if source is None:
            raise NotRepeated(f"{operand.name} repeats nothing")
        moves = list(itertools.takewhile(lambda x: x is not source, self._moves(operand)))
        if any(graph.storages(x) & self._written for x in (source, *moves)):
            raise NotRepeated(f"the memory of {source.name} is written")
        made, given = graph.value_of(_uncast(operand)), graph.value_of(source)
        if made.requires_grad != given.requires_grad:
            raise NotRepeated(f"{operand.name} is detached from {source.name}")
        shape = tuple(given.shape)
        key = (shape, tuple(given.stride()), tuple((str(x.target), str(_plain(x.args)), str(_plain(x.kwargs))) for x in moves))
        if key not in self._known:
            self._known[key] = _repeats_heads(moves, given, made)
        if not self._known[key]:
            raise NotRepeated(f"{operand.name} is no repetition of the heads of {source.name}")
        return source

    def _narrow(self, operand: fx.Node) -> fx.Node | None:
        """The first value on the way back that has four dimensions and fewer heads."""
        wide = graph.value_of(operand)
        if not isinstance(wide, torch.Tensor) or wide.dim() != 4 or not _is_plain(wide) or wide.numel() > MAX_ELEMENTS:
            return None
        for node in self._moves(operand):
            value = graph.value_of(node)
            if not isinstance(value, torch.Tensor) or not _is_plain(value):
                return None
            is_like = value.dim() == 4 and (value.shape[0], *value.shape[2:]) == (wide.shape[0], *wide.shape[2:])
            if is_like and 0 < value.shape[1] < wide.shape[1] and wide.shape[1] % value.shape[1] == 0:
                return node
        return None

    @staticmethod
    def _moves(operand: fx.Node) -> Iterator[fx.Node]:
        """From what `operand` is a cast of backwards, along moves."""
        node = _uncast(operand)
        yield node
        while capture.name_of(node) in _MOVES and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
            yield node


def _uncast(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if graph.is_own_cast(node) else node


def _is_plain(value: torch.Tensor) -> bool:
    return all(type(size) is int for size in value.shape)


def _plain(arguments: Any) -> Any:
    """Arguments without the names of nodes."""
    return fx.map_arg(arguments, lambda _: "operand")  # pyright: ignore[reportArgumentType]


def _repeats_heads(moves: list[fx.Node], given: torch.Tensor, made: torch.Tensor) -> bool:
    """Do these moves, last first, of a value [B, H, S, E] repeat each of its heads, one beside the other?"""
    with _disable_current_modes(), torch.no_grad():
        index = torch.arange(given.numel(), dtype=torch.int32).view(tuple(given.shape))
        moved = index
        for move in reversed(moves):
            moved = graph.call(move, [moved])
            if not isinstance(moved, torch.Tensor):
                return False
        wanted = index.repeat_interleave(made.shape[1] // given.shape[1], dim=1)
        return torch.equal(moved, wanted)


# ---- the edit -----------------------------------------------------------------------------------------------------------
def _like(operand: fx.Node, source: fx.Node, node: fx.Node) -> fx.Node:
    """`source` in the format in which attention reads `operand`."""
    wanted, held = graph.value_of(operand).dtype, graph.value_of(source).dtype
    if wanted == held:
        return source
    cast = graph.own_cast(operand)
    assert cast is not None
    return graph.insert_cast(source, wanted, before=node, why=cast.why, where=cast.where)
