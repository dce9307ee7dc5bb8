"""What a comparison begins with: which configuration is best, or that the differences may be noise."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from conf.identity import of_speed
from conf.run_folder.iteration_time import Spread
from conf.visible import plural
from reports.pages.comparison import ALL_OF, Front, Outcome, Pool, Ranking, swept


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A figure of an Outcome."""

    field: str
    title: str
    form: str
    scale: float = 1.0
    bar: bool = True
    """Whether the table shows it as a bar as well."""

    def of(self, pool: Pool) -> float:
        return self.scale * pool.value(self.field)

    def cell(self, spread: Spread) -> str:
        """The median with what it is worth; without a doubt where it is one value that does not vary."""
        shown = f"{spread.median * self.scale:{self.form}}"
        if spread.count == 1 and spread.half == 0:
            return shown
        return f"{shown}<br><small>{spread.doubt(self._half)}</small>"

    def _half(self, half: float) -> str:
        """Writes a spread with as many digits as its median has, but at least one that is not 0."""
        text = format(half * self.scale, self.form)
        return text if re.search("[1-9]", text) or not half else f"{half * self.scale:.1g}"


QUANTITIES = (
    Quantity(field="iteration_ms", title="iteration ms", form=",.1f"),
    Quantity(field="sample_ms", title="sample ms", form=",.4g"),
    Quantity(field="tokens_per_s", title="tokens/s", form=",.0f"),
    Quantity(field="samples_per_s", title="samples/s", form=",.1f"),
    Quantity(field="utilisation", title="utilisation %", form=".1f", scale=100),
    Quantity(field="dollars", title="$ per million tokens", form=",.3f"),
    Quantity(field="memory_gib", title="memory GiB", form=",.2f"),
    Quantity(field="loss", title="last loss", form=".4f", bar=False),
)
AGAINST = {"dollars": "cost", "memory_gib": "memory"}
MOST_KEYS = 6
"""So many keys that differ are shown beside the runs; the others are in a table of their own."""
MOST_NAMED = 4
"""Configurations of which none is clearly the best that are named."""
ALL_NAMES = tuple(f"{part}.name" for part in ALL_OF)
DOUBT = (
    "±: half the distance between the 16th and 84th percentiles of the n log lines. Figures that differ by no more "
    "than the sum of their ± may differ by chance."
)


def answer(ranked: Ranking | None, pareto: Front | None, outcomes: Sequence[Outcome]) -> str:
    """The section, as HTML."""
    failures = sum(one.failed for one in outcomes)
    sound = [one for one in outcomes if not one.failed]
    counted = f"{plural(len(sound), 'run')} to compare{f', {failures} without a result' if failures else ''}."
    if emulated := sum(one.emulated for one in sound):
        counted += f" {emulated} of them rehearsed, with emulated times"
        counted += "; only the others are ranked." if emulated < len(sound) else "."
    if ranked is None:
        return f'<section class="verdict bad"><h2>No result</h2><p class="reason">{escape(counted)}</p></section>'
    differ = _differing(ranked.pools)
    can = [of_speed(one.settings) for one in sound]
    idle = [key for key in swept(sound) if len({one.get(key) for one in can}) == 1 and key not in ALL_NAMES]
    if idle:
        verb = "do" if len(idle) > 1 else "does"
        counted += (
            f" {_and(idle)} {verb} not change how long an iteration takes: runs that differ in nothing else count "
        )
        counted += "as one configuration for speed."
    if pareto:
        counted += f" {len(pareto.runs)} on the Pareto front of throughput and {AGAINST[pareto.against]}."
    if ranked.best is not None:
        last = ranked.pools[-1]
        gain = ranked.speed(ranked.best).median / ranked.speed(last).median
        title, tone = f"Best: {_named(ranked.best, differ)}", "good"
        best, slowest = _figures(ranked, ranked.best), _figures(ranked, last)
        message = f"{best}, {gain:.2f} times as fast as the slowest ({slowest})."
    elif len(ranked.pools) > 1:
        near = ranked.contenders
        title, tone = "No clear best", "open"
        others = len(ranked.pools) - len(near)
        listed = "<br>".join(f"{escape(_named(pool, differ))}: {_figures(ranked, pool)}" for pool in near[:MOST_NAMED])
        more = f"<br>and {len(near) - MOST_NAMED} more" if len(near) > MOST_NAMED else ""
        slower = f"<br>{plural(others, 'other')} {'are' if others > 1 else 'is'} slower." if others else ""
        message = f"{len(near)} configurations are within the spread of their iterations:<br>{listed}{more}{slower}"
    else:
        title, tone = "One configuration", "good"
        message = f"{_figures(ranked, ranked.pools[0])}."
    return (
        f'<section class="verdict {tone}"><h2>{escape(title)}</h2><p class="reason">{message}</p>'
        f'<p class="note">{escape(counted)} {escape(DOUBT)}</p></section>'
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _differing(pools: Sequence[Pool]) -> list[str]:
    """The keys that can change the speed and do differ between these, for their names."""
    settings = [of_speed(pool.runs[0].settings) for pool in pools]
    differ = [key for key in swept([run for pool in pools for run in pool.runs]) if key not in ALL_NAMES]
    return [
        *(key for key in ALL_NAMES if len({pool.runs[0].settings.get(key) for pool in pools}) > 1),
        *(key for key in differ if len({one.get(key) for one in settings}) > 1),
    ]


def _named(pool: Pool, keys: Sequence[str]) -> str:
    """Names a pool by the keys in which it differs from others."""
    return ", ".join(f"{key}={pool.setting(key)}" for key in keys[:MOST_KEYS]) or pool.runs[0].name


def _figures(ranked: Ranking, pool: Pool) -> str:
    """How fast it is and what an iteration takes, as HTML, with links to its runs."""
    by_field = {quantity.field: quantity for quantity in QUANTITIES}
    parts = []
    for name in dict.fromkeys((ranked.field, "iteration_ms", "sample_ms")):
        found, quantity = pool.spread(name), by_field[name]
        if found is not None:
            unit = {"iteration_ms": "ms per iteration", "sample_ms": "ms per sample"}.get(name, quantity.title)
            form = quantity.form
            half = "" if math.isnan(found.half) else f" ± {found.half * quantity.scale:{form}}"
            parts.append(f"{found.median * quantity.scale:{form}}{half} {unit}")
            count = found.count
    more = f" and {plural(len(pool.runs) - 1, 'more run')}" if len(pool.runs) > 1 else ""
    return f"{link(pool.runs[0])}{more}: {', '.join(parts)} (n = {count:,})"


def link(one: Outcome) -> str:
    """To its page, as HTML."""
    return f'<a href="{escape(one.link)}">{escape(one.name)}</a>'
