"""(graph from Dynamo, example inputs) -> Captured: everything that planning needs to know, and no decision."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Final, Literal

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor

from fxamp import custom_function, garbage, graph, optable
from fxamp.custom_function import Declared, Forward

Role = Literal["parameter", "buffer", "input", "symbol"]
Region = Literal["none", "opted_out", "users", "function"]
"""Autocast region of the user's around a node: none, `autocast(enabled=False)`, one with a dtype of its own, or the forward of
an autograd.Function with `custom_fwd(cast_inputs=...)`, in which autocast is off."""

AUTOGRAD_FUNCTION: Final = "higher_order::autograd_function_apply"

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
    """The user's line, "train.py:33". Where only torch's own code calls (an nn.Sequential compiled by itself, or in a train
    step): the module, "0 (Linear)", or its class, if it is the whole. "" if Dynamo knows neither."""
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
    read_by_stride: frozenset[str] = field(repr=False)
    """Those of the pinned nodes whose memory an operation reads past their own strides: what makes them must be what was
    traced, not a cast behind it, which a compiler may lay out anew."""
    hands_on: frozenset[str] = field(repr=False)
    """Nodes that may return the memory of a cast of an operand: each needs a cast of its own, which nobody else reads or hands
    out."""
    fresh_outputs: tuple[bool, ...]
    """For each output: does it own its memory, shared with no input and no other output?"""
    narrows: bool
    """Does the user's own program hold floats narrower than fp32?"""
    ambient: str | None
    """The autocast around the whole call, as "cpu: bfloat16", or "enabled=False", if there is one."""
    trains: bool
    device: torch.device
    """Where the graph computes: the first accelerator among its inputs, else the CPU."""
    bodies: MappingProxyType[str, Captured] = field(repr=False)
    """The graphs nested in its higher-order operations, by the attribute of `gm` that holds each. One that several operations
    call is there once, with facts that hold for all of them."""
    function: Declared | None = None
    """What the autograd.Function declares about autocast whose forward or backward it is."""

    @property
    def everywhere(self) -> tuple[Facts, ...]:
        """The facts of the graph's nodes and of those of all graphs nested in it."""
        return (*self.facts.values(), *(facts for body in self.bodies.values() for facts in body.everywhere))

    @property
    def num_bytes(self) -> int:
        """Of all values that the graph computes, views too, in the example that it was traced for."""
        calls = (node for node in self.gm.graph.nodes if node.op.startswith("call_"))
        values = (value for node in calls for value in graph.tensors_of(graph.value_of(node)))
        inside = sum(body.num_bytes for body in self.bodies.values())
        return inside + sum(graph.numel(value) * value.element_size() for value in values)

    @functools.cached_property
    def callers(self) -> Mapping[str, list[fx.Node]]:
        """The higher-order operations that call each body."""
        return graph.callers(self.gm.graph.nodes)

    @property
    def differentiable(self) -> dict[int, fx.Node]:
        """The inputs that require gradients, by position."""
        inputs = enumerate(self.gm.graph.find_nodes(op="placeholder"))
        return {i: node for i, node in inputs if any(t.requires_grad for t in graph.tensors_of(graph.value_of(node)))}

    @property
    def running_statistics(self) -> tuple[int, ...]:
        """Positions of the inputs that batch or instance norms keep their statistics in."""
        inputs = {node: i for i, node in enumerate(self.gm.graph.find_nodes(op="placeholder"))}
        norms = [n for n in self.gm.graph.nodes if self.facts[n.name].op in ("batch_norm", "instance_norm")]
        operands = {x for norm in norms for x in (*norm.args[1:3], *map(norm.kwargs.get, ("running_mean", "running_var")))}
        return tuple(sorted(inputs[x] for x in operands if isinstance(x, fx.Node) and x in inputs))

    @property
    def num_nodes(self) -> int:
        return len(self.gm.graph.nodes)


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Copies the graph and gathers its facts. `gm`, which Dynamo still reads, is left untouched."""
    return take(graph.clone(gm), example_inputs)


@garbage.collected_later()
def take(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Gathers the facts of a graph that nobody else edits."""
    device = _device(example_inputs, list(gm.graph.nodes))
    surroundings = _Surroundings(
        device=device,
        ambient=_ambient_autocast(device),
        trains=torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in example_inputs),
        forwards=custom_function.forwards(device.type),
    )
    return _captured(gm, surroundings, dict(_roles(gm, example_inputs)))


