"""What a page says first of a run that failed: the culprit, the end of its logs, the command that follows."""

from __future__ import annotations

import html
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.launching.preflight import with_length
from launch.commands.report import main as report
from launch.control.planning.plan import make_plan
from launch.judge.findings import all_findings
from reports.readers.megatron_log import Sizes
from reports.sections.findings_section import launch_with, ways_on
from reports.sources import Source
from tests.reports.conftest import Opener
from tests.reports.test_cli import failure
from tests.support.reports.every_page import _submitted
from tests.support.reports.in_browser import ready, until
from tests.support.reports.synthetic import Shape, make_run

OVERRIDES = (
    "model=tiny parallel=single cluster=local parallel.data=2 parallel.pipeline=2 parallel.partition=2-2 "
    "parallel.micro_batch_size=4 parallel.global_batch_size=16 train.iterations=20 train.lr=1e-3 'name=a b'"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, Shape(pipeline=2, data=2, iterations=6, slow={1: 1.5}))
    _submitted(folder, exit_code=1)
    plan = json.loads((folder / "plan.json").read_text())
    plan["train"] |= {"lr": 1e-3, "checkpoint": True}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "overrides.txt").write_text("\n".join(shlex.split(OVERRIDES)) + "\n")
    return folder


def fails(run: Path, rank: int, type_: str, message: str) -> str:
    """The page of a run in which a rank failed, and two others lost it."""
    for other in range(3):
        own = {"type": type_, "message": message, "symptom": False, "unix": 9.0}
        lost = {"type": "PeerLost", "message": f"lost rank {rank}", "symptom": True, "unix": 5.0}
        content = failure(other, **(own if other == rank else lost))
        (run / f"errors/rank-{other:05d}.json").write_text(json.dumps(content | {"start": "0.0"}))
    assert report([str(run), "--runs-dir", str(run.parents[1])]) == 0
    return (run / "report/index.html").read_text()


def commands(page: str) -> list[str]:
    section = page.split("<h2>Failed ranks</h2>")[1].split("</section>")[0]
    return [html.unescape(text) for text in re.findall(r'<pre class="command">(.*?)</pre><button', section, re.DOTALL)]


def test_the_culprit_comes_first_and_advice_on_speed_after_what_follows(run: Path) -> None:
    page = fails(run, 1, "ValueError", "bad luck")
    parts = ["<h2>Failed ranks</h2>", "bad luck", "lost rank 1", "<h3>Next step</h3>", 'class="cards"', 'id="why"']
    section = page[page.index(parts[0]) :]
    assert [*map(section.index, parts)] == sorted(map(section.index, parts))


def test_after_a_nan_the_command_starts_the_same_run_with_half_the_learning_rate(run: Path) -> None:
    (command,) = commands(fails(run, 1, "NotFinite", "iteration 5: the loss is nan"))
    tdpp, launch, *words = shlex.split(command)
    assert (tdpp, launch) == ("tdpp", "launch")
    before, after = (make_plan(with_length(compose(given)), "x") for given in (shlex.split(OVERRIDES), words))
    assert after.train.lr == before.train.lr / 2
    assert (after.partition, after.shares, after.model) == (before.partition, before.shares, before.model)


def test_a_run_that_ran_out_of_memory_gets_smaller_micro_batches_or_goes_on(run: Path) -> None:
    (resume,) = commands(fails(run, 1, "EngineError", "out of memory: 1 GiB was asked for"))
    assert RunDir.find(run.parent, shlex.split(resume)[2].removeprefix("resume=")).path == run
    record = Source.find(run.parent, str(run), Sizes()).read().record
    larger = replace(record, plan=replace(record.plan, micro_batch_size=4, global_batch_size=64))
    smaller, again = (step.command for step in ways_on(larger, all_findings(RunDir(run))))
    assert shlex.split(smaller)[-1] == "parallel.micro_batch_size=2"
    assert again == resume


def test_a_changed_value_takes_the_place_of_the_given_one() -> None:
    command = launch_with(["a=1", "+train.lr=2", "b='x y'"], {"train.lr": "1"})
    assert shlex.split(command) == ["tdpp", "launch", "a=1", "b='x y'", "train.lr=1"]


def test_the_timeline_opens_with_the_last_iteration_and_marks_its_end(run: Path, open_page: Opener) -> None:
    fails(run, 1, "ValueError", "bad luck")
    page = ready(open_page(run / "report/timeline.html"))
    assert page.input_value("#iteration") == "6"
    until(page, "chart.shown.ended && chart.shown.ended.length === 1")
    row, time = page.evaluate("[chart.rows[chart.shown.ended[0].row].rank, chart.shown.ended[0].time]")
    ends = page.evaluate("chart.shown.bars.filter((bar) => bar.row === chart.rowOf.get(1)).map((bar) => bar.end)")
    assert row == 1
    assert time == pytest.approx(max(ends), abs=2)
    said = page.inner_text(".answer")
    assert said.startswith("Failed: rank 1 failed with ValueError: bad luck. Iteration 6 is its last")
    page.click("#previous")
    until(page, "chart.shown.ended.length === 0")
