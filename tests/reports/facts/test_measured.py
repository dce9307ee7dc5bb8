"""What events say of an iteration's terms where some come several times, or several micro-batches pass at once."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd

from reports.facts.measured import _passes_at_once, _together

BUCKETS = [  # rank, seconds and how much of them waiting, of one bucket after the other
    (0, 3.0, 2.0),
    (0, 2.0, 0.0),
    (1, 1.5, 0.0),
    (1, 4.0, 1.0),
]


def test_all_reduces_of_several_buckets_are_added_up() -> None:
    """Each once the last replica has begun it: 1 of the first, 2 of the second."""
    rows = [
        {"task": "grads-all-reduce", "iteration": iteration, "rank": rank, "tp": 0, "s": s, "waited_s": waited}
        for iteration in (2, 3, 4)
        for rank, s, waited in BUCKETS
    ]
    assert _together(pd.DataFrame(rows), "grads-all-reduce", ["tp"]) == 3.0
    assert _together(pd.DataFrame(rows), "params-all-gather", ["tp"]) == 0.0


def test_micro_batches_in_streams_take_their_share_of_what_passes_at_once() -> None:
    tasks = ["forward-compute", "backward-compute", "loss-compute", "optimizer"]
    times = pd.DataFrame({"task": tasks * 2, "dp": [0] * 4 + [1] * 4})
    of = [list(_passes_at_once(times, SimpleNamespace(streams=streams))) for streams in ([3, 1], None)]
    assert of == [[3, 3, 3, 1, 1, 1, 1, 1], [1] * 8]
