"""Lines of metrics as a table."""

from __future__ import annotations

import math

from reports.readers.record import metrics_frame


def test_a_number_beyond_all_floating_point_ones_is_infinite() -> None:
    frame = metrics_frame([{"iteration": 1, "loss": 10**400}, {"iteration": 2, "loss": -(10**400)}, {"iteration": 3}])
    assert frame["loss"].tolist()[:2] == [math.inf, -math.inf]
    assert frame["iteration"].tolist() == [1, 2, 3]
