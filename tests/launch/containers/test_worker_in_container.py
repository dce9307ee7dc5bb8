"""The engine's own worker in a container: it trains, and finds of the host what it was given and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from conf.schema.containers import Mount
from conf.schema.experiment import ContainerKind
from launch.control.planning.plan import make_plan
from launch.machine.container_commands import run_container
from launch.machine.container_runtimes import RunContainer, Worker
from launch.machine.provenance import PROJECT
from launch.node.container_setup import Setup
from megatron_ext.data.indexed_dataset import write_indexed
from tests.launch.containers.conftest import Runtime
from tests.support import PATIENCE_S
from tests.support.containers.apptainer_double import MAGIC
from tests.support.launch.live import wait_for

GIVEN = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "NODE_RANK": "0", "ODD": "a,b 'c' $d"}

LOOK = "import json, os, sys; print(json.dumps([dict(os.environ), [os.path.exists(path) for path in sys.argv[1:]]]))"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    prefix = tmp_path / "data,1" / "text_document"
    prefix.parent.mkdir()
    random = np.random.default_rng(0)
    write_indexed(prefix, (random.integers(0, 257, 200, dtype=np.uint16) for _ in range(200)), np.dtype(np.uint16))
    return prefix


@pytest.fixture
def planned(image: Path, corpus: Path, tmp_path: Path) -> tuple[RunDir, RunContainer]:
    """A run that nobody has started yet, and its container."""
    settings = [f"runs_dir={tmp_path}/runs", f"data.prefix='{corpus}'", "train.iterations=2", "train.log_interval=1"]
    settings += ["train.lr_warmup_iterations=0", "parallel.global_batch_size=4", "model.sequence_length=32"]
    settings += ["container=enroot", f"container.image={image}", f"cluster.scratch={tmp_path}"]
    experiment = compose(settings)
    run = RunDir.create(Path(experiment.runs_dir), experiment.name, "", datetime.now())
    plan = make_plan(experiment, run.name)
    run.write_json(run.plan, plan.as_json())
    container = run_container(experiment, plan, run.path, PROJECT)
    assert container is not None
    return run, container


def done(container: RunContainer, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    with Setup(container, 0) as setup:
        wait_for(setup.step)
        command = container.runtime.start(Worker(container, setup.name, GIVEN, words))
        environment = os.environ | command.environment
        return subprocess.run(
            command.argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
        )


@pytest.mark.slow
def test_it_trains(enroot: Runtime, planned: tuple[RunDir, RunContainer]) -> None:
    run, container = planned
    ended = done(container, [container.python, "-u", "-m", "megatron_ext.worker", str(run.plan), "0"])
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert [json.loads(line)["iteration"] for line in run.metrics.read_text().splitlines()] == [1, 2]
    assert (run.checkpoints / "latest").exists()


@pytest.mark.parametrize("kind", ["enroot", "pyxis", "apptainer", "docker"])
def test_what_the_copy_of_the_code_has_links_to_is_mounted_once(tmp_path: Path, kind: str) -> None:
    words = ["container=enroot", f"container.kind={kind}", "container.image=a/b:c"]
    experiment = compose([f"runs_dir={tmp_path}/runs", *words, *(["executor=slurm"] if kind == "pyxis" else [])])
    run = RunDir.create(Path(experiment.runs_dir), experiment.name, "", datetime.now())
    linked(run, tmp_path / "work")
    container = run_container(experiment, make_plan(experiment, run.name), run.path, PROJECT)
    assert container is not None
    of_work = [mount for mount in container.mounts if tmp_path / "work" in (mount.source, *mount.source.parents)]
    assert of_work == [Mount(tmp_path / "work", tmp_path / "work", read_only=True)]


def linked(run: RunDir, work: Path) -> Path:
    """The copy of a folder of which two files, in it and below it, are too large; returns the link to the second."""
    (work / "below").mkdir(parents=True)
    (run.code_tree / "below").mkdir(parents=True)
    for name in ("large.bin", "below/larger.bin"):
        (work / name).write_text("large")
        (run.code_tree / name).symlink_to(work / name)
    return run.code_tree / name


def test_links_of_the_copy_of_the_code_lead_to_the_originals_which_cannot_be_written(
    enroot: Runtime, planned: tuple[RunDir, RunContainer], corpus: Path, tmp_path: Path
) -> None:
    """The run's folder lies among them, and can be."""
    work = tmp_path / "work"
    settings = [f"runs_dir={work}/runs", "container=enroot", f"container.image={planned[1].file}"]
    experiment = compose([*settings, f"data.prefix='{corpus}'", f"cluster.scratch={tmp_path}"])
    run = RunDir.create(Path(experiment.runs_dir), experiment.name, "", datetime.now())
    link = linked(run, work)
    container = run_container(experiment, make_plan(experiment, run.name), run.path, PROJECT)
    assert container is not None
    look = "import sys; print(open(sys.argv[1]).read()); open(sys.argv[2], 'w'); open(sys.argv[1], 'w')"
    ended = done(container, [container.python, "-c", look, str(link), str(run.path / "written")])
    assert ended.stdout == "large\n", ended.stderr
    assert "Read-only file system" in ended.stderr
    assert link.read_text() == "large"
    assert (run.path / "written").exists()


def test_it_finds_of_the_host_what_it_was_given(
    enroot: Runtime, planned: tuple[RunDir, RunContainer], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "host")
    run, container = planned
    there = [PROJECT / "launch", run.path, Path(f"{corpus}.bin")]
    secret = corpus.parents[1] / "secret"
    secret.touch()
    hidden = [enroot.registry, secret]
    assert all(path.exists() for path in there + hidden)
    environment, seen = json.loads(done(container, [container.python, "-c", LOOK, *map(str, there + hidden)]).stdout)
    assert GIVEN.items() <= environment.items()
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "SECRET" not in environment
    assert seen == [True] * len(there) + [False] * len(hidden)


def test_apptainer_gives_it_the_same(
    apptainer: Runtime, planned: tuple[RunDir, RunContainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "host")
    image = tmp_path / "it.sif"
    image.write_bytes(MAGIC)
    container = replace(planned[1], kind=ContainerKind.apptainer, image=image, file=image)
    environment, _ = json.loads(done(container, [container.python, "-c", LOOK]).stdout)
    assert environment.keys() - {"PATH", "HOME", "LANG", "LC_CTYPE", "PWD"} == GIVEN.keys()
    assert GIVEN.items() <= environment.items()
