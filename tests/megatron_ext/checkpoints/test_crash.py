"""Whenever a process is killed or a machine loses power while it saves, the newest checkpoint is a whole one."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.header import part_names
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.checkpoints.saving import Saver
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Samples
from megatron_ext.engine.adaptation import FixedBatch
from megatron_ext.engine.engine import Engine
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.comm import Barrier
from megatron_ext.parallel.groups import Groups
from megatron_ext.timeline.recorder import Recorder
from tests.support.megatron_ext.engine_run import EngineRun

ALONE = (
    "parallel.data=1",
    "parallel.pipeline=1",
    "model.layers=1",
    "train.save_interval=1",
    "train.keep_checkpoints=1",
)


def save(plan: Plan, engine: Engine, iteration: int) -> None:
    """What a rank does that has the model to itself; every weight is the number of the iteration."""
    engine.flat.weight.fill_(iteration)
    engine.optimizer.updates = iteration
    Saver(plan, plan.ranks[0], engine, {}, Barrier(HashStore(), 1), FixedBatch()).after(iteration, ending=False)


def newest(folder: Path) -> int:
    """The iteration of the newest checkpoint; whatever stands under its final name is read, and must be whole."""
    for path in (folder / "checkpoints").glob("iter_*"):
        found = Checkpoint.read(path)
        iteration = found.meta.iteration
        assert (path.name, found.meta.updates) == (f"iter_{iteration:07d}", iteration)
        for part in part_names(1):
            tensors = safetensors.read(found.part(part))
            assert all((tensor == iteration).all() for name, tensor in tensors.items() if name.startswith("weights/"))
    return Checkpoint.at(folder).meta.iteration


class Crash:
    """Ends this process right before its `moment`-th change to a folder, or fsync.

    With `power_lost` whatever is not known to be on the disk is gone: the content of files without an fsync.
    """

    CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")

    def __init__(self, folder: Path, moment: int, power_lost: bool) -> None:
        self.folder = folder
        self.left = moment
        self.power_lost = power_lost
        self.on_disk = {str(path) for path in folder.rglob("*")}
        self.fsync = os.fsync
        os.fsync = self.synced
        sys.addaudithook(self.changed)

    def changed(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in self.CHANGES or (event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        path = str(given[0])
        if event in ("os.remove", "os.rmdir") and given[1] >= 0:
            path = f"{name_of(given[1])}/{path}"
        if not path.startswith(str(self.folder)):
            return
        self.step()
        if event == "os.rename":
            new = str(given[1])
            moved = {name for name in self.on_disk if name == path or name.startswith(f"{path}/")}
            self.on_disk = self.on_disk - moved - {new} | {new + name[len(path) :] for name in moved}
        elif event == "open":
            self.on_disk.discard(path)

    def synced(self, handle: int) -> None:
        self.step()
        self.fsync(handle)
        self.on_disk.add(name_of(handle))

    def step(self) -> None:
        self.left -= 1
        if self.left == -1:
            for path in self.folder.rglob("*") if self.power_lost else ():
                if path.is_file() and str(path) not in self.on_disk:
                    os.truncate(path, 0)
            os.kill(os.getpid(), signal.SIGKILL)


def name_of(handle: int) -> str:
    """Of an open file or folder."""
    return str(Path(f"/proc/self/fd/{handle}").readlink())


@pytest.mark.parametrize("power_lost", [False, True], ids=["killed", "power-lost"])
def test_before_whatever_step_on_the_disk_it_ends_the_newest_one_is_whole_and_the_next_start_leaves_no_rest(
    engine_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power_lost: bool
) -> None:
    run: EngineRun = engine_run(*ALONE)
    monkeypatch.setattr("megatron_ext.engine.engine.warm_up", lambda *given: None)  # there is nobody to connect to
    engine = Engine(run.plan, task_of(run.plan), run.plan.ranks[0], Groups(), cast(Samples, None), Recorder(None))
    save(run.plan, engine, 1)
    found = []
    status = -1
    while status != 0:
        folder = tmp_path / f"crash-{len(found)}"
        plan = replace(run.plan, folder=folder)
        shutil.copytree(run.run.path, folder)
        pid = os.fork()
        if pid == 0:
            Crash(folder / "checkpoints", len(found), power_lost)
            try:
                save(plan, engine, 2)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL)
        found.append(newest(folder))
        save(plan, engine, found[-1] + 1)
        assert newest(folder) == found[-1] + 1
        left = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert left == [f"iter_{found[-1] + 1:07d}", "latest"]
    assert len(found) > 20
    assert found == sorted(found)
    assert set(found) == {1, 2}
