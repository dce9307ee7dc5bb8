"""The iteration that pages show and explain takes about as long as the median of the log."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conf.run_folder.rundir import RunDir
from reports.facts.statistics import batches, statistics, time_of, usual_first
from reports.readers import record
from reports.readers.events import read_run
from reports.readers.json_lines import Decision, metrics_lines
from reports.readers.record import Record, metrics_frame
from tests.support.reports.synthetic import Shape, make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Record:
    run = RunDir(tmp_path_factory.mktemp("runs") / "tiny/20260101-000000-aaaa")
    make_run(run.path, Shape(iterations=6))
    return record.read(run)


def logged(known: Record, *lines: tuple[int, float, int]) -> Record:
    """With lines of an iteration, its elapsed ms and the consumed samples."""
    keys = ("iteration", "elapsed_ms", "consumed_samples")
    return replace(known, metrics=metrics_frame([dict(zip(keys, line, strict=True)) for line in lines]))


def chosen(known: Record, lasts_ms: list[float], first: int = 2) -> list[int]:
    iterations = np.arange(first, first + len(lasts_ms))
    order = usual_first(known, iterations, np.array(lasts_ms), batches(known, iterations))
    return [int(iterations[at]) for at in order]


def test_where_lengths_vary_it_is_an_iteration_near_the_median_and_none_of_the_shorter_ones(made: Record):
    lasts = [208.0, 337, 205, 410, 209, 338, 207, 400, 336, 500]
    known = logged(made, (1, 3000, 8), *((2 + at, ms, 8 * (2 + at)) for at, ms in enumerate(lasts)))
    time = time_of(known)
    assert time is not None
    assert time.ms == np.median(lasts)
    assert chosen(known, lasts)[0] in (3, 7, 10)


def test_an_iteration_is_near_the_median_by_its_line_as_well_as_by_its_events(made: Record):
    """What the log counts and events do not, such as a checkpoint, makes an iteration unusual."""
    by_line = [100.0, 101, 180, 99, 130]
    by_events = [100.0, 130, 100, 99, 100]
    known = logged(made, (1, 900, 8), *((2 + at, ms, 8 * (2 + at)) for at, ms in enumerate(by_line)))
    assert set(chosen(known, by_events)[:2]) == {2, 5}


def test_of_lines_that_are_means_the_iteration_is_near_their_median(made: Record):
    known = logged(made, (10, 900, 80), (20, 140, 160), (30, 141, 240), (40, 139, 320))
    lasts = [100.0] * 10 + [139.0] + [180.0] * 9
    assert chosen(known, lasts)[0] == 12


def test_an_iteration_in_a_line_that_is_far_from_the_median_is_not_usual(made: Record):
    """So is one in the first line, which has the start-up in it."""
    known = logged(made, (5, 400, 40), (10, 200, 80), (15, 101, 120), (20, 100, 160), (25, 99, 200))
    assert chosen(known, [100.0] * 24)[0] in range(11, 21)


def test_where_only_the_first_line_has_events_they_decide_alone(made: Record):
    known = logged(made, (10, 400, 80), (20, 100, 160))
    assert chosen(known, [90.0, 104, 101, 140])[0] in (3, 4)


def test_a_log_that_is_always_above_the_events_makes_no_long_iteration_usual(made: Record):
    known = logged(made, (10, 900, 80), (20, 150, 160), (30, 150, 240))
    assert chosen(known, [100.0, 101, 99, 100, 100, 160])[0] in (3, 2, 5, 6)


def test_without_a_log_it_is_the_median_of_the_events():
    iterations, lasts = np.arange(5), np.array([5.0, 1, 3, 9, 2])
    assert usual_first(None, iterations, lasts, np.ones(5))[0] == 2
    assert not len(usual_first(None, iterations[:0], lasts[:0], lasts[:0]))


def decided(iteration: int, before: int, after: int) -> Decision:
    values: dict[str, Any] = {"shares_before": (1,), "shares": (1,), "learning_rate_factor": 1.0, "reason": ""}
    return Decision(iteration=iteration, consumed_samples=0, before=before, global_batch_size=after, **values)


def test_where_the_batch_changes_it_is_one_of_the_most_frequent_batch_near_the_median_per_sample(made: Record):
    known = logged(
        made,
        *((number, 80.0, 8 * number) for number in range(1, 5)),
        *((number, 330.0 + number, 32 + 32 * (number - 4)) for number in range(5, 12)),
    )
    known = replace(known, decisions=(decided(2, 8, 8), decided(4, 8, 32)))
    iterations = np.arange(2, 12)
    assert batches(known, iterations).tolist() == [8] * 3 + [32] * 7
    time = time_of(known)
    assert time is not None
    assert time.per_sample
    assert 10 < time.ms < 11
    assert chosen(known, [80.0] * 3 + [330.0 + number for number in range(5, 12)])[0] in range(5, 12)


def test_a_log_alone_tells_the_batches_of_iterations_as_well(made: Record):
    known = logged(made, (10, 80, 80), (20, 80, 160), (30, 320, 480), (40, 320, 800))
    assert batches(known, np.array([5, 10, 11, 21, 30, 31, 45])).tolist() == [8, 8, 8, 32, 32, 32, 32]
    same = logged(made, (10, 80, 80), (20, 80, 160), (30, 90, 240))
    assert batches(same, np.array([5, 25])).tolist() == [1, 1]


def test_pages_show_the_first_of_them(made: Record):
    run = RunDir(made.diff.parent)
    figures = statistics(
        read_run({place.rank: run.rank_events(place.rank) for place in made.plan.ranks}), made.plan.ranks
    )
    assert len(figures.usual)
    assert set(figures.usual.tolist()) == set(np.flatnonzero(figures.steady).tolist())
    assert figures.middle == figures.usual[0]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_infinite_times_and_samples_in_a_log_do_not_count_and_a_log_may_begin_with_iteration_0(made: Record):
    """Batches grow by one sample, so times are compared per sample."""
    notes: list[str] = []
    lines = [{"iteration": at, "elapsed_ms": 100.0 + at, "consumed_samples": at * (at + 17) // 2} for at in range(6)]
    texts = [json.dumps(line).replace("103.0", "1e999").replace(": 63}", ": 1e999}") for line in lines]
    known = replace(made, metrics=metrics_frame(metrics_lines(texts, "metrics.jsonl", notes)), decisions=())
    time = time_of(known)
    assert time is not None
    assert np.isfinite(time.each_ms).all()
    assert sorted(chosen(known, [101.0, 102, 103, 104, 105], first=1)) == [1, 2, 3, 4, 5]
    whole = logged(made, *((line["iteration"], line["elapsed_ms"], line["consumed_samples"]) for line in lines))
    assert batches(whole, np.arange(1, 6)).tolist() == [9, 10, 11, 12, 13]
