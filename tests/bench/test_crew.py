from __future__ import annotations

import io
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from bench.__main__ import config_of, parser
from bench.crew import Crew
from bench.systems import ANCHOR, System
from bench.worker import Reply


@dataclass
class Slow:
    """A worker that never answers of its own accord, once it was asked."""

    log: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask(self, method: str, *_: Any, timeout_s: float) -> Reply:
        self.log.append(method)
        assert self.ended.wait(60)
        return Reply(status="error", reason="interrupted")

    def interrupt(self) -> None:
        self.ended.set()

    def stop(self) -> None:
        self.log.append("stopped")


def crew_of(workers: dict[str, Slow]) -> Crew:
    def hire(system: System | None) -> Slow:
        return workers.setdefault(system.name if system else "device", Slow())

    config = config_of(parser().parse_args(["--device", "cpu", "--jobs", "2"]), "")
    return Crew(config, hire, Console(file=io.StringIO()), num_cpus=2)


def test_closing_ends_processes_that_start_and_begins_no_more():
    workers: dict[str, Slow] = {}
    crew = crew_of(workers)
    names = [ANCHOR, "fp32-eager", "fp32-compile"]
    crew.start(names)
    while not (workers[ANCHOR].log and workers["fp32-eager"].log):
        time.sleep(0.001)
    crew.close()
    assert [workers[name].log for name in names] == [["device_facts", "stopped"]] * 2 + [["stopped"]]  # two at a time
    assert workers["device"].log == ["stopped"]
