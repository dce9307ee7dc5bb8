"""What goes to other programs is what the run did; a page of a run that goes on follows it."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.run_folder.rundir import RunDir
from launch.commands.report import main
from reports.errors import ReportError
from reports.exports import LANES, Export, chrome_trace, lane, write_exports
from reports.pages import writing
from reports.readers import record
from reports.readers.events import EVENT, Timeline, frame, read_run
from reports.readers.megatron_log import Sizes
from reports.readers.record import Record
from tests.reports.conftest import Opener
from tests.reports.pages.test_comparison import Good
from tests.reports.test_cli import Found
from tests.support.full_disk import largest_file
from tests.support.reports.chromium import CHROMIUM
from tests.support.reports.in_browser import iteration, ready, until
from tests.support.reports.legacy import Job, calls, log
from tests.support.reports.records import records
from tests.support.reports.synthetic import Shape, make_run
from tests.support.reports.trace_format import checked, flows

SHAPE = Shape(pipeline=2, data=2, micro_batches=3, iterations=3, ranks_per_node=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    return folder


@pytest.fixture(scope="module")
def known(run: Path) -> tuple[Record, Timeline]:
    return record.read(RunDir(run)), read_run({rank: RunDir(run).rank_events(rank) for rank in range(SHAPE.ranks)})


def complete_events(trace: bytes) -> list[dict]:
    return [event for event in json.loads(gzip.decompress(trace))["traceEvents"] if event["ph"] == "X"]


def test_a_trace_has_every_event_in_its_lane_with_what_is_known_of_it(known):
    told, timeline = known
    origin = records(timeline)["start_ns"].min()
    found = complete_events(chrome_trace(told, timeline))
    assert len(found) == len(timeline.events)
    for event, line in zip(records(timeline), found, strict=True):
        assert (line["pid"], line["name"]) == (event["rank"], timeline.names[event["name"]])
        assert line["tid"] % len(LANES) == lane(line["name"])
        assert isinstance(line["ts"], int) and isinstance(line["dur"], int)
        assert abs(line["ts"] - (event["start_ns"] - origin) / 1e3) <= 0.5
        assert abs(line["ts"] + line["dur"] - (event["end_ns"] - origin) / 1e3) <= 0.5
        assert line["args"]["iteration"] == event["iteration"]
        assert line["args"].get("micro-batch", -1) == event["micro_batch"]
        assert line["args"].get("peer", -1) == event["peer"]
    assert min(line["ts"] for line in found) == 0


def test_a_trace_names_its_ranks_and_lanes(known):
    lines = json.loads(gzip.decompress(chrome_trace(*known)))["traceEvents"]
    names = {(line["pid"], line["tid"]): line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    assert names == {(rank, index): name for rank in range(SHAPE.ranks) for index, name in enumerate(LANES)}
    titles = {line["pid"]: line["args"]["name"] for line in lines if line["name"] == "process_name"}
    assert titles[3] == "rank 3 · stage 1 · dp 1 · g1-1"


def test_a_trace_is_in_the_format_and_has_a_flow_for_each_message_and_counters_for_each_rank(known):
    told, timeline = known
    trace = checked(chrome_trace(told, timeline))
    joined = flows(trace)
    receives = timeline.events["name"].isin(["forward-recv", "backward-recv"])
    assert len(joined) == receives.sum() > 0
    for send, receive in joined:
        assert (send["name"], receive["args"]["peer"]) == (receive["name"].replace("recv", "send"), send["pid"])
        assert send["args"]["micro-batch"] == receive["args"]["micro-batch"]
    held = [event["args"]["held"] for event in trace if event["ph"] == "C" and "held" in event["args"]]
    assert (min(held), max(held)) == (0, SHAPE.pipeline)


def test_a_message_that_seems_to_come_before_it_is_sent_has_no_flow(known):
    """A rank whose clock is a second behind: what it receives ends before it was sent."""
    told, timeline = known
    events = timeline.events.copy()
    late = events["rank"] == 3
    events.loc[late, ["start_ns", "end_ns"]] -= 1_000_000_000
    joined = flows(checked(chrome_trace(told, replace(timeline, events=events))))
    assert joined
    assert all(receive["pid"] != 3 for _, receive in joined)


TIMES = st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)).map(sorted)


@given(times=st.lists(TIMES, max_size=12))
def test_events_of_a_thread_never_overlap_unless_one_lies_inside_the_other(known, times: list[list[int]]):
    told, timeline = known
    events = np.zeros(len(times), EVENT)
    events["start_ns"], events["end_ns"] = np.array(times, "<i8").reshape(-1, 2).T
    events = events[np.lexsort((-events["end_ns"], events["start_ns"]))]
    lines = complete_events(chrome_trace(told, replace(timeline, events=frame(events, timeline.names))))
    threads = defaultdict(list)
    for line in lines:
        threads[line["tid"]].append((line["ts"], line["ts"] + line["dur"]))
    for spans in threads.values():
        for index, (start, end) in enumerate(spans):
            for begin, over in spans[:index]:
                assert over <= start or end <= over, f"{(begin, over)} and {(start, end)}"
    assert len(lines) == len(times)


def test_all_exports_lie_in_the_report_and_are_named(run: Path, known, capsys):
    assert main([str(run), "--trace", "--csv"]) == 0
    names = ["index.html", "timeline.html", "trace.json.gz", "events.csv", "metrics.csv"]
    assert capsys.readouterr().out.splitlines() == [str(run / "report" / name) for name in names]
    timeline = known[1]
    with (run / "report/events.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["rank"]), row["task"], int(row["iteration"])) for row in rows] == [
        (event.rank, event.name_, event.iteration)
        for event in timeline.events.rename(columns={"name": "name_"}).itertuples(index=False)
    ]
    lengths = [int(row["end_ns"]) - int(row["start_ns"]) for row in rows]
    assert lengths == (records(timeline)["end_ns"] - records(timeline)["start_ns"]).tolist()
    assert {row["node"] for row in rows if row["stage"] == "1"} == {"g1-1"}
    with (run / "report/metrics.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses == [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.skipif(not CHROMIUM.exists(), reason="no chromium")
def test_a_picture_is_taken_of_the_timeline(run: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "chromium").symlink_to(CHROMIUM)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    main([str(run), "--png"])
    picture = (run / "report/timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000, "an empty page has less"


def test_without_a_browser_a_picture_is_refused_before_anything_is_written(tmp_path: Path, run: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (run / "report/index.html").unlink(missing_ok=True)
    with pytest.raises(
        ReportError,
        match=r"--png needs Chromium or Chrome, but none of chromium, .* is in PATH; install one, or leave --png out",
    ):
        main([str(run), "--png"])
    assert not (run / "report/index.html").exists()


def test_watching_a_run_writes_its_pages_until_it_is_over_and_they_load_themselves(tmp_path: Path, monkeypatch, capsys):
    run = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(run, SHAPE)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    index, seen = run / "report/index.html", []

    def a_while_passes(_: float) -> None:
        seen.append("1 of 3" in index.read_text())
        assert '<meta http-equiv="refresh" content="5">' in index.read_text()
        (run / "metrics.jsonl").write_text("".join(lines))

    monkeypatch.setattr(writing.time, "sleep", a_while_passes)
    main([str(run), "--watch", "--csv"], lambda _: Found(over=bool(seen)))
    assert seen == [True]
    assert "3 of 3" in index.read_text()
    assert 'http-equiv="refresh"' not in index.read_text()
    names = ["index.html", "timeline.html", "events.csv", "metrics.csv"]
    assert capsys.readouterr().out.splitlines() == [str(run / "report" / name) for name in names]


@pytest.mark.slow
def test_watching_several_runs_writes_their_comparison_as_often(tmp_path: Path, monkeypatch, capsys):
    runs = [tmp_path / "runs/tiny" / stamp for stamp in ("20260101-000000-aaaa", "20260101-000001-bbbb")]
    for run in runs:
        make_run(run, SHAPE)
    (runs[1] / "metrics.jsonl").rename(tmp_path / "later.jsonl")
    comparison, seen = tmp_path / "runs/tiny/comparison.html", []

    def a_while_passes(_: float) -> None:
        seen.append("1 run to compare" in comparison.read_text())
        assert '<meta http-equiv="refresh" content="5">' in comparison.read_text()
        (tmp_path / "later.jsonl").rename(runs[1] / "metrics.jsonl")

    monkeypatch.setattr(writing.time, "sleep", a_while_passes)
    main([*map(str, runs), "--watch"], lambda _: Found(Good(), over=bool(seen)))
    assert seen == [True]
    assert "2 runs to compare" in comparison.read_text()
    assert 'http-equiv="refresh"' not in comparison.read_text()
    assert capsys.readouterr().out.splitlines()[-1] == str(comparison)


def test_a_full_disk_leaves_no_part_of_an_export(run: Path):
    main([str(run), "--trace", "--csv"])
    for option, name in (("--trace", "trace.json.gz"), ("--csv", "events.csv")):
        path = run / "report" / name
        whole = path.read_bytes()
        found = writing.Source.find(run, str(run), Sizes()).read()
        with largest_file(1000), pytest.raises(ReportError, match=rf"{name}: cannot be written \(File too large\)"):
            write_exports([Export(option[2:])], found, run / "report/timeline.html", None)
        assert path.read_bytes() == whole


def test_watching_a_log_ends_with_its_last_iteration(tmp_path: Path, monkeypatch):
    job = Job()
    text = log(job, calls(job))
    path = tmp_path / "n060.out"
    path.write_text(text[: text.index(" iteration        4/") + 9])

    def the_rest_is_written(_: float) -> None:
        path.write_text(text)

    monkeypatch.setattr(writing.time, "sleep", the_rest_is_written)
    main([str(path), "--watch"])
    assert "4 of 4" in (tmp_path / "n060.report/index.html").read_text()


def test_a_page_that_loads_itself_anew_stays_at_the_chosen_iteration(run: Path, open_page: Opener):
    writing.write(writing.Source.find(run, str(run), Sizes()), None, set(), refresh_s=3600)
    page = ready(open_page(run / "report/timeline.html"))
    page.fill("#iteration", "3")
    page.press("#iteration", "Enter")
    until(page, "view.iteration === 2")
    page.reload()
    assert iteration(ready(page)) == 3
