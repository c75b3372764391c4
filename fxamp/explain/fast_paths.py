"""Which products, convolutions and attentions can take the fast kernels, and what keeps the others away from them.

Facts of the rewritten graph alone (formats, sizes, strides, masks), judged by the rules of CUDA's libraries; so the verdicts
are the same on a machine without a GPU, and on a warm start. What really ran is measured by `Amp.profile`.

Sources of the rules. Alignment: cuBLAS documentation, "Tensor Core Usage". Sizes of a tile: PTX ISA, `mma.m16n8k16`.
Attention: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Layouts of convolutions: cuDNN developer guide,
"Tensor Core Operations", and `decide_layout_opt` in torch/_inductor/graph.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import fx
from torch._subclasses import FakeTensor

from fxamp import capture, formats, graph, optable, tf32
from fxamp.capture import Captured
from fxamp.plan import TRACED, Decision, Plan
from fxamp.rewrite import masks, padding
from fxamp.rewrite.attention import arguments
from fxamp.rewrite.groups import Repetitions

Kind = Literal["matrix product", "convolution", "attention"]

ALIGNMENT_BYTES: Final = 16
"""What the contiguous sides of a product, and the distances of their rows, are multiples of: 8 numbers of bf16, 16 of fp8."""

SMALLEST_TILE: Final = 16
"""Rows, columns and terms below which a product is mostly padding on matrix units."""

MAX_FLASH_HEAD: Final = 256
"""Numbers in a head that FlashAttention takes."""


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """One operation. Of a product or an attention the verdict is on its gradients too, where the graph trains."""

    kind: Kind
    op: str
    """"linear"."""
    computes: str
    """The format of its operands: "bf16", "tf32", "fp32"."""
    sizes: str
    """"[8192, 768] @ [768, 50257]"."""
    is_taken: bool
    why: str
    """What keeps the fast kernels away; of what is taken: at what price, "" if there is none."""
    advice: str
    """What to change; "" if there is nothing."""
    where: str
    """The user's line, "train.py:33"."""
    code: str
    """The text of that line."""
    node: str

    def __str__(self) -> str:
        verdict = "fast path taken" if self.is_taken else "missed"
        why = f"{', ' if self.is_taken else ', because '}{self.why}" if self.why else ""
        return f"{self.op} {self.sizes} in {self.computes} at {self.where}: {verdict}{why}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one operation."""

    sizes: str
    why_missed: str = ""
    price: str = ""
    """Of the fast path, if it is taken."""
    advice: str = ""


def find(captured: Captured, plan: Plan, rewritten: fx.GraphModule, *, lower: str = "inductor") -> tuple[FastPath, ...]:
    """The verdicts on a graph and the graphs nested in it, in program order.

    Args: captured, plan: what was decided, and why; rewritten: the same graph as fxamp's passes left it; lower: as of
        `Options`, for what Inductor does about layouts.
    """
    if captured.ambient is not None:  # the formats are autocast's, and on no record
        return ()
    tensors = (t for node in captured.gm.graph.nodes for t in graph.tensors_of(graph.value_of(node)))
    fake = next((t for t in tensors if isinstance(t, FakeTensor)), None)
    with contextlib.nullcontext() if fake is None else graph.quietly(fake.fake_mode):
        return tuple(_find(captured, plan, rewritten, lower))


def _find(captured: Captured, plan: Plan, gm: fx.GraphModule, lower: str) -> Iterator[FastPath]:
    nodes = list(gm.graph.nodes)
    layouts, proofs, repetitions = _Layouts(nodes, captured.trains, lower), masks.Proofs(captured.gm), Repetitions(gm)
    before = {node.name: node for node in captured.gm.graph.nodes}
    for node in nodes:
        op = capture.name_of(node) or ""
        kind = KINDS.get(op)
        if kind is None or not isinstance(graph.value_of(node), torch.Tensor):
            continue
        if kind == "attention":
            verdict = _attention(node, op, proofs, repetitions, before.get(node.name))
        else:
            verdict = _convolution(node, op, layouts) if kind == "convolution" else _product(node, op)
        if verdict is None:
            continue
        decision = plan.decisions.get(node.name)
        held = _held(node)
        is_asked = plan.variant == "tf32" and held == {TRACED}
        by_switch = _switched_on(kind) if held == {TRACED} and not is_asked else ""
        is_tf32 = is_asked or bool(by_switch)
        computes = "tf32" if is_tf32 else "+".join(sorted(map(formats.name, held)))
        why = f"precision={plan.variant!r}" if plan.low == TRACED else decision.why if decision else ""
        slow = (None if is_tf32 else _wide(held, why, op, plan, decision)) or _emulated(computes, captured.device)
        missed, advice = slow or (verdict.why_missed, verdict.advice)
        where, code = (decision.facts.where, decision.facts.code) if decision else capture.source_line(node)
        yield FastPath(
            kind=kind,
            op=decision.op if decision and decision.op else op,
            computes=computes,
            sizes=verdict.sizes,
            is_taken=not missed,
            why=missed or verdict.price or by_switch,
            advice=advice,
            where=where,
            code=code,
            node=node.name,
        )
    for path, body in plan.bodies.items():
        yield from _find(captured.bodies[path], body, graph.body(gm, path), lower)


