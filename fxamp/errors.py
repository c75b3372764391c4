"""Every error that fxamp raises: what is wrong, where in the user's code, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final


class FxampError(Exception):
    """Base of all errors of fxamp. Its text always has the form `ERROR[Class]: what, at where. way out.`"""

    def __init__(self, what: str, *, where: str | None = None, way_out: str) -> None:
        self.what, self.where, self.way_out = what, where, way_out
        place = f", at {where}" if where else ""
        super().__init__(f"ERROR[{type(self).__name__}]: {what}{place}. {way_out}")


class UnknownOption(FxampError, ValueError):
    """An option, precision, preset or mode that does not exist. The text lists those that do."""


class InvalidOption(FxampError, ValueError):
    """An option that exists, with a value that it cannot take."""


class ContradictoryRules(InvalidOption):
    """Two rules of a policy match the same operations and ask for different precisions."""


class RuleOutOfReach(InvalidOption):
    """A rule of a policy names a module by its path in the whole model, but a graph was compiled from a part of the model,
    which does not know where it stands."""


class TooManyVariants(InvalidOption):
    """The regions of a graph can have more combinations of precisions than anybody would want to compile."""


class NotYet(FxampError, NotImplementedError):
    """A documented option whose implementation has not landed in this version."""


class NotFloating(FxampError, TypeError):
    """A cast was asked for a value that is no floating-point tensor. Always a bug of the pass that asked."""


class StageFailed(FxampError, RuntimeError):
    """A stage of fxamp (capture, plan, one pass, lowering) failed. Names the stage, the node and the user's line."""


class IllegalGraph(FxampError, RuntimeError):
    """A pass left a graph that breaks the rules of its stage. Always a bug of that pass."""


class CudaGraphsUnavailable(FxampError, RuntimeError):
    """`cuda_graphs="require"`, and a graph cannot be captured."""


class TransformAround(FxampError, RuntimeError):
    """A `torch.func` transform was applied to a compiled function, which PyTorch would run eagerly."""


class SecondOrder(FxampError, RuntimeError):
    """A compiled graph was differentiated twice, or in forward mode, which AOTAutograd cannot do."""


class CannotScale(FxampError, RuntimeError):
    """Gradients of a graph, or the parameters of an optimizer, are of a kind that loss scaling cannot protect."""


class CannotFreeze(FxampError, ValueError):
    """The weights of a model are of a kind of which no low copies can be kept."""


class FrozenWeights(FxampError, RuntimeError):
    """Gradients were asked of weights that `Amp.freeze` froze."""


class CannotPickle(FxampError, TypeError):
    """An Amp was pickled: it holds compiled programs and the live parameters of a model."""


class NeedsScaling(FxampError, RuntimeError):
    """Something about loss scaling was asked of an Amp that scales nothing."""


class CannotSkip(FxampError, RuntimeError):
    """An optimizer whose step cannot be left out."""


class CannotCapture(FxampError, RuntimeError):
    """An optimizer whose step cannot be part of a CUDA graph."""


class ScaleAtFloor(FxampError, RuntimeError):
    """Gradients overflow although the loss scale is as low as it goes: the cause is not the scale."""


class NeedsCaptured(FxampError, LookupError):
    """Something about a graph was asked for that is not on record (nothing compiled yet, or no such stage)."""


class MissingPackage(FxampError, ImportError):
    """An optional package is needed for what was asked, and is not installed."""


class InvariantBroken(FxampError, AssertionError):
    """A graph, or a run of it, breaks what `fxamp.testing` checks. A bug of fxamp, or of the pass under test."""

    def __init__(self, what: str, *, invariant: str, node: str, where: str | None) -> None:
        self.invariant, self.node = invariant, node
        subject = f"{invariant}: {f'{node}: ' if node else ''}{what}"
        way_out = "Please report this, with the program, unless the policy or pass is yours"
        super().__init__(subject, where=where, way_out=way_out)


_SPELLINGS: Final[Mapping[str, str]] = MappingProxyType({
    "float32": "fp32", "float": "fp32", "full": "fp32", "tensorfloat32": "tf32", "high": "tf32", "bfloat16": "bf16",
    "float16": "fp16", "half": "fp16", "mixed": "fp16", "float8": "fp8",
})  # fmt: skip
"""What others call the precisions -> what fxamp calls them."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UnknownOption:
    """The error for a name that is not among `known`; suggests the nearest one."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    spelling = _SPELLINGS.get(str(name).lower().removeprefix("torch."))  # of a torch.dtype too
    near = [spelling] if spelling in names else near
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return UnknownOption(f"unknown {kind} {name!r}", way_out=f"{hint}Known: {', '.join(names)}")


def not_yet(option: str, value: object, instead: str) -> NotYet:
    """The error for an option that is documented but not implemented yet."""
    return NotYet(f"{option}={value!r} is not implemented yet", way_out=instead)
