"""docs/scaling.md says what becomes of each optimizer's steps."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from tools import optimizer_table

if not torch.__version__.startswith("2.13"):
    pytest.skip("the table is that of torch 2.13", allow_module_level=True)

ROWS = {(row.optimizer, row.flag): row for row in optimizer_table.rows()}


def test_the_table_is_fresh():
    text = optimizer_table.PAGE.read_text()
    assert optimizer_table.page(text) == text, "run `make optimizers`"


def test_fake_tensors_show_what_stays_on_the_host():
    assert str(ROWS["AdamW", None].on_cuda).startswith("wait (its state 'step' is on the host")
    assert str(ROWS["AdamW", "capturable"].on_cuda) == "select (its state is on the device)"
    assert str(ROWS["AdamW", "fused"].on_cuda) == "fused (its kernels read found_inf)"
    assert ROWS["Muon", None].on_cuda.name == "select"  # pyright: ignore[reportOptionalMemberAccess]


def test_what_an_optimizer_reads_by_itself_is_counted():
    assert ROWS["Adafactor", None].num_own_waits == 2  # of the sizes of parameter and update
    assert ROWS["AdamW", "fused"].num_own_waits == 0


def test_a_refusal_has_its_reason():
    assert ROWS["LBFGS", None].cells()[1:] == ("refused", "", "refused", ROWS["LBFGS", None].refusal)
    assert "many times within one step" in ROWS["LBFGS", None].refusal


def test_an_optimizer_that_keeps_a_number_on_the_host_moves_to_another_row(monkeypatch: pytest.MonkeyPatch):
    class Counting(optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["count"] = 1

    monkeypatch.setattr(optim, "SGD", Counting)
    row = optimizer_table.row("SGD")
    assert row.on_cuda is not None
    assert str(row.on_cuda) == "wait (its state 'count' is a Python int)"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "flag"), [key for key, row in ROWS.items() if row.on_cuda is not None])
def test_fake_cuda_is_as_cuda(name: str, flag: str | None):
    options = {} if flag is None else {flag: True}
    assert optimizer_table.route(name, options, "cuda", is_fake=False)[0] == ROWS[name, flag].on_cuda
