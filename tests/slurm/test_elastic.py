"""Elastic runs on a real Slurm cluster: nodes are lost, and the others train on in what is left of the jobs (see
conftest)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.commands.stop import main as stop
from launch.judge.state import State
from launch.node.elastic.joins import LOST_S
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.configuration import SCAVENGE
from tests.support.slurm.seed import MASTER, SLAVE, endless, ids, iterations, occupied, verdict_of, wait_for

ELASTIC = (
    "executor.max_requeues=0",
    "elastic.enabled=true",
    "train.save_interval=10",
    "parallel.pipeline=1",
    "parallel.partition=null",
    "parallel.global_batch_size=12",
)


def trains_on(run: RunDir, start: str, nodes: list[str]) -> None:
    """Waits until it has logged more in a start with these nodes."""
    wait_for(run.plan_of(start).exists)
    plan = run.read_json(run.plan_of(start))
    assert [node["name"] for node in plan["nodes"] if node["ranks"]] == nodes
    wait_for(lambda: all(run.read_json(run.node_state(name))["state"] == "running" for name in nodes))
    before = run.metrics.read_text().count("\n")
    wait_for(lambda: run.metrics.read_text().count("\n") > before + 3)


def host(run: RunDir, node: str) -> str:
    return run.read_json(run.node_state(node))["host"]


def test_a_job_goes_on_without_its_first_node_and_with_one_that_lost_a_rank(slurm: Cluster, tmp_path: Path) -> None:
    """Its script dies with its first node: nothing but its own nodes ends the job then. Before, it gives back the one
    of its four nodes that it does not begin on. At the time limit Slurm starts the job again on as many nodes as it
    had at first, and those that trained go on; the first of them gives the other back."""
    first = tmp_path / "3_node_config.json"
    first.write_text('{"0": 1, "1": 1, "2": 1}')
    chosen = [f"elastic.start={first}", "elastic.by=time", "elastic.epoch=1000000000", "elastic.release=true"]
    once = "executor.max_requeues=1"
    run = endless(tmp_path, "parallel.node_order=gpu2*4", "parallel.data=4", *ELASTIC[1:], *chosen, once)
    spare, lost = host(run, "gpu2-3"), host(run, "gpu2-0")
    wait_for(lambda: slurm.states()[spare] == "idle")
    slurm.kill_node(lost)
    began = time.monotonic()
    try:
        trains_on(run, "0.1", ["gpu2-1", "gpu2-2"])
        print(f"training again after {time.monotonic() - began:.1f} s")
        (job,) = ids(run)
        pid = run.read_json(run.node_ranks("gpu2-2"))[0]["pid"]
        there = ["srun", "--overlap", "--mem=0", f"--jobid={job}", "--nodes=1", "--ntasks=1"]
        done = slurm.run(*there, f"--nodelist={host(run, 'gpu2-2')}", "kill", "-KILL", str(pid))
        assert done.returncode == 0, done.stderr
        trains_on(run, "0.2", ["gpu2-1", "gpu2-2"])
        wait_for(lambda: slurm.states()[lost].startswith("down"))
        assert slurm.run("scancel", "--signal=USR2", job).returncode == 0
        trains_on(run, "0.3", ["gpu2-1", "gpu2-2"])
        wait_for(lambda: slurm.states()[host(run, "gpu2-3")] == "idle")
        assert slurm.run("scancel", "--signal=USR2", job).returncode == 0
        verdict = verdict_of(run)
    finally:
        slurm.start_node(lost)
    assert verdict.state is State.interrupted, verdict
    assert once in verdict.reason


def test_a_run_starts_without_a_node_that_died_before_slurm_noticed(slurm: Cluster, tmp_path: Path) -> None:
    """A dead first node runs no script: Slurm starts the job again, on others. Another one is taken in once it is
    back."""
    wide = ("parallel.node_order=gpu2*3", "parallel.data=3", *ELASTIC, "cluster.groups.gpu2.gres=gpu:1")
    dead = "gpu2-001"
    slurm.kill_node(dead)
    try:
        run = endless(tmp_path / "first", *wide)
        assert [host(run, name) for name in ("gpu2-0", "gpu2-1", "gpu2-2")] == ["gpu2-002", "gpu2-003", "gpu2-004"]
        assert stop([str(run.path)]) == 0
    finally:
        slurm.start_node(dead)
        slurm.resume(dead)
        slurm.forget_lost_gpus()
    dead = "gpu2-002"
    slurm.kill_node(dead)
    try:
        run = endless(tmp_path / "second", *wide)
        trains_on(run, "0.1", ["gpu2-0", "gpu2-2"])
    finally:
        slurm.start_node(dead)
    trains_on(run, "0.2", ["gpu2-0", "gpu2-1", "gpu2-2"])
    assert stop([str(run.path)]) == 0


def test_of_two_jobs_each_goes_on_without_the_other(slurm: Cluster, tmp_path: Path) -> None:
    """The master's only node is lost, and with it the first of three stages; then a node of the slave."""
    stages = [word for word in ELASTIC if word != "parallel.pipeline=1"]
    run = endless(tmp_path, "parallel.node_order=hgx+gpu2*2", "parallel.pipeline=3", *stages)
    lost = [host(run, "hgx-0"), host(run, "gpu2-1")]
    master, slave = ids(run)[MASTER], ids(run)[SLAVE]
    slurm.set_node(lost[0], "down")
    try:
        trains_on(run, "0.1", ["gpu2-0", "gpu2-1"])
        assert master not in [job.id for job in slurm.jobs()]
        slurm.kill_node(lost[1])
        trains_on(run, "0.2", ["gpu2-0"])
        assert slurm.run("scancel", "--signal=USR2", slave).returncode == 0
        verdict = verdict_of(run)
    finally:
        slurm.start_node(lost[1])
        slurm.resume(*lost)
    assert verdict.state is State.interrupted, verdict


