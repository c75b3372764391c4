"""python -m bench.scheduler: does a scheduler spare a training in fp16 its interruptions? With which signal?

A recurrent network with ReLUs, started as the identity (Le, Jaitly, Hinton 2015), learns the bytes of the standard
library by SGD with a learning rate at the edge: whatever its recurrent weights do to a state, they do it to the power of
the context's length, so that activations and gradients leave fp16 in the forward and in the backward, for many steps in
a row. In fp32, gradients that are clipped bring it back. The learning rate is restarted, and now and then some batches
are noise.

Every system starts from the same weights, sees the same batches and is judged in fp32. All of them skip steps whose
gradients are not finite.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from bench import origin, report, rows
from bench.__main__ import RESULTS
from bench.rows import ScheduledRun
from bench.worker import without_folders
from fxamp.demo import NUM_BYTE_VALUES, Corpus, DemoConfig, GPTConfig
from fxamp.scheduler import CurvatureScheduler, Scheduler

# Suffixes of tensors: B batch, T bytes of context, C channels, V byte values.

HIGH: Final = "fp32"
OFF: Final = 1e30
"""A threshold that no curvature reaches: an inf or a NaN of the loss still does."""


# ---- the training ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Workload:
    """All that a training depends on but precision and seed. Chosen so that fp32 gets through, and fp16 alone does not."""

    num_steps: int = 300
    width: int = 32
    num_context_bytes: int = 16
    batch_size: int = 8
    learning_rate: float = 3.0
    num_warm_up_steps: int = 10
    restart_steps: int = 100
    """Steps of a cosine, at whose end the learning rate begins anew."""
    max_norm: float = 1.0
    """Gradients are clipped to it."""
    outlier_steps: int = 12
    """Batches of noise in a row."""
    outlier_share: float = 0.1
    """Of the steps from the 100th on."""
    growth_interval_steps: int = 100
    """Of the loss scale: torch's 2000 are longer than the whole training."""

    @property
    def about(self) -> str:
        return (
            f"ReLU network, {self.width} wide, {self.num_context_bytes} bytes of context, batch {self.batch_size}, SGD with "
            f"learning rate {self.learning_rate:g} and momentum, restarted every {self.restart_steps} steps, gradients "
            f"clipped to {self.max_norm:g}, a tenth of the later batches noise; loss scale growing every "
            f"{self.growth_interval_steps} steps"
        )

    def learning_rate_at(self, step: int) -> float:
        at = step % self.restart_steps
        warm_up = min(1.0, (at + 1) / self.num_warm_up_steps)
        return self.learning_rate * (warm_up * 0.5 * (1 + math.cos(math.pi * at / self.restart_steps)) + 0.02)


