"""A served page follows its run without reloading, says when it is over, and when the server is gone."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from conf.run_folder.rundir import RunDir
from launch.commands.serving import library
from launch.commands.serving.library import Library
from launch.commands.serving.server import Server, reply
from tests.reports.test_cli import Found
from tests.support.reports.in_browser import until
from tests.support.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=2, micro_batches=2, iterations=6)
NAME, BEFORE = "tiny/20260102-000000-bbbb", "tiny/20260101-000000-aaaa"


@dataclass
class Growing:
    """A run of which the lines of the log come one after the other."""

    run: RunDir
    lines: list[str]
    over: bool = False

    def log(self, count: int) -> None:
        self.run.metrics.write_text("".join(self.lines[:count]))


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Growing:
    for name in (BEFORE, NAME):
        make_run(tmp_path / "runs" / name, SHAPE)
    run = RunDir(tmp_path / "runs" / NAME)
    grows = Growing(run, run.metrics.read_text().splitlines(keepends=True))
    grows.log(0)
    shutil.rmtree(run.path / "memory")
    monkeypatch.setattr(library, "FRESH_S", 0.05)
    monkeypatch.setattr(library, "LOOK_S", 0.1)
    monkeypatch.setattr(library, "SHARE", 0)
    monkeypatch.setattr(library, "all_findings", lambda _: Found(over=grows.over))
    return grows


def now(shelf: Library, have: str = "") -> dict[str, Any]:
    answer = reply(shelf, "t", "localhost", f"/t/runs/{NAME}/now?have={have}")
    assert answer.headers["Content-Type"].startswith("application/json")
    found: dict[str, Any] = json.loads(answer.body)
    return found


def text(part: dict[str, Any]) -> str:
    return re.sub(r"<[^>]+>", " ", part.get("html", ""))


def test_only_what_has_changed_is_sent(growing: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "FRESH_S", 0.0)
    growing.log(3)
    shelf = Library(growing.run.runs)
    first = now(shelf)
    assert all("html" in part for part in first["parts"])
    again = now(shelf, ",".join(part["digest"] for part in first["parts"]))
    assert [part["digest"] for part in again["parts"]] == [part["digest"] for part in first["parts"]]
    assert not any("html" in part for part in again["parts"])
    growing.log(4)
    more = now(shelf, ",".join(part["digest"] for part in first["parts"]))
    changed = [text(part) for part in more["parts"] if "html" in part]
    assert any("Course" in one for one in changed)
    assert not any("Reproduce" in one for one in changed)
    assert not more["over"]
    growing.over = True
    growing.log(5)
    assert now(shelf)["over"]
    page = reply(shelf, "t", "localhost", f"/t/runs/{NAME}/").body
    assert 'http-equiv="refresh"' not in page
    assert "live-data" not in page, "a page of a run that is over asks nothing"


def test_a_run_is_compared_with_its_prediction_and_the_run_before(growing: Growing) -> None:
    shelf = Library(growing.run.runs)
    said = next(text(part) for part in now(shelf)["parts"] if "beside" in part["html"])
    assert "No iteration is logged yet." in said
    lines = [json.loads(line) for line in growing.lines]
    own = [100.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    other = [900.0, 20.0, 21.0, 22.0, 23.0, 24.0]
    for line, ms in zip(lines, own, strict=True):
        line["elapsed_ms"] = ms
    growing.lines = [f"{json.dumps(line)}\n" for line in lines]
    growing.log(6)
    before = growing.run.runs / BEFORE / "metrics.jsonl"
    earlier = [json.loads(line) for line in before.read_text().splitlines()]
    for line, ms in zip(earlier, other, strict=True):
        line |= {"elapsed_ms": ms, "loss": line["loss"] + 0.5}
    before.write_text("".join(f"{json.dumps(line)}\n" for line in earlier))
    part = next(part for part in now(Library(growing.run.runs))["parts"] if 'id="beside"' in part["html"])
    said = text(part)
    assert "12.0 ms per iteration" in said, "the median of the lines after the first"
    assert f"The run before, {BEFORE}: 22.0 ms" in said
    assert "so this run takes 45.5% shorter than the run before." in said
    assert f"Loss at iteration 6: {lines[-1]['loss']:.4f}, in the run before {earlier[-1]['loss']:.4f}" in said
    assert "The run before has the same configuration." in said
    assert re.search(r"Predicted: [\d,.]+ ms, so it takes [\d,.]+% (longer|shorter) than predicted", said)
    assert f'href="../{BEFORE.split("/")[1]}/"' in part["html"]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in part["html"].split("<tr>")[2:]]
    assert [cell[0] for cell in cells] == ["6", "5", "4", "3", "2", "1"]
    assert (cells[0][1], cells[0][3]) == ("14.0", "24.0")
    for line, ms in zip(earlier, [90.0, 9.0, 13.0, 12.5, 10.0, 15.0], strict=True):
        line["elapsed_ms"] = ms
    before.write_text("".join(f"{json.dumps(line)}\n" for line in earlier))
    said = next(text(part) for part in now(Library(growing.run.runs))["parts"] if 'id="beside"' in part["html"])
    assert "the difference is within the spread of the iterations" in said


def test_the_first_run_of_a_name_is_compared_with_none(growing: Growing) -> None:
    shelf = Library(growing.run.runs)
    answer = json.loads(reply(shelf, "t", "localhost", f"/t/runs/{BEFORE}/now").body)
    assert any("No earlier run of this name has logged iterations." in text(part) for part in answer["parts"])


@pytest.fixture
def served(growing: Growing) -> Iterator[Server]:
    with Server(Library(growing.run.runs), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Browser, served: Server) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.goto(f"{served.address}runs/{NAME}/", wait_until="commit", timeout=0)
    until(opened, "document.body?.dataset.figures === 'drawn' && typeof live !== 'undefined'")
    opened.evaluate("window.loadedOnce = true")
    yield opened
    context.close()
    assert wrong == []


def test_a_page_follows_its_run_to_its_end_without_reloading(page: Page, growing: Growing) -> None:
    assert page.locator("#course").count() == 0, "nothing is logged yet"
    growing.log(2)
    until(page, "document.querySelector('#course .head') && course.data.charts[0].lines[0].y.length === 2")
    page.evaluate("choose({ smoothing: 0.5 })")
    page.locator("details > summary").first.click()
    summary = page.locator("details[open] > summary").first.inner_text()
    growing.log(5)
    until(page, "course.data.charts[0].lines[0].y.length === 5")
    until(page, "document.querySelector('.plot.course').data[0].x.length === 5")
    assert page.evaluate("course.chosen.smoothing") == 0.5
    drawn = page.evaluate("[...document.querySelector('.plot.course').data[0].y]")
    assert drawn == pytest.approx([json.loads(line)["loss"] for line in growing.lines[:5]], rel=1e-6)
    assert page.locator("#beside td").first.inner_text() == "5", "the newest line first"
    assert page.locator(".card", has_text="Iteration").first.inner_text().count("5 of 6")
    assert page.locator("details[open] > summary").first.inner_text() == summary
    growing.log(6)
    page.evaluate("choose({ x: 'hours' })")
    before = [json.loads(line) for line in (growing.run.runs / BEFORE / "metrics.jsonl").read_text().splitlines()]
    hours = [sum(line["elapsed_ms"] for line in before[: at + 1]) / 3.6e6 for at in range(len(before))]
    until(page, "document.querySelector('.plot.course').layout.xaxis.title.text === 'hours'")
    number = page.evaluate("course.data.charts[0].lines.findIndex((line) => line.kind === 'before')")
    x = page.evaluate("course.data.places[course.data.charts[0].lines.at(-1).at].map((at) => course.x(at, 'before'))")
    assert number > 0
    assert x == pytest.approx(hours, rel=1e-5), "the run before has hours of its own"
    growing.over = True
    until(page, "live.ended")
    assert page.inner_text("#live-said") == "The run is over; this page has stopped asking."
    assert page.evaluate("course.data.charts[0].lines[0].y.length") == 6
    assert page.evaluate("window.loadedOnce"), "it was never loaded anew"
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(500)
    assert asked == []


def test_a_page_says_when_the_server_is_gone_and_goes_on_when_it_answers_again(
    page: Page, served: Server, growing: Growing
) -> None:
    page.route("**/now**", lambda route: route.abort())
    until(page, "document.getElementById('live').className === 'lost'")
    said = page.inner_text("#live")
    assert said.startswith("Not live")
    assert "No answer from the server since" in said
    assert "If tdpp report --serve has ended, start it again and open the address that it prints" in said
    page.unroute("**/now**")
    growing.log(1)
    until(page, "document.getElementById('live').className === ''")
    until(page, "document.querySelector('#beside td')?.textContent === '1'")
    served.token = "another"
    until(page, "live.ended")
    assert "The server no longer knows this address" in page.inner_text("#live-said")
