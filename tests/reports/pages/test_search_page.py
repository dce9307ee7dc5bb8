"""The page of a search, made by the command and seen in a browser."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fasop.search.plan import Plan, Run
from fasop.simulation.predict import predict_plan
from launch.commands.search import main
from reports.pages import search_page
from reports.pages.search_page import render
from tests.reports.conftest import Opener

COMMAND = (
    "experiment=seed_a10x8 top=3 leave_out=false parallel.tensor=1 parallel.data=4 "
    "parallel.schedule=one_f_one_b,gpipe parallel.recompute=none parallel.sharded_optimizer=false"
)
HOSTILE = "</script><img src=x onerror=alert(1)>"


@dataclass(frozen=True, kw_only=True)
class Searched:
    page: Path
    plans: Sequence[Plan]
    run: Run


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    page = tmp_path_factory.mktemp("search") / "plans.html"
    found: list[tuple[Sequence[Plan], Run]] = []

    def draw(command: str, plans: Sequence[Plan], run: Run, searched: Sequence[str]) -> str:
        found.append((plans, run))
        return render(command, plans, run, searched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_page, "render", draw)
        main([*COMMAND.split(), f"page={page}"])
    ((plans, run),) = found
    return Searched(page=page, plans=plans, run=run)


def test_it_begins_with_the_best_plan_and_lists_all(searched: Searched, open_page: Opener):
    page = open_page(searched.page, viewport={"width": 1366, "height": 768})
    page.wait_for_selector("body[data-ready]")
    best = searched.plans[0]
    answer = page.inner_text(".verdict")
    assert f"{best.total * 1e3:,.1f} ms per iteration" in answer
    assert f"tdpp search {COMMAND} page={searched.page}" in answer
    assert "combinations of sizes and schedule on" in answer
    rows = page.locator("tr[data-plan]").evaluate_all(
        "(all) => all.map((row) => Array.from(row.cells, (c) => c.innerText))"
    )
    assert [row[5] for row in rows] == [plan.parallel.partition for plan in searched.plans]
    assert [row[8] for row in rows] == [f"{plan.total * 1e3:,.1f}" for plan in searched.plans]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1366


@pytest.mark.parametrize("number", [0, 2])
def test_the_chosen_plan_alone_is_shown_with_its_time_its_memory_and_every_event(
    searched: Searched, open_page: Opener, number: int
):
    page = open_page(searched.page)
    page.wait_for_selector("body[data-ready]")
    if number:
        page.click(f"a[href='#plan-{number + 1}'] >> nth=0")
        page.wait_for_selector(f"#plan-{number + 1} .iteration[data-drawn]")
    shown = page.locator("section.plan:visible")
    assert shown.count() == 1
    plan = searched.plans[number]
    prediction = predict_plan(plan)
    held = page.evaluate(
        """(number) => charts.get(number).what.find(0, charts.get(number).length, 0, 99).map(
            ({i, row, start, end}) => [run.names[events.name[i]], row, start, end - start])""",
        number,
    )
    found = Counter(map(tuple, held))
    drawn = page.evaluate("(number) => charts.get(number).shown.bars.reduce((sum, bar) => sum + bar.count, 0)", number)
    assert drawn == len(held)
    assert found == Counter(
        (event.kind, event.stage, round(event.start * 1e9), round(event.end * 1e9) - round(event.start * 1e9))
        for event in prediction.events
    )
    cells = shown.locator("table").nth(0).locator("tbody tr").nth(0).locator("td").all_inner_texts()
    numbers = [float(cell.replace(",", "")) for cell in cells[3:9]]
    assert sum(numbers) == pytest.approx(plan.total * 1e3, abs=0.5)
    memory = shown.locator("table").nth(1).locator("tbody tr").nth(0).locator("td").all_inner_texts()
    assert float(memory[6]) == pytest.approx(prediction.stages[0].memory_gib, abs=0.01)


def test_a_hostile_command_is_shown_as_it_is(searched: Searched):
    said = render(f"tdpp search {HOSTILE}", searched.plans[:1], searched.run)
    assert "<img" not in said
    assert re.search(r"tdpp search &lt;/script&gt;&lt;img", said)


def test_of_plans_with_prices_those_are_marked_that_none_beats_in_time_and_cost(searched: Searched):
    """On the same nodes the fastest is the cheapest, and so the only one."""
    said = render("tdpp search", searched.plans, searched.run)
    assert said.count("★</span>") == 1
    assert "◆</span>" not in said
    assert "$/1000 steps" in said


def test_nothing_leads_to_the_details_of_another_plan(searched: Searched, monkeypatch: pytest.MonkeyPatch):
    assert len(searched.plans) > 2
    monkeypatch.setattr(search_page, "MOST", 2)
    said = render("tdpp search", searched.plans, searched.run)
    assert "details of the first 2 below" in said
    links = Counter(re.findall(r'href="(#plan-\d+)"', said))
    assert set(links) == {"#plan-1", "#plan-2"}
    assert links["#plan-1"] == links["#plan-2"]
