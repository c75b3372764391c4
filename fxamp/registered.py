"""What `torch.library.register_autocast` has declared for a custom operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp import graph


def cast_inputs(node: fx.Node, device: torch.device, low: torch.dtype) -> torch.dtype | None:
    """The one dtype in which an operation is called for fp32 operands under `torch.autocast(device.type, low)`; None where it
    has no rule of its own for that device.

    The operation is asked: called on its fake operands under autocast, while a dispatch mode watches what arrives below the
    rule. So it does not matter from where, or in which language, the rule was registered.
    """
    op = _overload(node.target)
    if op is None or op.namespace == "aten" or not _has_rule(op, device):
        return None
    values = [graph.value_of(x) for x in graph.operands(node)]
    watch = _Watch(op)
    try:
        with graph.among_fakes(values), torch.autocast(device.type, low), watch:
            graph.call(node, values)
    except Exception:  # a rule that raises for these operands is none for them
        return None
    return watch.seen.pop() if len(watch.seen) == 1 else None


def _overload(target: Any) -> OpOverload | None:
    if isinstance(target, OpOverloadPacket) and len(target.overloads()) == 1:
        return getattr(target, target.overloads()[0])
    return target if isinstance(target, OpOverload) else None


def _has_rule(op: OpOverload, device: torch.device) -> bool:
    if not torch.amp.is_autocast_available(device.type):
        return False
    key = f"Autocast{torch._C._dispatch_key_for_device(device.type)}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


class _Watch(TorchDispatchMode):
    """Notes the dtypes of the floating-point tensors that an operation is called with."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()
        self.op = op
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is self.op:
            self.seen |= {t.dtype for t in graph.tensors_of((args, kwargs)) if t.is_floating_point()}
        return func(*args, **(kwargs or {}))
