"""The zoo's autocast casts as PyTorch's own kernels for CUDA do, which run on fake CUDA tensors without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from bench.zoo import cuda_autocast

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64

PROGRAMS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "linear": (F.linear, [(4, 8), (6, 8), (6,)]),
    "matmul": (torch.matmul, [(4, 8), (8, 6)]),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), [(4, 8), (8, 6)]),
    "conv2d": (F.conv2d, [(1, 2, 8, 8), (3, 2, 3, 3)]),
    "conv1d, padding by name": (lambda x, w: F.conv1d(x, w, padding="same"), [(1, 2, 8), (3, 2, 3)]),
    "prelu": (F.prelu, [(4, 8), (8,)]),
    "attention": (F.scaled_dot_product_attention, [(1, 2, 8, 16)] * 3),
    "softmax": (lambda x: x.softmax(-1), [(4, 8)]),
    "softmax to bf16": (lambda x: x.softmax(-1, dtype=BF16), [(4, 8)]),
    "sum": (lambda x: x.sum(), [(4, 8)]),
    "sum over a dimension": (lambda x: x.sum(-1), [(4, 8)]),
    "mean": (lambda x: x.mean(), [(4, 8)]),
    "cumsum": (lambda x: x.cumsum(0), [(4, 8)]),
    "norm": (lambda x: torch.norm(x, 2), [(4, 8)]),
    "vector norm": (torch.linalg.vector_norm, [(4, 8)]),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), [(4, 8)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [(4, 8)]),
    "exp": (torch.exp, [(4, 8)]),
    "pow of a number": (lambda x: x.pow(2), [(4, 8)]),
    "gelu": (F.gelu, [(4, 8)]),
    "add": (torch.add, [(4, 8), (4, 8)]),
    "cat": (lambda x, y: torch.cat((x, y)), [(4, 8), (4, 8)]),
    "stack": (lambda x, y: torch.stack((x, y)), [(4, 8), (4, 8)]),
    "dot": (torch.dot, [(8,), (8,)]),
    "addcmul": (torch.addcmul, [(4, 8)] * 3),
    "atan2": (torch.atan2, [(4, 8)] * 2),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)), [(4, 8)]),
    "mse_loss": (F.mse_loss, [(4, 8)] * 2),
    "bilinear": (F.bilinear, [(4, 8), (4, 6), (5, 8, 6)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(1, 2, 4, 4)]),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), [(1, 2, 4, 4, 4)]),
    "fft": (torch.fft.rfft, [(4, 8)]),
}


@contextmanager
def cuda_region() -> Iterator[None]:
    """`torch.autocast("cuda", bf16)` itself switches off where there is no GPU; the dispatcher does not."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)


def dtype_of(
    program: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: str
) -> Any:
    """The dtype that comes out, or the kind of error. On fakes, without gradients: they would ask for a driver."""
    region = cuda_region() if device == "cuda" else torch.autocast("cpu", dtype=BF16)
    with FakeTensorMode(), torch.no_grad():
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
        try:
            with region:
                return program(*inputs).dtype
        except (RuntimeError, TypeError) as error:
            return type(error)


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_dtypes_as_cudas_own_kernels(name):
    program, shapes = PROGRAMS[name]
    mixtures = {(d,) * len(shapes) for d in (F32, BF16, F64)} | {(BF16,) + (F32,) * (len(shapes) - 1)}
    for dtypes in mixtures:
        want = dtype_of(program, shapes, dtypes, "cuda")
        with cuda_autocast.cuda_lists_on_cpu():
            assert dtype_of(program, shapes, dtypes, "cpu") == want, dtypes


def test_cpus_own_lists_come_back():
    x = torch.randn(4, 8).bfloat16()
    with torch.autocast("cpu", dtype=BF16):
        before = x.softmax(-1).dtype
        with cuda_autocast.cuda_lists_on_cpu():
            assert x.softmax(-1).dtype == F32
        assert x.softmax(-1).dtype == before == BF16


def test_every_kernel_of_cuda_is_on_a_list():
    """The header is read whole: PyTorch has no kernel for autocast on CUDA that no list names."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    named = cuda_autocast.lists(cuda_autocast.HEADER.read_text()).keys()
    unlisted = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} - named
    assert unlisted <= {"binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose"}  # banned; below aten


def test_results_are_those_of_casts_by_hand():
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with cuda_autocast.cuda_lists_on_cpu(), torch.autocast("cpu", dtype=BF16):
        got = (x @ w).softmax(-1)
    assert torch.equal(got, (x.bfloat16() @ w.bfloat16()).float().softmax(-1))
