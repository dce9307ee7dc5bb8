"""An image is built of a recipe once, is named by what it is built of, and nothing is left of a build that fails."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.commands.clean import main as clean
from launch.control.planning.plan import make_plan
from launch.errors import LaunchError
from launch.machine.container_commands import run_container
from launch.machine.container_runtimes import RunContainer
from launch.node.container_setup import Setup
from launch.node.image_file import record_of
from tests.launch.containers.conftest import Runtime
from tests.support.containers.apptainer_double import MAGIC
from tests.support.launch.live import wait_for

BASE = "nvcr.io/nvidia/pytorch:23.04-py3"
COMMANDS = ["id -u > /workspace/user", "echo 'a \"b\" $HOME' > /etc/made; echo done"]


def recipe(tmp_path: Path, kind: str, *commands: str, packages: str = "") -> RunContainer:
    lines = ", ".join("'" + one.replace("\\", "\\\\").replace("'", "\\'") + "'" for one in commands)
    words = [f"container={kind}", f"container.image={BASE}", f"container.recipe.commands=[{lines}]"]
    words += [f"container.recipe.packages=[{packages}]"] if packages else []
    words += [f"container.image_dir={tmp_path}/images", f"cluster.scratch={tmp_path}", f"runs_dir={tmp_path}/runs"]
    experiment = compose(words)
    container = run_container(experiment, make_plan(experiment, "tiny/1"), tmp_path / "runs", tmp_path)
    assert container is not None
    return container


def name_of(container: RunContainer, node_rank: int = 0) -> str:
    with Setup(container, node_rank) as setup:
        wait_for(setup.step)
        return setup.name


def test_enroot_builds_it_as_root_and_once(double: Runtime, image: Path, tmp_path: Path) -> None:
    (double.registry / "nvcr.io#nvidia+pytorch:23.04-py3").write_bytes(image.read_bytes())
    container = recipe(tmp_path, "enroot", *COMMANDS)
    name = name_of(container)
    assert double("start", name, "cat", "/workspace/user", "/etc/made").stdout == '0\na "b" $HOME\n'
    assert double("list").stdout.split() == [name]
    assert container.file is not None
    assert sorted(container.file.parent.iterdir()) == [container.file, record_of(container.file)]
    name_of(recipe(tmp_path, "enroot", *COMMANDS))
    assert double.calls.count("import") == double.calls.count("export") == 1
    other = recipe(tmp_path, "enroot", COMMANDS[0])
    assert name_of(other) != name
    assert double.calls.count("export") == 2


def test_a_command_that_fails_is_shown_and_leaves_nothing(double: Runtime, image: Path, tmp_path: Path) -> None:
    (double.registry / "nvcr.io#nvidia+pytorch:23.04-py3").write_bytes(image.read_bytes())
    container = recipe(tmp_path, "enroot", "echo first", "ls /no/such || echo later", "false", "echo never")
    with pytest.raises(LaunchError) as error:
        name_of(container)
    assert "from container.recipe exited with 1" in str(error.value)
    assert str(error.value).splitlines()[-1].strip() == "+ false"
    assert container.file is not None
    assert list(container.file.parent.iterdir()) == []
    assert double("list").stdout == ""


def test_giving_up_ends_a_build_and_the_next_one_is_whole(double: Runtime, image: Path, tmp_path: Path) -> None:
    (double.registry / "nvcr.io#nvidia+pytorch:23.04-py3").write_bytes(image.read_bytes())
    container = recipe(tmp_path, "enroot", *COMMANDS)
    double.hold.touch()
    with Setup(container, 0) as setup:
        wait_for(lambda: setup.step() or "import" in double.calls)
        assert "the build of" in str(setup.doing)
    double.hold.unlink()
    assert double("start", name_of(container), "cat", "/workspace/user").stdout == "0\n"


def test_two_hosts_at_once_build_it_once(
    double: Runtime, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (double.registry / "nvcr.io#nvidia+pytorch:23.04-py3").write_bytes(image.read_bytes())
    container = recipe(tmp_path, "enroot", *COMMANDS)
    (tmp_path / "other").mkdir()
    hosts = [Setup(container, 0), Setup(replace(container, scratch=tmp_path / "other"), 0)]
    ready = [False, False]

    def step() -> bool:
        for number, setup in enumerate(hosts):
            monkeypatch.setattr(socket, "gethostname", lambda number=number: f"host{number}")
            ready[number] = ready[number] or setup.step()
        return all(ready)

    try:
        wait_for(step)
    finally:
        for setup in hosts:
            setup.close()
    assert double.calls.count("import") == double.calls.count("export") == 1
    assert container.file is not None
    assert sorted(container.file.parent.iterdir()) == [container.file, record_of(container.file)]


def test_a_folder_that_cannot_be_written_is_named(double: Runtime, tmp_path: Path) -> None:
    container = recipe(tmp_path, "enroot", *COMMANDS)
    assert container.file is not None
    with pytest.raises(LaunchError, match=r"container.image_dir=/sys: /sys/\S+ cannot be written .* choose a folder"):
        name_of(replace(container, file=Path("/sys") / container.file.name))
    assert double.calls == []


def test_what_a_killed_build_leaves_is_removed_by_clean(double: Runtime, image: Path, tmp_path: Path) -> None:
    (double.registry / "nvcr.io#nvidia+pytorch:23.04-py3").write_bytes(image.read_bytes())
    container = recipe(tmp_path, "enroot", "kill -9 -$(ps -o pgid= -p $PPID | tr -d ' '); sleep 100")
    assert container.file is not None
    with pytest.raises(LaunchError, match="was killed by SIGKILL"):
        name_of(container)
    folder = container.file.parent
    assert double("list").stdout and list(folder.iterdir())
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    (tmp_path / "runs").mkdir(exist_ok=True)
    where = ["--runs-dir", f"{tmp_path}/runs", "--image-dir", str(folder), "--scratch", str(tmp_path)]
    assert clean([*where, "--older-than", "0", "--yes"]) == 0
    assert (double("list").stdout, list(folder.iterdir())) == ("", [])


def test_apptainer_builds_it_of_a_definition(
    apptainer: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (apptainer.registry / "nvcr.io+nvidia+pytorch:23.04-py3").write_bytes(MAGIC)
    container = recipe(tmp_path, "apptainer", "echo 'a \"b\" %d' > ../made", "echo again >> ../made")
    name_of(container)
    assert (tmp_path / "made").read_text() == 'a "b" %d\nagain\n'
    assert container.file is not None
    assert sorted(container.file.parent.iterdir()) == [container.file, record_of(container.file)]
    assert list((tmp_path / "temporary").iterdir()) == []
    with pytest.raises(LaunchError, match=r"exited with 255 .*\n(.*\n)*.*exit status 1"):
        name_of(recipe(tmp_path, "apptainer", "false"))


def test_packages_come_first_and_the_name_follows_from_all_of_it(tmp_path: Path) -> None:
    plain, full = recipe(tmp_path, "enroot"), recipe(tmp_path, "enroot", "true", packages="'numpy<2',einops")
    assert full.recipe == "python3 -m pip install --no-cache-dir 'numpy<2' einops\ntrue"
    assert plain.recipe == "" and plain.file is not None and full.file is not None
    assert full.file.name.startswith(f"{plain.file.stem}+")
    again = recipe(tmp_path, "enroot", "true", packages="'numpy<2',einops")
    other = recipe(tmp_path, "enroot", "true", packages="'numpy<3',einops")
    assert again.file == full.file != other.file
    assert full.runtime.fetch(full, full.file)[-1] == full.recipe


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["container=docker"], "container.recipe is built by enroot or apptainer, not with container.kind=docker"),
        (["container=none"], "not with container.kind=none; use container=enroot"),
        (["container=enroot", "container.image=/a/b.sqsh"], "container.image=/a/b.sqsh is a file"),
        (["container=enroot", "container.recipe.packages=[-U]"], "container.recipe.packages[0]='-U' is not a package"),
        (["container=enroot", "container.recipe.commands=['']"], "container.recipe.commands[0]='' is empty"),
        (
            ["container=enroot", "container.recipe.packages=['https://me:secret@host/a.whl']"],
            "container.recipe.packages[0] has a password",
        ),
        (["container=apptainer", "container.recipe.commands=['%files']"], "lines that begin with % for its own"),
    ],
    ids=["docker", "none", "file", "option", "empty", "password", "section"],
)
def test_what_cannot_be_built_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(["container.recipe.commands=[ls]", f"container.image={BASE}", *words])
    assert message in str(error.value)
