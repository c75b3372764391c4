"""Some architectures of the zoo, quickly; `make zoo` runs them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import nn

from bench.zoo import cuda_autocast, measure, models, rows
from bench.zoo.measure import Compiler, Step
from bench.zoo.models import Entry

ROTATION: Final = (
    ("llama", "bf16"),
    ("gemma", "fp16"),
    ("opt", "bf16"),
    ("bert", "fp16"),
    ("xlnet", "bf16"),
    ("vit", "fp16"),
    ("resnet", "bf16"),
    ("convnext", "fp16"),
    ("segformer", "bf16"),
    ("clip", "fp16"),
)
"""Small, and unlike each other."""

SEEDS: Final = range(4)

needs_transformers = pytest.mark.skipif(models.missing() is not None, reason=str(models.missing()))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FXAMP_CHECK", "0")  # it costs a third, and every other test has it


def shallow(entry: Entry) -> Entry:
    """With one layer, where the architecture counts layers: what is compiled in half the time."""
    return replace(entry, config={"num_hidden_layers": 1, **entry.config}) if "depths" not in entry.config else entry


def under_eager_autocast(entry: Entry, dtype: torch.dtype) -> Sequence[Step]:
    """The peer without compiling it: the same casts, in a tenth of the time."""

    def run(model: nn.Module) -> Any:
        def forward(**inputs: Any) -> Any:
            with cuda_autocast.cuda_lists_on_cpu(), torch.autocast("cpu", dtype=dtype):
                return model(**inputs)

        return forward

    made = [(seed, models.make(entry, seed)) for seed in SEEDS]
    return [measure.step(model, run(model), models.inputs(entry, seed), seed) for seed, model in made]


@needs_transformers
@pytest.mark.filterwarnings("default")  # what transformers says of itself
@pytest.mark.parametrize(("name", "precision"), ROTATION)
def test_error_is_at_most_autocasts(name, precision):
    entry, system = shallow(models.BY_NAME[name]), measure.BY_NAME[f"fxamp-{precision}"]
    compiler = Compiler(system, "aot_eager")
    got = list(measure.steps(entry, compiler, SEEDS))
    peer = under_eager_autocast(entry, system.dtype)
    want = [measure.reference(entry, seed) for seed in SEEDS]
    own, theirs = measure.errors(got, want), measure.errors(peer, want)
    for what, bound in rows.WHAT.items():
        assert rows.ratio(getattr(own, what), getattr(theirs, what)) <= bound, what
    assert min(own.gradients) > 1e-5, "nothing ran low"


@needs_transformers
def test_a_large_enough_zoo_without_chance():
    assert len(models.ENTRIES) >= 40
    assert len(models.BY_NAME) == len(models.ENTRIES)
    entry = models.BY_NAME["gpt2"]
    model, inputs = models.make(entry, 0), models.inputs(entry, 0)
    assert model.training
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
