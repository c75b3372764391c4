from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxamp import formats, optable
from fxamp.explain import text
from fxamp.optable import OpClass
from tests.programs import Fn, decisions, planned

x, y = torch.rand(4, 4), torch.rand(4, 4)


def formats_of(fn, *inputs, **options) -> dict[str, str]:
    return {op: d.computes for op, d in decisions(fn, *inputs, **options).items()}


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda a: (a @ a).softmax(-1), {"matmul": "bf16", "softmax": "fp32"}),
        (lambda a: (a @ a).relu() @ a, {"matmul": "bf16", "relu": "bf16"}),
        (lambda a: (a @ a).t().reshape(-1)[1:].exp(), {"t": "bf16", "reshape": "bf16", "getitem": "bf16", "exp": "fp32"}),
        (lambda a: a.relu() @ a, {"relu": "fp32", "matmul": "bf16"}),
        (lambda a: (a @ a) + a, {"add": "fp32"}),
        (lambda a: (a @ a) + (a @ a), {"add": "bf16"}),
        (lambda a: (a @ a) * 2 + 1, {"mul": "bf16", "add": "bf16"}),
        (lambda a: torch.cat([a @ a, a]), {"cat": "fp32"}),
        (lambda a: torch.cat([a @ a, a @ a]), {"cat": "bf16"}),
        (lambda a: torch.stack((a @ a).chunk(2)), {"chunk": "bf16", "stack": "bf16"}),
        (lambda a: torch.cat((a @ a).split(2)), {"split": "bf16", "cat": "bf16"}),
        (lambda a: torch.where(a > 0.5, a @ a, a), {"where": "fp32"}),
        (lambda a: (a @ a).max(-1).values, {"max": "bf16"}),
        (lambda a: (a @ a).mean(-1), {"mean": "fp32"}),
        (lambda a: (a @ a).nan_to_num(), {"nan_to_num": "fp32"}),
        (lambda a: (a @ a) > 0.25, {"gt": "fp32"}),
        (lambda a: F.dropout(a @ a, 0.5), {"dropout": "fp32"}),
    ],
)  # fmt: skip
def test_what_an_operation_computes_in(fn, want: dict[str, str]):
    got = formats_of(fn, x)
    assert {op: got[op] for op in want} == want


def test_in_fp32_nothing_is_lowered():
    for d in decisions(lambda a: (a @ a).softmax(-1), x, variant="fp32").values():
        assert d.computes in ("fp32", "-")
        assert not any(d.operands)


def test_a_zero_dim_tensor_decides_nothing():
    def fn(a, scale):
        return (a @ a) * scale

    assert formats_of(fn, x, torch.tensor(2.0))["mul"] == "bf16"
    assert formats_of(fn, x, torch.tensor([2.0]))["mul"] == "bf16+fp32" or formats_of(fn, x, torch.ones(1))["mul"] == "fp32"


def test_batch_norm_follows_with_its_input_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    d = decisions(model, torch.rand(2, 3, 4, 4))["batch_norm"]
    assert d.operands == (torch.bfloat16, None, None, None, None)
    assert d.value.dtype == torch.bfloat16


@pytest.mark.parametrize("other", [torch.float64, torch.int64, torch.complex64, torch.float16, torch.bfloat16])
def test_other_types_are_never_lowered(other: torch.dtype):
    z = torch.ones(4, 4).to(other)
    for d in decisions(lambda a: (a @ a).t() + 1, z).values():
        assert not any(d.operands)
        assert (d.cls, d.why) == (OpClass.KEEP, "has no fp32 operand")


def test_a_mixed_operation_keeps_its_traced_dtypes():
    d = decisions(lambda a, b: (a @ a) + b, x, y.double())["add"]
    assert d.cls is OpClass.KEEP
    assert d.operands[0] == torch.float32
    assert d.why.startswith("a value is f64 in the user's program")


def test_an_opted_out_region_keeps_its_traced_dtypes():
    def fn(a):
        b = a @ a
        with torch.autocast("cpu", enabled=False):
            return b.mm(a)

    d = decisions(fn, x)["mm"]
    assert (d.cls, d.computes, d.why) == (OpClass.KEEP, "fp32", "inside autocast(enabled=False)")
    assert d.operands == (torch.float32, None)


def test_a_dtype_argument_is_an_observable():
    d = decisions(lambda a: (a @ a).view(torch.int32), x)["view"]
    assert (d.cls, d.why) == (OpClass.KEEP, "names a dtype")


def test_what_follows_and_is_written_computes_in_fp32():
    def fn(a):
        b = a @ a + 257.0  # which bf16 does not hold
        b[0] = 1.0
        return b

    d = decisions(fn, x)["add"]
    assert (d.computes, d.result) == ("fp32", None)
    assert "its memory is written" in d.why


def test_a_product_written_in_place_is_kept_and_says_so():
    def fn(a):
        b = a.exp()
        early = b * 2
        b.addmm_(a, a)
        return early, b

    assert decisions(fn, x)["addmm"].why.startswith("in place: its memory is written")


def test_what_writes_into_out_is_kept_and_says_so():
    d = decisions(lambda a: torch.matmul(a, a, out=torch.empty(4, 4)), x)["matmul"]
    assert (d.computes, d.why) == ("fp32", "writes into out=")


def test_what_is_more_than_a_plain_tensor_is_kept():
    def fn(a):
        both: Any = TwoTensor(a, a)
        return (both @ both).a

    d = decisions(fn, x)["matmul"]
    assert (d.cls, d.why) == (OpClass.KEEP, "a value is a TwoTensor with layout torch.strided")


