from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import fxamp
from fxamp import Options, errors

FROZEN = (
    "precision ladder policy regions scheduler scaling on_overflow relaxed numerics output_dtype mode lower cuda_graphs "
    "stats on_error process_group"
)
"""A new option is a decision, not an accident: changing this line is where it is made."""


def test_the_list_of_options_is_frozen():
    assert [f.name for f in dataclasses.fields(Options)] == FROZEN.split()


def test_every_option_is_documented():
    source = inspect.getsource(Options)
    for f in dataclasses.fields(Options):
        declaration = source.index(f"\n    {f.name}: ")
        assert source[declaration:].split("\n", 2)[2].lstrip().startswith('"""'), f.name


class Deaf:
    """A scheduler that takes nothing in."""

    def decide(self) -> None: ...


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"precison": "bf16"}, errors.UnknownOption,
         "ERROR[UnknownOption]: unknown option 'precison'. Did you mean 'precision'? Known: " + FROZEN.replace(" ", ", ")),
        ({"precision": "bf17"}, errors.UnknownOption,
         "ERROR[UnknownOption]: unknown precision 'bf17'. Did you mean 'bf16'? Known: auto, fp32, tf32, bf16, fp16, fp8"),
        *(({"precision": spelling}, errors.UnknownOption,
         f"ERROR[UnknownOption]: unknown precision {spelling!r}. Did you mean {meant!r}? "
         "Known: auto, fp32, tf32, bf16, fp16, fp8")
          for spelling, meant in (("float16", "fp16"), (torch.bfloat16, "bf16"), ("half", "fp16"), ("float32", "fp32"))),
        ({"precision": 16}, errors.UnknownOption,
         "ERROR[UnknownOption]: unknown precision 16. Known: auto, fp32, tf32, bf16, fp16, fp8"),
        ({"mode": "fast"}, errors.UnknownOption,
         "ERROR[UnknownOption]: unknown mode 'fast'. Known: None, default, reduce-overhead, max-autotune, "
         "max-autotune-no-cudagraphs"),
        ({"cuda_graphs": "always"}, errors.UnknownOption,
         "ERROR[UnknownOption]: unknown cuda_graphs 'always'. Known: auto, True, False, require"),
        ({"lower": "eager", "mode": "max-autotune"}, errors.InvalidOption,
         "ERROR[InvalidOption]: mode='max-autotune' is Inductor's, and lower='eager' does not use it. Leave mode out, or use "
         "lower='inductor'"),
        ({"lower": "aot_eager", "cuda_graphs": True}, errors.InvalidOption,
         "ERROR[InvalidOption]: cuda_graphs=True needs Inductor, and lower='aot_eager' does not use it. Leave cuda_graphs "
         "out, or use lower='inductor'"),
        ({"precision": "bf16", "ladder": ("bf16", "fp32")}, errors.InvalidOption,
         "ERROR[InvalidOption]: both precision='bf16' and ladder=('bf16', 'fp32') are given. A ladder names all precisions: "
         "leave precision out"),
        ({"precision": "fp16", "lower": "eager"}, errors.InvalidOption,
         "ERROR[InvalidOption]: gradients are scaled in the joint graph, and lower='eager' has none. Use lower='inductor' or "
         "'aot_eager', or scaling=None"),
        ({"scaling": "dynamik"}, errors.UnknownOption,
         "ERROR[UnknownOption]: unknown scaling 'dynamik'. Did you mean 'dynamic'? Known: auto, dynamic, None, a number, "
         "a DynamicScale"),
        ({"relaxed": True}, errors.InvalidOption,
         "ERROR[InvalidOption]: relaxed=True. Name the passes that you want, of min_cut, low_residual, attention_masks, "
         "padded_logits, grouped_queries"),
        ({"precision": "fp8"}, errors.NotYet,
         "ERROR[NotYet]: precision='fp8' is not implemented yet. Use 'bf16', 'tf32' or 'fp32'"),
        ({"ladder": ("bf16", "fp8")}, errors.NotYet,
         "ERROR[NotYet]: precision='fp8' is not implemented yet. Use 'bf16', 'tf32' or 'fp32'"),
        *(({"ladder": ladder}, errors.InvalidOption,
           f"ERROR[InvalidOption]: ladder={ladder!r} has no precisions to change between, one after another. Name two "
           "precisions or more, the lowest first: ladder=('fp16', 'fp32')")
          for ladder in (("bf16",), (), "fp16,fp32", "fp16", 3, {"bf16": 1, "fp32": 2})),
        *(({"precision": "bf16", "process_group": group}, errors.InvalidOption,
           f"ERROR[InvalidOption]: process_group={group!r} is no process group. Give torch.distributed.new_group(...), "
           "mesh.get_group(), or None for the default group") for group in ("gloo", 0)),
        ({"ladder": ("bf16", "fp32"), "regions": {"head": 3}}, errors.InvalidOption,
         "ERROR[InvalidOption]: region 'head' = 3 cannot be written down. A region has an identifier for a name, which is no "
         "kind of rule, and a glob of module paths"),
        ({"precision": "bf16", "scheduler": fxamp.FixedSchedule({0: "fp32", 1000: "fp16"})}, errors.UnknownOption,
         "ERROR[UnknownOption]: precision 'fp16' is not on the ladder ('bf16', 'fp32'). All that a run changes between is "
         "compiled ahead: name it in ladder=(...) when the Amp is made"),
        ({"precision": "bf16", "scheduler": fxamp.FixedSchedule({0: {"hed": "fp32"}})}, errors.UnknownOption,
         "ERROR[UnknownOption]: unknown region 'hed'. Known: model"),
        ({"precision": "bf16", "scheduler": Deaf()}, errors.InvalidOption,
         "ERROR[InvalidOption]: decide() of Deaf cannot be called with a signal and a state: too many positional arguments. "
         "Define decide(self, signal, state), which returns (fxamp.Decision, state)"),
        ({"ladder": ("fp32", "bf16")}, errors.InvalidOption,
         "ERROR[InvalidOption]: the ladder ('fp32', 'bf16') does not go up. Name each precision once, the lowest first: "
         "('fp16', 'fp32')"),
        ({"scaling": fxamp.DynamicScale(at_floor="raise precision")}, errors.InvalidOption,
         "ERROR[InvalidOption]: at_floor='raise precision', and there is no higher precision. Give a ladder=('fp16', 'fp32')"),
        ({"precision": "bf16", "scheduler": fxamp.CurvatureScheduler}, errors.InvalidOption,
         "ERROR[InvalidOption]: scheduler=<class 'fxamp.scheduler.CurvatureScheduler'> has no decide(signal, state). Give an "
         "object that has, such as fxamp.CurvatureScheduler()"),
        ({"precision": "fp32", "scheduler": fxamp.CurvatureScheduler()}, errors.InvalidOption,
         "ERROR[InvalidOption]: a scheduler has nothing to change between in precision='fp32'. Give the lower precision, "
         "precision='bf16', or a ladder=('bf16', 'fp32')"),
        ({"stats": "overflow"}, errors.InvalidOption,
         "ERROR[InvalidOption]: stats='overflow' is gathered by loss scaling, and nothing is scaled. scaling=1.0 gathers it "
         "and scales nothing, in any precision"),
    ],
)  # fmt: skip
def test_a_bad_option_says_what_to_do(given: dict[str, object], error: type[Exception], text: str):
    with pytest.raises(error) as caught:
        fxamp.Amp(**given)
    assert str(caught.value) == text