def test_at_its_time_limit_a_job_saves_and_all_its_nodes_go_on_when_slurm_starts_it_again(
    slurm: Cluster, tmp_path: Path
) -> None:
    once = "executor.max_requeues=1"
    run = endless(tmp_path, "parallel.node_order=gpu2*2", "parallel.data=2", *ELASTIC[1:], once)
    (job,) = ids(run)
    assert slurm.run("scancel", "--signal=USR2", job).returncode == 0
    trains_on(run, "0.1", ["gpu2-0", "gpu2-1"])
    assert iterations(run) == list(range(1, len(iterations(run)) + 1))
    assert slurm.run("scancel", "--signal=USR2", job).returncode == 0
    verdict = verdict_of(run)
    assert verdict.state is State.interrupted, verdict
    assert once in verdict.reason


def losses(run: RunDir) -> list[tuple[int, float]]:
    """The iterations and losses of a run's log."""
    return [(line["iteration"], line["loss"]) for line in map(json.loads, run.metrics.read_text().splitlines())]


@pytest.mark.parametrize("stages", [(), ("parallel.pipeline=3", "parallel.data=1", "parallel.partition=1-2-1")])
def test_a_run_takes_its_node_back_when_it_is_there_again(
    slurm: Cluster, tmp_path: Path, stages: tuple[str, ...]
) -> None:
    """Slurm has no other node for the job that asks for it: the rest of the cluster is busy."""
    wide = (*ELASTIC, "parallel.data=3", *stages)
    run = endless(tmp_path, "parallel.node_order=gpu2*3", *wide)
    lost = host(run, "gpu2-1")
    with occupied(slurm, "--partition=gpu2", "--nodes=4"):
        slurm.kill_node(lost)
        try:
            wait_for(run.plan_of("0.1").exists)
            wait_for(lambda: slurm.states()[lost].startswith("down"))
            wait_for(lambda: [job for job in slurm.jobs() if job.state == "PENDING"])
        finally:
            slurm.start_node(lost)
            slurm.run("scontrol", "update", f"nodename={lost}", "state=resume")
        began = time.monotonic()
        trains_on(run, "0.2", ["gpu2-0", "gpu2-1", "gpu2-2"])
        print(f"grown again after {time.monotonic() - began:.1f} s")
    assert host(run, "gpu2-1") == lost
    decided = [line for line in map(json.loads, run.decisions.read_text().splitlines()) if "nodes" in line]
    assert decided[-1]["reason"] == "1 node came back: gpu2-1"
    assert stop([str(run.path)]) == 0


