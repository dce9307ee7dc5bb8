"""The list of runs in a real browser: what is ticked is compared, and stays ticked."""

from __future__ import annotations

from pathlib import Path

from reports.pages.runs_page import RunLine, render
from tests.reports.conftest import Opener


def test_what_is_ticked_stays_so_when_the_page_loads_itself_anew(tmp_path: Path, open_page: Opener) -> None:
    lines = [
        RunLine(name=name, link=f"runs/{name}/", state="running", tone="open", iteration="5/10", progress=0.5)
        for name in ("a/1", 'a/<b>"2', "a/3")
    ]
    path = tmp_path / "runs.html"
    path.write_text(render([*lines, RunLine(name="a/4", link=None, state="starting", tone="open")], "/runs"))
    page = open_page(path)
    assert page.locator("h1").inner_text() == "4 runs"
    boxes, button = page.locator("input[name=run]"), page.locator("#compare")
    assert (boxes.count(), button.is_disabled()) == (3, True)
    boxes.nth(0).check()
    assert button.is_disabled(), "one run cannot be compared"
    boxes.nth(1).check()
    assert button.is_enabled()
    page.reload()
    page.wait_for_function("document.querySelectorAll('input:checked').length == 2")
    assert [boxes.nth(number).is_checked() for number in range(3)] == [True, True, False]
    assert boxes.nth(1).get_attribute("value") == 'a/<b>"2'
