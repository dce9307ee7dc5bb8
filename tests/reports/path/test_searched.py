"""What the plans of a search would bring to a run whose layers are shared unevenly."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import read_experiment
from conf.run_folder.rundir import RunDir
from fasop.search.findings.other_plans import FoundPlan, other_plans
from fasop.simulation.predict import predict
from launch.commands.report import main as report
from reports import sources
from reports.facts.statistics import statistics
from reports.path.change import Cause
from reports.path.why import Why, explain
from reports.readers import record
from reports.readers.events import read_run
from reports.readers.megatron_log import Sizes
from reports.sources import Source
from tests.fasop.search.shares.test_batch_division import compositions
from tests.support.reports.synthetic import Shape, make_run

UNEVEN = Shape(pipeline=4, micro_batches=8, parts=(1, 4, 2, 1))


def made(folder: Path, shape: Shape = UNEVEN) -> RunDir:
    run = RunDir(folder / "runs/tiny/20260101-000000-aaaa")
    make_run(run.path, shape)
    return run


def explained(run: RunDir, shape: Shape, *plans: FoundPlan) -> Why:
    known, timeline = record.read(run), read_run({rank: run.rank_events(rank) for rank in range(shape.ranks)})
    why = explain(timeline, known.plan, statistics(timeline, known.plan.ranks), plans)
    assert isinstance(why, Why)
    return why


@pytest.mark.parametrize("data", [1, 2], ids=["alone", "data-parallel"])
def test_other_layers_take_what_a_run_with_them_takes(tmp_path: Path, data: int) -> None:
    uneven = replace(UNEVEN, data=data, iterations=6)
    even = FoundPlan(iteration_s=1.0, own_s=2.0, differs={"partition": "2-2-2-2"})
    found = explained(made(tmp_path / "uneven", uneven), uneven, even)
    (gain,) = (one for one in found.gains if "the best that tdpp search finds" in one.change)
    with_them = explained(made(tmp_path / "even", replace(uneven, parts=None)), uneven)
    assert gain.cause is Cause.PARTITION
    assert gain.period_ns / 1e6 == pytest.approx(with_them.recorded_ms, rel=0.04)


def test_another_plan_takes_what_the_prediction_says_of_the_measured_time(tmp_path: Path) -> None:
    plan = FoundPlan(iteration_s=1.0, own_s=4.0, differs={"data": "2", "pipeline": "2"})
    found = explained(made(tmp_path), UNEVEN, plan)
    best = found.gains[0]
    assert (best.cause, best.change) == (Cause.PLAN, "the plan of tdpp search, as predicted: data=2, pipeline=2")
    assert best.period_ns / 1e6 == pytest.approx(found.recorded_ms / 4)


def test_the_layers_that_are_found_are_the_best(tmp_path: Path) -> None:
    """Of all that stages can have, by predictions one by one."""
    shape = Shape(pipeline=3, micro_batches=4, layers=5, parts=(1, 3, 1))
    experiment = read_experiment(made(tmp_path, shape).config)

    def seconds(layers: tuple[int, ...]) -> float:
        partition = "-".join(map(str, layers))
        return predict(replace(experiment, parallel=replace(experiment.parallel, partition=partition))).iteration_s

    best, other = other_plans(experiment)
    every = [tuple(one - 1 for one in parts) for parts in compositions(5 + 3, 3)]
    assert other.layers() is not None
    assert other.iteration_s == pytest.approx(min(map(seconds, every)), rel=1e-4)
    assert other.own_s == best.own_s == pytest.approx(seconds((1, 3, 1)))
    assert best.iteration_s <= other.iteration_s


def test_a_search_is_kept_for_later_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path, Shape(pipeline=3, micro_batches=6, layers=6, parts=(1, 4, 1)))

    def rows(*words: str) -> list[str]:
        assert report([str(run.path), "--runs-dir", str(run.runs), *words]) == 0
        page = (run.report / "index.html").read_text()
        return [one for one in re.findall(r"<td[^>]*>([^<]*)</td>", page) if "search" in one]

    found = rows("--search")
    assert sorted(one.partition("search")[2][:8] for one in found) == [" finds f", ", as pre"]
    kept = run.report / "search.json"
    before = kept.stat().st_mtime_ns
    assert rows() == found
    Source.find(run.runs, str(run.path), Sizes()).search()
    assert kept.stat().st_mtime_ns == before
    kept.write_text(kept.read_text().replace('"own_s"', '"other"'))
    assert rows() == ["the plan that tdpp search would choose", "not searched"]
    assert "lacks own_s" in capsys.readouterr().err


def test_what_was_kept_is_of_one_configuration(tmp_path: Path) -> None:
    run = made(tmp_path)
    known, plans = record.read(run), (FoundPlan(iteration_s=1.0, own_s=2.0, differs={"data": "2"}),)
    run.report.mkdir()
    sources.keep(run.report, known, plans)
    assert sources.kept(run.report, known) == (plans, ())
    assert sources.kept(run.report, replace(known, config="name: other")) == (None, ())
