"""The engine with sleeping layers takes the times that it is given, also where a schedule splits the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import sleeping
from benchmarks.accuracy_cases import ENGINE, SLEEPING
from benchmarks.sleeping import Pass
from conf.compose import compose
from reports.readers.events import read_run
from tests.support.reports.records import records

PLAN = ("parallel=single", "parallel.pipeline=2", "parallel.micro_batch_size=1", "parallel.global_batch_size=4")
TIMES = (Pass(forward=0.02, backward=0.06), Pass(forward=0.01, backward=0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("one_f_one_b", {"forward-compute": (0.02, 0.01), "backward-compute": (0.06, 0.1)}),
        (
            "zb_h1",
            {
                "forward-compute": (0.02, 0.01),
                "backward-input-compute": (0.03, 0.05),
                "backward-weight-compute": (0.03, 0.05),
            },
        ),
    ],
    ids=["1f1b", "zb-h1"],
)
def test_every_pass_sleeps_as_long_as_it_is_given_and_a_split_one_half_of_it_each(
    tmp_path: Path, schedule: str, parts: dict[str, tuple[float, float]]
) -> None:
    """A busy machine makes some passes longer, and none shorter: the fastest tells."""
    experiment = compose([*SLEEPING, *PLAN, f"parallel.schedule={schedule}"])
    run = sleeping.run(tmp_path, experiment, TIMES)
    timeline = read_run({rank: run.rank_events(rank) for rank in range(2)})
    events = records(timeline)
    took = (events["end_ns"] - events["start_ns"]) / 1e9
    for name, seconds in parts.items():
        for rank in range(2):
            mine = took[(events["rank"] == rank) & (events["name"] == timeline.names.index(name))]
            assert len(mine) == experiment.train.iterations * 4
            assert seconds[rank] <= mine.min() < seconds[rank] + 0.01


def test_the_table_has_the_schedule_that_searches_of_the_seeds_recommend() -> None:
    assert sum("parallel.schedule=zb_h1" in case.overrides for case in ENGINE) >= 3
