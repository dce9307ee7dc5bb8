"""Which ranks of many the timeline shows, how the others are folded and unfolded, and that the address keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from launch.commands.report import main
from tests.reports.conftest import Opener
from tests.support.reports.in_browser import drawn_after, labels, ready, until
from tests.support.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=2, data=20, micro_batches=2, iterations=4, slow={7: 1.5})
"""Replica 7 is slow on its first stage only: of the other replicas, which are alike, one is shown on each stage."""


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("report") / "runs/tiny/20260101-000000-aaaa"
    make_run(run, SHAPE)
    main([str(run)])
    return run / "report/timeline.html"


@pytest.fixture
def page(timeline: Path, open_page: Opener) -> Page:
    return ready(open_page(timeline))


def ranks(page: Page) -> list[int]:
    found: list[int] = page.evaluate("chart.rows.filter((row) => !row.fold).map((row) => row.rank)")
    return found


def a_folded_rank(page: Page) -> int:
    return int(page.evaluate("run.like.findLastIndex((_, rank) => isFolded(rank))"))


def address(page: Page) -> dict[str, str]:
    """What it says once it is written."""
    page.wait_for_timeout(400)
    found: dict[str, str] = page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
    return found


def test_the_lines_of_folded_ranks_are_short_and_what_alike_means_is_said_once(page: Page):
    lines = [label for label in labels(page) if label.startswith("▸")]
    assert len(lines) == 2
    assert all(f"of stage {stage} like " in line and len(line) < 60 for stage, line in enumerate(lines))
    folded = 2 * 20 - len(ranks(page))
    said = f"{folded} ranks folded: compute time within 5% and bubble within 5 points of a rank shown"
    assert said in page.inner_text("#said")


def test_a_rank_of_the_map_is_shown_and_in_view_and_can_be_folded_again(page: Page):
    first, rank = ranks(page), a_folded_rank(page)
    page.set_viewport_size({"width": 1440, "height": 300})
    box = page.locator("#overview").bounding_box()
    place = {"x": box["width"] * 0.9, "y": box["height"] * (rank + 0.5) / SHAPE.ranks}
    drawn_after(page, lambda: page.locator("#overview").click(position=place))
    assert ranks(page) == sorted([*first, rank])
    seen = f"chart.shown.visible.includes(chart.rowOf.get({rank})) && chart.top(chart.rowOf.get({rank})) >= AXIS"
    until(page, seen)
    assert address(page)["ranks"] == str(rank)
    drawn_after(page, page.get_by_role("button", name="Fold similar ranks").click)
    assert ranks(page) == first
    assert "ranks" not in address(page)


def test_a_stage_all_of_whose_ranks_are_shown_one_by_one_can_be_folded(timeline: Path, page: Page, open_page: Opener):
    first = ranks(page)
    every = ".".join(map(str, range(SHAPE.ranks)))
    page = ready(open_page(timeline, hash=f"#ranks={every}"))
    assert ranks(page) == list(range(SHAPE.ranks))
    lines = [label for label in labels(page) if not label.startswith("rank")]
    assert [line.split(" ranks of")[0].startswith("▾ fold ") for line in lines] == [True, True]
    for _ in range(2):
        row = page.evaluate("chart.rows.findIndex((row) => row.fold?.startsWith('▾'))")
        drawn_after(page, lambda row=row: page.evaluate(f"toggle({row})"))
    assert ranks(page) == first


def test_ranks_of_the_critical_path_are_shown_while_it_is_drawn(page: Page):
    first = ranks(page)
    page.evaluate(f"void (columns.path_rank[0] = {a_folded_rank(page)})")
    drawn_after(page, lambda: page.check("#with-path"))
    assert set(ranks(page)) == {*first, *page.evaluate("Array.from(columns.path_rank)")} != set(first)
    drawn_after(page, lambda: page.uncheck("#with-path"))
    assert ranks(page) == first


def test_the_address_keeps_the_rows_in_view_and_the_map(timeline: Path, page: Page, open_page: Opener):
    page.set_viewport_size({"width": 1440, "height": 500})
    drawn_after(page, page.get_by_role("button", name="Show all ranks").click)
    drawn_after(page, lambda: page.evaluate("void (chart.box.scrollTop = 150)"))
    drawn_after(page, lambda: page.select_option("#map", "compute"))
    assert address(page).keys() == {"unfolded", "top", "map"}
    hash = page.evaluate("location.hash")
    again = ready(open_page(timeline, hash=hash, viewport={"width": 1440, "height": 500}))
    until(again, "chart.box.scrollTop > 0 && !chart.pending")
    top = "chart.rows[chart.shown.visible.find((row) => chart.top(row) >= AXIS)].rank"
    assert again.evaluate(top) == page.evaluate(top) > 0
    assert again.input_value("#map") == "compute"


def test_the_address_of_an_event_shows_its_rank_and_keeps_its_iteration(timeline: Path, page: Page, open_page: Opener):
    """A run that goes on would open at another iteration, and that of the event is then no longer the first."""
    rank = a_folded_rank(page)
    number, iteration = page.evaluate(
        f"[events.order[slices.get({rank})[0]] - events.first[{rank}], columns.iterations[view.iteration]]"
    )
    page = ready(open_page(timeline, hash=f"#event={rank}.{number}&unfolded=9&ranks=999"))
    assert page.evaluate("events.rank[chart.selected]") == rank
    assert rank in ranks(page)
    assert address(page) == {"iteration": str(iteration), "ranks": str(rank), "event": f"{rank}.{number}"}
    drawn_after(page, page.get_by_role("button", name="Fold similar ranks").click)
    assert page.evaluate("chart.selected") is None, "its rank has no row"
    assert address(page) == {}


def test_an_arrow_from_a_folded_rank_comes_from_its_line(page: Page):
    arrows, line, row = page.evaluate(
        """(() => {
          const rank = run.like.findLastIndex((_, rank) => isFolded(rank) && isFolded(rank - 20));
          view.asked.add(rank);
          draw();
          chart.draw();
          const received = (bar) => events.rank[bar.i] === rank && run.names[events.name[bar.i]] === "forward-recv";
          chart.select(chart.shown.bars.find(received).i);
          const arrows = [];
          drawLink = (_, x, y, toX, toY) => arrows.push([y, toY]);
          chart.draw();
          return [arrows, chart.middle(chart.rows.findIndex((row) => row.fold)), chart.middle(chart.rowOf.get(rank))];
        })()"""
    )
    assert arrows == [[line, row]]


def test_the_keyboard_reaches_all_rows_and_folds_them(page: Page):
    first = ranks(page)
    page.focus("#timeline .rows")
    drawn_after(page, lambda: page.keyboard.press("."))
    for rank in first[1:]:
        drawn_after(page, lambda: page.keyboard.press("ArrowDown"))
        assert page.evaluate("events.rank[chart.selected]") == rank
    drawn_after(page, lambda: page.keyboard.press("ArrowUp"))
    assert page.evaluate("events.rank[chart.selected]") == first[-2]
    drawn_after(page, lambda: page.keyboard.press("Enter"))
    stage = first[-2] // 20
    assert [rank for rank in ranks(page) if rank // 20 == stage] == list(range(20 * stage, 20 * stage + 20))
    drawn_after(page, lambda: page.keyboard.press("Enter"))
    assert ranks(page) == first


def test_the_wheel_writes_the_address_once_it_rests(page: Page):
    """Browsers refuse an address that changes a hundred times in a few seconds; Safari ends the script that tries."""
    written = page.evaluate(
        """(async () => {
          let written = 0;
          const replace = history.replaceState.bind(history);
          history.replaceState = (...all) => (written++, replace(...all));
          for (let k = 0; k < 50; k++) chart.zoom(0.98, 0);
          await new Promise((done) => setTimeout(done, 500));
          return written;
        })()"""
    )
    assert written == 1
    assert "ms" in address(page)


def test_on_a_narrow_screen_the_axis_has_labels_that_do_not_touch(page: Page):
    page.set_viewport_size({"width": 400, "height": 800})
    until(page, "chart.narrow")
    axes = page.evaluate(
        """Array.from({ length: 90 }, (_, n) => {
            const length = 2000 * 1.15 ** n;
            chart.range = [n * 1e5, n * 1e5 + length];
            const step = tickStep(chart);
            return [ticks(chart, step), (step / (chart.range[1] - chart.range[0])) * chart.wide];
        })"""
    )
    assert all(labels >= 2 for labels, _ in axes)
    assert all(pixels >= 48 for _, pixels in axes)
