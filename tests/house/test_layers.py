"""Imports point down: a module imports lower levels and its own package only, and nothing imports in a circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.house.source import PACKAGE, Source, plant, sources

LEVELS = MappingProxyType(
    {
        "errors": 0,
        "formats": 0,
        "globs": 0,
        "garbage": 0,
        "handing_on": 0,
        "optable": 1,
        "custom_function": 1,
        "tf32": 1,
        "ops": 1,
        "watch_ops": 2,
        "_patches": 1,
        "kernels": 1,
        "scaling": 1,
        "scheduler": 1,
        "directional": 1,
        "policy": 2,
        "graph": 2,
        "ladder": 3,
        "guards": 3,
        "widening": 3,
        "instances": 3,
        "calls": 3,
        "as_given": 3,
        "capture": 3,
        "destination": 3,
        "registered": 3,
        "legal": 3,
        "plan": 4,
        "coverage": 4,
        "watched": 4,
        "passes": 4,
        "options": 4,
        "rewrite": 5,
        "joint": 5,
        "explain": 6,
        "lower": 6,
        "run": 7,
        "backend": 8,
        "testing": 9,
        "__init__": 9,
        "__main__": 10,
        "demo": 9,
        "profiled_script": 9,
        "doctor": 9,
    }
)
"""Files and folders of fxamp/ -> level. A new file needs a row: where it stands is a decision."""


def unit(module: str) -> str:
    """The row of the table that a module belongs to: "rewrite" for fxamp.rewrite.casts."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(source: Source, modules: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Every module of the package that a file imports, at any depth but under `if TYPE_CHECKING:`."""
    package = source.module.split(".")[0]

    def known(name: str) -> str:
        """The module that `name` is or stands in: fxamp.errors for fxamp.errors.FxampError."""
        while name not in modules and name != package:
            name = name.rpartition(".")[0]
        return name

    def visit(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for child in node.orelse:
                    yield from visit(child)
                return
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                # Ruff bans relative imports, which have level > 0.
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names = [name]
            case _:
                names = []
        yield from ((node, known(name)) for name in names if f"{name}.".startswith(f"{package}."))
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return visit(source.tree)


def violations(package: Path) -> list[str]:
    files = list(sources(package))
    modules = {file.module for file in files}
    found: list[str] = []
    inside: dict[str, set[str]] = {}  # between units, levels rule out circles
    for file in files:
        here = "__main__" if file.module.endswith(".__main__") else unit(file.module)
        if here not in LEVELS:
            found.append(f"{file.where} is in no layer: give it a row in {Path(__file__).name}")
            continue
        for node, target in imports(file, modules):
            there = unit(target)
            if there == here:
                inside.setdefault(file.module, set()).add(target)
            elif there in LEVELS and LEVELS[there] >= LEVELS[here]:
                found.append(f"{file.at(node)}: {here} (L{LEVELS[here]}) imports {target} (L{LEVELS[there]})")
    try:
        graphlib.TopologicalSorter(inside).prepare()
    except graphlib.CycleError as error:
        found.append(f"imports in a circle: {' -> '.join(error.args[1])}")
    return found


def test_imports_point_down():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("policy.py", "from fxamp import backend"),
        ("policy.py", "import fxamp.backend as b"),
        ("policy.py", "from fxamp.backend import Amp"),
        ("policy.py", "def f():\n    from fxamp.backend import Amp"),
        ("policy.py", "import importlib\nimportlib.import_module('fxamp.backend')"),
        ("policy.py", "from fxamp.graph import clone"),  # the same level
        ("policy.py", "from fxamp import Amp"),  # the package itself stands at the top
        ("policy.py", "import fxamp"),
        ("joint/casts.py", "from fxamp.rewrite import casts"),
        ("utils.py", ""),
        ("joint/casts.py", "from fxamp.joint import scale"),  # a circle: scale imports casts
    ],
)
def test_planted_violation_is_found(tmp_path, file, text):
    legal = {
        "fxamp/__init__.py": "from fxamp.backend import Amp",
        "fxamp/backend.py": "from fxamp import policy\nfrom fxamp.joint import scale\nclass Amp: ...",
        "fxamp/optable.py": "from fxamp.errors import FxampError\nfrom __future__ import annotations",
        "fxamp/errors.py": "import torch",
        "fxamp/graph.py": "",
        "fxamp/policy.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fxamp.backend import Amp",
        "fxamp/rewrite/casts.py": "import fxamp.optable",
        "fxamp/joint/__init__.py": "from fxamp.joint.scale import PASSES",
        "fxamp/joint/scale.py": "from fxamp.joint import casts",
        "fxamp/joint/casts.py": "",
    }
    assert violations(plant(tmp_path, legal)) == []
    (found,) = violations(plant(tmp_path, {f"fxamp/{file}": text}))
    assert "imports" in found or "no layer" in found
