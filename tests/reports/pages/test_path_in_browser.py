"""Why an iteration takes as long, as a user sees it: on the run's page, and over the bars of the timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.commands.report import main
from reports.facts.statistics import statistics
from reports.path.why import Why, explain
from reports.readers import record
from tests.reports.conftest import Opener
from tests.support.reports.in_browser import drawn_after, events_of, ready, until
from tests.support.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=4, data=2, micro_batches=4, slow={2: 1.6})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def why(run: Path) -> Why:
    plan, timeline = record.read(RunDir(run)).plan, events_of(run, SHAPE.ranks)
    found = explain(timeline, plan, statistics(timeline, plan.ranks))
    assert isinstance(found, Why)
    return found


def test_the_page_of_the_run_begins_with_the_cause_and_a_bar_of_each_stage(run: Path, why: Why, open_page: Opener):
    page = open_page(run / "report/index.html")
    until(page, "document.body.dataset.figures === 'drawn'")
    said = page.inner_text("#why")
    assert f"One iteration takes {why.length_ms:,.0f} ms: " in said
    assert "Rank 2 on g0-0 takes 1." in said
    assert f"Largest gain: rank 2 on g0-0 as fast as its peers, {why.recorded_ms:,.0f} → " in said
    assert page.evaluate("document.querySelector('div.plot').closest('section').id") == "why", "the first chart"
    bars = page.evaluate("document.querySelector('#why div.plot').data.map(({name, x, marker}) => [name, x, marker])")
    for stage in range(4):
        assert sum(x[stage] for _, x, _ in bars) == pytest.approx(why.replayed_ms)
    hatched = {name for name, _, marker in bars if (marker.get("pattern") or {}).get("shape")}
    assert hatched == {"pipeline order", "slow neighbour"}
    details = page.locator("#why details")
    assert [one.evaluate("(d) => d.open") for one in details.all()] == [False, False]
    details.first.locator("summary").click()
    assert "slow neighbour" in page.inner_text("#why details table")
    assert page.locator("#why a").evaluate("(one) => one.href").endswith("/timeline.html#path")


def test_the_critical_path_lies_over_the_timeline_where_it_is_asked_for(run: Path, why: Why, open_page: Opener):
    path = "chart.shown.path"
    page = ready(open_page(run / "report/timeline.html"))
    assert page.evaluate(path) == []
    drawn_after(page, lambda: page.check("#with-path"))
    parts = page.evaluate(path)
    lasts, rows = [(one["end"] - one["start"]) / 1e6 for one in parts], [one["row"] for one in parts]
    assert sum(lasts) == pytest.approx(why.length_ms, rel=0.02), "all but what is shorter than half a pixel"
    assert parts[0]["start"] / 1e6 < 0.01 * why.length_ms
    assert set(rows) == {one.rank for one in why.path if one.lasts_ns > 0.01 * why.length_ms * 1e6}
    drawn_after(page, lambda: page.click("#previous" if page.is_enabled("#previous") else "#next"))
    assert page.evaluate(path) == [], "it is that of another iteration"
    drawn_after(page, lambda: page.uncheck("#with-path"))
    drawn_after(page, lambda: page.check("#with-path"))
    assert int(page.input_value("#iteration")) == why.iteration
    assert len(page.evaluate(path)) == len(parts)
