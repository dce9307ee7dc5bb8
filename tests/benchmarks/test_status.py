"""The promise that `benchmarks.status` measures: a look at a large run takes half a second of CPU time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.status import AIM_CPU_S, NODES, make_run, status_cpu_s
from launch.findings import findings
from launch.observe import observe
from launch.verdict import State


@pytest.mark.parametrize("alone", [True, False], ids=["on one node", "over all nodes"])
def test_status_of_128_nodes_with_100_mb_of_logs_takes_half_a_second(tmp_path: Path, alone: bool) -> None:
    run = make_run(tmp_path / "xl" / "long", alone)
    found = findings(run, observe(run))
    assert (found.verdict.state, len(found.seen.nodes), found.mismatches) == (State.running, NODES, ())
    assert found.stderr[0].count > 100
    status_cpu_s(run)
    assert status_cpu_s(run) <= AIM_CPU_S
