"""What on the hosts makes a run's times uncertain, in sentences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from reports.path.why import conditions

TRAINS: Any = SimpleNamespace(rehearsal=None)
REHEARSES: Any = SimpleNamespace(rehearsal="virtual")
FIGURES: Any = SimpleNamespace(
    iterations=np.array([1, 2, 3]), steady=np.array([False, True, True]), period_ns=np.array([9e9, 1e8, 1e8])
)


def hosts(ranks: int, cores: int, load: float, waits: dict[int, float]) -> Any:
    """One host; of its ranks, the part of an iteration for which they waited for a core."""
    rows = [(rank, iteration, int(part * 1e8)) for rank, part in waits.items() for iteration in (1, 2, 3)]
    return SimpleNamespace(
        hosts=dict.fromkeys(range(ranks), "node7"),
        cores={"node7": cores},
        load={"node7": load},
        core_waits=pd.DataFrame(rows, columns=["rank", "iteration", "ns"]),
    )


def gpus(*used: tuple[int, float, float], shared: dict[str, list[int]] | None = None, **throttled: float) -> Any:
    """`throttled` by reason: the part of GPU 0's readings."""
    rows = [("node7", *row) for row in used]
    return SimpleNamespace(
        uses=pd.DataFrame(rows, columns=["node", "index", "power_w", "power_limit_w"]),
        shared=shared or {},
        throttled={("node7", 0): throttled} if throttled else {},
    )


@pytest.mark.parametrize(
    ("timeline", "said"),
    [
        (hosts(2, 2, 0.3, {0: 0.0, 1: 0.001}), []),
        (hosts(2, 2, 9.0, {}), []),
        (hosts(4, 2, 0.3, {}), ["4 ranks share 2 CPU cores of node7."]),
        (
            hosts(4, 2, 9.3, {0: 0.25, 1: 0.5, 2: 0.25, 3: 0.25}),
            [
                "4 ranks share 2 CPU cores of node7 with other processes (load average 9.3 when they began); "
                "ranks wait for a core for up to 50% of an iteration."
            ],
        ),
        (
            hosts(2, 2, 9.3, {0: 0.0, 1: 0.125}),
            ["Other processes compute on the CPU cores of node7; rank 1 waits for a core for 12% of an iteration."],
        ),
    ],
    ids=["alone", "load-without-waits", "shared", "shared-and-crowded", "others"],
)
def test_shared_cores_and_waits_for_them_are_said(timeline: Any, said: list[str]) -> None:
    assert conditions(timeline, TRAINS, FIGURES, None) == said


def test_gpus_that_are_shared_or_at_their_limits_are_said() -> None:
    alone = hosts(2, 8, 0.3, {})
    assert conditions(alone, TRAINS, FIGURES, gpus((0, 149.0, 150.0), (1, 80.0, 150.0))) == [
        "GPU 0 of node7 runs at its power limit."
    ]
    busy = gpus((0, 149.0, 150.0), (1, 150.0, 150.0), shared={"node7": [2, 3]})
    assert conditions(alone, TRAINS, FIGURES, busy) == [
        "GPUs 0-1 of node7 run at their power limits.",
        "Other processes compute on GPUs 2-3 of node7.",
    ]


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (
            {"heat (hardware)": 0.4, "hardware slowdown": 0.4},
            ["GPU 0 of node7 lowers its clocks in 40% of its readings: heat (hardware); check its cooling."],
        ),
        (
            {"power brake": 0.25},
            ["GPU 0 of node7 lowers its clocks in 25% of its readings: power brake; check the node's power supply."],
        ),
        ({"heat (software)": 0.01}, []),
    ],
    ids=["heat", "power brake", "once"],
)
def test_a_gpu_that_heat_or_its_power_supply_slows_comes_first(reasons: dict[str, float], said: list[str]) -> None:
    at_limit = gpus((0, 149.0, 150.0), **reasons)
    assert conditions(hosts(2, 8, 0.3, {}), TRAINS, FIGURES, at_limit) == [
        *said,
        "GPU 0 of node7 runs at its power limit.",
    ]


def test_a_rehearsal_has_no_conditions() -> None:
    assert conditions(hosts(4, 2, 9.3, {0: 0.5}), REHEARSES, FIGURES, None) == []
