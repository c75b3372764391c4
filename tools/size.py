"""How big fxamp is: lines by file, public names, options, and what `import fxamp` costs on top of `import torch`."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
import tokenize
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]

NOT_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)

MEASURE_IMPORT = """
import time
import torch
start = time.perf_counter()
import fxamp
print(time.perf_counter() - start)
"""


def count_code_lines(text: str) -> int:
    """Lines that hold a token other than comments. Docstrings count, as in every other tool that leaves them be."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def measure_import_s() -> float:
    """The best of three new processes: the first may write bytecode."""
    command = [sys.executable, "-c", MEASURE_IMPORT]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(3)]
    return min(map(float, runs))


def main() -> None:
    sys.path.insert(0, str(ROOT))  # not installed under `make size VENV=none`
    import fxamp

    files = {path: count_code_lines(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("fxamp/**/*.py"))}
    table = Table("file", title="fxamp, code lines")
    table.add_column("lines", justify="right")
    for path, lines in files.items():
        table.add_row(str(path.relative_to(ROOT)), str(lines))
    table.add_section()
    table.add_row(f"{len(files)} files", str(sum(files.values())))

    console = Console()
    console.print(table)
    console.print(f"public names    {len(fxamp.__all__)}")
    console.print(f"options of Amp  {len(dataclasses.fields(fxamp.Options))}")
    console.print(f"import fxamp    {measure_import_s() * 1e3:.0f} ms beyond import torch")


if __name__ == "__main__":
    main()
