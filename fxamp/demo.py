"""The main job on real input, offline: train a small byte-level GPT twice, in fp32 by Inductor alone and through fxamp.

The text is the source of Python's standard library, which every machine has. Both runs start from the same weights and
see the same batches, so that precision is all that differs between them.
"""

from __future__ import annotations

import copy
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp import errors, formats
from fxamp.backend import Amp
from fxamp.options import Options

# Suffixes of tensors: B batch, T bytes of context, C channels (width), H heads, D channels of a head, V byte values.

NUM_BYTE_VALUES: Final = 256

TRAIN_FILES: Final = (
    *("argparse.py", "ast.py", "base64.py", "bdb.py", "bisect.py", "calendar.py", "cmd.py", "code.py", "codecs.py"),
    *("compileall.py", "contextlib.py", "copy.py", "csv.py", "dataclasses.py", "difflib.py", "dis.py", "doctest.py"),
    *("enum.py", "filecmp.py", "fileinput.py", "fractions.py", "ftplib.py", "functools.py", "getopt.py"),
    *("gettext.py", "graphlib.py", "gzip.py", "hashlib.py", "imaplib.py", "inspect.py", "ipaddress.py", "locale.py"),
    *("mailbox.py", "mimetypes.py", "modulefinder.py", "netrc.py", "optparse.py", "os.py", "pdb.py", "pickle.py"),
    *("pickletools.py", "pkgutil.py", "platform.py", "plistlib.py", "poplib.py", "pprint.py", "profile.py"),
    *("pstats.py", "pydoc.py", "queue.py", "selectors.py", "shelve.py", "shutil.py", "smtplib.py", "socket.py"),
    *("socketserver.py", "ssl.py", "statistics.py", "subprocess.py", "symtable.py", "tarfile.py", "tempfile.py"),
    *("threading.py", "timeit.py", "tokenize.py", "trace.py", "typing.py", "uuid.py", "weakref.py", "webbrowser.py"),
)
HELDOUT_FILES: Final = (
    *("configparser.py", "heapq.py", "random.py", "sched.py", "shlex.py", "textwrap.py", "traceback.py", "wave.py"),
)
"""All of both lists stand at the top of the standard library from Python 3.10 to 3.14. No file is in both lists."""


