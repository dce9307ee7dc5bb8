"""What got slower from one run to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from megatron_ext.contract.plan import Plan
from reports.facts.difference import KINDS, Usual, changes, in_words, usual
from reports.facts.statistics import statistics
from tests.support.reports.constructed import Course, plan_of, timeline_of
from tests.support.reports.in_browser import events_of
from tests.support.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=3, data=2, micro_batches=4, iterations=5, layers=12)


def made(iteration_ms: float, **of_stage: dict[str, float]) -> Usual:
    stages = {int(name[1:]): dict.fromkeys(KINDS, 0.0) | kinds for name, kinds in of_stage.items()}
    return Usual(
        iteration_ms=iteration_ms,
        longer_ms=0.0,
        between_ms=0.0,
        stages=stages,
        ranks=stages,
        stage_of={n: n for n in stages},
    )


def test_the_work_that_takes_longer_is_named_and_the_idle_time_that_follows_from_it_is_not():
    before = made(900.0, s1={"backward": 500.0, "idle": 300.0, "data": 10.0}, s2={"backward": 500.0, "idle": 300.0})
    after = made(1020.0, s1={"backward": 500.0, "idle": 395.0, "data": 35.0}, s2={"backward": 595.0, "idle": 300.0})
    assert in_words(before, after) == (
        "B is 120.0 ms slower per iteration (1,020.0 against 900.0 ms, +13%): 95.0 ms more in stage 2's backward "
        "passes, 25.0 ms more in stage 1's data."
    )
    assert in_words(after, before) == (
        "B is 120.0 ms faster per iteration (900.0 against 1,020.0 ms, -12%): 95.0 ms less in stage 2's backward "
        "passes, 25.0 ms less in stage 1's data."
    )
    found = [(one.stage, one.kind, one.more) for one in changes(before, after)]
    assert found[0][2] == 95.0
    assert found[-1][2] == 0.0
    assert ("1", "messages", 0.0) not in found, "no row of zeros"


def test_runs_that_are_alike_are_called_so_and_waiting_alone_is_named_where_no_work_differs():
    before = made(900.0, s0={"idle": 100.0})
    assert in_words(before, made(901.0, s0={"idle": 101.0})).startswith("B is as fast as A: 901.0 against 900.0 ms")
    assert in_words(before, made(1000.0, s0={"idle": 200.0})).endswith(": 100.0 ms more in stage 0's idle time.")


def test_runs_of_different_stages_are_compared_by_the_means_over_them():
    before, after = made(10.0, s0={"forward": 4.0}), made(12.0, s0={"forward": 4.0}, s1={"forward": 8.0})
    (found,) = changes(before, after)
    assert (found.stage, found.before, found.after) == (None, 4.0, 6.0)


def of_run(folder: Path, shape: Shape) -> tuple[Usual, Plan]:
    make_run(folder, shape)
    plan = RunDir(folder).read_plan()
    timeline = events_of(folder, shape.ranks)
    found = usual(timeline, statistics(timeline, plan.ranks), plan)
    assert found is not None
    return found, plan


def test_the_kinds_of_a_stage_are_its_iteration_and_more_layers_show_where_they_are(tmp_path: Path):
    before, _ = of_run(tmp_path / "runs/a/20260101-000000-aaaa", SHAPE)
    for kinds in before.stages.values():
        assert sum(kinds.values()) == pytest.approx(before.iteration_ms)
        assert kinds["data"] == pytest.approx(4 * 0.3, rel=0.2), "4 batches, 0.3 ms each"
    after, plan = of_run(tmp_path / "runs/b/20260101-000000-bbbb", replace(SHAPE, layers=13))
    assert plan.partition[0] == 5
    slower = [one for one in changes(before, after) if one.kind in ("forward", "backward")]
    assert {(one.stage, one.kind) for one in slower[:2]} == {("0", "backward"), ("0", "forward")}
    assert "stage 0's backward passes" in in_words(before, after)


FOUR = Course(partition=(4, 4), replicas=(4, 4), ranks_per_node=4, iterations=13)
PAIRS = {
    "rank": (replace(FOUR, pace=lambda rank, _: 2.0 if rank == 5 else 1.0), "rank 5's backward passes (stage 1)"),
    "link": (
        replace(FOUR, link=lambda *ranks: (40.0 if ranks[:2] == (1, 5) else 0.05, 0.1)),
        "rank 5's messages (stage 1)",
    ),
    "data": (replace(FOUR, data=lambda rank, _: 100.0 if rank == 1 else 0.5), "rank 1's data (stage 0)"),
    "optimizer": (replace(FOUR, optimizer=lambda rank, _: 100.0 if rank == 6 else 3.0), "rank 6's optimizer (stage 1)"),
    "gradients": (replace(FOUR, gradients_sum=lambda stage: 3.0 + 90 * stage), "stage 1's all-reduce"),
    "between": (
        replace(FOUR, between=lambda *_: 200.0),
        "200.0 ms more between two iterations. In the median, B is as",
    ),
    "now-and-then": (
        replace(FOUR, pace=lambda rank, iteration: 3.0 if rank == 5 and iteration % 4 == 0 else 1.0),
        "ms more in iterations that take longer than the median",
    ),
}


@pytest.mark.parametrize(("other", "said"), PAIRS.values(), ids=PAIRS)
def test_what_is_wrong_with_one_rank_or_now_and_then_is_named(other: Course, said: str):
    known = []
    for course in (FOUR, other):
        plan = plan_of(course)
        timeline = timeline_of(course, plan)
        known.append(usual(timeline, statistics(timeline, plan.ranks), plan))
    assert known[0] and known[1]
    assert said in in_words(known[0], known[1])


def test_several_ranks_that_change_alike_are_counted_beside_the_one_that_changes_most():
    """None of them changes alone, and the median of their stage does not change."""
    eight = replace(FOUR, replicas=(8, 8))
    slow = {9: 2.0, 10: 2.1, 12: 1.9, 14: 1.2}
    known = []
    for course in (eight, replace(eight, pace=lambda rank, _: slow.get(rank, 1.0))):
        plan = plan_of(course)
        timeline = timeline_of(course, plan)
        known.append(usual(timeline, statistics(timeline, plan.ranks), plan))
    assert known[0] and known[1]
    assert "ms more in backward passes of rank 10 and 2 others of stage 1" in in_words(known[0], known[1])
