"""A job that was queued before modules moved finds what its pickle names."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from conf.schema.containers import Mount
from conf.schema.experiment import ContainerKind
from launch.control.profilers import ProfiledWorker, Profiler
from launch.machine.container_commands import RunContainer
from launch.node.agent import NodeAgent
from launch.node.worker_command import ModuleWorker, Worker
from tests.support import ROOT

OLD = {
    "conf.run_folder.rundir": "conf.rundir",
    "conf.schema.containers": "conf.containers",
    "conf.schema.experiment": "conf.schema",
    "launch.control.megatron_lm": "launch.megatron_lm",
    "launch.control.profilers": "launch.profilers",
    "launch.machine.container_commands": "launch.container",
    "launch.node.agent": "launch.agent",
    "launch.node.worker_command": "launch.worker",
}
WORKER = ModuleWorker("megatron_ext.worker", "python3")


PROFILED = ProfiledWorker(worker=WORKER, profiler=Profiler.nsys, nodes=("a",))


@pytest.mark.parametrize("worker", [WORKER, PROFILED], ids=["plain", "profiled"])
def test_a_pickle_with_the_old_names_is_read(worker: Worker, tmp_path: Path) -> None:
    agent = NodeAgent(
        run=RunDir(tmp_path),
        model="tiny",
        environment={},
        worker=worker,
        container=RunContainer(
            kind=ContainerKind.enroot,
            image=tmp_path / "image.sqsh",
            file=tmp_path / "image.sqsh",
            digest=None,
            mounts=(Mount(tmp_path, tmp_path),),
            folder=tmp_path,
            python="python3",
            gpus=False,
            reload=False,
            scratch=tmp_path,
            run="a/b",
        ),
        nodes=(0,),
        het_groups=(None,),
        submission=0,
        resumable=True,
        meet_s=1.0,
        save_s=1.0,
        max_requeues=0,
    )
    text = pickle.dumps(agent, 0).decode("ascii")  # one in which names are lines
    for new, old in OLD.items():
        text = text.replace(f"c{new}\n", f"c{old}\n")
    assert not [new for new in OLD if f"c{new}\n" in text]
    assert "claunch.agent\n" in text
    read = f"import pickle; print(pickle.loads({text.encode()!r}))"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == f"{agent}\n", done.stderr
