"""Every kind of page in a real browser, at three widths by day and by night, on paper and with the keyboard.

Pictures of all of them, and a PDF of each, are kept in `build/screenshots`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.support import ROOT
from tests.support.reports import every_page
from tests.support.reports.in_browser import until

VIEWS = ((400, "light"), (400, "dark"), (800, "dark"), (800, "light"), (1240, "light"), (1240, "dark"))
"""Widths and colour schemes, one of which changes at a time: each has all figures drawn anew."""
PAPER = {False: 718, True: 1046}
"""Pixels between the margins of A4, upright and, for wide tables, in landscape."""
SCREENSHOTS = ROOT / "build/screenshots"
LOOKS = (ROOT / "tests/support/reports/looks.js").read_text()
NAMES = (
    *("run", "timeline", "failed", "rehearsal", "fresh", "fresh-timeline", "comparison", "difference", "list", "error"),
    *("many-timeline", "log", "log-timeline", "search", "front", "stages", "simulation", "learning", "data", "profile"),
)
DRAWN = """(
[...document.querySelectorAll("div.plot")].every((place) => !place.clientWidth
  || (place.data && (place.layout.width || Math.abs(place.drawnWidth - place.clientWidth) < 2)))
&& (!document.querySelector("div.plot") || document.body.dataset.scheme === "{scheme}")
&& (!document.querySelector("#columns") || ["ready", "difference"].some((key) => document.body.dataset[key])))
"""
AT_LOAD = f"addEventListener('load', () => window.drawnAtLoad = {DRAWN.replace('{scheme}', 'light')})"
"""`chromium --print-to-pdf` prints a page when it has loaded."""
LEAVE = """
(wide) => document.querySelectorAll("main > section").forEach((one) => {
  one.style.display = "";
  if (wide !== null && (getComputedStyle(one).page === "wide") !== wide) one.style.display = "none";
})
"""
"""Leaves the sections that are printed in landscape, or those that are not, or all."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = every_page.write_every_page(tmp_path_factory.mktemp("pages"))
    assert (*found,) == NAMES
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return found


@pytest.fixture
def opened(pages: dict[str, Path], name: str, browser: Browser) -> Iterator[Page]:
    """The page as on a phone by day; it may not complain of anything."""
    context = browser.new_context(offline=True, viewport={"width": VIEWS[0][0], "height": 900}, color_scheme="light")
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.add_init_script(AT_LOAD)
    page.goto(pages[name].as_uri())
    assert page.evaluate("window.drawnAtLoad"), "figures are drawn when the page has loaded"
    settled(page, "light")
    yield page
    context.close()
    assert complaints == []


def settled(page: Page, scheme: str) -> None:
    """Waits until figures have the size and the colours that they are to have."""
    until(page, DRAWN.replace("{scheme}", scheme))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_looks_well(opened: Page, name: str) -> None:
    """At every width, in light and dark: nothing sticks out, overlaps, breaks or is hard to read; then on paper."""
    wrong = {}
    for width, scheme in VIEWS:
        opened.emulate_media(color_scheme=scheme)
        opened.set_viewport_size({"width": width, "height": 900})
        settled(opened, scheme)
        opened.screenshot(path=SCREENSHOTS / f"{name}-{width}-{scheme}.png", full_page=True, timeout=0)
        wrong[width, scheme] = opened.evaluate(LOOKS)
    assert {place: said for place, said in wrong.items() if said} == {}
    opened.emulate_media(media="print", color_scheme="dark")
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    for wide, width in PAPER.items():
        opened.set_viewport_size({"width": width, "height": 1000})
        opened.evaluate(LEAVE, wide)
        assert opened.evaluate(LOOKS) == [], f"on paper, {width} px"
        cut = opened.locator("canvas, .main-svg").evaluate_all(
            "(all) => all.filter((one) => one.getBoundingClientRect().right > innerWidth).length"
        )
        assert cut == 0
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not any(one.is_visible() for one in opened.locator("#controls, .modebar, input, #compare").all())
    opened.evaluate(LEAVE, None)
    opened.pdf(path=SCREENSHOTS / f"{name}.pdf", prefer_css_page_size=True)


@pytest.mark.parametrize("name", ["run", "timeline", "comparison", "list", "search"])
def test_the_keyboard_reaches_every_control_and_shows_where_it_is(opened: Page, name: str) -> None:
    controls = "a[href], button:not(:disabled), input:not(:disabled), select, summary, [tabindex='0']"
    wanted = opened.locator(controls).evaluate_all(
        "(all) => all.map((one, at) => ((one.dataset.at = at), one)).filter((one) => one.checkVisibility()).length"
    )
    reached = {}
    for _ in range(2 * wanted):
        opened.keyboard.press("Tab")
        at, outline = opened.evaluate(
            "[document.activeElement.dataset.at, getComputedStyle(document.activeElement).outlineStyle]"
        )
        if at in reached:
            break
        if at is not None:
            reached[at] = outline
    assert len(reached) == wanted
    assert "none" not in reached.values()


def rows(page: str) -> Iterator[list[str]]:
    """What the cells of each row of its tables say."""
    for row in re.findall(r"<tr[ >].*?</tr>", page, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        yield [unescape(re.sub(r"<[^>]+>", " ", cell)).strip() for cell in cells]


def test_no_page_has_a_row_of_zeros_or_says_the_same_thing_three_times(pages: dict[str, Path]) -> None:
    zeros, often = {}, {}
    for name, path in pages.items():
        page = re.sub(r"<(script|style|pre)\b.*?</\1>", " ", path.read_text(), flags=re.DOTALL)
        numbers = [[cell for cell in row[1:] if re.fullmatch(r"[-+−]?[\d.,]+ ?%?", cell)] for row in rows(page)]
        zeros[name] = [row for row in numbers if row and not any(re.search("[1-9]", cell) for cell in row)]
        prose = re.findall(
            r"<(?:p|li|h[123]|dd|summary|figcaption)\b[^>]*>(.*?)</(?:p|li|h[123]|dd|summary)>", page, re.DOTALL
        )
        text = unescape(re.sub(r"<[^>]+>", " ", ". ".join(prose)))
        sentences = [" ".join(one.split()) for one in re.split(r"[.:;] ", text)]
        counted = Counter(one for one in sentences if len(one.split()) > 4)
        often[name] = [one for one, times in counted.items() if times > 2]
    assert ({name: one for name, one in zeros.items() if one}, {name: one for name, one in often.items() if one}) == (
        {},
        {},
    )


def test_every_static_file_is_named_in_their_readme() -> None:
    static = ROOT / "reports/static"
    said = (static / "README.md").read_text()
    assert [file.name for file in static.iterdir() if f"`{file.name}`" not in said and file.name != "README.md"] == []
