"""What has to be known of DDP, and of whatever else reduces gradients, before a step with its collectives is recorded."""

from __future__ import annotations

import atexit
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

NUM_TIMED: Final = 10
"""Iterations at the beginning that DDP times (`Logger` in its C++ sources), by events that the host reads: not recorded."""

_NEVER: Final = 2**31 - 1
"""Iterations from one that DDP times to the next."""


def why_not_recorded(modules: Iterable[nn.Module], device: torch.device, group: Any) -> str:
    """Why the collectives of a step of these modules are not recorded; "" if they are.

    Args: group: that of whatever all ranks agree on; None: the default one.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # `import fxamp` stays light

    if not hasattr(distributed.distributed_c10d._world, "comms"):
        return "nobody could be told, in this version of PyTorch, before process groups are destroyed"
    modules = list(modules)
    groups = [group, *(m.process_group for m in modules if isinstance(m, DistributedDataParallel))]
    others = [name for name in (_backend_of(g, device) for g in groups) if name != "nccl"]
    if others:
        return f"collectives of {others[0]} run on the host: NCCL's are recorded"
    if any(isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in modules):
        return "the collectives of FSDP are not recorded yet"
    if any(hasattr(p, "to_local") for m in modules for p in m.parameters(recurse=False)):
        return "the collectives of DTensors are not recorded yet"
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules):
        return "a part of the model is compiled by itself: give DDP the model as it is, which the step compiles"
    return why_not_reduced([m for m in modules if isinstance(m, DistributedDataParallel)])


def why_not_reduced(ddps: Iterable[DistributedDataParallel]) -> str:
    """Why the reductions of these cannot be recorded; "" if they can."""
    return next((why for ddp in ddps for why in _unfit(ddp)), "")


def _backend_of(group: Any, device: torch.device) -> str:
    group = distributed.group.WORLD if group is None else group
    try:
        return group._get_backend(device).name()
    except RuntimeError:  # none for this device
        return distributed.get_backend(group)


def _unfit(ddp: DistributedDataParallel) -> Iterable[str]:
    """Reasons."""
    if ddp.find_unused_parameters and not ddp.static_graph:
        yield "DDP's find_unused_parameters=True asks the host which parameters were used"
    if ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"):
        yield "a communication hook of DDP is Python, of which a recording knows nothing"
    if ddp.mixed_precision is not None:
        yield "DDP's own mixed_precision is set"
    if ddp._use_python_reducer:
        yield "DDP's Python reducer is in use"
    if ddp._delay_all_reduce_params:
        yield "reductions of DDP are put off (delay_all_reduce_named_params)"


def call_before_groups_end(close: Callable[[], None]) -> None:
    """Calls a method, if its object is still there, before process groups are destroyed and at the end of the process.

    NCCL destroys a communicator once the last CUDA graph with collectives of it is gone, and waits for that: a script whose
    last line is `destroy_process_group()` would never end (pytorch/pytorch#115388). PyTorch finalizes what stands in this
    list before it turns to its groups.
    """
    method = weakref.WeakMethod(close)
    distributed.distributed_c10d._world.comms.append(_Last(method))
    atexit.register(_call, method)


@dataclass(frozen=True)
class _Last:
    """To be finalized."""

    method: weakref.WeakMethod[Callable[[], None]]

    def finalize(self) -> None:
        _call(self.method)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    close = method()
    if close is not None:
        close()


def move_to(ddps: Sequence[DistributedDataParallel], aside: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Lets DDP hand over gradients on the stream that steps are recorded on, `aside`.

    A gradient arrives on the stream that was the current one when DDP was built, usually the default stream, which cannot be
    recorded; PyTorch's notes on CUDA graphs therefore ask users to build DDP on a side stream. Its reducer is built anew here,
    by what DDP itself does after it was unpickled; every rank has to.
    """
    for ddp in ddps:
        ddp.reducer._remove_autograd_hooks()  # whoever else holds it
        ddp.reducer = ddp.logger = None  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()  # nodes of autograd that accumulate gradients live as long as anything holds them
    with aside():
        for ddp in ddps:
            rebuild(ddp)


def rebuild(ddp: DistributedDataParallel) -> None:
    """A new reducer, on the stream of now, that times nothing behind its first iterations."""
    parameters, are_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, are_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None
        ddp.logger._set_static_graph()
    ddp.reducer._set_ddp_runtime_logging_sample_rate(_NEVER)