@dataclass(frozen=True, kw_only=True)
class _Surroundings:
    """What a graph stands in."""

    device: torch.device
    ambient: str | None
    trains: bool
    region: Region = "none"
    """Of the operations that call it, if it is a body."""
    in_functorch: bool = False
    """Is it called between the push and the pop of a functorch level?"""
    function: Declared | None = None
    """Whose forward or backward it is."""
    forwards: tuple[Forward, ...] = ()
    """Of the autograd.Functions that declare something about autocast."""


def _captured(gm: fx.GraphModule, around: _Surroundings, roles: dict[str, Role]) -> Captured:
    nodes = list(gm.graph.nodes)
    outputs = list(graph.operands(nodes[-1]))
    groups = {node: graph.storages(node) for node in nodes}
    inputs = {key for node in nodes if node.op in ("placeholder", "get_attr") for key in groups[node]}
    left = Counter(key for node in outputs for key in groups[node])
    floats = [t.dtype for node in nodes for t in graph.tensors_of(graph.value_of(node)) if t.is_floating_point()]
    facts = dict(_facts(nodes, around))
    in_functorch = inside_functorch(nodes, around.in_functorch)
    by_stride = {key for node in nodes if _reads_by_stride(node) for x in node.all_input_nodes for key in groups[x]}
    callers = graph.callers(nodes)
    bodies = {
        path: _body(inner, callers.get(path, ()), facts, in_functorch, around) for path, inner in graph.nested(gm).items()
    }
    return Captured(
        gm=gm,
        facts=MappingProxyType(facts),
        roles=MappingProxyType(roles),
        pinned=MappingProxyType(_pinned(nodes, groups, left, in_functorch)),
        read_by_stride=frozenset(node.name for node in nodes if not groups[node].isdisjoint(by_stride)),
        hands_on=frozenset(_hands_on(nodes, facts, groups)),
        fresh_outputs=tuple(all(key not in inputs and left[key] == 1 for key in groups[node]) for node in outputs),
        narrows=any(torch.finfo(dtype).bits < torch.finfo(torch.float32).bits for dtype in floats)
        or any(body.narrows for body in bodies.values()),
        ambient=around.ambient,
        trains=around.trains,
        device=around.device,
        function=around.function,
        bodies=MappingProxyType(bodies),
    )


def _body(
    gm: fx.GraphModule,
    callers: Sequence[fx.Node],
    facts: dict[str, Facts],
    in_functorch: dict[fx.Node, bool],
    around: _Surroundings,
) -> Captured:
    """A nested graph, in the surroundings of the operations that call it. Where they differ, the strictest counts."""
    regions = {facts[node.name].region for node in callers}
    strictest: tuple[Region, ...] = ("users", "opted_out", "function")
    region = next((r for r in strictest if r in regions), "none")
    declared = {_declaration(node, around.forwards) for node in callers}
    inner = replace(
        around,
        region=region,
        in_functorch=any(in_functorch[node] for node in callers),
        function=declared.pop() if len(declared) == 1 else None,
    )
    body = _captured(gm, inner, {node.name: "input" for node in gm.graph.find_nodes(op="placeholder")})
    if not _writes_inputs(gm) or not any(_hands_memory_twice(node) for node in callers):
        return body
    reason = "the memory that this graph writes may be handed to it twice"
    return replace(body, pinned=MappingProxyType({node.name: reason for node in gm.graph.nodes} | dict(body.pinned)))


def _declaration(caller: fx.Node, among: Sequence[Forward]) -> Declared | None:
    """What the autograd.Function behind `autograd_function_apply` declares about autocast, if one can tell; None for all other
    operations."""
    if name_of(caller) != AUTOGRAD_FUNCTION or not among:
        return None
    forward, *_ = graph.bodies(caller).values()
    found = custom_function.declared_at((place for node in forward.graph.nodes for place in _places(node)), among)
    return next(iter(found)) if len(found) == 1 else None


def _hands_memory_twice(caller: fx.Node) -> bool:
    handed = Counter(key for operand in graph.operands(caller) for key in graph.storages(operand))
    return any(count > 1 for count in handed.values())


