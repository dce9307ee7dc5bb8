"""The course in a real browser: axes, smoothing, cursor, zoom, by pointer and by keyboard, against the raw lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.reports.conftest import Opener
from tests.reports.test_cli import report
from tests.support.reports.in_browser import until
from tests.support.reports.synthetic import Shape, make_run

PLOT = "document.querySelector('.plot.course')"
HEAD = "#course .head:has(b[title='{key}'])"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("course") / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, Shape(pipeline=2, iterations=20, micro_batches=2))
    lines = logged(folder)
    for at, line in enumerate(lines):
        line |= {"accuracy": None if at == 7 else at / 20, "<b>own</b>": 10.0 ** (at - 10), "skipped": int(at == 3)}
        if at % 5 == 4:
            line |= {"valid_loss": line["loss"] + 0.1, "evaluation_s": 1.0}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report(folder)
    return folder


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def page(run: Path, open_page: Opener) -> Page:
    opened = open_page(run / "report/index.html", viewport={"width": 1240, "height": 900})
    until(opened, "document.body.dataset.figures === 'drawn'")
    return opened


def chosen(page: Page, changes: str) -> None:
    """Waits until what is chosen in the page's own words is drawn."""
    page.evaluate(f"choose({changes})")


def drawn(page: Page, key: str) -> list[dict[str, Any]]:
    """Traces of the chart of a key: x and y as Plotly has them."""
    found: list[dict[str, Any]] = page.evaluate(
        """(key) => {
          const number = course.charts.findIndex((chart) => chart.key === key);
          const axis = number ? `y${number + 1}` : "y";
          const traces = document.querySelector(".plot.course").data.filter((one) => one.yaxis === axis);
          return traces.map(({ x, y }) => ({ x: [...x], y: [...y] }));
        }""",
        key,
    )
    return found


def values_at(page: Page, key: str) -> list[str]:
    return page.locator(HEAD.format(key=key)).locator("output").all_inner_texts()


def pointed(page: Page, iteration: int) -> None:
    """Moves the pointer over the second chart to an iteration."""
    page.mouse.move(*place_of(page, iteration))
    until(page, f"cursor.iteration === {iteration}")


def place_of(page: Page, iteration: int) -> tuple[float, float]:
    """In the window, over the second chart."""
    x, y = page.evaluate(
        """(iteration) => {
          const plot = document.querySelector(".plot.course");
          const axis = plot._fullLayout.xaxis;
          plot.scrollIntoView();
          const box = plot.getBoundingClientRect();
          return [box.left + axis._offset + axis.d2p(course.x(iteration)), box.top + course.tops[1] + 60];
        }""",
        iteration,
    )
    return x, y


def test_one_cursor_reads_the_values_of_all_charts(page: Page, run: Path) -> None:
    lines = logged(run)
    for iteration in (1, 8, 20):
        pointed(page, iteration)
        line = lines[iteration - 1]
        assert float(values_at(page, "loss")[0]) == pytest.approx(line["loss"], rel=1e-5)
        assert float(values_at(page, "elapsed_ms")[0].replace(",", "")) == pytest.approx(line["elapsed_ms"], rel=1e-5)
        assert float(values_at(page, "<b>own</b>")[0].replace(",", "")) == pytest.approx(line["<b>own</b>"])
        assert page.inner_text("#course-at").startswith(f"iteration {iteration} · {line['consumed_samples']} samples")
    assert values_at(page, "accuracy") == ["0.95"]
    pointed(page, 8)
    assert values_at(page, "accuracy") == ["not finite"]
    assert values_at(page, "loss")[1].endswith("(at 5)"), "the last evaluation before"
    heads = page.locator("#course .head b").all_inner_texts()
    assert len(heads) == len({*heads}) == page.evaluate("course.data.charts.length")
    assert "<b>own</b>" in heads
    tops = page.locator("#course .head").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().top)")
    assert tops == sorted(tops), "one above the other"


def test_the_keyboard_moves_the_cursor_zooms_and_shows_everything(page: Page) -> None:
    page.focus("#course-cursor")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    until(page, "cursor.iteration === 3")
    said = page.get_attribute("#course-cursor", "aria-valuetext")
    assert said is not None and said.startswith("iteration 3 ·") and "Learning rate 1.5e-4" in said
    page.keyboard.press("+")
    until(page, "document.querySelector('.plot.course').layout.xaxis.range?.[1] < 15")
    page.keyboard.press("0")
    until(page, "course.chosen.between === null && document.getElementById('course-whole').disabled")
    wanted = ["course-x", "course-smoothing", "course-log-x", "course-log-y", "course-cursor"]
    page.focus("#course-x")
    reached = []
    for _ in wanted:
        reached.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert reached == wanted


