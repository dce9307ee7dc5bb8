"""What a node agent gives its worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conf.compose import compose
from launch.plan import make_plan
from launch.provenance import PROJECT
from launch.submit import run_environment
from launch.worker import job_info, worker_command, worker_environment

SUBMITIT = {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_EXECUTOR": "local", "CUDA_VISIBLE_DEVICES": ""}


def nodes(*environments: dict[str, str]) -> dict[str, object]:
    """The part of a plan that tells what its nodes are given."""
    return {"nodes": [{"environment": environment} for environment in environments]}


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", *SUBMITIT])
def test_a_worker_does_not_inherit_an_outer_launchers_world(name: str) -> None:
    assert name not in worker_environment({name: "1", "HOME": "/"}, {}, nodes({}), 0, "0.0")


def test_a_worker_inherits_the_rest_and_gets_what_run_and_node_give() -> None:
    inherited = {"HOME": "/", "A": "old", "B": "old", "NODE_RANK": "7"}
    found = worker_environment(inherited, {"A": "run", "B": "run"}, nodes({"B": "0"}, {"B": "1"}), 1, "1.2")
    assert found == {"HOME": "/", "A": "run", "B": "1", "NODE_RANK": "1", "TDPP_START": "1.2"}


def test_each_group_of_nodes_has_an_environment_of_its_own() -> None:
    given = ["cluster=a100x1_a10x7", "experiment=seed_a100x1_a10x7", "+cluster.groups.hgx.environment.NCCL_IB_HCA=mlx5"]
    plan = make_plan(compose(given), "a/b")
    assert [node["environment"] for node in plan["nodes"]] == [{"NCCL_IB_HCA": "mlx5"}, *[{}] * 7]


def test_the_run_gives_its_devices_threads_and_source_tree() -> None:
    plan = make_plan(compose([]), "a/b")
    inherited = {"PYTHONPATH": f"/one:{PROJECT}:/two", "CUDA_VISIBLE_DEVICES": "2,3"}
    given = run_environment(plan, {"NCCL_DEBUG": "WARN"}, "token", inherited)
    assert given == {
        "PYTHONPATH": f"{PROJECT}:/one:/two",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "NCCL_DEBUG": "WARN",
        "TDPP_RUN_TOKEN": "token",
    }


def test_the_clusters_environment_wins_over_the_defaults_but_not_over_the_token() -> None:
    plan = make_plan(compose([]), "a/b")
    given = run_environment(plan, {"OMP_NUM_THREADS": "2", "TDPP_RUN_TOKEN": "mine"}, "token", {})
    assert (given["OMP_NUM_THREADS"], given["TDPP_RUN_TOKEN"]) == ("2", "token")


def test_the_worker_is_run_by_the_same_python() -> None:
    assert worker_command(Path("/r"), 2) == [sys.executable, "-u", "-m", "megatron_ext.worker", "/r/plan.json", "2"]


def test_the_log_begins_with_what_the_node_was_told_to_run() -> None:
    assert job_info(make_plan(compose([]), "a/b"), "tiny", 0) == (
        "NODE_RANK: 0\nNNODES: 1\nWORLD_SIZE: 4\nGLOBAL_BATCH_SIZE: 16\nMICRO_BATCH_SIZE: 2\nTENSOR_MP_SIZE: 1\n"
        "DP_SIZE: 2\nPIPELINE_MP_SIZE: 2\nPARTITION: 1-3\nMODEL: tiny\nHIDDEN_SIZE: 64\nNUM_LAYERS: 4\nPROFILE: true\n"
    )
