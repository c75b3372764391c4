"""The table against its sources: autocast's own lists, read from the header that torch ships."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fxamp import optable
from fxamp.optable import OpClass

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": OpClass.LOW,
    "AT_FORALL_FP32": OpClass.HIGH,
    "AT_FORALL_FP32_SET_OPT_DTYPE": OpClass.HIGH,
    "AT_FORALL_PROMOTE": OpClass.WIDEST,
}
BELOW_DYNAMO = {
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "_scaled_dot_product_flash_attention",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
}
"""Operations that others call; no program does, so Dynamo never sees them."""


def autocast_list(macro: str) -> set[str]:
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", text, re.DOTALL)
    assert body is not None, f"{macro} is not in {HEADER}"
    return set(re.findall(r"_\(\s*(\w+)", body[1]))


@pytest.mark.skipif(not HEADER.exists(), reason="this build of torch ships no headers")
@pytest.mark.parametrize(("macro", "cls"), list(LISTS.items()))
def test_every_operation_of_autocasts_lists_has_its_class(macro: str, cls: OpClass):
    names = autocast_list(macro)
    assert len(names) >= 8
    missing = {n for n in names - BELOW_DYNAMO if optable.classify(n)[0] is not cls}
    assert not missing


def test_no_operation_has_two_classes():
    rows = [(op, cls) for cls, ops, _ in optable._SOURCES for op in ops.split()]
    assert len(rows) == len({op for op, _ in rows})


def test_every_name_exists_in_torch():
    homes = (torch.ops.aten, torch, torch.nn.functional, torch.Tensor, torch.special, torch.linalg)
    unknown = {op for op in optable.TABLE if op != "getitem" and not any(hasattr(home, op) for home in homes)}
    assert not unknown


def test_unlisted_operations_are_kept_as_traced():
    assert optable.classify("mylib::scan")[0] is OpClass.KEEP
    assert optable.classify(None)[0] is OpClass.KEEP
