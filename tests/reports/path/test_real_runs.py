"""Real ranks of the engine, with a cause that is known: what gains most is that cause, on the page as well.

Ranks sleep instead of computing, and one or one stage sleeps several times as long: a busy machine cannot hide that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import sleeping
from benchmarks.accuracy_cases import SLEEPING
from benchmarks.sleeping import Pass, Slowness, as_given
from conf.compose import compose
from reports.facts.statistics import statistics
from reports.path.change import Cause
from reports.path.why import Why, explain
from reports.readers import record
from reports.readers.events import read_run
from reports.sections.cause_section import cause_section

LAYER = Pass(forward=0.02, backward=0.04)


def slow_second_rank(rank: int, _iteration: int) -> float:
    return 4.0 if rank == 1 else 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "partition", "slowness", "cause", "said"),
    [
        pytest.param((2, 2), (1, 1), slow_second_rank, Cause.RANK, "Rank 1 on ", id="slow-rank"),
        pytest.param(
            (3, 1), (1, 4, 1), as_given, Cause.PARTITION, "Stage 1 computes the longest", id="uneven-partition"
        ),
    ],
)
def test_the_page_of_a_real_run_names_the_cause(
    tmp_path: Path, sizes: tuple[int, int], partition: Sequence[int], slowness: Slowness, cause: Cause, said: str
) -> None:
    stages, replicas = sizes
    experiment = compose(
        [
            *SLEEPING,
            *("parallel=single", f"parallel.pipeline={stages}", f"parallel.data={replicas}"),
            *("parallel.micro_batch_size=1", f"parallel.global_batch_size={4 * replicas}", "train.iterations=3"),
            *(f"model.layers={sum(partition)}", f"parallel.partition={'-'.join(map(str, partition))}"),
        ]
    )
    times = [Pass(forward=count * LAYER.forward, backward=count * LAYER.backward) for count in partition]
    run = sleeping.run(tmp_path, experiment, times, slowness)
    known = record.read(run)
    timeline = read_run({place.rank: run.rank_events(place.rank) for place in known.plan.ranks})
    why = explain(timeline, known.plan, statistics(timeline, known.plan.ranks))
    assert isinstance(why, Why)
    assert why.gains[0].cause == cause
    assert why.length_ms == pytest.approx(why.replayed_ms, rel=0.05)
    assert said in cause_section(why, known.plan)
