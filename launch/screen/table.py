"""Tables on stdout: with lines and colour on a terminal that is wide enough, as plain aligned text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conf.visible import visible

_BLANKS = 2
"""Between two columns."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows may be shorter than the heading. No cell is ever cut: partitions and paths are there to be copied."""
    if not sys.stdout.isatty():
        print(plain(columns, rows))
        return
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))  # a plain string could hold rich's markup
    console = Console()
    if Measurement.get(console, console.options.update(max_width=sys.maxsize), table).maximum <= console.width:
        console.print(table)
    else:
        print(narrow(columns, rows, console.width))


def plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two blanks apart; the last one is not padded. Rows may be shorter than the heading."""
    whole = _whole(columns, rows)
    widths = _widths(whole)
    lines = ((" " * _BLANKS).join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in whole)
    return "\n".join(line.rstrip() for line in lines)


def narrow(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """The same in `width` characters: what takes most of them stands beneath each row, by the column's name."""
    whole = _whole(columns, rows)
    widths = _widths(whole)
    beside = list(range(len(columns)))
    while sum(widths[column] + _BLANKS for column in beside) - _BLANKS > width and len(beside) > 1:
        beside.remove(max(beside, key=lambda column: widths[column]))
    beneath = [column for column in range(len(columns)) if column not in beside]
    heading, *lines = plain([columns[c] for c in beside], [[row[c] for c in beside] for row in whole[1:]]).split("\n")
    shown = [heading]
    for line, row in zip(lines, whole[1:], strict=True):
        shown += [line, *(f"    {columns[column]}: {row[column]}" for column in beneath if row[column])]
    return "\n".join(shown)


def _whole(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Heading and rows, all as long as the heading."""
    return [(*map(visible, row), *[""] * (len(columns) - len(row))) for row in (columns, *rows)]


def _widths(whole: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*whole, strict=True)]
