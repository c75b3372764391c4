"""fxamp: a precision compiler for PyTorch. `torch.compile(model, backend="fxamp")`."""

from __future__ import annotations

from fxamp import errors, formats
from fxamp.backend import Amp, FxampWarning, __version__, register, shared
from fxamp.options import Options
from fxamp.policy import Policy, Rule
from fxamp.scaling import DynamicScale, StaticScale

__all__ = [
    "Amp",
    "DynamicScale",
    "FxampWarning",
    "Options",
    "Policy",
    "Rule",
    "StaticScale",
    "__version__",
    "errors",
    "formats",
    "register",
    "shared",
]
