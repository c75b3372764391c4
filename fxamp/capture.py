"""(graph from Dynamo, example inputs) -> Captured: everything that planning needs to know, and no decision."""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from fxamp import graph, optable

Role = Literal["parameter", "buffer", "input", "symbol"]
Region = Literal["none", "opted_out", "users"]
"""Autocast region of the user's around a node: none, `autocast(enabled=False)`, or one with a dtype of its own."""

_IN_PLACE_OPERATORS: Final = MappingProxyType(
    {
        getattr(operator, f"i{op}"): op
        for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
    }
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about one node."""

    op: str | None
    """Canonical operation ("softmax", "mylib::scan"), None for what is no operation of torch."""
    module: str
    """Path of the module it was called in, relative to the compiled module (of a compiled function: to the module that it
    calls); "" at the top."""
    where: str
    """The user's line, "train.py:33". Where only torch's own code calls (an nn.Sequential compiled by itself): the module,
    "0 (Linear)". "" if Dynamo knows neither."""
    code: str
    """The text of that line; "" for a module."""
    region: Region
    mode_index: int
    """Counts the switches of grad mode and autocast before the node: a cast must not be shared across one."""
    classes: tuple[str, ...] = ()
    """Full names of the classes of the modules that it was called in, "torch.nn.modules.linear.Linear", outermost first."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A Dynamo graph with the facts of its nodes. The graph is a copy, and is never edited."""

    gm: fx.GraphModule
    facts: MappingProxyType[str, Facts] = field(repr=False)
    """By node name; every copy of the graph has the same names."""
    roles: MappingProxyType[str, Role]
    """By placeholder name."""
    pinned: MappingProxyType[str, str] = field(repr=False)
    """Nodes whose storage somebody writes to, or that leaves the graph more than once, with the reason: they keep their
    traced dtype from birth."""
    fresh_outputs: tuple[bool, ...]
    """For each output: does it own its memory, shared with no input and no other output?"""
    narrows: bool
    """Does the user's own program hold floats narrower than fp32?"""
    ambient: str | None
    """The autocast around the whole call, as "cpu: bfloat16", if there is one."""
    trains: bool
    device: torch.device
    """Where the graph computes: the first accelerator among its inputs, else the CPU."""

    @property
    def num_nodes(self) -> int:
        return len(self.gm.graph.nodes)


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Copies the graph and gathers its facts. `gm`, which Dynamo still reads, is left untouched."""
    pristine = graph.clone(gm)
    nodes = list(pristine.graph.nodes)
    device = _device(example_inputs, nodes)
    outputs = list(graph.operands(nodes[-1]))
    groups = {node: graph.storages(node) for node in nodes}
    inputs = {key for node in nodes if node.op in ("placeholder", "get_attr") for key in groups[node]}
    left = Counter(key for node in outputs for key in groups[node])
    floats = [t.dtype for node in nodes for t in graph.tensors_of(graph.value_of(node)) if t.is_floating_point()]
    return Captured(
        gm=pristine,
        facts=MappingProxyType(dict(_facts(nodes))),
        roles=MappingProxyType(dict(_roles(pristine, example_inputs))),
        pinned=MappingProxyType(_pinned(nodes, groups, left)),
        fresh_outputs=tuple(all(key not in inputs and left[key] == 1 for key in groups[node]) for node in outputs),
        narrows=any(torch.finfo(dtype).bits < torch.finfo(torch.float32).bits for dtype in floats),
        ambient=_ambient_autocast(device),
        trains=torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in example_inputs),
        device=device,
    )


# ---- names --------------------------------------------------------------------------------------------------------------
def name_of(node: fx.Node) -> str | None:
    """One name for an operation, whether it is called as a function, a method, an operator, or in place.

    >>> `x.softmax_(-1)`, `torch.softmax`, `F.softmax`, `torch.special.softmax`, `aten.softmax.int`  ->  "softmax"
    """
    target = node.target
    if node.op == "call_method":
        return _canonical(str(target))
    if node.op != "call_function":
        return None
    if isinstance(target, OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return _canonical(name) if namespace == "aten" else f"{namespace}::{name}"
    if isinstance(target, OpOverloadPacket):  # `torch.ops.mylib.scan`, whose overload the call itself will choose
        namespace, _, name = target._qualified_op_name.partition("::")
        return _canonical(name) if namespace == "aten" else f"{namespace}::{name}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if target in _IN_PLACE_OPERATORS:
        return _canonical(_IN_PLACE_OPERATORS[target])
    return _canonical(getattr(target, "__name__", "")) if _belongs_to_torch(target) else None


def _belongs_to_torch(target: Any) -> bool:
    if getattr(target, "__self__", None) is torch._C._VariableFunctions:  # pyright: ignore[reportAttributeAccessIssue]
        return True
    module = getattr(target, "__module__", None) or ""
    return module == "torch" or module.startswith("torch.") or module == "_operator"


def _canonical(name: str) -> str:
    name = name.removeprefix("special_")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return optable.SYNONYMS.get(name, name)


def _facts(nodes: Sequence[fx.Node]) -> Iterable[tuple[str, Facts]]:
    autocast: list[tuple[str, bool]] = []
    indices = mode_indices(nodes)
    for node in nodes:
        if _switches_mode(node):
            if node.target is torch.amp.autocast_mode._enter_autocast:
                device_type, _, enabled, *_ = (*node.args, *node.kwargs.values())
                autocast.append((str(device_type), bool(enabled)))
            elif node.target is torch.amp.autocast_mode._exit_autocast:
                autocast.pop()
        where, code = source_line(node)
        yield node.name, Facts(
            op=name_of(node),
            module=_module_path(node),
            where=where,
            code=code,
            region=_region(node, autocast),
            mode_index=indices[node],
            classes=_classes(node),
        )


def _switches_mode(node: fx.Node) -> bool:
    """Grad mode, autocast, inference mode, functorch levels, streams: a node of torch with no tensor in or out."""
    if node.op != "call_function" or isinstance(node.target, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return False
    return not graph.tensors_of([graph.value_of(n) for n in (node, *node.all_input_nodes)]) and _belongs_to_torch(
        node.target
    )


def _region(node: fx.Node, autocast: list[tuple[str, bool]]) -> Region:
    devices = {t.device.type for n in (node, *node.all_input_nodes) for t in graph.tensors_of(graph.value_of(n))}
    inner = [enabled for device_type, enabled in autocast if device_type in devices]
    if not inner:
        return "none"
    return "users" if inner[-1] else "opted_out"


_PATH_WORD: Final = re.compile(r"\w+")
_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+\n\s*(?P<code>[^\n]*)')


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    text = list(stack.values())[-1][0]
    words = [w for w in _PATH_WORD.findall(text) if w not in ("getattr", "_modules")]
    return ".".join(words[2:] if words[:1] in (["L"], ["G"]) else words)


def _classes(node: fx.Node) -> tuple[str, ...]:
    owners = [owner for _, owner in (node.meta.get("nn_module_stack") or {}).values()]
    return tuple(o if isinstance(o, str) else f"{o.__module__}.{o.__qualname__}" for o in owners)


def source_line(node: fx.Node) -> tuple[str, str]:
    """("train.py:33", "y = self.l(x)") of the user's innermost line behind a node; two empty strings if unknown."""
    trace = node.meta.get("stack_trace") or ""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        stack = node.meta.get("nn_module_stack")
        owner = list(stack.values())[-1][1] if stack else None
        return (f"{_module_path(node)} ({getattr(owner, '__name__', owner)})".strip(), "") if owner else ("", "")
    users = [f for f in frames if "/torch/nn/" not in f["file"]] or frames
    return f"{users[-1]['file'].rsplit('/', 1)[-1]}:{users[-1]['line']}", users[-1]["code"].strip()


def _roles(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterable[tuple[str, Role]]:
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if not isinstance(example, torch.Tensor):
            yield node.name, "symbol"
        elif isinstance(example, torch.nn.Parameter):
            yield node.name, "parameter"
        else:
            yield node.name, "buffer" if "_buffers" in repr(getattr(node, "_dynamo_source", "")) else "input"


# ---- aliasing and mutation --------------------------------------------------------------------------------------------
def _pinned(
    nodes: Sequence[fx.Node], groups: dict[fx.Node, frozenset[Hashable]], left: Counter[Hashable]
) -> dict[str, str]:
    reasons: dict[Hashable, str] = {}
    is_inside_func = _inside_functorch(nodes)
    for node in nodes:
        for written in writes(node):
            for key in groups[written]:
                reasons.setdefault(key, f"its memory is written by {node.name}")
        if graph.MEMORY not in node.meta and any(t._version > 0 for t in graph.tensors_of(graph.value_of(node))):
            for key in groups[node]:
                reasons.setdefault(key, "its memory is written in place")
        for operand, reason in _watched(node, is_inside_func[node]):
            for key in groups[operand]:
                reasons.setdefault(key, reason)
    for key, count in left.items():
        if count > 1:
            reasons.setdefault(key, "several outputs share its memory")
    return {
        node.name: next(reasons[key] for key in groups[node] if key in reasons)
        for node in nodes
        if any(key in reasons for key in groups[node])
    }


_BY_STRIDE: Final = frozenset(("as_strided", "set", "storage_offset", "data_ptr", "untyped_storage", "resize"))
"""Operations that read a tensor's memory past its own strides: a cast of it, which may be laid out anew, would not do."""


def _watched(node: fx.Node, is_inside_func: bool) -> Iterable[tuple[fx.Node, str]]:
    """Operands that must be the traced value itself, not a cast of it, with the reason."""
    if is_inside_func:
        reason = "used inside a torch.func transform"  # a cast there would belong to a level that its operand is not in
    elif name_of(node) in _BY_STRIDE:
        reason = f"{node.name} reads its memory by stride"
    elif node.target in (torch.autograd.grad, torch.autograd.backward):
        reason = "differentiated by the program"  # a cast of it is a new value, off the path that was recorded
    else:
        return ()
    return [(operand, reason) for operand in node.all_input_nodes]


def _inside_functorch(nodes: Sequence[fx.Node]) -> dict[fx.Node, bool]:
    """For each node: does it run between the push and the pop of a functorch level?"""
    depth, inside = 0, dict[fx.Node, bool]()
    for node in nodes:
        name = getattr(node.target, "__name__", "")
        depth += name.endswith("_increment_nesting")
        inside[node] = depth > 0
        depth -= name.endswith("_decrement_nesting")
    return inside


def mode_indices(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """For each node, how many switches of grad mode and autocast came before it."""
    count, indices = 0, dict[fx.Node, int]()
    for node in nodes:
        count += _switches_mode(node)
        indices[node] = count
    return indices


def writes(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory a node writes, or may write."""
    out = node.kwargs.get("out")
    written = _nodes_in(out)
    target = node.target
    if node.op == "call_method" and _is_in_place(str(target)):
        written += _nodes_in(node.args[:1])
    if node.op != "call_function":
        return written
    if isinstance(target, HigherOrderOperator):
        return written + node.all_input_nodes  # its body may write any of them
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        overloads = [target] if isinstance(target, OpOverload) else [getattr(target, o) for o in target.overloads()]
        for overload in overloads:
            for argument, value in zip(overload._schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written += _nodes_in(value)
            for argument in overload._schema.arguments:
                if argument.name in node.kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                    written += _nodes_in(node.kwargs[argument.name])
        return written
    if target in _IN_PLACE_OPERATORS or target is operator.setitem:
        return written + _nodes_in(node.args[:1])
    if _is_in_place(getattr(target, "__name__", "")) or _asks_in_place(target, node):
        written += _nodes_in(node.args[:1]) or _nodes_in(node.kwargs.get("input"))
    for index in optable.WRITTEN_OPERANDS.get(name_of(node) or "", ()):
        written += _nodes_in(node.args[index : index + 1])
    for name in ("running_mean", "running_var"):
        written += _nodes_in(node.kwargs.get(name))
    return written


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") or name in ("__setitem__",)


def _asks_in_place(target: Any, node: fx.Node) -> bool:
    """Is `inplace=True` among the arguments of a functional form, by name or by position?"""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    position = inplace_position(target)
    return position is not None and position < len(node.args) and node.args[position] is True


@functools.cache
def inplace_position(target: Callable[..., Any]) -> int | None:
    """Where among its positional arguments a function takes `inplace`; None if it does not."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # builtins have no signature; their in-place forms have names with an underscore
        return None
    return names.index("inplace") if "inplace" in names else None


def _nodes_in(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found


# ---- surroundings -----------------------------------------------------------------------------------------------------
def _device(example_inputs: Sequence[Any], nodes: Sequence[fx.Node]) -> torch.device:
    examples = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    made = [t.device for node in nodes for t in graph.tensors_of(graph.value_of(node))]
    accelerators = [d for d in (*examples, *made) if d.type != "cpu"]
    return accelerators[0] if accelerators else torch.device("cpu")


def _ambient_autocast(device: torch.device) -> str | None:
    for kind in dict.fromkeys((device.type, "cpu")):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return f"{kind}: {torch.get_autocast_dtype(kind)}".replace("torch.", "")
    return None
