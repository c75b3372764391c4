"""The command line: `python -m fxamp demo`, `kernels` and `doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from fxamp import errors, formats

EXIT_STATUSES: Final = "exit status: 0 all is well; 1 the command found that it is not; 2 it could not run"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without CUDA
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here ({reason})") from error
    return device


def _demo(arguments: argparse.Namespace) -> int:
    from fxamp import demo

    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return demo.main(
        demo.DemoConfig.for_device(
            device,
            precision=arguments.precision,
            num_steps=arguments.steps,
            seed=arguments.seed,
            dump_dir=arguments.dump,
        )
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from fxamp import doctor

    return doctor.main(verbose=arguments.verbose)


def _kernels(arguments: argparse.Namespace) -> int:
    from fxamp import profiled_script

    if not arguments.script.is_file():
        raise errors.InvalidOption(f"{arguments.script} is no file", way_out="Give the path of a training script")
    return profiled_script.main(arguments.script, arguments.arguments, steps=arguments.steps, after=arguments.after)


def parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    out = argparse.ArgumentParser(
        prog="python -m fxamp", description="fxamp, a precision compiler for PyTorch.", epilog=EXIT_STATUSES
    )
    commands = out.add_subparsers(title="commands", dest="name", required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=text, epilog=EXIT_STATUSES)
        command.set_defaults(run=run)
        return command

    demo = add(
        "demo",
        _demo,
        "train a small GPT in fp32 and through fxamp, and compare",
        "Trains a small byte-level GPT on the source of Python's standard library twice, from the same weights and on the "
        "same batches: in fp32 by Inductor alone, and through fxamp. Prints losses, speeds and what fxamp did. Needs no "
        "network, and less than two minutes on two CPU cores.",
    )
    demo.add_argument("--device", type=_device, help="where to train (default: cuda if there is one, else cpu)")
    demo.add_argument(
        "--precision",
        choices=formats.PRECISIONS,
        default="bf16",
        help="of the run through fxamp (default: %(default)s, even where the device emulates it); fp16 scales gradients, and "
        "skips the steps that overflow; fp8 is not there yet",
    )
    demo.add_argument("--steps", type=_positive, help="training steps (default: as many as suit the device)")
    demo.add_argument("--seed", type=int, default=0, help="of initial weights and batches (default: %(default)s)")
    demo.add_argument(
        "--dump",
        type=Path,
        metavar="DIR",
        default=Path("fxamp-demo-dump"),
        help="directory for the graphs that fxamp saw, planned and compiled (default: %(default)s)",
    )
    kernels = add(
        "kernels",
        _kernels,
        "which kernels a training script runs, in which formats, on matrix units or not",
        "Runs a training script up to a few steps behind its compilation, and prints the kernels of those steps: what "
        "launched each, its format, whether it is on matrix units, and its share. A step is a call of optimizer.step().",
    )
    kernels.add_argument("--steps", type=_positive, default=3, help="that are profiled (default: %(default)s)")
    kernels.add_argument("--after", type=_positive, default=5, help="steps before them (default: %(default)s)")
    kernels.add_argument("script", type=Path, help="a training script")
    kernels.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    doctor = add(
        "doctor",
        _doctor,
        "what this machine can do for fxamp, and what is in the way",
        "Prints versions, devices, the precisions that each computes in hardware, and everything that torch.compile needs; "
        "then compiles a small function on each kind of device. Says the way out of what is not well.",
    )
    doctor.add_argument("--verbose", action="store_true", help="print the tracebacks of what failed")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parsed = parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except errors.FxampError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
