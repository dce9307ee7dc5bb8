"""Runs on a real Slurm cluster: trained to the end, and judged."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands import status
from launch.commands.launch import main
from launch.control.submit import submit
from launch.judge.state import State
from launch.node.worker_command import WORKER as ENGINE
from tests.support.cases import drawn
from tests.support.launch.live import WORKER, no_data_needed
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import BOTH_WAYS, NODES, SEED, SMALL, TRAINED, submitted, verdict_of


def losses(run: RunDir) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that has the whole model, by tdpp's engine."""
    runs = tmp_path_factory.mktemp("alone") / "runs"
    layout = ["parallel=single", "model.layers=12", "parallel.global_batch_size=16", "parallel.micro_batch_size=16"]
    training = [*TRAINED, f"data.prefix={prefix}", "train.iterations=6"]
    code = main([f"runs_dir={runs}", *layout, *training], preflight=no_data_needed, worker=ENGINE)
    assert code == 0
    return losses(RunDir.find(runs, None))


@pytest.mark.any_engine
@pytest.mark.parametrize("het", drawn(BOTH_WAYS, 0, always=["jobs"]))
def test_the_seeds_layout_trains_as_one_process_does(
    slurm: Cluster, tmp_path: Path, training: list[str], alone: Sequence[float], het: str
) -> None:
    asked = [*SEED, *training, "train.iterations=6", f"executor.het={het}"]
    run = submitted(tmp_path / "runs", *asked, worker=ENGINE)
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, "\n".join([verdict.reason, *verdict.evidence, *said(run)])
    np.testing.assert_allclose(losses(run), alone, rtol=0, atol=1e-5)
    names = ["hgx-0", *(f"gpu2-{number}" for number in range(7))]
    hosts = {name: run.read_json(run.node_state(name))["host"] for name in names}
    assert len(set(hosts.values())) == 8
    assert hosts["hgx-0"] == "hgx-001"
    assert "lm loss" in run.node_out("gpu2-6").read_text()
    for rank, name in enumerate(names):
        assert f"NODE_RANK: {rank}\n" in run.node_out(name).read_text()
        assert run.rank_events(rank).stat().st_size > 0
    jobs = {"jobs": ["master", "slave"], "hetjob": ["job"]}[het]
    assert [job["role"] for job in run.read_json(run.jobs)["jobs"]] == jobs
    assert sorted(path.stem for path in run.sbatch.iterdir()) == sorted(jobs)
    for job in run.read_json(run.jobs)["jobs"]:
        assert RunDir.find(run.runs, job["id"]).path == run.path
    assert status.main([str(run.path)]) == 0


def test_a_homogeneous_run_is_one_job_and_nodes_keep_the_plans_order(slurm: Cluster, tmp_path: Path) -> None:
    run = submitted(
        tmp_path / "runs", "parallel.node_order=gpu2*3", "train.iterations=4", "cluster.groups.gpu2.cpus_per_task=2"
    )
    assert verdict_of(run).state is State.succeeded
    assert [job["role"] for job in run.read_json(run.jobs)["jobs"]] == ["job"]
    assert "#SBATCH --cpus-per-task=2" in (run.sbatch / "job.sh").read_text()


def test_the_components_of_a_heterogeneous_job_train_and_may_have_different_cpus(
    slurm: Cluster, tmp_path: Path, training: list[str]
) -> None:
    cpus = ["cluster.groups.hgx.cpus_per_task=3", "cluster.groups.gpu2.cpus_per_task=2"]
    run = submitted(tmp_path / "runs", "executor.het=hetjob", *cpus, *training, "train.iterations=2", worker=ENGINE)
    assert verdict_of(run).state is State.succeeded, said(run)
    assert len(losses(run)) == 2


def test_the_master_group_may_be_any_and_the_jobs_gpus_reach_its_ranks_not_those_of_the_login_node(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes may be anywhere in the order."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    asked = ["parallel.node_order=gpu2+hgx+gpu2", "train.iterations=2", "+cluster.environment.SHOW=1"]
    run = submitted(tmp_path / "runs", *asked)
    assert verdict_of(run).state is State.succeeded
    jobs = run.read_json(run.jobs)["jobs"]
    assert [(job["role"], job["nodes"]) for job in jobs] == [("master", [0, 2]), ("slave", [1])]
    assert run.read_json(run.node_state("hgx-0"))["host"] == "hgx-001"
    assert run.read_json(run.node_state("hgx-0"))["node_rank"] == 1
    shown = run.node_out("gpu2-1").read_text()
    assert re.search(r"^CUDA_VISIBLE_DEVICES=0,1,2,3$", shown, re.MULTILINE)
    assert "MASTER_ADDR" not in shown


NAMES = ["it's 100% of %x", '"quoted" a=b,c', "한글-é $HOME `id` #;&"]


@pytest.mark.parametrize("name", drawn([*NAMES, " ".join(NAMES)], 0, always=[" ".join(NAMES)]))
def test_a_run_may_have_any_name(slurm: Cluster, tmp_path: Path, name: str) -> None:
    experiment = compose([*NODES, *SMALL, "train.iterations=2"])
    run = submit(replace(experiment, name=name, runs_dir=f"{tmp_path}/runs of {name}"), [], WORKER)
    assert run.path.parent.name == name
    assert verdict_of(run).state is State.succeeded, said(run)
    assert sorted(path.name.split("_", 1)[1] for path in run.submitit.glob("*.out"))


def said(run: RunDir) -> list[str]:
    """What agents and nodes printed, for the message of a failed test."""
    files = [*run.submitit.glob("*.out"), *run.nodes.glob("*.err")]
    return [f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in files if path.stat().st_size]


def test_what_a_dry_run_shows_is_what_is_submitted(
    slurm: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, on a machine without Slurm; but for the run's time, its token, and the id of the master's job."""
    given = ["cluster.groups.hgx.time_min=5", "train.iterations=2"]
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", "/nonexistent")
        assert (
            main([f"runs_dir={tmp_path}/runs", *NODES, *SMALL, *given, "dry_run=true"], preflight=no_data_needed) == 0
        )
    shown = capfd.readouterr().out
    assert not (tmp_path / "runs").exists()
    run = submitted(tmp_path / "runs", *given)
    assert verdict_of(run).state is State.succeeded
    token, jobs = run.read_json(run.jobs)["token"], run.read_json(run.jobs)["jobs"]
    for job in jobs:
        script = (run.submitit / f"{job['id']}_submission.sh").read_text()
        assert script == (run.sbatch / f"{job['role']}.sh").read_text()
        for known, placeholder in (
            (token, "<token>"),
            (run.path.name, "<time>-<hash>"),
            (f"after:{jobs[0]['id']}", "'after:<id of the master job>'"),
        ):
            script = script.replace(known, placeholder)
        assert unquoted(script) in unquoted(shown)


def unquoted(text: str) -> str:
    """Placeholders have characters that a shell would need quoted."""
    return re.sub(r"'(/[^' ]*<time>[^' ]*)'", r"\1", text)
