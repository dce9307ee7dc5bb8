"""The timeline page of a run as a user sees it, in Debian's Chromium, offline."""

from __future__ import annotations

import re
from collections import Counter
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
from tests.reports.conftest import Opener, until
from tests.support.reports.in_browser import BARS, drawn_after, events_in, events_of, iteration, ready
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
    assert page.locator(BARS).count() == events_in(timeline, iteration(page))


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
    assert page.inner_text("#said").endswith("clocks of ranks agree within 31 µs")
    assert page.is_disabled("#previous")
    assert page.locator(BARS).count() == events_in(timeline, 1)
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
    words = r"bubble ([\d.]+) %, communication ([\d.]+) %, compute ([\d.]+) ms"
    waited, exposed, told = map(float, re.search(words, said).groups())
    assert waited == pytest.approx(100 * bubble[0, 0], abs=0.11)
    assert exposed == pytest.approx(100 * figures.communication_share[0, 0], abs=0.11)
    assert told == pytest.approx(compute, rel=0.005)


def test_hovering_tells_all_about_an_event(page: Page, timeline: Timeline):
    bar = page.evaluate(
        """(() => {
          const plot = element("timeline"), index = run.names.indexOf("forward-recv");
          const {base, x, y} = plot.data[index];
          const widest = x.indexOf(Math.max(...x));
          const {xaxis, yaxis} = plot._fullLayout, box = plot.getBoundingClientRect();
          return {row: Math.round(y[widest]), base: base[widest], length: x[widest],
            left: box.left + xaxis._offset + xaxis.d2p(base[widest] + x[widest] / 2),
            top: box.top + yaxis._offset + yaxis.d2p(y[widest])};
        })()"""
    )
    page.mouse.move(bar["left"], bar["top"])
    page.wait_for_selector("#timeline .hovertext")
    lines = page.locator("#timeline .hovertext tspan.line").all_text_contents()
    events = records(timeline)[records(timeline)["iteration"] == iteration(page)]
    event = min(
        (e for e in events if e["rank"] == bar["row"] and timeline.names[e["name"]] == "forward-recv"),
        key=lambda e: abs(e["start_ns"] - events["start_ns"].min() - bar["base"] * 1e6),
    )
    rank = bar["row"]
    sends = (e for e in events if timeline.names[e["name"]] == "forward-send" and e["peer"] == rank)
    sent = next(e["start_ns"] for e in sends if e["micro_batch"] == event["micro_batch"])
    waited = min(max(sent - event["start_ns"], 0), event["end_ns"] - event["start_ns"]) / 1e6
    assert 0 < waited < bar["length"]
    assert lines == [
        "forward-recv",
        f"rank {rank} · stage {rank // 2} · data-parallel {rank % 2}",
        f"node g{rank // 2}-{rank // 2} (host{rank // 2})",
        f"iteration {event['iteration']} · micro-batch {event['micro_batch']}",
        f"peer rank {event['peer']}",
        f"start {bar['base']:.3f} ms",
        f"duration {bar['length']:.3f} ms",
        f"waiting {waited:.3f} ms of it",
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
    labels = page.locator("#timeline .ytick text").all_text_contents()
    assert sorted(labels) == [f"rank {rank} · stage {rank // 2} · dp {rank % 2}" for rank in range(4)]


def test_a_click_on_the_legend_hides_a_task_and_it_stays_hidden_in_the_next_iteration(page: Page, timeline: Timeline):
    before = page.locator(BARS).count()
    forward = 16  # 4 ranks of 4 micro-batches
    drawn_after(page, page.get_by_role("button", name="forward-compute", pressed=True).click)
    assert page.locator(BARS).count() == before - forward
    drawn_after(page, lambda: (page.fill("#iteration", "1"), page.press("#iteration", "Enter")))
    assert page.locator(BARS).count() == events_in(timeline, 1) - forward
    drawn_after(page, page.get_by_role("button", name="forward-compute", pressed=False).click)
    assert page.locator(BARS).count() == events_in(timeline, 1)


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
    assert page.locator(BARS).count() == events_in(timeline, iteration(page), ranks)
    labels = page.locator("#timeline .ytick text").all_text_contents()
    assert sorted(int(label.split()[1]) for label in labels) == ranks


def test_zooming_draws_only_what_is_in_view_and_a_double_click_shows_all_again(page: Page, timeline: Timeline):
    whole = page.locator(BARS).count()
    box = page.locator("#timeline .nsewdrag").first.bounding_box()

    def drag() -> None:
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20, steps=4)
        page.mouse.up()

    drag()
    until(page, "shown.events < shown.inIteration")
    low, high = page.evaluate("element('timeline')._fullLayout.xaxis.range")
    events = records(timeline)[records(timeline)["iteration"] == iteration(page)]
    start, end = ((events[key] - events["start_ns"].min()) / 1e6 for key in ("start_ns", "end_ns"))
    until(page, f"document.querySelectorAll('{BARS}').length < {whole}")
    assert page.locator(BARS).count() == int(((end >= low) & (start <= high)).sum())
    assert "in view" in page.inner_text("#said")
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + 20)
    until(page, f"document.querySelectorAll('{BARS}').length == {whole}")


