"""From what is on record of each watched value to findings: who made the first inf or NaN, and who has only passed it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fxamp import optable
from fxamp.run.health import SHARE_LOST, Finding
from fxamp.run.watch import Sighting
from fxamp.watched import Watched

MAX_FINDINGS: Final = 5
"""Of one kind. The rest is counted."""

_PHASES: Final = ("input", "forward", "arriving", "scaled", "backward")
"""In the order in which a step comes to them."""

_HINTS: Final = MappingProxyType(
    {
        ("forward", "div"): "Look for a divisor that can be 0 (or so small that the quotient is beyond the format)",
        ("forward", "log"): "Look for a logarithm of 0: add an epsilon inside, or use log_softmax, logsumexp, log1p",
        ("forward", "exp"): "Subtract the maximum before the exponential, or use softmax, logsumexp",
        ("forward", "sqrt"): "Look for the root of a negative number",
        ("forward", "rsqrt"): "Look for a variance of 0: add an epsilon inside the root",
        ("forward", "reciprocal"): "Look for a divisor that can be 0",
        ("forward", "softmax"): "A row with nothing but -inf (everything masked) has no softmax: leave one position unmasked",
        ("forward", "scaled_dot_product_attention"): "A row of which everything is masked has no softmax: leave one position "
        "unmasked",
        ("backward", "sqrt"): "The derivative of a root at 0 is infinite: add an epsilon inside",
        ("backward", "norm"): "The derivative of a norm at 0 is not defined: add an epsilon inside",
        ("backward", "div"): "The derivative of a quotient divides by the square of the divisor: keep it away from 0",
        ("backward", "pow"): "The derivative of a power below 1 is infinite at 0: add an epsilon inside",
        ("backward", "where"): "where() hides an inf of the branch that it drops in the forward alone: the gradient there is "
        "0 * inf. Make what that branch reads safe too",
    }
)
"""(phase, operation) -> what goes wrong with it in fp32."""

_SYNONYMS: Final = MappingProxyType(
    {
        "true_divide": "div", "divide": "div", "truediv": "div", "log2": "log", "log10": "log", "log1p": "log", "expm1": "exp",
        "exp2": "exp", "_softmax": "softmax", "log_softmax": "softmax", "linalg_vector_norm": "norm",
        "linalg_norm": "norm", "dist": "norm", "cdist": "norm", "std": "sqrt", "attention": "scaled_dot_product_attention",
        "fxamp::attention": "scaled_dot_product_attention",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """What of the run the findings depend on."""

    num_updates: int
    num_bad: int
    """Updates in which a gradient overflowed, at most as many as are on record."""
    has_settled: bool
    """Has there been an update without an overflow?"""
    scale: float
    """The loss scale now."""
    rank: int | None
    """Of this process, where torch.distributed is initialised."""


def findings(sightings: Sequence[Sighting], run: Run) -> tuple[Finding, ...]:
    """One for each value that made an inf or a NaN in an update whose gradients overflowed, first come first."""
    if not sightings or not (run.num_bad or any(s.num_made or s.num_turned for s in sightings)):
        return ()
    suspects = sorted(_suspects(sightings), key=lambda s: (s.first, _PHASES.index(s.watched.phase), -s.num_made))
    if not suspects:
        return (_nobody(run),)
    passed_on = sum(s.num_passed_on > 0 and s not in suspects for s in sightings)
    return tuple(
        _finding(s, passed_on, max(0, len(suspects) - MAX_FINDINGS), run) for s in suspects[:MAX_FINDINGS]
    )


def is_older(finding: Finding, update: int) -> bool:
    """Does it name something, other than the loss scale, that went wrong before this update?"""
    evidence = finding.evidence
    is_scales = evidence.get("phase") in ("backward", "scaled") or finding.kind == "calibration"
    return not is_scales and 0 <= evidence.get("first_update", -1) < update


def lost(sightings: Sequence[Sighting]) -> dict[str, float]:
    """Operation -> the share of its gradient's numbers that fp16 cannot hold well, where it is most of them, largest first."""
    found: dict[str, float] = {}
    for s in sorted(sightings, key=lambda s: -s.share_lost):
        if s.share_lost > SHARE_LOST:
            found.setdefault(_place(s.watched), s.share_lost)
    return found


