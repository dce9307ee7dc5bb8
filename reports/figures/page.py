"""The frame of every page: one file that asks for nothing else, and the pieces that pages share."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from itertools import repeat
from typing import Any, NamedTuple

from megatron_ext.contract.plan_parts import RehearsalConfig

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: what stands in the page runs, nothing is fetched or sent."""
MOST_ROWS = 16
"""Rows, up to which a table stays open below what shows or sums up the same."""


def static(name: str) -> str:
    """A file of `reports/static`."""
    return files("reports").joinpath("static", name).read_text(encoding="utf-8")


def page(title: str, body: str, scripts: Sequence[str] = ()) -> str:
    """A whole page from a title of plain text, ready HTML and scripts, which run in this order. They lie in the page
    compressed, a third of their size."""
    if 'class="copy"' in body:
        scripts = [*scripts, static("copy.js")]
    code = "".join(f'<script type="text/plain" class="packed">{_packed(script)}</script>\n' for script in scripts)
    if scripts:
        code += f"<script>\n{static('load.js')}</script>\n"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{static('page.css')}</style>\n</head>\n"
        f"<body>\n{body}\n{code}</body>\n</html>\n"
    )


@lru_cache(maxsize=32)
def _packed(script: str) -> str:
    return base64.b64encode(zlib.compress(script.encode(), 6)).decode("ascii")


def refreshing(page: str, seconds: int) -> str:
    """The page, loading itself anew after so many seconds."""
    return page.replace("<head>\n", f'<head>\n<meta http-equiv="refresh" content="{seconds}">\n', 1)


def connecting(page: str) -> str:
    """The page, allowed to ask the server that it comes from."""
    return page.replace(POLICY, f"{POLICY}; connect-src 'self'", 1)


def data(name: str, value: Any) -> str:
    """A JSON value for scripts to read, safe whatever strings it holds: it has no '<'."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


class Names(tuple[str, ...]):
    """A cell of names, none of which is broken over two lines."""


class Cell(NamedTuple):
    """A cell of ready HTML."""

    html: str
    attributes: str = ""


Row = Sequence[str | Names | Cell]
SHORT, LONG = 24, 80
"""Characters of a cell: what is longer than SHORT may go over several lines, and what is longer than LONG is wide."""


def copyable(text: str) -> str:
    """A command, or several lines of them, with a button that copies it."""
    return f'<div class="next"><pre class="command">{escape(text)}</pre>{_COPY.format(value="", label="Copy")}</div>'


def copy_button(text: str, label: str = "Copy command") -> str:
    """A button that copies a command for which there is no room, as in a cell of a table."""
    return _COPY.format(value=f' value="{escape(text)}" title="{escape(text)}"', label=escape(label))


_COPY = '<button type="button" class="copy" aria-live="polite"{value}>{label}</button>'


def table(
    head: Sequence[str], rows: Iterable[Row], *, kind: str = "", row_attributes: Iterable[str] = repeat("")
) -> str:
    """A table; what is not a Cell is plain text. A column in which no row has anything is left out. `kind`: classes of
    the style sheet."""
    lines = [tuple(row) for row in rows]
    even = all(len(row) == len(head) for row in lines)
    shown = [at for at in range(len(head)) if not even or not lines or any(row[at] for row in lines)]
    heads = "".join(f'<th scope="col">{escape(head[at])}</th>' for at in shown)
    body = "".join(
        f"<tr{attributes}>{''.join(_cell(row[at]) for at in (shown if even else range(len(row))))}</tr>\n"
        for row, attributes in zip(lines, row_attributes, strict=False)
    )
    named = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{named}><thead><tr>{heads}</tr></thead><tbody>\n{body}</tbody></table></div>'


def table_behind(head: Sequence[str], rows: Iterable[Row], title: str, *, kind: str = "") -> str:
    """A table of what a chart shows or a sentence sums up; of more than MOST_ROWS, behind a line that opens it."""
    lines = [*rows]
    drawn = table(head, lines, kind=kind)
    return f"<details><summary>{escape(title)}</summary>{drawn}</details>" if len(lines) > MOST_ROWS else drawn


def _cell(cell: str | Names | Cell) -> str:
    if isinstance(cell, Cell):
        return f"<td{cell.attributes}>{cell.html}</td>"
    if isinstance(cell, Names):
        names = ", ".join(f'<span class="whole">{escape(name)}</span>' for name in cell)
        return f'<td class="text">{names}</td>' if len(cell) > 1 else f"<td>{names}</td>"
    kind = ' class="text paragraph"' if len(cell) > LONG else ' class="text"' if len(cell) > SHORT else ""
    return f"<td{kind}>{escape(cell)}</td>"


def number(value: float | None, form: str, unit: str = "") -> str:
    """A dash for what is not known; what rounds to zero has no minus sign."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:{form}}"
    return f"{text if any(digit in text for digit in '123456789') else text.removeprefix('-')}{unit}"


def than(ms: float, other: float) -> str:
    """Such as `5.0% longer than`."""
    share = ms / other - 1 if other > 0 else math.nan
    return f"{abs(share):.1%} {'longer' if share > 0 else 'shorter'} than" if abs(share) >= 5e-4 else "as long as"


def bullets(items: Iterable[str]) -> str:
    """A list of plain text."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def missing(notes: Sequence[str]) -> str:
    """The box that says what the page could not show; nothing when nothing is missing."""
    if not notes:
        return ""
    return f'<aside class="missing"><h2>Missing from this page</h2>{bullets(notes)}</aside>'


def emulated(rehearsal: RehearsalConfig | None) -> str:
    """What stands above all else on the pages of a rehearsal; nothing for a run that computed."""
    if rehearsal is None:
        return ""
    meaning = {
        "virtual": "logical time: the rehearsal itself was shorter",
        "anchored": "real time: the rehearsal itself took as long",
    }
    means = f" ({meaning[rehearsal.clock]})" if rehearsal.clock in meaning else ""
    return (
        '<aside class="emulated"><h2>Rehearsal: all times are emulated</h2>'
        "<p>Nothing was computed. Every duration comes from the GPU profiles and link speeds of the configuration; "
        f"clock <b>{escape(rehearsal.clock)}</b>{escape(means)}. No data were read, so there is no loss.</p></aside>"
    )


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
