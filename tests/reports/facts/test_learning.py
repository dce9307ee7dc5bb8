"""Where runs first reached a quality, by hand-made evaluations."""

from __future__ import annotations

import pandas as pd
import pytest

from megatron_ext.contract.goal import Target
from reports.facts.learning import Learned, qualities, time_to_quality


def run(
    metric: str, values: list[float], hours: list[float], target: str | None = None, larger: bool = True
) -> Learned:
    steps = range(1, len(values) + 1)
    rows = {"iteration": [10 * step for step in steps], "samples": [100.0 * step for step in steps]}
    table = pd.DataFrame({**rows, "hours": hours, "dollars": [2 * one for one in hours], metric: values})
    return Learned(evaluations=table, larger={metric: larger}, target=None if target is None else Target.parse(target))


SLOW = run("bleu", [5.0, 20.0, 24.0], [1.0, 2.0, 3.0], "bleu>=22")
FAST = run("bleu", [10.0, 18.0, 15.0], [0.5, 1.0, 1.5])


def test_all_reach_what_the_worst_reached_and_only_some_what_the_best_did() -> None:
    rows = time_to_quality([SLOW, FAST])
    assert [(row.quality, row.run, row.at and (row.at["iteration"], row.at["dollars"])) for row in rows] == [
        (18.0, 1, (20, 2.0)),
        (18.0, 0, (20, 4.0)),
        (22.0, 0, (30, 6.0)),
        (22.0, 1, None),
        (24.0, 0, (30, 6.0)),
        (24.0, 1, None),
    ]


def test_of_a_loss_less_is_better() -> None:
    runs = [run("loss", values, [1.0, 2.0], larger=False) for values in ([3.0, 2.0], [2.5, 2.25])]
    assert qualities("loss", runs) == [2.25, 2.0]
    rows = time_to_quality(runs)
    assert [(row.run, row.quality, row.at is None) for row in rows] == [
        (0, 2.25, False),
        (1, 2.25, False),
        (0, 2.0, False),
        (1, 2.0, True),
    ]


def test_sums_in_another_order_are_no_other_quality() -> None:
    """Of runs that learn the same, and one that learns less."""
    same = [run("loss", [3.0, last], [1.0, 2.0], larger=False) for last in (2.0, 2.0 + 1e-7)]
    assert qualities("loss", same) == [2.0 + 1e-7]
    rows = time_to_quality([*same, run("loss", [3.0, 2.5], [1.0, 2.0], larger=False)])
    assert [row.run for row in rows if row.quality == 2.0 and row.at is not None] == [0, 1]


def test_what_is_missing_reaches_nothing() -> None:
    broken = run("bleu", [float("nan"), 30.0], [1.0, 2.0])
    assert time_to_quality([broken])[0].at == {"iteration": 20, "samples": 200, "hours": 2.0, "dollars": 4.0}


def test_metrics_that_only_one_run_has_are_its_own() -> None:
    rows = time_to_quality([SLOW, run("top-1", [0.5], [1.0])])
    assert {(row.metric, row.run) for row in rows} == {("bleu", 0), ("top-1", 1)}


def test_nothing_evaluated_is_no_table() -> None:
    assert time_to_quality([Learned(), Learned()]) == []


@pytest.mark.parametrize("runs", [[SLOW, FAST], [FAST, SLOW]])
def test_the_qualities_do_not_depend_on_the_order_of_the_runs(runs: list[Learned]) -> None:
    assert qualities("bleu", runs) == [18.0, 22.0, 24.0]
