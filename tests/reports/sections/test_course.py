"""The course on a run's page has every number of metrics.jsonl, as an independent reading of the file finds it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from reports.readers.megatron_log import Sizes
from reports.sources import Source
from tests.reports.test_cli import report
from tests.support.reports.figures import course_of, lines_of
from tests.support.reports.synthetic import PRICE_PER_HOUR, Shape, make_run

SHAPE = Shape(pipeline=2, data=2, ranks_per_node=2, iterations=6)
MARKUP = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs/tiny/20260101-000000-aaaa"
    make_run(folder, SHAPE)
    return folder


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def relogged(run: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The course of the run with these lines instead."""
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report(run)
    return course_of((run / "report/index.html").read_text())


def test_every_number_of_every_key_is_in_a_chart(run: Path) -> None:
    lines = logged(run)
    for at, line in enumerate(lines):
        line |= {"nll": 2.0 / (at + 1), MARKUP: at, "__proto__": -at, "loss_scale": 2.0 ** (20 - at), "": 1e-12 * at}
    lines[2] |= {"valid_loss": 3.25, "valid_bleu": 17.5, "evaluation_s": 0.5}
    lines[5] |= {"valid_loss": 3.0, "valid_bleu": 21.5, "evaluation_s": 0.5}
    drawn = lines_of(relogged(run, lines))
    names = {
        "loss": "loss/training",
        "valid_loss": "loss/evaluation",
        "elapsed_ms": "elapsed_ms/mean between log lines",
    }
    for key in {key for line in lines for key in line} - {"iteration"}:
        start = lines[0]["unix"] if key == "unix" else 0
        wanted = [(line["iteration"], line[key]) for line in lines if key in line]
        found = drawn[names.get(key, f"{key}/{key}")]
        assert [at for at, _ in found] == [at for at, _ in wanted], key
        unit = 1  # of the clock too, since the run is short
        assert [value for _, value in found] == pytest.approx([(value - start) / unit for _, value in wanted]), key
    assert MARKUP not in (run / "report/index.html").read_text()


def test_what_is_not_finite_breaks_the_line_and_is_counted_and_text_costs_no_other_number(run: Path) -> None:
    lines = logged(run)
    for line, value in zip(lines, [0.5, math.nan, math.inf, "high", None, 0.75], strict=True):
        line["accuracy"] = value
    lines[0] |= {"never": None}
    del lines[4]["grad_norm"]
    course = relogged(run, lines)
    chart = next(one for one in course["charts"] if one["key"] == "grad_norm")
    assert chart["lines"][0]["y"] == [2.5] * 4 + [None, 2.5]
    drawn = lines_of(course)
    assert drawn["accuracy/accuracy"] == [(1, 0.5), (6, 0.75)], "of few values those that there are"
    assert not [name for name in drawn if name.startswith("never")]
    assert [value for _, value in drawn["loss/loss"]] == pytest.approx([line["loss"] for line in lines])
    said, _ = report(run)
    assert "metrics.jsonl: 'accuracy' is not a number in line 4; left out there" in said
    lines = [line | {"accuracy": None if at == 2 else 0.5} for at, line in enumerate(lines)]
    (line,) = next(one for one in relogged(run, lines)["charts"] if one["key"] == "accuracy")["lines"]
    assert (line["y"][2], line["lost"]) == (None, [1, 3])


def test_the_x_axis_may_be_samples_tokens_hours_and_dollars(run: Path) -> None:
    lines = logged(run)
    lines[3] |= {"valid_loss": 3.25, "evaluation_s": 3600.0}
    course = relogged(run, lines)
    axes = {axis["name"]: axis.get("y") for axis in course["axes"]}
    assert [*axes] == ["iteration", "samples", "tokens", "hours", "dollars"]
    assert axes["samples"] == [line["consumed_samples"] for line in lines]
    assert axes["tokens"] == [line["consumed_samples"] * 1024 for line in lines]
    hours, spent = 0.0, []
    for line in lines:
        hours += line["elapsed_ms"] / 3.6e6 + line.get("evaluation_s", 0.0) / 3600
        spent.append(hours)
    assert axes["hours"] == pytest.approx(spent)
    assert axes["dollars"] == pytest.approx([one * 2 * PRICE_PER_HOUR for one in spent])
    for line in lines:
        line["consumed_samples"] = -line["iteration"]
        line["elapsed_ms"] = math.inf
    assert [axis["name"] for axis in relogged(run, lines)["axes"]] == ["iteration"], "an axis only grows"


def test_of_a_long_run_every_extreme_is_drawn_and_means_of_equal_spans_are_smoothed(run: Path) -> None:
    drawn, first = random.Random(1), logged(run)[0]
    lines = [first | {"iteration": at, "loss": drawn.gauss(5, 1), "consumed_samples": at} for at in range(1, 5001)]
    lines[3333]["loss"] = 99.0
    lines[4444]["loss"] = -99.0
    course = relogged(run, lines)
    points = lines_of(course)["loss/loss"]
    assert len(points) <= 1200
    assert {(3334, 99.0), (4445, -99.0)} <= {*points}
    by_iteration = {line["iteration"]: line["loss"] for line in lines}
    assert [value for _, value in points] == pytest.approx([by_iteration[at] for at, _ in points])
    means = next(one for one in course["charts"] if one["key"] == "loss")["lines"][0]["means"]
    each, ends = means["each"], course["places"][means["at"]]
    assert ends == [*range(each, 5000, each), 5000]
    wanted = [
        sum(by_iteration[at] for at in range(max(end - each, ends[number - 1] if number else 0) + 1, end + 1))
        / (end - (ends[number - 1] if number else 0))
        for number, end in enumerate(ends)
    ]
    assert means["y"] == pytest.approx(wanted)
    assert (run / "report/index.html").stat().st_size < 3_000_000


def test_a_prediction_stands_beside_the_iteration_times(run: Path) -> None:
    drawn = lines_of(relogged(run, logged(run)))
    predicted = drawn["elapsed_ms/predicted"]
    assert [at for at, _ in predicted] == [1, 6]
    assert predicted[0][1] == predicted[1][1]
    prediction = Source.find(run.parent, str(run), Sizes()).read().prediction
    assert predicted[0][1] == pytest.approx(prediction.iteration_s * 1e3)
