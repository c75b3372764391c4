"""How each operation is treated, as data: one name -> one class, each row with its source.

LOW     runs in the low precision: its fp32 operands are cast down.
HIGH    runs in fp32: low operands are cast up.
WIDEST  runs in the widest of its operands' formats: low only if all are low.
FOLLOW  moves data or works element by element: takes the format of what it is given.
KEEP    gets exactly the dtypes that it was traced with (contract 3). What has no row is KEEP too; the rows that say so are
        operations that somebody looked at, with the reason.

docs/ops.md shows the table beside PyTorch's whole operator database; `make ops` writes it.

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

BUILTIN_PROMOTION: Final = "cat stack concat concatenate hstack vstack dstack column_stack _chunk_cat block_diag"

# Whole recurrent layers: autocast casts inputs, states and weights of cuDNN's (`_cudnn_rnn`, autocast's RNN.cpp) alike.
RECURRENT: Final = "lstm gru rnn_tanh rnn_relu"

# Composites of torch.nn.functional, of which autocast sees only the parts: the class is that of the part that decides.
COMPOSITE_HIGH: Final = """
    cross_entropy gaussian_nll_loss ctc_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss
    pairwise_distance interpolate upsample softmin gumbel_softmax local_response_norm normalize binary_cross_entropy
    instance_norm grid_sample logcumsumexp linalg_norm cov corrcoef upsample_nearest upsample_bilinear lp_pool1d lp_pool2d
    lp_pool3d native_group_norm linear_cross_entropy
"""

# Not on autocast's lists, but the same arithmetic under another name, or the same hazard.
LIKE_HIGH: Final = """
    exp2 square logaddexp logaddexp2 logit xlogy xlog1py entr acosh asinh atan atanh erfc erfcx hypot
    _safe_softmax
"""

# Sums over many values: the format can neither count far nor keep small terms beside a large sum.
REDUCTIONS: Final = """
    mean nanmean nansum var var_mean std std_mean trace sum_to_size trapezoid trapz cumulative_trapezoid index_add
    embedding_bag _segment_reduce scatter_reduce index_reduce put fold linalg_vander
"""

MOVEMENT: Final = """
    view reshape transpose permute t T mT H contiguous flatten ravel unflatten squeeze unsqueeze expand expand_as
    view_as reshape_as narrow select slice getitem chunk split unbind split_with_sizes tensor_split movedim moveaxis
    swapaxes swapdims roll flip fliplr flipud repeat tile index_select gather take_along_dim unfold pixel_shuffle
    pixel_unshuffle channel_shuffle diagonal diag tril triu clone detach alias rot90 adjoint broadcast_to atleast_1d
    atleast_2d atleast_3d masked_fill where pad
    dsplit hsplit vsplit unsafe_chunk unsafe_split meshgrid broadcast_tensors cartesian_prod combinations diag_embed diagflat
    linalg_diagonal mH constant_pad_nd embedding repeat_interleave take positive conj conj_physical resolve_conj resolve_neg
    real alias_copy diagonal_copy expand_copy narrow_copy permute_copy split_with_sizes_copy squeeze_copy t_copy
    transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy select_scatter slice_scatter diagonal_scatter index_copy
    max_unpool1d max_unpool2d max_unpool3d masked_scatter as_strided
"""

ELEMENTWISE: Final = """
    relu relu6 leaky_relu gelu silu mish hardtanh hardswish hardsigmoid elu selu celu sigmoid logsigmoid tanh
    tanhshrink softsign hardshrink softshrink glu threshold
    add sub subtract mul multiply div divide true_divide rsub neg negative abs absolute maximum minimum clamp
    clip clamp_min clamp_max sin cos lerp
    sqrt erf sinc deg2rad rad2deg diff outer kron copysign heaviside
"""

# The result holds values of the operands, or tells of each whether it is finite, negative or whole: nothing is rounded.
EXACT: Final = """
    amax amin aminmax max min fmax fmin cummax cummin median nanmedian mode kthvalue sort msort argsort topk argmax argmin
    ceil floor round trunc frac sign sgn signbit isnan isinf isfinite isneginf isposinf
"""

# A mask drawn in bf16 is another mask than the same seed gives in fp32, and drops at another rate.
RANDOM: Final = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout rrelu
    fractional_max_pool2d fractional_max_pool3d
"""

