"""How each operation is treated, as data: one name -> one class, each row with its source.

LOW     runs in the low precision: its fp32 operands are cast down.
HIGH    runs in fp32: low operands are cast up.
WIDEST  runs in the widest of its operands' formats: low only if all are low.
FOLLOW  moves data or works element by element: takes the format of what it is given.
KEEP    everything else. It gets exactly the dtypes that it was traced with (contract 3), so it needs no row.

Names are those of `torch.ops.aten` where there is one, else of `torch.nn.functional`; in-place forms, methods, operators
and functions have the same name (see `name_of` in capture.py).
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import Final


class OpClass(enum.Enum):
    LOW = "low"
    HIGH = "high"
    WIDEST = "widest"
    FOLLOW = "follow"
    KEEP = "keep"


AUTOCAST_LOW: Final = """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu
    addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention higher_order::flex_attention
"""

PRODUCTS: Final = """
    addmm addmv addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
"""
"""Those of AUTOCAST_LOW that are matrix products and nothing else."""

AUTOCAST_HIGH: Final = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
    prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm
"""

AUTOCAST_WIDEST: Final = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""

BUILTIN_PROMOTION: Final = "cat stack concat concatenate hstack vstack dstack column_stack"

# Composites of torch.nn.functional, of which autocast sees only the parts: the class is that of the part that decides.
COMPOSITE_HIGH: Final = """
    cross_entropy gaussian_nll_loss ctc_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss
    pairwise_distance interpolate upsample softmin gumbel_softmax local_response_norm normalize binary_cross_entropy
    instance_norm grid_sample logcumsumexp linalg_norm cov corrcoef
"""

MOVEMENT: Final = """
    view reshape transpose permute t T mT H contiguous flatten ravel unflatten squeeze unsqueeze expand expand_as
    view_as reshape_as narrow select slice getitem chunk split unbind split_with_sizes tensor_split movedim moveaxis
    swapaxes swapdims roll flip fliplr flipud repeat tile index_select gather take_along_dim unfold pixel_shuffle
    pixel_unshuffle channel_shuffle diagonal diag tril triu clone detach alias rot90 adjoint broadcast_to atleast_1d
    atleast_2d atleast_3d masked_fill where pad
"""

ELEMENTWISE: Final = """
    relu relu6 leaky_relu gelu silu mish hardtanh hardswish hardsigmoid elu selu celu sigmoid logsigmoid tanh
    tanhshrink softsign hardshrink softshrink glu threshold
    add sub subtract mul multiply div divide true_divide rsub neg negative abs absolute maximum minimum clamp
    clip clamp_min clamp_max sin cos lerp
"""

# A mask drawn in bf16 is another mask than the same seed gives in fp32, and drops at another rate.
RANDOM: Final = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout rrelu
"""

POOLING: Final = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d batch_norm
"""

_SOURCES: Final = (
    (OpClass.LOW, AUTOCAST_LOW, "autocast: lower-precision list"),
    (OpClass.HIGH, AUTOCAST_HIGH, "autocast: fp32 list"),
    (OpClass.HIGH, COMPOSITE_HIGH, "composite whose deciding part is on autocast's fp32 list"),
    (OpClass.HIGH, RANDOM, "draws random numbers: the same seed gives the same mask in every precision"),
    (OpClass.WIDEST, AUTOCAST_WIDEST, "autocast: promote list"),
    (OpClass.WIDEST, BUILTIN_PROMOTION, "promotes by itself"),
    (OpClass.FOLLOW, MOVEMENT, "moves data"),
    (OpClass.FOLLOW, ELEMENTWISE, "element by element, not on autocast's lists"),
    (OpClass.FOLLOW, POOLING, "accumulates in fp32 inside, not on autocast's lists"),
)

TABLE: Final = MappingProxyType({op: (cls, source) for cls, ops, source in _SOURCES for op in ops.split()})
"""Operation -> (class, where the class comes from)."""

FOLLOWING_OPERANDS: Final = MappingProxyType({"batch_norm": 1, "higher_order::flex_attention": 3})
"""Operations of which only the first n operands follow, or are lowered (flex_attention's query, key and value); the rest
(statistics, affine weights, what score_mod reads) keep their traced dtypes."""

