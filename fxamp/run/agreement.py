"""What all ranks of a training wish for, known to all of them in the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from fxamp.run.mailbox import Mailbox


class Agreement:
    """Whether every rank is ready for what all of them have to do in the same step.

    One number travels with each step, the least of what the ranks say, whether the step is recorded or runs as it is: so no
    rank needs to know what another one does. The answer arrives as many steps later as `Mailbox` says, on all ranks in the
    same one; and none waits for it, but where it has run further ahead.

    Recordings need that: while NCCL is recorded it may register the buffers of a collective with the other ranks
    (NCCL_GRAPH_REGISTER in its user guide), so that a rank that records alone would wait for them for ever.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        """Args: group: of the ranks, whose collectives work on `device`; None: the default one."""
        self._group = group
        self._own = torch.zeros((), device=device)
        self._least = torch.zeros((), device=device)
        self._is_ready = False
        self._mailbox = Mailbox()

    def say(self, is_ready: bool) -> None:
        """What this rank says with the steps to come."""
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            self._own.fill_(is_ready)

    @contextlib.contextmanager
    def travelling(self) -> Generator[None]:
        """Part of a step: what the ranks say travels beside what is launched inside."""
        from torch import distributed

        self._least.copy_(self._own)
        work = distributed.all_reduce(self._least, distributed.ReduceOp.MIN, group=self._group, async_op=True)
        yield
        assert work is not None, "a rank that is not of the group trains with it"
        work.wait()

    def hear(self) -> bool:
        """Once behind each step: were all ready, in the step whose answer arrives now? Then it is to be done now."""
        arrived = self._mailbox.post(self._least)
        if arrived is None or self._mailbox.is_outdated or not float(arrived):
            return False
        self._mailbox.outdate()
        return True

    def is_so_everywhere(self, is_so: bool) -> bool:
        """Do all ranks say so, now? Waits for them: only where all of them ask."""
        from torch import distributed

        least = torch.full_like(self._least, is_so)
        distributed.all_reduce(least, distributed.ReduceOp.MIN, group=self._group)
        return bool(least)

    @property
    def num_ranks(self) -> int:
        from torch import distributed

        return distributed.get_world_size(self._group)

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """What a recorded step reads and writes."""
        return self._own, self._least
