"""What holds for every test: switches for slow and GPU tests, one compile cache a run, a seed, a fresh Dynamo."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.metadata import entry_points

import pytest
import torch

INSTALLED = bool(entry_points(group="torch_dynamo_backends", name="fxamp"))
"""Whether `backend="fxamp"` works by itself. Not so under `make test VENV=none`, where fxamp is only on the path."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow")
    parser.addoption("--deep", action="store_true", help="run tests marked deep, and search longer in all of them")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["FXAMP_CHECK"] = "1"  # every pass is followed by a check of the graph
    # Two cores: a pool of compile workers costs more to start than it saves, and outlives the run.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        # Shared within a run, as compilation is slow; never between runs, where a pass whose cache key forgets a
        # field would be served yesterday's kernels and pass.
        cache = tempfile.mkdtemp(prefix="fxamp-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    use_hypothesis_profile(deep=bool(config.getoption("deep")))


def use_hypothesis_profile(deep: bool) -> None:
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # VENV=none promises torch and pytest only
        return
    # No deadline: the first example compiles. Derandomised, so that what is red stays red; --deep searches at random.
    settings.register_profile(
        "everyday",
        deadline=None,
        derandomize=True,
        max_examples=25,
        suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no fault of a test
    )
    settings.register_profile("deep", deadline=None, max_examples=1000)
    settings.load_profile("deep" if deep else "everyday")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unless = {
        "gpu": (torch.cuda.is_available(), "no CUDA device"),
        "slow": (config.getoption("slow"), "slow: give --slow"),
        "deep": (config.getoption("deep"), "deep: give --deep"),
        "installed": (INSTALLED, "fxamp is on the path, but not installed"),
    }
    for item in items:
        for marker, (met, reason) in unless.items():
            if not met and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    if "torch._dynamo" in sys.modules:  # importing it takes seconds, and most tests need none
        torch._dynamo.reset()


@pytest.fixture
def by_name() -> None:
    """Makes `backend="fxamp"` work in the test, installed or not."""
    if not INSTALLED:
        import fxamp

        fxamp.register()
