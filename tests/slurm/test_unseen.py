"""A node of a real cluster that cannot see the run's folder is named, by `status` and by `doctor`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.slurm.test_doctor import Doctor, errors, examine, prefix  # noqa: F401  (fixtures)
from tests.support import PATIENCE_S
from tests.support.cases import each
from tests.support.launch.live import FOREVER
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import BOTH_WAYS, assert_failed, submitted, verdict_of


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """In a folder of its own, without which a node has all else that it needs."""
    folder = tmp_path / "shared" / "runs"
    folder.mkdir(parents=True)
    return folder


UNSEEING = {
    "first-node": ("hgx-001", "hgx-0", "Slurm could not launch job "),
    "another": ("gpu2-002", "gpu2-1", "No such file or directory"),
}


@pytest.mark.parametrize(("het", "node"), each(BOTH_WAYS, [*UNSEEING]))
def test_its_verdict_comes_soon(isolated: Cluster, runs: Path, het: str, node: str) -> None:
    host, name, why = UNSEEING[node]
    isolated.hide(host, runs.parent)
    run = submitted(runs, *FOREVER, f"executor.het={het}")
    begun = time.monotonic()
    verdict = verdict_of(run)
    waits = run.read_json(run.plan)["meeting_timeout_s"]
    assert time.monotonic() - begun < PATIENCE_S < waits, "the others do not wait for it"
    told = f"node {name}: {host} cannot see or write to runs_dir={runs} ({why}"
    assert_failed(verdict, "runs-dir-unseen", told)


def test_the_first_node_of_a_waiting_job(isolated: Cluster, runs: Path) -> None:
    isolated.hide("gpu2-001", runs.parent)
    verdict = verdict_of(submitted(runs, *FOREVER))
    assert_failed(verdict, "runs-dir-unseen", f"node gpu2-0: gpu2-001 cannot see or write to runs_dir={runs}")


@pytest.mark.parametrize(("host", "node"), [("gpu2-001", "gpu2-0"), ("gpu2-002", "gpu2-1")])
def test_doctor_names_it(isolated: Cluster, runs: Path, examine: Doctor, host: str, node: str) -> None:  # noqa: F811
    isolated.hide(host, runs.parent)
    begun = time.monotonic()
    found = errors(examine())
    assert time.monotonic() - begun < PATIENCE_S, "nobody waits for it"
    assert set(found) == {("gpu2", "runs_dir"), ("gpu2", "nodes"), ("all nodes", "all-reduce")}
    assert found["gpu2", "runs_dir"].startswith(f"{node}: {host} cannot see or write to runs_dir={runs}")
