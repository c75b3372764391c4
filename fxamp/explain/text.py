"""Graphs and plans as text: readable Python with a dtype on every line, the plan as a table, the diff of two stages."""

from __future__ import annotations

import difflib
import re
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from fxamp import formats, graph
from fxamp.capture import STEPS, Captured
from fxamp.plan import Decision, Plan

_ASSIGNED: Final = re.compile(r"^(?P<indent>\s+)(?P<name>[A-Za-z_]\w*) = ", re.MULTILINE)
_RELEASE: Final = re.compile(r";  (?:\w+ = )+None$", re.MULTILINE)
_ANNOTATION: Final = re.compile(r"# Annotation: \{.*?\} (?=File: |No stacktrace)")
_NO_TRACE: Final = re.compile(r"\n *# No stacktrace found for following nodes(?=\n)")
_OWN_LINE: Final = re.compile(rf"\n *# File: {re.escape(STEPS)}[^\n]*")
"""Of a train step, which no user has written."""
_LINE_COMMENT: Final = re.compile(r"\n\n *(?P<line># File: [^\n]*)(?P<body>(?:\n(?! *# File: )[^\n]+)*)")
_SHORT: Final = MappingProxyType({
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8", "complex64": "c64", "complex128": "c128",
    "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
})  # fmt: skip


def code(gm: fx.GraphModule) -> str:
    """The graph as Python that could be run, each line with the dtype and shape of what it yields.

    Inputs are called by the path of the parameter or the user's variable: `up_weight`, not
    `l_self_modules_up_parameters_weight_`.
    """
    text = gm.print_readable(print_output=False)
    starts = [match.start() for match in _CLASS.finditer(text)] + [len(text)]
    sections = [text[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    return "".join(_section(part, section) for part, section in zip(_in_order(gm), sections, strict=True))


_CLASS: Final = re.compile(r"^ *class \w+\(torch\.nn\.Module\):$", re.MULTILINE)


def _in_order(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and those nested in it, in the order in which `print_readable` prints them."""
    inner = [child for child in gm.children() if isinstance(child, fx.GraphModule)]
    return [gm, *(part for child in inner for part in _in_order(child))]


def _section(gm: fx.GraphModule, text: str) -> str:
    """The printed text of one graph, with dtypes and short names."""
    values = {node.name: graph.value_of(node) for node in gm.graph.nodes}

    def annotate(match: re.Match[str]) -> str:
        label = describe(values.get(match["name"]))
        return f'{match["indent"]}{match["name"]}: "{label}" = ' if label else match[0]

    text = _RELEASE.sub("", text)
    text = _OWN_LINE.sub("", _NO_TRACE.sub("", _ANNOTATION.sub("# ", text)))
    text = _ASSIGNED.sub(annotate, _merge_repeated_comments(text))
    names = short_names(gm)
    text = "\n".join(line for line in text.split("\n") if not _is_alias(line, names))
    text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)
    return _SIGNATURE.sub(_one_argument_a_line, text)


_SIGNATURE: Final = re.compile(r'^(?P<indent> +)(def forward\(self), (\w+: "[^"]*"(?:, \w+: "[^"]*")*)\):', re.MULTILINE)
_DYNAMO_WORDS: Final = re.compile(r"(?:^|(?<=_))(?:modules|parameters|buffers)_")


def short_names(gm: fx.GraphModule) -> dict[str, str]:
    """Dynamo's name of each input, and of each cast of one -> a name that the user knows; unchanged where two would clash."""
    taken = {node.name for node in gm.graph.nodes}
    names: dict[str, str] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if not str(node.target).startswith("L_"):
            continue
        short = node.name.removeprefix("l_").removeprefix("self_").rstrip("_")
        short = _DYNAMO_WORDS.sub("", short)
        short = f"_{short}" if short[:1].isdigit() else short
        stem = node.name.rstrip("_")
        casts = [other.name for other in gm.graph.nodes if other.name.startswith(f"{stem}_") and other is not node]
        wanted = {node.name: short, str(node.target): short} | {c: short + c.removeprefix(stem) for c in casts}
        if not short or taken & set(wanted.values()):
            continue
        taken |= set(wanted.values())
        names |= wanted
    return names


def _is_alias(line: str, names: dict[str, str]) -> bool:
    """Dynamo's `l_x_ = L_x_`, which says nothing once both have one name."""
    left, _, right = line.partition(" = ")
    return right in names and names[right] == names.get(left.strip().partition(":")[0])


def _one_argument_a_line(match: re.Match[str]) -> str:
    indent = match["indent"]
    arguments = match[3].replace('", ', f'",\n{indent}        ')
    return f"{indent}{match[2]},\n{indent}        {arguments},\n{indent}):"


def _merge_repeated_comments(text: str) -> str:
    """A cast and the operation that it serves come from one source line: say the line once."""
    last = ""

    def once(match: re.Match[str]) -> str:
        nonlocal last
        repeated, last = match["line"] == last, match["line"]
        return match["body"] if repeated else match[0]

    return _LINE_COMMENT.sub(once, text)


def describe(value: Any) -> str:
    """"bf16[4, 8]" for a tensor, "(f32[2], i64[2])" for a tuple of them, "" for what has no dtype."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{_SHORT.get(dtype, dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        parts = [describe(v) or type(v).__name__ for v in value]
        return f"({', '.join(parts)})"
    return ""


def plan(captured: Captured, made: Plan) -> str:
    """The plan, one line per operation: name, operation, class, formats in and out, user's line, and the reason."""
    low = " and ".join(name for name in made.formats if name in formats.narrow_names())
    count = f"{made.num_low_ops} of {len(made.operations)} floating-point operations in {low or 'a low format'}"
    return "\n".join([f"# plan for {made.variant}: {count}", *_plan_lines(captured, made)]) + "\n"


def _plan_lines(captured: Captured, made: Plan) -> list[str]:
    """The plan of one graph, then those of the graphs nested inside."""
    lines = [f"# {made.note}"] if made.note else []
    rows = [_row(d, captured) for d in made.decisions.values() if not _is_silent(d)]
    header = ("node", "operation", "class", "in", "out", "where", "reason")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header) - 1)]
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    names = [x.name for x in graph.operands(captured.gm.graph.output_node())]
    for name, back in zip(names, made.outputs, strict=True):
        if back is not None:
            lines.append(f"# output {name} is cast back to {formats.name(back)}, its traced dtype")
    for path, body in captured.bodies.items():
        callers = ", ".join(f"{x.name} ({captured.facts[x.name].where or '?'})" for x in captured.callers.get(path, ()))
        lines += ["", f"# {path}, inside {callers}", *_plan_lines(body, made.bodies[path])]
    return lines


def _is_silent(decision: Decision) -> bool:
    """Mode switches and the like, which have neither operation nor value."""
    return not graph.tensors_of(decision.value) and decision.computes == "-"


def _row(d: Decision, captured: Captured) -> tuple[str, ...]:
    tensors = graph.tensors_of(d.value)
    if d.result is not None:
        result = formats.name(d.result)
    else:
        result = "+".join(dict.fromkeys(formats.name(t.dtype) for t in tensors)) or "-"
    return (d.node, d.op or "?", d.cls.value, d.computes, result, d.facts.where, d.why)


def diff(before: str, after: str, *, names: tuple[str, str]) -> str:
    """A unified diff of two texts; "" if they are equal."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=2)
    return "\n".join(lines)
