"""What people look at: dumps, diffs, the plan, the report; also after a warm start from PyTorch's caches."""

# ruff: noqa: E501  (golden texts are as wide as the graphs they show)
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
from torch import nn

import fxamp
from fxamp import errors, formats
from fxamp.explain import text
from tests.programs import Fn, mlp

STAGES = ("captured", "plan", "dynamo", "joint_before", "joint")


def inspected(**options):
    model = Fn(lambda m, x: m.lin(x).softmax(-1), lin=nn.Linear(4, 4))
    amp = fxamp.Amp(precision="bf16", lower="aot_eager", **options)
    torch.compile(model, backend=amp)(torch.ones(2, 4)).sum().backward()
    return amp


class Golden(expecttest.TestCase):
    def setUp(self) -> None:
        patch = mock.patch.object(formats, "_cpu_flag", return_value=False)  # the same text on every CPU
        patch.start()
        self.addCleanup(patch.stop)

    def test_the_plan(self):
        lines = inspected().graphs[0].variants["bf16"].text("plan")
        self.assertExpectedInline(
            re.sub(r"\.py:\d+", ".py:#", lines),
            """\
# plan for bf16: 1 of 2 floating-point operations in bf16
node     operation  class  in    out   where                  reason
linear   linear     low    bf16  bf16  test_inspecting.py:#  autocast: lower-precision list
softmax  softmax    high   fp32  fp32  test_inspecting.py:#  autocast: fp32 list
""",
        )

    def test_the_diff(self):
        variant = inspected().graphs[0].variants["bf16"]
        diff = "\n".join(line.strip() for line in variant.diff().splitlines() if line.startswith(("+", "-")))
        self.assertExpectedInline(
            diff,
            """\
--- captured
+++ dynamo
-        linear: "f32[2, 4]" = torch._C._nn.linear(inputs_0, lin_weight, lin_bias)
-        softmax: "f32[2, 4]" = linear.softmax(-1)
+        inputs_0_bf16: "bf16[2, 4]" = torch.ops.aten.to.dtype(inputs_0, torch.bfloat16)
+        lin_weight_bf16: "bf16[4, 4]" = torch.ops.aten.to.dtype(lin_weight, torch.bfloat16)
+        lin_bias_bf16: "bf16[4]" = torch.ops.aten.to.dtype(lin_bias, torch.bfloat16)
+        linear: "bf16[2, 4]" = torch._C._nn.linear(inputs_0_bf16, lin_weight_bf16, lin_bias_bf16)
+        linear_fp32: "f32[2, 4]" = torch.ops.aten.to.dtype(linear, torch.float32)
+        softmax: "f32[2, 4]" = linear_fp32.softmax(-1)""",
        )

    def test_the_report(self):
        report = re.sub(r"\.py:\d+", ".py:#", str(inspected().report()))
        self.assertExpectedInline(report, """\
fxamp: Amp(precision='bf16', lower='aot_eager')
graphs
┏━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━┳━━━━━┳━━━━━┳━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━┓
┃ graph ┃ mode     ┃ runs in ┃ ops ┃ low ┃ casts ┃ CUDA graph ┃ first line            ┃
┡━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━╇━━━━━╇━━━━━╇━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━┩
│ 0     │ training │ bf16    │   2 │   1 │     7 │ no         │ test_inspecting.py:# │
└───────┴──────────┴─────────┴─────┴─────┴───────┴────────────┴───────────────────────┘
operations
┏━━━━━━┳━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ in   ┃ count ┃ operations ┃ why                            ┃
┡━━━━━━╇━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│ bf16 │     1 │ linear     │ autocast: lower-precision list │
├──────┼───────┼────────────┼────────────────────────────────┤
│ fp32 │     1 │ softmax    │ autocast: fp32 list            │
└──────┴───────┴────────────┴────────────────────────────────┘
fast paths, as they would be on CUDA (this ran on cpu)
┏━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ operation  ┃ where                 ┃ count ┃ fast path               ┃ what to change                     ┃
┡━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│ linear in  │ test_inspecting.py:# │     1 │ missed: m = 2 and n = 4 │ compute several of them in one     │
│ bf16       │                       │       │ and k = 4, where matrix │ product, if the program has them;  │
│            │                       │       │ units have tiles of 16  │ it is bound by memory, not by      │
│            │                       │       │                         │ arithmetic                         │
└────────────┴───────────────────────┴───────┴─────────────────────────┴────────────────────────────────────┘
- graph 0: bf16 is emulated on cpu: no AVX512-BF16 or AMX instructions
- graph 0: CUDA graph: off (no CUDA graphs on cpu)""")


