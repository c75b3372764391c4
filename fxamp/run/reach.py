"""Which parameters a loss reads outside of compiled graphs, where no precision of fxamp reaches them; and whose else."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final

from torch import Tensor, nn
from torch.autograd.graph import Node

_COMPILED: Final = "CompiledFunction"
"""How AOTAutograd calls the one node that a compiled graph has in autograd's."""

MAX_SHOWN: Final = 3
"""Parameters that a note shows."""


def read_outside(loss: Tensor) -> list[nn.Parameter]:
    """The parameters that something else than a compiled graph reads on the way to `loss`. Asks autograd's graph, before the
    backward."""
    found = {
        id(leaf): leaf
        for node, leaf in reads([loss])
        if isinstance(leaf, nn.Parameter) and not node.name().startswith(_COMPILED)
    }
    return list(found.values())


@contextlib.contextmanager
def kept_gradients(loss: Tensor, but: Collection[int]) -> Generator[None]:
    """A backward of `loss` inside leaves no gradient with leaves that it reads, and touches none that they have; `but`: those
    that it is for, by id."""
    # Low copies of weights, and probes, hand their gradients on by hooks.
    others = {
        id(leaf): leaf
        for _, leaf in reads([loss])
        if id(leaf) not in but and (isinstance(leaf, nn.Parameter) or not getattr(leaf, "_post_accumulate_grad_hooks", None))
    }
    before = [(leaf, leaf.grad) for leaf in others.values()]
    try:
        for leaf, _ in before:
            leaf.grad = None  # else it would be added to, in its place
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def reads(outputs: Iterable[Tensor]) -> Iterator[tuple[Node, Tensor]]:
    """Every leaf on the way to `outputs`, which a backward would accumulate into, with each node of autograd's graph that
    reads it."""
    queue: list[Node] = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop()
        for source in {source for source, _ in node.next_functions if source is not None}:
            leaf = getattr(source, "variable", None)
            if isinstance(leaf, Tensor):
                yield node, leaf
            if source not in seen:
                seen.add(source)
                queue.append(source)


def note_of(outside: Sequence[nn.Parameter], names: Mapping[int, str]) -> str:
    """What to say of `read_outside`. `names`: by the id of a parameter; FSDP gathers others than those the model has."""
    shown = sorted(names.get(id(p), f"one of shape {list(p.shape)}") for p in outside)
    text = ", ".join([*shown[:MAX_SHOWN], *(["..."] if len(shown) > MAX_SHOWN else [])])
    return (
        f"train_step: {len(shown)} parameters ({text}) are read outside of every compiled graph: PyTorch computes there as if "
        "fxamp were not there. If they are under DDP or FSDP: these break the graph around each module that they wrap, and "
        "Dynamo begins no new one in layers and containers of torch.nn themselves. Wrap a class of your own, or compile "
        "first: DistributedDataParallel(torch.compile(model, backend=amp))"
    )
