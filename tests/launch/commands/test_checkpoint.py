"""`tdpp checkpoint convert` takes a run by its name, also where a folder of Megatron-LM's has the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.checkpoint import main
from launch.control.planning.plan import make_plan
from launch.errors import LaunchError
from megatron_ext.checkpoints.foreign.torch_dist import TRACKER


def test_a_runs_name_means_the_run_and_a_path_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs/tiny/20260131-120000Z-0123abcd")
    run.path.mkdir(parents=True)
    run.write_json(run.plan, make_plan(compose([]), str(run.path)).as_json())
    run.config.touch()
    Path("tiny").mkdir()
    Path("tiny", TRACKER).write_text("7")
    words = ["out", "--to=megatron", "--runs-dir=runs"]
    with pytest.raises(LaunchError, match=rf"{run.checkpoints}\S* no checkpoint|{run.path}.*no checkpoint"):
        main(["convert", "tiny", *words])
    with pytest.raises(LaunchError, match=r"^(\./)?tiny"):
        main(["convert", "./tiny", *words])
    inside = Path(run.checkpoints, "iter_0000010")
    inside.mkdir(parents=True)
    monkeypatch.chdir(run.checkpoints)
    Path(inside, "common.pt").touch()
    Path(inside, ".metadata").touch()
    with pytest.raises(LaunchError, match=r"^iter_0000010"):
        main(["convert", "iter_0000010", "out", "--to=megatron", f"--runs-dir={tmp_path / 'runs'}"])