POOLING: Final = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d batch_norm
"""

# ---- kept as traced, on purpose -------------------------------------------------------------------------------------------
COMPARISONS: Final = """
    eq ne lt le gt ge equal allclose isclose isin searchsorted bucketize histc histogram histogramdd unique unique_consecutive
    floor_divide fmod remainder quantile nanquantile
"""

TRUTH: Final = """
    all any logical_and logical_or logical_xor logical_not nonzero nonzero_static argwhere count_nonzero bool item
    masked_select
"""

CREATION: Final = """
    zeros ones empty full eye arange linspace logspace zeros_like ones_like empty_like full_like empty_permuted empty_strided
    new_zeros new_ones new_empty new_empty_strided new_full scalar_tensor tril_indices triu_indices one_hot
    broadcast_shapes fill zero
"""

DRAWS: Final = """
    bernoulli cauchy exponential geometric log_normal multinomial normal uniform rand_like randint randint_like randn
    randn_like rand
"""

INTEGERS: Final = """
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor gcd lcm bincount unravel_index
    hash_tensor
"""

CONVERSIONS: Final = "to type type_as float double half bfloat16 byte char short int long cfloat cdouble chalf"

COMPLEX: Final = """
    complex polar view_as_complex view_as_real imag angle isreal stft istft
    fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
    fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
"""

OF_THE_FORMAT: Final = "nextafter nan_to_num frexp ldexp float_power"

BY_STRIDE: Final = "as_strided_copy as_strided_scatter resize resize_as"

SPARSE: Final = "to_sparse sparse_sampled_addmm smm"

INTERNAL: Final = """
    native_batch_norm _native_batch_norm_legit _batch_norm_with_update _softmax_backward_data native_dropout_backward
    max_pool2d_with_indices_backward _unsafe_masked_index _unsafe_masked_index_put_accumulate grid_sampler_2d grid_sampler_3d
    _efficient_attention_forward _flash_attention_forward
"""

FP8_PRODUCTS: Final = "_scaled_mm _scaled_mm_v2"

LINEAR_ALGEBRA: Final = """
    cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig
    linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve
    linalg_matrix_power matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve logdet lu lu_solve lu_unpack
    matrix_exp ormqr pca_lowrank pinverse qr svd svd_lowrank triangular_solve
"""

SPECIAL_FUNCTIONS: Final = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
    chebyshev_polynomial_w digamma hermite_polynomial_h hermite_polynomial_he i0 i0e i1 i1e igamma igammac
    laguerre_polynomial_l legendre_polynomial_p lgamma log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
    modified_bessel_k1 multigammaln mvlgamma ndtr ndtri polygamma scaled_modified_bessel_k0 scaled_modified_bessel_k1
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w spherical_bessel_j0 zeta gradient
"""

SCATTERED: Final = "scatter index_fill"

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
    (OpClass.LOW, RECURRENT, "recurrent layer: autocast's cuDNN rule lowers inputs, states and weights"),
    (OpClass.HIGH, LIKE_HIGH, "the same arithmetic as operations on autocast's fp32 list"),
    (OpClass.HIGH, REDUCTIONS, "sums many values"),
    (OpClass.FOLLOW, EXACT, "exact in every format: selects values, or asks for a property of each"),
    (OpClass.KEEP, COMPARISONS, "jumps where it compares or rounds: a rounded constant would change the answer"),
    (OpClass.KEEP, TRUTH, "yields truth values, or a shape that depends on them"),
    (OpClass.KEEP, CREATION, "makes values: there is nothing to follow"),
    (OpClass.KEEP, DRAWS, "draws random numbers: the same seed gives the same ones in every precision"),
    (OpClass.KEEP, INTEGERS, "works on integers, or on bits"),
    (OpClass.KEEP, CONVERSIONS, "a cast of the program's own"),
    (OpClass.KEEP, COMPLEX, "complex values, or frequencies made of them, have no lower format"),
    (OpClass.KEEP, OF_THE_FORMAT, "its result depends on the format itself"),
    (OpClass.KEEP, BY_STRIDE, "reads memory by stride"),
    (OpClass.KEEP, SPARSE, "sparse values are not lowered"),
    (OpClass.KEEP, INTERNAL, "part of another operation, which programs do not call"),
    (OpClass.KEEP, FP8_PRODUCTS, "a product in formats that the program chose"),
    (OpClass.KEEP, LINEAR_ALGEBRA, "solves or decomposes: no kernels in lower formats, and errors multiply"),
    (OpClass.KEEP, SPECIAL_FUNCTIONS, "special function: steep, and with few kernels in lower formats"),
    (OpClass.KEEP, SCATTERED, "may accumulate, and mixes what it is given"),
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
    (
        *("where", "masked_fill", "clamp", "clip", "clamp_min", "clamp_max"),
        *("maximum", "minimum", "max", "min", "fmax", "fmin"),
        *("index_put", "index_copy", "masked_scatter", "select_scatter", "slice_scatter", "diagonal_scatter"),
    )
)
"""Operations whose result holds values of any operand: there a 0-dim tensor decides the format as the others do, since what it
holds (the smallest fp32 number, as a mask) may not exist in a lower one."""

