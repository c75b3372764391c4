"""Where a row comes from: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import torch

from bench.rows import Machine, Run

ROOT: Final = Path(__file__).parents[1]

MEASURING: Final = ("models.py", "workloads.py", "systems.py", "measure.py", "worker.py", "scaling.py")
"""Files of the benchmark that decide what is measured. The others plan runs, and write what was measured."""


def run(
    device_type: str,
    device_name: str,
    *,
    protocol: Literal["full", "quick"],
    num_threads: int | None,
    command: str,
    commit: str | None,
) -> Run:
    """The run that starts now. `device_name` is asked of the device's own process, so that this one needs no CUDA
    context."""
    commit = commit or _git("rev-parse", "HEAD")
    return Run(
        id=uuid.uuid4().hex[:12],
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        command=command,
        protocol=protocol,
        machine=Machine(
            device=device_name if device_type == "cuda" else _cpu_name(),
            device_type=device_type,
            num_cpus=os.cpu_count() or 1,
        ),
        num_threads=num_threads,
        versions=versions(),
        commit=commit,
        is_dirty=commit is not None and bool(_git("status", "--porcelain", "--", "fxamp", "bench/*.py")),
        fxamp_source=digest(ROOT, (ROOT / "fxamp").rglob("*.py")),
        bench_source=digest(ROOT, (ROOT / "bench" / name for name in MEASURING)),
    )


def digest(root: Path, paths: Iterable[Path]) -> str:
    """Of the names and texts of files."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for package in ("transformers", "torchao", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str | None:
    """What a command of git prints; None where there is no git, or no checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    """Linux says it in /proc/cpuinfo, and nowhere portable."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
