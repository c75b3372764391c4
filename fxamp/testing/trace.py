"""Program -> the graph that Dynamo would hand over, in milliseconds: a walk over the program's syntax, on fake tensors.

Nodes, targets and recorded values are those of Dynamo (tests/testing/test_program.py compares them). What only Dynamo can
capture (bodies of higher-order operations, control flow) is refused.
"""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.amp import autocast_mode

from fxamp import errors, graph
from fxamp.testing.program import NAMES, Program

_Operators = Mapping[type[ast.AST], Callable[..., Any]]

_BINARY: Final[_Operators] = MappingProxyType(
    {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
        ast.MatMult: operator.matmul, ast.Pow: operator.pow,
    }
)  # fmt: skip
_IN_PLACE: Final[_Operators] = MappingProxyType(
    {ast.Add: operator.iadd, ast.Sub: operator.isub, ast.Mult: operator.imul, ast.Div: operator.itruediv}
)
_COMPARE: Final[_Operators] = MappingProxyType({ast.Gt: operator.gt, ast.Lt: operator.lt, ast.Eq: operator.eq})


def trace(program: Program) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """(the graph of a program as Dynamo would capture it, its example inputs).

    Raises: InvalidOption for syntax that programs of `fxamp.testing` do not use, and for higher-order operations.
    """
    made = program.make_arguments()
    walk = _Walk(program)
    with walk.mode, _modes_restored():
        walk.bind(made)
        for statement in program.tree.body:
            walk.run(statement)
    gm = fx.GraphModule({}, walk.built)
    tensors = list(made.values())
    return gm, [t for t, is_first in zip(tensors, first_seen(tensors), strict=True) if is_first]


def first_seen(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which of them are not an earlier one once more? Dynamo makes one placeholder of both."""
    return [all(t is not earlier for earlier in tensors[:i]) for i, t in enumerate(tensors)]


@contextlib.contextmanager
def _modes_restored() -> Generator[None]:
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        yield


class _Walk:
    """Evaluates statements, and records every call that has a tensor in it. Tensors are known by their nodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.built = fx.Graph()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values: dict[str, Any] = {}
        self.stack_trace = ""

    def bind(self, made: dict[str, torch.Tensor]) -> None:
        nodes: dict[int, fx.Node] = {}
        for argument in self.program.arguments:
            tensor = made[argument.name]
            if id(tensor) not in nodes:
                source = f"L['self']._{argument.kind}s['{argument.name}']"
                fake = self.mode.from_tensor(tensor)
                nodes[id(tensor)] = graph.record_input(self.built, argument.name, fake, source=source)
            self.values[argument.name] = nodes[id(tensor)]

    # ---- statements -----------------------------------------------------------------------------------------------------
    def run(self, statement: ast.stmt) -> None:
        line = self.program.text.splitlines()[statement.lineno - 1]
        self.stack_trace = f'  File "{self.program.file}", line {statement.lineno}, in forward\n    {line.strip()}\n'
        match statement:
            case ast.Assign(targets=[target], value=value):
                self.assign(target, self.eval(value))
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                self.values[name] = self.call(_IN_PLACE[type(op)], self.values[name], self.eval(value))
            case ast.AugAssign(target=ast.Subscript(value=owner, slice=index), op=op, value=value):
                node, key = self.eval(owner), self.eval(index)
                part = self.call(operator.getitem, node, key)
                self.call(operator.setitem, node, key, self.call(_IN_PLACE[type(op)], part, self.eval(value)))
            case ast.Expr(value=value):
                self.eval(value)
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as context)], body=body):
                with self.region(context):
                    for inner in body:
                        self.run(inner)
            case ast.Return(value=value) if value is not None:
                self.built.output(self.eval(value))
            case _:
                raise self.refusal(statement)

    def assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.values[name] = value
            case ast.Tuple(elts=parts):
                for i, part in enumerate(parts):
                    self.assign(part, self.call(operator.getitem, value, i))
            case ast.Subscript(value=owner, slice=index):
                self.call(operator.setitem, self.eval(owner), self.eval(index), value)
            case _:
                raise self.refusal(target)

    @contextlib.contextmanager
    def region(self, context: ast.Call) -> Generator[None]:
        args = [ast.literal_eval(a) for a in context.args]
        kwargs = {str(k.arg): self.eval(k.value) for k in context.keywords}
        match ast.unparse(context.func):
            case "torch.no_grad":
                before = torch.is_grad_enabled()
                self.call(torch._C._set_grad_enabled, False)
                yield
                self.call(torch._C._set_grad_enabled, before)
            case "torch.autocast":
                enter, leave = autocast_mode._enter_autocast, autocast_mode._exit_autocast
                entered = (*args, kwargs.get("dtype"), kwargs.get("enabled", True), None)
                node = graph.record_call(self.built, enter, entered, {}, stack_trace=self.stack_trace)
                with torch.autocast(*args, **kwargs):
                    yield
                graph.record_call(self.built, leave, (node,), {}, stack_trace=self.stack_trace)
            case _:
                raise self.refusal(context)

    # ---- expressions ----------------------------------------------------------------------------------------------------
    def eval(self, expression: ast.expr) -> Any:
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.values[name] if name in self.values else NAMES[name]
            case ast.Tuple(elts=parts):
                return tuple(map(self.eval, parts))
            case ast.List(elts=parts):
                return list(map(self.eval, parts))
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(None if part is None else self.eval(part) for part in (lower, upper, step)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self.eval(operand)
                return self.call(operator.neg, value) if isinstance(value, fx.Node) else -value
            case ast.BinOp(left=left, op=op, right=right):
                return self.call(_BINARY[type(op)], self.eval(left), self.eval(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.call(_COMPARE[type(op)], self.eval(left), self.eval(right))
            case ast.Subscript(value=owner, slice=index):
                return self.call(operator.getitem, self.eval(owner), self.eval(index))
            case ast.Attribute(value=owner, attr=name):
                value = self.eval(owner)
                if isinstance(value, fx.Node):
                    raise self.refusal(expression)
                return getattr(value, name)
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=args, keywords=keywords):
                value = self.eval(owner)
                target, first = (name, [value]) if isinstance(value, fx.Node) else (getattr(value, name), [])
                kwargs = {str(k.arg): self.eval(k.value) for k in keywords}
                return self.call(target, *first, *map(self.eval, args), **kwargs)
            case _:
                raise self.refusal(expression)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """One call, recorded with what it gives. A tuple is known by its node too, as Dynamo does."""
        node = graph.record_call(self.built, target, args, kwargs, stack_trace=self.stack_trace)
        now = fx.map_arg((args, kwargs), graph.value_of)  # pyright: ignore[reportArgumentType]
        values, named = _thaw(now)
        value = getattr(values[0], target)(*values[1:], **named) if isinstance(target, str) else target(*values, **named)
        graph.set_value(node, value)
        return node

    def refusal(self, syntax: ast.AST) -> errors.InvalidOption:
        line = getattr(syntax, "lineno", 0)
        return errors.InvalidOption(
            f"`{ast.unparse(syntax).splitlines()[0]}` cannot be traced",
            where=f"{self.program.file}:{line}",
            way_out="Give lower='eager' or another: then Dynamo captures it",
        )


def _thaw(value: Any) -> Any:
    """`fx.map_arg` gives immutable lists and dicts, which some operations do not take."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_thaw, value))
    if isinstance(value, list):
        return list(map(_thaw, value))
    if isinstance(value, dict):
        return {key: _thaw(part) for key, part in value.items()}
    return value
