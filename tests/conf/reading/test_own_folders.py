"""Configurations of one's own that no command line names."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.reading.own_folders import SHIPPED, VARIABLE, own_folders, path_of
from conf.run_folder.run_folders import RUNS_DIR, usual_runs_dir
from launch.cli import main

MODEL = "name: mine\nlayers: 2\nhidden: 96\nheads: 2\nsequence_length: 32\nvocab_size: 101\n"


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder and a home of their own."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path


def model(folder: Path, name: str = "mine", text: str = MODEL) -> None:
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / f"{name}.yaml").write_text(text)


@pytest.mark.parametrize("place", ["here/conf", "home/tdpp", "given"])
def test_a_model_there_is_taken_by_its_name(
    nothing_set: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model(nothing_set / place)
    if place == "given":
        (nothing_set / "other").mkdir()
        monkeypatch.setenv(VARIABLE, f"{nothing_set / 'other'}:{nothing_set / place}")
    assert compose(["model=mine", "parallel.partition=1-1"]).model.hidden == 96
    assert main(["completion", "--line", "tdpp launch model=min"]) == 0
    assert capsys.readouterr().out == "model=mine\n"


def test_a_plan_and_a_profile_are_written_where_they_are_found(nothing_set: Path) -> None:
    small = ["cluster=a10x8", "cluster.groups.gpu2.count=2", "model=xl", "parallel.global_batch_size=16"]
    words = [*small, "train.precision=fp16", "parallel.pipeline=8", "parallel.tensor=1", "parallel.micro_batch_size=1"]
    assert main(["search", *words, "top=1", "plan=best"]) == 0
    assert (nothing_set / "home/tdpp/parallel/best.yaml").is_file()
    assert compose(["train=gpt2", "cluster=a10x8", "cluster.groups.gpu2.count=2", "model=xl", "parallel=best"])
    assert path_of("v100", "profiles", SHIPPED) == nothing_set / "home/tdpp/profiles/v100.yaml"


def test_with_a_folder_here_new_ones_go_there(nothing_set: Path) -> None:
    (nothing_set / "here/conf/cluster").mkdir(parents=True)
    assert path_of("new", "parallel", SHIPPED / "parallel") == Path("conf/parallel/new.yaml")
    assert path_of("single", "parallel", SHIPPED / "parallel") == SHIPPED / "parallel/single.yaml"


def test_in_a_checkout_new_ones_lie_beside_the_shipped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SHIPPED.parent)
    assert path_of("new", "parallel", SHIPPED / "parallel") == SHIPPED / "parallel/new.yaml"
    assert own_folders() == []


def test_a_folder_called_conf_of_something_else_is_none_of_ours(nothing_set: Path) -> None:
    (nothing_set / "here/conf/nginx").mkdir(parents=True)
    assert own_folders() == []
    assert path_of("new", "parallel", SHIPPED) == nothing_set / "home/tdpp/parallel/new.yaml"


def test_the_name_of_a_shipped_one_is_refused(nothing_set: Path) -> None:
    model(nothing_set / "home/tdpp", "xl")
    with pytest.raises(ConfigError, match=r"xl\.yaml has the same name as .*xl\.yaml, which takes precedence"):
        compose([])


def test_a_variable_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere")
    with pytest.raises(ConfigError, match="TDPP_CONFIG=/nowhere: no folder /nowhere; create it"):
        compose(["model=mine"])


def test_runs_lie_where_a_variable_says(nothing_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (usual_runs_dir(), compose([]).runs_dir) == (Path("runs"), "runs")
    monkeypatch.setenv(RUNS_DIR, str(nothing_set / "kept"))
    assert (usual_runs_dir(), compose([]).runs_dir) == (nothing_set / "kept", str(nothing_set / "kept"))
    assert compose(["runs_dir=there"]).runs_dir == "there"
