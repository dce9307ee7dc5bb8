"""Runs on a real Slurm cluster whose workers run in containers of enroot and of pyxis, their doubles or the real ones
(see conftest)."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conf.run_folder.rundir import RunDir
from launch.commands import stop
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine.provenance import PROJECT
from launch.node.worker_command import WORKER as ENGINE
from megatron_ext.contract.worker import SAVED
from tests.launch.containers.conftest import REAL, Runtime
from tests.slurm.test_runs import TRAINED, losses, said
from tests.support.launch.live import FOREVER, WORKER
from tests.support.megatron_ext.engine_run import make_corpus
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import assert_failed, at_work, ids, submitted, verdict_of, wait_for, without_hosts

REFERENCE = "registry.test/small:1.0"
NODES = ("hgx-0", "gpu2-0", "gpu2-1")
ALONE = ["parallel.node_order=gpu2", "parallel.pipeline=1", "parallel.partition=4"]
LONG = [*FOREVER, "train.log_interval=1", "executor.max_requeues=0"]


@pytest.fixture
def contained(enroot: Runtime, image: Path, tmp_path: Path) -> list[str]:
    """Overrides for a run in containers of an image that is in a registry, or with the real enroot a file."""
    shutil.copyfile(image, enroot.registry / REFERENCE.replace("/", "#", 1))
    return [
        "container=enroot",
        f"container.image={image if REAL else REFERENCE}",
        f"container.image_dir={tmp_path}/images",
        f"cluster.scratch={tmp_path}",
        f"data.prefix={tmp_path}/none",
    ]


@pytest.fixture(autouse=True)
def nothing_half_made(tmp_path: Path) -> Iterator[None]:
    """No part of an image is left, and each container is whole."""
    yield
    images, containers = tmp_path / "images", tmp_path / "enroot" / "data"
    assert (
        not images.exists() or [path.name for path in images.iterdir() if path.suffix not in (".sqsh", ".sha256")] == []
    )
    made = {path.stem for path in tmp_path.glob(f"tdpp-{os.getuid()}/*.made")}
    assert not containers.exists() or {path.name for path in containers.glob("tdpp-*")} == made


def finished(run: RunDir) -> None:
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, "\n".join([verdict.reason, *verdict.evidence, *said(run)])


def hosts(run: RunDir) -> int:
    return len({run.read_json(run.node_state(name))["host"] for name in NODES})


def test_the_engine_trains_in_containers_as_without(
    slurm: Cluster, tmp_path: Path, enroot: Runtime, contained: list[str]
) -> None:
    training = [*TRAINED, "train.iterations=3", f"data.prefix={make_corpus(tmp_path)}"]
    inside = submitted(tmp_path / "runs", *contained, *training, worker=ENGINE)
    outside = submitted(tmp_path / "runs", *training, "parallel.node_order=gpu2*3", worker=ENGINE)
    finished(inside)
    finished(outside)
    np.testing.assert_array_equal(losses(inside), losses(outside))
    assert enroot.calls.count("import") == (0 if REAL else 1)
    assert enroot.calls.count("create") == hosts(inside)


def test_the_engine_trains_in_containers_of_pyxis(slurm: Cluster, tmp_path: Path, pyxis: list[str]) -> None:
    training = [*TRAINED, "train.iterations=3", f"data.prefix={make_corpus(tmp_path)}"]
    inside = submitted(tmp_path / "runs", *pyxis, *training, worker=ENGINE)
    finished(inside)
    assert len(losses(inside)) == 3


def test_containers_are_used_again_and_made_anew_when_that_is_asked_for(
    slurm: Cluster, tmp_path: Path, enroot: Runtime, contained: list[str]
) -> None:
    shown = ["train.iterations=2", "+cluster.environment.SHOW=1"]
    for times, asked in ((1, []), (1, []), (2, ["container.reload=true"])):
        run = submitted(tmp_path / "runs", *shown, *contained, *asked, *ALONE)
        finished(run)
        assert enroot.calls.count("import") == (0 if REAL else 1)
        assert enroot.calls.count("create") == times
    environment = dict(line.split("=", 1) for line in run.node_out("gpu2-0").read_text().splitlines() if "=" in line)
    token = run.read_json(run.jobs)["token"]
    expected = {"NODE_RANK": "0", "TDPP_START": "0.0", "TDPP_RUN_TOKEN": token, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert expected.items() <= environment.items()
    assert environment["PYTHONPATH"] == str(PROJECT)
    assert not [name for name in environment if name.startswith(("SLURM_", "SUBMITIT_"))]


def test_an_image_that_cannot_be_brought_ends_the_run(
    slurm: Cluster, tmp_path: Path, double: Runtime, contained: list[str]
) -> None:
    asked = ["container.image=registry.test/other:2", "executor.het=hetjob"]
    run = submitted(tmp_path / "runs", *FOREVER, *contained, *asked)
    verdict = verdict_of(run)
    told = "node hgx-0 could not prepare its container: container.image=registry.test/other:2: enroot import -o "
    assert_failed(verdict, "node-gave-up", told)
    host = run.read_json(run.node_state("hgx-0"))["host"]
    assert f"exited with 1 on {host}; its last output:\n  [ERROR] URL https://registry.test#other:2" in verdict.reason
    assert "[ERROR] URL https://registry.test#other:2" in run.node_err("hgx-0").read_text()
    ended = "exited with 143, ended by SIGTERM: it ended because node hgx-0 failed"
    evidence = [without_hosts(line) for line in verdict.evidence]
    assert [line for line in evidence if line.startswith("node gpu2-")] == [f"node gpu2-{n}: {ended}" for n in (0, 1)]
    assert (tmp_path / "images").is_dir()


def test_stop_ends_a_run_whose_containers_are_being_made(
    slurm: Cluster, tmp_path: Path, double: Runtime, contained: list[str]
) -> None:
    double.hold.touch()
    run = submitted(tmp_path / "runs", *FOREVER, *contained)
    wait_for(lambda: list((tmp_path / "images").glob(".*")))
    wait_for(lambda: any("which node 0 fetches" in line for line in judge(run).evidence))
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.starting, "preparing")
    assert without_hosts(verdict.reason).startswith("node hgx-0 prepares its container, waiting for enroot import -o ")
    assert stop.main([str(run.path)]) == 0
    assert judge(run).state is State.stopped


def test_a_run_in_containers_is_saved(slurm: Cluster, tmp_path: Path, enroot: Runtime, contained: list[str]) -> None:
    is_saved(slurm, submitted(tmp_path / "runs", *contained, *LONG))


def test_a_run_in_containers_of_pyxis_is_saved(slurm: Cluster, tmp_path: Path, pyxis: list[str]) -> None:
    is_saved(slurm, submitted(tmp_path / "runs", *pyxis, f"data.prefix={tmp_path}/none", *LONG))


@pytest.mark.parametrize(
    ("words", "code"), [([], SAVED), (["--no-save"], 128 + signal.SIGTERM)], ids=["saved first", "at once"]
)
def test_stop_ends_the_worker_itself_in_a_container_of_pyxis(
    slurm: Cluster, tmp_path: Path, pyxis: list[str], words: list[str], code: int
) -> None:
    """srun would kill it, with all that it has to do at its end."""
    run = submitted(tmp_path / "runs", *pyxis, f"data.prefix={tmp_path}/none", *LONG)
    wait_for(lambda: at_work(run))
    assert stop.main([str(run.path), *words]) == 0
    assert [run.read_json(run.node_state(name))["exit_code"] for name in NODES] == [code] * 3
    assert not [line for line in said(run) if "Killed" in line or "CANCELLED" in line]


def test_a_worker_of_pyxis_that_somebody_has_stopped_is_told(slurm: Cluster, tmp_path: Path, pyxis: list[str]) -> None:
    run = submitted(tmp_path / "runs", *pyxis, f"data.prefix={tmp_path}/none", *ALONE, *LONG)
    wait_for(lambda: at_work(run))
    command = f"-m {WORKER} "
    worker = min(pid for pid, line in slurm.processes().items() if command in line and "srun" not in line)
    os.kill(worker, signal.SIGSTOP)
    wait_for(lambda: judge(run).rule == "process-stopped")
    os.kill(worker, signal.SIGCONT)
    wait_for(lambda: judge(run).state is State.running)
    assert stop.main([str(run.path)]) == 0


def is_saved(slurm: Cluster, run: RunDir) -> None:
    """The first job is told, and tells the other."""
    wait_for(lambda: at_work(run) and all(run.node_ranks(name).exists() for name in NODES))
    assert slurm.run("scancel", "--signal=USR2", ids(run)[0]).returncode == 0
    verdict = verdict_of(run)
    assert verdict.state is State.interrupted, "\n".join([verdict.reason, *verdict.evidence, *said(run)])
    assert [run.read_json(run.node_state(name))["exit_code"] for name in NODES] == [SAVED] * 3
