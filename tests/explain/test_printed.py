from __future__ import annotations

import fxamp
from fxamp.explain import printed


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
