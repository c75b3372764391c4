"""How the house tests read the package and run Python."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import INSTALLED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fxamp"

USE_BY_NAME = "" if INSTALLED else "import fxamp; fxamp.register()\n"
"""First line of a child's code in which `backend="fxamp"` is to work."""


@dataclass(frozen=True)
class Source:
    """One file of a package."""

    module: str
    """Full name: "fxamp.rewrite.casts", and "fxamp.rewrite" for its `__init__.py`."""
    where: str
    """Path from the folder that holds the package: "fxamp/rewrite/casts.py"."""
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        return f"{self.where}:{getattr(node, 'lineno', 1)}"


def sources(package: Path) -> Iterator[Source]:
    """All files of a package, in the order of their paths."""
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package.parent)
        parts = path.with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield Source(module, path.as_posix(), ast.parse(file.read_text(encoding="utf-8"), filename=str(file)))


def plant(folder: Path, files: dict[str, str]) -> Path:
    """Writes a small package for a meta-test: `plant(tmp_path, {"fxamp/plan.py": "import fxamp.run.step"})`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "fxamp"


def run_python(code: str, *args: str, path: Path = ROOT, stdin: str = "", timeout_s: float = 300) -> str:
    """Runs code in a new Python in the folder `path`, which also heads its path, and returns what it printed.

    Raises: AssertionError, with all that it printed, when it fails.
    """
    python_path = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=path,
        env=os.environ | {"PYTHONPATH": python_path},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