def test_every_line_of_every_dump_says_its_dtype():
    model = Fn(lambda m, x: torch.cat(m.lin(x).chunk(2)).max(-1), lin=nn.Linear(4, 4))
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    torch.compile(model, backend=amp)(torch.ones(2, 4)).values.sum().backward()
    for stage in STAGES:
        if stage == "plan":
            continue
        lines = amp.graphs[0].variants["bf16"].text(stage).splitlines()
        assignments = [line for line in lines if re.match(r"\s+\w+(: .*)? = ", line)]
        assert len(assignments) > 4
        for line in assignments:
            assert re.match(r'\s+\w+: "\(?(f32|bf16|i64|b8)\[', line), line


def test_an_unknown_stage_lists_the_known():
    with pytest.raises(errors.UnknownOption, match=r"unknown stage 'join'. Did you mean 'joint'\?"):
        inspected().graphs[0].variants["bf16"].text("join")  # pyright: ignore[reportArgumentType]


def test_eager_has_no_joint_graph():
    amp = fxamp.Amp(precision="bf16", lower="eager")
    torch.compile(mlp(4, 4), backend=amp)(torch.ones(2, 4))
    variant = amp.graphs[0].variants["bf16"]
    assert len(variant.casts) == 4
    with pytest.raises(errors.NeedsCaptured, match="lower='eager' has none"):
        variant.text("joint")


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "bf16[2, 3]"),
        ((torch.zeros(2), torch.zeros((), dtype=torch.int64)), "(f32[2], i64[])"),
        (torch.zeros(1, dtype=torch.float8_e4m3fn), "f8e4m3[1]"),
        (3, ""),
    ],
)
def test_describe(value: object, want: str):
    assert text.describe(value) == want


def test_a_record_is_short_to_look_at():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    torch.compile(nn.Linear(4, 4).forward, backend=amp)(torch.randn(2, 4)).sum().backward()
    assert len(repr(amp.graphs[0])) < 160
    assert "bf16" in repr(amp.graphs[0])


def test_the_report_has_fields_for_programs():
    report = inspected().report()
    assert (report.precisions, report.formats, report.num_low_ops, report.num_fallbacks) == (("bf16",), ("bf16", "fp32"), 1, 0)
    assert report.num_casts == len(report.graphs[0].variants["bf16"].casts) > 0


