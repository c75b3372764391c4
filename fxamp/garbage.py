"""When Python looks for garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def collected_later() -> Generator[None]:
    """Lets no garbage be collected inside of it. What a stage makes is kept, by the hundred thousand; Python takes that for a
    reason to walk, again and again, all that Dynamo and AOTAutograd hold. Also a decorator."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