SEEN_INTO: Final = frozenset(("multi_head_attention_forward", "tensordot", "inner"))
"""Composites that `rewrite.composites` replaces by their parts before the plan is made, since one class would be wrong for
some part: products beside a softmax, products behind movement."""

IN_EITHER_FORMAT: Final = frozenset((*MOVEMENT.split(), *ELEMENTWISE.split(), *EXACT.split(), *BUILTIN_PROMOTION.split()))
"""Operations that may as well be given fp32 where all their operands are low: nothing in them costs more there than what they
read and write."""

MAY_ALIAS: Final = frozenset(MOVEMENT.split())
"""Operations that return their operand's own memory or a copy, depending on strides: a cast, which may be laid out anew, can
turn the copy of the program into its own memory."""

NO_LOW_KERNEL: Final = MappingProxyType(
    {"cpu": frozenset(("avg_pool3d", "adaptive_avg_pool3d", "higher_order::flex_attention"))}
)
"""Device -> operations whose eager kernel takes no low format, although its shape rule (fake tensors) does; or whose compiled
kernel cannot be followed by the cast back (flex_attention's CPU template)."""

NEEDS_NATIVE: Final = MappingProxyType({("cpu", "bf16"): frozenset(("lstm",))})
"""(device, format) -> operations whose kernel works only where the hardware computes in that format."""

METADATA: Final = frozenset(
    (
        *("size", "stride", "numel", "nelement", "dim", "ndimension", "storage_offset", "is_contiguous"),
        *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset"),
    )
)
"""Operations that read a tensor's shape, never its values: they cause no cast."""

SYNONYMS: Final = MappingProxyType(
    {
        "truediv": "div",
        "floordiv": "floor_divide",
        "mod": "remainder",
        "linalg_matmul": "matmul",
        "linalg_cross": "cross",
        **{f"__{r}{name}__": name for name in ("add", "sub", "mul", "pow", "matmul") for r in ("", "r")},
        **{f"__{r}{name}__": "div" for name in ("div", "truediv") for r in ("", "r")},
        **{f"__{r}{name}__": "remainder" for name in ("mod",) for r in ("", "r")},
        **{f"__{r}{name}__": f"bitwise_{name}" for name in ("and", "or", "xor") for r in ("", "r")},
        **{f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge")},
        "__getitem__": "getitem",
    }
)
"""Other spellings of one operation."""


class Inside(enum.Enum):
    """What happens to the graphs nested in a higher-order operation."""

    REWRITTEN = "rewritten"
    """Each is planned like a graph of its own, whose inputs and outputs have their traced dtypes."""
    DECLARED = "declared"
    """Rewritten where the program declares, with `torch.amp.custom_fwd` and `custom_bwd`, what autocast does there."""
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


def may_alias(op: str | None) -> bool:
    """May an operation return the memory of a cast where the program got a copy? So may whatever is not listed: a nested
    graph, an operation of somebody's own."""
    return op not in TABLE or op in MAY_ALIAS


def classify(op: str | None) -> tuple[OpClass, str]:
    """(class, source) of a canonical operation name; KEEP for what has no row."""
    if op is None:
        return OpClass.KEEP, "not an operation of torch"
    inside = HIGHER_ORDER.get(op.removeprefix("higher_order::"))
    if inside is not None and op not in TABLE:
        return OpClass.KEEP, f"has its traced dtypes outside; inside, {inside[1]}"
    return TABLE.get(op, (OpClass.KEEP, "not listed: gets the dtypes it was traced with"))
