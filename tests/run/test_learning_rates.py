"""Learning rates, where a recording reads them."""

from __future__ import annotations

import torch
from torch import nn, optim

from fxamp.run.learning_rates import LearningRates


def test_groups_come_and_go():
    """Each tensor stays where it is while its group has its place; a group may be empty."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([{"params": [], "lr": 0.5}, {"params": [a], "lr": 0.25}])
    rates = LearningRates(optimizer)

    def now() -> list[float]:
        rates.refresh()
        with rates.on_device():
            assert all(group["lr"] is t for group, t in zip(optimizer.param_groups, rates.tensors, strict=True))
        assert not any(group["lr"] is t for group, t in zip(optimizer.param_groups, rates.tensors, strict=True))
        return [float(t) for t in rates.tensors]

    assert now() == [0.5, 0.25]
    where = [t.data_ptr() for t in rates.tensors]
    optimizer.add_param_group({"params": [b], "lr": 2.0})
    assert now() == [0.5, 0.25, 2.0]
    optimizer.param_groups[1]["lr"] = torch.tensor(4.0)
    assert now() == [0.5, 4.0, 2.0]
    optimizer.param_groups[1]["lr"] = 4.0
    optimizer.param_groups.pop()
    assert now() == [0.5, 4.0]
    assert [t.data_ptr() for t in rates.tensors] == where
    optimizer.param_groups.pop(0)
    assert now() == [4.0]