class ReLURecurrence(nn.Module):
    """A language model over bytes. Called with inputs and targets, it returns the mean loss in nats per byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTE_VALUES, width)
        self.enter = nn.Linear(width, width, bias=False)
        self.recur = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_BYTE_VALUES)
        nn.init.eye_(self.recur.weight)
        nn.init.zeros_(self.recur.bias)

    def forward(self, input_BT: Tensor, target_BT: Tensor) -> Tensor:
        enters_BTC = self.enter(self.embed(input_BT))
        state_BC, states = torch.zeros_like(enters_BTC[:, 0]), []
        for t in range(input_BT.shape[1]):
            state_BC = F.relu(self.recur(state_BC) + enters_BTC[:, t])
            states.append(state_BC)
        logits_BTV = self.head(torch.stack(states, dim=1))
        return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


def batches_of(workload: Workload, corpus: Corpus, seed: int) -> tuple[Tensor, Tensor]:
    """(batches to train on, [steps, B, T + 1], bursts of them noise; batches to judge by, [n, B, T + 1])."""
    config = DemoConfig(
        num_steps=workload.num_steps, batch_size=workload.batch_size, seed=seed, num_heldout_batches=32,
        model=GPTConfig(num_context_bytes=workload.num_context_bytes),
    )  # fmt: skip
    train = corpus.train_batches(config)
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    for first in range(100, workload.num_steps - workload.outlier_steps + 1, workload.outlier_steps):
        noise = torch.randint(NUM_BYTE_VALUES, train[first : first + workload.outlier_steps].shape, generator=generator)
        if torch.rand((), generator=generator) < workload.outlier_share:
            train[first : first + workload.outlier_steps] = noise
    return train, corpus.heldout_batches(config)


# ---- systems ---------------------------------------------------------------------------------------------------------
def _scheduler(**given: Any) -> CurvatureScheduler:
    """Only what is given counts, beside losses that are inf or NaN."""
    deaf: dict[str, Any] = {"threshold": OFF, "overflow_rate_limit": None, "gradient_ratio_limit": None}
    return CurvatureScheduler(**deaf | given)


SYSTEMS: Final[Mapping[str, tuple[str, Scheduler | None]]] = MappingProxyType({
    "low": ("fp16 throughout", None),
    "high": ("fp32 throughout", None),
    "absolute": ("curvature from 0.02 on, as in the founding article", _scheduler(threshold=0.02)),
    "relative": ("curvature from 6 times its median on", _scheduler(threshold=6.0, relative=True, history_steps=64)),
    "overflows": ("a fifth of the last 16 updates overflowed", _scheduler(overflow_rate_limit=0.2)),
    "gradients": ("the largest gradient from 10 times its median on", _scheduler(gradient_ratio_limit=10.0)),
    "start": ("high at the start, then only where the loss is inf or NaN", _scheduler()),
})  # fmt: skip
"""Name -> (what makes precision go up, the scheduler; None: nothing does)."""


@dataclass(kw_only=True)
class Trainer:
    """A system, compiled once, that trains from any seed."""

    name: str
    workload: Workload
    lower: str
    device: str
    amp: fxamp.Amp = field(init=False)

    def __post_init__(self) -> None:
        scaling = fxamp.DynamicScale(growth_interval_steps=self.workload.growth_interval_steps)
        options: dict[str, Any] = {"precision": HIGH if self.name == "high" else "fp16", "scaling": scaling}
        scheduler = SYSTEMS[self.name][1]
        if scheduler is not None:
            options["scheduler"] = scheduler
        self.amp = fxamp.Amp(lower=self.lower, **options)
        self.model = ReLURecurrence(self.workload.width).to(self.device)
        self.compiled = torch.compile(self.model, backend=self.amp)  # pyright: ignore[reportArgumentType]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        self.amp.attach(self.optimizer)
        self.begun = self.amp.state_dict()

    def train(self, corpus: Corpus, seed: int) -> dict[str, Any]:
        """The fields of a `ScheduledRun` that a training decides."""
        torch.manual_seed(seed)
        self.model.load_state_dict(ReLURecurrence(self.workload.width).state_dict())
        self.optimizer.state.clear()
        self.amp.load_state_dict(self.begun)
        train, heldout = (batches.to(self.device) for batches in batches_of(self.workload, corpus, seed))
        skipped, num_nan, num_high, step_ms = [0], 0, 0, list[float]()
        for step, batch in enumerate(train):
            begin_s = time.perf_counter()
            for group in self.optimizer.param_groups:
                group["lr"] = self.workload.learning_rate_at(step)
            num_high += next(iter(self.amp.precisions.values())) == HIGH
            loss = self.compiled(batch[:, :-1], batch[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.amp.observe(loss)
            skipped.append(self.amp.read_skipped_steps())
            num_nan += not math.isfinite(loss.item()) and skipped[-1] == skipped[-2]
            step_ms.append(1000 * (time.perf_counter() - begin_s))
        with torch.no_grad():
            heldout_loss = torch.stack([self.model(b[:, :-1], b[:, 1:]) for b in heldout]).mean().item()
        return {
            "num_interruptions": skipped[-1] + num_nan,
            "num_high_steps": num_high,
            "num_changes": len(self.amp.history.changes),
            "heldout_loss": heldout_loss,
            "step_ms": statistics.median(step_ms[1:]),
        }


# ---- the command -----------------------------------------------------------------------------------------------------
def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m bench.scheduler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--seeds", type=int, default=20, help="trainings of each system (default 20)")
    out.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="default: all")
    out.add_argument("--steps", type=int, default=Workload.num_steps, help=f"of a training (default {Workload.num_steps})")
    out.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    out.add_argument("--lower", choices=("inductor", "aot_eager"), help="default: inductor on CUDA, else aot_eager")
    out.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON lines go (bench/results)")
    out.add_argument("--commit", metavar="SHA", help="commit of the tree, for a copy of it without git")
    return out


def main(arguments: Sequence[str], tell: Callable[[str], object] | None = None) -> int:
    """Runs the command. Seeds take turns with systems, so that what slows the machine down slows all of them."""
    args = parser().parse_args(arguments)
    tell = tell or Console(soft_wrap=True, highlight=False).print
    run = origin.run(
        args.device,
        torch.cuda.get_device_name() if args.device == "cuda" else "",
        protocol="quick",
        num_threads=torch.get_num_threads(),
        command=without_folders(shlex.join(["python", "-m", "bench.scheduler", *arguments])),
        commit=args.commit,
    )
    workload, corpus = Workload(num_steps=args.steps), Corpus.of_stdlib()
    path = args.results / f"{run.machine.slug}-scheduler.jsonl"
    lower = args.lower or ("inductor" if args.device == "cuda" else "aot_eager")
    trainers = [Trainer(name=name, workload=workload, lower=lower, device=args.device) for name in args.systems]
    for seed in range(args.seeds):
        for trainer in trainers:
            facts = trainer.train(corpus, seed)
            row = ScheduledRun(
                run=run, workload=workload.about, system=trainer.name, system_about=SYSTEMS[trainer.name][0], seed=seed,
                num_steps=workload.num_steps, **facts,
            )  # fmt: skip
            rows.append(path, [row])
            tell(f"seed {seed}, {trainer.name}: {facts}")
    if args.results.resolve() == RESULTS:
        causes = report.read_causes(RESULTS.parent / "causes.toml")
        report.write(RESULTS, RESULTS.parent / "RESULTS.md", origin.ROOT / "README.md", causes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
