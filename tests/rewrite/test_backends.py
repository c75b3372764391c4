"""Kernels of attention are chosen by measurement, call by call, and no switch of the process moves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxamp
from fxamp import ops
from fxamp.rewrite.backends import ChooseAttentionKernels, FlashForSmall, Operands, measured_on_device
from tests.programs import relative_error, rewritten
from tests.rewrite.test_attention import qkv, steps

CUDNN: Final = SDPBackend.CUDNN_ATTENTION
FLASH: Final = SDPBackend.FLASH_ATTENTION
EFFICIENT: Final = SDPBackend.EFFICIENT_ATTENTION
MATH: Final = SDPBackend.MATH


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def chosen(times: dict[SDPBackend, float], fn: Any = attend) -> tuple[list[torch.fx.Node], Any, list[Operands]]:
    """(the attentions of a rewritten graph, what the pass did, what was measured), where measuring gives `times`."""
    asked: list[Operands] = []

    def measure(operands: Operands) -> dict[SDPBackend, float]:
        asked.append(operands)
        return times

    gm = rewritten(fn, *qkv(2, 2, 32, 16))
    with sdpa_kernel([FLASH, EFFICIENT, CUDNN, MATH], set_priority=True):
        change = ChooseAttentionKernels(measure)(gm)
    gm.graph.lint()
    return [n for n in gm.graph.nodes if n.target is ops.ATTENTION], change, asked


@pytest.mark.parametrize(
    ("times", "first"),
    [
        ({FLASH: 1.0, EFFICIENT: 2.0, CUDNN: 0.5}, CUDNN),
        ({FLASH: 1.0, EFFICIENT: 0.9, CUDNN: 3.0}, EFFICIENT),
        ({FLASH: 1.0, EFFICIENT: 2.0, CUDNN: 0.97}, FLASH),  # not worth a change
        ({EFFICIENT: 2.0, CUDNN: 1.0}, CUDNN),
    ],
)
def test_the_fastest_comes_first(times: dict[SDPBackend, float], first: SDPBackend):
    (node,), change, asked = chosen(times)
    assert change.num_marked == 1
    order = [SDPBackend(k) for k in node.kwargs["kernels"]]  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
    assert order == [first, *[k for k in (FLASH, EFFICIENT, CUDNN, MATH) if k is not first]]
    (operands,) = asked
    assert operands.tensors[:3] == (((2, 2, 32, 16), (1024, 512, 16, 1), torch.bfloat16, True),) * 3
    assert operands.tensors[3] is None
    assert dict(operands.options) == {"is_causal": True}


@pytest.mark.parametrize("times", [{}, {FLASH: 1.0}])
def test_without_a_choice_nothing_is_chosen(times: dict[SDPBackend, float]):
    (node,), change, _ = chosen(times)
    assert "kernels" not in node.kwargs
    assert "alone takes these operands" in change.kept[0].reason


def test_layers_that_are_alike_are_measured_once():
    nodes, change, asked = chosen({FLASH: 1.0, CUDNN: 0.5}, lambda q, k, v: attend(attend(q, k, v), k, v) + attend(q, k, v))
    assert (len(nodes), change.num_marked, len(asked)) == (3, 3, 1)


def test_a_cpu_says_why_not():
    gm = rewritten(attend, *qkv(2, 2, 32, 16))
    change = ChooseAttentionKernels()(gm)
    assert not change.edits
    assert change.kept[0].reason == "kernels of attention are measured on CUDA, and this is on cpu"
    assert change.kept[0].where.startswith("test_backends.py:")


@pytest.mark.slow
def test_a_mode_that_takes_its_time_measures():
    amp = fxamp.Amp(precision="bf16", mode="max-autotune-no-cudagraphs", lower="inductor")
    torch.compile(attend, backend=amp)(*(x.detach() for x in qkv(2, 2, 32, 16)))
    assert "ChooseAttentionKernels left" in str(amp.report())
    assert "measured on CUDA, and this is on cpu" in " ".join(str(amp.report()).split())


def test_the_choice_holds_for_one_call():
    """On a CPU, where flash and math can be told apart: math alone is asked for, in the one call."""
    q, k, v = (x.detach().bfloat16() for x in qkv(2, 2, 64, 16))
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    by_products = ops.ATTENTION(q, k, v, is_causal=True, kernels=[MATH.value])
    assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True) == before
    assert torch.equal(by_products, ops.attention_by_products(q, k, v, is_causal=True))
    assert torch.equal(ops.ATTENTION(q, k, v, is_causal=True), attend(q, k, v))
    assert not torch.equal(by_products, attend(q, k, v))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_are_measured_on_a_gpu():
    """What is measured is what ran; the compiled graph has the fastest by name; switches and random numbers stay."""
    inputs = [torch.randn(2, 8, 512, 64, device="cuda", requires_grad=True) for _ in range(3)]
    attend(*(x.detach().bfloat16() for x in inputs))  # PyTorch puts cuDNN first when it first attends on such a device
    before = ops.allowed_kernels()
    state = torch.cuda.get_rng_state()
    found = measured_on_device(
        Operands(
            (((2, 8, 512, 64), (262144, 32768, 64, 1), torch.bfloat16, True),) * 3 + (None,),
            torch.device("cuda", torch.cuda.current_device()),
            (("is_causal", True),),
        )
    )
    print(found)
    assert {FLASH, EFFICIENT} <= set(found)
    assert all(ms > 0 for ms in found.values())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    want = steps(attend, [x.detach().double().requires_grad_() for x in inputs], backend="eager")
    amp = fxamp.Amp(precision="bf16", mode="max-autotune-no-cudagraphs")
    got = steps(attend, inputs, backend=amp)
    assert ops.allowed_kernels() == before
    (path,) = amp.report().fast_paths
    print(path)
    assert "chosen by measurement" in path.why
    names = {"cuDNN": "_cudnn_", "flash": "_flash_", "memory-efficient": "_efficient_"}
    targets = [str(n.target) for n in amp.graphs[0].variants["bf16"].joint.graph.nodes if "_attention" in str(n.target)]
    assert all(names[path.why.split()[0]] in target for target in targets)
    assert len(targets) == 2  # forward and backward
    for a, exactly in zip(got, want, strict=True):
        assert relative_error(a, exactly) < 2**-6


# ---- small ones that are recorded -----------------------------------------------------------------------------------------
ALL: Final = [FLASH, EFFICIENT, MATH, CUDNN]
"""PyTorch's own order, except on CUDA devices where it prefers cuDNN."""


