"""Functions that fxamp puts into graphs, each with its eager meaning. Importing this module registers them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes


@torch.library.custom_op("fxamp::round_to", mutates_args=())
def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, as a call that no compiler sees into: what comes out has been rounded, whatever is fused around it."""
    return x.to(dtype, copy=True)


@round_to.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


ROUND_TO: Final = torch.ops.fxamp.round_to.default
"""What a graph calls."""


# ---- what overflowed -----------------------------------------------------------------------------------------------------
torch.library.define("fxamp::largest", "(Tensor[] gradients, int[] slots, int num_slots) -> Tensor")


@torch.library.impl("fxamp::largest", "CompositeExplicitAutograd")
def largest(gradients: list[Tensor], slots: list[int], num_slots: int) -> Tensor:
    """The largest magnitude among the numbers of each gradient, inf or NaN where it holds one.

    One call for all of them, which no compiler sees into: what it reads lies in memory, rounded and overflowed.

    Args: gradients: floating or complex, of any shape; slots: for each, where in the result it goes; several may go to one.
    Returns: fp32 [num_slots], 0 in slots without a gradient.
    """
    if slots == [*range(len(slots))] and _is_plain(gradients):
        largest_of, num_rest = torch._foreach_norm(gradients, math.inf, dtype=torch.float32), num_slots - len(slots)
        rest = [torch.zeros((), device=gradients[0].device)] * num_rest if num_rest else []
        return torch.stack([*largest_of, *rest])
    parts = _parts(gradients, slots)
    largest_of = norms([numbers for _, numbers in parts], math.inf)
    values = [(slot, norm) for (slot, _), norm in zip(parts, largest_of, strict=True)]
    return _in_slots(values, num_slots, gradients[0].device)


@torch.library.register_fake("fxamp::largest")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(gradients: list[Tensor], slots: list[int], num_slots: int) -> Tensor:
    return torch.empty((num_slots,), dtype=torch.float32, device=gradients[0].device)  # the first one may be sparse


LARGEST: Final = torch.ops.fxamp.largest.default
"""What a graph calls."""


def _is_plain(tensors: list[Tensor]) -> bool:
    """Are all of one 16- or 32-bit floating format, on one device, dense, and none without numbers? Costs the host less than
    what has to be done where one is not."""
    (_, dtype, layout), *others = {(x.device, x.dtype, x.layout) for x in tensors}
    is_one_call = not others and layout == torch.strided and dtype in (torch.float32, torch.float16, torch.bfloat16)
    return is_one_call and all(map(Tensor.numel, tensors))


def numbers_of(x: Tensor) -> Tensor:
    """The real numbers that a tensor, sparse or complex, stores."""
    x = (x.coalesce().values() if x.is_sparse else x).resolve_conj().resolve_neg()
    return torch.view_as_real(x) if x.is_complex() else x


def _parts(gradients: list[Tensor], slots: list[int]) -> list[tuple[int, Tensor]]:
    """(slot, numbers) of the gradients that hold any."""
    parts = [(slot, numbers_of(x)) for slot, x in zip(slots, gradients, strict=True)]
    return [(slot, numbers) for slot, numbers in parts if numbers.numel() > 0]


def _in_slots(values: list[tuple[int, Tensor]], num_slots: int, device: torch.device) -> Tensor:
    """fp32 [num_slots], of fp32 [] for slots: the largest where several are for one, 0 where none is."""
    found: dict[int, Tensor] = {}
    for slot, value in values:
        here = value if value.device == device else value.to(device, non_blocking=True)
        found[slot] = torch.maximum(found[slot], here) if slot in found else here
    zero = torch.zeros((), device=device)
    return torch.stack([found.get(slot, zero) for slot in range(num_slots)])


def norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """The norm of each, fp32 []; `order`: 1, 2 or inf. On CUDA a few launches for all that have one dtype: a list of several
    would go tensor by tensor."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        places.setdefault((x.device, x.dtype), []).append(i)
    found: dict[int, Tensor] = {}
    for (_, dtype), those in places.items():
        here = [tensors[i] for i in those]
        if dtype == torch.float64:
            found |= zip(those, map(to_fp32, torch._foreach_norm(here, order)), strict=True)
        else:
            found |= zip(those, torch._foreach_norm(here, order, dtype=torch.float32), strict=True)
    return [found[i] for i in range(len(tensors))]


def to_fp32(x: Tensor) -> Tensor:
    """Finite numbers stay finite: what fp64 holds may be beyond fp32."""
    if x.dtype != torch.float64:
        return x.float()
    limit = torch.finfo(torch.float32).max
    return torch.where(x.isinf(), x, x.clamp(max=limit)).float()


torch.library.define("fxamp::overflowed_regions", "(Tensor largest, int[] regions, int num_regions) -> Tensor")


@torch.library.impl("fxamp::overflowed_regions", "CompositeExplicitAutograd")
def overflowed_regions(largest: Tensor, regions: list[int], num_regions: int) -> Tensor:
    """Which regions of a model made an inf or a NaN of finite gradients, from what entered and what left each part of them.

    Args: largest: fp32 [2 * parts], for each part the largest magnitude that entered, then the one that left, as `largest`
        gives them; regions: of each part, 0 and up.
    Returns: fp32 [num_regions], 1 or 0.
    """
    is_good = torch.isfinite(largest.view(len(regions), 2))
    made = (is_good[:, 0] & ~is_good[:, 1]).float()
    found = largest.new_zeros(num_regions)
    for part, region in enumerate(regions):
        torch.maximum(found[region], made[part], out=found[region])
    return found


@torch.library.register_fake("fxamp::overflowed_regions")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(largest: Tensor, regions: list[int], num_regions: int) -> Tensor:
    return largest.new_empty((num_regions,))


OVERFLOWED_REGIONS: Final = torch.ops.fxamp.overflowed_regions.default
"""What a graph calls."""


SMALLEST_NORMAL: Final = torch.finfo(torch.float16).smallest_normal
"""Below it fp16 loses precision, then everything."""

torch.library.define("fxamp::lost_shares", "(Tensor[] gradients, Tensor scale, int[] slots, int num_slots) -> Tensor")


@torch.library.impl("fxamp::lost_shares", "CompositeExplicitAutograd")
def lost_shares(gradients: list[Tensor], scale: Tensor, slots: list[int], num_slots: int) -> Tensor:
    """The share of each gradient's numbers that are 0 or, scaled, below the smallest normal number of fp16.

    Args: as in `largest`; scale: fp32 [], what the gradients were scaled with on their way.
    Returns: fp32 [num_slots], the largest share in slots with several gradients, 0 in those without one.
    """
    def share(numbers: Tensor) -> Tensor:
        return (numbers.abs() * scale.to(numbers.device) < SMALLEST_NORMAL).to(torch.float32).mean()

    shares = [(slot, share(numbers)) for slot, numbers in _parts(gradients, slots)]
    return _in_slots(shares, num_slots, gradients[0].device)


@torch.library.register_fake("fxamp::lost_shares")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(gradients: list[Tensor], scale: Tensor, slots: list[int], num_slots: int) -> Tensor:
    return torch.empty((num_slots,), dtype=torch.float32, device=gradients[0].device)  # the first one may be sparse


LOST_SHARES: Final = torch.ops.fxamp.lost_shares.default
"""What a graph calls."""


# ---- attention ----------------------------------------------------------------------------------------------------------
# Shapes: B batch dimensions (any number, heads among them), L queries, S keys, E and V sizes of a head.
torch.library.define(
    "fxamp::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False, int[]? kernels=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# Autograd and compilers see the parts of a composite, and PyTorch's caches take it: it is a name, not a Python function.
@torch.library.impl("fxamp::attention", "CompositeImplicitAutograd")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernels: list[int] | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` of low operands whose products are low also where no fused kernel takes it.

    There PyTorch itself computes both products, and their gradients, in fp32. Where only the strides of an operand keep the
    fused kernels away (a mask expanded along the keys), they get a copy of it in the strides that they want.

    Args and result: as of `torch.nn.functional.scaled_dot_product_attention`; `kernels`: those that are allowed, as values of
    `SDPBackend`, the preferred first; None: as the process has it.
    """
    allowed = contextlib.nullcontext() if kernels is None else sdpa_kernel(list(map(SDPBackend, kernels)), set_priority=True)
    with allowed:
        return _attention(
            (query, key, value, attn_mask, dropout_p, is_causal), {"scale": scale, "enable_gqa": enable_gqa}
        )


