"""When the gradients of DDP and FSDP2 travel: once a step, with its last micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

from torch import distributed, nn


@contextlib.contextmanager
def put_off(modules: Iterable[nn.Module]) -> Generator[None]:
    """Backwards inside leave gradients with the rank that computed them; the first one behind it reduces what was added up.

    DDP's `no_sync()`, and FSDP2's `set_requires_gradient_sync(False)`, under which each rank keeps whole gradients, in
    `reduce_dtype`, until then. Of FSDP1, and of whatever else reduces by itself, nothing changes.
    """
    if not distributed.is_available():
        yield
        return
    from torch.distributed.fsdp import FSDPModule  # `import fxamp` stays light

    with contextlib.ExitStack() as stack:
        for module in modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())
            elif isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(False, recurse=False)
                stack.callback(module.set_requires_gradient_sync, True, recurse=False)
        yield
