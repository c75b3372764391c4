"""`import fxamp` is light: it pulls in neither Dynamo nor Inductor, and takes no time that a user would notice."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.house.source import ROOT, plant, run_python

HEAVY = ("torch._dynamo", "torch._inductor")
SHARE, LIMIT_S = 0.1, 0.3  # `import torch` takes 2 to 3 s, more on a busy machine; a tenth of that goes unnoticed

# The garbage collector walks all that torch has made whenever its counter runs over: whoever imports last would pay for that.
MEASURE = """
import gc, sys, time
start = time.process_time()
import torch
gc.freeze()
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]  # as where it is installed
before, between = set(sys.modules), time.process_time()
import fxamp
print(between - start, time.process_time() - between, *set(sys.modules) - before)
"""


def violations(root: Path) -> list[str]:
    """CPU time in new processes, as the machine may have other work; the best of three, as the first writes the bytecode."""
    with tempfile.TemporaryDirectory() as bytecode:
        for _ in range(3):
            torch_s, fxamp_s, *new = run_python(MEASURE, bytecode, path=root).split()
            limit_s = max(LIMIT_S, SHARE * float(torch_s))
            if float(fxamp_s) < limit_s:
                break
    heavy = sorted(module for module in new if f"{module}.".startswith(tuple(f"{name}." for name in HEAVY)))
    found = [f"imports {', '.join(heavy)}"] if heavy else []
    return found + ([f"takes {fxamp_s} s, allowed are {limit_s:.2f} s"] if float(fxamp_s) >= limit_s else [])


def test_import_is_light():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch._inductor.config", "imports torch._inductor, torch._inductor.config"),
        ("import torch._dynamo", "imports torch._dynamo"),
        ("import time\nwhile time.process_time() < 0.5: pass", "takes 0."),
        ("import torch._early", ""),  # what torch has imported by then is not ours
    ],
)
def test_planted_weight_is_found(tmp_path, text, message):
    torch = {
        "torch/__init__.py": "import torch._early",
        "torch/_early.py": "import torch._dynamo.external",
        "torch/_dynamo/__init__.py": "",
        "torch/_dynamo/external.py": "",
        "torch/_inductor/__init__.py": "",
        "torch/_inductor/config.py": "",
    }
    if "_dynamo" in text:
        torch["torch/_early.py"] = ""
    plant(tmp_path, torch | {"fxamp/__init__.py": text})
    assert message in "".join(violations(tmp_path))
    assert bool(message) == bool(violations(tmp_path))
