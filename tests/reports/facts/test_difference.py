"""What got slower from one run to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from megatron_ext.contract.plan import Plan
from reports.facts.difference import KINDS, Usual, changes, in_words, usual
from reports.facts.statistics import statistics
from tests.support.reports.in_browser import events_of
from tests.support.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=3, data=2, micro_batches=4, iterations=5, layers=12)


def made(iteration_ms: float, **of_stage: dict[str, float]) -> Usual:
    stages = {int(name[1:]): dict.fromkeys(KINDS, 0.0) | kinds for name, kinds in of_stage.items()}
    return Usual(iteration_ms=iteration_ms, stages=stages)


def test_the_work_that_takes_longer_is_named_and_the_idle_time_that_follows_from_it_is_not():
    before = made(900.0, s1={"backward": 500.0, "idle": 300.0, "data": 10.0}, s2={"backward": 500.0, "idle": 300.0})
    after = made(1020.0, s1={"backward": 500.0, "idle": 395.0, "data": 35.0}, s2={"backward": 595.0, "idle": 300.0})
    assert in_words(before, after) == (
        "B is 120.0 ms slower an iteration (1,020.0 against 900.0 ms, +13%): 95.0 ms more in stage 2's backward "
        "passes, 25.0 ms more in stage 1's data."
    )
    assert in_words(after, before) == (
        "B is 120.0 ms faster an iteration (900.0 against 1,020.0 ms, -12%): 95.0 ms less in stage 2's backward "
        "passes, 25.0 ms less in stage 1's data."
    )
    found = [(one.stage, one.kind, one.more) for one in changes(before, after)]
    assert found[0][2] == 95.0
    assert found[-1][2] == 0.0
    assert (1, "messages", 0.0) not in found, "no row of zeros"


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
    assert {(one.stage, one.kind) for one in slower[:2]} == {(0, "backward"), (0, "forward")}
    assert "stage 0's backward passes" in in_words(before, after)