def test_the_prediction_lies_under_the_ranks_of_each_stage(
    page: Page, run: Path, timeline: Timeline, open_page: Opener
):
    prediction = predict(read_experiment(run / "config.yaml"))
    before = page.locator(BARS).count()
    drawn_after(page, lambda: page.check("#with-predicted"))
    labels = page.evaluate("element('timeline').layout.yaxis.ticktext")
    ranks = [f"rank {rank} · stage {rank // 2} · dp {rank % 2}" for rank in range(4)]
    assert labels == [*ranks[:2], "predicted · stage 0", *ranks[2:], "predicted · stage 1"]
    assert f"{prediction.iteration_s * 1e3:.3f} ms from one iteration to the next" in page.inner_text("#said")
    assert f"{before} events" in page.inner_text("#said")
    traces = page.evaluate(
        "element('timeline').data.slice(0, -1).map(({base, x, y}, name) => [run.names[name], base, x, y])"
    )
    found = Counter(
        (name, {2: 0, 5: 1}[round(row)], round(base * 1e6), round(length * 1e6))
        for name, *rest in traces
        for base, length, row in zip(*rest, strict=True)
        if round(row) in (2, 5)
    )
    assert found == Counter(
        (one.kind, one.stage, round(one.start * 1e9), round(one.end * 1e9) - round(one.start * 1e9))
        for one in prediction.events
    )
    drawn_after(page, lambda: page.select_option("#stage", "1"))
    assert page.evaluate("element('timeline').layout.yaxis.ticktext") == [*ranks[2:], "predicted · stage 1"]
    drawn_after(page, lambda: (page.uncheck("#with-predicted"), page.select_option("#stage", "")))
    until(page, f"document.querySelectorAll('{BARS}').length == {before}")


def test_the_summary_leads_to_the_prediction(run: Path, open_page: Opener):
    page = open_page(run / "report/index.html")
    link = page.locator("#expected a").evaluate("(one) => one.href")
    assert link == (run / "report/timeline.html").as_uri() + "#predicted"


def test_a_dark_scheme_gets_dark_colours_without_a_reload(page: Page):
    def background() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    def fill() -> str:
        return page.evaluate(f"document.querySelector('{BARS} path').style.fill")

    light, light_fill = background(), fill()
    drawn_after(page, lambda: page.emulate_media(color_scheme="dark"))
    assert background() < 100 < 700 < light
    assert fill() != light_fill


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
        f"""Array.from(document.querySelectorAll("{BARS}"))
            .filter((bar) => bar.querySelector("text")?.textContent)
            .map((bar) => [bar.querySelector("text").style.fill, bar.querySelector("path").style.fill])"""
    )
    assert len({bar for _, bar in colours}) == 8  # 4 micro-batches, forward and backward
    assert min(contrast(text, bar) for text, bar in colours) >= 4.5


def test_it_begins_with_what_it_amounts_to(page: Page, timeline: Timeline):
    figures = statistics(timeline)
    lengths = figures.length_ns[1:] / 1e6
    compute = np.median(figures.spent.compute[:, 1:].reshape(2, -1), axis=1)
    said = page.inner_text(".answer")
    assert said.startswith(
        f"From its first event to its last an iteration takes {np.median(lengths):,.1f} ms, "
        f"the median of 4 steady ones; the next one begins before it ends, so one is done every "
        f"{figures.usual_period_ms:,.1f} ms. The bubble is {figures.bubble:.1%} of passes and bubble, where 1F1B "
        f"with equal stages has 20.0%; {figures.communication:.1%} of an iteration is exposed communication. "
    )
    longest = int(np.argmax(compute))
    assert re.search(rf"Stage {longest} computes longest, [\d.]+ ms; stage {1 - longest} shortest", said)
    assert page.locator(".answer").bounding_box()["y"] < page.locator("#overview").bounding_box()["y"]


def test_the_pages_link_to_each_other(page: Page, run: Path):
    links = page.locator("nav a").evaluate_all("(all) => all.map((one) => one.href)")
    assert links == [(run / "report/index.html").as_uri()]


def test_the_summary_opens_and_links_to_the_timeline(run: Path, open_page: Opener):
    page = open_page(run / "report/index.html", color_scheme="dark")
    page.wait_for_selector("body[data-figures]")
    assert page.locator("[aria-label^=Loss] .scatterlayer .point").count() == SHAPE.iterations
    axis = page.locator("[aria-label^=Loss] .xtick text").first.evaluate("(text) => getComputedStyle(text).fill")
    assert axis == "rgb(154, 165, 180)", "what is grey by day is lighter by night"
    links = page.locator("nav a").evaluate_all("(all) => all.map((one) => one.href)")
    assert links == [(run / "report/timeline.html").as_uri()]


def test_every_task_of_the_engine_has_a_look_of_its_own(page: Page):
    known = page.evaluate("Object.keys(LOOKS.tasks)")
    assert set(known) >= (set(ENGINE_NAMES) - {"clock"}) | set(NAMES)
    for scheme in ("light", "dark"):
        assert page.evaluate(f"new Set(Object.values(LOOKS.tasks).map((task) => task.{scheme})).size") == len(known)


def test_pages_fit_a_laptop_in_light_and_dark_and_their_pictures_are_kept(run: Path, open_page: Opener, pictures: Path):
    for scheme in ("light", "dark"):
        for name in ("index", "timeline"):
            page = open_page(run / f"report/{name}.html", color_scheme=scheme, viewport={"width": 1366, "height": 768})
            if name == "timeline":
                ready(page)
            else:
                page.wait_for_selector("body[data-figures]")
            page.screenshot(path=pictures / f"run-{name}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= 1366
