"""Workers in containers of docker, whose daemon has them: what is started, found, ended and compared."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.containers import ImageReference, Mount
from conf.schema.experiment import ContainerKind
from launch.control.follow import follow
from launch.control.planning.checks import check_supported
from launch.control.planning.dry_run import dry_run
from launch.control.stop import stop
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import docker as docker_commands
from launch.machine import processes
from launch.machine.container_runtimes import Docker, RunContainer, Worker
from launch.node.worker_command import WORKER as ENGINE
from megatron_ext.contract.worker import SAVED
from tests.launch.containers.conftest import DOCKER_IMAGE, IMAGE_ID, Runtime
from tests.support.launch import live
from tests.support.launch.live import FOREVER, TWO_NODES, token, wait_for, wait_until_running

CONTAINED = ["container=docker", f"container.image={DOCKER_IMAGE}"]
CPU = RunContainer(
    kind=ContainerKind.docker,
    image=ImageReference.parse("nvcr.io/nvidia/pytorch:23.04-py3"),
    file=None,
    digest=None,
    mounts=(Mount(Path("/tdpp"), Path("/tdpp")), Mount(Path("/raid/a,b"), Path("/data"), read_only=True)),
    folder=Path("/tdpp"),
    python="python3",
    gpus=False,
    reload=False,
    scratch=Path("/tmp"),
    run="xl/1",
)
GIVEN = {"TDPP_RUN_TOKEN": "abc", "NODE_RANK": "3", "VALUE": "a secret\nof two lines"}
WORDS = ("python3", "-u", "-m", ENGINE, "/runs/xl/1/plan.json", "3")


@pytest.fixture
def contained(docker: Runtime, tmp_path: Path) -> list[str]:
    return [*CONTAINED, f"data.prefix={tmp_path}/none", *TWO_NODES]


def ran(docker: Runtime) -> list[dict[str, Any]]:
    """What the daemon was asked to run, in order."""
    return [json.loads(line) for line in (docker.data / "runs").read_text().splitlines()]


def living(docker: Runtime) -> list[str]:
    return [path.name for path in (docker.data / "containers").glob("*")]


def test_every_word_of_its_command() -> None:
    own = [f"--user={os.getuid()}:{os.getgid()}", *(f"--group-add={group}" for group in sorted(os.getgroups()))]
    command = Docker().start(Worker(CPU, "tdpp-box", GIVEN, WORDS))
    assert shlex.join(command.argv) == (
        "docker run --rm --pull=never --name=tdpp-box --label=tdpp.run=abc --network=host --ipc=host --pid=host "
        f"--ulimit=memlock=-1 --ulimit=stack=67108864 {shlex.join(own)} --workdir=/tdpp "
        "--mount type=bind,source=/tdpp,destination=/tdpp "
        """--mount 'type=bind,"source=/raid/a,b",destination=/data,ro' """
        "--env NVIDIA_VISIBLE_DEVICES --env TDPP_RUN_TOKEN --env NODE_RANK --env VALUE --entrypoint=sh "
        f'nvcr.io/nvidia/pytorch:23.04-py3 -c \'umask "$0"; exec "$@"\' {processes.own_umask():04o} '
        f"python3 -u -m {ENGINE} /runs/xl/1/plan.json 3"
    )
    assert command.environment == {"NVIDIA_VISIBLE_DEVICES": "void", **GIVEN}
    assert command.remove == ("docker", "rm", "--force", "tdpp-box")


@pytest.mark.parametrize(
    ("given", "word"),
    [({}, "--gpus=all"), ({"CUDA_VISIBLE_DEVICES": "0,2"}, '--gpus="device=0,2"')],
    ids=["all", "by index"],
)
def test_its_gpus(given: dict[str, str], word: str) -> None:
    command = Docker().start(Worker(replace(CPU, gpus=True), "tdpp-box", given, WORDS))
    assert word in command.argv
    assert "CUDA_VISIBLE_DEVICES" not in command.environment  # they are numbered anew there
    assert command.environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_a_group_may_write_what_it_shall() -> None:
    umask = int(Docker().start(Worker(replace(CPU, group_writes=True), "x", GIVEN, WORDS)).argv[-len(WORDS) - 1], 8)
    assert umask & 0o070 == 0


def test_the_workers_of_both_nodes_run_in_it(
    docker: Runtime, contained: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = secrets.token_hex()
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("OTHER", "host")
    show = ["+cluster.environment.SHOW=1", "cluster.environment_from=[WANDB_API_KEY]"]
    run = live.start(runs, *show, *contained)
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    text = run.node_out("local-1").read_text()
    found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert {"NODE_RANK": "1", "TDPP_RUN_TOKEN": token(run), "WANDB_API_KEY": secret}.items() <= found.items()
    assert "OTHER" not in found
    assert secret not in (docker.data / "runs").read_text()
    names = [one["options"]["--name"][0] for one in ran(docker)]
    assert len(set(names)) == 2
    assert all(run.path.name in name for name in names)
    assert [run.read_json(run.node_state(node))["image"] for node in ("local-0", "local-1")] == [IMAGE_ID] * 2


def test_stop_ends_the_containers(docker: Runtime, contained: list[str], runs: Path) -> None:
    run = live.start(runs, *FOREVER, *contained)
    wait_until_running(run)
    assert len(living(docker)) == 2
    stop(run)
    assert judge(run).state is State.stopped
    assert living(docker) == []


@pytest.mark.parametrize("who", ["client", "agent"])
def test_a_container_ends_although_who_started_it_is_killed(
    docker: Runtime, contained: list[str], runs: Path, who: str
) -> None:
    run = live.start(runs, *FOREVER, *contained)
    wait_until_running(run)
    clients = [pid for pid in processes.find(token(run)) if b"docker_double" in live.command(pid)]
    os.kill(live.agents(run)[0] if who == "agent" else clients[0], signal.SIGKILL)
    wait_for(lambda: living(docker) == [])
    wait_for(lambda: judge(run).state in (State.failed, State.lost))


def test_it_saves_when_time_runs_out(docker: Runtime, contained: list[str], runs: Path) -> None:
    run = live.start(runs, *FOREVER, *contained)
    wait_until_running(run)
    processes.send(live.agents(run), signal.SIGUSR2)
    follow(run)
    assert judge(run).state is State.interrupted, judge(run)
    assert run.read_json(run.node_state("local-0"))["exit_code"] == SAVED


def test_containers_are_found_by_their_label(docker: Runtime) -> None:
    client = docker.popen(
        *("run", "--rm", "--name=odd", "--label=tdpp.run=abc", "--workdir=/", DOCKER_IMAGE, "sleep", "600")
    )
    wait_for(lambda: living(docker) == ["odd"])
    client.kill()
    client.wait()
    assert living(docker) == ["odd"]  # as the real one does, it outlives its client
    assert docker_commands.remove_all("abd") == 0
    assert docker_commands.remove_all("abc") == 1


def test_an_image_that_is_not_there_is_pulled(docker: Runtime, contained: list[str], runs: Path) -> None:
    (docker.data / "registry" / "registry.test+lab:2").write_text(IMAGE_ID)
    run = live.start(runs, *contained, "container.image=registry.test/lab:2")
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    assert "pull" in docker.calls


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("container.image=lab:3", "docker pull --quiet lab:3 exited with 1"),
        (f"container.digest=sha256:{'2' * 64}", f"has the ID {IMAGE_ID}, but container.digest=sha256:2222"),
    ],
    ids=["not to be had", "another one"],
)
def test_a_wrong_image_is_one_message(
    docker: Runtime, contained: list[str], runs: Path, override: str, told: str
) -> None:
    run = live.start(runs, *contained, override)
    follow(run)
    verdict = judge(run)
    assert verdict.rule == "node-gave-up", verdict
    assert told in verdict.reason


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["container.image=/images/it.sqsh"], "is a file, but docker needs an image name"),
        (["container.digest=abc"], "container.digest='abc' is not an image"),
        (["+cluster.environment.NVIDIA_VISIBLE_DEVICES=0"], "docker sets NVIDIA_VISIBLE_DEVICES itself"),
    ],
)
def test_what_it_cannot_express_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose(["container=docker", *overrides])


def test_slurm_could_not_bound_it() -> None:
    with pytest.raises(LaunchError, match="daemon starts containers outside of Slurm's jobs"):
        check_supported(compose(["experiment=seed_a10x8", "container=docker", "dry_run=true"]))


def test_a_dry_run_shows_it(tmp_path: Path) -> None:
    settings = [f"runs_dir={tmp_path}", *CONTAINED, "executor=hosts", "executor.hosts=[a:2,b:2]"]
    text = dry_run(compose(settings), "worker").full()
    assert text.count("    docker pull --quiet lab:1\n") == 2
    assert text.count("docker run --rm --pull=never") == 2


def test_the_double_takes_no_other_option(docker: Runtime) -> None:
    assert "unknown flag: --privileged" in docker("run", "--privileged", DOCKER_IMAGE).stderr
    assert docker("run", "--name=a b", "--workdir=/", DOCKER_IMAGE, "true").returncode == 125


def test_a_name_holds_what_docker_takes() -> None:
    container = replace(CPU, run="a+b@c/1")
    assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", Docker().name(container, 0))
    assert Docker().name(container, 0) != Docker().name(container, 1)
