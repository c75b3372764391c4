"""Where the values that leave a graph go: to the caller of the compiled program, or to more of the program itself.

Dynamo cuts a program where it cannot follow it. What a graph hands over at such a cut is read by code of the program, compiled
or not, which was written for the traced dtypes: a product of it and of an fp32 weight would be refused.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from torch import fx

from fxamp.handing_on import RESUMES, hands_on

_CALLBACK: Final = "torch._dynamo.convert_frame"
"""The module that Python calls for a frame which is to be compiled."""

_ENTRY: Final = "torch._dynamo.eval_frame"
"""The module that calls what `torch.compile` was given."""

_OF_A_MODULE: Final = "torch.nn.modules.module"
"""Between the two, where a module was given: its `__call__`."""


def within_program(gm: fx.GraphModule) -> str | None:
    """Why the outputs of one of Dynamo's graphs are read by more of the program that it was cut from; None if they go to
    whoever called the compiled program. Asked while Dynamo compiles it."""
    compiled, caller = _compiled_frame()
    if compiled is None:
        return None  # called by hand
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return "the graph was split into parts"
    if reason.graph_break:
        return "a graph break follows"
    frame = _receiver(compiled, caller)
    while frame is not None and _module_of(frame) != _ENTRY and hands_on(frame):
        frame = _receiver(frame.f_code.co_name, frame.f_back)
    while frame is not None and _module_of(frame) == _OF_A_MODULE:
        frame = frame.f_back
    if frame is None or _module_of(frame) != _ENTRY:
        return "a function returns them to one with a graph break"
    return None


def _receiver(name: str, caller: FrameType | None) -> FrameType | None:
    """Whom a function of this name returns to: the rest of one returns to whoever called its first part."""
    while caller is not None and name.startswith(RESUMES):
        caller, name = caller.f_back, caller.f_code.co_name
    return caller


def _compiled_frame() -> tuple[str | None, FrameType | None]:
    """(name of the function that Dynamo compiles, the frame that called it); (None, None) where Dynamo compiles nothing."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        compiled: Any = frame.f_locals.get("frame") if _is_callback(frame) else None
        if compiled is not None:
            return str(compiled.f_code.co_name), frame.f_back
        frame = frame.f_back
    return None, None


def _is_callback(frame: FrameType) -> bool:
    """Is it the outermost frame of Dynamo's, which Python called?"""
    behind = frame.f_back
    return _module_of(frame) == _CALLBACK and (behind is None or _module_of(behind) != _CALLBACK)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
