"""Of real runs of every kind of layout, the figures are those that the raw files give by another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.run_folder.rundir import RunDir
from reports.facts.statistics import statistics
from reports.readers import record
from reports.readers.events import read_run
from tests.support.reports.layouts import LAYOUTS, run_of
from tests.support.reports.raw_events import passes, raw_events, waited

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", LAYOUTS)
def test_lengths_and_bubbles_are_those_of_the_raw_files(name: str, layouts: Path):
    one = LAYOUTS[name]
    run = RunDir(run_of(name, layouts))
    known = record.read(run)
    plan = known.plan
    assert len(plan.ranks) == one.ranks and (plan.stream is not None) == one.streams
    figures = statistics(read_run({rank: run.rank_events(rank) for rank in range(one.ranks)}), plan.ranks, known)
    raw = raw_events(run.path, one.ranks)
    idle = waited(raw, one.stages, one.streams)
    shares = np.zeros((one.ranks, len(figures.iterations)))
    for column, iteration in enumerate(figures.iterations.tolist()):
        own = [event for event in raw if event.iteration == iteration]
        assert figures.length_ns[column] == max(e.end for e in own) - min(e.start for e in own)
        for rank in range(one.ranks):
            busy = passes(raw, rank, iteration)
            shares[rank, column] = idle[rank, iteration] / (busy + idle[rank, iteration])
    assert figures.bubble_share == pytest.approx(shares, abs=1e-9)
    assert figures.bubble == pytest.approx(np.median(shares[:, figures.steady], axis=1).mean(), abs=1e-9)
    if one.stages > 1:
        assert figures.bubble > 0.01
    else:
        assert figures.bubble == 0
