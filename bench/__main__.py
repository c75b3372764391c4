"""python -m bench: measures fxamp against everything a user would pick instead, and writes the tables."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from bench import origin, plots, report, run, systems, workloads
from bench.config import Config
from bench.worker import without_folders

RESULTS: Final = origin.ROOT / "bench" / "results"

EPILOG: Final = """examples:
  python -m bench --quick                                  three small workloads, five systems: minutes on two CPU cores
  python -m bench                                          everything that this machine can run
  python -m bench --only tiny-gpt gpt2 --systems 'fxamp-*' some of it; what the results have already is left out
  python -m bench --only 'llama-*' --budget-s 450          what takes 450 s; the command to go on with is printed
  python -m bench --scaling --only none                    what calls, swaps, variants and passes cost; depth and batch
  python -m bench --report                                 only write the tables from the results; with --plots, pictures too
  python -m bench.kernels gpt2 SYSTEM SYSTEM               which kernels two systems run, where they differ (GPU)
  python -m bench.memory gpt2 SYSTEM --holes               what a system reserves, and what keeps it (GPU)
  python -m bench.host tiny-gpt SYSTEM                     what the host does in a step
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # `command_for_rest` reads names
    )
    what = out.add_argument_group("what to measure")
    what.add_argument(
        "--quick", action="store_true", help="small workloads, few systems and repetitions, one shared compile cache"
    )
    what.add_argument("--only", nargs="+", metavar="WORKLOAD", help="names or patterns (see --list); 'none' for none")
    what.add_argument("--systems", nargs="+", metavar="SYSTEM", help="names or patterns; 'core' for the headline's")
    what.add_argument("--scaling", action="store_true", help="also measure how fxamp's costs grow")
    what.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    how = out.add_argument_group("how")
    how.add_argument("--repetitions", type=int, metavar="N", help="turns of each system (default 9, quick 5)")
    how.add_argument("--block-ms", type=float, metavar="MS", help="length of a turn (default 400, quick 150)")
    how.add_argument("--jobs", type=int, metavar="N", help="systems compiled at the same time (default 1, quick 2)")
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads of a system (default: torch's, quick 1)")
    how.add_argument("--no-warm", action="store_true", help="do not compile a second time from warm caches")
    how.add_argument("--timeout-s", type=float, default=300, metavar="S", help="for building one system (default 300)")
    how.add_argument("--budget-s", type=float, metavar="S", help="begin nothing that would not be done after this long")
    results = out.add_argument_group("results")
    results.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON lines are (bench/results)"
    )
    results.add_argument("--commit", metavar="SHA", help="commit of the tree, for a copy of it without git")
    results.add_argument(
        "--fresh", action="store_true", help="measure again what is there for the same source and versions"
    )
    results.add_argument("--retry-errors", action="store_true", help="measure again what is there as an error")
    results.add_argument(
        "--reuse-peers", action="store_true", help="keep rows of peers although the source has changed"
    )
    results.add_argument("--report", action="store_true", help="measure nothing, write the tables")
    results.add_argument("--plots", action="store_true", help="draw too, and from then on; needs matplotlib")
    results.add_argument("--list", action="store_true", help="list workloads and systems, and stop")
    return out


def chosen(patterns: Sequence[str], known: Sequence[str], what: str) -> tuple[str, ...]:
    """The known names that match any pattern, in their own order.

    Raises: SystemExit for a pattern that matches nothing.
    """
    if list(patterns) == ["none"]:
        return ()
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise SystemExit(f"no {what} matches {pattern!r}; known: {', '.join(known)}")
    return tuple(name for name in known if any(fnmatch.fnmatchcase(name, p) for p in patterns))


def config_of(args: argparse.Namespace, command: str) -> Config:
    """What the command line asks for, with defaults by device and protocol."""
    device_type = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    default_workloads = workloads.QUICK if args.quick else workloads.default_names(device_type)
    default_systems = systems.QUICK if args.quick else list(systems.all_systems())
    wanted_systems = args.systems or default_systems
    if "core" in wanted_systems:
        wanted_systems = [name for name in (*wanted_systems, *systems.CORE) if name != "core"]
    return Config(
        device_type=device_type,
        protocol="quick" if args.quick else "full",
        workloads=chosen(args.only or default_workloads, list(workloads.all_workloads()), "workload"),
        systems=chosen(wanted_systems, list(systems.all_systems()), "system"),
        num_repetitions=args.repetitions or (5 if args.quick else 9),
        block_ms=args.block_ms or (150 if args.quick else 400),
        num_jobs=args.jobs or (2 if args.quick else 1),
        num_threads=args.threads
        or (1 if args.quick else None),  # on shared cores, threads that wait for each other time noise
        build_timeout_s=args.timeout_s,
        budget_s=args.budget_s,
        is_fresh=args.fresh,
        retries_errors=args.retry_errors,
        reuses_peers=args.reuse_peers,
        does_scaling=args.scaling or (args.quick and not args.only),
        results=args.results,
        record=RESULTS,
        command=command,
        commit=args.commit,
        compiles_again=not (args.quick or args.no_warm),
    )


def print_list(console: Console) -> None:
    """Every workload and every system, with what it is."""
    for title, entries in (
        ("workloads", workloads.all_workloads().values()),
        ("systems", systems.all_systems().values()),
    ):
        console.print(f"[bold]{title}[/]")
        for entry in entries:
            console.print(f"  {entry.name:<30} {entry.about}", highlight=False)


def command_for_rest(arguments: Sequence[str], left: Mapping[str, Sequence[str]]) -> str:
    """The command that measures what a run left, by workload."""
    kept: list[str] = []
    is_kept = True
    for argument in arguments:
        if argument.startswith("--"):  # the values of the two lists are up to the next option
            is_kept = argument.partition("=")[0] not in ("--only", "--systems", "--fresh")
        if is_kept:
            kept.append(argument)
    names = list(dict.fromkeys(name for waiting in left.values() for name in waiting))
    return shlex.join(["python", "-m", "bench", *kept, "--only", *left, "--systems", *names])


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Exit status: 130 if it was interrupted; what it had is written."""
    args, console = parser().parse_args(arguments), Console(soft_wrap=True)
    if args.list:
        print_list(console)
        return 0
    is_interrupted = False
    if not args.report:
        command = without_folders(shlex.join(["python", "-m", "bench", *arguments]))
        done = run.run(config_of(args, command), console)
        is_interrupted = done.is_interrupted
        console.print(f"{'interrupted; ' if is_interrupted else ''}rows: {done.path}", highlight=False)
        if done.left:
            for name, waiting in done.left.items():
                console.print(f"left for another run: {name}: {', '.join(waiting)}", highlight=False)
            console.print(f"go on with: {command_for_rest(arguments, done.left)}", highlight=False)
    if args.plots or plots.are_due(args.results):  # before the tables, which show them
        for drawn in plots.draw(report.load(args.results), args.results):
            console.print(f"plot: {drawn}", highlight=False)
    is_ours = args.results.resolve() == RESULTS
    page_path = RESULTS.parent / "RESULTS.md" if is_ours else args.results / "RESULTS.md"
    report.write(
        args.results,
        page_path,
        origin.ROOT / "README.md" if is_ours else None,
        report.read_causes(RESULTS.parent / "causes.toml"),
    )
    console.print(f"tables: {page_path}", highlight=False)
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
