"""The timeline page as a user sees it, in Debian's Chromium, offline."""

from __future__ import annotations

import json
import random
import re
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page

from conf.compose import read_experiment
from fasop.predict import predict
from megatron_ext.timeline import NAMES as ENGINE_NAMES
from reports.cli import main
from reports.events import NAMES, RECORD, Timeline, read_run
from reports.statistics import COMPUTE, statistics
from tests.reports.conftest import Opener, until
from tests.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=2, data=2, micro_batches=4, iterations=5, ranks_per_node=2)
BARS = "#timeline .barlayer .point"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def timeline(run: Path) -> Timeline:
    return events_of(run, SHAPE.ranks)


def events_of(run: Path, ranks: int) -> Timeline:
    return read_run({rank: run / f"events/rank-{rank:05d}.bin" for rank in range(ranks)})


@pytest.fixture
def page(run: Path, open_page: Opener) -> Page:
    return ready(open_page(run / "report/timeline.html"))


def ready(page: Page) -> Page:
    page.wait_for_selector("body[data-ready]")
    return page


def drawn_after(page: Page, action) -> None:
    """Does something and waits until Plotly has drawn its effect."""
    page.evaluate(
        """void (drawn = new Promise((done, fail) => {
            element("timeline").once("plotly_afterplot", done);
            setTimeout(() => fail(new Error("nothing was drawn")), 10_000);
        }))"""
    )
    action()
    page.evaluate("drawn")


def events_in(timeline: Timeline, iteration: int, ranks: range | list[int] = range(SHAPE.ranks)) -> int:
    events = timeline.events
    return int(((events["iteration"] == iteration) & np.isin(events["rank"], ranks)).sum())


def iteration(page: Page) -> int:
    return int(page.input_value("#iteration"))


def test_it_opens_at_the_steady_iteration_of_median_length_with_a_bar_per_event(page: Page, timeline: Timeline):
    figures = statistics(timeline, SHAPE.ranks)
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
    known, origin = timeline.events, timeline.events["start_ns"].min()
    assert [names[name] for name in held["name"]] == [timeline.names[name] for name in known["name"]]
    assert [numbers[index] for index in held["iteration"]] == known["iteration"].tolist()
    for key in ("rank", "chunk", "micro_batch", "peer"):
        assert held[key] == known[key].tolist()
    assert held["start"] == (known["start_ns"] - origin).tolist()
    assert held["end"] == (known["end_ns"] - origin).tolist()


BAR = re.compile(
    r"<b>(?P<name>[^<]*)</b><br>rank (?P<rank>\d+) · .*<br>iteration (?P<iteration>\d+)"
    r"( · micro-batch (?P<micro_batch>\d+)( · chunk (?P<chunk>\d+))?)?(<br>peer rank (?P<peer>\d+))?<br>start .*"
)


