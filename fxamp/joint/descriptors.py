"""What AOTAutograd says of the inputs and outputs of its graphs."""

from __future__ import annotations

from typing import Any


def descriptors() -> Any:
    """The module of AOTAutograd's descriptors. Imported late: it would make `import fxamp` four times slower."""
    from torch._functorch._aot_autograd import descriptors

    return descriptors


def input_of(desc: Any) -> int | None:
    """The position of the input that a gradient belongs to; None for the base of several inputs, which has none."""
    of: Any = desc.grad_of if isinstance(desc, descriptors().GradAOTOutput) else None
    while isinstance(of, descriptors().ViewBaseAOTInput):
        of = of.base_of
    return of.idx if isinstance(of, descriptors().PlainAOTInput) else None
