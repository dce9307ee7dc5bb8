"""Tables on stdout: with lines and colour on a terminal, as plain aligned text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows may be shorter than the heading."""
    if not sys.stdout.isatty():
        print(plain(columns, rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))  # a plain string could hold rich's markup
    Console().print(table)


def plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two blanks apart; the last one is not padded. Rows may be shorter than the heading."""
    whole = [(*row, *[""] * (len(columns) - len(row))) for row in (columns, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*whole, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in whole)
    return "\n".join(line.rstrip() for line in lines)
