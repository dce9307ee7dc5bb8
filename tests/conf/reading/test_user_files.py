"""A user's own configurations: a folder of them by --config-dir, a single file by its path."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.reading.own_folders import SHIPPED
from conf.reading.user_files import found_files
from tests.support.ordinary_user import ordinary_user

MINE = "tensor: 1\ndata: 1\npipeline: 2\npartition: 3-1\nglobal_batch_size: 6\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a plan in `own/parallel` and one that lies anywhere."""
    (tmp_path / "own/parallel").mkdir(parents=True)
    (tmp_path / "own/parallel/mine.yaml").write_text(MINE)
    (tmp_path / "any where").mkdir()
    (tmp_path / "any where/it's, [mine].yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["--config-dir", "own", "parallel=mine"],
        ["parallel=mine", "--config-dir=own"],
        ["-cd", "own", "parallel=mine"],
        ["--config-dir=any where", "--config-dir=own", "parallel=mine"],
        ["parallel=own/parallel/mine.yaml"],
        ["parallel=any where/it's, [mine].yaml"],
        ["parallel=./own/../own/parallel/mine.yaml"],
        ["--config-dir=own", "parallel=any where/it's, [mine].yaml"],
    ],
    ids=["dir", "dir-behind", "short", "two-dirs", "file", "any-name", "dots", "both"],
)
def test_a_configuration_is_taken_from_where_it_lies(folder: Path, words: list[str]) -> None:
    assert (str(compose(words).partition), compose(words).parallel.global_batch_size) == ("3-1", 6)


def test_a_file_takes_the_same_keys_beside_it_as_a_name(folder: Path) -> None:
    one = compose(["parallel=own/parallel/mine.yaml", "parallel.partition=1-3"])
    assert (str(one.partition), one.parallel.global_batch_size) == ("1-3", 6)


def test_a_file_may_build_on_those_of_its_group(folder: Path) -> None:
    Path("more.yaml").write_text("defaults: [d4p8, _self_]\nglobal_batch_size: 128\n")
    one = compose(["experiment=seed_a10x8", "parallel=more.yaml"])
    assert (one.parallel.pipeline, one.parallel.global_batch_size) == (8, 128)


def test_an_experiment_may_lie_anywhere(folder: Path) -> None:
    Path("x.yaml").write_text("# @package _global_\ndefaults: [{override /model: xl}]\nparallel: {partition: 24-24}\n")
    one = compose(["experiment=x.yaml"])
    assert (one.model.name, str(one.partition)) == ("xl", "24-24")


def test_a_file_goes_where_the_group_is_put(folder: Path) -> None:
    Path("b100.yaml").write_text(compose_text("gpu/a10.yaml").replace("name: A10", "name: B100"))
    assert compose(["+gpu@cluster.gpus.other=b100.yaml"]).cluster.gpus["other"].name == "B100"


def compose_text(file: str) -> str:
    return (SHIPPED / file).read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["parallel=nope.yaml"],
            r"parallel=nope.yaml: no such file; without .yaml the value is one of the names",
        ),
        (["parallel=own/parallel/mine.yaml,nope.yaml"], "parallel=nope.yaml: no such file"),
        (["cluster=/dev/zero"], r"cluster=/dev/zero: no file of YAML whose name ends in .yaml; give a file's path"),
        (["gpu@cluster.gpus.a10=./nope"], r"gpu@cluster.gpus.a10=./nope: no such file; give a file's path with .yaml"),
        (["cluster=zero.yaml"], r"cluster=zero.yaml: not a regular file; give a file of YAML"),
        (["parallel=folder.yaml"], r"parallel=folder.yaml: not a regular file"),
        (["--config-dir=nope"], r"--config-dir nope: no such folder"),
        (["--config-dir"], r"--config-dir '': no such folder"),
        (["--config-dir", "own/parallel/mine.yaml"], "mine.yaml: no such folder"),
    ],
    ids=[
        "file",
        "one-of-two",
        "device",
        "path",
        "link-to-device",
        "folder-for-file",
        "folder",
        "nothing",
        "file-for-folder",
    ],
)
def test_what_is_not_there_is_told_before_anything_is_composed(folder: Path, words: list[str], message: str) -> None:
    Path("zero.yaml").symlink_to("/dev/zero")
    Path("folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=message):
        compose(words)


def test_a_file_that_nobody_lets_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder, open_folder := Path(tempfile.mkdtemp()), dirs_exist_ok=True)
    open_folder.chmod(0o755)
    monkeypatch.chdir(open_folder)
    compose([])  # Hydra imports its parts where the user may not read
    mine = Path("own/parallel/mine.yaml")
    mine.chmod(0)
    for words in (["--config-dir=own", "parallel=mine"], [f"parallel={mine}"]):
        with ordinary_user(), pytest.raises(ConfigError, match=r"mine\.yaml: Permission denied$"):
            compose(words)
    Path("own/parallel").chmod(0)
    with ordinary_user(), pytest.raises(ConfigError, match=r"^own/parallel/mine\.yaml: Permission denied$"):
        compose([f"parallel={mine}"])
    shutil.rmtree(open_folder)


def test_a_file_that_would_never_be_read_is_refused(folder: Path) -> None:
    """tdpp's own files come first: a changed copy of the whole folder would change nothing."""
    Path("own/model").mkdir()
    Path("own/model/tiny.yaml").write_text(compose_text("model/tiny.yaml"))
    assert compose(["--config-dir=own", "parallel=mine"]).model.layers == 4
    Path("own/model/tiny.yaml").write_text(compose_text("model/tiny.yaml").replace("layers: 4", "layers: 8"))
    with pytest.raises(
        ConfigError, match=r"own/model/tiny.yaml has the same name as .*conf/model/tiny.yaml, which takes"
    ):
        compose(["--config-dir=own", "parallel=mine"])


def test_what_hydra_says_of_a_file_is_said_of_its_path(folder: Path) -> None:
    with found_files(["parallel=own/parallel/mine.yaml", "+gpu@cluster.gpus.b=x", "model=tiny"]) as words:
        (choice,) = words.given
        assert words.all[0] == f"parallel={choice}"
        assert words.as_given(f"{words.all[0]} and {choice}") == (
            "parallel=own/parallel/mine.yaml and own/parallel/mine.yaml"
        )


def test_without_files_of_ones_own_hydra_gets_the_words_unchanged() -> None:
    with found_files(["model=xl", "train.load=x.yaml", "-m"]) as words:
        assert words.all == ["model=xl", "train.load=x.yaml", "-m"]


def test_a_folder_of_ones_own_goes_with_options_behind_the_words(folder: Path) -> None:
    """Hydra's parser takes overrides in one row only: `name=a --cfg job` printed its usage."""
    with found_files(["--config-dir=own", "model=xl", "--cfg", "job"]) as words:
        assert [word.partition("=")[0] for word in words.all] == ["model", "hydra.searchpath", "--cfg", "job"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/a/ended.sh 'my runs'", ("/a/ended.sh", "my runs")),
        ("'/a b' 'c'", ("/a b", "c")),
        ("sh -c 'a; b' x=y", ("sh", "-c", "a; b", "x=y")),
        ("\"sh -c 'echo $X'\"", ("sh", "-c", "echo $X")),
    ],
    ids=["one-in-quotes", "all-in-quotes", "characters", "quoted-for-hydra"],
)
def test_a_command_is_written_as_for_a_shell(command: str, words: tuple[str, ...]) -> None:
    assert compose([f"notify.command={command}"]).notify.words == words
