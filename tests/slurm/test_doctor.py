"""`tdpp doctor` on a real cluster: well, and with one node that is not."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from data_prep.training import check_for_training
from launch.commands import doctor
from megatron_ext.doctor.__main__ import TOGETHER_S
from tests.support.launch.live import ENVIRONMENT, TDPP
from tests.support.megatron_ext.engine_run import make_corpus
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import NODES, SMALL, occupied, wait_for

Found = dict[tuple[str, str], tuple[str, str]]
"""Checks by place and name: level and text."""
Doctor = Callable[..., Found]
MODEL = ["model.hidden=32", "model.heads=2", "model.sequence_length=16", "model.vocab_size=101"]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return make_corpus(tmp_path / "data")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def examine(runs: Path, prefix: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """`tdpp doctor` with some overrides. The layout is a master job of one node and a slave job of two."""

    def run(*overrides: str) -> Found:
        argv = ["--json", f"runs_dir={runs}", *NODES, *SMALL, *MODEL, f"data.prefix={prefix}", *overrides]
        code = doctor.main(argv, preflight=check_for_training)
        checks: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["checks"]
        assert code == int(any(check["level"] == "error" for check in checks))
        return {(check["where"], check["what"]): (check["level"], check["text"]) for check in checks}

    return run


def errors(found: Found) -> dict[tuple[str, str], str]:
    return {place: text for place, (level, text) in found.items() if level == "error"}


def test_a_cluster_without_faults_is_all_well_and_every_check_is_made(slurm: Cluster, examine: Doctor) -> None:
    found = examine()
    assert errors(found) == {}
    of_a_group = {"nodes", "software", "CPUs", "data", "disk", "ports", "interface", "open ports"}
    wanted = {("here", what) for what in ("software", "runs_dir", "data", "slurm")}
    wanted |= {(group, what) for group in ("hgx", "gpu2") for what in of_a_group}
    wanted |= {("all nodes", what) for what in ("all-reduce", "clocks")}
    assert set(found) == wanted | {(pair, "links between nodes") for pair in ("hgx - gpu2", "gpu2")}
    assert found["gpu2", "nodes"][1] == "gpu2-001, gpu2-002"
    assert "accepts cluster.groups.hgx: 1 node, partition=hgx" in found["here", "slurm"][1]
    assert found["all nodes", "all-reduce"][1].startswith("correct on all 3 ranks, 1 MiB in ")


def test_in_containers_of_pyxis_all_is_well_too(slurm: Cluster, examine: Doctor, pyxis: list[str]) -> None:
    found = examine(*pyxis)
    assert errors(found) == {}
    assert found["gpu2", "nodes"][1] == "gpu2-001, gpu2-002, in a container of pyxis"
    assert found["all nodes", "all-reduce"][1].startswith("correct on all 3 ranks, 1 MiB in ")


def test_data_that_one_node_does_not_see_are_told_with_its_name(
    isolated: Cluster, examine: Doctor, prefix: Path
) -> None:
    isolated.hide("gpu2-002", prefix.parent)
    found = examine()
    assert set(errors(found)) == {("gpu2", "data")}
    assert found["gpu2", "data"][1].startswith(f"gpu2-1: {prefix}.bin, {prefix}.idx: No such file or directory; ")


def test_missing_gpus_are_told_for_each_group_and_hide_nothing_else(slurm: Cluster, examine: Doctor) -> None:
    found = examine("cluster.groups.gpu2.gpu=a10", "cluster.groups.hgx.gpu=a100_40gb")
    assert set(errors(found)) == {("hgx", "GPUs"), ("gpu2", "GPUs"), ("all nodes", "all-reduce")}
    assert found["gpu2", "GPUs"][1].startswith("gpu2-0, gpu2-1: torch ")
    assert "the plan needs 1 x A10 (cluster.groups.gpu2.gpus_per_node)" in found["gpu2", "GPUs"][1]
    assert found["all nodes", "all-reduce"][1].startswith("not tried: node hgx-0: rank 0: ")


def test_a_node_whose_worker_cannot_start_is_told_with_its_last_words(slurm: Cluster, examine: Doctor) -> None:
    found = examine("+cluster.groups.gpu2.environment.PYTHONHOME=/nonexistent")
    assert set(errors(found)) == {("gpu2", "nodes"), ("all nodes", "all-reduce")}
    assert found["gpu2", "nodes"][1].startswith("gpu2-0, gpu2-1: its worker exited with 1: ")
    assert found["hgx", "data"][0] == "ok"


def test_a_node_without_network_is_named_and_not_waited_for(isolated: Cluster, examine: Doctor, runs: Path) -> None:
    def cut_when_there() -> None:
        wait_for(lambda: list(runs.glob("doctor/*/*/doctor/gpu2-1.json")))
        isolated.cut("gpu2-002")

    cutter = Thread(target=cut_when_there)
    cutter.start()
    begun = time.monotonic()
    found = examine()
    cutter.join()
    assert time.monotonic() - begun < TOGETHER_S
    # On a busy machine Slurm may take the node for dead (SlurmdTimeout) and end its job before its worker has ended.
    expected = {(group, what) for group in ("hgx", "gpu2") for what in ("ports", "interface")}
    expected.add(("all nodes", "all-reduce"))
    assert set(errors(found)) - {("gpu2", "nodes")} == expected
    assert found["hgx", "ports"][1].startswith("hgx-0: cannot reach gpu2-1 (")
    assert "gpu2-1: cannot reach hgx-0, gpu2-0 (" in found["gpu2", "ports"][1]
    assert found["all nodes", "all-reduce"][1] == "not tried: node gpu2-1 cannot reach hgx-0, where ranks meet"
    assert isolated.jobs() == []


def test_no_job_is_submitted_that_slurm_would_not_take(slurm: Cluster, examine: Doctor, runs: Path) -> None:
    found = examine("cluster.groups.hgx.gres=gpu:h100:4", "cluster.groups.gpu2.partition=gpu3")
    assert set(errors(found)) == {("here", "slurm")}
    assert "gres=gpu:h100:4" in found["here", "slurm"][1]
    assert "invalid partition specified: gpu3" in found["here", "slurm"][1]
    assert not runs.exists()


def test_nodes_that_do_not_start_in_time_are_told_with_slurms_reason_and_given_up(
    slurm: Cluster, examine: Doctor
) -> None:
    with occupied(slurm, "--partition=gpu2", "--nodes=7"):
        found = examine("--wait-min=0.5")
        assert [job.name for job in slurm.jobs()] == ["wrap"]
    assert found["here", "jobs"][1].startswith("the nodes did not start within 30 s: waiting for gpu2-0, gpu2-1")
    assert "is PENDING (Resources)" in found["here", "jobs"][1]
    assert found["gpu2", "nodes"] == ("error", "gpu2-0, gpu2-1: did not start in time")
    assert found["all nodes", "all-reduce"] == ("error", "not tried: gpu2-0, gpu2-1 did not join")
    assert found["hgx", "data"][0] == "ok"


def test_interrupted_in_the_queue_it_says_why_and_takes_its_jobs_along(
    slurm: Cluster, prefix: Path, runs: Path
) -> None:
    with occupied(slurm, "--partition=hgx"):
        argv = ["doctor", f"runs_dir={runs}", *NODES, *SMALL, *MODEL, f"data.prefix={prefix}"]
        process = subprocess.Popen(
            [*TDPP, *argv], env=slurm.env | {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        assert next(line for line in said if "PENDING" in line and "(Dependency)" in line)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert [job.name for job in slurm.jobs()] == ["wrap"]
