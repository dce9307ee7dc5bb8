"""Runs on this machine whose workers are in containers: what submission and node agents make of them."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.follow import follow
from launch.control.planning.checks import check
from launch.control.planning.dry_run import dry_run
from launch.control.stop import stop
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from launch.machine.provenance import PROJECT
from launch.node.worker_command import Profiler
from launch.observe.look import observe
from megatron_ext.contract.worker import SAVED
from tests.launch.containers.conftest import Runtime
from tests.launch.control.test_profilers import write_double
from tests.support.containers.apptainer_double import MAGIC
from tests.support.launch import live
from tests.support.launch.live import FOREVER, TWO_NODES, token, wait_for

SHOW = "+cluster.environment.SHOW=1"


@pytest.fixture
def contained(enroot: Runtime, image: Path, tmp_path: Path) -> list[str]:
    return [
        "container=enroot",
        f"container.image={image}",
        f"container.image_dir={tmp_path}/images",
        f"cluster.scratch={tmp_path}",
        f"data.prefix={tmp_path}/none",
        *TWO_NODES,
    ]


def environment(run: RunDir, node: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in run.node_out(node).read_text().splitlines() if "=" in line)


def test_the_workers_of_both_nodes_run_in_it(
    enroot: Runtime, contained: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "host")
    run = live.start(runs, SHOW, *contained)
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    found = environment(run, "local-1")
    expected = {"NODE_RANK": "1", "TDPP_START": "0.0", "TDPP_RUN_TOKEN": token(run), "PYTHONPATH": str(PROJECT)}
    assert expected.items() <= found.items()
    assert "SECRET" not in found
    assert enroot.calls.count("create") == 1


def test_apptainer_runs_them_too(
    apptainer: Runtime, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("APPTAINERENV_SECRET", "host")
    image = tmp_path / "it.sif"
    image.write_bytes(MAGIC)
    run = live.start(runs, SHOW, "container=apptainer", f"container.image={image}", f"data.prefix={tmp_path}/none")
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    found = environment(run, "local-0")
    assert {"NODE_RANK": "0", "TDPP_START": "0.0", "TDPP_RUN_TOKEN": token(run)}.items() <= found.items()
    assert not {"SECRET", "SLURM_PROCID"} & found.keys()


def test_a_secret_of_the_shell_reaches_the_ranks_and_no_file(
    double: Runtime, contained: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = secrets.token_hex()
    monkeypatch.setenv("WANDB_API_KEY", secret)
    run = live.start(runs, SHOW, *contained, "cluster.environment_from=[WANDB_API_KEY]")
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    assert environment(run, "local-0")["WANDB_API_KEY"] == secret
    shown = {run.node_out(name) for name in ("local-0", "local-1")}  # where this test's ranks print all that they have
    files = [path for path in run.path.rglob("*") if path.is_file() and path not in shown]
    assert run.jobs in files
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_a_run_in_it_under_a_profiler_is_saved(
    enroot: Runtime, contained: list[str], runs: Path, tmp_path: Path
) -> None:
    """The profiler is the container's, and hands no signal on."""
    folder = write_double(tmp_path / "opt", Profiler.ncu).parent
    own = [f"container.mounts=[{folder}]", f"+cluster.environment.PATH='{folder}:{os.environ['PATH']}'"]
    run = live.start(runs, *FOREVER, "profile.ncu=true", *contained, *own)
    live.wait_until_running(run)
    processes.send(live.agents(run), signal.SIGUSR2)
    wait_for(lambda: observe(run).over)
    assert judge(run).state is State.interrupted, judge(run)
    assert [run.read_json(run.node_state(name))["exit_code"] for name in ("local-0", "local-1")] == [SAVED] * 2


def test_a_container_that_cannot_be_made_is_told(enroot: Runtime, contained: list[str], runs: Path) -> None:
    run = live.start(runs, *FOREVER, *contained, "container.image=/no/such.sqsh")
    wait_for(lambda: observe(run).over)
    verdict = judge(run)
    assert (verdict.state, verdict.rule, verdict.exit_code) == (State.failed, "node-gave-up", 1)
    assert "could not prepare its container: container.image=/no/such.sqsh: no such file" in verdict.reason
    assert "no such file" in run.node_err(verdict.reason.split()[1]).read_text()


def test_stop_ends_what_makes_it(double: Runtime, contained: list[str], runs: Path) -> None:
    double.hold.touch()
    run = live.start(runs, *FOREVER, *contained)
    wait_for(lambda: any(node.doing and node.doing.startswith("enroot create") for node in observe(run).nodes))
    assert judge(run).rule == "preparing"
    stop(run)
    assert judge(run).state is State.stopped
    double.hold.unlink()
    shutil.rmtree(double.data)


def test_an_image_that_others_could_have_made_is_refused_before_anything_is_started(
    enroot: Runtime, image: Path, tmp_path: Path
) -> None:
    found = tmp_path / "images" / "registry.test+small+1.sqsh"
    found.parent.mkdir()
    shutil.copy(image, found)
    found.chmod(0o666)
    overrides = ["container=enroot", "container.image=registry.test/small:1", f"container.image_dir={tmp_path}/images"]
    with pytest.raises(LaunchError, match=rf"{re.escape(str(found))} on \S+ can be written by everybody \(mode 666\)"):
        check(compose(overrides))
    found.chmod(0o644)
    check(compose(overrides))


DRY = ["container.image=registry.test/small:1", "container.image_dir=/images", "data.prefix=/data/gpt", *TWO_NODES]


def commands(tmp_path: Path, *overrides: str) -> list[list[str]]:
    """By node: the first words of its commands in a dry run."""
    text = dry_run(compose([f"runs_dir={tmp_path}", *DRY, *overrides]), "worker").full()
    nodes = text.partition(" runs\n\n")[2].partition("\n\nplan.json")[0].split("\n\n")
    return [[line.strip() for line in node.splitlines()[1:]] for node in nodes]


def test_a_dry_run_shows_what_each_node_runs(tmp_path: Path) -> None:
    first, second = commands(tmp_path, "container=enroot")
    image = "/images/registry.test+small+1.sqsh"
    brought, created, started = first
    assert brought == f"enroot import -o {image} 'docker://registry.test#small:1'"
    assert created == f"enroot create -n '<container>' {image}"
    assert " enroot start -m " in started
    assert " -m /data:/data:none:x-create=auto,rbind " in started
    assert " -e NODE_RANK -e TDPP_START '<container>' python3 -u -m worker " in started
    assert second[:-1] == [created]


def test_a_dry_run_shows_the_steps_of_pyxis(tmp_path: Path) -> None:
    groups = ["cluster=a100x1_a10x7", "parallel.node_order=hgx+gpu2", "parallel.pipeline=8", "parallel.data=1"]
    own = ["parallel.partition=null", "model.layers=8", "executor=slurm", "cluster.groups.gpu2.cpus_per_task=16"]
    text = dry_run(
        compose([f"runs_dir={tmp_path}", *DRY[:-2], *groups, *own, "executor.het=hetjob", "container=pyxis"]), "worker"
    ).full()
    assert " '--nodelist=<host>' --export=ALL --het-group=0 '--container-image=registry.test#small:1'" in text
    assert " '--nodelist=<host>' --export=ALL --cpus-per-task=16 --het-group=1 '--container-image=" in text
