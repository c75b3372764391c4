from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from bench import measure, workloads
from bench.measure import WINDOW, CountCasts, count_launches
from bench.models import MLP
from fxamp.explain.kernels import Event


def host(name: str, start_us: float) -> Event:
    return Event(name=name, is_on_device=False, start_us=start_us, end_us=start_us + 1)


def device(name: str, start_us: float, duration_us: float = 1000) -> Event:
    return Event(name=name, is_on_device=True, start_us=start_us, end_us=start_us + duration_us)


# ---- launches --------------------------------------------------------------------------------------------------------
RANGE = Event(name=WINDOW, is_on_device=False, start_us=100, end_us=200)


def test_launches_of_two_steps():
    events = [
        RANGE,
        host("cudaLaunchKernel", 110),
        host("cuLaunchKernelEx", 120),
        host("cudaGraphLaunch", 130),
        host("cudaMemcpyAsync", 140),
        host("cudaStreamSynchronize", 141),
        host("aten::mm", 150),
        device("nvjet_tst_128x256", 150, 3000),
        device("Memcpy DtoH (Device -> Pageable)", 160),
        device("triton_poi_fused_add_0", 170),
        device("triton_poi_fused_add_0", 900),  # still of these steps, though the host is long through
    ]
    launches = count_launches(events, num_steps=2)
    assert launches.num_kernel_launches == 1
    assert launches.num_graph_launches == 0.5
    assert launches.num_host_syncs == 0.5
    assert launches.num_copies_to_host == 0.5
    assert launches.num_kernels == 2
    assert launches.kernel_ms == {"matmul": 1.5, "copy": 0.5, "pointwise": 1.0}


def test_waits_of_the_profiler_do_not_count():
    outside = [host("cudaDeviceSynchronize", 50), host("cudaDeviceSynchronize", 250), host("cudaLaunchKernel", 99)]
    launches = count_launches([RANGE, *outside], num_steps=1)
    assert (launches.num_host_syncs, launches.num_kernel_launches) == (0, 0)


@pytest.mark.parametrize("events", [[], [RANGE, RANGE]])
def test_no_range_no_count(events):
    with pytest.raises(ValueError, match="unpack"):
        count_launches(events, num_steps=1)


# ---- casts -----------------------------------------------------------------------------------------------------------
@contextmanager
def observed_by(counter: CountCasts) -> Generator[None]:
    """Without the cache of joint graphs: the code in it is past all passes."""
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(joint_custom_pre_pass=counter),
    ):
        yield


def test_casts_of_a_compiled_graph_are_counted():
    counter = CountCasts()

    def two_casts(x: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() * 2).float() + x.long()

    with observed_by(counter):
        torch.compile(two_casts)(torch.randn(10))
    assert (counter.num_graphs, counter.num_casts) == (1, 2)
    assert counter.num_bytes == 2 * 10 * (4 + 2)


def test_casts_of_autocast_are_seen():
    counter, layer = CountCasts(), torch.nn.Linear(4, 4)
    with observed_by(counter), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(layer)(torch.randn(2, 4)).float().sum().backward()
    assert counter.num_casts >= 3  # at least input, weight and bias


# ---- work ------------------------------------------------------------------------------------------------------------
def test_work_of_an_mlp_is_what_pencil_and_paper_say():
    width, num_layers, batch_size = 256, 3, 128
    work = measure.count_work(workloads.find("mlp-small"))
    # Forward and two products of the backward; the first layer has no gradient of its input.
    assert work.num_flops == 2 * batch_size * width**2 * (3 * num_layers - 1)
    assert work.num_min_bytes == 28 * num_layers * (width**2 + width)


def test_work_of_inference_and_of_micro_batches():
    base = workloads.find("mlp-small")
    once = measure.count_work(base).num_flops
    by_name = {w.name: w for w in (replace(base, name="eight", num_micro_batches=8), replace(base, kind="infer"))}
    assert measure.count_work(by_name["eight"]).num_flops == 8 * once
    inference = measure.count_work(by_name["mlp-small"])
    assert inference.num_flops == 2 * 128 * 256**2 * 3
    assert inference.num_min_bytes == 2 * sum(p.numel() for p in MLP(256, 3).parameters())


@pytest.mark.parametrize("name", ["resnet-small", "gpt-small", "llama-small", "decode-small"])
def test_every_kind_can_be_counted(name):
    assert measure.count_work(workloads.find(name)).num_flops > 0


# ---- ceilings --------------------------------------------------------------------------------------------------------
def test_ceilings_leave_out_what_is_emulated(monkeypatch):
    monkeypatch.setattr(measure.formats, "native_support", lambda device, precision: (precision == "fp32", ""))
    monkeypatch.setattr(measure, "_CEILING_BUDGET_MS", 0.1)
    ceilings = measure.measure_ceilings("cpu")
    assert list(ceilings.matmul_flops_per_s) == ["fp32"]
    assert ceilings.matmul_flops_per_s["fp32"] > 1e8
    assert ceilings.copy_bytes_per_s > 1e8


def test_time_of_a_block():
    times: list[float] = []

    def run() -> None:
        times.append(1)
        torch.ones(8).sum()

    assert measure.time_block_ms(run, "cpu") > 0
    assert times == [1]
