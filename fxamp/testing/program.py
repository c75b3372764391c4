"""A program as text: one function whose annotations say what its arguments are. It prints as it is read."""

from __future__ import annotations

import ast
import hashlib
import linecache
import re
import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from fxamp import errors

DTYPES: Final = MappingProxyType(
    {
        "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
        "i64": torch.int64, "i32": torch.int32, "b8": torch.bool,
    }
)  # fmt: skip
"""Names of dtypes in annotations, which are also those of fxamp's dumps."""

Kind = Literal["input", "parameter", "buffer"]

_SPEC: Final = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?P<words>(?: \w+)*)")
_WORDS: Final = frozenset(("grad", "parameter", "buffer", "whole"))


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a program, read off its annotation."""

    name: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    kind: Kind = "input"
    needs_grad: bool = False
    is_whole: bool = False
    """Are its values small whole numbers, which every float format holds exactly?"""
    expression: str = ""
    """For an argument that is another one, or a view of it: `x`, `x.t()`."""

    @staticmethod
    def parse(name: str, text: str) -> Argument:
        """`f32[4, 4] grad`, `f32[4] buffer whole`, `= x.t()`.

        Raises: InvalidOption for anything else.
        """
        if text.startswith("="):
            return Argument(name=name, expression=text[1:].strip())
        match = _SPEC.fullmatch(text)
        words = frozenset(match["words"].split()) if match else frozenset[str]()
        if match is None or match["dtype"] not in DTYPES or words - _WORDS:
            raise errors.InvalidOption(
                f"argument {name!r} of a program is annotated {text!r}",
                way_out="Write 'f32[4, 4]', then 'grad', 'parameter', 'buffer' or 'whole', or '= x.t()' for a view of x",
            )
        kind: Kind = "parameter" if "parameter" in words else "buffer" if "buffer" in words else "input"
        return Argument(
            name=name,
            dtype=DTYPES[match["dtype"]],
            shape=tuple(int(n) for n in match["shape"].replace(",", " ").split()),
            kind=kind,
            needs_grad="grad" in words or kind == "parameter",
            is_whole="whole" in words,
        )

    def make(self) -> torch.Tensor:
        """A new tensor of this kind, with the same values every time: they depend on the name alone."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        if self.dtype == torch.bool:
            value = torch.rand(self.shape, generator=generator) > 0.5
        elif not self.dtype.is_floating_point:
            value = torch.randint(0, 4, self.shape, generator=generator).to(self.dtype)  # also good as an index
        elif self.is_whole:
            value = torch.randint(-2, 3, self.shape, generator=generator).to(self.dtype)
        else:
            value = torch.randn(self.shape, generator=generator).to(self.dtype)
        return nn.Parameter(value) if self.kind == "parameter" else value.requires_grad_(self.needs_grad)


@dataclass(frozen=True)
class Program:
    """A program to compile, made from its own source; `eval(repr(program)) == program`.

        Program('''
        def forward(x: "f32[4, 4] grad", w: "f32[4, 4] parameter", m: "f32[4] buffer", y: "= x.t()"):
            a = x @ w
            m.add_(1.0)
            return a, y
        ''')

    Annotations give dtype, shape and kind of the arguments: inputs, parameters and buffers of a module, or expressions of
    earlier inputs, for inputs that share memory. `whole` asks for small whole numbers. The body knows `torch`, `F`,
    `checkpoint(fn, *args)` and `cond(predicate, true_fn, false_fn, operands)`, and returns a tuple.

    Raises: InvalidOption if the text is no such function.
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", textwrap.dedent(self.text).strip() + "\n")
        _ = self.arguments

    def __repr__(self) -> str:
        return f"Program('''\n{self.text}''')"

    @cached_property
    def tree(self) -> ast.FunctionDef:
        """The function's syntax."""
        try:
            (function,) = ast.parse(self.text).body
        except (SyntaxError, ValueError) as error:
            raise errors.InvalidOption(f"a program cannot be read: {error}", way_out="Write one function") from error
        if not isinstance(function, ast.FunctionDef):
            raise errors.InvalidOption(f"a program is a {type(function).__name__}", way_out="Write one function")
        return function

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """What the annotations say."""
        return tuple(
            Argument.parse(a.arg, str(a.annotation.value) if isinstance(a.annotation, ast.Constant) else "")
            for a in self.tree.args.args
        )

    @cached_property
    def file(self) -> str:
        """The name of the file that the program stands in, as far as stack traces are concerned."""
        return f"program_{hashlib.sha256(self.text.encode()).hexdigest()[:8]}.py"

    @property
    def has_higher_order(self) -> bool:
        """Does it hold a checkpoint or a cond, which only Dynamo can capture?"""
        names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        return bool(names & {"checkpoint", "cond"})

    def make_arguments(self) -> dict[str, torch.Tensor]:
        """New tensors for one run, by name. The same values every time."""
        made: dict[str, torch.Tensor] = {}
        for argument in self.arguments:
            if argument.expression:
                made[argument.name] = eval(argument.expression, {"torch": torch}, dict(made))
            else:
                made[argument.name] = argument.make()
        return made

    def function(self, *, traced: bool = False) -> Callable[..., Any]:
        """The function itself. `traced` gives it the `cond` that Dynamo captures, which is slow to run by itself."""
        lines = self.text.splitlines(keepends=True)
        linecache.cache[self.file] = (len(self.text), None, lines, self.file)  # so that stack traces show its lines
        namespace = dict(TRACED_NAMES if traced else NAMES)
        exec(compile(self.text, self.file, "exec"), namespace)
        return namespace[self.tree.name]

    def module(self, made: Mapping[str, torch.Tensor]) -> ProgramModule:
        """The program as a module to compile, which owns its parameters and buffers and takes the other arguments."""
        return ProgramModule(self.function(traced=True), self.arguments, made)

    def inputs(self, made: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What to call the module with."""
        return tuple(made[a.name] for a in self.arguments if a.kind == "input")


class ProgramModule(nn.Module):
    """A program in the form that people compile."""

    def __init__(self, fn: Callable[..., Any], arguments: Sequence[Argument], made: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.fn, self.order = fn, tuple((a.name, a.kind == "input") for a in arguments)
        for argument in arguments:
            if argument.kind == "buffer":
                self.register_buffer(argument.name, made[argument.name])
            elif argument.kind == "parameter":
                value = made[argument.name]
                assert isinstance(value, nn.Parameter), argument
                self.register_parameter(argument.name, value)

    def forward(self, *inputs: torch.Tensor) -> Any:
        rest = list(inputs)
        return self.fn(*[rest.pop(0) if is_input else getattr(self, name) for name, is_input in self.order])


def _checkpoint(fn: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False)


def _cond(predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return (true_fn if predicate else false_fn)(*operands)


NAMES: Final[Mapping[str, Any]] = MappingProxyType(
    {"torch": torch, "F": F, "checkpoint": _checkpoint, "cond": _cond}
)
"""What the body of a program may name."""
TRACED_NAMES: Final[Mapping[str, Any]] = MappingProxyType({**NAMES, "cond": torch.cond})

