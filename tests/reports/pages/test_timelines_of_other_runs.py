"""The timeline page of runs that are large, damaged, hostile, rehearsed, or of any other shape; in Chromium."""

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

from launch.commands.report import main
from reports.facts.statistics import statistics
from reports.readers.events import RECORD
from tests.reports.conftest import Opener
from tests.support.reports.in_browser import BARS, drawn_after, events_in, events_of, iteration, ready
from tests.support.reports.records import records
from tests.support.reports.synthetic import Shape, make_run, ranks_of

SHAPE = Shape(pipeline=2, data=2, micro_batches=4, iterations=5, ranks_per_node=2)
BAR = re.compile(
    r"<b>(?P<name>[^<]*)</b><br>rank (?P<rank>\d+) · .*<br>iteration (?P<iteration>\d+)"
    r"( · micro-batch (?P<micro_batch>\d+)( · chunk (?P<chunk>\d+))?)?(<br>peer rank (?P<peer>\d+))?<br>start .*"
)


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
        drawn = "element('timeline').data.slice(0, -1).map(({base, x, y, hovertext}) => [base, x, y, hovertext])"
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
    assert page.locator("main img, main b").count() == 0


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
    bars = page.evaluate("element('timeline').data.slice(0, -1).flatMap((trace) => trace.hovertext)")
    assert 0 < len(bars) <= page.evaluate("MOST_BARS")
    assert sum(int(bar.removeprefix("<b>").split(" × ")[0]) for bar in bars) == len(many)


def test_a_run_with_ranks_that_have_no_events_still_shows_the_others(tmp_path: Path, open_page: Opener):
    run = made(tmp_path, SHAPE)
    (run / "events/rank-00002.bin").unlink()
    cut = run / "events/rank-00001.bin"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    page = timeline_page(run, open_page)
    assert page.locator(BARS).count() == events_in(events_of(run, SHAPE.ranks), iteration(page))
    assert "no event file of rank 2" in page.inner_text(".missing")
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
    assert page.locator(BARS).count() == events_in(events, iteration(page), [2, 3])
    told = page.evaluate("element('timeline').data.slice(0, -1).flatMap((trace) => trace.hovertext)")
    assert any("· chunk 0<" in text for text in told)
    assert any("· chunk 1<" in text for text in told)
    forward = page.evaluate("element('timeline').data[run.names.indexOf('forward-compute')].x.length")
    assert forward == 2 * shape.chunks * shape.micro_batches


def test_both_parts_of_a_backward_pass_are_told_apart_among_computation(tmp_path: Path, open_page: Opener):
    page = timeline_page(made(tmp_path, Shape(schedule="zb_h1")), open_page)
    computation = page.locator("#legend fieldset", has_text="computation").get_by_role("button")
    parts = ["backward-input-compute", "backward-weight-compute"]
    assert [name for name in computation.all_inner_texts() if name.startswith("backward")] == parts
    assert page.evaluate(f"new Set({json.dumps(parts)}.map((name) => shade(name, -1, 0))).size") == 2


def test_of_more_than_64_ranks_the_slowest_replica_is_shown_first(tmp_path: Path, open_page: Opener):
    shape = Shape(pipeline=2, data=33, micro_batches=2, iterations=2)
    run = made(tmp_path, shape)
    page = timeline_page(run, open_page)
    figures = statistics(events_of(run, shape.ranks), ranks_of(shape))
    busy = figures.spent.compute[:, 1].reshape(2, 33).max(axis=0)
    slowest = int(np.argmax(busy))
    assert page.input_value("#dp") == str(slowest)
    options = page.locator("#dp option").all_inner_texts()
    assert options[:2] == ["all", f"{slowest} (slowest)"]
    assert [int(option.split()[0]) for option in options[1:]] == sorted(range(33), key=lambda dp: -busy[dp])
    labels = page.locator("#timeline .ytick text").all_text_contents()
    assert sorted(int(label.split()[1]) for label in labels) == [slowest, slowest + 33]
    drawn_after(page, lambda: page.select_option("#dp", ""))
    assert "48 of 66 rows in view" in page.inner_text("#said")