@pytest.mark.parametrize(
    ("model", "loss_fn", "places"),
    [
        (
            nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3))),
            nn.CrossEntropyLoss(),
            ["0 (Linear)", "1.0 (ReLU)", "1.1 (Linear)", "CrossEntropyLoss"],
        ),
        (nn.Linear(4, 3), torch.nn.functional.cross_entropy, ["Linear", ""]),
        (
            Fn(lambda m, x: m.head(m.body(x)), body=nn.Sequential(nn.Linear(4, 4)), head=nn.Linear(4, 3)),
            lambda output, target: torch.nn.functional.cross_entropy(output, target),
            ["test_inspecting.py:#"] * 3,
        ),
    ],
    ids=["Sequential", "Linear", "the user's"],
)
def test_a_train_step_points_to_the_users_program(model: nn.Module, loss_fn: Any, places: list[str]):
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.train_step(model, loss_fn, optimizer, accumulate=2)(torch.randn(4, 4), torch.randint(3, (4,)))
    variant = amp.graphs[0].variants["bf16"]
    found = [re.sub(r":\d+", ":#", d.facts.where) for d in variant.plan.operations]
    assert found[: len(places)] == places
    shown = [str(amp.report()), *(variant.text(stage) for stage in STAGES)]
    assert not any("train_step.py" in text for text in shown)


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of a table of a report, each row as one."""
    lines = text[text.index(f"\n{title}\n") :].splitlines()[2:]
    lines = lines[: next(i for i, line in enumerate(lines) if line.startswith("└"))]
    made: list[list[str]] = [[]]
    for line in lines:
        if line[0] in "┡├":
            made.append([])
        elif cells := [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]:
            made[-1] = [f"{a} {b}".strip() for a, b in zip(made[-1] or [""] * len(cells), cells, strict=True)]
    return made


@pytest.mark.parametrize("regions", [None, {"head": "head"}])
def test_the_counts_of_a_report_agree(regions: dict[str, str] | None):
    """Operations of the table of graphs, rows of the table of operations, rows of plans, and fields: in each precision."""
    model = Fn(lambda m, x: m.head(m.body(x).relu() + x).softmax(-1), body=nn.Linear(4, 4), head=nn.Linear(4, 4))
    amp = fxamp.Amp(ladder=("bf16", "fp32"), regions=regions, lower="aot_eager")
    compiled = torch.compile(model, backend=amp)
    compiled(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        compiled(torch.ones(2, 4))
    report, text = amp.report(), str(amp.report())
    counts: dict[str, list[int]] = {}
    for precision, computes, count, operations, *_ in rows(text, "operations")[1:]:
        listed = [op.partition(" x") for op in operations.split(", ")]
        assert int(count) == sum(int(times or 1) for _, _, times in listed)
        for rung in ("bf16", "fp32") if precision == "all" else precision.split(", "):
            total = counts.setdefault(rung, [0, 0])
            total[0] += int(count)
            total[1] += int(count) * (computes == "bf16")
    table = [row for row in rows("\n" + re.sub(r"^│ (?=0|1)", "├\n│ ", text, flags=re.M), "graphs") if row and row[0].isdigit()]
    assert len(table) == 2 * (4 if regions else 2)
    for rung in ("bf16", "fp32"):
        mine = [row for row in table if row[2] == rung]
        assert counts[rung] == [sum(int(row[3]) for row in mine), sum(int(row[4]) for row in mine)]
        variants = [g.variants[rung] for g in report.graphs]
        assert counts[rung][0] == sum(len(v.plan.operations) for v in variants)
        assert counts[rung][1] == sum(v.text("plan").count("  bf16  bf16  ") for v in variants)
    assert report.num_low_ops == counts["bf16"][1] > 0
    assert counts["fp32"][1] == 0
    assert report.num_casts == sum(len(g.variants["bf16"].casts) for g in report.graphs)
    # What a ladder adds is no second leak, and no other kernel.
    assert len(report.leaks) == len(report.graphs[0].lowest.leaks) * 2 == 2
    assert len(report.fast_paths) == 2 * 2
    assert text.count("no CUDA graphs on cpu") == 1


PROGRAM = """
import torch, fxamp
from tests.programs import mlp
amp = fxamp.Amp(precision="bf16")
torch.manual_seed(0)
torch.compile(mlp(8, 16, 4), backend=amp)(torch.randn(4, 8)).sum().backward()
from torch._dynamo.utils import counters
variant = amp.graphs[0].variants["bf16"]
print("HITS", counters["aot_autograd"]["autograd_cache_hit"], variant.joint_record.casts is None)
print(variant.text("joint_before")); print(variant.text("joint")); print(variant.joint_changes[0].pass_name)
print(len(variant.casts)); print(variant.text("plan")); print(amp.report())
"""


def test_dumps_survive_a_warm_start(tmp_path: Path):
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    runs = []
    for i in range(2):
        env["FXAMP_DUMP"] = str(tmp_path / f"dump{i}")
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        runs.append(done.stdout.split("\n", 1))
    assert runs[0][0] == "HITS 0 False", "the first run is cold: its passes ran"
    assert runs[1][0] == "HITS 1 True", "the second is warm: no pass ran in it"
    assert runs[0][1] == runs[1][1]
    cold, warm = (sorted(p.relative_to(tmp_path / f"dump{i}") for p in (tmp_path / f"dump{i}").rglob("*.*")) for i in range(2))
    assert cold == warm
    assert {p.name for p in cold} == {
        "0_captured.py", "1_plan.txt", "2_dynamo.py", "3_joint_before.py", "4_joint.py", "captured_to_dynamo.diff",
    }  # fmt: skip
    for path in cold:
        assert (tmp_path / "dump0" / path).read_text() == (tmp_path / "dump1" / path).read_text()
        assert (tmp_path / "dump0" / path).read_text().strip()


def test_plans_that_differ_never_share_a_cache_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # alike in code, unlike in meta: PyTorch's cache keys would not tell them apart
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch._dynamo.utils import counters

    model, x = mlp(4, 4), torch.ones(2, 4)

    def hits(policy: dict[str, str]) -> int:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(model, backend=fxamp.Amp(precision="bf16", policy=policy))(x).sum().backward()
        return counters["aot_autograd"]["autograd_cache_hit"]

    assert hits({}) == 0
    assert hits({"relu": "fp32"}) == 1  # changes no decision of this model: one plan, one entry
    assert hits({"linear": "fp32"}) == 0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_a_joint_graph_is_traced_again_in_the_modes_it_was_compiled_in(dynamic: bool, trains: bool):
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    with torch.set_grad_enabled(trains):
        torch.compile(mlp(4, 8, 4), backend=amp, dynamic=dynamic)(torch.ones(3, 4))
    variant = amp.graphs[0].variants["bf16"]
    noted = variant.joint_changes, variant.casts
    with torch.no_grad(), torch.autocast("cpu"):  # where somebody looks is not where it was compiled
        assert variant.joint is variant.joint
    assert any("tangents" in n.name for n in variant.joint.graph.nodes) == trains
    found = variant.joint_record.graphs
    assert found is not None
    assert found.casts == noted[1]
    assert [(c.pass_name, c.num_added, c.num_removed) for c in found.changes] == [
        (c.pass_name, c.num_added, c.num_removed) for c in noted[0]
    ]
