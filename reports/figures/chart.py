"""Line charts as SVG that take their colours from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34
MOST = 1200
"""Points of a series."""


@dataclass(frozen=True)
class Series:
    """Points of one quantity; not-a-number breaks the line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = True
    """Joined by a line; otherwise only dots."""


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def thinned(series: Series) -> Series:
    """At most MOST points: of each span of a longer series the lowest and the highest, and its first gap.

    A chart is 560 pixels wide, and a page has to carry every point.
    """
    if len(series.y) <= MOST:
        return series
    kept = set[int]()
    span = -(-len(series.y) * 3 // MOST)
    for begin in range(0, len(series.y), span):
        indices = range(begin, min(begin + span, len(series.y)))
        finite = [index for index in indices if math.isfinite(series.y[index])]
        kept.update([min(finite, key=series.y.__getitem__), max(finite, key=series.y.__getitem__)] if finite else ())
        kept.update([index for index in indices if not math.isfinite(series.y[index])][:1])
    order = sorted(kept)
    return replace(series, x=[series.x[index] for index in order], y=[series.y[index] for index in order])


def lines(series: Sequence[Series], *, x_title: str, y_title: str, label: str, from_zero: bool = False) -> str:
    """A chart of one or more series over a common x.

    Args:
        label: what the chart shows, for those who cannot see it.
        from_zero: let the y axis begin at 0.
    """
    series = [thinned(one) for one in series]
    points = [(x, y) for one in series for x, y in zip(one.x, one.y, strict=True) if math.isfinite(y)]
    if not points:
        return '<p class="none">nothing to draw yet</p>'
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    margin = (y_high - y_low or abs(y_high) or 1) * 0.06
    y_low, y_high = (0.0 if from_zero else y_low - margin), y_high + margin
    x_span = x_high - x_low or 1

    def across(x: float) -> float:
        return LEFT + (x - x_low) / x_span * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in ticks(y_low, y_high, 5):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:.6g}</text>')
    counted = all(float(x).is_integer() for x, _ in points)  # as iterations, of which there is no half
    for x in (x for x in ticks(x_low, x_high, 8) if not counted or float(x).is_integer()):
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{x:.6g}</text>')
    for number, one in enumerate(series, 1):
        runs: list[list[str]] = [[]]
        for x, y in zip(one.x, one.y, strict=True):
            if not math.isfinite(y):
                runs.append([])
                continue
            runs[-1].append(f"{across(x):.1f},{down(y):.1f}")
            tip = f"{one.name}: {y:.6g} at {x_title} {x:g}"
            parts.append(
                f'<circle class="series{number}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.5">'
                f"<title>{escape(tip)}</title></circle>"
            )
        if one.line:
            parts += [f'<polyline class="series{number}" points="{" ".join(run)}"/>' for run in runs if len(run) > 1]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">{escape(x_title)}</text>'
    )
    key = "".join(f'<span class="key series{number}">{escape(one.name)}</span>' for number, one in enumerate(series, 1))
    return (
        f'<figure class="chart"><figcaption>{escape(y_title)}{key if len(series) > 1 else ""}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg></figure>'
    )
