"""The table against its sources: autocast's own lists, read from the header that torch ships."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fxamp import optable
from fxamp.optable import OpClass
from tools import op_table

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
    rows = {op for op in optable.TABLE if op != "getitem" and not op.startswith("higher_order::")}
    unknown = {op for op in rows if not any(hasattr(home, op) for home in homes)}
    assert not unknown


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="docs/ops.md shows the database of torch 2.13")
def test_the_page_of_operations_is_fresh():
    assert op_table.PAGE.read_text() == op_table.page(op_table.database()), "run `make ops`"


def test_every_operation_of_the_database_was_looked_at():
    not_in_programs = ("jiterator", "signal.windows", "sparse.mm")  # CUDA source code; Python that makes constants; sparse
    names = [name for name in op_table.database() if not name.startswith(not_in_programs)]
    unlisted = {op for op in map(op_table.operation, names) if op not in optable.TABLE and op not in optable.SEEN_INTO}
    assert not unlisted


def test_unlisted_operations_may_hand_on_memory():
    assert optable.may_alias("mylib::scan")
    assert optable.may_alias(None)
    assert not optable.may_alias("exp")


def test_unlisted_operations_are_kept_as_traced():
    assert optable.classify("mylib::scan")[0] is OpClass.KEEP
    assert optable.classify(None)[0] is OpClass.KEEP
