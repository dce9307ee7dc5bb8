"""What a reader does on the timeline to find, zoom and measure, by mouse, keyboard and fingers."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import CDPSession, Page

from launch.commands.report import main
from tests.reports.conftest import Opener
from tests.support.reports.in_browser import drawn_after, iteration, place_of, ready, until
from tests.support.reports.layouts import LAYOUTS, run_of
from tests.support.reports.raw_events import Raw, blank, raw_events, sends, waited
from tests.support.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=2, data=2, micro_batches=4, iterations=4, ranks_per_node=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    main([str(folder)])
    return folder


@pytest.fixture
def page(run: Path, open_page: Opener) -> Page:
    return ready(open_page(run / "report/timeline.html"))


def selected_in_view(page: Page) -> bool:
    """Whether the selected event lies in the times shown, or fills them."""
    return bool(
        page.evaluate(
            """(() => {
              const {start, end} = chart.what.at(chart.selected), [from, to] = chart.range;
              return (start >= from - 1e-3 && end <= to + 1e-3) || (start <= from + 1e-3 && end >= to - 1e-3);
            })()"""
        )
    )


def span(page: Page) -> float:
    return float(page.evaluate("chart.range[1] - chart.range[0]"))


def test_a_selected_event_stays_in_view_whatever_zooms(page: Page):
    last = page.evaluate("chart.shown.bars.findLast((bar) => bar.row === 1 && bar.count === 1).i")
    drawn_after(page, lambda: page.evaluate(f"chart.select({last})"))
    page.focus("#timeline .rows")
    for key in ("+",) * 12:
        drawn_after(page, lambda key=key: page.keyboard.press(key))
        assert selected_in_view(page)
    assert span(page) < 0.1 * page.evaluate("chart.length")
    drawn_after(page, lambda: page.keyboard.press("0"))
    box = page.locator("#timeline canvas").bounding_box()
    page.mouse.move(box["x"] + page.evaluate("chart.left") + 20, box["y"] + 60)  # where the iteration begins
    page.keyboard.down("Control")
    for _ in range(8):
        drawn_after(page, lambda: page.mouse.wheel(0, -200))
        assert selected_in_view(page)
    page.keyboard.up("Control")
    assert span(page) < 0.1 * page.evaluate("chart.length")


def test_buttons_zoom_and_show_all_by_mouse_and_keyboard(page: Page):
    whole = span(page)
    drawn_after(page, lambda: page.click("#timeline button[aria-label='Zoom in']"))
    assert span(page) < 0.9 * whole
    page.focus("#timeline button[aria-label='Zoom in']")
    before = span(page)
    drawn_after(page, lambda: page.keyboard.press("Enter"))
    assert span(page) < 0.9 * before
    page.keyboard.press("Tab")
    before = span(page)
    drawn_after(page, lambda: page.keyboard.press("Space"))
    assert span(page) > 1.1 * before
    page.keyboard.press("Tab")
    drawn_after(page, lambda: page.keyboard.press("Enter"))
    assert page.evaluate("chart.times") is None


def touch(session: CDPSession, kind: str, *points: tuple[float, float]) -> None:
    session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y} for x, y in points]})


def test_two_fingers_zoom_and_what_lies_between_them_stays_there(run: Path, open_page: Opener):
    page = ready(
        open_page(run / "report/timeline.html", has_touch=True, is_mobile=True, viewport={"width": 400, "height": 800})
    )
    page.evaluate("element('timeline').scrollIntoView()")
    session = page.context.new_cdp_session(page)
    left, top, wide = page.evaluate(
        "(({left, top}) => [left + chart.left, top + AXIS + 40, chart.wide])(chart.canvas.getBoundingClientRect())"
    )
    middle = left + 0.6 * wide
    whole, at = span(page), page.evaluate("chart.time(chart.left + 0.6 * chart.wide)")
    touch(session, "touchStart", (middle - 20, top))
    touch(session, "touchStart", (middle - 20, top), (middle + 20, top))
    for apart in (30, 45, 60, 80):
        touch(session, "touchMove", (middle - apart, top), (middle + apart, top))
    until(page, f"chart.range[1] - chart.range[0] < {0.3 * whole}")
    assert span(page) == pytest.approx(whole / 4, rel=0.02)
    now = page.evaluate("chart.time(chart.left + 0.6 * chart.wide)")
    assert now == pytest.approx(at, abs=0.01 * whole)
    touch(session, "touchEnd")
    assert page.evaluate("[chart.dragged, chart.selected, chart.pinched]") == [None, None, False]
    touch(session, "touchStart", (middle - 80, top), (middle + 80, top))
    for apart in (40, 10):
        touch(session, "touchMove", (middle - apart, top), (middle + apart, top))
    touch(session, "touchEnd")
    until(page, "chart.times === null")
    assert page.evaluate("visualViewport.scale") == 1
    page.touchscreen.tap(left + 20, top)  # one finger still does what it did
    until(page, "!chart.pinched")


def searched(page: Page, text: str) -> tuple[str, list[int | str]]:
    """What the page says, and of the selected event the rank, name and micro-batch."""
    page.fill("#find", text)
    page.press("#find", "Enter")
    chosen = page.evaluate(
        """chart.selected === null ? [] : [events.rank[chart.selected], run.names[events.name[chart.selected]],
            events.micro_batch[chart.selected]]"""
    )
    return page.inner_text("#found"), chosen


def test_search_finds_events_by_name_rank_stage_and_micro_batch(page: Page):
    assert searched(page, "backward-compute rank 3") == ("1 of 4", [3, "backward-compute", 0])
    page.press("#find", "Enter")
    assert page.inner_text("#found") == "2 of 4"
    assert page.evaluate("events.micro_batch[chart.selected]") == 1
    page.press("#find", "Shift+Enter")
    assert page.inner_text("#found") == "1 of 4"
    assert searched(page, "FORWARD-compute mb 2 stage 1") == ("1 of 2", [2, "forward-compute", 2])
    assert searched(page, "optimizer r1") == ("1 of 1", [1, "optimizer", -1])
    assert searched(page, "forward-recv 3")[1][:2] == [3, "forward-recv"]
    assert searched(page, "rank 2")[1][0] == 2
    assert searched(page, "nonsense")[0] == "nothing found in this iteration"
    assert page.inner_text("#timeline .tip b") != ""


def test_search_shows_a_task_that_is_hidden_and_moves_to_an_event_out_of_view(page: Page):
    drawn_after(page, page.get_by_role("button", name="optimizer", exact=True).click)
    drawn_after(page, lambda: page.evaluate("chart.show([0, chart.length / 50])"))
    assert searched(page, "optimizer rank 2")[1] == [2, "optimizer", -1]
    assert selected_in_view(page)
    assert page.get_by_role("button", name="optimizer", exact=True).get_attribute("aria-pressed") == "true"


def test_the_pointer_says_start_length_and_total(page: Page):
    bar = place_of(page, "backward-compute")
    page.mouse.move(bar["x"], bar["y"])
    page.wait_for_selector("#timeline .tip:visible")
    said = page.locator("#timeline .tip > *").all_text_contents()
    total, count = page.evaluate(
        """(i) => {
          const alike = (k) => ["rank", "name", "iteration"].every((key) => events[key][k] === events[key][i]);
          const same = Array.from(events.name.keys()).filter((k) => k < events.measured && alike(k));
          return [same.reduce((sum, k) => sum + events.end[k] - events.start[k], 0), same.length];
        }""",
        bar["i"],
    )
    assert f"start {bar['start'] / 1e6:,.3f} ms · length {(bar['end'] - bar['start']) / 1e6:,.3f} ms" in said
    assert f"total {total / 1e6:,.3f} ms in {count} backward-compute of this rank" in said


def test_several_events_in_one_bar_say_their_span_and_their_total(page: Page):
    lines = page.evaluate(
        """(() => {
          const two = merged([{i: 0, row: 0, start: 0, end: 4e6, wait: -1, count: 1},
              {i: 0, row: 0, start: 6e6, end: 9e6, wait: -1, count: 1}], 5e6, events.name);
          return chart.what.tip({row: 0, time: 0, bar: two[0]});
        })()"""
    )
    assert lines[0].startswith("2 × ")
    assert lines[-2:] == ["start 0.000 ms · length 9.000 ms", "total 7.000 ms; zoom in to see each"]


def measured(page: Page, from_share: float, to_share: float) -> tuple[list[float], dict[str, list[str]]]:
    """The range that Shift + drag measured, and the rows of the table by task."""
    x, y, wide = page.evaluate(
        "(({left, top}) => [left + chart.left, top + AXIS + 12, chart.wide])(chart.canvas.getBoundingClientRect())"
    )
    page.keyboard.down("Shift")
    page.mouse.move(x + wide * from_share, y)
    page.mouse.down()
    page.mouse.move(x + wide * to_share, y, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    until(page, "chart.ruler !== null && !chart.pending && !element('totals').hidden")
    rows = page.locator("#totals-rows tr").evaluate_all(
        "(all) => all.map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return page.evaluate("[...chart.ruler].sort((a, b) => a - b)"), {row[0]: row[1:] for row in rows}


def in_range(raw: list[Raw], number: int, streams: bool, range_ns: list[float]) -> dict[str, tuple[int, float]]:
    """By task how many events a range of an iteration holds, and their ns within it, over all ranks."""
    origin = min(one.start for one in raw if one.iteration == number)
    last = max(one.end for one in raw if one.iteration == number)
    low, high = (origin + edge for edge in range_ns)
    here = [one for one in raw if one.iteration == number]
    if streams:
        here = [one for one in raw if one.end > origin and one.start <= last]
    found: dict[str, tuple[int, float]] = {}
    for one in here:
        inside = min(one.end, high) - max(one.start, low)
        if inside > 0 or (one.start == one.end and inside == 0):
            count, lasts = found.get(one.name, (0, 0.0))
            found[one.name] = (count + 1, lasts + max(inside, 0))
    nothing = sum(blank([one for one in here if one.rank == rank], low, high) for rank in {one.rank for one in raw})
    return found | {"no event": (0, nothing)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_measured_range_holds_what_the_raw_files_say(name: str, layouts: Path, open_page: Opener):
    one, folder = LAYOUTS[name], run_of(name, layouts)
    main([str(folder)])
    page = ready(open_page(folder / "report/timeline.html"))
    raw = raw_events(folder, one.ranks)
    idle = waited(raw, one.stages, one.streams)
    share = page.evaluate("Array.from(columns.bubble_share)")
    numbers = page.evaluate("Array.from(columns.iterations)")
    for rank in range(one.ranks):
        for column, number in enumerate(numbers):
            passes = sum(
                event.end - event.start
                for event in raw
                if (event.rank, event.iteration) == (rank, number) and (event.name.endswith("-compute"))
            )
            expected = 1000 * idle[rank, number] / (passes + idle[rank, number])
            assert share[rank * len(numbers) + column] == pytest.approx(expected, abs=0.51)
    for edges in ((0.0, 1.0), (0.31, 0.55)):
        range_ns, said = measured(page, *edges)
        found = in_range(raw, iteration(page), one.streams, range_ns)
        assert set(said) == set(found)
        for task, (count, lasts) in found.items():
            told = said[task]
            assert told[0].replace(",", "") == ("" if task == "no event" else str(count)), task
            assert float(told[1].replace(",", "")) == pytest.approx(lasts / 1e6, abs=0.0011), task
    page.focus("#timeline .rows")
    page.keyboard.press("Escape")
    until(page, "element('totals').hidden")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in LAYOUTS.items() if one.streams])
def test_without_a_flush_the_page_shows_what_ranks_do_of_other_iterations(name: str, layouts: Path, open_page: Opener):
    """So that only what is idle is blank, and arrows join the sends and receives of different iterations."""
    one, folder = LAYOUTS[name], run_of(name, layouts)
    main([str(folder)])
    page = ready(open_page(folder / "report/timeline.html"))
    raw, number = raw_events(folder, one.ranks), iteration(page)
    origin = min(event.start for event in raw if event.iteration == number)
    last = max(event.end for event in raw if event.iteration == number)
    within = [event for event in raw if event.end > origin and event.start <= last]
    held = page.evaluate(
        "chart.what.find(0, chart.length, 0, chart.rows.length - 1).map(({row, start}) => [row, start])"
    )
    assert sorted(map(tuple, held)) == sorted((event.rank, event.start - origin) for event in within)
    assert len(within) > sum(event.iteration == number for event in within)
    assert "pale: other iterations at the same time" in page.inner_text("#said")
    pairs = {
        (receive.rank, receive.start - origin, send.rank, send.start - origin)
        for receive, send in sends(raw, one.stages).items()
        if receive in within and send in within
    }
    drawn = page.evaluate(
        """chart.what.links().map(([send, receive]) => [events.rank[receive], chart.what.at(receive).start,
            events.rank[send], chart.what.at(send).start])"""
    )
    assert set(map(tuple, drawn)) == pairs
