"""FX graphs, nodes and their meta are edited in fxamp/graph.py only: there every new node gets its meta and its why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, plant, sources

EDITOR = "fxamp/graph.py"

METHODS = frozenset(
    {
        *("create_node", "call_function", "call_method", "call_module", "get_attr", "placeholder"),
        *("node_copy", "graph_copy", "erase_node", "eliminate_dead_code", "inserting_before", "inserting_after"),
        *("replace_all_uses_with", "replace_input_with", "update_arg", "update_kwarg", "insert_arg"),
    }
)
"""Of `fx.Graph` and `fx.Node`. `append` and `prepend`, which move nodes, are left out: lists have them too."""

FIELDS = frozenset({"args", "kwargs", "target", "meta"})
"""Of `fx.Node`: neither assigned to, nor into."""


def edits(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        match node:
            # An `fx.Interpreter` passes on to `super().call_function(...)`, which edits nothing.
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")))):
                pass
            case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS:
                yield node, f".{name}("
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="meta"), attr="update" | "pop" | "setdefault")):
                yield node, ".meta changed"
            # `self.args = args` is an object's own field.
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if name in FIELDS:
                yield node, f".{name} ="
            case ast.Subscript(value=ast.Attribute(attr="meta"), ctx=ast.Store() | ast.Del()):
                yield node, ".meta[...] ="


def violations(package: Path) -> list[str]:
    return [
        f"{source.at(node)}: {what} belongs into {EDITOR}"
        for source in sources(package)
        if source.where != EDITOR
        for node, what in edits(source.tree)
    ]


def test_only_the_editor_edits():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    "text",
    [
        "gm.graph.call_function(f, (x,))",
        "graph.create_node('call_function', f)",
        "graph.call_method('to', (x,))",
        "with graph.inserting_before(node): ...",
        "node.replace_all_uses_with(new)",
        "node.args = (x,)",
        "node.meta['val'] = x",
        "del node.meta['val']",
        "node.meta.update(old.meta)",
        "new.meta = old.meta",
    ],
)
def test_planted_edit_is_found(tmp_path, text):
    assert len(violations(plant(tmp_path, {"fxamp/joint/casts.py": text}))) == 1
    (tmp_path / "fxamp/joint/casts.py").unlink()
    assert violations(plant(tmp_path, {EDITOR: text})) == []


def test_readers_pass(tmp_path):
    text = """
class Run(Interpreter):
    def call_function(self, target, args, kwargs):
        self.args = args
        return super().call_function(target, args, kwargs)
x = node.meta["val"]
y = node.meta.get("val")
"""
    assert violations(plant(tmp_path, {"fxamp/legal.py": text})) == []
