"""Elastic runs on a real Slurm cluster: nodes are lost, and the others train on in what is left of the jobs (see
conftest)."""

from __future__ import annotations

import time
from pathlib import Path

from conf.run_folder.rundir import RunDir
from launch.judge.state import State
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import MASTER, SLAVE, endless, ids, iterations, verdict_of, wait_for

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
