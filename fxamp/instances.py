"""Where a graph stands in the model that is running.

`for block in model.layers: block.compile(backend=amp)`, and a graph break above a module, make a graph of a part of the model:
it serves every instance of that part, and paths in it are relative to the part. Which rules cannot be followed then is decided
here, from the modules that are being called: they stand on Python's own stack while Dynamo compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fxamp import errors
from fxamp.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a model that a graph was compiled from."""

    model: str
    """Class of the outermost module that is being called."""
    part: str
    """Class of the innermost one, in which the graph was captured."""
    path: str
    """Path of that one in the outermost: "layers.0"."""
    instances: tuple[str, ...]
    """Paths of all modules of its class in the outermost, which are served by the same graph."""


def running_part() -> Part | None:
    """The part that is being compiled; None where the outermost module is compiled as a whole, or none is being called.

    In a loop of the user's own, `for block in model.layers: x = block(x)`, the outermost is whatever holds the module among
    the variables of the functions that are running.
    """
    modules = _running()
    if not modules:
        return None
    inner = modules[-1]
    outer = modules[0] if modules[0] is not inner else _holder(inner)
    if outer is None:
        return None
    named = dict(outer.named_modules(remove_duplicate=False))
    path = next((name for name, module in named.items() if module is inner), None)
    if path is None:
        return None
    return Part(
        model=type(outer).__name__,
        part=type(inner).__name__,
        path=path,
        instances=tuple(name for name, module in named.items() if type(module) is type(inner)),
    )


def _running() -> list[nn.Module]:
    """The modules whose call is on the stack of this thread, outermost first, without the wrappers of torch.compile."""
    calls = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)
    found: list[nn.Module] = []
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in calls:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and not hasattr(module, "_orig_mod") and (not found or found[-1] is not module):
                found.append(module)
        frame = frame.f_back
    return found[::-1]


def _holder(inner: nn.Module) -> nn.Module | None:
    """The largest module that a running function has in a variable and that holds this one; None if there is none."""
    held: list[nn.Module] = []
    frame = sys._getframe()
    while frame is not None:
        values = [v for v in frame.f_locals.values() if isinstance(v, nn.Module) and not hasattr(v, "_orig_mod")]
        held += [v for v in values if v is not inner and any(m is inner for m in v.modules())]
        frame = frame.f_back
    return max(held, key=lambda v: sum(1 for _ in v.modules()), default=None)


def check(policy: Policy, paths: Iterable[str]) -> None:
    """Raises RuleOutOfReach for a rule that names a module by its path in the model, where the graph (whose operations stand
    in modules at `paths`) is that of a part: it would be ignored, or hold for all instances of the part alike."""
    here = sorted(set(paths))
    about_modules = [(rule, resolved) for rule in policy.rules if (resolved := policy.resolved(rule)).kind == "module"]
    unmatched = [(rule, resolved) for rule, resolved in about_modules if not any(resolved.matches("", path) for path in here)]
    part = running_part() if unmatched else None
    if part is None:
        return
    for rule, resolved in unmatched:
        meant = [i for i in part.instances if any(resolved.matches("", f"{i}.{path}".rstrip(".")) for path in here)]
        if not meant:
            continue
        others = len(part.instances) - len(meant)
        whom = f"not the {others} other{'s' * (others > 1)}" if others else "all there are"
        raise errors.RuleOutOfReach(
            f"the policy's rule '{rule}' means {', '.join(meant[:3])}{', ...' * (len(meant) > 3)} of {part.model} "
            f"({whom}), but this graph was compiled from a {part.part} by itself (now {part.path}), and one graph serves all "
            f"{len(part.instances)} of them",
            way_out=f"Write the rule relative to {part.part}, for all of them alike; or give each of these modules an Amp of "
            f"its own; or compile {part.model} as a whole, without graph breaks above {part.part}",
        )
