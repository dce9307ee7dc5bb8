"""What a node agent gives its worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from launch.control.submit import node_worker, run_environment
from launch.errors import LaunchError
from launch.files.records import Start
from launch.judge.verdict import judge
from launch.machine.provenance import PROJECT
from launch.node.node import NodeAgent
from launch.node.settings import NodeSettings
from launch.node.worker_command import WORKER, ModuleWorker, given_environment, job_info, scrubbed
from launch.node.worker_process import StopSignals, process_to_start
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import TOKEN
from tests.support.launch.run_folders import OK, Case

SHELL = {"PYTHONPATH": f"/one:{PROJECT}:/two", "CUDA_VISIBLE_DEVICES": "2,3"}
MEGATRON_LM = ["engine=megatron_lm", "engine.checkout=/opt/megatron-lm"]
SUBMITIT = {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_EXECUTOR": "local", "CUDA_VISIBLE_DEVICES": ""}


def nodes(*environments: dict[str, str]) -> Plan:
    """The part of a plan that says what its nodes are given."""
    return Plan.of({"nodes": [{"environment": environment} for environment in environments]}, Path())


def given_by(overrides: list[str], shell: dict[str, str]) -> dict[str, str]:
    experiment = compose(overrides)
    return run_environment(experiment, make_plan(experiment, "a/b"), "token", shell)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", *SUBMITIT])
def test_a_worker_does_not_inherit_an_outer_launchers_world(name: str) -> None:
    assert scrubbed({name: "1", "HOME": "/"}) == {"HOME": "/"}


def test_a_worker_inherits_the_rest_and_gets_what_run_and_node_give() -> None:
    inherited = {"HOME": "/", "A": "old", "B": "old", "NODE_RANK": "7"}
    given = given_environment({"A": "run", "B": "run"}, nodes({"B": "0"}, {"B": "1"}), 1, "1.2")
    started = process_to_start(None, "", ["worker"], given, inherited, None)
    assert started.argv == ("worker",)
    assert started.environment == {"HOME": "/", "A": "run", "B": "1", "NODE_RANK": "1", "TDPP_START": "1.2"}


def test_each_group_of_nodes_has_an_environment_of_its_own() -> None:
    given = ["cluster=a100x1_a10x7", "experiment=seed_a100x1_a10x7", "+cluster.groups.hgx.environment.NCCL_IB_HCA=mlx5"]
    plan = make_plan(compose(given), "a/b")
    assert [node.environment for node in plan.nodes] == [{"NCCL_IB_HCA": "mlx5"}, *[{}] * 7]


def test_the_run_gives_its_devices_threads_and_source_tree() -> None:
    given = given_by(["+cluster.environment.NCCL_DEBUG=WARN"], SHELL)
    assert given == {
        "PYTHONPATH": f"{PROJECT}:/one:/two",
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "NCCL_DEBUG": "WARN",
        "TDPP_RUN_TOKEN": "token",
    }


def test_the_clusters_environment_wins_over_the_defaults() -> None:
    given = given_by(["+cluster.environment.OMP_NUM_THREADS='2'"], {})
    assert (given["OMP_NUM_THREADS"], given["TDPP_RUN_TOKEN"]) == ("2", "token")


def test_a_container_has_a_python_path_of_its_own() -> None:
    assert given_by(["container=enroot"], SHELL)["PYTHONPATH"] == str(PROJECT)


def test_a_job_of_slurm_has_other_devices_than_the_shell() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in given_by(["executor=slurm"], SHELL)


@pytest.mark.parametrize("engine", [[], MEGATRON_LM], ids=["tdpp", "megatron_lm"])
@pytest.mark.parametrize(
    ("container", "python"),
    [([], sys.executable), (["container=enroot", "container.python=/opt/bin/python3.8"], "/opt/bin/python3.8")],
    ids=["host", "container"],
)
def test_the_worker_is_run_by_this_python_or_the_images(engine: list[str], container: list[str], python: str) -> None:
    experiment = compose([*engine, *container])
    plan = make_plan(experiment, "a/b")
    words = node_worker(experiment, plan, RunDir(Path("/r")), WORKER).shown(Path("/r"), 0)
    assert words[:3] == [python, "-u", "-m"]


def test_the_log_begins_with_what_the_node_was_told_to_run() -> None:
    assert job_info(make_plan(compose([]), "a/b"), "tiny", 0) == (
        "NODE_RANK: 0\nNNODES: 1\nWORLD_SIZE: 4\nGLOBAL_BATCH_SIZE: 16\nMICRO_BATCH_SIZE: 2\nTENSOR_MP_SIZE: 1\n"
        "DP_SIZE: 2\nPIPELINE_MP_SIZE: 2\nPARTITION: 1-3\nMODEL: tiny\nHIDDEN_SIZE: 64\nNUM_LAYERS: 4\nPROFILE: true\n"
    )


def test_what_not_even_a_kill_ends_is_told_as_the_nodes_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as ranks that a sick GPU driver holds."""

    def in_vain(_token: str, _node_rank: int) -> NoReturn:
        raise LaunchError("processes [7] of the run cannot be killed")

    monkeypatch.setattr("launch.machine.processes.kill", in_vain)
    run = Case([None, OK]).make(tmp_path / "run")
    told = StopSignals.__new__(StopSignals)  # which signals none
    told.end, told.save = None, False
    agent = NodeSettings(
        run=run,
        model="tiny",
        environment={TOKEN: str(tmp_path)},
        worker=ModuleWorker("this", sys.executable),
        container=None,
        nodes=(0,),
        het_groups=(None,),
        submission=0,
        resumable=False,
        meet_s=60,
        save_s=10,
        max_requeues=0,
    )
    assert NodeAgent(agent, 0, None, told, Start(0, 0), run.read_plan(), restarted=False).run() == 1
    verdict = judge(run)
    assert verdict.rule == "node-gave-up"
    assert verdict.reason == "node local-0 could not clean up: processes [7] of the run cannot be killed"
    assert run.node_err("local-0").read_text().endswith("cannot be killed\n")
