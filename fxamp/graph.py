"""The only module that edits FX graphs. Everything that fxamp puts into a graph is made here, with its meta.

Two kinds of graph pass through: Dynamo's (torch functions, `meta["example_value"]`) and AOTAutograd's joint graph
(ATen operations, `meta["val"]`). `value_of` reads either.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import re
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import tree_leaves

from fxamp import errors, formats, garbage

MARK: Final = "fxamp"
"""Key under `node.meta["custom"]` that says "this cast is ours". AOTAutograd carries it to forward and backward."""

ROUNDS: Final = "fxamp_rounds"
"""Key under `node.meta["custom"]` of a cast that the user wrote, whose rounding is part of the program."""

FOLLOWS: Final = "fxamp_follows"
"""Key under `node.meta["custom"]` of an operation that the policy lets run in the format of its operands."""

WATCHED: Final = "fxamp_watched"
"""Key under `node.meta["custom"]` of an operation whose values are watched: its entry in `watched.Table`."""

REGION: Final = "fxamp_region"
"""Key under `node.meta["custom"]` of the region of the model that an operation stands in: its number in `Ladder.names`."""

MEMORY: Final = "fxamp_memory"
"""Key under `node.meta` of the memory that a value lies in since a pass moved it; its fake tensor tells the old story."""

PLAIN: Final = (FakeTensor, torch.nn.Parameter)
"""Types of a value that is a tensor and nothing more."""

MEASURED: Final = "fxamp_measured"
"""Key under `node.meta` of what was measured for an operation, in words."""

DYNAMO_CAST: Final = torch.ops.aten.to.dtype
JOINT_CAST: Final = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Cast:
    """A cast that fxamp inserted."""

    src: str
    """Short name of the format it reads, as in `formats.name`."""
    dst: str
    """Short name of the format it writes."""
    why: str
    """Which decision asked for it."""
    where: str = ""
    """The user's source line that it serves: "train.py:33"."""


# ---- reading ----------------------------------------------------------------------------------------------------------
def value_of(node: fx.Node) -> Any:
    """The fake value (tensor, SymInt, or a nest of them) of a node, in either kind of graph; None if it has none."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def called_value(node: fx.Node) -> Any:
    """What a call on fakes is given for an operand: its fake value, or the nested graph itself."""
    owner = node.graph.owning_module
    inner = _modules_of(owner, [node]) if node.op == "get_attr" and owner is not None else {}
    return inner.get(str(node.target), value_of(node))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensor leaves of a value."""
    if isinstance(value, torch.Tensor):  # nearly always, and asked about every operand of every node
        return [value]
    if value is None:
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def has_symbols(tensor: torch.Tensor) -> bool:
    """Has a tensor sizes or strides that another input of the graph could change?"""
    return tensor._has_symbolic_sizes_strides


def is_empty(value: Any) -> bool:
    """Is it a tensor that has no elements, whatever the inputs?"""
    return isinstance(value, torch.Tensor) and any(type(size) is int and size == 0 for size in value.shape)


_UNKNOWN_NUMEL: Final = 4096  # what AOTAutograd's partitioner assumes of a size that depends on data


def numel(value: torch.Tensor) -> int:
    """How many elements a fake tensor has in the example that its graph was traced for. Adds no guard."""
    count: Any = value.numel()
    return count if type(count) is int else int(count.node.hint or _UNKNOWN_NUMEL)


