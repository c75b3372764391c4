"""RELAXED: masks of attention that are proved to be causal, or to mask nothing, become what the fast kernels know them as.

The kernel changes, not what it computes: results differ by the roundings of two kernels (docs/relaxed.md says how much).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from fxamp import capture, graph
from fxamp.passes import Change, Kept
from fxamp.rewrite.attention import TARGETS, arguments, change_arguments

MAX_ELEMENTS: Final = 2**26
"""Of any value computed at compile time: 64 Mi, a mask of 8192 queries and keys."""

_EVALUATED: Final = """
    arange full ones zeros eye scalar_tensor tensor
    new_full new_ones new_zeros full_like ones_like zeros_like
    add sub mul div floor_divide floordiv remainder mod neg rsub abs maximum minimum clamp
    lt le gt ge eq ne less less_equal greater greater_equal not_equal
    and or xor invert not logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    __and__ __or__ __xor__ __invert__
    where masked_fill tril triu cat stack cumsum diff
    expand expand_as broadcast_to view reshape view_as unsqueeze squeeze transpose permute flatten repeat narrow select getitem
    clone contiguous detach to type type_as bool float half bfloat16 double int long
"""

EVALUATED: Final = frozenset(_EVALUATED.split())
"""Operations whose value follows from their arguments: no random numbers, no state, nothing written."""


@dataclass(frozen=True)
class ReplaceMasks:
    """Evaluates masks that depend on constants alone, and replaces those that a kernel knows by name.

    requires: Dynamo graph.  changes: arguments of attention; erases what only the mask needed.  keeps: shapes and dtypes.

        m: "b8[T, T]" = tril(ones(T, T))
        y = scaled_dot_product_attention(q, k, v, m)     ->     y = scaled_dot_product_attention(q, k, v, is_causal=True)
    and a mask that is True, or adds 0, everywhere is left out.
    kept: windows, padding, anything that depends on an input, a buffer or a symbolic size, or is another mask by one element.
    """

    def __call__(self, gm: fx.GraphModule) -> Change:
        num_marked, num_removed, kept = 0, 0, list[Kept]()
        for part in graph.all_of(gm):
            proofs = Proofs(part)
            for node in list(part.graph.nodes):
                mask = _mask_of(node)
                if not isinstance(mask, fx.Node):
                    continue
                try:
                    form = proofs.is_causal(node, mask)
                except NotConstant as reason:
                    kept.append(Kept(node=node.name, reason=str(reason), where=capture.source_line(node)[0]))
                    continue
                change_arguments(node, attn_mask=None, is_causal=form)
                num_marked += 1
                num_removed += graph.erase_unread(mask)
            part.recompile()
        return Change(pass_name=type(self).__name__, num_marked=num_marked, num_removed=num_removed, kept=tuple(kept))


class NotConstant(Exception):
    """Why a mask stays."""


# ---- the proof ----------------------------------------------------------------------------------------------------------
class Proofs:
    """What the masks of attention in a graph are, where that follows from constants. Values are kept from one to the next."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._constants = _Constants(written=capture.written(gm))

    def is_causal(self, node: fx.Node, mask: fx.Node) -> bool:
        """True if `mask`, of the attention `node`, is the causal mask, False if it masks nothing. Raises NotConstant for
        everything else."""
        return _form(node, mask, self._constants)

    def obstacle(self, node: fx.Node) -> str | None:
        """Why the mask of an attention has to stay, None if it could be replaced."""
        mask = _mask_of(node)
        if not isinstance(mask, fx.Node):
            return "it is no attention of PyTorch's"
        try:
            self.is_causal(node, mask)
        except NotConstant as reason:
            return str(reason)
        return None


def _form(node: fx.Node, mask: fx.Node, constants: _Constants) -> bool:
    """True if `mask` is the causal mask, False if it masks nothing. Raises NotConstant for everything else."""
    given = arguments(node)
    query, key = given["query"], given["key"]
    assert isinstance(query, fx.Node)
    assert isinstance(key, fx.Node)
    if given.get("is_causal"):
        raise NotConstant("is_causal is given beside the mask")
    num_queries, num_keys = graph.value_of(query).shape[-2], graph.value_of(key).shape[-2]
    if isinstance(num_queries, torch.SymInt) or isinstance(num_keys, torch.SymInt):
        raise NotConstant("the number of queries or keys is symbolic")
    allowed = _allowed(_without_repetition(constants[mask]))
    if bool(allowed.all()):
        is_causal = False
    elif num_queries == num_keys and _is_causal(allowed, num_queries):
        is_causal = True
    else:
        raise NotConstant(f"the mask is neither causal nor empty: it allows {_share(allowed)} of what it covers")
    _check_result(node, is_causal)
    return is_causal