def test_what_is_written_is_fp32_from_birth():
    def fn(a):
        b = a @ a
        b.add_(1)
        return b.mm(a)

    got = decisions(fn, x)
    assert got["matmul"].computes == "bf16"
    assert got["matmul"].result == torch.float32
    assert got["add"].computes == "fp32"


def test_outputs_go_back_to_their_traced_dtypes():
    _, made = planned(lambda a: (a @ a, a + 1, (a @ a).exp()), x)
    assert made.outputs == (torch.float32, None, None)


def test_sizes_cause_no_cast():
    def fn(a):
        b = a @ a
        return b[b[:, 0] > 0].sum(0) * b[b[:, 0] > 0].size(0)  # a size that only the running graph knows

    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        _, made = planned(fn, x)
    sizes = [d for d in made.decisions.values() if d.op in optable.METADATA]
    assert sizes
    assert all(not any(d.operands) and d.why == "reads the shape alone" for d in sizes)


def test_under_ambient_autocast_every_operation_says_so():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        d = decisions(lambda a: (a @ a).relu(), x)
    assert all(made.why.startswith("ambient autocast (cpu: bfloat16) decides here") for made in d.values())


def mixed(a):
    """Operations of autocast's lists and of neither, and a cast of the program's own."""
    b = a @ a
    return (b.relu() + a).softmax(-1), b.exp(), torch.cat([b, a]), F.mse_loss(b, a), a.double().sin()


class Kernels(TorchDispatchMode):
    """Collects (kernel, format that its operands are promoted to), behind autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.ran.append((func.overloadpacket.__name__.strip("_"), formats.name(functools.reduce(torch.promote_types, dtypes))))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
@pytest.mark.parametrize("policy", ["autocast", "pure"])
def test_what_runs_in_an_autocast_of_the_users_is_what_is_said(around: bool, policy: str):
    def inside(a):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mixed(a)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        captured, made = planned(mixed if around else inside, x, policy=policy)
    with torch.autocast("cpu", dtype=torch.bfloat16), Kernels() as kernels:
        mixed(x)
    want = [ran for ran in kernels.ran if ran[0] not in ("to_copy", "detach")]
    names = {"matmul": "mm", "double": "to_copy"}
    got = [(names.get(d.op or "", d.op), d.computes) for d in made.operations if d.op != "double"]
    assert got == want
    assert {computes for _, computes in got} == {"bf16", "fp32", "f64"}
    assert all(d.cls is OpClass.KEEP for d in made.operations)
    assert made.num_low_ops == [computes for _, computes in got].count("bf16")
    assert not made.lowers


def test_values_that_the_program_made_narrow_are_counted():
    captured, made = planned(lambda a: (a.half() @ a.half()).relu(), x, variant="fp32")
    casts = [("half", "fp32")] * 2
    assert [(d.op, d.computes) for d in made.operations] == [*casts, ("matmul", "fp16"), ("relu", "fp16")]
    assert (made.num_low_ops, made.lowers, made.formats) == (2, False, ("fp16", "fp32"))
    assert text.plan(captured, made).startswith("# plan for fp32: 2 of 4 floating-point operations in fp16\n")


def test_a_plan_counts_the_rows_that_it_shows():
    captured, made = planned(lambda a: ((a @ a).relu() @ a).softmax(-1), x)
    assert text.plan(captured, made).startswith("# plan for bf16: 3 of 4 floating-point operations in bf16\n")
    assert text.plan(captured, made).count("  bf16  bf16  ") == made.num_low_ops == 3
    assert "0 of 1 floating-point operations in a low format" in text.plan(*planned(lambda a: a @ a, x, variant="fp32"))


def test_an_operation_that_would_be_low_says_why_it_is_not():
    d = decisions(lambda a: a @ a, x, variant="fp32")["matmul"]
    assert (d.computes, d.why) == ("fp32", "autocast: lower-precision list; the precision is fp32")


def test_an_operation_that_refuses_is_kept():
    # prelu wants operands of one dtype on every device; einsum of one operand is a permutation: both take bf16. A custom
    # rule that asks for what the operation cannot do is refused by the operation, not by a table.
    d = decisions(lambda a: torch.linalg.inv(a), x, policy={"linalg_inv": "bf16", "op:linalg_inv": "bf16"})["linalg_inv"]
    assert d.cls is OpClass.KEEP
    assert "refuses" in d.why or "another" in d.why or "is torch" in d.why


def test_rules_reach_operations_and_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    _, made = planned(model, x, policy={"softmax": "bf16", "2": "fp32"})
    got = [(d.op, d.computes) for d in made.decisions.values()]
    assert got == [("linear", "bf16"), ("softmax", "bf16"), ("linear", "fp32")]


def test_a_rule_may_ask_for_a_format_of_its_own():
    got = decisions(lambda a: (a @ a).mm(a), x, policy={"mm": "fp16"})
    assert (got["matmul"].computes, got["mm"].computes) == ("bf16", "fp16")


def test_every_decision_has_a_reason_and_a_line():
    model = Fn(lambda m, a: m.norm(m.lin(a).relu()).sum(), lin=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    _, made = planned(model, x)
    assert len(made.decisions) == 4
    for d in made.decisions.values():
        assert d.why
        assert d.facts.where.startswith("test_plan.py:")


def test_the_digest_sees_every_decision():
    def digest(**options) -> str:
        return planned(lambda a: (a @ a).softmax(-1), x, **options)[1].digest()

    keys = [digest(), digest(variant="fp16"), digest(policy={"softmax": "bf16"}), digest(policy={"matmul": "fp32"})]
    assert len(set(keys)) == 4
    assert digest() == keys[0]
