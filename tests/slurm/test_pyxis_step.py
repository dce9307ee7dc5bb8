"""The step in which pyxis would start a worker: on the agent's own node, beside the agent, with all its GPUs.

There is no pyxis here, so its own options are left out of the command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conf.containers import ImageReference
from conf.schema import ContainerKind
from launch.container import RunContainer, SlurmStep, start
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
HGX = ["--partition=hgx", "--nodes=1", "--gres=gpu:a100:4"]
GPU2 = ["--partition=gpu2", "--nodes=2", "--gres=gpu:a10:4"]
CONTAINER = RunContainer(
    kind=ContainerKind.pyxis,
    image=ImageReference.parse("ubuntu"),
    file=None,
    mounts=(),
    folder=Path("/"),
    python="python3",
    gpus=True,
    reload=False,
    scratch=Path("/tmp"),
    run="tiny/1",
)


def agent(het_group: int | None) -> None:
    """What runs on every node."""
    script = 'kill -USR2 $$; echo "$SLURMD_NODENAME" "$1" "$CUDA_VISIBLE_DEVICES" "$GIVEN"'
    worker = ["sh", "-c", script, "sh", os.environ["SLURMD_NODENAME"]]
    command = start(CONTAINER, "box", {"GIVEN": "a, b"}, worker, SlurmStep.own(os.environ, het_group))
    words = [word for word in command.argv if not word.startswith(("--container", "--no-container"))]
    subprocess.run(words, env=os.environ | command.environment, check=True, timeout=30)


def said(slurm: Cluster, *words: str) -> list[str]:
    """The lines that the nodes' workers wrote."""
    done = slurm.run("srun", f"--chdir={ROOT}", *words)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def agents(het_group: int | None) -> list[str]:
    return [sys.executable, "-c", f"import {__name__} as here; here.agent({het_group})"]


def test_it_runs_on_the_agent_s_own_node(slurm: Cluster) -> None:
    assert said(slurm, *GPU2, *agents(None)) == [line("gpu2-001"), line("gpu2-002")]


def test_it_runs_on_the_agent_s_own_node_of_a_heterogeneous_job(slurm: Cluster) -> None:
    nodes = [line(node) for node in ("gpu2-001", "gpu2-002", "hgx-001")]
    assert said(slurm, *HGX, *agents(0), ":", *GPU2, *agents(1)) == nodes


def line(node: str) -> str:
    """What a worker writes that runs on its agent's node, and is told to save before it listens."""
    return f"{node} {node} 0,1,2,3 a, b"