def test_lists_and_whole_numbers_will_do():
    assert fxamp.shared(ladder=["bf16", "fp32"]) is fxamp.shared(ladder=("bf16", "fp32"))
    amp = fxamp.Amp(precision="fp16", scaling=1024)
    assert amp.read_loss_scale() == fxamp.Amp(precision="fp16", scaling=1024.0).read_loss_scale() == 1024.0
    for flag in (True, False):
        with pytest.raises(errors.UnknownOption, match="unknown scaling"):
            fxamp.Amp(precision="fp16", scaling=flag)


def test_none_is_the_default_of_what_has_no_other():
    assert fxamp.Amp(policy=None, relaxed=None).options == fxamp.Amp().options  # pyright: ignore[reportArgumentType]


def test_options_read_as_a_call():
    assert str(Options()) == "Amp()"
    assert str(Options(precision="bf16", policy={"softmax": "bf16"})) == (  # pyright: ignore[reportArgumentType]
        "Amp(precision='bf16', policy='autocast; op:softmax=bf16')"
    )


def test_modes_are_inductors():
    from torch._inductor import list_mode_options

    from fxamp.options import MODES

    assert set(MODES) <= set(list_mode_options())


def test_shared_is_one_amp_per_set_of_options():
    assert fxamp.shared(precision="bf16") is fxamp.shared(precision="bf16")
    assert fxamp.shared(precision="bf16") is not fxamp.shared(precision="fp32")
    assert fxamp.shared() is fxamp.shared(precision="auto")
