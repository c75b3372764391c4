"""Profiles: of recorded events, of names of kernels, and one real one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import fxamp
from fxamp import __main__, errors
from fxamp.explain import kernels
from fxamp.explain.kernels import Event, Kernel, events_of, kernel_category, kernel_format, on_matrix_units

RANGE = "a named range"


def host(name: str, self_us: float) -> Event:
    return Event(name=name, is_on_device=False, start_us=0, end_us=9000, self_us=self_us)


def device(name: str, start_us: float, end_us: float, op: str = "") -> Event:
    return Event(name=name, is_on_device=True, start_us=start_us, end_us=end_us, op=op)


# ---- events -----------------------------------------------------------------------------------------------------------------
def test_events_of_a_real_profile():
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(RANGE):
        torch.ones(8).exp()
    events = events_of(profiled.events() or (), ranges=(RANGE,))
    (window,) = (e for e in events if e.name == RANGE)
    inside = {e.name: e for e in events if window.start_us <= e.start_us <= window.end_us}
    assert 0 < inside["aten::exp"].self_us <= inside["aten::exp"].end_us - inside["aten::exp"].start_us
    assert not any(e.is_on_device for e in events)


def test_named_ranges_are_no_work_of_the_device():
    def event(name: str, device_type: DeviceType, is_user_annotation: bool) -> FunctionEvent:
        made = FunctionEvent(id=1, name=name, thread=1, start_us=1, end_us=9, device_type=device_type)
        made.is_user_annotation = is_user_annotation
        return made

    product = event("aten::mm", DeviceType.CPU, False)
    product.append_kernel("nvjet_tst", 0, 8)
    found = events_of(
        [
            event(RANGE, DeviceType.CPU, True),
            event(RANGE, DeviceType.CUDA, True),
            event("Optimizer.step#AdamW.step", DeviceType.CUDA, True),
            event("nvjet_tst", DeviceType.CUDA, False),
            product,
        ],
        ranges=(RANGE,),
    )
    assert [(e.name, e.is_on_device, e.op) for e in found] == [
        (RANGE, False, ""), ("nvjet_tst", True, "aten::mm"), ("aten::mm", False, ""),
    ]  # fmt: skip
    assert found[1].end_us - found[1].start_us == 8


def test_launches_of_one_kernel_are_added_up():
    found = kernels.kernels_of(
        [
            device("triton_poi_fused_add_12", 0, 1000),
            device("triton_poi_fused_add_13", 0, 3000),
            device("gemm_128x64", 0, 500, op="aten::mm"),
            host("launch", 9000),
        ],
        num_steps=2,
    )
    assert found == {
        "triton_poi_fused_add": Kernel(name="triton_poi_fused_add", count=1.0, ms=2.0, op="add"),
        "gemm_128x64": Kernel(name="gemm_128x64", count=0.5, ms=0.25, op="aten::mm"),
    }


# ---- names ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "category", "fmt", "is_on_units"),
    [
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", "matmul", "bf16", True),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_NNT", "matmul", "fp16", True),
        ("nvjet_sm100_qqtst_128x256_64x4_1x2_h_bz_NNT", "matmul", "fp8", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul", "bf16", True),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16", "matmul", "tf32", True),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_nn_align8>", "matmul", "bf16", True),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_tn_align4>", "matmul", "tf32", True),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>", "matmul", "fp32", False),
        ("ampere_sgemm_128x64_tn", "matmul", "fp32", False),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "matmul", "fp16", True),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float, float, 128, 16, 4, 4, false>", "matmul", "bf16", False),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "matmul", "bf16", True),
        ("triton_tem_fused_mm_3", "matmul", "", None),
        ("triton_tem_fused_flex_attention_0", "attention", "", None),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>", "attention",
         "bf16", True),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention)", "attention", "bf16", True),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention", "fp32", None),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention", "fp16", True),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer", "", None),
        ("triton_for_fused_0", "optimizer", "", None),
        ("triton_poi_fused__to_copy_0", "cast", "", None),
        ("triton_poi_fused__to_copy_t_12", "cast", "", None),
        ("triton_poi_fused_convert_element_type_3", "cast", "", None),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>", "cast", "", None),
        ("triton_poi_fused__to_copy_add_mul_4", "pointwise", "", None),
        ("triton_poi_fused_convolution_1", "pointwise", "", None),
        ("triton_poi_fused_gelu_0", "pointwise", "", None),
        ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast>", "pointwise", "", None),
        ("triton_red_fused__to_copy_native_layer_norm_backward_7", "reduction", "", None),
        ("triton_per_fused__softmax_1", "reduction", "", None),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction", "", None),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", "reduction", "", None),
        ("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>", "copy", "", None),
        ("Memcpy DtoD (Device -> Device)", "copy", "", None),
        ("Memset (Device)", "copy", "", None),
        ("something_else", "other", "", None),
    ],
)  # fmt: skip
def test_what_a_name_says(name: str, category: str, fmt: str, is_on_units: bool | None):
    assert (kernel_category(name), kernel_format(name), on_matrix_units(name)) == (category, fmt, is_on_units)


# ---- profiles ---------------------------------------------------------------------------------------------------------------
def test_a_profile_of_recorded_events():
    made = kernels.profile_of(
        [
            device("nvjet_tst_128x256", 0, 6000, op="aten::mm"),
            device("ampere_sgemm_128x64_tn", 0, 2000, op="aten::addmm"),
            device("triton_poi_fused_add_0", 0, 1000),
            device("triton_poi_fused_add_1", 0, 1000),
            host("aten::mm", 50),
        ],
        num_steps=2,
    )
    assert (made.device, made.ms, made.ms_on_matrix_units) == ("cuda", 5.0, 3.0)
    assert [made.share(k) for k in made.kernels] == [0.6, 0.2, 0.2]
    text = str(made)
    assert "5.000 ms a step in kernels, 60.0% of it on matrix units" in text
    (row,) = (line for line in text.splitlines() if "sgemm" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "aten::addmm", "ampere_sgemm_128x64_tn", "matmul", "fp32", "no", "0.5", "1.000", "20.0%",
    ]  # fmt: skip


def test_long_profiles_are_cut():
    made = kernels.profile_of([device(f"kernel {i}", 0, 1000 + i) for i in range(kernels.MAX_ROWS + 4)], num_steps=1)
    assert "and 4 more" in str(made)
    assert made.kernels[0].name == f"kernel {kernels.MAX_ROWS + 3}"


def test_a_real_profile():
    """Of the CPU's operations here, of kernels where there is a GPU."""
    amp, model = fxamp.Amp(precision="bf16", lower="eager"), nn.Linear(64, 64)
    compiled, calls = torch.compile(model, backend=amp), list[int]()

    def step() -> None:
        calls.append(1)
        compiled(torch.ones(32, 64)).sum().backward()

    made = amp.profile(step, steps=2)
    assert len(calls) == 3
    assert made.device == "cpu"
    products = [k for k in made.kernels if k.name in ("aten::addmm", "aten::mm")]
    assert sum(k.count for k in products) == 2  # forward, and the weight's gradient
    assert made.ms > 0
    assert sum(made.share(k) for k in made.kernels) == pytest.approx(1)


