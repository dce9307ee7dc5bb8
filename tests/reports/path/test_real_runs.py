"""Real ranks of the engine, with a cause that is known: the page begins with it; without one, it names none.

Ranks sleep instead of computing, and what is wrong sleeps several times as long: a busy machine cannot hide that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import sleeping
from benchmarks.accuracy_cases import SLEEPING
from benchmarks.sleeping import Late, Pass, Slowness, as_given, in_time
from conf.compose import compose
from reports.facts.statistics import statistics
from reports.path.change import Cause
from reports.path.links import Allowed
from reports.path.why import ITERATIONS, Why, explain
from reports.readers import record
from reports.readers.events import read_run
from reports.sections.cause_section import cause_in_words, cause_section

LAYER = Pass(forward=0.02, backward=0.04)


def slow_second_rank(rank: int, _iteration: int) -> float:
    return 3.0 if rank == 1 else 1.0


def late(seconds: float, *names: str) -> Callable[[str, int], float]:
    return lambda name, _rank: seconds if name in names else 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
    stages: int = 2
    replicas: int = 2
    partition: Sequence[int] = (1, 1)
    slowness: Slowness = as_given
    late: Late = in_time
    cause: Cause | None
    said: str


CASES = {
    "slow-rank": Case(slowness=slow_second_rank, cause=Cause.RANK, said="Rank 1 on "),
    "slow-link": Case(late=late(0.1, "forward-recv", "backward-recv"), cause=Cause.LINK, said="A message from stage "),
    "uneven-cut": Case(
        stages=3, replicas=1, partition=(1, 4, 1), cause=Cause.PARTITION, said="Stage 1 computes the longest"
    ),
    "late-data": Case(late=late(0.3, "batch-generator"), cause=Cause.DATA, said="Loading data takes "),
    "large-embedding": Case(
        late=late(0.3, "embedding-grads-all-reduce"), cause=Cause.EMBEDDING, said="The embedding's all-reduce takes "
    ),
    "nothing-wrong": Case(cause=None, said="No single cause stands out: "),
}


def explained(folder: Path, case: Case) -> tuple[Why, str]:
    """And the section of the page."""
    layers = sum(case.partition)
    experiment = compose(
        [
            *SLEEPING,
            *("parallel=single", f"parallel.pipeline={case.stages}", f"parallel.data={case.replicas}"),
            *("parallel.micro_batch_size=1", f"parallel.global_batch_size={4 * case.replicas}", "train.iterations=12"),
            *(f"model.layers={layers}", f"parallel.partition={'-'.join(map(str, case.partition))}"),
        ]
    )
    times = [Pass(forward=count * LAYER.forward, backward=count * LAYER.backward) for count in case.partition]
    run = sleeping.run(folder, experiment, times, case.slowness, case.late)
    known = record.read(run)
    timeline = read_run({place.rank: run.rank_events(place.rank) for place in known.plan.ranks})
    allowed = Allowed.of(known.plan, experiment.cluster, known.traffic)
    why = explain(timeline, known.plan, statistics(timeline, known.plan.ranks, known), allowed=allowed)
    assert isinstance(why, Why)
    return why, cause_section(why, known.plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_page_of_a_real_run_names_the_cause_that_it_has(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    why, section = explained(tmp_path, case)
    assert len(why.iterations) == ITERATIONS
    assert (why.cause.cause if why.cause else None) == case.cause, cause_in_words(why)
    assert case.said in section.replace("&#x27;", "'").split("</p>")[0]
    assert why.length_ms == pytest.approx(why.replayed_ms, rel=0.05)
