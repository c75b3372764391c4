"""Every file of examples/ defines main(), and main() runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.source import ROOT, USE_BY_NAME, run_python

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Imported as a module, not read with runpy: Dynamo asks for the module of the functions that it compiles.
RUN = """
import importlib, pathlib, sys
path = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(path.parent))
importlib.import_module(path.stem).main()
"""


@pytest.mark.slow  # compiles models; `make examples`
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path):
    run_python(USE_BY_NAME + RUN, str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def main(): raise ValueError('broken')", "broken"),
        ("print('no function')", "no attribute 'main'"),
        ("def main(): import sys; sys.exit(3)", "exit status 3"),
    ],
)
def test_broken_example_is_found(tmp_path, text, message):
    (tmp_path / "broken_example.py").write_text(text)
    with pytest.raises(AssertionError, match=message):
        run_python(RUN, str(tmp_path / "broken_example.py"))
