"""Tables as plain text, for reports that are printed into logs as often as on terminals."""

from __future__ import annotations

import io
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the printer is imported where something is printed: `import fxamp` stays light
    from rich.console import RenderableType
    from rich.table import Table


def table(
    title: str, columns: Sequence[str], *, numbers: Container[str] = (), has_lines: bool = False, max_width: int | None = None
) -> Table:
    """An empty table, whose cells keep all of their text. Columns of numbers stand right, and titles left; lines separate rows
    that take several; no column is wider than `max_width` characters."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", show_lines=has_lines)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold", max_width=max_width)
    return made


def text(parts: Iterable[RenderableType], width: int) -> str:
    """Tables and lines below each other. A fixed width, in characters, keeps what is printed on different machines
    comparable. Strings are taken as they are: a glob `layers.[a-z]*` is no markup."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=width, no_color=True, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