def operands(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that `node` reads, in the order of its arguments; one that is read twice comes twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return iter(found)


def source_of(node: fx.Node) -> fx.Node:
    """The first operand of a node: what a cast reads, which every pass asks of every cast. (`all_input_nodes` lists all.)"""
    return next(iter(node._input_nodes))


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """A node and all that it depends on, operands before their readers."""
    found, todo = set[fx.Node](), [node]
    while todo:
        x = todo.pop()
        if x not in found:
            found.add(x)
            todo += x.all_input_nodes
    return iter(sorted(found))


def argument(node: fx.Node, position: int, *names: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by any of these names."""
    if position < len(node.args):
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def constants(node: fx.Node) -> Iterator[Any]:
    """The arguments of a node that are no nodes, those inside of tuples, lists and dicts too."""
    return _constants_in((*node.args, *node.kwargs.values()))


def _constants_in(arguments: Iterable[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from _constants_in(argument)
        elif isinstance(argument, dict):
            yield from _constants_in(argument.values())
        elif not isinstance(argument, fx.Node):
            yield argument


def bodies(node: fx.Node) -> dict[str, fx.GraphModule]:
    """The graphs that a higher-order operation calls, by the attribute of its graph module that holds each."""
    if not isinstance(node.target, HigherOrderOperator) or node.graph.owning_module is None:
        return {}
    return _modules_of(node.graph.owning_module, [x for x in node.all_input_nodes if x.op == "get_attr"])


def callers(nodes: Iterable[fx.Node]) -> dict[str, list[fx.Node]]:
    """Which of the nodes of a graph call each of the graphs nested in it, by attribute."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        for path in bodies(node):
            found.setdefault(path, []).append(node)
    return found


def nested(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """The graphs that operations in `gm` call directly, by attribute; one that several operations share is there once."""
    return _modules_of(gm, gm.graph.find_nodes(op="get_attr"))


def _modules_of(owner: torch.nn.Module, attributes: Iterable[fx.Node]) -> dict[str, fx.GraphModule]:
    found = {path: operator.attrgetter(path)(owner) for path in (str(x.target) for x in attributes)}
    return {path: value for path, value in found.items() if isinstance(value, fx.GraphModule)}


def body(gm: fx.GraphModule, path: str) -> fx.GraphModule:
    """The nested graph at an attribute of `gm`."""
    found = operator.attrgetter(path)(gm)
    assert isinstance(found, fx.GraphModule)
    return found


def all_of(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """`gm` and every graph nested in it, outer before inner."""
    return [gm, *(inner for body in nested(gm).values() for inner in all_of(body))]


def own_cast(node: fx.Node) -> Cast | None:
    """The Cast behind a node that fxamp inserted, or that autograd derived from one; None for all other nodes."""
    return _described(node) if is_own_cast(node) else None


def _described(cast: fx.Node) -> Cast:
    mark = cast.meta["custom"][MARK]
    return _cast_between(value_of(source_of(cast)).dtype, value_of(cast).dtype, mark["why"], mark["where"])


@functools.lru_cache(maxsize=1024)  # the layers of a stack have equal casts
def _cast_between(src: torch.dtype, dst: torch.dtype, why: str, where: str) -> Cast:
    return Cast(formats.name(src), formats.name(dst), why, where)


def is_own_cast(node: fx.Node) -> bool:
    """Did fxamp insert it, or autograd derive it from a cast that fxamp inserted?"""
    return (node.target is JOINT_CAST or node.target is DYNAMO_CAST) and MARK in (node.meta.get("custom") or ())


def nodes_of_own_casts(gm: fx.GraphModule) -> list[fx.Node]:
    """The casts of fxamp in a graph, not in those nested in it, in order. Costs no walk over all other nodes."""
    found: list[fx.Node] = []
    for target in (DYNAMO_CAST, JOINT_CAST):
        casts = gm.graph.find_nodes(op="call_function", target=target, sort=False)
        found += [x for x in casts if MARK in (x.meta.get("custom") or ())]
    return sorted(found)


def own_casts(gm: fx.GraphModule) -> tuple[Cast, ...]:
    """All casts of fxamp in a graph and the graphs nested in it, in order."""
    return tuple(_described(node) for part in all_of(gm) for node in nodes_of_own_casts(part))


def is_users_narrowing(node: fx.Node) -> bool:
    """Is it, in the joint graph, a cast of the user's (or the gradient of one) that loses values?"""
    if node.target is not JOINT_CAST or not (node.meta.get("custom") or {}).get(ROUNDS):
        return False
    source, result = value_of(source_of(node)), value_of(node)
    both_float = source.is_floating_point() and result.is_floating_point()
    return both_float and not formats.is_lossless(source.dtype, result.dtype)


def is_of_a_decomposition(node: fx.Node) -> bool:
    """Is it, in the joint graph, a cast that PyTorch wrote where it took an operation apart? (`silu` of a narrow value
    computes in fp32.) A cast that the program, or its gradient, has is one by itself."""
    whole = node.meta.get("original_aten")
    return node.target is JOINT_CAST and isinstance(whole, OpOverload) and whole.name() not in _CASTS


_CASTS: Final = frozenset(("aten::_to_copy", "aten::to.dtype", "prims::convert_element_type"))
"""By name: what PyTorch notes while it traces need not be the object that `torch.ops` gives, and is equal to no other."""


def follows(node: fx.Node) -> bool:
    """Is it, in the joint graph, part of an operation that follows the format of its operands, or of the gradient of one?"""
    return bool((node.meta.get("custom") or {}).get(FOLLOWS))


def storages(node: fx.Node) -> frozenset[Hashable]:
    """Keys of the memory that a node's value lies in; views of one tensor have the same key."""
    moved = node.meta.get(MEMORY)
    if moved is not None:
        return frozenset((moved,))
    value = value_of(node)
    return frozenset((memory_of(value),) if isinstance(value, torch.Tensor) else map(memory_of, tensors_of(value)))


def memory_of(tensor: torch.Tensor) -> Hashable:
    """The key of the memory that a tensor lies in."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)  # sparse and the like have no storage; they are never lowered either


def cast_changes_strides(node: fx.Node) -> bool:
    """Would a cast of a node's fp32 tensors lay one of them out anew, since it is not dense?"""
    plain = (t for t in tensors_of(value_of(node)) if type(t) is FakeTensor and t.layout == torch.strided)
    floats = (t for t in plain if t.dtype == torch.float32 and not t.is_contiguous())
    return any(retyped(t, torch.float64).stride() != t.stride() for t in floats)


def difference(value: Any, traced: Any, *, format_of: torch.dtype | None = None) -> str | None:
    """Why a computed value is not the traced one; None if it is. Tensors traced in `format_of` may have another format."""
    got, want = tensors_of(value), tensors_of(traced)
    if len(got) != len(want) or (type(value) is not type(traced) and not isinstance(traced, torch.Tensor)):
        return "its result has another structure"
    for g, w in zip(got, want, strict=True):
        if not _have_same_shape(g, w):
            return "its result has another shape"
        if g.dtype != w.dtype and not (w.dtype == format_of and g.is_floating_point()):
            return f"its result is {formats.name(g.dtype)}, traced {formats.name(w.dtype)}"
    return None


def _have_same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Symbolic sizes are compared by what they are in the example: a guard would ask for this example ever after."""
    fakes = [t for t in (a, b) if isinstance(t, FakeTensor) and has_symbols(t)]
    if not fakes:
        return a.shape == b.shape
    with quietly(fakes[0].fake_mode):
        return tuple(a.shape) == tuple(b.shape)


def text_of(gm: fx.GraphModule) -> str:
    """Every node with its operation and arguments, a line each: as distinctive as generated code, at a tenth of its cost;
    equal across processes."""
    lines = (f"{x.name}: {x.type} = {x.op} {_name_of(x.target)} {x.args} {x.kwargs}" for x in gm.graph.nodes)
    return _ADDRESS.sub("", "\n".join(lines))


_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def _name_of(target: Any) -> str:
    if isinstance(target, (str, OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    return f"{module}.{name}" if name is not None else str(target)


# ---- calling on fake tensors ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Box:
    """Keeps `fx.map_arg` from walking into a tuple that is one operand's value."""

    value: Any


def _unbox(arg: Any) -> Any:
    if isinstance(arg, _Box):
        return arg.value
    if isinstance(arg, tuple) and hasattr(arg, "_fields"):
        return type(arg)(*map(_unbox, arg))
    if isinstance(arg, (tuple, list)):
        return type(arg)(map(_unbox, arg))
    if isinstance(arg, dict):
        return {key: _unbox(value) for key, value in arg.items()}
    if isinstance(arg, slice):
        return slice(_unbox(arg.start), _unbox(arg.stop), _unbox(arg.step))
    return arg


def call_on_fakes(node: fx.Node, values: Sequence[Any]) -> Any:
    """What a Dynamo node gives for these values of its operands. Raises whatever the operation raises.

    Guards that the call would add to symbolic shapes are dropped: the traced call has added them already.
    """
    with among_fakes([value_of(node), *values]):
        return call(node, values)


def call(node: fx.Node, values: Sequence[Any]) -> Any:
    """What a Dynamo node gives for these values of its operands, in whatever modes are on."""
    rest = iter(values)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: cast(Any, _Box(next(rest))))
    args, kwargs = _unbox(args), _unbox(kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target), node.target
    return node.target(*args, **kwargs)


@contextlib.contextmanager
def among_fakes(values: Any) -> Generator[None, None, None]:
    """The fake mode of a value, without gradients, and without new guards on its symbolic sizes."""
    mode = next(t.fake_mode for t in tensors_of(values) if isinstance(t, FakeTensor))
    with mode, quietly(mode), torch.no_grad():
        yield


def quietly(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """Without new guards on the symbolic sizes of a mode."""
    return mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext()


# ---- copying ----------------------------------------------------------------------------------------------------------
@garbage.collected_later()
def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph, nested graphs and meta can be edited without touching `gm`; tensors are shared.

    Carries what `graph_copy` drops and compilation needs: `gm.meta`, `_param_name_to_source`, and the placeholders'
    `_dynamo_source`.
    """
    attributes: dict[str, Any] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        owner, value = gm, None
        for part in str(node.target).split("."):
            value = getattr(owner, part)
            owner = value
        attributes[str(node.target)] = clone(value) if isinstance(value, fx.GraphModule) else value
    for node in gm.graph.find_nodes(op="call_module"):
        attributes[str(node.target)] = gm.get_submodule(str(node.target))

    graph = _copied(gm.graph)
    graph.set_codegen(copy.copy(gm.graph._codegen))  # the joint graph's says how its arguments nest

    copied = _LazyGraphModule(attributes, graph, class_name=type(gm).__name__)  # most copies are never called
    copied.meta = copy.copy(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source  # pyright: ignore[reportArgumentType]
    return copied


def _copied(old_graph: fx.Graph) -> fx.Graph:
    """The nodes of a graph, as `graph.create_node` would make them. Half of the time of that call goes into making a good name
    that is free; these are."""
    graph, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    for old in old_graph.nodes:
        new = mapping[old] = fx.Node(graph, old.name, old.op, old.target, (), {}, old.type)
        if old.op == "placeholder":
            if hasattr(old, "_dynamo_source"):
                new._dynamo_source = old._dynamo_source  # pyright: ignore[reportAttributeAccessIssue]
        else:
            _set_operands(new, *fx.map_arg((old.args, old.kwargs), mapping.__getitem__))
        new.meta.update(old.meta)  # in place: to set an attribute of a node is to look the node up
        graph._insert(new)
        graph._find_nodes_lookup_table.insert(new)
    graph._len = len(mapping)
    names = graph._graph_namespace
    names._obj_to_name.update((node, node.name) for node in mapping.values())
    names._used_names.update(names._obj_to_name.values())
    for name in names._obj_to_name.values():
        base, _, number = name.rpartition("_")
        if number.isdecimal():
            names._base_count[base] = int(number)  # from where new names go on
    return graph


def _create(graph: fx.Graph, target: Any, args: tuple[Any, ...], *, name: str) -> fx.Node:
    """`graph.create_node` of a call, which looks at every leaf of arguments that it is given, and at none of those set
    afterwards."""
    node = graph.create_node("call_function", target, name=name)
    _set_operands(node, args, {})
    return node


def _set_operands(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Sets them past the node's own `__setattr__`, which takes it out of an index and puts it back."""
    object.__setattr__(node, "args", args)
    if kwargs or node._kwargs:
        object.__setattr__(node, "kwargs", kwargs)


def forget_inputs(gm: fx.GraphModule) -> fx.GraphModule:
    """Drops Dynamo's references to real inputs, so that a graph kept for inspection keeps no tensor alive."""
    for part in all_of(gm):
        for node in part.graph.find_nodes(op="placeholder"):
            node.meta.pop("grapharg", None)
    return gm


# ---- editing ----------------------------------------------------------------------------------------------------------
def insert_cast(value: fx.Node, dtype: torch.dtype, *, before: fx.Node, why: str, where: str = "") -> fx.Node:
    """Puts a cast of `value` to `dtype` in front of `before`, and returns it. Its users are not changed.

    Raises: NotFloating if either side is no floating-point tensor.
    """
    source = value_of(value)
    if not (isinstance(source, torch.Tensor) and source.is_floating_point() and dtype.is_floating_point):
        held = source.dtype if isinstance(source, torch.Tensor) else type(source).__name__
        raise errors.NotFloating(
            f"cast of {value.name} ({held}) to {dtype}", where=where or None, way_out="Please report this as a bug"
        )
    joint = "val" in value.meta
    to = formats.name(dtype)
    with before.graph.inserting_before(before):
        target = JOINT_CAST if joint else DYNAMO_CAST
        node = _create(before.graph, target, (value, dtype), name=f"{value.name.rstrip('_')}_{to}")
    meta, theirs = node.meta, before.meta
    for key in ("stack_trace", "nn_module_stack"):
        if key in theirs:
            meta[key] = theirs[key]
    custom = {key: value for key, value in (theirs.get("custom") or {}).items() if key != ROUNDS}
    meta["custom"] = {**custom, MARK: {"src": formats.name(source.dtype), "dst": to, "why": why, "where": where}}
    meta["val" if joint else "example_value"] = retyped(source, dtype)
    return node


def _place_of(node: fx.Node) -> dict[str, Any]:
    """The meta that says where in the user's program a Dynamo node stands."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack", "custom") if key in node.meta}


def insert_saturation(value: fx.Node, dtype: torch.dtype, *, before: fx.Node) -> fx.Node:
    """Puts `value`, its finite numbers cut off at the ends of the format `dtype`, in front of `before`. Its dtype stays.

        mask                                       ->  where(isinf(mask), mask, clamp(mask, -65504, 65504))
    """
    info = torch.finfo(dtype)
    ops = torch.ops.aten

    def put(name: str, target: Any, *args: Any) -> fx.Node:
        return insert_call(target, args, before=before, name=f"{value.name.rstrip('_')}_{name}")

    infinite = put("infinite", ops.isinf.default, value)
    cut = put("cut", ops.clamp.default, value, info.min, info.max)
    return put("saturated", ops.where.self, infinite, value, cut)


def insert_call(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    before: fx.Node,
    name: str | None = None,
) -> fx.Node:
    """Puts a call in front of `before` in a Dynamo graph, at the same line of the user's, and in the same module."""
    with before.graph.inserting_before(before):
        node = before.graph.create_node("call_function", target, args, dict(kwargs or {}), name=name)
    node.meta = _place_of(before)
    values = [value_of(x) for x in operands(node)]
    with among_fakes([*values, value_of(before)]):
        node.meta["example_value"] = call(node, values)
    return node


def insert_contiguous(value: fx.Node, order: Sequence[int], *, before: fx.Node) -> fx.Node:
    """Puts `value.permute(order).contiguous()`, of a Dynamo node, in front of `before`. It is a view, so that its memory is
    that of `value`, which must lie in this order."""
    made = value
    for name, args in (("permute", (tuple(order),)), ("contiguous", ())):
        with before.graph.inserting_before(before):
            node = before.graph.call_method(name, (made, *args))
        node.meta = _place_of(before)
        node.meta["example_value"] = call_on_fakes(node, [value_of(made)])
        if MEMORY in value.meta:
            node.meta[MEMORY] = value.meta[MEMORY]
        made = node
    return made


def insert_getitem(value: fx.Node, index: int, *, before: fx.Node) -> fx.Node:
    """Puts `value[index]`, for a node that yields a tuple or list, in front of `before`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(operator.getitem, (value, index))
    node.meta = {key: before.meta[key] for key in ("stack_trace", "nn_module_stack") if key in before.meta}
    node.meta["example_value"] = value_of(value)[index]
    return node


def insert_like(node: fx.Node, changed: Mapping[fx.Node, fx.Node], value: Any, *, before: fx.Node) -> fx.Node:
    """Puts the call of joint node `node`, on operands changed as `changed` says and with the fake result `value`, in front of
    `before`. It belongs where `node` belongs: all other meta is the same."""
    with before.graph.inserting_before(before):
        made = before.graph.node_copy(node, lambda operand: changed.get(operand, operand))
    made.meta = {**node.meta, "val": value}
    return made


def insert_retyped_constant(node: fx.Node, dtype: torch.dtype, *, before: fx.Node) -> fx.Node:
    """Puts a tensor like that of joint node `node`, an `aten.full`, but in another format, in front of `before`."""
    made = insert_like(node, {}, retyped(value_of(node), dtype), before=before)
    made.kwargs = {**made.kwargs, "dtype": dtype}
    belong_with(made, before)
    return made


def is_sharded(node: fx.Node) -> bool:
    """Is an input of Dynamo's graph a parameter that FSDP gathers for the call? Its dtype is that of FSDP's policy."""
    source: Any = getattr(getattr(node, "_dynamo_source", None), "guard_source", None)
    return source is not None and source.is_fsdp_module()


def input_name(node: fx.Node) -> str:
    """What a user calls an input of Dynamo's graph: "layers.0.weight" for a parameter or buffer, else its name there."""
    text: Any = getattr(getattr(node, "_dynamo_source", None), "name", "")
    text = text() if callable(text) else text  # before torch 2.13 it is a method
    path = re.findall(r"_(?:modules|parameters|buffers)\['([^']+)'\]", str(text))
    return ".".join(path) or node.name


def append_inputs(gm: fx.GraphModule, values: Mapping[str, torch.Tensor]) -> int:
    """Adds inputs behind the last one of a Dynamo graph, which no operation reads yet, for tensors like these, whose memory
    stays where it is from call to call. Returns the position of the first."""
    inputs = gm.graph.find_nodes(op="placeholder")
    fakes = [t for node in inputs for t in tensors_of(value_of(node)) if isinstance(t, FakeTensor)]
    last = inputs[-1]
    for name, value in values.items():
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(name)
        last._dynamo_source = None  # pyright: ignore[reportAttributeAccessIssue]
        last.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        last.meta["example_value"] = fakes[0].fake_mode.from_tensor(value, static_shapes=True)
    return len(inputs)


def retype_input(node: fx.Node, value: torch.Tensor) -> None:
    """Lets an input of a Dynamo graph be a tensor like `value`, whose memory stays where it is from call to call. It is no
    longer what Dynamo found at the source of the input."""
    node._dynamo_source = None  # pyright: ignore[reportAttributeAccessIssue]
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    node.meta["example_value"] = value


def like_examples(tensors: Sequence[torch.Tensor], examples: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Real tensors as Dynamo would hand them over beside these examples, which are fake under DDP."""
    mode = detect_fake_mode(list(examples))
    return tensors if mode is None else [mode.from_tensor(t, static_shapes=True) for t in tensors]


def insert_backward(target: Callable[..., Any], args: tuple[Any, ...], *, before: fx.Node, name: str | None = None) -> fx.Node:
    """Puts a call that belongs to the backward in front of `before` in a joint graph."""
    with before.graph.inserting_before(before):
        node = before.graph.create_node("call_function", target, args, name=name)
    node.meta["partitioner_tag"] = "is_backward"
    node.meta["val"] = call_on_fakes(node, [value_of(x) for x in operands(node)])
    return node


def insert_beside(target: Callable[..., Any], args: tuple[Any, ...], *, before: fx.Node) -> fx.Node:
    """Puts a call in front of `before` in a joint graph, into the same part of forward or backward."""
    node = insert_backward(target, args, before=before)
    belong_with(node, before)
    return node


def insert_tensor(tensor: torch.Tensor, name: str, *, before: fx.Node) -> fx.Node:
    """Puts a constant in front of `before` in a graph of AOTAutograd's."""
    owner = before.graph.owning_module
    assert owner is not None
    owner.register_buffer(name, tensor, persistent=False)
    with before.graph.inserting_before(before):
        held = before.graph.get_attr(name)
        node = before.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (held,))  # it alone takes a real tensor
    fakes = (t for x in before.graph.nodes for t in tensors_of(value_of(x)) if isinstance(t, FakeTensor))
    for made in (held, node):
        made.meta["val"] = next(fakes).fake_mode.from_tensor(tensor, static_shapes=True)
    return node


def save_for_backward(value: fx.Node, backward: fx.Graph, *, position: int) -> fx.Node:
    """Hands a tensor of a partitioned forward to its backward, as output number `position`, in front of all else that is
    saved. Returns it there."""
    output = value.graph.output_node()
    results: Any = output.args[0]
    output.args = (type(results)([*results[:position], value, *results[position:]]),)
    if "desc" in output.meta:
        desc = list(output.meta["desc"])
        output.meta["desc"] = [*desc[:position], None, *desc[position:]]
    first = next(x for x in backward.find_nodes(op="placeholder") if tensors_of(value_of(x)))  # symbols come before
    with backward.inserting_before(first):
        saved = backward.placeholder(value.name)
    saved.meta["val"] = value_of(value)
    return saved


def inline(node: fx.Node, body: fx.GraphModule) -> list[fx.Node]:
    """Puts the calls of `body` in place of a Dynamo call, and returns them.

    The placeholders of `body` stand for the operands of `node`, in order; its output has the structure of the result of
    `node`, which is a tensor, or a tuple that is only ever indexed. Values are computed anew from those of the operands, so
    views share memory with what they are views of; what shares memory with the result takes over the memory that the result
    had, which is the one that later nodes share.
    """
    body.graph.eliminate_dead_code()
    stands_for: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands(node), strict=True))
    made: list[fx.Node] = []
    for call in [n for n in body.graph.nodes if n.op == "call_function"]:
        with node.graph.inserting_before(node):
            copied = node.graph.node_copy(call, stands_for.__getitem__)
        copied.meta = _place_of(node)
        values = [value_of(x) for x in operands(copied)]
        has_tensors = bool(tensors_of(values))
        copied.meta["example_value"] = call_on_fakes(copied, values) if has_tensors else call.meta["val"]
        stands_for[call] = copied
        made.append(copied)
    result = next(iter(body.graph.find_nodes(op="output"))).args[0]
    pairs = [(node, result)] if isinstance(result, fx.Node) else [(user, result[user.args[1]]) for user in list(node.users)]
    for old, new in pairs:
        new = stands_for[new]
        had, have = storages(old), storages(new)
        for sharing in made if had != have and len(had) == 1 else ():
            if storages(sharing) == have:
                sharing.meta[MEMORY] = next(iter(had))
        old.replace_all_uses_with(new)
        node.graph.erase_node(old)
    if not isinstance(result, fx.Node):
        node.graph.erase_node(node)
    return made


def after(node: fx.Node) -> fx.Node:
    """The node behind `node`: where to insert what has to follow it directly."""
    return node.next


def map_operands(node: fx.Node, change: Callable[[int, fx.Node], Any]) -> None:
    """Replaces the i-th operand (as `operands` counts) by `change(i, operand)`."""
    position = itertools.count()
    _set_operands(node, *fx.map_arg((node.args, node.kwargs), lambda arg: change(next(position), arg)))


def replace(old: fx.Node, new: fx.Node, *, except_in: frozenset[fx.Node] = frozenset()) -> None:
    """Lets every user of `old` but those in `except_in` read `new`."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in except_in)


def erase(node: fx.Node) -> None:
    """Removes a node that nothing reads."""
    node.graph.erase_node(node)


def erase_unread(node: fx.Node) -> int:
    """Removes a node and what it depends on, inputs excepted, as far as nothing else reads it; returns how many."""
    num_removed = 0
    for ancestor in reversed(list(ancestors(node))):
        if not ancestor.users and ancestor.op != "placeholder":
            erase(ancestor)
            num_removed += 1
    return num_removed


def set_value(node: fx.Node, value: Any) -> None:
    """Records the fake value that a Dynamo node has after its operands changed."""
    node.meta["example_value"] = value


def set_meta(node: fx.Node, facts: Mapping[str, object]) -> None:
    """Adds facts for the compiler (such as `recompute`) to a node."""
    node.meta.update(facts)


PHASE: Final = ("partitioner_tag", "seq_nr", "autograd_backward", "recompute", "ac_graph_id")
"""Meta that says where in forward or backward a joint node belongs."""


def belong_with(node: fx.Node, other: fx.Node) -> None:
    """Puts a joint node where in forward or backward `other` is."""
    kept = {key: value for key, value in node.meta.items() if key not in PHASE}
    node.meta = {**kept, **{key: other.meta[key] for key in PHASE if key in other.meta}}


def annotate(node: fx.Node, key: str, value: object) -> None:
    """Adds a fact that AOTAutograd carries to the forward and backward nodes which it makes of a Dynamo node."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: value}


def retarget(node: fx.Node, target: Callable[..., Any] | str) -> None:
    """Lets a node call another function, or method, with the same operands."""
    node.target = target


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gives a node other arguments."""
    _set_operands(node, args, kwargs)


def retyped(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The fake tensor that a cast of the fake tensor `value` gives."""
    if value.dtype == dtype:
        return value
    cast = _cast_of(value, dtype)
    return cast.requires_grad_() if value.requires_grad else cast


def _cast_of(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        with getattr(value, "fake_mode", None) or contextlib.nullcontext(), torch.no_grad():
            return value.to(dtype)
    # What `value.to(dtype)` gives, without the way through the dispatcher: half of the time of a plan went there.
    if value.is_contiguous():
        return fresh(value.fake_mode, value.shape, value.stride(), dtype=dtype, device=value.device)
    with in_kernel_invocation_manager(value.fake_mode), torch.no_grad():
        meta = torch.empty_like(value, dtype=dtype, requires_grad=False)
    return FakeTensor(value.fake_mode, meta, value.device)


def fresh(
    mode: FakeTensorMode, shape: Sequence[Any], strides: Sequence[Any], *, dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """A fake tensor in memory of its own, which requires no gradient."""
    with torch._C._DisableTorchDispatch():  # a mode that is on would make it a fake tensor itself
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def with_history_of(traced: Any, value: Any) -> Any:
    """`value`, whose tensors require a gradient where those of `traced` do: what `call_on_fakes` gives requires none, and
    operations that look at the meta of the graphs they call (`invoke_subgraph`) would take its outputs for constants."""
    for old, new in zip(tensors_of(traced), tensors_of(value), strict=True):
        if old.requires_grad and not new.requires_grad:
            new.requires_grad_()
    return value


# ---- building -----------------------------------------------------------------------------------------------------------
def record_input(built: fx.Graph, name: str, value: Any, *, source: str) -> fx.Node:
    """Appends an input to a graph under construction. `source` is where Dynamo would say it comes from."""
    node = built.placeholder(name)
    node._dynamo_source = source  # pyright: ignore[reportAttributeAccessIssue]
    node.meta["example_value"] = value
    return node


def record_call(
    built: fx.Graph, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any], *, stack_trace: str
) -> fx.Node:
    """Appends a call (of a method, where `target` is its name) to a graph under construction; `set_value` says what it is."""
    node = built.create_node("call_method" if isinstance(target, str) else "call_function", target, args, kwargs)
    node.meta["stack_trace"] = stack_trace
    return node
