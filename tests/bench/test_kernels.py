from __future__ import annotations

import pytest
import torch

from bench import kernels
from fxamp.explain.kernels import Kernel


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of a GPU have other names")
def test_operations_of_a_cpu(capsys):
    kernels.main(["mlp-small", "fp32-eager", "--steps", "2"])
    text = capsys.readouterr().out
    assert "aten::addmm" in text
    assert "(3)" in text  # layers