def _without_repetition(mask: Tensor) -> Tensor:
    """A mask in which what expand() repeats stands once."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]


def _allowed(mask: Tensor) -> Tensor:
    """Where an attention mask lets a query see a key. Raises NotConstant for a mask that does more than allow and forbid."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise NotConstant(f"the mask is {mask.dtype}")
    allowed = mask == 0
    forbidden = mask <= torch.finfo(mask.dtype).min  # and -inf
    if not bool((allowed | forbidden).all()):
        raise NotConstant("the mask adds numbers that are neither 0 nor the lowest of its format")
    return allowed


def _is_causal(allowed: Tensor, size: int) -> bool:
    """Does every query see itself and what stands before it, and nothing else? `allowed` broadcasts to [..., size, size]."""
    wanted = torch.ones(size, size, dtype=torch.bool).tril()
    return bool((allowed == wanted).all())


def _share(allowed: Tensor) -> str:
    return f"{float(allowed.float().mean()):.1%}"


def _check_result(node: fx.Node, is_causal: bool) -> None:
    """Raises NotConstant if the result had another shape without the mask, whose batch dimensions may be the larger ones."""
    args, kwargs = node.args, dict(node.kwargs)
    change_arguments(node, attn_mask=None, is_causal=is_causal)
    values = [graph.value_of(x) for x in graph.operands(node)]
    try:
        difference = graph.difference(graph.call_on_fakes(node, values), graph.value_of(node))
    finally:
        graph.set_arguments(node, args, kwargs)
    if difference is not None:
        raise NotConstant(f"without the mask {difference}")


@dataclass
class _Constants:
    """Values of nodes that depend on constants alone, computed on the CPU when they are asked for."""

    written: frozenset[Any]
    """Memory that the graph writes."""
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def __getitem__(self, node: fx.Node) -> Tensor:
        for ancestor in graph.ancestors(node):
            if ancestor not in self.values:
                self._check(ancestor)
                self.values[ancestor] = self._evaluate(ancestor)
        return self.values[node]

    def _check(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            raise NotConstant(f"the mask depends on {node.name}, which is not made in the graph")
        if node.op == "call_module" or capture.name_of(node) not in EVALUATED:
            raise NotConstant(f"the mask depends on {node.name}, an operation that is not evaluated")
        if graph.storages(node) & self.written:
            raise NotConstant(f"the memory of {node.name} is written")
        for tensor in graph.tensors_of(graph.value_of(node)):
            if any(isinstance(size, torch.SymInt) for size in tensor.shape):
                raise NotConstant(f"the size of {node.name} is symbolic")
            if tensor.numel() > MAX_ELEMENTS:
                raise NotConstant(f"{node.name} has more than {MAX_ELEMENTS} elements")

    def _evaluate(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: self.values[x])
        args, kwargs = _on_cpu(args), _on_cpu(dict(kwargs))
        with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target), node.target
                value = node.target(*args, **kwargs)
        traced = graph.value_of(node)
        if graph.difference(value, traced) is not None:
            raise NotConstant(f"{node.name} is evaluated to something else than was traced")
        return value


def _on_cpu(arguments: Any) -> Any:
    """Arguments with every device replaced by the CPU."""
    if isinstance(arguments, dict) and "device" in arguments:
        arguments = arguments | {"device": torch.device("cpu")}
    return tree_map(lambda x: torch.device("cpu") if isinstance(x, torch.device) or _is_device_name(x) else x, arguments)


def _is_device_name(x: object) -> bool:
    if not isinstance(x, str):
        return False
    try:
        torch.device(x)
    except RuntimeError:
        return False
    return True


def _mask_of(node: fx.Node) -> Any:
    """The mask of an attention; None for other operations."""
    return arguments(node).get("attn_mask") if node.target in TARGETS else None