class NoText(errors.FxampError, LookupError):
    """The standard library's source is not there to train on (an embedded Python, or one in a zip archive)."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size of the model."""

    num_layers: int = 2
    num_heads: int = 4
    width: int = 64
    """Channels of the residual stream, a multiple of `num_heads`."""
    num_context_bytes: int = 64


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """All that a run of the demo depends on.

    Raises, when built: what `Options` raises for a precision that fxamp does not have; InvalidOption.
    """

    device: str = "cpu"
    precision: str = "bf16"
    """Precision of the run through fxamp. Not "auto", which on a CPU without bf16 would compare fp32 with itself."""
    num_steps: int = 60
    """Enough to learn which bytes follow each other, and below two minutes on two cores that emulate bf16."""
    num_warmup_steps: int = 10
    """First steps, trained but left out of the speed: clocks, allocator and CUDA-graph recordings settle in them."""
    seed: int = 0
    model: GPTConfig = field(default_factory=GPTConfig)
    batch_size: int = 8
    num_heldout_batches: int = 16
    learning_rate: float = 1e-2
    """Of 3e-3, 5e-3, 1e-2 and 2e-2, the one with the lowest held-out loss of this model and number of steps in fp32."""
    dump_dir: Path = Path("fxamp-demo-dump")

    def __post_init__(self) -> None:
        Options(precision=self.precision)  # refuses here, not after the training in fp32, what fxamp does not have
        if not 0 <= self.num_warmup_steps < self.num_steps:
            raise errors.InvalidOption(
                f"num_warmup_steps={self.num_warmup_steps} leaves none of num_steps={self.num_steps} to measure",
                way_out="Train more steps, or set num_warmup_steps below num_steps",
            )
        if self.num_heldout_batches < 2:
            raise errors.InvalidOption(
                f"num_heldout_batches={self.num_heldout_batches} gives the loss no standard error",
                way_out="Use two or more",
            )

    @staticmethod
    def for_device(device: torch.device, *, precision: str, num_steps: int | None, seed: int, dump_dir: Path) -> DemoConfig:
        """The default size for a device: what two CPU cores train in two minutes, or a GPU's worth of work."""
        size = DemoConfig()
        if device.type != "cpu":
            size = DemoConfig(
                num_steps=500,
                model=GPTConfig(num_layers=6, num_heads=6, width=384, num_context_bytes=256),
                batch_size=64,
                learning_rate=1e-3,
            )
        num_steps = size.num_steps if num_steps is None else num_steps
        return DemoConfig(
            device=str(device),
            precision=precision,
            num_steps=num_steps,
            num_warmup_steps=min(size.num_warmup_steps, num_steps - 1),
            seed=seed,
            model=size.model,
            batch_size=size.batch_size,
            learning_rate=size.learning_rate,
            dump_dir=dump_dir,
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What was measured of one training run, whatever compiled it."""

    heldout_losses_before: tuple[float, ...]
    """Nats per byte, one for each held-out batch, before training."""
    heldout_losses_after: tuple[float, ...]
    train_losses: tuple[float, ...]
    """Nats per byte, one for each step."""
    step_ms: tuple[float, ...]
    """Duration of each step after warm-up."""
    compile_s: float
    """Duration of the first held-out batch and the first step: compilation, from torch's caches where they have it."""

    @property
    def loss_before(self) -> float:
        return statistics.fmean(self.heldout_losses_before)

    @property
    def loss_after(self) -> float:
        return statistics.fmean(self.heldout_losses_after)

    @property
    def steps_per_s(self) -> float:
        return 1000 / statistics.median(self.step_ms)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One training run, and what it ran in."""

    system: str
    training: Training
    precisions: tuple[str, ...]
    """What the graphs really ran in. Empty if nothing was compiled."""
    num_low_ops: int
    num_casts: int
    formats: tuple[str, ...]
    loss_scale: float | None = None
    """At the end. None: gradients were not scaled."""
    num_skipped_steps: int = 0
    """Steps that were left out, because a gradient overflowed."""


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Both runs, and what they ran on."""

    config: DemoConfig
    num_train_bytes: int
    num_heldout_bytes: int
    missing_files: tuple[str, ...]
    """Files of the fixed set that this Python does not have."""
    baseline: RunResult
    fxamp: RunResult
    dumped_files: tuple[Path, ...]
    other_load: float | None
    """Processes of others that wanted a CPU before and while the demo ran; None where the system does not tell."""

    @property
    def loss_gap(self) -> float:
        """Held-out loss through fxamp minus that of fp32, in nats per byte."""
        return self.fxamp.training.loss_after - self.baseline.training.loss_after

    @property
    def loss_standard_error(self) -> float:
        """Of the held-out loss in fp32, from its spread over the batches, in nats per byte."""
        losses = self.baseline.training.heldout_losses_after
        return statistics.stdev(losses) / len(losses) ** 0.5

    @property
    def is_machine_busy(self) -> bool:
        """Did other work take so much of the CPUs that the speeds say little?"""
        return self.other_load is not None and self.other_load > 0.5 * (os.cpu_count() or 1)

    @property
    def is_trained(self) -> bool:
        """Did the held-out loss of both runs fall by more than its standard error?"""
        runs = (self.baseline.training, self.fxamp.training)
        return all(run.loss_before - run.loss_after > self.loss_standard_error for run in runs)

    @property
    def losses_agree(self) -> bool:
        """Is the gap smaller than the uncertainty of the held-out loss itself? False for a loss that is not finite."""
        return abs(self.loss_gap) <= self.loss_standard_error


Phase = Literal["compiling", "training", "evaluating"]
Observer = Callable[[str, Phase, int], None]
"""Called with the system, what it does now and the number of steps done."""


def ignore(system: str, phase: Phase, num_done_steps: int) -> None:
    """The observer of a run that nobody watches."""


# ---------------------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Bytes to train on and bytes to measure with, from different files."""

    train: Tensor
    heldout: Tensor
    missing_files: tuple[str, ...]

    @staticmethod
    def of_stdlib(directory: Path | None = None, *, num_needed_bytes: int = 1) -> Corpus:
        """Reads `TRAIN_FILES` and `HELDOUT_FILES`, in that order, from a directory (default: the standard library).

        Raises: NoText if either part has fewer than `num_needed_bytes`.
        """
        directory = directory or Path(sysconfig.get_paths()["stdlib"])
        missing = tuple(name for name in (*TRAIN_FILES, *HELDOUT_FILES) if not (directory / name).is_file())
        train, heldout = (
            b"".join((directory / name).read_bytes() for name in names if name not in missing)
            for names in (TRAIN_FILES, HELDOUT_FILES)
        )
        if min(len(train), len(heldout)) < num_needed_bytes:
            raise NoText(
                f"{len(train)} bytes to train on and {len(heldout)} held out, of {num_needed_bytes} needed for either",
                where=str(directory),
                way_out="Run the demo with a Python that has the source of its standard library",
            )
        return Corpus(train=_bytes(train), heldout=_bytes(heldout), missing_files=missing)

    def train_batches(self, config: DemoConfig) -> Tensor:
        """All batches of a run, [steps, B, T + 1]: the same for the same seed, whatever ran before."""
        offsets = torch.randint(
            len(self.train) - config.model.num_context_bytes,
            (config.num_steps, config.batch_size),
            generator=torch.Generator().manual_seed(config.seed),
        )
        return _windows(self.train, offsets, config)

    def heldout_batches(self, config: DemoConfig) -> Tensor:
        """Windows spread evenly over the held-out text, [batches, B, T + 1]."""
        num_windows = config.num_heldout_batches * config.batch_size
        last = len(self.heldout) - config.model.num_context_bytes - 1
        offsets = torch.linspace(0, last, num_windows, dtype=torch.float64).long()
        # Strided, so that each batch is a sample of all files: the spread over batches is then the loss's uncertainty.
        return _windows(self.heldout, offsets.view(config.batch_size, config.num_heldout_batches).T, config)


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else torch.empty(0, dtype=torch.long)


def _windows(text: Tensor, offsets: Tensor, config: DemoConfig) -> Tensor:
    # Contiguous: Dynamo compiles anew for other strides, and indexing with a transposed tensor gives some.
    return text[offsets.unsqueeze(-1) + torch.arange(config.model.num_context_bytes + 1)].contiguous()


# --------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and beside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm_attention(x_BTC))
        return x_BTC + self.down(F.gelu(self.up(self.norm_mlp(x_BTC))))

    def attention(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            t_BTC.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t_BTC in self.qkv(x_BTC).chunk(3, dim=-1)
        )
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.out(out_BHTD.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A language model over bytes. Called with inputs and targets, it returns the mean loss in nats per byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(NUM_BYTE_VALUES, config.width)
        self.embed_position = nn.Embedding(config.num_context_bytes, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        # Not tied to embed_byte: tied, so small a model needs more steps than the demo has to learn pairs of bytes.
        self.head = nn.Linear(config.width, NUM_BYTE_VALUES, bias=False)

    def forward(self, input_BT: Tensor, target_BT: Tensor) -> Tensor:
        position_T = torch.arange(input_BT.shape[1], device=input_BT.device)
        x_BTC = self.embed_byte(input_BT) + self.embed_position(position_T)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.head(self.norm(x_BTC))
        return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


def initial_model(config: DemoConfig) -> GPT:
    """The model that all runs start from, on the CPU; the same for the same seed, and torch's own seed is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return GPT(config.model)


# ------------------------------------------------------------------------------------------------------------ training


class _Stopwatch:
    """Times steps without a wait of the host for the device in between: by events on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device, num_laps: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(num_laps + 1)] if self._on_gpu else []
        self._times_s = [0.0] * (num_laps + 1)

    def mark(self, lap: int) -> None:
        if self._on_gpu:
            self._events[lap].record()
        else:
            self._times_s[lap] = time.perf_counter()

    def read_laps_ms(self) -> tuple[float, ...]:
        """Waits for the device. Lap i is the time from mark i to mark i + 1."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return tuple(a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False))
        return tuple(1000 * (b - a) for a, b in zip(self._times_s, self._times_s[1:], strict=False))


def _attach_to_nothing(optimizer: torch.optim.Optimizer) -> None:
    """What a run without fxamp does to its optimizer."""


def _train(
    model: nn.Module,
    compiled: Callable[[Tensor, Tensor], Tensor],
    batches: Tensor,
    heldout: Tensor,
    config: DemoConfig,
    observe: Callable[[Phase, int], None],
    attach: Callable[[torch.optim.Optimizer], object] = _attach_to_nothing,
) -> Training:
    """The loop that a user would write. `compiled` runs `model`; batches are [steps, B, T + 1] on its device; `attach` is
    that of an Amp."""
    device = batches.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=device.type == "cuda")
    attach(optimizer)

    def loss_of(batch: Tensor) -> Tensor:
        return compiled(batch[:, :-1], batch[:, 1:])

    def read_heldout_losses() -> tuple[float, ...]:
        # Not under torch.no_grad(), as anybody would who can wait: that is another graph, and a third of all compilation.
        # Clones, as what a CUDA graph returns may be overwritten by its next replay.
        return tuple(torch.stack([loss_of(batch).detach().clone() for batch in heldout]).tolist())

    observe("compiling", 0)
    start_s = time.perf_counter()
    loss_of(heldout[0]).item()  # compiles the forward, and waits for it
    compile_s = time.perf_counter() - start_s
    heldout_losses_before = read_heldout_losses()

    train_losses = torch.zeros(config.num_steps, device=device)
    stopwatch = _Stopwatch(device, config.num_steps)
    stopwatch.mark(0)
    for step, batch in enumerate(batches):
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train_losses[step] = loss.detach()
        stopwatch.mark(step + 1)
        observe("training", step + 1)
    step_ms = stopwatch.read_laps_ms()

    observe("evaluating", config.num_steps)
    return Training(
        heldout_losses_before=heldout_losses_before,
        heldout_losses_after=read_heldout_losses(),
        train_losses=tuple(train_losses.tolist()),
        step_ms=step_ms[max(config.num_warmup_steps, 1) :] or step_ms,
        compile_s=compile_s + step_ms[0] / 1000,
    )


def run(config: DemoConfig, observe: Observer = ignore) -> DemoResult:
    """Trains twice and returns what was measured; prints nothing. Forgets what Dynamo has compiled in this process.

    Raises: NoText where there is nothing to train on.
    """
    device = torch.device(config.device)
    load_before = _load()
    amp = Amp(precision=config.precision)
    corpus = Corpus.of_stdlib(num_needed_bytes=config.model.num_context_bytes + 2)
    batches, heldout = corpus.train_batches(config).to(device), corpus.heldout_batches(config).to(device)
    initial = initial_model(config).to(device)

    def train(system: str, amp: Amp | None) -> Training:
        torch.compiler.reset()  # else a run would find the graphs, or meet the recompile limit, of an earlier one
        model = copy.deepcopy(initial)
        attach = _attach_to_nothing if amp is None else amp.attach
        compiled = torch.compile(model) if amp is None else torch.compile(model, backend=amp)
        return _train(model, compiled, batches, heldout, config, lambda *event: observe(system, *event), attach)

    plain = train("Inductor", None)
    with _dumping(config.dump_dir) as dumped_files:
        low = train("fxamp", amp)
    report, is_scaled = amp.report(), "scaling" in amp.state_dict()
    return DemoResult(
        config=config,
        num_train_bytes=len(corpus.train),
        num_heldout_bytes=len(corpus.heldout),
        missing_files=corpus.missing_files,
        baseline=RunResult(
            system="Inductor",
            training=plain,
            precisions=(_stock_precision(device),),
            num_low_ops=0,
            num_casts=0,
            formats=("fp32",),
        ),
        fxamp=RunResult(
            system="fxamp",
            training=low,
            precisions=report.precisions,
            num_low_ops=report.num_low_ops,
            num_casts=report.num_casts,
            formats=report.formats,
            loss_scale=amp.read_loss_scale() if is_scaled else None,
            num_skipped_steps=amp.read_skipped_steps() if is_scaled else 0,
        ),
        dumped_files=tuple(dumped_files),
        # Our own threads are part of the load by now.
        other_load=None if load_before is None else max(load_before, (_load() or 0) - torch.get_num_threads()),
    )


def _load() -> float | None:
    """Processes that wanted a CPU in the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # not on Windows


def _stock_precision(device: torch.device) -> str:
    """What torch computes products of fp32 in. NVIDIA's containers switch TF32 on for all."""
    is_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if is_tf32 else "fp32"


@contextmanager
def _dumping(directory: Path) -> Generator[list[Path]]:
    """FXAMP_DUMP set to a directory; the list that it yields holds, in the end, the files written meanwhile."""

    def written_ns() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*")) if path.is_file()}

    before, old = written_ns(), os.environ.get("FXAMP_DUMP")
    files: list[Path] = []
    os.environ["FXAMP_DUMP"] = str(directory)
    try:
        yield files
    finally:
        if old is None:
            del os.environ["FXAMP_DUMP"]
        else:
            os.environ["FXAMP_DUMP"] = old
    files += [path for path, time_ns in written_ns().items() if before.get(path) != time_ns]


# ------------------------------------------------------------------------------------------------------------ printing


def precision_note(config: DemoConfig) -> str:
    """What to expect of a precision on a device, before the user waits for it."""
    device = torch.device(config.device)
    if config.precision == "auto":
        precision, reason = formats.resolve_auto(device)
        return f"Precision auto is {precision} on {device} ({reason.removeprefix('auto: ')})."
    is_native, reason = formats.native_support(device, config.precision)
    if is_native:
        return f"{device} computes {config.precision} in hardware ({reason})."
    if formats.STORAGE.get(config.precision) is torch.float32:
        return f"{device} does not compute {config.precision} ({reason}): fxamp uses fp32."
    return (
        f"{device} only emulates {config.precision} ({reason}): expect it to be much slower than fp32. The run shows that "
        "training in it works, not that it is fast."
    )


def table(result: DemoResult) -> Table:
    """Both runs side by side."""
    # No lines and no padding but one space between columns: with more, nine columns do not fit into 80 characters.
    out = Table(
        title="byte-level GPT on the source of Python's standard library",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    out.add_column("system", no_wrap=True)
    out.add_column("precision", min_width=len("precision"))
    for heading in ("loss before", "loss after", "steps/s", "compile s", "low ops", "casts"):
        out.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    out.add_column("formats", min_width=len("formats"))
    for run_ in (result.baseline, result.fxamp):
        out.add_row(
            run_.system,
            ", ".join(run_.precisions) or "nothing compiled",
            f"{run_.training.loss_before:.4f}",
            f"{run_.training.loss_after:.4f}",
            f"{run_.training.steps_per_s:.1f}",
            f"{run_.training.compile_s:.1f}",
            str(run_.num_low_ops),
            str(run_.num_casts),
            ", ".join(run_.formats),
        )
    return out


def conclusions(result: DemoResult) -> list[str]:
    """The lines under the table."""
    verdict, relation = ("agree", "within") if result.losses_agree else ("DO NOT agree", "beyond")
    lines = [
        f"The losses {verdict}: fxamp's held-out loss differs by {result.loss_gap:+.4f} nats per byte, {relation} the "
        f"standard error of the held-out loss itself ({result.loss_standard_error:.4f})."
    ]
    if not result.is_trained:
        lines.append("The held-out loss did not fall in both runs: train more steps before you trust the comparison.")
    if result.fxamp.loss_scale is not None:
        lines.append(
            f"Gradients were scaled by {result.fxamp.loss_scale:g} in the end; {result.fxamp.num_skipped_steps} of "
            f"{result.config.num_steps} steps overflowed, and were skipped."
        )
    speed = result.fxamp.training.steps_per_s / result.baseline.training.steps_per_s
    lines.append(f"fxamp made {speed:.2f} times the steps per second of fp32.")
    if result.is_machine_busy:
        lines[-1] += f" The machine had other work (load {result.other_load:.1f}): these speeds say little."
    if result.missing_files:
        lines.append(
            f"This Python lacks {len(result.missing_files)} of {len(TRAIN_FILES) + len(HELDOUT_FILES)} files of text "
            f"({', '.join(result.missing_files)}): losses compare within this table only."
        )
    if result.dumped_files:
        lines.append(
            f"What fxamp saw, planned and compiled: {len(result.dumped_files)} files in {result.config.dump_dir.resolve()}"
        )
    else:
        lines.append("fxamp dumped nothing: no graph reached it.")
    return lines


def main(config: DemoConfig, console: Console | None = None) -> int:
    """Runs with a progress bar, prints, and returns the exit status: 0 if the losses agree, else 1."""
    console = console or Console()
    console.print(f"{config.num_steps} steps on {config.device}, twice. {precision_note(config)}", highlight=False)
    with Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def observe(system: str, phase: Phase, num_done_steps: int) -> None:
            if system not in tasks:
                tasks[system] = progress.add_task(system, total=config.num_steps)
            progress.update(tasks[system], completed=num_done_steps, description=f"{system}: {phase}")

        result = run(config, observe)
    console.print(table(result))
    for line in conclusions(result):
        console.print(line, highlight=False)
    return 0 if result.losses_agree else 1
