"""A run's page says for how long each island waited for the others, and what it sent them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.commands.report import main
from megatron_ext.contract.events import NAMES
from megatron_ext.contract.models.counts import parameter_count
from reports.facts.frames import stages_frame
from reports.facts.statistics import Statistics, statistics
from reports.path.graph_of_events import make_graphs
from reports.readers.events import EVENT, Timeline, frame
from reports.readers.record import Record, read
from reports.sections.adaptive_section import islands_frame, islands_section
from tests.support.megatron_ext.engine_run import EngineRun, make_corpus, make_run
from tests.support.reports.in_browser import events_of

ITERATIONS, RANKS, MS = 6, 4, 1_000_000
ISLANDS = (
    *("parallel.data=4", "parallel.islands=2-2", "parallel.shares=2-2-1-1", "parallel.pipeline=1"),
    *("parallel.micro_batch_size=1", "parallel.global_batch_size=12"),
    *("train.sync_every=3", f"train.iterations={ITERATIONS}"),
)
Known = tuple[Record, Timeline, Statistics]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Two islands of two replicas."""
    folder = tmp_path_factory.mktemp("islands")
    made = make_run(folder / "runs/tiny/20260101-000000-aaaa", make_corpus(folder), *ISLANDS)
    assert made.go() == 0, made.stderr()
    return made


@pytest.fixture
def known(run: EngineRun) -> Known:
    """With times in ms as if the passes of the ranks took 10, 20, 100 and 90."""
    rows = []
    for iteration in range(1, ITERATIONS + 1):
        for rank, (passed, summed) in enumerate([(10, 21), (20, 21), (100, 101), (90, 101)]):
            spans = [("forward-compute", 0, passed), ("grads-all-reduce", passed, summed)]
            spans += [("islands-all-reduce", summed, 102)]  # of the loss
            if iteration % 3 == 0:
                spans += [("islands-all-reduce", 104 if rank == 1 else 103, 110)]
            for name, start, end in spans:
                begin = 1000 * iteration * MS
                rows.append((rank, NAMES.index(name), 0, iteration, -1, -1, begin + start * MS, begin + end * MS))
    timeline = Timeline(frame(np.array(rows, EVENT), NAMES), {}, 0, ())
    record = read(run.run)
    return record, timeline, statistics(timeline, run.plan.ranks, record)


def test_an_island_waits_for_the_slow_one_where_they_meet(known: Known):
    found = islands_frame(*known)
    assert found["part"].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert found["loss_ms"].tolist() == [80, 0]
    assert found["step_ms"].tolist() == [0, 1]


def test_replicas_wait_for_those_of_their_own_island_in_their_sums(known: Known):
    record, timeline, figures = known
    sums = timeline.events[timeline.events["name"] == "grads-all-reduce"]
    waits = [set((figures.waiting_ns[sums.index[sums["rank"] == rank]] / MS).tolist()) for rank in range(RANKS)]
    assert waits == [{10}, {0}, {0}, {10}]
    plan = record.plan
    graph = make_graphs(timeline, plan.ranks, [2], islands=plan.islands or ())[0]
    sums = [edge for edge in graph.edges if edge.event in sums.index and edge.rank >= 0]
    assert {(edge.rank, edge.lasts_ns) for edge in sums} == {(rank, MS) for rank in range(RANKS)}, "once all have come"


def test_bytes_are_those_that_its_ranks_counted(known: Known, run: EngineRun):
    """Weights in fp32 in a ring of two: an island sends them once at each of two common steps."""
    found = islands_frame(*known)["bytes"]
    counted = [json.loads(run.run.rank_traffic(rank).read_text())["bytes"]["islands"] for rank in range(RANKS)]
    assert found.tolist() == [sum(counted[:2]) / ITERATIONS, sum(counted[2:]) / ITERATIONS]
    assert found[1] == pytest.approx(2 * 4 * parameter_count(run.plan.model) / ITERATIONS)
    record, *others = known
    assert islands_frame(replace(record, traffic={}), *others)["bytes"].isna().all()


def test_the_page_says_what_to_do(known: Known):
    said = islands_section(*known)
    assert (
        "2 islands take a common step every 3 iterations. Island 0 waits 78% of each iteration for island 1: "
        "parallel.shares can give it more of the samples." in said
    )
    record, timeline, _ = known
    nothing = replace(timeline, events=frame(np.array([], EVENT), NAMES))
    assert "so their waits are not known" in islands_section(record, nothing, statistics(nothing, record.plan.ranks))


def test_the_page_of_a_real_run_has_it(run: EngineRun):
    assert (events_of(run.run.path, RANKS).events["name"] == "islands-all-reduce").sum() == RANKS * (ITERATIONS + 2)
    run.run.config.touch()
    main([str(run.run.path)])
    said = (run.run.path / "report/index.html").read_text().split("<h2>Islands</h2>")[1].split("</section>")[0]
    rows = [re.findall(r"<td[^>]*>(?:<span[^>]*>)?(.*?)(?:</span>)?</td>", row) for row in said.split("<tr>")[2:]]
    assert [row[:4] for row in rows] == [["0", "local-0", "2", "67%"], ["1", "local-0", "2", "33%"]]
    assert all("kB" in row[-1] for row in rows)


OWN = (
    *("parallel.data=2", "parallel.islands=1-1", "parallel.shares=2-1", "parallel.pipeline=2"),
    *("parallel.tensor=1/2", "parallel.partition=1-2/3", "parallel.micro_batch_size=1"),
    *("parallel.global_batch_size=12", "train.sync_every=3", f"train.iterations={ITERATIONS}"),
)
"""An island of two stages, and one of a tensor group."""


def test_the_last_stages_of_islands_with_plans_of_their_own_wait_for_each_other(tmp_path: Path):
    run = make_run(tmp_path / "runs/tiny/20260101-000000-aaaa", make_corpus(tmp_path), *OWN)
    rows = []
    for iteration in range(1, ITERATIONS + 1):
        for rank, passed in enumerate([5, 10, 100, 90]):
            spans = [("forward-compute", 0, passed), *([("islands-all-reduce", passed, 102)] if rank else [])]
            if iteration % 3 == 0:
                spans += [("islands-all-reduce", [103, 103, 104, 103][rank], 110)]
            for name, start, end in spans:
                begin = 1000 * iteration * MS
                rows.append((rank, NAMES.index(name), 0, iteration, -1, -1, begin + start * MS, begin + end * MS))
    timeline, record = Timeline(frame(np.array(rows, EVENT), NAMES), {}, 0, ()), read(run.run)
    figures = statistics(timeline, run.plan.ranks, record)
    found = islands_frame(record, timeline, figures)
    assert found["loss_ms"].tolist() == [90, 10], "of island 1 the second rank waits for the first"
    assert found["step_ms"].tolist() == [1, 1]
    frame_of_stages = stages_frame(record, figures)
    assert frame_of_stages["layers"].to_dict() == {
        "0 of island 0": "1 + embedding", "1 of island 0": "2 + head", "0 of island 1": "3 + embedding + head",
    }  # fmt: skip
    assert frame_of_stages["forward"].tolist() == [5, 10, 95]


def test_without_islands_there_is_no_such_section(known: Known):
    record, *others = known
    assert islands_section(replace(record, plan=replace(record.plan, islands=None)), *others) == ""