def _held(node: fx.Node) -> set[torch.dtype]:
    """The formats of the floating-point operands of a call."""
    tensors = [t for x in node.all_input_nodes for t in graph.tensors_of(graph.value_of(x))]
    return {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}


_SWITCHES: Final[Mapping[Kind, tuple[str, str]]] = MappingProxyType({
    "matrix product": ("matmul", "cuda.matmul.fp32_precision, which torch.set_float32_matmul_precision sets"),
    "convolution": ("conv", "cudnn.conv.fp32_precision, which is on by default"),
})  # fmt: skip
"""Which of PyTorch's switches for TF32 decides, as `tf32.is_on` and as people know it."""
_CONVOLUTIONS: Final = frozenset(
    name for name in optable.AUTOCAST_LOW.split() if "conv" in name and name != "conv_tbc"
)
_NAMES: Final[Mapping[Kind, Iterable[str]]] = MappingProxyType({
    "matrix product": optable.PRODUCTS.split(),
    "convolution": _CONVOLUTIONS,
    "attention": ("scaled_dot_product_attention", "fxamp::attention"),
})  # fmt: skip
KINDS: Final[Mapping[str, Kind]] = MappingProxyType({name: kind for kind in _NAMES for name in _NAMES[kind]})
"""Operations that are looked at."""


# ---- formats ------------------------------------------------------------------------------------------------------------
def _wide(
    held: set[torch.dtype], why: str, op: str, plan: Plan, decision: Decision | None
) -> tuple[str, str] | None:
    """(why the operands are wider than what matrix units take, what to change), or None."""
    wide = [dtype for dtype in held if not formats.is_narrow(dtype)]
    if not wide:
        return None
    reason = f"it computes in {formats.name(wide[0])}, where matrix units want less" + (f" ({why})" if why else "")
    if wide != [TRACED]:
        return reason, "compute it in fp32, if the program does not need more"
    if plan.low == TRACED:
        return reason, "a lower precision, or precision='tf32'"
    if decision and decision.rule:
        return reason, "nothing, if the rule is meant"
    return reason, f"a rule 'op:{op}=low', where the operation allows it; or precision='tf32'"


def _switched_on(kind: Kind) -> str:
    """The switch by which fp32 products of a kind run as TF32 now; "" if they do not."""
    operation, setting = _SWITCHES.get(kind, ("", ""))
    return f"by torch.backends.{setting}" if operation and tf32.is_on(operation) else ""


def _emulated(computes: str, device: torch.device) -> tuple[str, str] | None:
    """(why a GPU does not compute in this format, what to change), or None."""
    if device.type != "cuda" or computes not in ("bf16", "fp16", "tf32"):
        return None
    native, reason = formats.native_support(device, computes)
    return None if native else (f"this device has no {computes} matrix units ({reason})", "use fp16, or another device")


# ---- matrix products ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Operand:
    """A factor [rows, columns] of a product, without its batch dimensions."""

    rows: Any
    columns: Any
    row_stride: Any
    column_stride: Any

    @property
    def contiguous_extent(self) -> Any:
        """How long what lies side by side is."""
        return self.columns if self.column_stride == 1 else self.rows

    @property
    def leading_stride(self) -> Any:
        """From one of those to the next."""
        return self.row_stride if self.column_stride == 1 else self.column_stride


