"""The timeline page of runs that are large, damaged, hostile, rehearsed, or of any other shape; in Chromium."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page

from launch.commands.report import main
from reports.facts.statistics import statistics
from reports.readers.events import RECORD
from tests.reports.conftest import Opener
from tests.support.reports.in_browser import drawn, drawn_after, events_in, events_of, iteration, labels, ready
from tests.support.reports.records import records
from tests.support.reports.synthetic import Shape, make_run, ranks_of

SHAPE = Shape(pipeline=2, data=2, micro_batches=4, iterations=5, ranks_per_node=2)


def made(tmp_path: Path, shape: Shape) -> Path:
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, shape)
    return run


def timeline_page(run: Path, open_page: Opener) -> Page:
    main([str(run)])
    return ready(open_page(run / "report/timeline.html"))


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
    run = made(tmp_path, shape)
    page = timeline_page(run, open_page)
    timeline = events_of(run, shape.ranks)
    found: Counter[tuple[object, ...]] = Counter()
    for index, number in enumerate(range(1, shape.iterations + 1)):
        page.evaluate(f"show({index})")
        origin = records(timeline)["start_ns"][records(timeline)["iteration"] == number].min()
        held = page.evaluate(
            """chart.what.find(0, chart.length, 0, chart.rows.length - 1).map(({i, row, start, end}) =>
                [run.names[events.name[i]], chart.rows[row].rank, columns.iterations[events.iteration[i]],
                 events.chunk[i], events.micro_batch[i], events.peer[i], start, end - start])"""
        )
        found.update((*bar[:6], origin + bar[6], bar[7]) for bar in held)
    assert found == Counter(
        (
            timeline.names[event["name"]],
            *(int(event[key]) for key in ("rank", "iteration", "chunk", "micro_batch", "peer", "start_ns")),
            int(event["end_ns"] - event["start_ns"]),
        )
        for event in records(timeline)
    )


def test_hostile_names_are_shown_as_they_are(tmp_path: Path, open_page: Opener):
    hostile = "</script><b>x</b><img src=x onerror=alert(1)>"
    run = made(tmp_path, SHAPE)
    plan = run / "plan.json"
    plan.write_text(plan.read_text().replace('"g0-0"', json.dumps(hostile)))
    path = run / "events/rank-00000.bin"
    content = path.read_bytes()
    (length,) = struct.unpack_from("<I", content, 8)
    header = json.loads(content[12 : 12 + length])
    header["names"][header["names"].index("batch-generator")] = hostile
    text = json.dumps(header).encode()
    path.write_bytes(content[:8] + struct.pack("<I", len(text)) + text + content[12 + length :])
    page = timeline_page(run, open_page)
    assert hostile in page.locator("#legend button").all_inner_texts()
    assert hostile in page.locator("#node option").all_inner_texts()
    assert page.locator("main img").count() == 0
    assert "x" not in page.locator("main b").all_inner_texts()


def test_more_events_than_can_be_drawn_become_bars_that_tell_how_many(tmp_path: Path, open_page: Opener):
    run = made(tmp_path, Shape(pipeline=1, micro_batches=2, iterations=2))
    path = run / "events/rank-00000.bin"
    many = np.zeros(50_000, RECORD)
    many["name"], many["iteration"], many["peer"] = 1, 3, -1
    many["start_ns"] = 10**12 + np.arange(len(many)) * 1_000_000
    many["end_ns"] = many["start_ns"] + 900_000
    with path.open("ab") as file:
        file.write(many.tobytes())
    page = timeline_page(run, open_page)
    drawn_after(page, lambda: (page.fill("#iteration", "3"), page.press("#iteration", "Enter")))
    bars = page.evaluate("chart.shown.bars.map((bar) => chart.what.tip({row: bar.row, time: bar.start, bar})[0])")
    assert 0 < len(bars) <= 2 * page.evaluate("chart.wide")
    assert sum(int(bar.split(" × ")[0]) for bar in bars) == len(many) == drawn(page)


def test_a_run_with_ranks_that_have_no_events_still_shows_the_others(tmp_path: Path, open_page: Opener):
    run = made(tmp_path, SHAPE)
    (run / "events/rank-00002.bin").unlink()
    cut = run / "events/rank-00001.bin"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    page = timeline_page(run, open_page)
    assert drawn(page) == events_in(events_of(run, SHAPE.ranks), iteration(page))
    assert "no event file for rank 2" in page.inner_text(".missing")
    drawn_after(page, lambda: (page.fill("#iteration", "5"), page.press("#iteration", "Enter")))
    assert "2 of 4 rows have no events in it" in page.inner_text("#said")


def test_a_rehearsal_of_chunks_says_so_above_all_and_knows_the_nodes_it_stands_for(tmp_path: Path, open_page: Opener):
    shape = Shape(data=2, chunks=2, schedule="interleaved", ranks_per_node=2, rehearsal="virtual")
    run = made(tmp_path, shape)
    page, summary = timeline_page(run, open_page), open_page(run / "report/index.html")
    for one in (summary, page):
        banner, header = one.locator(".emulated").bounding_box(), one.locator("header").bounding_box()
        assert banner["y"] == 0
        assert banner["y"] + banner["height"] <= header["y"]
        assert "clock virtual" in one.inner_text(".emulated")
    assert page.locator("#node option").all_inner_texts() == ["all", "g0-0", "g1-1"]
    events = events_of(run, shape.ranks)
    drawn_after(page, lambda: page.select_option("#node", "g1-1"))
    assert drawn(page) == events_in(events, iteration(page), [2, 3])
    told = page.evaluate("chart.shown.bars.flatMap((bar) => chart.what.tip({row: bar.row, time: bar.start, bar}))")
    assert any(text.endswith("· chunk 0") for text in told)
    assert any(text.endswith("· chunk 1") for text in told)
    forward = page.evaluate(
        "chart.shown.bars.filter((bar) => run.names[events.name[bar.i]] === 'forward-compute').length"
    )
    assert forward == 2 * shape.chunks * shape.micro_batches


def test_both_parts_of_a_backward_pass_are_told_apart_among_computation(tmp_path: Path, open_page: Opener):
    page = timeline_page(made(tmp_path, Shape(schedule="zb_h1")), open_page)
    computation = page.locator("#legend fieldset", has_text="computation").get_by_role("button")
    parts = ["backward-input-compute", "backward-weight-compute"]
    assert [name for name in computation.all_inner_texts() if name.startswith("backward")] == parts
    assert page.evaluate(f"new Set({json.dumps(parts)}.map((name) => shade(name, -1, 0))).size") == 2


def test_of_many_ranks_the_slowest_replica_and_one_of_each_kind_are_shown_first(tmp_path: Path, open_page: Opener):
    """Those that are like one of these are behind a line that says so; a click on it, a button and the map show them.
    Three slow replicas, which are alike, do not unfold the others."""
    shape = Shape(pipeline=2, data=33, micro_batches=2, iterations=6, slow={4: 1.5, 5: 1.5, 6: 1.5})
    run = made(tmp_path, shape)
    page = timeline_page(run, open_page)
    figures = statistics(events_of(run, shape.ranks), ranks_of(shape))
    compute = np.median(figures.spent.compute[:, 1:], axis=1).reshape(2, 33)
    bubble = np.median(figures.bubble_share[:, 1:], axis=1).reshape(2, 33)
    busy = compute.max(axis=0)
    slowest = int(np.argmax(busy))
    assert slowest in (4, 5, 6)
    options = page.locator("#dp option").all_inner_texts()
    assert options[:2] == ["all", f"{slowest} (slowest)"]
    assert [int(option.split()[0]) for option in options[1:]] == sorted(range(33), key=lambda dp: -busy[dp])

    def shown(stage: int) -> list[int]:
        rows = page.evaluate(f"chart.rows.filter((row) => !row.fold && row.stage === {stage}).map((row) => row.rank)")
        return [rank % 33 for rank in rows]

    def like(stage: int, one: int, other: int) -> bool:
        ratio = compute[stage, one] / compute[stage, other]
        return max(ratio, 1 / ratio) < 1.05 and abs(bubble[stage, one] - bubble[stage, other]) < 0.05

    first = [shown(0), shown(1)]
    for stage, seen in enumerate(first):
        assert slowest in seen
        assert len(seen) < 12
        assert not any(like(stage, one, other) for one in seen for other in seen if one != other)
        assert all(any(like(stage, one, other) for other in seen) for one in range(33))
    folded = [label for label in labels(page) if label.startswith("▸")]
    assert [int(label.split()[1]) for label in folded] == [33 - len(seen) for seen in first]
    row = page.evaluate("chart.rows.findIndex((row) => row.fold)")
    x, y = page.evaluate(f"[chart.left + 30, chart.middle({row})]")
    drawn_after(page, lambda: page.locator("#timeline canvas").click(position={"x": x, "y": y}))
    assert shown(0) == list(range(33))
    assert shown(1) == first[1]
    drawn_after(page, page.get_by_role("button", name="Fold similar ranks").click)
    assert shown(0) == first[0]
    drawn_after(page, page.get_by_role("button", name="Show all ranks").click)
    assert [shown(0), shown(1)] == [list(range(33))] * 2
    drawn_after(page, lambda: page.set_viewport_size({"width": 1440, "height": 500}))
    assert "rows in view; scroll for the others" in page.inner_text("#said")
    axis = page.locator("#timeline canvas").bounding_box()
    drawn_after(page, lambda: page.evaluate("void (chart.box.scrollTop = 1e6)"))
    assert page.locator("#timeline canvas").bounding_box() == axis, "the axis of times stays where it is"
    assert page.evaluate("chart.shown.visible.at(-1) === chart.rows.length - 1")
