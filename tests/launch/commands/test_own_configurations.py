"""Every command that takes the words of `tdpp launch` takes a user's own configurations, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch import cli
from launch.commands.launch import main
from tests.support.launch.live import WORKER, no_data_needed

MODEL = "name: mine\nlayers: 2\nhidden: 96\nheads: 2\nsequence_length: 32\nvocab_size: 101\n"
TWO_NODES = ["cluster.groups.local.count=2", "cluster.groups.local.gpus_per_node=2"]
COMMANDS = {
    "launch": ["launch", "--cfg", "job"],
    "doctor": ["doctor", "dry_run=true", "parallel.partition=1-1"],
    "profile": ["profile", "dry_run=true"],
    "search": ["search", *TWO_NODES, "parallel.global_batch_size=4", "top=1"],
}
OWN = {"folder": ["--config-dir", "own", "model=mine"], "file": ["model=own/model/mine.yaml"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model in `own/model`."""
    monkeypatch.chdir(tmp_path)
    Path("own/model").mkdir(parents=True)
    Path("own/model/mine.yaml").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_model_of_ones_own_is_taken(command: list[str], own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, *own]) == 0, capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_misspelt_key_of_a_file_is_told_with_the_right_one(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own/model/mine.yaml").write_text(MODEL.replace("hidden", "hiden"))
    assert cli.main([*command, "--config-dir", "own", "model=mine"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith(
        "tdpp: error: own/model/mine.yaml, line 3: model.hiden is not a key; did you mean model.hidden, "
    )
    assert (told.out, told.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_file_that_is_no_yaml_is_told_with_its_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("own/model/mine.yaml").write_text(MODEL + "note: [\n")
    assert cli.main([*command, "model=own/model/mine.yaml"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"tdpp: error: {Path('own/model/mine.yaml').absolute()}: not YAML: ")
    assert (told.out, told.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("command", [*COMMANDS.values(), ["launch", "-m"]], ids=[*COMMANDS, "sweep"])
def test_a_misspelt_word_is_told_with_the_right_one(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "modle=tiny"]) == 1
    assert capsys.readouterr().err.startswith("tdpp: error: modle is not a key; did you mean model, ")


def test_a_dry_run_without_its_data_is_shown_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "dry_run=true", "--full", "data.prefix=nowhere"]) == 1
    shown = capsys.readouterr()
    assert "plan.json\n{" in shown.out
    absent = Path("nowhere.bin").absolute()
    assert shown.err.splitlines()[-1].startswith(f"tdpp: error: data.prefix=nowhere: {absent} is not there; ")


def test_a_dry_run_is_shown_although_only_its_data_say_how_long_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "experiment=pipedream/vgg16_16_pipedream", "dry_run=true"]) == 1
    shown = capsys.readouterr()
    assert "tensor 1 x data 15-1 x pipeline 2, partition 13-3" in shown.out
    *_, stood_in, error = shown.err.splitlines()
    assert stood_in == "(train.epochs=60: shown with train.iterations=1000000000; the data decide the real number)"
    assert error.startswith("tdpp: error: data.prefix=data/imagenet: ")


def test_a_sweep_over_files_says_which_one_each_run_had(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for partition in ("1-1", "2-0"):
        Path(f"{partition}.yaml").write_text(
            f"data: 2\npipeline: 2\npartition: {partition}\nmicro_batch_size: 2\nglobal_batch_size: 8\n"
        )
    words = ["--config-dir=own", "model=mine", "train.iterations=6", "-m", "parallel=1-1.yaml,2-0.yaml"]
    assert main(words, preflight=no_data_needed, worker=WORKER) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    assert [row[1:3] for row in rows] == [["parallel=1-1.yaml", "succeeded"], ["parallel=2-0.yaml", "succeeded"]]
    found = [run.read_json(run.plan)["partition"] for run in RunDir.all(runs)]
    assert found == [[1, 1], [2, 0]]
    (run, _) = RunDir.all(runs)
    assert "parallel=1-1.yaml" in run.overrides.read_text().splitlines()
    (record,) = runs.glob("sweeps/*/multirun.yaml")
    assert "parallel=1-1.yaml,2-0.yaml" in record.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-m", "--cfg", "job"], "Only one of --run, --multirun, --cfg, --info and --shell_completion"),
        (["--config-name", "nope"], "Cannot find primary config 'nope'"),
        (["--config-dir", "nope"], "--config-dir nope: no such folder"),
    ],
    ids=["two-answers", "name", "dir"],
)
def test_options_of_hydra_that_cannot_be_are_one_message(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", *words]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--dry-run", "--dryrun", "--dry_run=true"])
def test_whoever_wants_a_dry_run_is_not_led_to_a_real_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", option]) == 2
    assert capsys.readouterr().err == f"tdpp: error: {option}: 'tdpp launch' has no such option; write dry_run=true\n"
