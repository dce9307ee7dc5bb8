"""`tdpp status` and `tdpp runs` on a terminal: in colour, and nodes that are in the same state in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from conf.visible import plural, visible
from launch.judge.evidence import OF_GPUS, OF_NODE, Evidence
from launch.judge.findings import Findings
from launch.judge.state import EXIT_CODES, State
from launch.judge.status_text import COLUMNS, SHOWN, STDERR_NOTE, evidence, group_lines
from launch.screen import some

_GOOD = {State.succeeded: "bold green", State.running: "bold cyan", State.starting: "bold cyan"}
_BAD = "bold red"
_NAMED = 6
"""So many nodes of a state are named."""
_INDENT = 4


def colour(state: State) -> str:
    """The style in which a verdict is written."""
    return _GOOD.get(state, "bold yellow" if state is State.stopped or not EXIT_CODES[state] else _BAD)


def status_screen(found: Findings) -> RenderableType:
    verdict = found.verdict
    head = Text.assemble((found.run.name, "bold"), "  ", (str(verdict.state), colour(verdict.state)))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in compact(evidence(found)):
        table.add_row(Text(visible(label)), Text(visible(text), Style(color="yellow") if label == "mismatch" else ""))
    parts: list[RenderableType] = [head, Padding(Text(visible(verdict.reason)), (0, 2)), Padding(table, (1, 2, 0, 2))]
    if found.stderr:
        more = len(found.stderr) - SHOWN
        rest = [f"and {plural(more, 'other line')}: tdpp logs --err {found.run.name}"] if more > 0 else []
        parts.append(_lines(f"stderr ({STDERR_NOTE})", [*group_lines(found.stderr[:SHOWN]), *rest]))
    if found.agents:
        parts.append(_lines("output of agents that are gone, or of their job", group_lines(found.agents[-SHOWN:])))
    return Group(*parts)


def _lines(title: str, lines: Sequence[str]) -> RenderableType:
    return Padding(Group(Text(title, "dim"), *(Padding(Text(visible(line)), (0, 2)) for line in lines)), (1, 2, 0, 2))


def compact(facts: Iterable[Evidence]) -> Iterator[tuple[str, str]]:
    """Labels and texts; nodes of which the same is said share a line, in the place of the first.

    Of the lines on a node's GPUs only some are shown, for what follows is to fit on the screen, too.
    """
    rows: dict[Evidence, list[str]] = {}
    for fact in facts:
        if fact.label == OF_NODE:
            rows.setdefault(replace(fact, node=""), []).append(fact.node)
        else:
            rows[fact] = [fact.node]
    of_gpus = [fact for fact in rows if fact.label == OF_GPUS]
    for fact, names in rows.items():
        if len(names) > 1:
            yield f"{len(names)} nodes", f"{fact.text} ({some(names, _NAMED)})"
        elif fact not in of_gpus[_NAMED:]:
            yield f"{fact.label} {names[0]}".strip(), fact.text
        elif fact == of_gpus[-1]:
            yield "GPUs", f"{plural(len(of_gpus) - _NAMED, 'other node')}: tdpp logs --gpu --tail 9"


def runs_screen(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """`rows` begin with a name and a verdict. What a terminal has no room for stands beneath each of them."""
    lines = [[visible(cell) for cell in row] + [""] * (len(columns) - len(row)) for row in rows]
    table = Table(*columns, box=SIMPLE_HEAD)
    for name, verdict, *cells in lines:
        table.add_row(Text(name), Text(verdict, colour(State(verdict))), *map(Text, cells))
    console = Console()
    if Measurement.get(console, console.options.update(max_width=sys.maxsize), table).maximum <= console.width:
        return table
    count = len(COLUMNS)
    first = [columns[:count], *(line[:count] for line in lines)]
    widths = [max(map(len, cells)) for cells in zip(*first, strict=True)]
    found: list[RenderableType] = [_aligned(columns[:count], widths, "bold", "bold")]
    for line in lines:
        more = [f"{column} {cell}" for column, cell in zip(columns[count:], line[count:], strict=True) if cell]
        found += [
            _aligned(line[:count], widths, "", colour(State(line[1]))),
            Padding(Text(", ".join(more), "dim"), (0, 0, 0, _INDENT)),
        ]
    return Group(*found)


def _aligned(cells: Sequence[str], widths: Sequence[int], style: str, second: str) -> Text:
    """A line of cells, the second of which has a style of its own."""
    parts = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return Text("  ").join(Text(part, second if number == 1 else style) for number, part in enumerate(parts))