def silent(sightings: Sequence[Sighting], num_updates: int) -> tuple[str, ...]:
    """The operations that made an inf or a NaN in good updates, in no more than these, so that nothing overflowed but a loss.
    What makes one in every update is a mask."""
    made = [s for s in sightings if s.watched.phase == "forward" and 0 < s.num_harmless <= num_updates]
    return tuple(dict.fromkeys(_place(s.watched) for s in made if not s.watched.is_meant))


def _suspects(sightings: Sequence[Sighting]) -> list[Sighting]:
    made = [s for s in sightings if s.num_made]
    sudden = [s for s in made if not s.num_harmless and not s.watched.is_meant]
    turned = [s for s in sightings if s.num_turned and not s.num_harmless]
    found = sudden or turned or made or [s for s in sightings if s.num_turned]
    return [s for s in found if not any(_hands_over(other, s) for other in found)]


def _hands_over(other: Sighting, s: Sighting) -> bool:
    """May what came into the graph of `s` from outside be what another graph made in the same update?"""
    if s.graph == other.graph or other.first > s.last or other.last < s.first:
        return False
    if s.watched.phase == "input" and s.watched.role == "input":
        return other.watched.phase in ("input", "forward") and (other.watched.phase == "forward" or other.graph < s.graph)
    if s.watched.phase == "arriving":
        return other.watched.phase != "arriving" or other.graph > s.graph
    return False


def _finding(s: Sighting, passed_on: int, num_more: int, run: Run) -> Finding:
    w = s.watched
    is_calibration = _is_the_scales(s, run) and s.num_calibrating == s.num_made
    times = s.num_made or s.num_turned
    when = f"in {times} updates, {s.first} the first" if times > 1 else f"in update {s.first}"
    parts = [
        f"{_what(s)}, {when}",
        f"{passed_on} other values only passed it on" if passed_on else "",
        f"{num_more} more made one by themselves" if num_more else "",
        f"it does so in good updates too ({s.num_harmless})" if s.num_harmless else "",
        f"seen on rank {run.rank}, each rank knows its own" if run.rank is not None else "",
    ]
    return Finding(
        kind="calibration" if is_calibration else "overflow",
        what="; ".join(part for part in parts if part),
        evidence=MappingProxyType({
            "operation": w.op,
            "module": w.module,
            "where": w.where,
            "phase": w.phase,
            "format": w.format,
            "num_produced": s.num_made + s.num_turned,
            "num_propagators": passed_on,
            "first_update": s.first,
            "last_update": s.last,
            "smallest_scale": s.smallest_scale,
        }),
        way_out=_way_out(s, run, is_calibration),
    )  # fmt: skip


def _nobody(run: Run) -> Finding:
    elsewhere = "on another rank (each knows its own values)" if run.rank is not None else "by code between or behind them"
    return Finding(
        kind="overflow",
        what=f"gradients overflowed, and no value that is watched in the compiled graphs made an inf or a NaN: it was made "
        f"{elsewhere}, or inside of an operation with a graph of its own",
        way_out="Call amp.health() on the other ranks" if run.rank is not None else "Compile the loss with the model",
    )


# ---- words --------------------------------------------------------------------------------------------------------------
def _what(s: Sighting) -> str:
    w, place = s.watched, _place(s.watched)
    if w.phase == "input":
        read = f" (first read at {w.where})" if w.where else ""
        kind = w.role if w.role in ("parameter", "buffer") else "input"
        return f"the {kind} {w.name}{read} held an inf or a NaN before anything was computed"
    if w.phase == "arriving":
        return f"the gradient that came in for the result of {place} was inf or NaN: the loss, outside of the graph, made it"
    if w.phase == "scaled":
        return f"the gradient that came in for the result of {place} overflowed when it was multiplied by the loss scale"
    begin = f"in the {w.phase}, "
    if s.num_made == 0:
        return f"{begin}{place} made the first NaN, of an inf that it read"
    may_be_fine = _is_low(w) and not _hint(w)
    if w.is_cast and w.phase == "forward":
        return f"{begin}what {place} reads did not fit into {w.format}, and its cast made an inf"
    if w.is_cast:
        return f"{begin}the gradient that comes back to {place} did not fit into {w.format}"
    of_finite = f"inf or NaN of finite numbers, in {w.format}"
    if w.phase == "forward":
        made = f"overflowed {w.format}" if may_be_fine else f"made {of_finite}"
        return f"{begin}{place} {made}"
    made = f"handed on a gradient beyond {w.format}" if may_be_fine else f"made a gradient of {of_finite}"
    return f"{begin}{place} {made}"


