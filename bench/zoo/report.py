"""Writes bench/zoo/RESULTS.md from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.zoo import compile_time, rows
from bench.zoo.rows import Row

_METHOD = """# The zoo

Tiny models of `transformers` with random weights, forward and backward, through fxamp and beside it. Made by `make zoo`
(`python -m bench.zoo`); `--report` writes this file from `results.jsonl`.

- **stock** is the lowering without fxamp; **fp32**, **bf16**, **fp16** say whether fxamp compiles and runs (fp16 with
  `scaling=None`); in fp32 results are compared with stock bit for bit.
- **outputs**, **gradients**: error against float64 as a multiple of autocast's, geometric mean over seeds. An error is
  relative and norm-wise. The gradient is that of all outputs, each weighted with a random tensor. **parameters** is the root
  mean square over parameters instead of the norm of all gradients: a small gradient that is wrong shows there.
- **autocast** is `torch.autocast("cpu")` with CUDA's lists, read from the header of the installed PyTorch, through the same
  lowering. The CPU's own lists are a different policy (softmax and layer_norm in bf16), and fxamp follows CUDA's. On fake
  CUDA tensors PyTorch's own kernels give the same dtypes (`tests/bench/zoo/test_cuda_autocast.py`).
- **cast bytes**, **casts**: of the joint graphs with `output_dtype="low"` in bf16, as a multiple of autocast's; see
  `bench/joint.py`.
"""


def write(folder: Path) -> None:
    """Writes the report of the results in a folder into it."""
    found = rows.read(folder / "results.jsonl")
    parts = [_METHOD]
    for lower in ("aot_eager", "inductor"):
        some = [row for row in found if row.lower == lower]
        if some:
            parts.append(_section(lower, some))
    times = compile_time.read(folder / "compile_time.jsonl")
    if times:
        parts.append(compile_time.markdown(times))
    (folder / "RESULTS.md").write_text("\n".join(parts))


def _section(lower: str, found: Sequence[Row]) -> str:
    versions = sorted({", ".join(f"{k} {v}" for k, v in sorted(row.versions.items())) for row in found})
    counts = Counter(row.num_seeds for row in found)
    usual, *others = [count for count, _ in counts.most_common()]
    seeds = [str(usual), *(f"{n} of {', '.join(row.name for row in found if row.num_seeds == n)}" for n in others)]
    faults = [f"- {row.name}: {fault}" for row in found for fault in rows.faults(row)]
    failing = [f"- {row.name}: stock: {row.results['stock'].failure}" for row in found if row.results["stock"].failure]
    failing += [
        f"- {row.name}: {name}: {result.failure}"
        for row in found
        for name, result in row.results.items()
        if name.startswith("autocast") and result.failure
    ]
    lines = [f"## lower={lower!r}", "", f"{'; '.join(versions)}. Seeds: {'; '.join(seeds)}.", ""]
    lines += [*(f"- {line}" for line in rows.summary(found)), "", rows.markdown(found), ""]
    lines += ["Where fxamp falls short:", "", *(faults or ["- nowhere"]), ""]
    lines += ["What does not run without fxamp:", "", *(failing or ["- nothing"]), ""]
    return "\n".join(lines)
