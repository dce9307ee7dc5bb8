"""The step in which pyxis starts a worker: on the agent's own node, beside the agent, with all its GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.schema.containers import Mount
from conf.schema.experiment import ContainerKind
from launch.machine.container_runtimes import RunContainer, SlurmStep, Worker
from tests.support import PATIENCE_S, ROOT
from tests.support.containers.image import VARIABLE
from tests.support.slurm.cluster import Cluster

HGX = ["--partition=hgx", "--nodes=1", "--gres=gpu:a100:4"]
GPU2 = ["--partition=gpu2", "--nodes=2", "--gres=gpu:a10:4"]


def agent(image: str, het_group: int | None) -> None:
    """What runs on every node."""
    container = RunContainer(
        kind=ContainerKind.pyxis,
        image=Path(image),
        file=Path(image),
        digest=None,
        mounts=(Mount(ROOT, ROOT, read_only=True),),
        folder=ROOT,
        python="python3",
        gpus=False,
        reload=True,
        scratch=Path("/tmp"),
        run="tiny/1",
    )
    script = f'kill -USR2 $$; echo "$SLURMD_NODENAME" "$1" "$CUDA_VISIBLE_DEVICES" "$GIVEN" ${VARIABLE[0]} "$PWD"'
    worker = ["sh", "-c", script, "sh", os.environ["SLURMD_NODENAME"]]
    command = container.runtime.start(
        Worker(container, "box", {"GIVEN": "a, b"}, worker, SlurmStep.own(os.environ, het_group))
    )
    subprocess.run(command.argv, env=os.environ | command.environment, check=True, timeout=PATIENCE_S)


@pytest.fixture
def agents(pyxis: list[str], image: Path) -> Callable[[int | None], list[str]]:
    """Commands for the nodes of a job, or of a component of a heterogeneous one."""
    return lambda group: [sys.executable, "-c", f"import {__name__} as here; here.agent({str(image)!r}, {group})"]


def said(*words: str) -> list[str]:
    """The lines that the nodes' workers wrote."""
    done = subprocess.run(["srun", f"--chdir={ROOT}", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_it_runs_on_the_agent_s_own_node(slurm: Cluster, agents: Callable[[int | None], list[str]]) -> None:
    assert said(*GPU2, *agents(None)) == [line("gpu2-001"), line("gpu2-002")]


def test_it_runs_on_the_agent_s_own_node_of_a_heterogeneous_job(
    slurm: Cluster, agents: Callable[[int | None], list[str]]
) -> None:
    nodes = [line(node) for node in ("gpu2-001", "gpu2-002", "hgx-001")]
    assert said(*HGX, *agents(0), ":", *GPU2, *agents(1)) == nodes


def line(node: str) -> str:
    """What a worker writes that runs on its agent's node, in the container, and is told to save before it listens."""
    return f"{node} {node} 0,1,2,3 a, b {VARIABLE[1]} {ROOT}"
