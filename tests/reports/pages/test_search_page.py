"""The page of a search, made by the command and seen in a browser."""

from __future__ import annotations

import csv
import html
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from conf.compose import compose
from fasop.search.front import Expense
from fasop.search.plan import Plan, Run
from fasop.simulation.predict import predict_plan
from launch.commands.search import main
from launch.control.planning.plan import make_plan
from reports.facts.frames import MEMORY
from reports.pages import search_page
from reports.pages.search_page import render
from tests.reports.conftest import Opener
from tests.support.reports.in_browser import until

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

    def draw(
        command: str, plans: Sequence[Plan], run: Run, searched: Sequence[str], launches: Sequence[str], *more: Expense
    ) -> str:
        found.append((plans, run))
        return render(command, plans, run, searched, launches, *more)

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
    head = page.locator("table.plans th").all_inner_texts()
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    unfolded = [
        "-".join("-".join([n] * int(k or 1)) for n, _, k in (part.partition("*") for part in cell.split(" ")))
        for cell in (row["layers by stage"] for row in cells)
    ]
    assert unfolded == [plan.parallel.partition for plan in searched.plans]
    assert [row["ms"] for row in cells] == [f"{plan.total * 1e3:,.1f}" for plan in searched.plans]
    assert head[1:3] == ["nodes", "$/1000 steps"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1366


def test_of_a_front_nodes_dollars_and_days_come_first_and_all_of_it_fits_1240_pixels(
    tmp_path: Path, open_page: Opener, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "front.html"
    words = (
        "model=xl train=gpt2 train.precision=fp16 parallel.global_batch_size=32 cluster=a100x8_a10x8 tokens=1e10 "
        "cluster.groups.a100.count=2 cluster.groups.a10.count=2 parallel.tensor=1 parallel.schedule=one_f_one_b "
        f"parallel.recompute=none pareto=cost page={file} csv={tmp_path / 'front.csv'}"
    )
    main(words.split())
    page = open_page(file, viewport={"width": 1240, "height": 900})
    page.wait_for_selector("body[data-ready]")
    head = page.locator("table.plans th").all_inner_texts()
    assert head[:4] == ["plan", "nodes", "$", "days"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1240
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every((one) => one.scrollWidth <= one.clientWidth)")
    titles = page.evaluate("['xaxis', 'yaxis'].map((one) => document.querySelector('.plot').layout[one].title.text)")
    assert titles == ["dollars", "days"]
    found = [*csv.DictReader((tmp_path / "front.csv").open())]
    rows = page.locator("tr[data-plan]").evaluate_all(
        "(all) => all.map((row) => [...row.cells].map((c) => c.innerText))"
    )
    assert [row[1:4] for row in rows] == [
        [one["node placement"], f"{float(one['train_cost']):,.2f}", f"{float(one['train_days']):,.3g}"] for one in found
    ]
    for axis, key in (("xaxis", "train_cost"), ("yaxis", "train_days")):
        low, high = page.evaluate(f"document.querySelector('.plot').layout.{axis}.range")
        values = [float(one[key]) for one in found]
        spread = max(values) - min(values)
        assert low < min(values) <= max(values) < high
        assert max(min(values) - low, high - max(values)) <= 0.1 * spread
    answer = page.inner_text(".verdict")
    assert "global batch 32 samples of 1,024 tokens (32,768 tokens an iteration), fp16" in answer
    *notes, told = capsys.readouterr().err.splitlines()
    assert told.startswith("next: tdpp search ")
    for line in notes:
        assert line.strip("()") in answer


def test_the_command_of_a_plan_launches_that_very_plan(searched: Searched):
    page = searched.page.read_text()
    commands = [html.unescape(text) for text in re.findall(r'<button[^>]* value="(tdpp launch[^"]*)"', page)]
    assert len(commands) == len(searched.plans)
    for command, plan in zip(commands, searched.plans, strict=True):
        tdpp, launch, *words = shlex.split(command)
        assert (tdpp, launch) == ("tdpp", "launch")
        given = compose(words)
        wanted, got = plan.parallel, given.parallel
        assert replace(got, **{key: getattr(wanted, key) for key in ("partition", "node_order")}) == wanted
        assert (str(given.partition), str(given.node_order)) == (wanted.partition, wanted.node_order)
        launched = make_plan(given, "seed/run")
        assert (tuple(launched.partition), launched.pipeline, launched.data) == (
            plan.partition.layers,
            wanted.pipeline,
            wanted.data,
        )
        assert html.escape(command) in page.split('class="plan"')[1 + commands.index(command)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "model=xl train=gpt2 cluster=a100x8_a10x8 cluster.groups.a100.count=1 cluster.groups.a10.count=2 "
        "parallel.global_batch_size=36",
        "experiment=seed_a100x1_a10x7 parallel.micro_batch_size=auto parallel.recompute=none,full tokens=1e9",
        "model=tiny cluster=local cluster.groups.local.gpus_per_node=4 parallel=d2p2_uneven "
        "parallel.global_batch_size=12",
    ],
    ids=["nodes of two kinds", "an experiment with a plan", "one machine"],
)
def test_commands_of_plans_with_shares_and_replicas_by_stage_give_these_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
):
    found: list[tuple[Sequence[Plan], Sequence[str], Run]] = []

    def draw(
        command: str, plans: Sequence[Plan], run: Run, searched: Sequence[str], launches: Sequence[str], *more: Expense
    ) -> str:
        found.append((plans, launches, run))
        return ""

    monkeypatch.setattr(search_page, "render", draw)
    main([*words.split(), f"page={tmp_path / 'page.html'}"])
    ((plans, launches, run),) = found
    for plan, command in zip(plans, launches, strict=True):
        given = compose(shlex.split(command)[2:])
        at = {"partition": str(given.partition), "node_order": str(given.node_order)}
        assert replace(given.parallel, **at) == plan.parallel
        assert not run.known or given.train.last_iteration == run.iterations


def test_a_chosen_plan_comes_into_view(searched: Searched, open_page: Opener):
    page = open_page(searched.page)
    page.wait_for_selector("body[data-ready]")
    page.click("a[href='#plan-2'] >> nth=0")
    until(page, "Math.abs(document.querySelector('#plan-2').getBoundingClientRect().top) < 2")
    again = open_page(searched.page, hash="#plan-3")
    until(again, "Math.abs(document.querySelector('#plan-3').getBoundingClientRect().top) < 2")


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
    assert float(memory[len(MEMORY) + 1]) == pytest.approx(prediction.stages[0].memory_gib, abs=0.01)


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
