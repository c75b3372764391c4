"""Does a running function only return what the call that it waits for will give it? Read off its source.

    def wrapper(*args):
        output = fn(*args)                     # here it waits
        if not isinstance(output, tuple):
            output = output.to_tuple()
        return output                          # yes

Whatever is not plain to see is a no: what happens to the value then is as before, only not as good as could be.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Final

RESUMES = "torch_dynamo_resume_in"
"""How Dynamo names the rest of a function behind a graph break; the first part of the function calls it last."""


def hands_on(frame: FrameType) -> bool:
    """Does the function do nothing with the value that it waits for, but return it?"""
    function = _syntax(frame.f_code)
    if function is None:
        return False
    blocks = _blocks(function.body, frame.f_lineno)
    if not blocks:
        return False
    waiting = blocks[-1].statements[0]
    if sum(isinstance(node, ast.Call) for node in ast.walk(waiting)) != 1:
        return False  # which of them is running?
    match waiting:
        case ast.Return(value=ast.Call()):
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
            left = [s for b in reversed(blocks) for s in b.statements[1:]]
            return not any(b.repeats for b in blocks) and name not in _shared(function) and _Rest({name}).returns(left)
        case _:
            return False


_OF_CONTAINERS: Final = frozenset(("to_tuple", "_asdict", "copy", "items", "keys", "values"))
"""Methods that give what a container holds: `to_tuple` is that of transformers' outputs."""


_ALL_NAMES: Final = frozenset(("locals", "vars", "eval", "exec"))
"""Functions that read a name without it being written there."""


@dataclass(frozen=True)
class _Block:
    """What is left of a block: from the statement that runs, or that holds it, on."""

    statements: Sequence[ast.stmt]
    repeats: bool
    """Is it the body of a loop?"""


def _syntax(code: CodeType) -> ast.FunctionDef | None:
    """The function that some code, or Dynamo's rest of it, was compiled from."""
    try:
        lines, first = inspect.getsourcelines(code)
        (function,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # there is none, it is not its own, or there are several
        return None
    if not isinstance(function, ast.FunctionDef):
        return None
    if code.co_name != function.name and not code.co_name.startswith(f"{RESUMES}_{function.name}_at_"):
        return None
    ast.increment_lineno(function, first - 1)
    return function


def _shared(function: ast.FunctionDef) -> set[str]:
    """Names that other functions may read as well."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        elif node is not function and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            found.update(inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))
    return found


def _blocks(block: Sequence[ast.stmt], line: int, *, repeats: bool = False) -> list[_Block]:
    """What is left of the blocks around a line, outermost first; none if no statement is there."""
    for i, statement in enumerate(block):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            is_loop = isinstance(statement, ast.For | ast.While)
            inner = next((b for b in _bodies(statement) if b[0].lineno <= line <= (b[-1].end_lineno or 0)), None)
            inside = [] if inner is None else _blocks(inner, line, repeats=is_loop)
            return [_Block(block[i:], repeats), *inside]
    return []


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    match statement:
        case ast.If(body=body, orelse=orelse) | ast.For(body=body, orelse=orelse) | ast.While(body=body, orelse=orelse):
            yield from filter(None, (body, orelse))
        case ast.With(body=body):
            yield body
        case _:  # try and match go on in several places
            return


@dataclass
class _Rest:
    """The rest of a function: does it only return what `held` names?"""

    held: set[str]

    def returns(self, statements: Sequence[ast.stmt]) -> bool:
        for statement in statements:
            match statement:
                case ast.Return(value=value) if value is None or isinstance(value, ast.Name):
                    return True
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if self.is_held(value):
                    self.held.add(name)
                case ast.If(test=test, body=body, orelse=orelse) if self.asks(test):
                    if not (self.returns(body) and self.returns(orelse)):
                        return False
                case _ if self.reads(statement):
                    return False
                case _:
                    pass
        return True

    def is_held(self, value: ast.expr) -> bool:
        """Is it the value, or what it holds?"""
        match value:
            case ast.Name(id=name):
                return name in self.held
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[], keywords=[]):
                return name in _OF_CONTAINERS and self.is_held(owner)
            case _:
                return False

    def reads(self, syntax: ast.AST) -> bool:
        """Is one of the names in it?"""
        return any(isinstance(node, ast.Name) and node.id in self.held | _ALL_NAMES for node in ast.walk(syntax))

    def asks(self, test: ast.expr) -> bool:
        """Does a condition ask of the value at most what it is an instance of, or whether it is None?"""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.asks(operand)
            case ast.BoolOp(values=values):
                return all(map(self.asks, values))
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(), kind]):
                return not self.reads(kind)
            case ast.Compare(left=ast.Name(), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return True
            case _:
                return not self.reads(test)
