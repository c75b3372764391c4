from __future__ import annotations

import pytest
import torch

from bench import kernels
from bench.kernels import Kernel
from bench.measure import Event


def event(name: str, start_us: float, end_us: float, is_on_device: bool = True) -> Event:
    return Event(name=name, is_on_device=is_on_device, start_us=start_us, end_us=end_us)


def test_launches_of_one_kernel_are_added_up():
    found = kernels.kernels_of(
        [
            event("triton_poi_fused_add_12", 0, 1000),
            event("triton_poi_fused_add_13", 0, 3000),
            event("gemm_128x64", 0, 500),
            event("launch", 0, 9000, is_on_device=False),
        ],
        num_steps=2,
    )
    assert found == {
        "triton_poi_fused_add": Kernel(name="triton_poi_fused_add", count=1.0, ms=2.0),
        "gemm_128x64": Kernel(name="gemm_128x64", count=0.5, ms=0.25),
    }


def test_the_largest_difference_comes_first():
    def of(**ms: float) -> dict[str, Kernel]:
        return {name: Kernel(name=name, count=1, ms=t) for name, t in ms.items()}

    shown = kernels.table({"a": of(same=9.0, differs=1.0), "b": of(same=9.0, differs=3.0, new=0.5)}, num_rows=3)
    assert list(shown.columns[0].cells) == ["differs", "new", "same", "all 3"]
    assert list(shown.columns[2].cells)[-1] == "10.000"
    assert list(shown.columns[3].cells)[-1] == "12.500"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_profile(capsys):
    kernels.main(["tiny-gpt", "fp32-eager", "--steps", "1"])
    text = capsys.readouterr().out
    assert "fp32-eager" in text
    assert "all " in text
