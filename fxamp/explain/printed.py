"""Tables as plain text, for reports that are printed into logs as often as on terminals."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:  # the printer is imported where something is printed: `import fxamp` stays light
    from rich.console import RenderableType
    from rich.table import Table


WIDTH_CHARACTERS: Final = 110
"""Where no terminal says how wide it is: what is printed into logs on different machines is then comparable."""

MIN_WIDTH_CHARACTERS: Final = 60
"""Narrower terminals wrap the lines of a table."""


def width(elsewhere: int = WIDTH_CHARACTERS) -> int:
    """Characters in a line of the terminal that is printed to, or so many."""
    if not getattr(sys.stdout, "isatty", lambda: False)():
        return elsewhere
    return max(shutil.get_terminal_size((elsewhere, 0)).columns, MIN_WIDTH_CHARACTERS)


def table(
    title: str, columns: Sequence[str], *, numbers: Container[str] = (), has_lines: bool = False, max_width: int | None = None
) -> Table:
    """An empty table, whose cells keep all of their text. Columns of numbers stand right, and titles left; lines separate rows
    that take several; no column is wider than `max_width` characters."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", caption_justify="left", show_lines=has_lines)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold", max_width=max_width)
    return made


def text(parts: Iterable[RenderableType], width: int) -> str:
    """Tables and lines below each other, in lines of so many characters. Strings are taken as they are: a glob `layers.[a-z]*`
    is no markup."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=width, no_color=True, highlight=False, markup=False, emoji=False)
    for part in parts:
        if not isinstance(part, str):
            _fit(cast("Table", part), width)
        console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _fit(table: Table, width: int) -> None:
    """Divides a line that is too short for a table among its columns, so that no word is parted that need not be."""
    room = width - 3 * len(table.columns) - 1  # each cell has a border and two blanks
    cells = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    wanted = [max(map(len, "\n".join(texts).splitlines())) for texts in cells]
    wanted = [min(want, column.max_width or want) for want, column in zip(wanted, table.columns, strict=True)]
    if sum(wanted) <= room:
        return
    words = [min(max(map(len, " ".join(texts).split())), want) for texts, want in zip(cells, wanted, strict=True)]
    longest = next((n for n in range(max(words), 1, -1) if sum(min(word, n) for word in words) <= room), 1)
    least = [min(word, longest) for word in words]
    missing = [want - has for want, has in zip(wanted, least, strict=True)]
    left = max(room - sum(least), 0)
    for column, has, miss in zip(table.columns, least, missing, strict=True):
        column.width = has + left * miss // max(sum(missing), 1)
