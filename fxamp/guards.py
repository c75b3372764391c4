"""Numeric guards: why an operation must not compute in a narrow format although its policy allows it. Pure functions.

Two parts. `known` walks a graph once and notes what constants say about its values: all that a mask can hold, the largest
number put into it, the eps that keeps it from zero. `reason` looks at one operation that is about to compute in a format, and
says what would be lost: a constant beyond the format or below it, an eps that would become zero, a sum longer than the format
can count. Shapes that are not known when compiling count as too long.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxamp import formats, graph, optable

MAX_VALUES: Final = 16
"""Sets of values larger than this are not followed: masks hold two, tables of constants many."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What constants in the program say about the values of a tensor."""

    values: frozenset[float] | None = None
    """Every value it can hold; None if unknown."""
    largest: float = 0.0
    """The largest finite magnitude that a constant brought in; the tensor may well hold it."""
    floor: float | None = None
    """The smallest constant that keeps it from zero: 1e-6 for `x.norm() + 1e-6`; None if there is none."""

    def fits(self, dtype: torch.dtype) -> bool:
        """Is every value that it can hold within this format's range?"""
        return self.values is not None and all(math.isinf(v) or abs(v) <= torch.finfo(dtype).max for v in self.values)

    def exists_in(self, dtype: torch.dtype) -> bool:
        """Is every value that it can hold a number of this format, not rounded?"""
        return self.values is not None and all(formats.has(v, dtype) for v in self.values)


UNKNOWN: Final = Known()

Ops = Mapping[fx.Node, str | None]
"""Node -> canonical operation name."""


# ---- what constants say ---------------------------------------------------------------------------------------------------
def known(nodes: Iterable[fx.Node], ops: Ops, written: Collection[str] = ()) -> dict[fx.Node, Known]:
    """What is known of each node's values. Nothing is known of `written` nodes, whose memory somebody else fills."""
    found: dict[fx.Node, Known] = {}
    for node in nodes:
        value = graph.value_of(node)
        rule = _RULES.get(ops.get(node) or "")
        if rule is not None and node.name not in written and isinstance(value, torch.Tensor):
            found[node] = rule(node, found)
    return found


_Found = Mapping[fx.Node, Known]


def _of(argument: Any, found: _Found) -> Known:
    if isinstance(argument, fx.Node):
        return found.get(argument, UNKNOWN)
    return _constant(argument) if _is_number(argument) else UNKNOWN


def _constant(number: float) -> Known:
    value = _rounded(float(number))
    return Known(values=frozenset((value,)), largest=abs(value) if math.isfinite(value) else 0.0)


