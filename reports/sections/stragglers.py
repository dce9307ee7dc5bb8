"""Ranks that compute longer than the others of their stage, and iterations that take longer than usual."""

from __future__ import annotations

from html import escape

import numpy as np

from conf.visible import plural
from megatron_ext.contract.plan import Plan
from reports.facts.frames import stragglers_frame
from reports.facts.statistics import SLOW_RANK, Statistics
from reports.figures.page import Names, table

SLOW_ITERATION = 1.5
"""Times the median length, where the batch changes per sample, from which an iteration is named."""
MOST = 10


def stragglers_section(figures: Statistics, plan: Plan) -> str:
    """The section of a run's page, as HTML; nothing without a steady iteration."""
    if not figures.steady.any():
        return ""
    found = stragglers_frame(figures, plan)
    longer = f"over {SLOW_RANK - 1:.0%} longer than the others of {'their' if len(found) > 1 else 'its'} stage"
    if plan.data * plan.tensor == 1:
        said = "Every stage has one rank, so there is no peer to compare with."
    elif len(found):
        said = f"{plural(len(found), 'rank')} of {len(plan.ranks)} computed {longer}."
    else:
        said = f"No rank computed {longer}."
    rows = [
        (
            str(one.rank),
            Names([one.node]),
            str(one.stage),
            f"{one.compute_ms:,.1f}",
            f"{one.others_ms:,.1f}",
            f"{one.more:+.1%}",
        )
        for one in found.head(MOST).itertuples()
    ]
    ranks = table(("rank", "node", "stage", "compute ms", "others ms", "more"), rows) if rows else ""
    return f"<section><h2>Stragglers</h2><p>{escape(said)}</p>{ranks}<p>{escape(_iterations(figures))}</p></section>"


def _iterations(figures: Statistics) -> str:
    samples = figures.samples[figures.steady]
    lengths = figures.length_ns[figures.steady] / samples
    median = "the median" if (figures.samples == 1).all() else "the median per sample"
    # A small batch takes longer per sample because of what every iteration takes, so it must be slow for its size, too.
    usual = np.full(len(lengths), np.median(lengths))
    for batch in set(samples.tolist()):
        of_batch = samples == batch
        usual[of_batch] = np.maximum(usual[of_batch], np.median(lengths[of_batch]))
    slow = [int(number) for number in figures.iterations[figures.steady][lengths > SLOW_ITERATION * usual]]
    if not slow:
        return f"No iteration after the first took over {SLOW_ITERATION:g} times {median}."
    named = ", ".join(map(str, slow[:MOST])) + (f" and {len(slow) - MOST:,} more" if len(slow) > MOST else "")
    return f"{plural(len(slow), 'iteration')} took over {SLOW_ITERATION:g} times {median}: {named}."
