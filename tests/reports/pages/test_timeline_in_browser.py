"""The timeline page of a run as a user sees it, in Debian's Chromium, offline."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page

from conf.compose import read_experiment
from fasop.simulation.predict import predict
from launch.commands.report import main
from megatron_ext.contract.events import NAMES as ENGINE_NAMES
from reports.facts.statistics import Statistics
from reports.facts.statistics import statistics as statistics_of
from reports.readers.events import NAMES, Timeline
from tests.reports.conftest import Opener
from tests.support.reports.in_browser import (
    colour_at,
    drawn,
    drawn_after,
    events_in,
    events_of,
    iteration,
    labels,
    place_of,
    ready,
    until,
)
from tests.support.reports.raw_events import NO_EVENTS
from tests.support.reports.records import records
from tests.support.reports.synthetic import Shape, make_run, ranks_of

SHAPE = Shape(pipeline=2, data=2, micro_batches=4, iterations=5, ranks_per_node=2)


def statistics(timeline: Timeline) -> Statistics:
    return statistics_of(timeline, ranks_of(SHAPE))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def timeline(run: Path) -> Timeline:
    return events_of(run, SHAPE.ranks)


@pytest.fixture
def page(run: Path, open_page: Opener) -> Page:
    return ready(open_page(run / "report/timeline.html"))


def test_it_opens_at_the_steady_iteration_of_median_length_with_a_bar_per_event(page: Page, timeline: Timeline):
    figures = statistics(timeline)
    steady = sorted(figures.length_ns[1:])
    assert iteration(page) > 1
    assert figures.length_ns[iteration(page) - 1] == steady[(len(steady) - 1) // 2]
    assert drawn(page) == events_in(timeline, iteration(page))


def test_the_page_holds_exactly_the_events_of_the_run(page: Page, timeline: Timeline):
    held = page.evaluate(
        """Object.fromEntries(["rank", "name", "chunk", "iteration", "micro_batch", "peer", "start", "end"].map(
            (key) => [key, Array.from(events[key]).slice(0, events.measured)]))"""
    )
    numbers = page.evaluate("Array.from(columns.iterations)")
    names = page.evaluate("run.names")
    known, origin = records(timeline), records(timeline)["start_ns"].min()
    assert [names[name] for name in held["name"]] == [timeline.names[name] for name in known["name"]]
    assert [numbers[index] for index in held["iteration"]] == known["iteration"].tolist()
    for key in ("rank", "chunk", "micro_batch", "peer"):
        assert held[key] == known[key].tolist()
    assert held["start"] == (known["start_ns"] - origin).tolist()
    assert held["end"] == (known["end_ns"] - origin).tolist()


def test_next_previous_and_a_number_choose_the_iteration(page: Page, timeline: Timeline):
    start = iteration(page)
    drawn_after(page, lambda: page.click("#next" if start < 5 else "#previous"))
    assert abs(iteration(page) - start) == 1
    drawn_after(page, lambda: page.click("#previous" if start < 5 else "#next"))
    assert iteration(page) == start
    drawn_after(page, lambda: (page.fill("#iteration", "1"), page.press("#iteration", "Enter")))
    assert page.inner_text("#said").startswith("iteration 1 of 5 ·")
    assert page.inner_text("#said").endswith("rank clocks agree within 31 µs")
    assert page.is_disabled("#previous")
    assert drawn(page) == events_in(timeline, 1)
    drawn_after(page, lambda: (page.fill("#iteration", "99"), page.press("#iteration", "Enter")))
    assert iteration(page) == 5
    assert page.is_disabled("#next")


def test_a_click_on_the_overview_goes_to_that_iteration(page: Page):
    box = page.locator("#overview").bounding_box()
    for wanted in (4, 2):
        x = box["width"] * (wanted - 0.5) / SHAPE.iterations
        drawn_after(page, lambda x=x: page.locator("#overview").click(position={"x": x, "y": box["height"] / 8}))
        assert iteration(page) == wanted
    assert page.inner_text("#overview-cell").startswith("rank 0 · stage 0 · dp 0 · iteration 2: ")


def test_the_overview_has_bubble_and_compute_time_of_every_rank_and_iteration(page: Page, timeline: Timeline):
    figures = statistics(timeline)
    bubble, share = figures.bubble_share, figures.compute_share
    shares = {"bubble": bubble, "communication": figures.communication_share, "compute": share}
    for kind, exact in shares.items():
        values = np.rint(exact * 1000)
        assert page.evaluate(f"Array.from(columns.{kind}_share)") == values.ravel().tolist()
        values = values * figures.period_ns if kind == "compute" else values
        page.select_option("#map", kind)
        colours = page.evaluate(
            """(() => {
              const seen = element("overview"), copy = new OffscreenCanvas(seen.width, seen.height).getContext("2d");
              copy.drawImage(seen, 0, 0);
              return Array.from(copy.getImageData(0, 0, seen.width, seen.height).data);
            })()"""
        )
        light = np.array(colours).reshape(SHAPE.ranks, SHAPE.iterations, 4)[:, :, :3].sum(axis=2)
        assert (np.diff(light.ravel()[np.argsort(values, axis=None)]) >= 0).all()
    box = page.locator("#overview").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 1)
    compute = share[0, 0] * figures.period_ns[0] / 1e6
    said = page.inner_text("#overview-cell")
    assert said.startswith("rank 0 · stage 0 · dp 0 · iteration 1: ")
    words = r"bubble ([\d.]+)%, communication ([\d.]+)%, compute ([\d.]+) ms"
    waited, exposed, told = map(float, re.search(words, said).groups())
    assert waited == pytest.approx(100 * bubble[0, 0], abs=0.11)
    assert exposed == pytest.approx(100 * figures.communication_share[0, 0], abs=0.11)
    assert told == pytest.approx(compute, rel=0.005)


def test_hovering_tells_all_about_an_event(page: Page, timeline: Timeline):
    bar = place_of(page, "forward-recv")
    page.mouse.move(bar["x"], bar["y"])
    page.wait_for_selector("#timeline .tip:visible")
    lines = page.locator("#timeline .tip > *").all_text_contents()
    events = records(timeline)[records(timeline)["iteration"] == iteration(page)]
    event = min(
        (e for e in events if e["rank"] == bar["row"] and timeline.names[e["name"]] == "forward-recv"),
        key=lambda e: abs(e["start_ns"] - events["start_ns"].min() - bar["start"]),
    )
    rank = bar["row"]
    sends = (e for e in events if timeline.names[e["name"]] == "forward-send" and e["peer"] == rank)
    sent = next(e["start_ns"] for e in sends if e["micro_batch"] == event["micro_batch"])
    waited = min(max(sent - event["start_ns"], 0), event["end_ns"] - event["start_ns"]) / 1e6
    lasted = (bar["end"] - bar["start"]) / 1e6
    assert 0 < waited < lasted
    same = [e for e in events if e["rank"] == rank and timeline.names[e["name"]] == "forward-recv"]
    total = sum(e["end_ns"] - e["start_ns"] for e in same) / 1e6
    assert lines == [
        "forward-recv",
        f"rank {rank} · stage {rank // 2} · data-parallel {rank % 2}",
        f"node g{rank // 2}-{rank // 2} (host{rank // 2})",
        f"iteration {event['iteration']} · micro-batch {event['micro_batch']}",
        f"peer rank {event['peer']}",
        f"start {bar['start'] / 1e6:.3f} ms · length {lasted:.3f} ms",
        f"of which {waited:.3f} ms waiting",
        f"total {total:.3f} ms in {len(same)} forward-recv of this rank",
    ]


def test_an_all_reduce_waits_for_the_last_rank_of_its_group(page: Page, timeline: Timeline):
    shown = iteration(page)
    events = records(timeline)[records(timeline)["iteration"] == shown]
    name = timeline.names.index("grads-all-reduce")
    of_stage = {stage: [e for e in events if e["name"] == name and e["rank"] // 2 == stage] for stage in (0, 1)}
    expected = {
        int(e["rank"]): int(max(other["start_ns"] for other in of_stage[e["rank"] // 2]) - e["start_ns"])
        for e in events[events["name"] == name]
    }
    said = page.evaluate(
        f"Object.fromEntries(Array.from(events.name.keys()).filter((i) => events.name[i] === {name} &&"
        f" columns.iterations[events.iteration[i]] === {shown}).map((i) => [events.rank[i], events.waiting[i]]))"
    )
    assert {int(rank): wait for rank, wait in said.items()} == expected
    assert sum(wait > 0 for wait in expected.values()) == 2


def test_ranks_are_labelled_with_stage_and_replica(page: Page):
    assert labels(page) == [f"rank {rank} · stage {rank // 2} · dp {rank % 2}" for rank in range(4)]


def test_a_click_on_the_legend_hides_a_task_and_it_stays_hidden_in_the_next_iteration(page: Page, timeline: Timeline):
    before = drawn(page)
    forward = 16  # 4 ranks of 4 micro-batches
    drawn_after(page, page.get_by_role("button", name="forward-compute", pressed=True).click)
    assert drawn(page) == before - forward
    drawn_after(page, lambda: (page.fill("#iteration", "1"), page.press("#iteration", "Enter")))
    assert drawn(page) == events_in(timeline, 1) - forward
    drawn_after(page, page.get_by_role("button", name="forward-compute", pressed=False).click)
    assert drawn(page) == events_in(timeline, 1)


@pytest.mark.parametrize(
    ("choice", "ranks"),
    [
        pytest.param({"#stage": "1"}, [2, 3], id="stage"),
        pytest.param({"#node": "g0-0"}, [0, 1], id="node"),
        pytest.param({"#dp": "1"}, [1, 3], id="replica"),
        pytest.param({"#stage": "0", "#dp": "1"}, [1], id="stage-and-replica"),
        pytest.param({"#stage": "0", "#node": "g1-1"}, [], id="none-fits"),
    ],
)
def test_filters_leave_the_ranks_that_fit(page: Page, timeline: Timeline, choice: dict[str, str], ranks: list[int]):
    for selector, value in choice.items():
        drawn_after(page, lambda selector=selector, value=value: page.select_option(selector, value))
    page.hover("#overview")
    assert drawn(page) == events_in(timeline, iteration(page), ranks)
    assert [int(label.split()[1]) for label in labels(page)] == ranks


def drag(page: Page, begin: float, end: float) -> None:
    """Over the bars, from one share of the time that is shown to another."""
    x, y = page.evaluate(
        """(() => {
          const seen = chart.canvas.getBoundingClientRect();
          return [seen.left + chart.left, seen.top + AXIS + 30];
        })()"""
    )
    width = page.evaluate("chart.wide")
    page.mouse.move(x + width * begin, y)
    page.mouse.down()
    page.mouse.move(x + width * end, y, steps=4)
    page.mouse.up()


def shown_ms(page: Page) -> tuple[float, float]:
    low, high = page.evaluate("chart.range")
    return low / 1e6, high / 1e6


def test_a_drag_zooms_and_draws_only_what_is_in_view_and_a_double_click_shows_all_again(page: Page, timeline: Timeline):
    whole = drawn(page)
    all_ms = shown_ms(page)
    drag(page, 0.5, 0.6)
    until(page, "chart.times !== null && !chart.pending")
    low, high = shown_ms(page)
    assert low == pytest.approx(0.5 * all_ms[1], abs=0.01 * all_ms[1])
    assert high == pytest.approx(0.6 * all_ms[1], abs=0.01 * all_ms[1])
    events = records(timeline)[records(timeline)["iteration"] == iteration(page)]
    start, end = ((events[key] - events["start_ns"].min()) / 1e6 for key in ("start_ns", "end_ns"))
    assert drawn(page) == int(((end >= low) & (start <= high)).sum()) < whole
    assert "in view" in page.inner_text("#said")
    drawn_after(page, lambda: page.locator("#timeline canvas").dblclick(position={"x": 500, "y": 60}))
    assert shown_ms(page) == all_ms
    assert drawn(page) == whole


def test_the_wheel_with_ctrl_zooms_around_the_pointer_and_with_shift_moves(page: Page):
    bar = place_of(page, "backward-compute")
    page.mouse.move(bar["x"], bar["y"])
    at = (bar["start"] + bar["end"]) / 2e6
    whole = shown_ms(page)
    page.keyboard.down("Control")
    drawn_after(page, lambda: page.mouse.wheel(0, -400))
    page.keyboard.up("Control")
    low, high = shown_ms(page)
    assert high - low < 0.7 * (whole[1] - whole[0])
    assert (at - low) / (high - low) == pytest.approx((at - whole[0]) / (whole[1] - whole[0]), abs=0.01)
    page.keyboard.down("Shift")
    drawn_after(page, lambda: page.mouse.wheel(0, 100))
    page.keyboard.up("Shift")
    moved = shown_ms(page)
    assert moved[0] > low
    assert moved[1] - moved[0] == pytest.approx(high - low)


def test_keys_zoom_move_and_go_through_the_events_of_a_row(page: Page, timeline: Timeline):
    whole = shown_ms(page)
    page.focus("#timeline .rows")
    drawn_after(page, lambda: page.keyboard.press("+"))
    low, high = shown_ms(page)
    assert (high - low) == pytest.approx((whole[1] - whole[0]) / 1.25)
    drawn_after(page, lambda: page.keyboard.press("ArrowLeft"))
    assert shown_ms(page)[0] < low
    drawn_after(page, lambda: page.keyboard.press("-"))
    drawn_after(page, lambda: page.keyboard.press("0"))
    assert shown_ms(page) == whole
    events = records(timeline)
    first = events[(events["iteration"] == iteration(page)) & (events["rank"] == 0)][:2]
    for event in first:
        drawn_after(page, lambda: page.keyboard.press("."))
        assert page.inner_text("#timeline .tip b") == timeline.names[event["name"]]
    drawn_after(page, lambda: page.keyboard.press(","))
    assert page.inner_text("#timeline .tip b") == timeline.names[first[0]["name"]]
    drawn_after(page, lambda: page.keyboard.press("Escape"))
    assert page.evaluate("chart.selected") is None


def test_a_drag_with_shift_measures_a_duration(page: Page):
    page.keyboard.down("Shift")
    drag(page, 0.2, 0.7)
    page.keyboard.up("Shift")
    until(page, "chart.ruler !== null && !chart.pending")
    low, high = page.evaluate("chart.ruler")
    assert high - low == pytest.approx(0.5 * page.evaluate("chart.length"), rel=0.01)
    assert page.evaluate("chart.times") is None


def test_arrows_lead_from_every_send_to_its_receive(page: Page, timeline: Timeline):
    """Those of a selected event; of a zoom, all: the k-th that a rank sends to another is its k-th there."""
    names = timeline.names
    events = records(timeline)[records(timeline)["iteration"] == iteration(page)]
    origin = events["start_ns"].min()
    waits = {}
    for way in ("forward", "backward"):
        sent, received = ([e for e in events if names[e["name"]] == f"{way}-{verb}"] for verb in ("send", "recv"))
        for event in received:
            (match,) = [
                e
                for e in sent
                if (e["rank"], e["peer"], e["micro_batch"]) == (event["peer"], event["rank"], event["micro_batch"])
            ]
            waits[int(event["rank"]), int(event["start_ns"] - origin)] = int(match["start_ns"] - origin)
    held = page.evaluate(
        """chart.what.links().map(([send, receive]) =>
            [events.rank[receive], chart.what.at(receive).start, chart.what.at(send).start])"""
    )
    assert {(rank, start): sent for rank, start, sent in held} == waits
    assert page.evaluate("chart.shown.links") == 0
    bar = place_of(page, "forward-recv")
    drawn_after(page, lambda: page.mouse.click(bar["x"], bar["y"]))
    assert page.evaluate("[chart.selected, chart.shown.links]") == [bar["i"], 1]
    drag(page, 0.0, 0.5)
    until(page, "chart.times !== null && !chart.pending")
    assert page.evaluate("chart.shown.links") > 1


def test_idle_space_says_what_is_waited_for_and_how_long(page: Page):
    """Below a receive, in the lane of the computation, which stands still."""
    bar = place_of(page, "forward-recv")
    x, y = page.evaluate(
        """({row, start, wait}) => {
          const seen = chart.canvas.getBoundingClientRect();
          return [seen.left + chart.x(start + wait / 2), seen.top + chart.middle(row) + 2];
        }""",
        bar,
    )
    page.mouse.move(x, y)
    page.wait_for_selector("#timeline .tip:visible")
    peer = page.evaluate(f"events.peer[{bar['i']}]")
    assert page.inner_text("#timeline .tip b") == f"idle: waiting for rank {peer} to send"
    assert f"{bar['wait'] / 1e6:,.3f} ms, in forward-recv" in page.inner_text("#timeline .tip")


def test_the_address_keeps_the_view(run: Path, page: Page, open_page: Opener):
    bar = place_of(page, "backward-compute")
    drawn_after(page, lambda: page.mouse.click(bar["x"], bar["y"]))
    drag(page, 0.3, 0.8)
    until(page, "chart.times !== null && !chart.pending")
    drawn_after(page, lambda: page.select_option("#dp", str(int(bar["row"]) % 2)))
    drawn_after(page, page.get_by_role("button", name="forward-recv", pressed=True).click)
    until(page, "location.hash.includes('hidden')")
    hash = page.evaluate("location.hash")
    state = "[view.iteration, view.dp, Array.from(view.hidden), chart.selected, chart.range]"
    again = ready(open_page(run / "report/timeline.html", hash=hash))
    kept, known = again.evaluate(state), page.evaluate(state)
    assert kept[:4] == known[:4]
    assert kept[3] is not None
    assert kept[4] == pytest.approx(known[4], abs=1)
    drawn_after(again, lambda: again.evaluate("void (location.hash = '#iteration=2&stage=1&ms=nonsense&event=99.99')"))
    assert iteration(again) == 2
    assert labels(again) == [f"rank {rank} · stage 1 · dp {rank - 2}" for rank in (2, 3)]


def test_every_rank_has_its_bubble_in_the_iteration_beside_it(page: Page, timeline: Timeline):
    shares = statistics(timeline).bubble_share[:, iteration(page) - 1]
    assert page.evaluate("chart.rows.map((row) => row.share)") == pytest.approx(shares.tolist(), abs=0.0006)


def test_an_overlay_is_drawn_over_the_bars_each_time(page: Page):
    page.evaluate(
        """void chart.overlays.push((context, chart) => {
          context.fillStyle = "rgb(1, 2, 3)";
          context.fillRect(chart.x(0), chart.middle(1) - 4, 10, 8);
        })"""
    )
    drawn_after(page, lambda: page.evaluate("chart.redraw()"))
    assert colour_at(page, *page.evaluate("[chart.x(0) + 3, chart.middle(1)]")) == [1, 2, 3, 255]


def test_the_prediction_lies_under_the_ranks_of_each_stage(
    page: Page, run: Path, timeline: Timeline, open_page: Opener
):
    prediction = predict(read_experiment(run / "config.yaml"))
    before = drawn(page)
    drawn_after(page, lambda: page.check("#with-predicted"))
    ranks = [f"rank {rank} · stage {rank // 2} · dp {rank % 2}" for rank in range(4)]
    assert labels(page) == [*ranks[:2], "predicted · stage 0", *ranks[2:], "predicted · stage 1"]
    assert f"{prediction.iteration_s * 1e3:.3f} ms from one iteration to the next" in page.inner_text("#said")
    assert f"{before} events" in page.inner_text("#said")
    predicted = page.evaluate(
        """chart.what.find(0, chart.length, 0, 5).filter(({row}) => [2, 5].includes(row))
            .map(({i, row, start, end}) => [run.names[events.name[i]], row === 2 ? 0 : 1, start, end - start])"""
    )
    found = Counter(map(tuple, predicted))
    assert found == Counter(
        (one.kind, one.stage, round(one.start * 1e9), round(one.end * 1e9) - round(one.start * 1e9))
        for one in prediction.events
    )
    drawn_after(page, lambda: page.select_option("#stage", "1"))
    assert labels(page) == [*ranks[2:], "predicted · stage 1"]
    drawn_after(page, lambda: (page.uncheck("#with-predicted"), page.select_option("#stage", "")))
    assert drawn(page) == before


def test_the_summary_leads_to_the_prediction(run: Path, open_page: Opener):
    page = open_page(run / "report/index.html")
    link = page.locator("#expected a").evaluate("(one) => one.href")
    assert link == (run / "report/timeline.html").as_uri() + "#predicted"


def test_a_dark_scheme_gets_dark_colours_without_a_reload(page: Page):
    def background() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    def fill() -> list[int]:
        bar, seen = place_of(page, "forward-compute"), page.locator("#timeline canvas").bounding_box()
        return colour_at(page, bar["x"] - seen["x"] + 12, bar["y"] - seen["y"])

    light, light_fill = background(), fill()
    drawn_after(page, lambda: page.emulate_media(color_scheme="dark"))
    assert background() < 100 < 700 < light
    assert light_fill != fill()


def contrast(one: str, other: str) -> float:
    """Of two colours `rgb(r, g, b)`, as WCAG 2 has it: from 1, the same, to 21, black and white."""

    def luminance(colour: str) -> float:
        channels = np.array([int(part) for part in re.findall(r"\d+", colour)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_numbers_of_micro_batches_can_be_read(run: Path, open_page: Opener, scheme: str):
    page = ready(open_page(run / "report/timeline.html", color_scheme=scheme))
    colours = page.evaluate(
        """chart.shown.bars.filter((bar) => /^(forward|backward)-compute$/.test(run.names[events.name[bar.i]]))
            .map((bar) => [ink(bar.colour).replace(/#(..)(..)(..)/, (_, ...parts) =>
                `rgb(${parts.slice(0, 3).map((part) => parseInt(part, 16))})`), bar.colour])"""
    )
    assert len({bar for _, bar in colours}) == 8  # 4 micro-batches, forward and backward
    assert min(contrast(text, bar) for text, bar in colours) >= 4.5


def test_it_begins_with_what_it_amounts_to_and_why(page: Page, timeline: Timeline, run: Path):
    figures = statistics(timeline)
    lengths = figures.length_ns[1:] / 1e6
    said = page.inner_text(".answer")
    logged = [json.loads(line)["elapsed_ms"] for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    assert said.startswith(
        f"An iteration takes {np.median(logged):,.1f} ms (median of {len(logged)} log lines after the first)"
        f"; by events, {np.median(lengths):,.1f} ms from its first to its last event "
        f"(median of 4 steady ones); iterations overlap, so one finishes every {figures.usual_period_ms:,.1f} ms. "
        f"The bubble fraction is {figures.bubble:.1%} (1F1B with equal stages: 20.0%); "
        f"{figures.communication:.1%} of an iteration is exposed communication. "
    )
    why = (run / "report/index.html").read_text().split('id="why"')[1].split('<p class="reason">')[1].split("</p>")[0]
    assert said.endswith(f"exposed communication. {unescape(why)}")
    assert page.locator(".answer").bounding_box()["y"] < page.locator("#overview").bounding_box()["y"]


def test_the_pages_link_to_each_other(page: Page, run: Path):
    links = page.locator("nav a").evaluate_all("(all) => all.map((one) => one.href)")
    assert links == [(run / "report/index.html").as_uri()]


def test_the_summary_opens_and_links_to_the_timeline(run: Path, open_page: Opener):
    page = open_page(run / "report/index.html", color_scheme="dark")
    page.wait_for_selector("body[data-figures]")
    assert page.locator("[aria-label^=Loss] .subplot.xy .scatterlayer .point").count() == SHAPE.iterations
    axis = page.locator("[aria-label^=Loss] .xtick text").first.evaluate("(text) => getComputedStyle(text).fill")
    assert axis == "rgb(154, 165, 180)", "what is grey by day is lighter by night"
    links = page.locator("nav a").evaluate_all("(all) => all.map((one) => one.href)")
    assert links == [(run / "report/timeline.html").as_uri()]


def test_every_task_of_the_engine_has_a_look_of_its_own(page: Page):
    known = page.evaluate("Object.keys(LOOKS.tasks)")
    assert set(known) >= (set(ENGINE_NAMES) - set(NO_EVENTS)) | set(NAMES)
    for scheme in ("light", "dark"):
        assert page.evaluate(f"new Set(Object.values(LOOKS.tasks).map((task) => task.{scheme})).size") == len(known)