WRITTEN_OPERANDS: Final = MappingProxyType({"batch_norm": (1, 2, 3, 4), "instance_norm": (1, 2)})
"""Operands that an operation writes although neither its name nor its schema says so: running statistics, which stand at 1
and 2 in torch.nn.functional.batch_norm, at 3 and 4 in torch.batch_norm."""

SELECTING: Final = frozenset(
    ("where", "masked_fill", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "index_put")
)
"""Operations whose result holds values of any operand: there a 0-dim tensor decides the format as the others do, since what it
holds (the smallest fp32 number, as a mask) may not exist in a lower one."""

_CONVERSIONS: Final = ("to", "type", "type_as", "float", "double", "half", "bfloat16")

MAY_ALIAS: Final = frozenset((*MOVEMENT.split(), *RANDOM.split(), *_CONVERSIONS))
"""Operations that may return their operand's own memory, depending on strides and arguments: each gets a cast of its own, so
that nobody else reads what is written through the result."""

NO_LOW_KERNEL: Final = MappingProxyType(
    {"cpu": frozenset(("avg_pool3d", "adaptive_avg_pool3d", "higher_order::flex_attention"))}
)
"""Device -> operations whose eager kernel takes no low format, although its shape rule (fake tensors) does; or whose compiled
kernel cannot be followed by the cast back (flex_attention's CPU template)."""

METADATA: Final = frozenset(("size", "stride", "numel", "nelement", "dim", "ndimension", "storage_offset", "is_contiguous"))
"""Methods that read a tensor's shape, never its values: they cause no cast."""

SYNONYMS: Final = MappingProxyType({"truediv": "div", "__matmul__": "matmul", "__rmatmul__": "matmul"})
"""Other spellings of one operation."""


class Inside(enum.Enum):
    """What happens to the graphs nested in a higher-order operation."""

    REWRITTEN = "rewritten"
    """Each is planned like a graph of its own, whose inputs and outputs have their traced dtypes."""
    DECLARED = "declared"
    """Rewritten where the program declares, with `torch.amp.custom_fwd` and `custom_bwd`, that autocast may enter."""
    TRACED = "traced"
    """Nothing in them changes."""


HIGHER_ORDER: Final = MappingProxyType(
    {
        "tag_activation_checkpoint": (Inside.REWRITTEN, "ordinary code, run once more in the backward"),
        "wrap_activation_checkpoint": (Inside.REWRITTEN, "ordinary code, run once more in the backward"),
        "wrap": (Inside.REWRITTEN, "ordinary code, inlined by autograd"),
        "hints_wrapper": (Inside.REWRITTEN, "ordinary code with hints for the compiler"),
        "wrap_with_set_grad_enabled": (Inside.REWRITTEN, "ordinary code in a grad mode of its own"),
        "strict_mode": (Inside.REWRITTEN, "ordinary code"),
        "invoke_subgraph": (Inside.REWRITTEN, "ordinary code, compiled once; each call passes the traced dtypes"),
        "cond": (Inside.REWRITTEN, "both branches are ordinary code with equal signatures"),
        "while_loop": (Inside.REWRITTEN, "ordinary code; what is carried to the next turn has its traced dtype"),
        "scan": (Inside.REWRITTEN, "ordinary code; what is carried to the next turn has its traced dtype"),
        "map_impl": (Inside.REWRITTEN, "ordinary code, run on each slice"),
        "autograd_function_apply": (Inside.DECLARED, "forward and backward are the program's own and fit each other"),
        "associative_scan": (Inside.TRACED, "its combine_fn must be associative, which roundings inside are not"),
        "flex_attention": (Inside.TRACED, "score_mod and mask_mod work on scores, which are fp32 inside the kernel"),
        "wrap_with_autocast": (Inside.TRACED, "an autocast region of the user's own"),
    }
)
"""Higher-order operation -> (what happens inside, why). One without a row keeps its traced dtypes, inside and out."""


def classify(op: str | None) -> tuple[OpClass, str]:
    """(class, source) of a canonical operation name; KEEP for what has no row."""
    if op is None:
        return OpClass.KEEP, "not an operation of torch"
    inside = HIGHER_ORDER.get(op.removeprefix("higher_order::"))
    if inside is not None and op not in TABLE:
        return OpClass.KEEP, f"has its traced dtypes outside; inside, {inside[1]}"
    return TABLE.get(op, (OpClass.KEEP, "not listed: gets the dtypes it was traced with"))
