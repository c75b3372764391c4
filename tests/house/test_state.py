"""No module-level mutable state: what lives across calls has an owner, an object that somebody made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, Source, plant, sources

ALLOWED = frozenset({("fxamp/backend.py", "_SHARED")})
"""The registry behind `fxamp.shared`, the one such state that the design allows."""

MUTABLE_TYPES = frozenset(
    {
        *("dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "ChainMap", "deque"),
        *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "ContextVar", "local", "count"),
    }
)


def is_mutable(value: ast.expr | None) -> bool:
    match value:
        case ast.Dict() | ast.List() | ast.Set() | ast.DictComp() | ast.ListComp() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in MUTABLE_TYPES
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name))):  # dict[str, int]()
            return name in MUTABLE_TYPES
        case ast.Tuple():
            return any(map(is_mutable, value.elts))
        case _:
            return False


def is_constant(name: str, annotation: ast.expr | None, value: ast.expr) -> bool:
    """`NAME: Final = {"a": 1}`. An empty one can only be there to be filled."""
    final = annotation is not None and "Final" in ast.unparse(annotation)
    filled = bool(list(ast.iter_child_nodes(value))) and not isinstance(value, ast.Call)
    return name.isupper() and final and filled


def assignments(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.expr, ast.expr | None, ast.expr]]:
    """(statement, target, annotation, value) of what runs at import: also in `if` and `try`, and in classes."""
    for statement in body:
        match statement:
            case ast.Assign(targets=targets, value=value):
                yield from ((statement, target, None, value) for target in targets)
            case ast.AnnAssign(target=target, annotation=annotation, value=ast.expr() as value):
                yield statement, target, annotation, value
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case _:
                inner = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
                yield from assignments(inner)
                for handler in getattr(statement, "handlers", []):
                    yield from assignments(handler.body)


def violations(package: Path) -> list[str]:
    return [found for source in sources(package) for found in violations_in(source)]


def violations_in(source: Source) -> Iterator[str]:
    for statement, target, annotation, value in assignments(source.tree.body):
        name = ast.unparse(target)
        dunder = name.startswith("__") and name.endswith("__")  # __all__, __slots__: by convention lists, never changed
        if dunder or not is_mutable(value) or is_constant(name, annotation, value):
            continue
        if (source.where, name) not in ALLOWED:
            yield f"{source.at(statement)}: {name} is mutable and outlives every call"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.at(node)}: global {', '.join(node.names)}"


def test_no_module_level_state():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}",
        "CACHE = {}",
        "CACHE: dict[str, int] = {}",
        "CACHE: Final = {}",
        "CACHE: Final = dict()",
        "cache: Final = {1: 2}",
        "seen = set()",
        "seen = set[int]()",
        "seen = [x for x in range(3)]",
        "graphs = weakref.WeakKeyDictionary()",
        "pair = ({}, 1)",
        "a = b = []",
        "if True:\n    cache = {}",
        "try:\n    pass\nexcept ImportError:\n    cache = {}",
        "class Amp:\n    instances = []",
        "count = 0\ndef f():\n    global count\n    count += 1",
    ],
)
def test_planted_state_is_found(tmp_path, text):
    assert len(violations(plant(tmp_path, {"fxamp/plan.py": text}))) == (2 if "a = b" in text else 1)


def test_constants_and_the_registry_pass(tmp_path):
    constants = """
__all__ = ["a"]
TABLE: Final = {"softmax": 1}
NAMES: typing.Final[list[str]] = ["a"]
PRESETS = MappingProxyType({"a": 1})
KNOWN = frozenset({1, 2})
ORDER = (1, 2)
ROUNDS = tuple([1, 2])
def f():
    found = []
    return found
"""
    package = plant(tmp_path, {"fxamp/plan.py": constants, "fxamp/backend.py": "_SHARED: dict[str, int] = {}"})
    assert violations(package) == []
    assert len(violations(plant(tmp_path, {"fxamp/plan.py": "_SHARED = {}"}))) == 1, "one file has the exception"