def _rounded(value: float) -> float:
    """The fp32 number nearest to a Python float."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _is_number(argument: Any) -> bool:
    return isinstance(argument, (int, float)) and not isinstance(argument, bool)


def _limited(values: frozenset[float]) -> frozenset[float] | None:
    return values if len(values) <= MAX_VALUES else None


def _union(parts: Sequence[Known]) -> Known:
    sets = [p.values for p in parts]
    floors = [p.floor for p in parts]
    return Known(
        values=None if any(s is None for s in sets) else _limited(frozenset(itertools.chain(*(s or () for s in sets)))),
        largest=max((p.largest for p in parts), default=0.0),
        floor=None if any(f is None for f in floors) else min(f for f in floors if f is not None),
    )


def _filled(position: int) -> Callable[[fx.Node, _Found], Known]:
    return lambda node, found: _of(graph.argument(node, position, "fill_value"), found)


def _literal(node: fx.Node, found: _Found) -> Known:
    numbers = tree_leaves(graph.argument(node, 0, "data", "s"))
    if not numbers or not all(_is_number(x) or isinstance(x, bool) for x in numbers):
        return UNKNOWN
    return _union([_constant(float(x)) for x in numbers])


def _cast(node: fx.Node, found: _Found) -> Known:
    source, result = node.all_input_nodes[0] if node.all_input_nodes else None, graph.value_of(node)
    if source is None or node.args[:1] != (source,) or result.dtype != torch.float32:
        return UNKNOWN
    held = graph.value_of(source)
    if isinstance(held, torch.Tensor) and held.dtype == torch.bool:
        return Known(values=frozenset((0.0, 1.0)), largest=1.0)
    return found.get(source, UNKNOWN)


def _moved(node: fx.Node, found: _Found) -> Known:
    return _of(node.args[0], found) if node.args else UNKNOWN


def _moved_or_zero(node: fx.Node, found: _Found) -> Known:
    return _union([_moved(node, found), _constant(0)])


def _joined(node: fx.Node, found: _Found) -> Known:
    parts = graph.argument(node, 0, "tensors")
    return _union([_of(x, found) for x in parts]) if isinstance(parts, (list, tuple)) and parts else UNKNOWN


def _padded(node: fx.Node, found: _Found) -> Known:
    mode, value = graph.argument(node, 2, "mode", default="constant"), graph.argument(node, 3, "value")
    return _moved(node, found) if mode != "constant" else _union([_moved(node, found), _of(value or 0.0, found)])


def _with(position: int, name: str, default: Any = None) -> Callable[[fx.Node, _Found], Known]:
    """Of an operation that puts another operand, or a number, into some places of the first."""
    return lambda node, found: _union([_moved(node, found), _of(graph.argument(node, position, name, default=default), found)])


def _looked_up(node: fx.Node, found: _Found) -> Known:
    return _of(graph.argument(node, 1, "weight"), found)


def _where(node: fx.Node, found: _Found) -> Known:
    # As a method, x.where(condition, other), the condition stands in the middle; it holds bools, and decides nothing.
    sides = [a for a in (*node.args, *node.kwargs.values()) if not _is_bool(a)]
    return _union([_of(a, found) for a in sides]) if len(sides) == 2 else UNKNOWN


def _is_bool(argument: Any) -> bool:
    value = graph.value_of(argument) if isinstance(argument, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _arithmetic(compute: Callable[[float, float], float]) -> Callable[[fx.Node, _Found], Known]:
    def rule(node: fx.Node, found: _Found) -> Known:
        if len(node.args) < 2 or node.kwargs:
            return UNKNOWN
        left, right = _of(node.args[0], found), _of(node.args[1], found)
        if left.values is not None and right.values is not None:
            pairs = itertools.product(left.values, right.values)
            results = [_rounded(_try(compute, a, b)) for a, b in pairs]
            return _union([Known(values=frozenset((v,)), largest=abs(v) if math.isfinite(v) else 0.0) for v in results])
        return _partly(compute, left, right)

    return rule


def _try(compute: Callable[[float, float], float], a: float, b: float) -> float:
    try:
        return compute(a, b)
    except (OverflowError, ZeroDivisionError):
        return math.nan


def _partly(compute: Callable[[float, float], float], left: Known, right: Known) -> Known:
    """Of a sum or product of which one side is known, or neither."""
    if compute in (_add, _sub):
        constants = [c for side in (left, right) for c in side.values or ()]
        floor = min((c for c in constants if c > 0), default=None) if compute is _add else None
        return Known(largest=max(left.largest, right.largest), floor=floor)
    factor = right if right.values is not None else left
    other = left if factor is right else right
    if factor.values is None or (compute is _div and factor is left):
        return UNKNOWN
    scale = max((abs(c) for c in factor.values if math.isfinite(c)), default=0.0)
    if compute is _div:
        scale = max((1 / abs(c) for c in factor.values if c != 0), default=0.0)
    return Known(largest=scale * max(other.largest, 1.0))


def _add(a: float, b: float) -> float:
    return a + b


def _sub(a: float, b: float) -> float:
    return a - b


def _mul(a: float, b: float) -> float:
    return a * b


def _div(a: float, b: float) -> float:
    return a / b


def _rsub(a: float, b: float) -> float:
    return b - a


def _clamped(node: fx.Node, found: _Found) -> Known:
    inner, low = _moved(node, found), graph.argument(node, 1, "min", "other")
    numbers: list[Any] = [x for x in (*node.args[1:], *node.kwargs.values()) if _is_number(x)]
    bounds = [abs(x) for x in numbers if math.isfinite(x)]
    floor = float(low) if _is_number(low) and low > 0 else inner.floor
    return Known(largest=max(inner.largest, *bounds, 0.0), floor=floor)


def _power(exponent: float | None) -> Callable[[fx.Node, _Found], Known]:
    def rule(node: fx.Node, found: _Found) -> Known:
        inner, power = _moved(node, found), graph.argument(node, 1, "exponent") if exponent is None else exponent
        if inner.floor is None or not _is_number(power) or power == 0:
            return UNKNOWN
        edge = _try(math.pow, inner.floor, float(power))
        return Known(floor=edge) if power > 0 else Known(largest=edge if math.isfinite(edge) else math.inf)

    return rule


_ADDS_ZEROS: Final = frozenset(("tril", "triu", "diag", "diag_embed", "diagflat", "unfold"))
"""Movement whose result may hold zeros beside the values of its operand."""

_MIXES: Final[Mapping[str, Callable[[fx.Node, _Found], Known]]] = MappingProxyType(
    dict.fromkeys(("select_scatter", "slice_scatter", "diagonal_scatter"), _with(1, "src"))
    | {
        "where": _where,
        "masked_fill": _with(2, "value"),
        "masked_scatter": _with(2, "source"),
        "index_copy": _with(3, "source"),
        "pad": _padded,
        "constant_pad_nd": _with(2, "value", 0.0),
        "embedding": _looked_up,
        "getitem": lambda node, found: _moved(node, found) if isinstance(node.args[0], fx.Node) else UNKNOWN,
    }
)
"""Movement whose result holds other values than those of its first operand."""

_FORGETS: Final = frozenset(("cartesian_prod", "repeat_interleave", "max_unpool1d", "max_unpool2d", "max_unpool3d"))
"""Movement of several operands, or that counts, of which nothing is followed."""

MOVES_ALL: Final = frozenset(optable.MOVEMENT.split()) - _ADDS_ZEROS - _MIXES.keys() - _FORGETS
"""Movement whose result holds values of its first operand and nothing else."""

_RULES: Final[Mapping[str, Callable[[fx.Node, _Found], Known]]] = MappingProxyType(
    dict.fromkeys(MOVES_ALL, _moved)
    | dict.fromkeys(_ADDS_ZEROS, _moved_or_zero)
    | dict.fromkeys(("to", "float", "type_as", "type", "_to_copy"), _cast)
    | dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda node, found: _constant(0))
    | dict.fromkeys(("ones", "ones_like", "new_ones"), lambda node, found: _constant(1))
    | dict.fromkeys(("cat", "concat", "concatenate", "stack", "hstack", "vstack"), _joined)
    | dict.fromkeys(("clamp", "clip", "clamp_min", "maximum"), _clamped)
    | dict.fromkeys(("tensor", "scalar_tensor"), _literal)
    | dict.fromkeys(("sub", "subtract"), _arithmetic(_sub))
    | dict.fromkeys(("mul", "multiply"), _arithmetic(_mul))
    | dict.fromkeys(("div", "divide", "true_divide"), _arithmetic(_div))
    | _MIXES
    | {
        "add": _arithmetic(_add),
        "rsub": _arithmetic(_rsub),
        "full": _filled(1),
        "full_like": _filled(1),
        "new_full": _filled(2),
        "eye": lambda node, found: Known(values=frozenset((0.0, 1.0)), largest=1.0),
        "sqrt": _power(0.5),
        "rsqrt": _power(-0.5),
        "reciprocal": _power(-1.0),
        "pow": _power(None),
    }
)
"""Operation -> what it does to what is known. Whatever is not listed forgets."""


# ---- the guards -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Call:
    """An operation that is about to compute in a narrow format."""

    node: fx.Node
    op: str
    low: torch.dtype
    """The format that it would compute in."""
    narrowed: frozenset[fx.Node]
    """Operands that are fp32 now and would be rounded to `low` for it: by a cast, or, 0-dim, by the operation itself."""
    saturated: frozenset[fx.Node]
    """Those of them that are cut off at the ends of the format, not rounded to infinity."""
    known: Mapping[fx.Node, Known]
    ops: Ops


def mask_of(node: fx.Node, op: str | None) -> fx.Node | None:
    """The tensor that an attention adds to its scores; None if there is none.

    Of a row, softmax sees differences only. A mask cut off at the ends of the format still gives weight 0 to what it hides
    from a row that sees something: exp(-65504) is 0, in fp32 too. -inf stays -inf.
    """
    mask = graph.argument(node, 3, "attn_mask") if op == "scaled_dot_product_attention" else None
    return mask if isinstance(mask, fx.Node) else None


def reason(call: Call) -> str | None:
    """Why the operation must compute in its traced dtypes instead; None if no guard objects."""
    return next((why for guard in GUARDS if (why := guard(call)) is not None), None)


def constant_beyond(call: Call) -> str | None:
    """`x.masked_fill(mask, -1e9)` in fp16: the constant would be infinite."""
    constants = _constants(call)
    largest = torch.finfo(call.low).max if constants else math.inf
    for c in constants:
        if largest < abs(c) < math.inf and (isinstance(c, float) or call.op in _TAKES_NUMBERS):
            return f"constant {c:g} is beyond {formats.name(call.low)}"
    return None


def constant_below(call: Call) -> str | None:
    """`x.abs() + 1e-12` in fp16: the constant would be zero, and a division by the result not what it was."""
    if call.op not in _TAKES_NUMBERS:
        return None
    smallest = torch.finfo(call.low).smallest_normal
    tensors = (v for x in call.narrowed for v in call.known.get(x, UNKNOWN).values or ())
    for c in (*_constants(call), *tensors):
        if 0 < abs(c) < smallest:
            return f"constant {c:g} is below {formats.name(call.low)}'s smallest normal number, {smallest:.2g}"
    return None


def operand_beyond(call: Call) -> str | None:
    """`baddbmm(mask, q, k)` with a mask that holds the smallest fp32 number."""
    largest = torch.finfo(call.low).max
    for x in graph.operands(call.node) if call.narrowed else ():
        held = call.known.get(x, UNKNOWN).largest
        if held > largest and x in call.narrowed and x not in call.saturated:
            return f"{x.name} may hold {held:g}, beyond {formats.name(call.low)}"
    return None


def operand_below(call: Call) -> str | None:
    """`rsqrt(var + 1e-12)` in fp16: the operand would become zero where its eps was all that it held."""
    if call.op not in _BLOWS_UP_AT_ZERO:
        return None
    smallest = torch.finfo(call.low).smallest_normal
    risky = call.node.args[1:2] if call.op in _DIVISIONS else call.node.args[:1]
    for x in risky:
        if not isinstance(x, fx.Node) or x not in call.narrowed:
            continue
        held = call.known.get(x, UNKNOWN)
        floors = [f for f in (held.floor, *(abs(v) for v in held.values or ())) if f]
        if floors and min(floors) < smallest:
            return f"{x.name} is kept from zero by {min(floors):g}, below {formats.name(call.low)}'s smallest normal number"
    return None


def eps_of_a_norm(call: Call) -> str | None:
    """An eps that the format does not hold (`normalize`), or whose inverse root it does not hold (`layer_norm`)."""
    if call.op not in _EPS:
        return None
    position, default, form = _EPS[call.op]
    eps = graph.argument(call.node, position, "eps", default=default)
    if not isinstance(eps, float) or eps <= 0:
        return None
    info = torch.finfo(call.low)
    if form == "rounded" and eps < info.smallest_normal:
        return f"its eps {eps:g} is below {formats.name(call.low)}'s smallest normal number, {info.smallest_normal:.2g}"
    if form == "inverse root" and eps**-0.5 > info.max:
        return f"its eps {eps:g} allows a factor of {eps**-0.5:.2g}, beyond {formats.name(call.low)}"
    return None


def long_reduction(call: Call) -> str | None:
    """`softmax` over 4096 values in bf16, which cannot tell 257 from 256."""
    length = _reduced_length(call)
    if length is None:
        return None
    limit = round(2 / torch.finfo(call.low).eps)
    if _is_at_most(length, limit):
        return None
    how_many = str(length) if isinstance(length, int) else "a number of"
    known = "" if isinstance(length, int) else " not known when compiling"
    return f"it adds up {how_many} values{known}, and {formats.name(call.low)} counts to {limit}"


def sum_of_a_mean(call: Call) -> str | None:
    """`x.sum(-1) / n` in a format of smaller range than fp32: the sum may overflow where the mean is small."""
    if call.op != "sum" or not _has_small_range(call.low):
        return None
    for user in call.node.users:
        if call.ops.get(user) in _DIVISIONS and user.args[:1] == (call.node,):
            return f"{user.name} divides it: a mean, whose sum may be beyond {formats.name(call.low)}"
    return None


def squares_of_a_norm(call: Call) -> str | None:
    """`(x * x).mean(-1)` in a format of smaller range than fp32, where `x.pow(2)`, which is the same, computes in fp32."""
    if call.op not in ("mul", "multiply") or not _has_small_range(call.low) or len(set(call.node.args)) != 1:
        return None
    for user in call.node.users:
        if call.ops.get(user) in ("sum", "mean"):
            return f"{user.name} adds it up: squares of a norm, which may be beyond {formats.name(call.low)}"
    return None


def computed_scalar(call: Call) -> str | None:
    """`x / (x.norm() + eps)`: a 0-dim operand decides no format, but is rounded to that of the others inside the operation."""
    if not call.narrowed or not _has_small_range(call.low):
        return None
    for x in graph.operands(call.node):
        value = graph.value_of(x)
        is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
        if is_scalar and x in call.narrowed and call.known.get(x, UNKNOWN).values is None and _is_computed(x, call.ops):
            return f"{x.name}, a single fp32 number computed here, may be beyond {formats.name(call.low)}"
    return None


GUARDS: Final = (
    constant_beyond,
    constant_below,
    eps_of_a_norm,
    operand_beyond,
    operand_below,
    long_reduction,
    sum_of_a_mean,
    squares_of_a_norm,
    computed_scalar,
)

_DIVISIONS: Final = frozenset(("div", "divide", "true_divide"))

_TAKES_NUMBERS: Final = _DIVISIONS | frozenset(
    ("add", "sub", "subtract", "rsub", "mul", "multiply", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum")
    + ("where", "masked_fill", "threshold", "pad", "addcmul", "addcdiv", "index_put")
)
"""Operations whose numbers are values, not sizes or positions."""

_BLOWS_UP_AT_ZERO: Final = _DIVISIONS | frozenset(("reciprocal", "rsqrt", "sqrt", "log", "log2", "log10", "pow"))
"""Operations that are infinite, or have an infinite slope, at zero: divisions in their second operand, the others in the
first."""

_EPS: Final = MappingProxyType(
    {
        "layer_norm": (4, 1e-5, "inverse root"),
        "group_norm": (4, 1e-5, "inverse root"),
        "rms_norm": (3, None, "inverse root"),
        "normalize": (3, 1e-12, "rounded"),
        "cosine_similarity": (3, 1e-8, "rounded"),
        "pairwise_distance": (3, 1e-6, "rounded"),
    }
)
"""Normalisation -> (position of eps, its default, how it is used). Kernels of layer_norm and its kin add eps in fp32, but keep
the inverse root of the variance in the format of the input, for the backward; the others round eps itself."""

_REDUCES_DIMS: Final = frozenset(
    ("sum", "nansum", "mean", "nanmean", "cumsum", "cumprod", "logcumsumexp", "logsumexp", "prod")
    + ("softmax", "log_softmax", "softmin")
)
"""Operations that add up values along the dimensions of their second argument, `dim`."""

_REDUCES_ALL: Final = frozenset(
    ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy")
    + ("binary_cross_entropy_with_logits", "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss")
    + ("hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss")
)
"""Operations that add up all values."""


def _constants(call: Call) -> list[float]:
    return [a for a in graph.constants(call.node) if _is_number(a)]


def _reduced_length(call: Call) -> Any:
    """How many values (int or SymInt) an operation adds up; None if it adds up none."""
    if (call.op not in _REDUCES_DIMS and call.op not in _REDUCES_ALL) or not call.node.all_input_nodes:
        return None
    if call.node.kwargs.get("reduction") == "none":
        return None
    value = graph.value_of(call.node.all_input_nodes[0])
    if not isinstance(value, torch.Tensor):
        return None
    given = graph.argument(call.node, 1, "dim") if call.op in _REDUCES_DIMS else None
    dims: Sequence[Any] = (given,) if isinstance(given, int) else given if isinstance(given, (tuple, list)) else ()
    if not dims or not all(isinstance(d, int) for d in dims) or value.dim() == 0:
        return value.numel()
    return math.prod(value.shape[d] for d in dims)


def _is_at_most(length: Any, limit: int) -> bool:
    """Is it so for every shape that the graph will serve? Adds no guard."""
    if isinstance(length, int):
        return length <= limit
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy: half a second at import

    return statically_known_true(length <= limit)


@functools.cache
def _has_small_range(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).smallest_normal > torch.finfo(torch.float32).smallest_normal


def _is_computed(node: fx.Node, ops: Ops) -> bool:
    """Does it come from arithmetic in the graph, not from an input (a learned temperature) by way of moves and casts?"""
    while node.op not in ("placeholder", "get_attr"):
        if ops.get(node) not in MOVES_ALL and ops.get(node) not in ("to", "float", "type_as") or not node.all_input_nodes:
            return True
        node = node.all_input_nodes[0]
    return False
