"""What this machine can do for fxamp, and what is in the way: `python -m fxamp doctor`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxamp import errors, formats, scaling
from fxamp.backend import Amp, __version__
from fxamp.options import Options

Verdict = Literal["ok", "note", "blocks"]
"""A note costs speed or a feature; what blocks prevents compilation."""

LOWERED_PRECISIONS: Final = ("bf16", "fp16", "tf32", "fp8")

WAYS_OUT: Final = (
    ("InvalidCxxCompiler", "Install a C++ compiler (g++ or clang++), or name one in the environment variable CXX"),
    ("Python.h", "Install the headers of this Python (package python3-dev or python3-devel)"),
    ("omp.h", "Install OpenMP for the C++ compiler (package libgomp or libomp-dev)"),
    ("No space left", "Free space, or set TORCHINDUCTOR_CACHE_DIR to a directory on another disk"),
    ("Cannot find a working triton", "Install the triton that belongs to this torch: pip install triton"),
)
"""What the text of a failed compilation contains -> what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row: what was looked at, what was found, whether it is in the way, and then the way out."""

    name: str
    finding: str
    verdict: Verdict = "ok"
    way_out: str = ""
    detail: str = ""
    """The traceback of what failed, for `--verbose`."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All rows, in the order of the table."""

    checks: tuple[Check, ...]

    @property
    def exit_status(self) -> int:
        """1 if something prevents compilation, else 0."""
        return int(any(check.verdict == "blocks" for check in self.checks))

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)


def diagnose() -> Diagnosis:
    """Looks at everything, and compiles and runs a small function on every kind of device."""
    devices = list(all_devices())
    # Graphs on the CPU are a side line where there is an accelerator: what only they need is then not in the way.
    main_device = devices[-1]
    checks = [*versions()]
    for device in devices:
        checks += device_checks(device)
    checks += [
        entry_point(),
        compile_switch(),
        cache_directory(),
        cpp_compiler(is_needed=main_device.type == "cpu"),
        triton(is_needed=main_device.type in ("cuda", "xpu")),
    ]
    for device in {device.type: device for device in devices}.values():
        checks.append(trial(device, is_needed=device.type == main_device.type))
    return Diagnosis(checks=tuple(checks))


def all_devices() -> Iterator[torch.device]:
    """The CPU, and every accelerator after it."""
    yield torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        yield from (torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count()))


# -------------------------------------------------------------------------------------------------------- single checks


def versions() -> Iterator[Check]:
    yield Check(name="fxamp", finding=f"{__version__}, from {Path(__file__).parent}")
    yield Check(name="torch", finding=f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    yield Check(name="Python", finding=f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def device_checks(device: torch.device) -> Iterator[Check]:
    """What the device is, which precisions it computes in hardware, and what "auto" means on it."""
    yield Check(name=str(device), finding=_describe(device))
    for precision in LOWERED_PRECISIONS:
        is_native, reason = formats.native_support(device, precision)
        yield Check(
            name=f"{device}: {precision}",
            finding=f"{'in hardware' if is_native else 'not in hardware'} ({reason}){_remark(precision)}",
            verdict="ok" if is_native else "note",
        )
    precision, reason = formats.resolve_auto(device)
    yield Check(name=f"{device}: auto", finding=f"{precision} ({reason.removeprefix('auto: ')})")


def _remark(precision: str) -> str:
    """What a precision asks of the user, beside the hardware."""
    try:
        options = Options(precision=precision)
    except errors.NotYet:
        return "; not in this version of fxamp"
    is_scaled = scaling.resolve(options.scaling, (precision,)) is not None
    return "; gradients are scaled: call amp.attach(optimizer)" if is_scaled else ""


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        # Threads of torch, which may be fewer than there are CPUs.
        return f"{torch.backends.cpu.get_cpu_capability()} instructions, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"compute capability {properties.major}.{properties.minor}"
        return f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB"
    return f"{device.type} device"


def entry_point() -> Check:
    """Will torch.compile find backend="fxamp"?"""
    name = "entry point"
    found = list(importlib.metadata.entry_points(group="torch_dynamo_backends", name="fxamp"))
    if not found:
        return Check(
            name=name,
            finding='not registered: torch.compile(model, backend="fxamp") fails',
            verdict="blocks",
            way_out="Install fxamp (pip install -e . in its source tree); or call fxamp.register() first, "
            "or give torch.compile an object: backend=fxamp.Amp()",
        )
    try:
        found[0].load()
    except (ImportError, AttributeError) as error:
        return Check(
            name=name,
            finding=f"{found[0].value} cannot be loaded: {error}",
            verdict="blocks",
            way_out="Install fxamp again: what is installed does not belong to this source",
        )
    return Check(name=name, finding=f'backend="fxamp" is {found[0].value}')


def compile_switch() -> Check:
    """Is torch.compile switched off from outside?"""
    import torch._dynamo.config as dynamo_config

    if dynamo_config.disable:
        return Check(
            name="torch.compile",
            finding="switched off: compiled models run eagerly",
            verdict="blocks",
            way_out="Unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE",
        )
    return Check(name="torch.compile", finding="not switched off")


def cache_directory() -> Check:
    """Can Inductor write its cache?"""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Not cache_dir() of the same module: that one makes the directory and sets the variable.
    directory = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()).absolute()
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Check(name="Inductor cache", finding=str(directory) + ("" if nearest == directory else " (not made yet)"))
    return Check(
        name="Inductor cache",
        finding=f"{directory} cannot be written, because of {nearest}",
        verdict="blocks",
        way_out="Set TORCHINDUCTOR_CACHE_DIR to a directory that you may write",
    )


def cpp_compiler(*, is_needed: bool) -> Check:
    """Is there a C++ compiler where Inductor looks for it?"""
    from torch._inductor import config, cpp_builder, exc

    name = "C++ compiler"
    try:
        compiler = cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):  # on Windows it is a RuntimeError
        looked_for = ", ".join(str(cxx) for cxx in config.cpp.cxx if cxx) or "the default"
        return Check(
            name=name,
            finding=f"none found (looked for {looked_for})",
            verdict="blocks" if is_needed else "note",
            way_out=dict(WAYS_OUT)["InvalidCxxCompiler"],
        )
    return Check(name=name, finding=shutil.which(compiler) or compiler)


