"""Charts of many things with the same quantities: a dot each, or a line each across parallel axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from reports.figures.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ticks

MOST_MARKS = 14
"""Beside an axis; of more values only some are written, for they would lie over each other."""
AXIS_HEIGHT, AXIS_TOP, GAP = 260, 46, 150


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something to draw."""

    name: str
    link: str
    """To a page of its own; empty if it has none."""
    tone: str
    """`best`, `front`, or nothing: how it is set off."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One quantity of all items, in their order; text, or numbers of which NaN is not known."""

    title: str
    values: Sequence[str | float]
    unit: str = ""

    def place(self, item: int) -> float:
        """From 0 below to 1 above; NaN if it is not known."""
        marks = dict(self.marks())
        return marks[self.text(item)] if self.even else self._share(float(self.values[item]))

    def text(self, item: int) -> str:
        value = self.values[item]
        return value if isinstance(value, str) else f"{value:,.6g}"

    @property
    def even(self) -> bool:
        """Whether every value has a mark of its own, at equal distances."""
        return bool(self.values) and isinstance(self.values[0], str)

    def marks(self) -> list[tuple[str, float]]:
        """Texts beside the axis, and where they are."""
        if self.even:
            texts = sorted({str(value) for value in self.values}, key=_natural)
            shown = len(texts) - 1 or 1
            return [(text, index / shown if len(texts) > 1 else 0.5) for index, text in enumerate(texts)]
        known = [float(value) for value in self.values if not math.isnan(float(value))]
        return [(f"{value:,.6g}", self._share(value)) for value in ticks(min(known), max(known), 4)] if known else []

    def _share(self, value: float) -> float:
        if math.isnan(value):
            return value
        known = [float(one) for one in self.values if not math.isnan(float(one))]
        low, high = min(known), max(known)
        return (value - low) / (high - low) if high > low else 0.5


def _natural(text: str) -> tuple[float, str]:
    """Numbers by size, before all other texts."""
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


def parallel(items: Sequence[Item], axes: Sequence[Axis], label: str) -> str:
    """A line for each item across all axes; one whose value is not known on some axis has a gap there."""
    width = 80 + GAP * (len(axes) - 1) + 120

    def across(number: int) -> float:
        return 80 + GAP * number

    def down(share: float) -> float:
        return AXIS_TOP + (1 - share) * AXIS_HEIGHT

    parts = []
    for index in sorted(range(len(items)), key=lambda index: ("", "front", "best").index(items[index].tone)):
        item = items[index]
        places = [axis.place(index) for axis in axes]
        tip = ", ".join([item.name, *(f"{axis.title} {axis.text(index)}{axis.unit}" for axis in axes)])
        runs: list[list[str]] = [[]]
        for number, place in enumerate(places):
            if math.isnan(place):
                runs.append([])
            else:
                runs[-1].append(f"{across(number):.1f},{down(place):.1f}")
        drawn = "".join(f'<polyline points="{" ".join(run)}"/>' for run in runs if len(run) > 1)
        parts.append(_drawn(item, tip, drawn))
    for number, axis in enumerate(axes):
        x = across(number)
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{AXIS_TOP}" y2="{AXIS_TOP + AXIS_HEIGHT}"/>')
        parts.append(_title(axis.title, x, 14 if number % 2 else 32))
        marks = axis.marks()
        for text, share in marks[:: -(-len(marks) // MOST_MARKS) or 1]:
            parts.append(f'<text class="mark" x="{x + 6:.1f}" y="{down(share) + 4:.1f}">{escape(_short(text))}</text>')
    limits = f"min-width: {width * 0.75:.0f}px; max-width: {width * 1.25:.0f}px"
    box = f'viewBox="0 0 {width} {AXIS_TOP + AXIS_HEIGHT + 14}" style="{limits}"'
    drawing = f'<svg {box} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    return f'<figure class="chart parallel">{drawing}</figure>'


def _drawn(item: Item, tip: str, shapes: str) -> str:
    inside = f"<title>{escape(tip)}</title>{shapes}"
    if not item.link:
        return f'<g class="{item.tone}">{inside}</g>'
    return f'<a href="{escape(item.link)}" class="{item.tone}">{inside}</a>'


def _title(text: str, x: float, y: float) -> str:
    return f'<text class="title" x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _short(text: str) -> str:
    return text if len(text) <= 18 else f"{text[:17]}…"


def dots(items: Sequence[Item], x: Axis, y: Axis, label: str) -> str:
    """A dot for each item of which both numbers are known, and a line through those on the front."""
    numbers = [(float(a), float(b)) for a, b in zip(x.values, y.values, strict=True)]
    known = [(a, b, item) for (a, b), item in zip(numbers, items, strict=True) if not math.isnan(a + b)]
    if not known:
        return '<p class="none">nothing to draw yet</p>'
    (x_low, x_high), (y_low, y_high) = _range([a for a, _, _ in known]), _range([b for _, b, _ in known])

    def across(value: float) -> float:
        return LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(value: float) -> float:
        return TOP + (y_high - value) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in ticks(y_low, y_high, 5):
        at = f"{down(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for value in ticks(x_low, x_high, 6):
        parts.append(f'<text x="{across(value):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{value:.6g}</text>')
    on_front = sorted((a, b) for a, b, item in known if item.tone)
    corners = " ".join(f"{across(a):.1f},{down(b):.1f}" for a, b in on_front)
    parts.append(f'<polyline class="frontline" points="{corners}"/>')
    for a, b, item in known:
        tip = f"{item.name}: {a:.6g}{x.unit}, {b:.6g}{y.unit}"
        dot = f'<circle cx="{across(a):.1f}" cy="{down(b):.1f}" r="{6 if item.tone == "best" else 4.5}"/>'
        parts.append(_drawn(item, tip, dot))
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 2}" text-anchor="middle">{escape(x.title)}</text>')
    return (
        f'<figure class="chart dots"><figcaption>{escape(y.title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg></figure>'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    margin = (max(values) - min(values) or abs(max(values)) or 1) * 0.06
    return min(values) - margin, max(values) + margin
