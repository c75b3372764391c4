from __future__ import annotations

import os
import sys

import pytest
import torch

import fxamp
from fxamp.explain import printed
from tests.programs import small_models


def test_text_is_taken_as_it_is():
    """A glob looks like markup, and a path like an emoji."""
    table = printed.table("rules [of x]", ("rule", "matched"), numbers=("matched",))
    table.add_row("layers.[a-z]*.:bug:", "3")
    text = printed.text([table, "[bold] no :smile:"], 60)
    assert "rules [of x]" in text
    assert "layers.[a-z]*.:bug:" in text
    assert text.endswith("[bold] no :smile:")


def test_cells_keep_all_of_their_text_and_lines_their_width():
    table = printed.table("", ("path",))
    table.add_row("x" * 100)
    text = printed.text([table], 40)
    assert text.count("x") == 100
    assert max(map(len, text.splitlines())) <= 40


def test_rules_with_brackets_in_a_report():
    amp = fxamp.Amp(policy={"layers.[0-9a-z]*": "fp32"})
    assert "layers.[0-9a-z]*" in str(amp.report())


WORDS = ["module:layers.0.*=fp32", "autocast: lower-precision list; the precision is fp32", "it computes in fp32, " * 8]


@pytest.mark.parametrize("width", [60, 80, 100, 110])
def test_no_word_is_parted_that_fits(width: int):
    table = printed.table("", ("a", "operations", "why"), numbers=("a",))
    table.add_row("1", *WORDS[:2])
    table.add_row("17", WORDS[2], WORDS[1])
    text = printed.text([table], width)
    assert max(map(len, text.splitlines())) <= width
    for word in " ".join(("operations", *WORDS)).split():
        assert word in text


def test_a_table_that_fits_is_as_wide_as_it_needs():
    table = printed.table("", ("a", "b"))
    table.add_row("1", "two words")
    assert printed.text([table], 200) == printed.text([table], 80)
    assert "two words" in printed.text([table], 80)


@pytest.mark.parametrize("columns", [80, 132])
def test_what_is_printed_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch):
    assert printed.width() == printed.WIDTH_CHARACTERS, "a log is no terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert printed.width() == columns
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    assert printed.width() == columns


def test_a_report_for_80_columns(monkeypatch: pytest.MonkeyPatch):
    model, inputs = small_models()["residual"]
    options = {"ladder": ("bf16", "fp32"), "regions": {"head": "down"}, "policy": {"module:norm": "fp32", "up.*.0": "bf16"}}
    amp = fxamp.Amp(lower="eager", **options)
    torch.compile(model, backend=amp)(*inputs)
    with pytest.warns(fxamp.FxampWarning, match="rules of the policy that decide nothing"):
        report = amp.report()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("operations", "model=bf16,", "head=fp32", "layer_norm", "module:norm=fp32"):
        assert word in text
