"""fxamp: a precision compiler for PyTorch. `torch.compile(model, backend="fxamp")`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fxamp import errors, formats
from fxamp.backend import Amp, FxampWarning, __version__, register, shared
from fxamp.options import Options
from fxamp.policy import Policy, Rule
from fxamp.scaling import DynamicScale, StaticScale

if TYPE_CHECKING:
    from fxamp.directional import directional_curvature
    from fxamp.scheduler import CurvatureScheduler, Decision, FixedSchedule, Scheduler, Signal

__all__ = [
    "Amp",
    "CurvatureScheduler",
    "Decision",
    "DynamicScale",
    "FixedSchedule",
    "FxampWarning",
    "Options",
    "Policy",
    "Rule",
    "Scheduler",
    "Signal",
    "StaticScale",
    "__version__",
    "directional_curvature",
    "errors",
    "formats",
    "register",
    "shared",
]


def __getattr__(name: str) -> Any:
    """The names of modules that not everybody needs: `import fxamp` stays light."""
    if name == "directional_curvature":
        return importlib.import_module("fxamp.directional").directional_curvature
    if name in ("CurvatureScheduler", "Decision", "FixedSchedule", "Scheduler", "Signal"):
        return getattr(importlib.import_module("fxamp.scheduler"), name)
    raise AttributeError(f"module 'fxamp' has no attribute {name!r}")