# ---- names --------------------------------------------------------------------------------------------------------------
def name_of(node: fx.Node) -> str | None:
    """One name for an operation, whether it is called as a function, a method, an operator, or in place.

    >>> `x.softmax_(-1)`, `torch.softmax`, `F.softmax`, `torch.special.softmax`, `aten.softmax.int`  ->  "softmax"
    """
    target: Any = node.target
    if node.op == "call_function":
        # Every stage asks about every node, and a model calls few functions. What is remembered lives on: nothing that may
        # hold a user's tensors.
        return _remembered_name(target) if _holds_nothing(target) else _name_of_function(target)
    return canonical(str(target)) if node.op == "call_method" else None


def _holds_nothing(target: Any) -> bool:
    """Is it a function of a module, or an operation, which lives as long as PyTorch does?"""
    if isinstance(target, BuiltinFunctionType):  # `torch.relu`, `operator.add`; `x.relu` of a tensor would hold that
        owner: Any = target.__self__
        return owner is None or isinstance(owner, ModuleType)
    return target.__closure__ is None if isinstance(target, FunctionType) else isinstance(target, OpOverload)


def _name_of_function(target: Any) -> str | None:
    if isinstance(target, OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return canonical(name) if namespace == "aten" else f"{namespace}::{name}"
    if isinstance(target, OpOverloadPacket):  # `torch.ops.mylib.scan`, whose overload the call itself will choose
        namespace, _, name = target._qualified_op_name.partition("::")
        return canonical(name) if namespace == "aten" else f"{namespace}::{name}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if target in _IN_PLACE_OPERATORS:
        return canonical(_IN_PLACE_OPERATORS[target])
    return canonical(getattr(target, "__name__", "")) if _belongs_to_torch(target) else None


_remembered_name: Final = functools.lru_cache(maxsize=1024)(_name_of_function)


def _belongs_to_torch(target: Any) -> bool:
    if getattr(target, "__self__", None) is torch._C._VariableFunctions:  # pyright: ignore[reportAttributeAccessIssue]
        return True
    module = getattr(target, "__module__", None) or ""
    return module == "torch" or module.startswith("torch.") or module == "_operator"


def canonical(name: str) -> str:
    name = name.removeprefix("special_")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return optable.SYNONYMS.get(name, name)


def _facts(nodes: Sequence[fx.Node], around: _Surroundings) -> Iterable[tuple[str, Facts]]:
    indices = mode_indices(nodes)
    enters = around.function is not None and around.function.cast_inputs is None
    within = regions(nodes, around.region, _region_of_custom_bwd(nodes) if enters else None)
    functions = [node for node in nodes if within[node] == "none" and _casts_its_inputs(node, around)]
    within |= dict[fx.Node, Region].fromkeys(functions, "function")
    for node in nodes:
        where, code = source_line(node)
        yield node.name, Facts(
            op=name_of(node),
            module=module_path(node),
            where=where,
            code=code,
            region=within[node],
            mode_index=indices[node],
            classes=_classes(node),
        )


def _casts_its_inputs(node: fx.Node, around: _Surroundings) -> bool:
    """Is it, without gradients, part of a Function in whose forward autocast is off? Dynamo leaves no other trace of one."""
    if around.function is not None or not around.forwards:
        return False
    return any(d.cast_inputs is not None for d in custom_function.declared_at(_places(node), around.forwards))


def regions(
    nodes: Iterable[fx.Node], around: Region = "none", custom_bwd: fx.Node | None = None
) -> dict[fx.Node, Region]:
    """The autocast region of the user's around each node, in a graph that stands in one itself."""
    autocast: list[tuple[str, bool]] = []
    found: dict[fx.Node, Region] = {}
    for node in nodes:
        if _switches_mode(node):
            if node is custom_bwd:
                autocast.append(("", True))
            elif node.target is torch.amp.autocast_mode._enter_autocast:
                device_type, _, enabled, *_ = (*node.args, *node.kwargs.values())
                autocast.append((str(device_type), bool(enabled)))
            elif node.target is torch.amp.autocast_mode._exit_autocast:
                autocast.pop()
        found[node] = _region(node, autocast, around)
    return found


def _region_of_custom_bwd(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The region that `custom_bwd` opens around a whole backward: traced without autocast, it says enabled=False."""
    silent = ("placeholder", "get_attr")
    calls = [node for node in nodes if node.op not in silent and node.target is not torch._C._set_grad_enabled]
    return calls[0] if calls[0].target is torch.amp.autocast_mode._enter_autocast else None


def _switches_mode(node: fx.Node) -> bool:
    """Grad mode, autocast, inference mode, functorch levels, streams: a node of torch with no tensor in or out."""
    if node.op != "call_function" or isinstance(node.target, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return False
    if isinstance(graph.value_of(node), torch.Tensor):  # nearly always
        return False
    return not graph.tensors_of([graph.value_of(n) for n in (node, *node.all_input_nodes)]) and _belongs_to_torch(
        node.target
    )


def _region(node: fx.Node, autocast: list[tuple[str, bool]], around: Region) -> Region:
    if not autocast:
        return around
    devices = {t.device.type for n in (node, *node.all_input_nodes) for t in graph.tensors_of(graph.value_of(n))}
    inner = [enabled for device_type, enabled in autocast if device_type in devices]
    if not inner:
        return around
    return "users" if inner[-1] else "opted_out"


_PATH_WORD: Final = re.compile(r"\w+")
_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+\n\s*(?P<code>[^\n]*)')


def module_path(node: fx.Node) -> str:
    """Path of the module that a node was called in, "layers.0.attn"; "" at the top."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return _path_in(next(reversed(stack.values()))[0])


@functools.lru_cache(maxsize=1024)
def _path_in(text: str) -> str:
    words = [w for w in _PATH_WORD.findall(text) if w not in ("getattr", "_modules")]
    return ".".join(words[2:] if words[:1] in (["L"], ["G"]) else words)


def _classes(node: fx.Node) -> tuple[str, ...]:
    owners = [owner for _, owner in (node.meta.get("nn_module_stack") or {}).values()]
    return tuple(o if isinstance(o, str) else f"{o.__module__}.{o.__qualname__}" for o in owners)


def _places(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """The (file, line)s of the user's code that a node comes from, outermost first."""
    return _places_in(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=1024)
def _places_in(trace: str) -> tuple[tuple[str, int], ...]:
    return tuple((frame["file"], int(frame["line"])) for frame in _FRAME.finditer(trace))


def source_line(node: fx.Node) -> tuple[str, str]:
    """("train.py:33", "y = self.l(x)") of the user's innermost line behind a node; two empty strings if unknown."""
    line = _innermost(node.meta.get("stack_trace") or "")
    if line is None:
        stack = node.meta.get("nn_module_stack")
        owner = list(stack.values())[-1][1] if stack else None
        name, path = getattr(owner, "__name__", owner), module_path(node)
        return (f"{path} ({name})" if path else str(name), "") if owner else ("", "")
    return line


def line_of(trace: str) -> str:
    """"train.py:33", the user's innermost line in a stack trace; "" if there is none."""
    line = _innermost(trace)
    return "" if line is None else line[0]


STEPS: Final = f"{Path(__file__).parent / 'run'}/"
"""Where fxamp itself calls model and loss, in a train step."""


@functools.cache
def _nobodys() -> tuple[str, ...]:
    """Where the code lies that no user has written: PyTorch's, and what calls models here."""
    return f"{Path(torch.__file__).parent}/", STEPS


@functools.lru_cache(maxsize=1024)  # the layers of a stack have equal traces, and a long text takes long to search
def _innermost(trace: str) -> tuple[str, str] | None:
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return None
    users = [f for f in frames if not f["file"].startswith(_nobodys())]
    if not users and any(f["file"].startswith(STEPS) for f in frames):
        return None
    users = users or frames
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
    nodes: Sequence[fx.Node],
    groups: dict[fx.Node, frozenset[Hashable]],
    left: Counter[Hashable],
    in_functorch: dict[fx.Node, bool],
) -> dict[str, str]:
    reasons: dict[Hashable, str] = {}
    born, off = _versions_at_birth(nodes), _without_gradients(nodes)
    for node in nodes:
        if node in off and _hands_on_history(node):
            for key in groups[node]:  # a cast in front of it, or behind it, would have no history
                reasons.setdefault(key, f"{node.name} hands it on where gradients are off")
        for written in writes(node):
            for key in groups[written]:
                reasons.setdefault(key, f"its memory is written by {node.name}")
        tensors = () if graph.MEMORY in node.meta else graph.tensors_of(graph.value_of(node))
        if any(t._version > born.get(graph.memory_of(t), 0) for t in tensors):
            for key in groups[node]:
                reasons.setdefault(key, "its memory is written in place")
        for operand, reason in _watched(node, in_functorch[node]):
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


def _without_gradients(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The calls that a graph makes with gradients switched off."""
    is_on, num_inference, found = True, 0, set[fx.Node]()
    for node in nodes:
        if node.target is torch._C._set_grad_enabled:
            is_on = bool(node.args[0])
        elif node.target is torch.autograd.grad_mode._enter_inference_mode:
            num_inference += 1
        elif node.target is torch.autograd.grad_mode._exit_inference_mode:
            num_inference -= 1
        elif (not is_on or num_inference > 0) and node.op in ("call_function", "call_method"):
            found.add(node)
    return found


def _hands_on_history(node: fx.Node) -> bool:
    """Is what a call returns the very tensor that another call gave, and that requires a gradient?"""
    made = [graph.value_of(x) for x in node.all_input_nodes if x.op in ("call_function", "call_method")]
    given = {id(t) for t in graph.tensors_of(made)}
    return any(t.requires_grad and id(t) in given for t in graph.tensors_of(graph.value_of(node)))


def _versions_at_birth(nodes: Sequence[fx.Node]) -> dict[Hashable, int]:
    """How often a higher-order operation that may be lowered wrote to its own result before it handed it out, by storage."""
    born: dict[Hashable, int] = {}
    for node in nodes:
        if isinstance(node.target, HigherOrderOperator) and name_of(node) in optable.TABLE:
            again = graph.call_on_fakes(node, [graph.called_value(x) for x in graph.operands(node)])
            pairs = zip(graph.tensors_of(graph.value_of(node)), graph.tensors_of(again), strict=True)
            born |= {graph.memory_of(old): fresh._version for old, fresh in pairs}
    return born


def _hands_on(
    nodes: Sequence[fx.Node], facts: dict[str, Facts], groups: dict[fx.Node, frozenset[Hashable]]
) -> Iterable[str]:
    """Nodes that return an operand's memory here, or might if the operand were a cast of itself, laid out anew."""
    for node in nodes:
        operand_keys = (groups[x] for x in node.all_input_nodes)
        if node.op in ("call_function", "call_method") and (
            optable.may_alias(facts[node.name].op) or any(groups[node] & keys for keys in operand_keys)
        ):
            yield node.name


_BY_STRIDE: Final = frozenset(("set", "storage_offset", "data_ptr", "untyped_storage", "resize"))
"""Operations that, like most of `as_strided`, read a tensor's memory past its own strides: a cast of it, which may be laid out
anew, would not do."""


@dataclass(frozen=True)
class StridedRead:
    """An `as_strided` that reads no more than the elements of its dense operand, counted from the first: a function of the
    operand's values."""

    operand: fx.Node
    order: tuple[int, ...]
    """The operand's dimensions in the order in which it lies in memory."""
    size: Any
    stride: Any
    is_made_dense: bool
    """Does the graph make its operand contiguous, so that it stays so in another format?"""


def strided_read(node: fx.Node) -> StridedRead | None:
    """What an `as_strided` reads; None where that depends on more than its operand's values."""
    given = dict(zip(("input", "size", "stride", "storage_offset"), node.args, strict=False)) | node.kwargs
    operand, offset = given.get("input"), given.get("storage_offset")
    value, result = _plain(operand), _plain(node)
    if not isinstance(operand, fx.Node) or value is None or result is None:
        return None
    if not all(type(x) is int and x >= 0 for t in (value, result) for x in (*t.shape, *t.stride())):
        return None
    order = tuple(sorted(range(value.dim()), key=lambda i: (-value.stride(i), i)))
    last = sum((n - 1) * step for n, step in zip(result.shape, result.stride(), strict=True))
    if not value.permute(order).is_contiguous() or offset not in (None, value.storage_offset()):
        return None
    if result.numel() > 0 and last >= value.numel():
        return None
    is_contiguous = name_of(operand) == "contiguous" and len(operand.args) == 1 and not operand.kwargs
    return StridedRead(operand, order, given["size"], given["stride"], is_contiguous and offset is None)


def _plain(argument: Any) -> FakeTensor | None:
    """The value of a node, if it is an ordinary tensor with strides."""
    value = graph.value_of(argument) if isinstance(argument, fx.Node) else None
    return value if type(value) is FakeTensor and value.layout == torch.strided else None


def _reads_by_stride(node: fx.Node) -> bool:
    """Does it read its operand's memory in a way in which a cast's could not be read?"""
    name = name_of(node)
    if name == "as_strided":
        read = strided_read(node)
        return read is None or not read.is_made_dense
    return name in _BY_STRIDE


_BY_VALUE: Final = frozenset(("setitem", "copy"))
"""Operations without a row that read values, wherever those lie; what they write is pinned for that."""


DIFFERENTIATES: Final = (torch.autograd.grad, torch.autograd.backward)
"""What takes gradients inside of a graph, where Dynamo traces it."""


def _watched(node: fx.Node, is_inside_func: bool) -> Iterable[tuple[fx.Node, str]]:
    """Operands that must be the traced value itself, not a cast of it, with the reason."""
    if not node._input_nodes:
        return ()
    name, calls = name_of(node), node.op not in ("placeholder", "get_attr", "output")
    if is_inside_func:
        reason = "used inside a torch.func transform"  # a cast there would belong to a level that its operand is not in
    elif _reads_by_stride(node):
        reason = f"{node.name} reads its memory by stride"
    elif node.target in DIFFERENTIATES:
        reason = "differentiated by the program"  # a cast of it is a new value, off the path that was recorded
    elif calls and name not in optable.TABLE and name not in optable.METADATA and name not in _BY_VALUE:
        # A nested graph was traced for the strides of its operands, a custom operation may have been given them as numbers.
        reason = f"{node.name} may read its strides, which a cast would change"
        return [(operand, reason) for operand in node.all_input_nodes if graph.cast_changes_strides(operand)]
    else:
        return ()
    return [(operand, reason) for operand in node.all_input_nodes]


def inside_functorch(nodes: Sequence[fx.Node], around: bool) -> dict[fx.Node, bool]:
    """For each node: does it run between the push and the pop of a functorch level, its own or one around the graph?"""
    depth, inside = int(around), dict[fx.Node, bool]()
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
    if node.op not in ("call_function", "call_method"):
        return []
    written = _nodes_in(node.kwargs.get("out"))
    target = node.target
    if node.op == "call_method":
        return written + _nodes_in(node.args[:1]) if _is_in_place(str(target)) else written
    if isinstance(target, HigherOrderOperator):
        inner = graph.bodies(node).values()
        pure = inner and not any(_writes_inputs(body) for body in inner)
        return written if pure else written + node.all_input_nodes  # who has no body, a Triton kernel say, may write any
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
    is_operator = getattr(target, "__module__", None) == "_operator"  # and_, or_, not_ have their names from keywords
    if (_is_in_place(getattr(target, "__name__", "")) and not is_operator) or _asks_in_place(target, node):
        written += _nodes_in(node.args[:1]) or _nodes_in(node.kwargs.get("input"))
    for index in optable.WRITTEN_OPERANDS.get(name_of(node) or "", ()):
        written += _nodes_in(node.args[index : index + 1])
    for name in ("running_mean", "running_var"):
        written += _nodes_in(node.kwargs.get(name))
    return written


def written(gm: fx.GraphModule) -> frozenset[Hashable]:
    """Keys of the memory that the operations of a graph write, or may write."""
    return frozenset(key for node in gm.graph.nodes for x in writes(node) for key in graph.storages(x))


def _writes_inputs(body: fx.GraphModule) -> bool:
    """Does a nested graph write memory that it was handed?"""
    nodes = list(body.graph.nodes)
    handed = {key for node in nodes if node.op in ("placeholder", "get_attr") for key in graph.storages(node)}
    return any(handed & graph.storages(written) for node in nodes for written in writes(node))


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
    if argument is None:
        return found
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
    elsewhere = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    return "enabled=False" if _autocast_depth() > 0 and not elsewhere and not _recomputes() else None


def _autocast_depth() -> int:
    """How many autocast contexts the running code stands in. One that is off leaves no other trace, where a graph break or a
    function compiled by itself puts it around a graph."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _recomputes() -> bool:
    """Is an uncompiled checkpoint running its forward again? It restores autocast's state with contexts of its own."""
    frame = sys._getframe()
    while frame is not None:
        in_checkpoint = frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        if in_checkpoint and frame.f_code.co_name in ("recompute_fn", "backward"):
            return True
        frame = frame.f_back
    return False
