"""Upstream faults that fxamp repairs, one entry each: symptom, cause, versions, and when to delete.

The repairs themselves are ordinary passes in the room where they work; this list is what the report prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A fault of PyTorch that a graph can meet, and what fxamp does about it."""

    name: str
    symptom: str
    cause: str
    link: str
    versions: str
    repair: str
    delete_when: str


MUTATED_READS: Final = Repair(
    name="mutated-reads",
    symptom="`self.steps += 1; return y / self.steps` has wrong gradients under every partitioned backend",
    cause="the min-cut partitioner recomputes, in the backward, a read of an input that the forward has written since; and "
    "Inductor removes a clone of it, whose readers in the backward then read what was written",
    link="https://github.com/pytorch/pytorch/issues/197039",
    versions="seen on 2.11 to 2.13",
    repair="fxamp.joint.repair.SaveReadsOfMutated marks such reads as MUST_SAVE, and makes such clones opaque",
    delete_when="tests/joint/test_repair.py::test_upstream_still_wrong fails",
)

HIDDEN_ROUNDING: Final = Repair(
    name="hidden-rounding",
    symptom="`x.to(float16).to(float32)` compiled by Inductor does not round, and isfinite() of an inf says True",
    cause="fused pointwise kernels keep fp32 between the operations of a chain",
    link="https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py (emulate_precision_casts)",
    versions="seen on 2.11 to 2.13",
    repair="graphs in which the user's program narrows are compiled with emulate_precision_casts, unless numerics='fast'; "
    "before 2.13, where that does not help a plain way down and up, their casts become opaque calls (fxamp::round_to)",
    delete_when="tests/test_numerics.py::test_inductor_still_drops_rounding fails",
)

EARLY_BACKWARD: Final = Repair(
    name="early-backward",
    symptom="backward(retain_graph=True) raises where the backward was compiled together with the forward",
    cause="such a backward writes into what was saved for it; with donated_buffer=False, which forbids that, the check at run "
    "time takes `bw_donated_idxs`, then None, for a list with something in it",
    link="https://github.com/pytorch/pytorch/blob/main/torch/_functorch/_aot_autograd/runtime_wrappers.py (bw_donated_idxs)",
    versions="seen on 2.11 to 2.13",
    repair="where fxamp has the backward compiled early, for each precision of a ladder, the list is made empty",
    delete_when="tests/test_variants.py::test_upstream_still_wrong fails",
)

LSTM_STATES: Final = Repair(
    name="lstm-states",
    symptom="the last states of a compiled fp16 LSTM on a CPU have one dimension too many",
    cause="the call that AOTAutograd traces instead (mkldnn_rnn_layer) gives them so, and nobody takes the dimension away",
    link="https://github.com/pytorch/pytorch/blob/main/torch/_meta_registrations.py (mkldnn_rnn_layer)",
    versions="seen on 2.11, not on 2.13",
    repair="there an LSTM keeps its traced dtypes on a CPU",
    delete_when="the oldest torch that fxamp supports is 2.13",
)

LIST_WRITES: Final = Repair(
    name="list-writes",
    symptom="`torch._foreach_copy_([p.data], [x])` on CUDA writes through a copy-on-write tensor, into the memory of its twin",
    cause="kernels for lists of tensors ask for a pointer to read by, also where they write",
    link="https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/MultiTensorApply.cuh (const_data_ptr)",
    versions="seen on 2.11, and in the sources of 2.13",
    repair="once weights are frozen on CUDA, the functions for lists in the namespace of torch ask for a pointer to write by",
    delete_when="tests/run/test_frozen.py::test_upstream_still_wrong fails",
)

REPAIRS: Final = (MUTATED_READS, HIDDEN_ROUNDING, EARLY_BACKWARD, LSTM_STATES, LIST_WRITES)


def roundings_need_an_op() -> bool:
    """Does this torch drop roundings even under emulate_precision_casts? (2.11 does, 2.13 does not)"""
    return _is_before_2_13()


def lstms_stay_wide(device_type: str) -> bool:
    """Does this torch give the states of a low LSTM in a wrong shape? (2.11 does, 2.13 does not)"""
    return device_type == "cpu" and _is_before_2_13()


def _is_before_2_13() -> bool:
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) < (2, 13)
