"""Lines of metrics as a table."""

from __future__ import annotations

import math

from reports.readers.json_lines import metrics_frame, metrics_lines


def test_a_number_beyond_all_floating_point_ones_is_infinite() -> None:
    frame = metrics_frame([{"iteration": 1, "loss": 10**400}, {"iteration": 2, "loss": -(10**400)}, {"iteration": 3}])
    assert frame["loss"].tolist()[:2] == [math.inf, -math.inf]
    assert frame["iteration"].tolist() == [1, 2, 3]


def test_what_is_no_number_costs_its_line_nothing_else_and_is_named() -> None:
    texts = [
        '{"iteration": 1, "loss": 3.5, "note": "warm", "ok": true}',
        '{"iteration": 2, "loss": NaN, "note": "cold", "deep": [1]}',
        '{"iteration": "3", "loss": 1.0}',
        '{"iteration": true, "loss": 1.0}',
        "[1]",
    ]
    notes: list[str] = []
    lines = metrics_lines(texts, "metrics.jsonl", notes)
    assert [line["iteration"] for line in lines] == [1, 2]
    assert lines[0] == {"iteration": 1, "loss": 3.5}
    assert math.isnan(lines[1]["loss"])
    said = "\n".join(notes)
    assert "metrics.jsonl: 'note' is not a number in line 1 and 1 more; left out there" in said
    assert "'deep' is not a number in line 2; left out there" in said
    assert said.count("is not a metrics line") == 3


def test_times_and_samples_that_are_not_finite_are_left_out_and_named_but_an_infinite_loss_stays() -> None:
    lines = (
        '{"iteration": 1, "elapsed_ms": 1e999, "consumed_samples": 8, "loss": 1e999}',
        f'{{"iteration": 2, "elapsed_ms": 3.5, "consumed_samples": {10**400}}}',
        '{"iteration": 3, "elapsed_ms": -1e999, "consumed_samples": 1e999}',
    )
    notes: list[str] = []
    found = metrics_lines(lines, "metrics.jsonl", notes)
    assert [*found] == [
        {"iteration": 1, "consumed_samples": 8, "loss": math.inf},
        {"iteration": 2, "elapsed_ms": 3.5},
        {"iteration": 3},
    ]
    assert notes == [
        "metrics.jsonl: 'elapsed_ms' is not a finite number in line 1 and 1 more; left out there",
        "metrics.jsonl: 'consumed_samples' is not a finite number in line 2 and 1 more; left out there",
    ]