@pytest.mark.parametrize("seed", range(3))
def test_the_events_of_a_run_can_be_rebuilt_from_what_the_page_draws(tmp_path: Path, open_page: Opener, seed: int):
    """Any shape of run, all iterations: names, ranks, micro-batches, chunks, peers and times to the nanosecond."""
    pick = random.Random(seed)
    chunks = pick.choice([1, 2])
    shape = Shape(
        pipeline=pick.randint(2, 4),
        data=pick.randint(1, 3),
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else pick.choice(["gpipe", "one_f_one_b", "zb_h1"]),
        micro_batches=4 * pick.randint(1, 3),
        ranks_per_node=pick.randint(1, 4),
        iterations=3,
        seed=seed,
    )
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, shape)
    main([str(run)])
    page = ready(open_page(run / "report/timeline.html"))
    timeline = events_of(run, shape.ranks)
    found: Counter[tuple[object, ...]] = Counter()
    for index, number in enumerate(range(1, shape.iterations + 1)):
        page.evaluate(f"show({index})")
        origin = timeline.events["start_ns"][timeline.events["iteration"] == number].min()
        drawn = "element('timeline').data.map(({base, x, y, hovertext}) => [base, x, y, hovertext])"
        for trace in page.evaluate(drawn):
            for base, length, row, text in zip(*trace, strict=True):
                said = BAR.fullmatch(text)
                assert said is not None, text
                assert int(said["rank"]) == round(row)
                start = origin + round(base * 1e6)
                whole = [int(said[key] or absent) for key, absent in (("chunk", 0), ("micro_batch", -1), ("peer", -1))]
                found[said["name"], int(said["rank"]), int(said["iteration"]), *whole, start, round(length * 1e6)] += 1
    assert found == Counter(
        (
            timeline.names[event["name"]],
            *(int(event[key]) for key in ("rank", "iteration", "chunk", "micro_batch", "peer", "start_ns")),
            int(event["end_ns"] - event["start_ns"]),
        )
        for event in timeline.events
    )


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
    figures = statistics(timeline, SHAPE.ranks)
    share = figures.compute_share
    assert page.evaluate("Array.from(columns.share)") == np.rint(share * 1000).ravel().tolist()
    for kind, values in (("bubble", 1 - share), ("compute", share * figures.period_ns)):
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
    bubble, told = map(float, re.search(r"bubble ([\d.]+) %, compute ([\d.]+) ms", said).groups())
    assert bubble == pytest.approx(100 * (1 - share[0, 0]), abs=0.11)
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
    events = timeline.events[timeline.events["iteration"] == iteration(page)]
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
    events = timeline.events[timeline.events["iteration"] == shown]
    name = timeline.names.index("grads-all-reduce")
    of_stage = {stage: [e for e in events if e["name"] == name and e["rank"] // 2 == stage] for stage in (0, 1)}
    expected = {
        int(e["rank"]): int(max(other["start_ns"] for other in of_stage[e["rank"] // 2]) - e["start_ns"])
        for e in events[events["name"] == name]
    }
    said = page.evaluate(
        f"Object.fromEntries(Array.from(events.name.keys()).filter((i) => events.name[i] === {name} &&"
        f" columns.iterations[events.iteration[i]] === {shown}).map((i) => [events.rank[i], waiting(i)]))"
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
    events = timeline.events[timeline.events["iteration"] == iteration(page)]
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
    traces = page.evaluate("element('timeline').data.map(({base, x, y}, name) => [run.names[name], base, x, y])")
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
    figures = statistics(timeline, SHAPE.ranks)
    lengths = figures.length_ns[1:] / 1e6
    compute = np.median(figures.sum_ms(COMPUTE)[:, 1:].reshape(2, -1), axis=1)
    said = page.inner_text(".answer")
    assert said.startswith(
        f"From its first event to its last an iteration takes {np.median(lengths):,.1f} ms, "
        f"the median of 4 steady ones; the next one begins before it ends, so one is done every "
        f"{figures.usual_period_ms:,.1f} ms, and {figures.bubble:.1%} of these is bubble, "
    )
    assert "where 1F1B with equal stages has 20.0%." in said
    longest = int(np.argmax(compute))
    assert re.search(rf"Stage {longest} computes longest, [\d.]+ ms; stage {1 - longest} shortest", said)
    assert page.locator(".answer").bounding_box()["y"] < page.locator("#overview").bounding_box()["y"]


def test_the_pages_link_to_each_other(page: Page, run: Path):
    links = page.locator("nav a").evaluate_all("(all) => all.map((one) => one.href)")
    assert links == [(run / "report/index.html").as_uri()]


def test_the_summary_opens_and_links_to_the_timeline(run: Path, open_page: Opener):
    page = open_page(run / "report/index.html", color_scheme="dark")
    assert page.locator("svg[aria-label^=Loss] circle").count() == SHAPE.iterations
    links = page.locator("nav a").evaluate_all("(all) => all.map((one) => one.href)")
    assert links == [(run / "report/timeline.html").as_uri()]


def test_hostile_names_are_shown_as_they_are(tmp_path: Path, open_page: Opener):
    hostile = "</script><b>x</b><img src=x onerror=alert(1)>"
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, SHAPE)
    plan = run / "plan.json"
    plan.write_text(plan.read_text().replace('"g0-0"', json.dumps(hostile)))
    path = run / "events/rank-00000.bin"
    content = path.read_bytes()
    (length,) = struct.unpack_from("<I", content, 8)
    header = json.loads(content[12 : 12 + length])
    header["names"][header["names"].index("batch-generator")] = hostile
    text = json.dumps(header).encode()
    path.write_bytes(content[:8] + struct.pack("<I", len(text)) + text + content[12 + length :])
    main([str(run)])
    page = ready(open_page(run / "report/timeline.html"))
    assert hostile in page.locator("#legend button").all_inner_texts()
    assert hostile in page.locator("#node option").all_inner_texts()
    assert page.locator("main img, main b").count() == 0


def test_more_events_than_can_be_drawn_become_bars_that_tell_how_many(tmp_path: Path, open_page: Opener):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, Shape(pipeline=1, micro_batches=2, iterations=2))
    path = run / "events/rank-00000.bin"
    many = np.zeros(50_000, RECORD)
    many["name"], many["iteration"], many["peer"] = 1, 3, -1
    many["start_ns"] = 10**12 + np.arange(len(many)) * 1_000_000
    many["end_ns"] = many["start_ns"] + 900_000
    with path.open("ab") as file:
        file.write(many.tobytes())
    main([str(run)])
    page = ready(open_page(run / "report/timeline.html"))
    drawn_after(page, lambda: (page.fill("#iteration", "3"), page.press("#iteration", "Enter")))
    bars = page.evaluate("element('timeline').data.flatMap((trace) => trace.hovertext)")
    assert 0 < len(bars) <= page.evaluate("MOST_BARS")
    assert sum(int(bar.removeprefix("<b>").split(" × ")[0]) for bar in bars) == len(many)


def test_a_run_with_ranks_that_have_no_events_still_shows_the_others(tmp_path: Path, open_page: Opener):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, SHAPE)
    (run / "events/rank-00002.bin").unlink()
    cut = run / "events/rank-00001.bin"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    main([str(run)])
    page = ready(open_page(run / "report/timeline.html"))
    assert page.locator(BARS).count() == events_in(events_of(run, SHAPE.ranks), iteration(page))
    assert "no event file of rank 2" in page.inner_text(".missing")
    drawn_after(page, lambda: (page.fill("#iteration", "5"), page.press("#iteration", "Enter")))
    assert "2 of 4 rows have no events in it" in page.inner_text("#said")


def test_a_rehearsal_of_chunks_says_so_above_all_and_knows_the_nodes_it_stands_for(tmp_path: Path, open_page: Opener):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    shape = Shape(data=2, chunks=2, schedule="interleaved", ranks_per_node=2, rehearsal="virtual")
    make_run(run, shape)
    main([str(run)])
    summary, page = open_page(run / "report/index.html"), ready(open_page(run / "report/timeline.html"))
    for one in (summary, page):
        banner, header = one.locator(".emulated").bounding_box(), one.locator("header").bounding_box()
        assert banner["y"] == 0
        assert banner["y"] + banner["height"] <= header["y"]
        assert "clock virtual" in one.inner_text(".emulated")
    assert page.locator("#node option").all_inner_texts() == ["all", "g0-0", "g1-1"]
    events = events_of(run, shape.ranks)
    drawn_after(page, lambda: page.select_option("#node", "g1-1"))
    assert page.locator(BARS).count() == events_in(events, iteration(page), [2, 3])
    told = page.evaluate("element('timeline').data.flatMap((trace) => trace.hovertext)")
    assert any("· chunk 0<" in text for text in told)
    assert any("· chunk 1<" in text for text in told)
    forward = page.evaluate("element('timeline').data[run.names.indexOf('forward-compute')].x.length")
    assert forward == 2 * shape.chunks * shape.micro_batches


def test_both_parts_of_a_backward_pass_are_told_apart_among_computation(tmp_path: Path, open_page: Opener):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, Shape(schedule="zb_h1"))
    main([str(run)])
    page = ready(open_page(run / "report/timeline.html"))
    computation = page.locator("#legend fieldset", has_text="computation").get_by_role("button")
    parts = ["backward-input-compute", "backward-weight-compute"]
    assert [name for name in computation.all_inner_texts() if name.startswith("backward")] == parts
    assert page.evaluate(f"new Set({json.dumps(parts)}.map((name) => shade(name, -1, 0))).size") == 2


def test_every_task_of_the_engine_has_a_look_of_its_own(page: Page):
    known = page.evaluate("Object.keys(TASKS)")
    assert set(known) >= (set(ENGINE_NAMES) - {"clock"}) | set(NAMES)
    for scheme in ("light", "dark"):
        assert page.evaluate(f"new Set(Object.values(TASKS).map((task) => task.{scheme})).size") == len(known)


def test_of_more_than_64_ranks_the_slowest_replica_is_shown_first(tmp_path: Path, open_page: Opener):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    shape = Shape(pipeline=2, data=33, micro_batches=2, iterations=2)
    make_run(run, shape)
    main([str(run)])
    page = ready(open_page(run / "report/timeline.html"))
    figures = statistics(events_of(run, shape.ranks), shape.ranks)
    busy = figures.sum_ms(COMPUTE)[:, 1].reshape(2, 33).max(axis=0)
    slowest = int(np.argmax(busy))
    assert page.input_value("#dp") == str(slowest)
    options = page.locator("#dp option").all_inner_texts()
    assert options[:2] == ["all", f"{slowest} (slowest)"]
    assert [int(option.split()[0]) for option in options[1:]] == sorted(range(33), key=lambda dp: -busy[dp])
    labels = page.locator("#timeline .ytick text").all_text_contents()
    assert sorted(int(label.split()[1]) for label in labels) == [slowest, slowest + 33]
    drawn_after(page, lambda: page.select_option("#dp", ""))
    assert "48 of 66 rows in view" in page.inner_text("#said")


def test_pages_fit_a_laptop_in_light_and_dark_and_their_pictures_are_kept(run: Path, open_page: Opener, pictures: Path):
    for scheme in ("light", "dark"):
        for name in ("index", "timeline"):
            page = open_page(run / f"report/{name}.html", color_scheme=scheme, viewport={"width": 1366, "height": 768})
            if name == "timeline":
                ready(page)
            page.screenshot(path=pictures / f"run-{name}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= 1366
