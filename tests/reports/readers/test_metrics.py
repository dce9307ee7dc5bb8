"""Lines of metrics as a table."""

from __future__ import annotations

import math

from reports.readers.metrics import metrics_frame, metrics_lines


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