def _product(node: fx.Node, op: str) -> Verdict | None:
    """The verdict on a product of two matrices, forward and backward; None for what is not one."""
    factors = _factors(node, op)
    if factors is None:
        return None
    a, b, itemsize = factors
    m, n, k = a.rows, b.columns, a.columns
    sizes = f"[{m}, {k}] @ [{k}, {n}]"
    known = {name: size for name, size in (("m", m), ("n", n), ("k", k)) if type(size) is int}
    small = [f"{name} = {size}" for name, size in known.items() if size < SMALLEST_TILE]
    if small:
        return Verdict(
            sizes=sizes,
            why_missed=f"{' and '.join(small)}, where matrix units have tiles of {SMALLEST_TILE}",
            advice="compute several of them in one product, if the program has them; it is bound by memory, not by arithmetic",
        )
    step = ALIGNMENT_BYTES // itemsize
    # Rows of the result, and of the gradients, are as long as n and k; factors lie as they lie.
    lengths = {"n": n, "k": k} | {_side(a, ("m", "k")): a.contiguous_extent, _side(b, ("k", "n")): b.contiguous_extent}
    odd = {name: size for name, size in lengths.items() if type(size) is int and size % step}
    if odd:
        larger = ", ".join(f"{name} = {-(-size // step) * step}" for name, size in odd.items())
        return Verdict(
            sizes=sizes,
            why_missed=f"{' and '.join(f'{name} = {size}' for name, size in odd.items())}, no multiple of {step}",
            advice=f"make it a multiple of {step} in the model ({larger}; 64 is better still), or relaxed='padded_logits' "
            "where a cross entropy reads it"
            if odd.get("n", 0) >= padding.MIN_CLASSES
            else f"make it a multiple of {step} in the model ({larger}); 64 is better still",
        )
    strides = [x.leading_stride for x in (a, b) if type(x.leading_stride) is int and x.leading_stride % step]
    if strides:
        return Verdict(
            sizes=sizes,
            why_missed=f"rows of a factor are {strides[0]} numbers apart, no multiple of {step}",
            advice="it is a view of a larger tensor: make the last dimension of that a multiple, or the view contiguous()",
        )
    return Verdict(sizes=sizes)


def _side(x: _Operand, names: tuple[str, str]) -> str:
    """Which of its two sides lies side by side in memory."""
    return names[1] if x.column_stride == 1 else names[0]


