"""The benchmark's run folder is one that status judges, and its measurement works; how long it takes is not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import status
from benchmarks.status import NODES, make_run, status_cpu_s
from launch.judge.findings import findings
from launch.judge.state import State
from launch.observe.look import observe
from tests.support.cases import drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    "alone", drawn([True, False], 0, always=[False]), ids=lambda alone: "on one node" if alone else "over all nodes"
)
def test_the_benchmarks_run_of_128_nodes_with_long_logs_is_judged(
    tmp_path: Path, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tenth of its logs."""
    monkeypatch.setattr(status, "LOG_BYTES", status.LOG_BYTES // 10)
    monkeypatch.setattr(status, "ITERATIONS", status.ITERATIONS // 10)
    run = make_run(tmp_path / "xl" / "long", alone)
    found = findings(run, observe(run))
    assert (found.verdict.state, len(found.seen.nodes), found.mismatches) == (State.running, NODES, ())
    assert found.stderr[0].count > 100
    assert status_cpu_s(run) > 0