def triton(*, is_needed: bool) -> Check:
    """Is there a Triton, which Inductor's kernels on GPUs are written in?"""
    from torch.utils._triton import has_triton_package

    if has_triton_package():
        # By name: where torch has no GPU there may be no triton to check the types against.
        return Check(name="triton", finding=str(importlib.import_module("triton").__version__))
    if not is_needed:
        return Check(name="triton", finding="not installed, and not needed without a GPU")
    return Check(
        name="triton",
        finding="not installed: nothing can be compiled for the GPU",
        verdict="blocks",
        way_out=dict(WAYS_OUT)["Cannot find a working triton"],
    )


def trial(device: torch.device, *, is_needed: bool) -> Check:
    """Compiles a small function with fxamp, forward and backward, runs it, and compares it with eager."""
    name = f"compiles on {device.type}"
    amp = Amp(precision="auto")
    # A number that no run had before: else the caches would hide that the compiler has gone.
    factor = 1 + (time.time_ns() % 10**9) * 1e-12
    start_s = time.perf_counter()

    def failed(finding: str, way_out: str, detail: str = "") -> Check:
        verdict: Verdict = "blocks" if is_needed else "note"
        return Check(name=name, finding=finding, verdict=verdict, way_out=way_out, detail=detail)

    try:
        is_right = _runs_right(device, factor, lambda f: torch.compile(f, backend=amp))
    except Exception as error:  # whatever it is, it is the finding
        text = "".join(traceback.format_exception(error))
        way_out = next((way for symptom, way in WAYS_OUT if symptom in text), "Read the traceback: --verbose shows it")
        first_line = next(iter(str(error).strip().splitlines()), "")
        return failed(f"no: {type(error).__name__}: {first_line}", way_out, text)
    if not amp.graphs:
        return failed("no graph reached fxamp, the function ran eagerly", "See the row torch.compile")
    if not is_right:
        return failed("compiles, but the result is wrong", "Report it, with this table: this is a bug")
    return Check(name=name, finding=f"yes, in {', '.join(amp.report().precisions)} ({time.perf_counter() - start_s:.1f} s)")


def _runs_right(device: torch.device, factor: float, compile_: Callable[..., Callable[..., torch.Tensor]]) -> bool:
    """Is the gradient of a compiled function that of the eager one, but for bf16's rounding?"""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).mul(factor).sum()

    x = torch.linspace(-1, 1, 64, device=device).view(8, 8)
    weight = torch.linspace(-0.5, 1, 64, device=device).view(8, 8).requires_grad_()
    (want,) = torch.autograd.grad(function(x, weight), weight)
    (got,) = torch.autograd.grad(compile_(function)(x, weight), weight)
    # At most eight roundings on the way (x, weight, product, tanh, its derivative, x again, both results), each by 2**-8.
    return bool((got - want).norm() <= 8 * 2**-8 * want.norm())


# ------------------------------------------------------------------------------------------------------------- printing

_STYLES: Final = {"ok": "green", "note": "yellow", "blocks": "bold red"}


def table(diagnosis: Diagnosis) -> Table:
    """One row for each check."""
    out = Table(title="fxamp doctor", title_justify="left", box=box.SIMPLE)
    out.add_column("what", no_wrap=True)
    out.add_column("", no_wrap=True)
    out.add_column("found", overflow="fold")
    for check in diagnosis.checks:
        out.add_row(check.name, f"[{_STYLES[check.verdict]}]{check.verdict}[/]", escape(check.finding))
    return out


def conclusions(diagnosis: Diagnosis, *, verbose: bool = False) -> list[str]:
    """The lines under the table: the way out of everything that is not well."""
    lines = [f"{check.name}: {check.way_out}." for check in diagnosis.checks if check.way_out]
    if verbose:
        lines += [check.detail for check in diagnosis.checks if check.detail]
    lines.append("Something prevents compilation." if diagnosis.exit_status else "Nothing prevents compilation.")
    return lines


def main(*, verbose: bool = False, console: Console | None = None) -> int:
    """Diagnoses, prints, and returns the exit status: 1 if something prevents compilation."""
    console = console or Console()
    with console.status("compiling a small function"):
        diagnosis = diagnose()
    console.print(table(diagnosis))
    for line in conclusions(diagnosis, verbose=verbose):
        console.print(line, markup=False, highlight=False)
    return diagnosis.exit_status