_POSITIONS: Final = {"addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1, "addr": 1}
"""Where the first factor stands, if an addend stands before it."""

_NAMES_OF_FACTORS: Final = ("mat1", "batch1", "vec1", "weight", "mat2", "other", "batch2", "vec", "vec2")
"""Of those that may be given by keyword, left before right; the first one never is without the second."""


def _factors(node: fx.Node, op: str) -> tuple[_Operand, _Operand, int] | None:
    """(left factor, right factor, bytes of a number)."""
    first = _POSITIONS.get(op, 0)
    given = [*node.args, *(node.kwargs[name] for name in _NAMES_OF_FACTORS if name in node.kwargs)]
    values = [graph.value_of(x) for x in given[first : first + 2] if isinstance(x, fx.Node)]
    if op == "einsum":
        return _factors_of_einsum(node)
    if len(values) != 2 or not all(isinstance(t, torch.Tensor) and t.dim() > 0 for t in values):
        return None
    a, b = values
    if op == "linear":
        rows = a.numel() // a.shape[-1] if all(type(size) is int for size in a.shape) and a.shape[-1] else "rows"
        left = _Operand(rows=rows, columns=a.shape[-1], row_stride=_row_stride(a), column_stride=a.stride(-1))
        right = b.mT if b.dim() > 1 else b.unsqueeze(-1)
        return left, _operand(right), a.element_size()
    if op in ("mv", "addmv") or (op == "matmul" and b.dim() == 1):
        b = b.unsqueeze(-1)
    if op == "addr":
        a, b = a.unsqueeze(-1), b.unsqueeze(0)
    if a.dim() == 1:
        a = a.unsqueeze(0)
    left = _operand(a)
    if op == "matmul" and a.dim() > 2 and b.dim() == 2 and all(type(size) is int for size in a.shape):
        left = _Operand(
            rows=a.numel() // max(a.shape[-1], 1), columns=a.shape[-1], row_stride=_row_stride(a), column_stride=a.stride(-1)
        )  # the batch is folded into the rows
    return left, _operand(b), a.element_size()


def _operand(x: torch.Tensor) -> _Operand:
    return _Operand(rows=x.shape[-2], columns=x.shape[-1], row_stride=x.stride(-2), column_stride=x.stride(-1))


def _row_stride(x: torch.Tensor) -> Any:
    return x.stride(-2) if x.dim() > 1 else x.shape[-1]


def _factors_of_einsum(node: fx.Node) -> tuple[_Operand, _Operand, int] | None:
    """Of a contraction of two operands: it is a product over the labels of each alone, and of both, as if they lay dense."""
    if not node.args:
        return None
    equation, *rest = node.args
    operands = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    values = [graph.value_of(x) for x in operands if isinstance(x, fx.Node)]
    if len(values) != 2 or not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    size = dict(zip(left + right, (*values[0].shape, *values[1].shape), strict=True))
    if not all(type(n) is int for n in size.values()):
        return None

    def extent(labels: set[str]) -> int:
        return torch.Size([size[label] for label in labels]).numel()

    only_left, only_right = set(left) & set(result) - set(right), set(right) & set(result) - set(left)
    both = (set(left) & set(right)) - set(result)
    if not both:
        return None
    m, n, k = extent(only_left), extent(only_right), extent(both)
    a = _Operand(rows=m, columns=k, row_stride=k, column_stride=1)
    b = _Operand(rows=k, columns=n, row_stride=n, column_stride=1)
    return a, b, values[0].element_size()


# ---- convolutions -----------------------------------------------------------------------------------------------------------
class _Layouts:
    """How the images of a graph lie, and what Inductor does about it."""

    def __init__(self, nodes: Sequence[fx.Node], trains: bool, lower: str) -> None:
        self.convolutions = [x for x in nodes if capture.name_of(x) in _CONVOLUTIONS]
        self.declined = "" if lower == "inductor" else f"lower={lower!r} leaves layouts as they are"
        self.declined = self.declined or self._why_declined(nodes, trains)

    def _why_declined(self, nodes: Sequence[fx.Node], trains: bool) -> str:
        """Why Inductor does not lay images out channel by channel; "" if it does. Its rules for graphs that train; those for
        inference weigh the same cases by their arithmetic."""
        weights = [w for x in self.convolutions if (w := _weight(x)) is not None]
        images = [t for x in self.convolutions if (t := _image(x)) is not None]
        if any(not all(type(size) is int for size in t.shape) for t in (*weights, *images)):
            return "Inductor converts no layouts under dynamic shapes"
        if not trains:
            return ""
        if any(_groups(x) > 1 and w.shape[1] > 1 for x, w in zip(self.convolutions, weights, strict=False)):
            return "Inductor converts no layouts where a convolution has groups of several channels"
        if any(w.shape[0] * 2 <= w.shape[1] and w.dim() > 2 and w.shape[2] > 1 for w in weights):
            return "Inductor converts no layouts where a convolution halves its channels or more"
        if all(w.shape[0] <= 64 and w.shape[1] <= 64 for w in weights):
            return "Inductor converts no layouts where all convolutions have 64 channels or fewer"
        return ""


def _image(node: fx.Node) -> torch.Tensor | None:
    value = graph.value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _weight(node: fx.Node) -> torch.Tensor | None:
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    value = graph.value_of(given) if isinstance(given, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _groups(node: fx.Node) -> int:
    position = 8 if capture.name_of(node) in ("convolution", "_convolution") else 6
    given = node.kwargs.get("groups", node.args[position] if len(node.args) > position else 1)
    return given if isinstance(given, int) else 1


def _convolution(node: fx.Node, op: str, layouts: _Layouts) -> Verdict | None:
    image, weight = _image(node), _weight(node)
    if image is None or weight is None:
        return None
    sizes = f"{_text(image.shape)} * {_text(weight.shape)}"
    step = ALIGNMENT_BYTES // weight.element_size()
    if _groups(node) > 1 and weight.shape[1] == 1:
        return Verdict(sizes=sizes, why_missed="it is depthwise: there is no product of matrices in it")
    sides = ("output", "input") if "transpose" in op else ("input", "output")
    channels = zip(sides, (weight.shape[1], weight.shape[0]), strict=True)
    odd = [f"{n} {side} channels" for side, n in channels if type(n) is int and n % step]
    if odd:
        return Verdict(
            sizes=sizes,
            why_missed=f"{' and '.join(odd)}, no multiple of {step}",
            advice="a first layer of 3 channels is a small part of most models; elsewhere choose a multiple",
        )
    wanted = {3: None, 4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
    if wanted is None or image.dim() != weight.dim():
        return Verdict(sizes=sizes)
    lies = [t.is_contiguous(memory_format=wanted) for t in (image, weight)]
    if all(lies):
        return Verdict(sizes=sizes)
    layout = f"{'the weight' if lies[0] else 'images'} in NC{'DHW'[5 - weight.dim() :]}"
    advice = "model.to(memory_format=torch.channels_last), and the same for each batch"
    if layouts.declined:
        return Verdict(sizes=sizes, why_missed=f"{layout}, and {layouts.declined}", advice=advice)
    return Verdict(sizes=sizes, price=f"{layout}, which Inductor makes channels_last, at the price of copies", advice=advice)


def _text(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# ---- attention --------------------------------------------------------------------------------------------------------------
def _attention(
    node: fx.Node, op: str, proofs: masks.Proofs, repetitions: Repetitions, before: fx.Node | None
) -> Verdict:
    given = arguments(node)
    query, key, value = (graph.value_of(given[name]) for name in ("query", "key", "value"))
    sizes = f"{_text(query.shape)}, keys {_text(key.shape)}"
    missed, advice = _rules_of_attention(query, key, value, given, is_own=op == "fxamp::attention")
    if not missed and given.get("attn_mask") is not None:
        missed, advice = _mask(proofs, before)
    dropout = given.get("dropout_p") or 0.0
    price = str(node.meta.get(graph.MEASURED, ""))
    if isinstance(dropout, float) and dropout and not (dropout * 16).is_integer():
        price = f"but not cuDNN's, which drops multiples of 1/16 alone, and this drops {dropout:g}"
    elif not missed and op == "fxamp::attention" and all(repetitions.is_repeated(given[name]) for name in ("key", "value")):
        price = "keys and values are repeated for their groups of queries"
        advice = "relaxed='grouped_queries' repeats nothing"
    return Verdict(sizes=sizes, why_missed=missed, price=price, advice=advice)


def _rules_of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Mapping[str, Any], *, is_own: bool
) -> tuple[str, str]:
    """(why FlashAttention and cuDNN do not take these operands, what to change); ("", "") if they do."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return "the fused kernels want [batch, heads, positions, channels]", "unsqueeze what is missing"
    head = query.shape[-1]
    if _differ(value.shape[-1], head) or (type(head) is int and head > MAX_FLASH_HEAD):
        return (
            f"heads of {head} and {value.shape[-1]} numbers, where FlashAttention wants one size of {MAX_FLASH_HEAD} at most",
            "choose another size of heads",
        )
    heads = [t.shape[1] for t in (query, key, value)]
    if any(_differ(n, heads[0]) for n in heads) and not given.get("enable_gqa"):
        return f"queries, keys and values have {heads} heads", "say enable_gqa=True, which repeats nothing"
    if any(_differ(t.shape[0], query.shape[0]) for t in (key, value)):
        return "the batch is broadcast", "expand() queries, keys and values to one batch"
    if given.get("is_causal") and _differ(query.shape[-2], key.shape[-2]):
        return f"is_causal=True with {query.shape[-2]} queries and {key.shape[-2]} keys", "use one number of both"
    strided = [n for n, t in (("queries", query), ("keys", key), ("values", value)) if t.shape[-1] != 1 and t.stride(-1) != 1]
    if strided and not is_own:
        return f"the channels of {' and '.join(strided)} do not lie side by side", "call contiguous() before"
    return "", ""


def _differ(a: Any, b: Any) -> bool:
    return type(a) is int and type(b) is int and a != b


def _mask(proofs: masks.Proofs, before: fx.Node | None) -> tuple[str, str]:
    """(why an explicit mask is there still, what to change). `before`: the attention as it was captured."""
    obstacle = "a pass made it" if before is None else proofs.obstacle(before)
    if obstacle is None:
        return "an explicit mask, causal or empty by proof", "relaxed='attention_masks' replaces it"
    way_out = "give is_causal=True, or no mask, where that is what it says; flex_attention is for other patterns"
    return f"an explicit mask ({obstacle})", way_out
