from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from tests.house.source import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look there for the types of their fields
    spec.loader.exec_module(module)
    return module


mutants = load()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_every_mutant_still_applies(mutant):
    """Where this fails, the rule that the mutant takes out was rewritten: say in tools/mutants.py how it looks now."""
    text = mutant.applied()
    assert text != (ROOT / mutant.file).read_text()
    ast.parse(text)
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists()


def test_names_are_unique():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("old", "times"), [("no such text", 0), ("class ", 11)])
def test_a_mutant_that_does_not_apply_once_is_refused(tmp_path, monkeypatch, old: str, times: int):
    (tmp_path / "errors.py").write_text("class A: ...\n" * 11)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=f"planted: '{old}' stands {times} times in errors.py"):
        mutants.Mutant("planted", "errors.py", old, "", ()).applied()


def test_rows_of_some_mutants_take_the_place_of_theirs(tmp_path):
    path = tmp_path / "mutants.md"
    first, second, third = (mutant.name for mutant in mutants.MUTANTS[:3])
    dead, alive = mutants.Outcome("tests/test_x.py::test_a[1 | 2]", 1.5), mutants.Outcome("", 2.0)
    path.write_text(mutants.page([(first, alive), (third, dead), ("a rule that is gone", dead)]))
    rows = mutants.merged(path, [(first, dead), (second, alive)])
    assert rows == [(first, dead), (second, alive), (third, dead)]
    assert mutants.page(rows).startswith("# Mutants\n\n2 of 3 mutants are killed.")


CHECK = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("mutants", sys.argv[1])
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants
spec.loader.exec_module(mutants)
root = pathlib.Path(sys.argv[2])
mutants.ROOT = root
harmless = mutants.Mutant("harmless", "fxamp/__init__.py", "x = 1", "x = 1  # one", ("tests/test_x.py",))
harmful = mutants.Mutant("harmful", "fxamp/__init__.py", "x = 1", "x = 2", ("tests/test_x.py",))
import multiprocessing
for mutant in (harmless, harmful):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.apply(mutants.run, (mutant, mutant.tests), {"root": root}).killed_by or "survived")
"""


def test_a_mutant_is_killed_by_the_test_that_fails_and_may_survive(tmp_path):
    (tmp_path / "fxamp").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (tmp_path / "fxamp/__init__.py").write_text("x = 1\n")
    (tmp_path / "tests/test_x.py").write_text("import fxamp\ndef test_one(): assert fxamp.x == 1\n")
    command = [sys.executable, "-c", CHECK, str(ROOT / "tools" / "mutants.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["survived", "tests/test_x.py::test_one"]