def _is_low(w: Watched) -> bool:
    return w.format in ("fp16", "e4m3", "e5m2")


def _hint(w: Watched) -> str | None:
    return None if w.is_cast else _HINTS.get((w.phase, _SYNONYMS.get(w.op, w.op)))


def _is_the_scales(s: Sighting, run: Run) -> bool:
    """Was it the loss scale alone? Then there have been good updates, with a smaller one."""
    of_the_scale = s.watched.phase == "scaled" or (s.watched.phase == "backward" and _is_low(s.watched))
    return of_the_scale and s.num_made > 0 and run.has_settled and run.scale < s.smallest_scale


def _place(w: Watched) -> str:
    """"`linear` in layers.0 (model.py:12: return self.l(x))"."""
    if not w.op:
        return f"the input {w.name}" if w.name else "memory that several outputs share"
    name = w.op.removeprefix("higher_order::").removeprefix("fxamp::")
    code = w.code if len(w.code) <= MAX_CODE else f"{w.code[: MAX_CODE - 3]}..."
    line = ": ".join(part for part in (w.where, code) if part)
    return f"`{name}`" + (f" in {w.module}" if w.module else "") + (f" ({line})" if line else "")


MAX_CODE: Final = 64
"""Characters of the user's line that are shown."""


def _way_out(s: Sighting, run: Run, is_calibration: bool) -> str:
    w = s.watched
    if is_calibration:
        return (
            f"Nothing is wrong: the loss scale alone did it, from {s.smallest_scale:g} up, while it looked for its place; "
            "a smaller DynamicScale(init=...) starts nearer to it"
        )
    if w.phase == "input":
        return _of_input(s)
    if w.phase == "arriving":
        return "Look at the loss (a logarithm of 0, a division by 0); compiled with the model, its operations are named"
    if w.phase == "scaled":
        return f"It happens from a loss scale of {s.smallest_scale:g} up: cap it below, DynamicScale(cap=...)"
    rule = f"policy={{{_rule(w)!r}: 'fp32'}} keeps it in fp32"
    hint = _hint(w)
    if not _is_low(w) or s.num_made == 0:
        way_out = hint or "No policy helps, it computes as wide as it was written: look at what it reads"
    elif _is_the_scales(s, run):
        way_out = f"The loss scale alone did it, from {s.smallest_scale:g} up, and it is lower now; if that is often, {rule}"
    elif hint:
        way_out = f"{hint}. If the numbers are only too large for {w.format}, {rule}"
    elif w.phase == "backward" and s.smallest_scale > 1:
        way_out = f"It happens from a loss scale of {s.smallest_scale:g} up; {rule}"
    else:
        way_out = rule
    return way_out + (". Nothing inside of it is watched" if w.hides else "")


def _of_input(s: Sighting) -> str:
    if s.watched.role == "parameter":
        return (
            f"The weights were broken before update {s.first}: go back to a checkpoint, and look at what wrote them without "
            "amp.attach(optimizer)"
        )
    if s.watched.role == "buffer":
        return "Look at what writes it; no running statistics but those of batch norms are kept from an inf"
    return f"Look at the data of update {s.first}; torch.isfinite(x).all() on the host finds such a batch before it is used"


def _rule(w: Watched) -> str:
    """The key of a policy that speaks of this operation, and as little else as can be."""
    if not w.module:
        return w.op
    return f"module:{w.module}" if w.module in optable.TABLE else w.module
