"""`python -m fxamp kernels script.py`: runs a training script, and profiles a few of its steps."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torch.optim.optimizer import register_optimizer_step_post_hook

from fxamp.explain.kernels import Recorder

AFTER_STEPS: Final = 5
"""Steps before the profile: they compile, and record CUDA graphs."""


class _Done(BaseException):
    """Ends the script: what was asked for is there. No `except Exception` of the script's stops it."""


class _Watch:
    """Counts the optimizer's steps of a script, and profiles some of them."""

    def __init__(self, after: int, steps: int) -> None:
        self.after, self.steps = after, steps
        self.num_seen = 0
        self.recorder: Recorder | None = None

    def __call__(self, *_: object) -> None:
        self.num_seen += 1
        if self.num_seen == self.after:
            self.recorder = Recorder()
            self.recorder.start()
        elif self.num_seen == self.after + self.steps:
            raise _Done


def main(script: Path, arguments: Sequence[str], *, steps: int, after: int = AFTER_STEPS) -> int:
    """Runs a script as `python script.py` would, up to the last profiled step, and prints the profile.

    A step is a call of `optimizer.step()`, of whatever optimizer. Returns 1, with the way out, for a script that ends before.
    """
    watch, profile = _Watch(after, steps), None
    hook = register_optimizer_step_post_hook(watch)
    before = list(sys.argv), list(sys.path)
    sys.argv[:], sys.path[:] = [str(script), *arguments], [str(script.parent), *sys.path]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _Done:
        assert watch.recorder is not None
        # Not in the hook: PyTorch names the range of a step, which has to end while the profiler still runs.
        profile, watch.recorder = watch.recorder.stop(steps), None
    finally:
        hook.remove()
        sys.argv[:], sys.path[:] = before
        if watch.recorder is not None:
            watch.recorder.stop(steps)  # the script has ended, or failed, in between
    if profile is None:
        print(
            f"{script} called optimizer.step() {watch.num_seen} times, and {after + steps} are needed: {after} that compile, "
            f"then {steps}. A loop without one, such as amp.train_step's or inference, is profiled by amp.profile(step)",
            file=sys.stderr,
        )
        return 1
    print(profile)
    return 0