def test_the_cpus_operations_have_no_columns_of_kernels():
    made = kernels.profile_of([host("aten::mm", 40), host("aten::add", 20), host("aten::mm", 40)], num_steps=2)
    assert "matrix units" not in str(made)
    table = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in str(made).splitlines() if line[0] in "│┃"]
    assert table == [
        ["operation", "calls", "ms", "share"], ["aten::mm", "1", "0.040", "80.0%"], ["aten::add", "0.5", "0.010", "20.0%"],
    ]  # fmt: skip


def test_a_step_that_fails_leaves_no_profiler_behind():
    """One that is left running ends the process when it exits."""
    calls = list[int]()

    def step() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the third")

    for _ in range(2):
        with pytest.raises(ValueError, match="the third"):
            kernels.profile(step, 3)
        assert not torch.autograd._profiler_enabled()
        calls.clear()


@pytest.mark.parametrize(("step", "steps"), [(None, 3), (print, 0), (print, "3"), (print, 1.5)])
def test_what_cannot_be_profiled(step: object, steps: Any):
    with pytest.raises(errors.InvalidOption, match="profile"):
        fxamp.Amp(precision="bf16").profile(step, steps=steps)  # pyright: ignore[reportArgumentType]


SCRIPT = """
import sys, torch
weight = torch.ones(64, 64, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=1e-3)
for i in range(int(sys.argv[1])):
    (weight @ weight).sum().backward()
    optimizer.step()
print("not reached, if it was profiled")
"""


@pytest.mark.parametrize(("num_steps", "status"), [(20, 0), (4, 1)])
def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int, status: int):
    script, before = tmp_path / "train.py", list(sys.argv)
    script.write_text(SCRIPT)
    assert __main__.main(["kernels", "--after", "2", str(script), str(num_steps)]) == status
    out, err = capsys.readouterr()
    assert ("aten::mm" in out) == (status == 0) == ("not reached" not in out)
    assert ("4 times, and 5 are needed" in err) == (status == 1)
    assert sys.argv == before


@pytest.mark.parametrize("num_steps", [20, 4])
def test_a_process_that_profiled_a_script_ends_well(tmp_path: Path, num_steps: int):
    """A range that the profiler saw begin has to end before it stops: Python crashed on its way out."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fxamp", "kernels", "--after", "2", str(script), str(num_steps)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == (0 if num_steps == 20 else 1)


def test_no_script(capsys: pytest.CaptureFixture[str]):
    assert __main__.main(["kernels", "nowhere.py"]) == 2
    assert "nowhere.py is no file" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_profile_of_a_gpu(mode: str | None):
    """bf16 products are on matrix units, fp32 ones are not, CUDA graph or no."""
    model = nn.Sequential(nn.Linear(1024, 1024, device="cuda"), nn.GELU(), nn.Linear(1024, 1024, device="cuda"))
    x = torch.randn(1024, 1024, device="cuda")
    for precision, is_on_units in (("bf16", True), ("fp32", False)):
        torch._dynamo.reset()
        amp = fxamp.Amp(precision=precision, mode=mode)
        compiled = torch.compile(model, backend=amp)

        def step(run: Any = compiled) -> None:
            model.zero_grad()
            run(x).square().mean().backward()

        for _ in range(3):
            step()
        made = amp.profile(step)
        products = [k for k in made.kernels if k.category == "matmul"]
        assert sum(k.count for k in products) >= 5  # two forward, three backward
        assert {k.is_on_matrix_units for k in products} == {is_on_units}
        assert {k.format for k in products} == {precision}
        if mode is None:
            assert {k.op for k in products} <= {"aten::mm", "aten::addmm"}