def test_the_x_axis_follows_the_choice_and_keeps_what_is_shown(page: Page, run: Path) -> None:
    lines = logged(run)
    hours, spent = 0.0, []
    for line in lines:
        hours += (line["elapsed_ms"] / 1e3 + line.get("evaluation_s", 0.0)) / 3600
        spent.append(hours)
    for name, wanted in (
        ("samples", [line["consumed_samples"] for line in lines]),
        ("tokens", [line["consumed_samples"] * 1024 for line in lines]),
        ("hours", spent),
        ("dollars", [one * 8.0 for one in spent]),
    ):
        page.select_option("#course-x", name)
        until(page, f"document.querySelector('.plot.course').layout.xaxis.title.text === '{name}'")
        assert drawn(page, "loss")[0]["x"] == pytest.approx(wanted, rel=1e-5), name
    chosen(page, "{ x: 'iteration', between: [5, 10] }")
    page.select_option("#course-x", "hours")
    until(page, "document.querySelector('.plot.course').layout.xaxis.title.text === 'hours'")
    shown = page.evaluate("document.querySelector('.plot.course').layout.xaxis.range")
    assert shown == pytest.approx([spent[4], spent[9]], rel=1e-5)
    page.click("#course-whole")
    until(page, "course.chosen.between === null")


def test_smoothing_is_an_exponential_mean_without_the_weight_of_its_start(page: Page, run: Path) -> None:
    page.evaluate("part('smoothing').value = 0.8; part('smoothing').dispatchEvent(new Event('input'))")
    until(page, "document.querySelectorAll('.plot.course .scatterlayer .trace').length > course.data.charts.length")
    raw, smooth = drawn(page, "grad_norm")
    assert raw["y"] == pytest.approx(smooth["y"]) == [2.5] * 20, "of equal values it is that value"
    values = [line["loss"] for line in logged(run)]
    weights = [0.8**back for back in range(20)]
    wanted = [
        sum(weight * value for weight, value in zip(weights, reversed(values[: at + 1]), strict=False))
        / sum(weights[: at + 1])
        for at in range(20)
    ]
    assert drawn(page, "loss")[1]["y"] == pytest.approx(wanted, rel=1e-5)
    assert drawn(page, "accuracy")[1]["y"][7] is None
    pointed(page, 20)
    assert values_at(page, "loss")[0] == f"{values[-1]:.6g}, smoothed {wanted[-1]:.6g}"


def test_axes_are_logarithmic_where_values_allow_it_and_say_what_is_not_drawn(page: Page) -> None:
    page.check("#course-log-y")
    until(page, "document.querySelector('.plot.course').layout.yaxis.type === 'log'")
    axis = f"{PLOT}.layout[`yaxis${{n ? n + 1 : ''}}`]"
    types = page.evaluate(f"Object.fromEntries(course.charts.map(({{ key }}, n) => [key, {axis}.type]))")
    assert (types["<b>own</b>"], types["accuracy"], types["skipped"]) == ("log", "log", "linear")
    notes = page.locator(HEAD.format(key="accuracy")).locator("small").inner_text()
    assert notes == "not finite in 1 line, first in iteration 8; 1 of 0 or less not drawn"
    assert drawn(page, "accuracy")[0]["y"][0] is None
    assert page.locator(HEAD.format(key="skipped")).locator("small").inner_text() == "linear: most are 0 or less"
    page.check("#course-log-x")
    until(page, "document.querySelector('.plot.course').layout.xaxis.type === 'log'")
    pointed(page, 2)
    x = page.evaluate("document.querySelector('.plot.course')._fullLayout.xaxis.range")
    assert x[0] <= 0 <= math.log10(20) <= x[1]


def test_dragging_zooms_all_charts_and_choices_outlast_a_reload(page: Page) -> None:
    pointed(page, 5)
    page.mouse.down()
    page.mouse.move(*place_of(page, 15), steps=5)
    page.mouse.up()
    until(page, "course.chosen.between !== null")
    assert page.evaluate("course.chosen.between") == pytest.approx([5, 15], abs=0.3)
    page.click("#course-choice summary")
    page.locator("#course-choice input").nth(1).uncheck()
    until(page, "course.charts.length === course.data.charts.length - 1")
    page.reload()
    until(page, "document.body.dataset.figures === 'drawn'")
    assert page.evaluate("course.chosen.between") == pytest.approx([5, 15], abs=0.3)
    assert page.evaluate("course.charts.length === course.data.charts.length - 1")
    assert page.inner_text("#course-choice summary") == page.evaluate(
        "`Charts: ${course.data.charts.length - 1} of ${course.data.charts.length}`"
    )


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (800, "dark"), (1240, "light")])
def test_heads_stay_above_their_charts_at_every_width(page: Page, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    until(page, f"document.body.dataset.scheme === '{scheme}'")
    until(page, "Math.abs(PLOT._fullLayout.width - PLOT.clientWidth) < 2".replace("PLOT", PLOT))
    until(page, f"Math.abs({PLOT}._fullLayout.height - course.tops.at(-1) - FOOT_PIXELS) < 2")
    page.evaluate("cursor.show(20)")
    wrong = page.evaluate(
        """[...document.querySelectorAll("#course .head")].flatMap((head, number) => {
          const box = head.getBoundingClientRect();
          const figure = document.getElementById("course").getBoundingClientRect();
          const inside = [...head.children].every((one) => {
            const { top, bottom, right } = one.getBoundingClientRect();
            return top >= box.top - 1 && bottom <= box.bottom + 1 && right <= figure.right + 1;
          });
          const chart = figure.top + course.tops[number + 1] - CHART_PIXELS;
          return inside && Math.abs(box.bottom - chart) < 1 ? [] : [head.textContent];
        })"""
    )
    assert wrong == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
