from __future__ import annotations

import pytest
import torch

from fxamp import errors
from fxamp.run import cuda_graphs

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def decide(wish="auto", mode=None, device=CUDA, trains=False, fresh=(True,)):
    return cuda_graphs.decide(wish, mode, device=device, trains=trains, fresh_outputs=fresh)


@pytest.mark.parametrize(
    ("asked", "on", "copies"),
    [
        ({}, True, (True,)),
        ({"trains": True}, False, ()),
        ({"fresh": (True, False)}, False, ()),
        ({"wish": True, "trains": True}, True, ()),
        ({"wish": False}, False, ()),
        ({"wish": False, "mode": "reduce-overhead"}, False, ()),
        ({"mode": "reduce-overhead", "trains": True}, True, ()),
        ({"mode": "max-autotune"}, True, ()),
        ({"mode": "max-autotune-no-cudagraphs", "trains": True}, False, ()),
        ({"device": CPU}, False, ()),
        ({"device": CPU, "wish": True}, False, ()),
    ],
)
def test_when(asked, on: bool, copies: tuple[bool, ...]):
    decision = decide(**asked)
    assert (decision.on, decision.copies) == (on, copies)
    assert decision.reason


def test_required_but_impossible():
    with pytest.raises(errors.CudaGraphsUnavailable, match="this graph computes on cpu. Move the model"):
        decide("require", device=CPU)


def test_copies_are_the_users_to_keep():
    pool = [torch.zeros(2), torch.zeros(2), 3]
    call = cuda_graphs.copying(lambda: pool, (True, False, True))
    mine = call()
    pool[0].fill_(1)
    assert mine[0].sum() == 0
    assert mine[1] is pool[1]
    assert mine[2] == 3