@pytest.mark.parametrize(
    ("shape", "switched_on", "is_chosen"),
    [
        ((8, 4, 64, 32), ALL, True),
        ((8, 4, 64, 32), [CUDNN, FLASH, EFFICIENT, MATH, SDPBackend.OVERRIDEABLE], True),  # PyTorch's own there
        ((8, 4, 64, 32), [CUDNN, FLASH, EFFICIENT, MATH], True),
        ((8, 4, 64, 32), [CUDNN, EFFICIENT, FLASH, MATH], False),
        ((2, 8, 1024, 64), ALL, False),  # 2 GFLOP
        ((8, 4, 64, 32), [FLASH, EFFICIENT, MATH], False),
        ((8, 4, 64, 32), [CUDNN, EFFICIENT], False),
        ((8, 4, 64, 32), [CUDNN, FLASH], False),  # somebody wants it
        ((8, 4, 64, 32), [EFFICIENT, FLASH, CUDNN], False),
    ],
)
def test_small_attention_has_no_memset(shape: tuple[int, int, int, int], switched_on: list[SDPBackend], is_chosen: bool):
    gm = rewritten(attend, *qkv(*shape))
    with sdpa_kernel(switched_on, set_priority=True):
        change = FlashForSmall()(gm)
    (node,) = [n for n in gm.graph.nodes if n.target is ops.ATTENTION]
    found = node.kwargs.get("kernels")
    assert change.num_marked == is_chosen
    if is_chosen:
        order = [FLASH, *(kernel for kernel in switched_on if kernel is not FLASH)]
        assert [SDPBackend(k) for k in found] == order  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
    else:
        assert found is None


SETTLES = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from fxamp import ops

torch.zeros(1, device="cuda")
wanted = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
with sdpa_kernel(wanted, set_priority=True):
    assert ops.allowed_kernels() == wanted
before = ops.allowed_kernels()
x = torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
torch.nn.functional.scaled_dot_product_attention(x, x, x)
assert ops.allowed_kernels() == before, (before, ops.allowed_kernels())
"""


@pytest.mark.gpu
def test_the_order_of_kernels_is_what_was_asked_for_from_the_first_attention_on():
    """In a process of its own: PyTorch writes its order at the first choice that it makes in one."""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", SETTLES], capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr


@pytest.mark.gpu
def test_a_train_step_with_small_attention_records_no_memset():
    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            return attend(*(part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)))

    model = Attends().cuda()
    amp = fxamp.Amp(precision="bf16", cuda_graphs="require")
    x = torch.randn(4, 32, 64, device="cuda")
    with amp.train_step(model, lambda y, _: y.square().mean(), torch.optim.AdamW(model.parameters(), fused=True)) as step:
        for _ in range(4):
            step(x, x)
        assert not [kernel.name for kernel in amp.profile(lambda: step(x, x)).kernels if "emset" in kernel.name]