def _attention(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """As `attention`, by the kernels that are allowed at this moment."""
    query, key, value = arguments[:3]
    is_empty = any(size == 0 for x in (query, key, value) for size in x.shape)
    if not is_empty and options["enable_gqa"] and _takes_math(*arguments, **options):
        key, value = _repeated(query, key, value)  # some fused kernels take all but groups
        arguments, options = (query, key, value, *arguments[3:]), options | {"enable_gqa": False}
    if not is_empty and _takes_math(*arguments, **options):
        dense = tuple(_with_dense_rows(x) if isinstance(x, Tensor) else x for x in arguments)
        if _takes_math(*dense, **options):
            return attention_by_products(*arguments, **options)
        arguments = dense
    return F.scaled_dot_product_attention(*arguments, **options)


ATTENTION: Final = torch.ops.fxamp.attention.default
"""What a graph calls."""


def attention_by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as two products of low operands, as exact as a fused kernel's (FlashAttention: Dao et al., 2022).

    Scores and softmax are fp32 and never rounded; rounded are the probabilities, which are what the backward keeps, and the
    gradients that enter a product. Rows that are masked altogether give 0, as in PyTorch.

    Args: query [B, L, E], key [B, S, E], value [B, S, V], all in one low format; the rest as in `attention`.
    Returns: [B, L, V] in the operands' format.
    """
    if enable_gqa:
        key, value = _repeated(query, key, value)
    scores = _batched(_Scores.apply, query, key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights: Tensor = _LowSoftmax.apply(scores, query.dtype)
    if dropout_p > 0:  # drawn in fp32, as PyTorch does: a mask drawn in a low format is another mask
        weights = torch.dropout(weights.float(), dropout_p, train=True).to(query.dtype)
    return _batched(torch.bmm, weights, value)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each of the queries'."""
    repeated = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    return next(repeated), next(repeated)


class _Scores(torch.autograd.Function):
    """The fp32 products of low queries [N, L, E] and keys [N, S, E], as matrix units accumulate them; what the backward
    multiplies is low again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(query, key)
        if query.device.type == "cuda":
            return torch.bmm(query, key.mT, out_dtype=torch.float32)
        return torch.bmm(query.float(), key.mT.float())  # other devices have no product of two formats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key = ctx.saved_tensors
        grad = grad.to(query.dtype)
        return torch.bmm(grad, key), torch.bmm(grad.mT, query)


class _LowSoftmax(torch.autograd.Function):
    """Softmax of fp32 scores, rounded; the backward keeps the rounded result, which is there for the next product."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dtype: torch.dtype) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights = torch._safe_softmax(scores, -1).to(dtype)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weights,) = ctx.saved_tensors
        weighted = grad.float() * weights.float()
        return weighted - weights.float() * weighted.sum(-1, keepdim=True), None


def _batched(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """A product of operands with one batch dimension, for operands with any that broadcast."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = product(*(x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (a, b)))
    return out.reshape(*batch, *out.shape[-2:])


_CHOICE: Final = torch.ops.aten._fused_sdp_choice.default
_ORDER_UNTIL_THEN: Final = [1, 2, 0, 3, 4]
"""PyTorch's order of the kernels of attention, as values of `SDPBackend`, until its first choice."""


def _takes_math(query: Tensor, *arguments: Any, **options: Any) -> bool:
    """Does `scaled_dot_product_attention` fall back to its decomposition for these arguments?"""
    device_key = torch._C._dispatch_key_for_device(query.device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_CHOICE.name(), device_key):
        return False
    # The kernel itself: the dispatcher would ask a fake tensor's shape rule, which knows no CPU kernels.
    choice = _CHOICE._op_dk(getattr(DispatchKey, device_key), query, *arguments, **options)
    return choice == SDPBackend.MATH.value


def allowed_kernels() -> list[SDPBackend]:
    """The kernels of attention that are switched on, the preferred first: what is traced depends on them."""
    if torch.cuda.is_initialized():
        _settle_order()
    return _cur_sdpa_kernel_backends(with_priority=True)


@functools.cache
def _settle_order() -> None:
    """Lets PyTorch write its own order of kernels, which it does at its first choice on CUDA in a process, whatever order has
    been asked for by then: what is asked for afterwards holds."""
    asked = torch._C._get_sdp_priority_order()
    with _disable_current_modes():
        tiny = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        _CHOICE(tiny, tiny, tiny)
    if asked != _ORDER_UNTIL_THEN:
        torch._C._set_sdp_priority_order(asked)


def _with_dense_rows(x: Tensor) -> Tensor:
    """`x` with a last dimension of stride 1; what is repeated along other dimensions stays so."""
    if x.stride(-1) == 1:
        return x
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])
    return x[once].contiguous().expand(x.shape)
