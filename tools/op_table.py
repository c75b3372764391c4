"""Writes docs/ops.md: how every operation of PyTorch's operator database is treated, and why.

    python tools/op_table.py            write it
    python tools/op_table.py --check    exit with 1 if it is stale
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from fxamp import capture, optable
from fxamp.optable import OpClass

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "ops.md"

HEAD = """\
# Operations

Made by `make ops` from `fxamp/optable.py` and the operator database of torch {version}; do not edit.

{meanings}

Inside of a policy, rules change classes; numeric guards, aliasing and what an operation itself refuses make exceptions, each
with its reason in the plan.

| class | operations of the database |
|---|---|
{counts}
"""

MEANINGS = (
    (OpClass.LOW, "runs in the low precision: its fp32 operands are cast down"),
    (OpClass.HIGH, "runs in fp32: low operands are cast up"),
    (OpClass.WIDEST, "runs in the widest of its operands' formats"),
    (OpClass.FOLLOW, "takes the format of what it is given, if all operands have it"),
    (OpClass.KEEP, "gets exactly the dtypes that it was traced with"),
)


def operation(name: str) -> str:
    """The name in optable.py of an entry of the database: "linalg.svd" is "linalg_svd", "nn.functional.relu" is "relu"."""
    for home in ("nn.functional.", "special.", "masked.", "torch.ops.aten.", "torch."):
        name = name.removeprefix(home)
    return capture.canonical(name.removesuffix(".default").replace(".", "_"))


def treatment(op: str) -> tuple[str, str]:
    """(class, source)."""
    if op in optable.SEEN_INTO:
        return "seen into", "its parts have classes of their own"
    cls, source = optable.classify(op)
    return cls.value, source


def page(names: Iterable[str]) -> str:
    """The text of docs/ops.md for the entries of a database."""
    entries = sorted({name: treatment(operation(name)) for name in names}.items())
    listed = {operation(name) for name, _ in entries}
    rest = sorted((op, treatment(op)) for op in {*optable.TABLE, *optable.SEEN_INTO} - listed)
    counts = Counter(cls for _, (cls, _) in entries)
    meanings = "\n".join(f"- **{cls.value}** {text}." for cls, text in MEANINGS)
    lines = [
        HEAD.format(
            version=torch.__version__.split("+")[0],
            meanings=meanings,
            counts="\n".join(f"| {cls} | {count} |" for cls, count in counts.most_common()),
        ),
        f"## The database ({len(entries)} operations)\n\n| operation | as | class | source |\n|---|---|---|---|",
        *(_row(f"`{name}`", _other(name), *how) for name, how in entries),
        f"\n## Further rows of the table ({len(rest)})\n\n| operation | class | source |\n|---|---|---|",
        *(_row(f"`{op}`", *how) for op, how in rest),
    ]
    return "\n".join(lines) + "\n"


def _other(name: str) -> str:
    op = operation(name)
    return "" if op == name else f"`{op}`"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def database() -> list[str]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [info.name for info in op_db]


if __name__ == "__main__":
    text = page(database())
    if "--check" in sys.argv[1:]:
        stale = not PAGE.exists() or PAGE.read_text() != text
        sys.exit(f"{PAGE.relative_to(ROOT)} is stale: run `make ops`" if stale else 0)
    PAGE.write_text(text)
    print(f"wrote {PAGE.relative_to(ROOT)}")
