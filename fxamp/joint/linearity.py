"""Which operations do not commute with a factor on the gradients that they read: code of the user's that clips, normalizes or
rounds a gradient, or adds something of its own. What autograd derives is linear."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from fxamp import graph

_NAMES: Final = """
    clamp clamp_min clamp_max hardtanh nan_to_num maximum minimum fmax fmin pow float_power sqrt rsqrt reciprocal square
    exp exp2 expm1 log log2 log10 log1p sigmoid tanh sign sgn round floor ceil trunc frac relu relu6 threshold heaviside
    copysign nextafter lt le gt ge eq ne isnan isinf isclose cumprod prod acos acosh asin asinh atan atan2 atanh cos
    cosh sin sinh tan sinc erf erfc erfinv lgamma digamma polygamma mvlgamma igamma igammac i0 fmod remainder
    floor_divide frexp hypot xlogy logit log_sigmoid_forward logaddexp logaddexp2 logsumexp logcumsumexp softmax
    _softmax _safe_softmax _masked_softmax log_softmax _log_softmax var var_mean glu gelu silu mish elu celu selu
    softplus hardswish hardsigmoid hardshrink softshrink matrix_exp cholesky cholesky_inverse cholesky_solve geqrf orgqr
    ormqr lu_unpack triangular_solve bucketize searchsorted histc histogram histogramdd _histogramdd_bin_edges
    _histogramdd_from_bin_cts _histogramdd_from_bin_tensors bernoulli poisson multinomial renorm embedding_renorm
    _pdist_forward _cdist_forward native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_functional cudnn_batch_norm _fused_rms_norm mse_loss smooth_l1_loss huber_loss
    binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss multi_margin_loss
    multilabel_margin_loss_forward cosine_embedding_loss poisson_nll_loss segment_reduce fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine fake_quantize_per_tensor_affine_cachemask
    fake_quantize_per_channel_affine_cachemask hash_tensor equal allclose dist angle _batch_norm_with_update
    _batch_norm_with_update_functional
"""
"""Some only ask for a sign; it is no loss to ask the true value."""
_NOT_LINEAR: Final = frozenset(getattr(torch.ops.aten, name) for name in _NAMES.split() if hasattr(torch.ops.aten, name))

_FAMILIES: Final = (
    "special_", "linalg_", "_linalg_", "_scaled_dot_product", "_flash_attention", "_efficient_attention",
    "_foreach_", "_ctc_loss", "_weight_norm_interface",
)
"""How names of others begin."""

_FMA: Final = "fma"
"""a * b + c, of the prims. Older versions have none, others register it late."""

_TERMS: Final[Mapping[Any, tuple[int, ...]]] = MappingProxyType({
    getattr(torch.ops.aten, name): places
    for places, names in {
        (0,): "cat stack block_diag addmm addbmm baddbmm addr addmv addcmul addcdiv",
        (0, 1): "add sub rsub add_ sub_ lerp complex select_scatter slice_scatter diagonal_scatter as_strided_scatter",
        (0, 2): "index_put _unsafe_index_put masked_fill masked_scatter put constant_pad_nd",
        (0, 3): "scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce _unsafe_masked_index "
        "_unsafe_masked_index_put_accumulate",
        (1,): "copy fill",
        (1, 2): "where",
        (2,): "convolution",
    }.items()
    for name in names.split()
})  # fmt: skip
"""Operations that add up, or put together, and where what they do it with stands. Linear in all of it together."""

_SUMS_OF_PRODUCTS: Final = "addmm addbmm baddbmm addr addmv addcmul addcdiv convolution"
_MULTIPLY: Final = frozenset(getattr(torch.ops.aten, name) for name in _SUMS_OF_PRODUCTS.split())
"""Those that also multiply what stands behind."""

_CASTS: Final = (torch.ops.prims.convert_element_type, torch.ops.aten._to_copy, torch.ops.aten.to)

_MAKERS: Final = """
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
    new_empty_strided uniform normal normal_functional cauchy exponential geometric log_normal
"""
_VALUELESS: Final = frozenset(getattr(torch.ops.aten, name) for name in _MAKERS.split() if hasattr(torch.ops.aten, name))


def reads_values(node: fx.Node) -> bool:
    """Does it read its operands, or only their shape and format?"""
    return getattr(node.target, "overloadpacket", None) not in _VALUELESS


def is_not_linear(node: fx.Node, gradients: Collection[fx.Node]) -> bool:
    """Is what it makes of gradients another one, if a factor is put before it instead of behind it? `gradients`: those of its
    operands that are some."""
    target: Any = node.target
    packet: Any = getattr(target, "overloadpacket", None)
    if packet is None or target.namespace not in ("aten", "prims"):
        return False  # a body of its own, or somebody's backward
    name = packet.__name__
    if "backward" in name:  # those of PyTorch's take the gradient first, but for recurrent layers
        return "rnn" not in name and not any(x in gradients for x in _tensors(node.args[:1]))
    if packet is torch.ops.aten.linalg_vector_norm:
        return len(node.args) > 1 and isinstance(node.args[1], (int, float)) and node.args[1] == 0  # it counts
    if packet in _NOT_LINEAR or name.startswith(_FAMILIES):
        return True
    if packet in _CASTS:
        value = graph.value_of(node)
        return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    if packet is torch.ops.aten.div:
        return node.args[1] in gradients or node.kwargs.get("rounding_mode") is not None
    if packet is torch.ops.aten.view and node.target is torch.ops.aten.view.dtype:
        return True
    places = (2,) if name == _FMA else _TERMS.get(packet)
    if places is None:
        return sum(x in gradients for x in _tensors(node.args)) > 1
    if packet is torch.ops.aten.baddbmm and node.kwargs.get("beta") == 0:
        places = ()
    given = [*node.args, *node.kwargs.values()]
    terms = [x for place in places if place < len(given) for x in _leaves(given[place])]
    if "reduce" in name or node.target is torch.ops.aten.scatter.reduce:
        return True
    is_mixed = any(not _is_zero(x) for x in terms if x not in gradients)
    if packet not in _MULTIPLY and name != _FMA:
        return is_mixed
    rest = [x for place, x in enumerate(given) if place not in places]
    num_factors = sum(x in gradients for x in _tensors(rest))
    return is_mixed or num_factors != 1  # none: a product of something else is added


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for part in x:  # pyright: ignore[reportUnknownVariableType]
            yield from _leaves(part)
    elif x is not None:
        yield x


def _tensors(args: Any) -> list[fx.Node]:
    return [x for x in _leaves(args) if isinstance(x, fx.Node)]


def _is_zero(x: Any) -> bool:
    """Is it a number or a tensor of zeros, which no factor changes?"""
    if not isinstance(x, fx.Node):
        return isinstance(x, (int, float)) and x == 0
    packet = getattr(x.target, "overloadpacket", None)
    if packet in (torch.ops.aten.zeros, torch.ops.aten.zeros_like, torch.ops.aten.new_zeros):
        return True
    places = {torch.ops.aten.full: 1, torch.ops.aten.scalar_tensor: 0, torch.ops.aten.full_like: 1, torch.ops.aten.new_full: 2}
    value = x.args[places[packet]] if packet in places else None
    if packet in (torch.ops.aten.expand, torch.ops.aten.view, torch.ops.aten.clone, torch.ops.aten.alias, *_CASTS):
        return _is_zero(x.args[0])
    return isinstance(value, (int, float)) and value == 0