def asks_again(slurm: Cluster, run: RunDir, node: str) -> None:
    """Waits until a job for a lost node is in the queue, or has been."""
    wait_for(lambda: any(json.loads(path.read_text())["id"] for path in run.joins.glob(f"*-{node}.json")))


def test_nodes_that_came_back_go_on_after_a_time_limit(slurm: Cluster, tmp_path: Path) -> None:
    """The master's job has ended with its only node: the job that brought this back is started again itself. The one
    that brought a node of the slave back is not, for Slurm starts the slave again with all its nodes."""
    words = ("parallel.node_order=hgx+gpu2*2", "parallel.data=3", *ELASTIC[1:], "executor.max_requeues=1")
    run = endless(tmp_path, *words)
    lost = [host(run, "hgx-0"), host(run, "gpu2-1")]
    slave = ids(run)[SLAVE]
    for node in lost:
        slurm.set_node(node, "down")
    try:
        asks_again(slurm, run, "hgx-0")
        asks_again(slurm, run, "gpu2-1")
    finally:
        slurm.resume(*lost)
    wait_for(lambda: len(run.read_plan().used) == 3)
    names = run.read_plan().node_names
    wait_for(lambda: all(run.read_json(run.node_state(name))["state"] == "running" for name in names))
    before = run.metrics.read_text().count("\n")
    wait_for(lambda: run.metrics.read_text().count("\n") > before + 3)
    last = max(int(path.stem.split(".")[1]) for path in (run.path / "plans").glob("0.*.json"))
    assert slurm.run("scancel", "--signal=USR2", slave).returncode == 0
    trains_on(run, f"0.{last + 1}", ["hgx-0", "gpu2-0", "gpu2-1"])
    assert run.read_json(run.node_state("gpu2-1"))["job"] == slave
    assert len(slurm.jobs()) == 2
    assert slurm.run("scancel", "--signal=USR2", slave).returncode == 0
    verdict = verdict_of(run)
    assert verdict.state is State.interrupted, verdict
    assert not slurm.jobs()


def test_nodes_of_a_preempted_job_come_back_and_those_of_a_cancelled_one_do_not(slurm: Cluster, tmp_path: Path) -> None:
    """All save first (GraceTime), and Slurm starts both jobs again; the preempted one has to wait."""
    wide = ("parallel.node_order=hgx+gpu2", "parallel.data=2", *ELASTIC[1:], "executor.max_requeues=1")
    run = endless(tmp_path, *wide, f"cluster.groups.gpu2.partition={SCAVENGE}")
    slave = ids(run)[SLAVE]
    with occupied(slurm, "--partition=gpu2", "--nodes=7"):
        trains_on(run, "0.1", ["hgx-0"])
    trains_on(run, "0.2", ["hgx-0", "gpu2-0"])
    steps = iterations(run)
    assert steps == list(range(1, len(steps) + 1)), "nothing was trained twice"
    assert slurm.run("scancel", slave).returncode == 0
    trains_on(run, "0.3", ["hgx-0"])
    time.sleep(LOST_S + 10)
    assert not run.joins.exists()
    assert stop([str(run.path)]) == 0


def test_a_run_starts_on_the_nodes_that_are_free_and_grows(slurm: Cluster, tmp_path: Path) -> None:
    with occupied(slurm, "--partition=gpu2", "--nodes=5"):
        run = endless(tmp_path, "parallel.node_order=gpu2*3", "parallel.data=3", *ELASTIC, "elastic.start=now")
        assert run.read_plan().used == [0, 1]
        assert sorted(job.state for job in slurm.jobs() if job.id not in ids(run))[0] == "PENDING"
    trains_on(run, "0.1", ["gpu2-0", "gpu2-1", "gpu2-2"])
    (decided,) = [line for line in map(json.loads, run.decisions.read_text().splitlines()) if "nodes" in line]
    assert decided["reason"] == "1 node joined: gpu2-2"
    steps = iterations(run)
    assert steps == list(range(1, len(steps) + 1)), "nothing was trained twice"
    assert stop([str(run.path)]) == 0
