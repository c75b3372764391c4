"""The processes of a run: started while others work, asked side by side, ended when the run is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

from rich.console import Console

from bench import systems
from bench.config import Config
from bench.systems import System
from bench.worker import Reply

DEVICE_TIMEOUT_S: Final = 300.0
"""For questions about the device alone."""


class Asked(Protocol):
    """What a run needs of a worker."""

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Reply: ...
    def interrupt(self) -> None: ...
    def stop(self) -> None: ...


Hire = Callable[[System | None], Asked]
"""Makes the worker of a system, or, for None, of the device. It need not start before it is asked."""


class Crew:
    """A worker for each system and one for the device, and the clock and the console of the run."""

    def __init__(self, config: Config, hire: Hire, console: Console, num_cpus: int) -> None:
        self.config, self._console = config, console
        self._begin_s = time.monotonic()
        self._device = hire(None)
        self._workers = {name: hire(system) for name, system in systems.all_systems().items()}
        self._starters = ThreadPoolExecutor(max(config.num_jobs, num_cpus // 2))
        self._starting: dict[str, Future[Reply]] = {}

    def close(self) -> None:
        """Ends all processes."""
        self._starters.shutdown(wait=False, cancel_futures=True)
        for name, starting in self._starting.items():
            if not starting.done():  # a thread waits for it
                self._workers[name].interrupt()
        self._starters.shutdown()
        for worker in (self._device, *self._workers.values()):
            worker.stop()

    # ---- clock and console -------------------------------------------------------------------------------------------
    def left_s(self) -> float:
        """How much of the budget is left."""
        return float("inf") if self.config.budget_s is None else self._begin_s + self.config.budget_s - time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._begin_s:4.0f} s  {text}", highlight=False)

    # ---- questions ---------------------------------------------------------------------------------------------------
    def ask_device(self, method: str, *arguments: Any) -> Any:
        """Raises: RuntimeError if there is no answer."""
        reply = self.try_device(method, *arguments, timeout_s=DEVICE_TIMEOUT_S)
        if reply.status != "ok":
            raise RuntimeError(f"the device could not be asked for {method}: {reply.reason}")
        return reply.value

    def try_device(self, method: str, *arguments: Any, timeout_s: float) -> Reply:
        return self._device.ask(method, *arguments, timeout_s=timeout_s)

    def start(self, names: Iterable[str]) -> None:
        """Starts processes, at the same time and while this one goes on: that is most of the work of a small run. Failures
        show when they build."""

        def start(name: str) -> Reply:
            return self._workers[name].ask("device_facts", timeout_s=self.config.build_timeout_s)

        self.wait_for_start()  # a worker is asked one thing at a time
        self._starting = {name: self._starters.submit(start, name) for name in dict.fromkeys(names)}

    def wait_for_start(self) -> None:
        for starting in self._starting.values():
            starting.result()

    def ask(self, name: str, method: str, *arguments: Any) -> Reply:
        return self._workers[name].ask(method, *arguments, timeout_s=self.config.build_timeout_s)

    def ask_at_once(
        self,
        names: Sequence[str],
        method: str,
        *arguments: Any,
        timeout_s: float | None = None,
        then: Callable[[str, Reply], None] = lambda *_: None,
    ) -> dict[str, Reply]:
        """Asks workers, `num_jobs` at a time, and calls `then` as soon as one answers."""

        def ask(name: str) -> Reply:
            limit_s = self.config.build_timeout_s if timeout_s is None else timeout_s
            reply = self._workers[name].ask(method, *arguments, timeout_s=limit_s)
            then(name, reply)
            return reply

        pool = ThreadPoolExecutor(self.config.num_jobs)
        try:
            return dict(zip(names, pool.map(ask, names), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for name in names:
                self._workers[name].interrupt()  # or the threads would wait for their answers
            raise
        finally:
            pool.shutdown()
