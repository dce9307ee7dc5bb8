"""The writers of trackers, with the real libraries, which read back what was written."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from conf.compose import compose, config_text
from conf.run_folder.rundir import RunDir
from conf.schema.profile import Tracker
from launch.control.planning.plan import make_plan
from launch.errors import LaunchError
from launch.tracking.run_info import require_ready
from launch.tracking.writer import write
from tests.support import ROOT
from tests.support.launch.live import wait_for
from tests.support.launch.trackers import found, mlflow_runs, offline_records

KINDS = pytest.mark.parametrize("kind", list(Tracker))
WORDS = ("train.iterations=40", "train.log_interval=10", "cluster.groups.local.price_per_hour=3")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")


def made(folder: Path, name: str = "20261123-120000-abcdef01") -> RunDir:
    """A run's folder without any iteration."""
    run = RunDir(folder / "tiny" / name)
    run.nodes.mkdir(parents=True)
    experiment = compose(WORDS)
    run.config.write_text(config_text(experiment))
    run.overrides.write_text("".join(f"{word}\n" for word in WORDS))
    run.write_json(run.plan, make_plan(experiment, run.name).as_json())
    run.write_json(run.provenance, {"unix": 1.8e9, "host": "here", "commit": "0123abc"})
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return made(tmp_path)


def line(iteration: int, loss: float, **others: float) -> dict[str, float]:
    known = {"unix": 1.8e9 + iteration, "consumed_samples": 4 * iteration, "elapsed_ms": 1e3, "learning_rate": 1e-3}
    return {"iteration": iteration, "loss": loss, **known, **others}


def log(run: RunDir, lines: Sequence[dict[str, float]]) -> None:
    with run.metrics.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)


def cut_back(run: RunDir, iteration: int) -> None:
    """As a start that goes on from a checkpoint does."""
    kept = [text for text in run.metrics.read_text().splitlines() if json.loads(text)["iteration"] <= iteration]
    fresh = run.metrics.with_name("fresh")
    fresh.write_text("".join(f"{text}\n" for text in kept))
    fresh.replace(run.metrics)


class Writer:
    """One as a node agent starts it."""

    def __init__(self, kind: Tracker, run: RunDir) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.tracking.writer", str(run.path), str(kind)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, err = self.process.communicate()
        return self.process.returncode, err


@pytest.fixture
def killed() -> Iterator[list[Writer]]:
    """Those that a test leaves behind."""
    writers: list[Writer] = []
    yield writers
    for one in writers:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


@pytest.mark.slow
@KINDS
def test_a_run_that_is_over_is_written_whole_and_once(kind: Tracker, run: RunDir) -> None:
    lines = [line(10, 4.5), line(20, 3.5, valid_bleu=11.25, evaluation_s=2.0), line(40, 2.5, grad_norm=0.5)]
    for _ in range(2):  # the second time nothing is there twice
        write(kind, run, lines)
        series = found(kind, run)
        assert series["train/loss"] == [(10, 4.5), (20, 3.5), (40, 2.5)]
        assert series["valid/bleu"] == [(20, 11.25)]
        assert series["grad_norm"] == [(40, 0.5)]
        assert series["samples"] == [(10, 40), (20, 80), (40, 160)]
        tokens = compose(WORDS).model.sequence_length
        assert series["tokens"] == [(10, 40 * tokens), (20, 80 * tokens), (40, 160 * tokens)]
        assert [value for _, value in series["cost"]] == pytest.approx([10 / 1200, 22 / 1200, 42 / 1200])


@pytest.mark.slow
@KINDS
def test_what_comes_is_followed(kind: Tracker, run: RunDir, killed: list[Writer]) -> None:
    writer = Writer(kind, run)
    killed.append(writer)
    log(run, [line(10, 4.5)])
    if kind is not Tracker.wandb:  # whose library keeps some of it in memory
        wait_for(lambda: found_loss(kind, run) == [(10, 4.5)])
    log(run, [line(20, 3.5)])
    assert writer.end() == (0, "")
    assert found_loss(kind, run) == [(10, 4.5), (20, 3.5)]


def found_loss(kind: Tracker, run: RunDir) -> list[tuple[int, float]]:
    """As far as it can be read meanwhile."""
    if kind is Tracker.mlflow:  # whose library would make what is not there yet
        database = f"file:{run.runs / 'mlflow.db'}?mode=ro"
        try:
            with closing(sqlite3.connect(database, uri=True)) as connection:
                return connection.execute(
                    "select step, value from metrics where key = 'train/loss' order by step"
                ).fetchall()
        except sqlite3.OperationalError:
            return []
    return found(kind, run).get("train/loss", [])


@pytest.mark.slow
@KINDS
def test_a_resumed_run_goes_on_without_a_point_missing_or_twice(
    kind: Tracker, run: RunDir, killed: list[Writer]
) -> None:
    """Its writer was killed with the node, and its metrics are cut back while the next one is reading them."""
    log(run, [line(10, 4.5), line(20, 3.5), line(22, 3.25, valid_loss=3.0)])
    first = Writer(kind, run)
    killed.append(first)
    wait_for((run.trackers / f"{kind}.lock").exists)
    if kind is not Tracker.wandb:
        wait_for(lambda: len(found_loss(kind, run)) == 3)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    log(run, [line(24, 3.125)])
    second = Writer(kind, run)
    killed.append(second)
    if kind is not Tracker.wandb:
        wait_for(lambda: (24, 3.125) in found_loss(kind, run))
    cut_back(run, 20)
    log(run, [line(22, 3.25, valid_loss=3.0), line(24, 3.125), line(30, 2.5)])
    assert second.end() == (0, "")
    assert found_loss(kind, run) == [(10, 4.5), (20, 3.5), (22, 3.25), (24, 3.125), (30, 2.5)]
    assert found(kind, run)["valid/loss"] == [(22, 3.0)]


@pytest.mark.parametrize("kind", [Tracker.tensorboard, Tracker.wandb])
def test_what_is_written_anew_has_the_values_of_the_last_start(kind: Tracker, run: RunDir) -> None:
    write(kind, run, [line(10, 4.5), line(20, 3.5)])
    write(kind, run, [line(10, 4.5), line(20, 3.25), line(30, 2.5)])
    assert found_loss(kind, run) == [(10, 4.5), (20, 3.25), (30, 2.5)]


@pytest.mark.slow
def test_the_configuration_is_there_and_runs_of_a_sweep_are_told_apart(tmp_path: Path) -> None:
    runs = [made(tmp_path, f"20261123-12000{second}-abcdef01") for second in (0, 1)]
    for run in runs:
        for kind in Tracker:
            write(kind, run, [line(40, 2.5)])
    known = mlflow_runs(runs[0])
    assert sorted(one.info.run_name for one in known) == [run.path.name for run in runs]
    assert {one.info.status for one in known} == {"FINISHED"}
    for one in known:
        assert (one.data.params["train.iterations"], one.data.params["model.name"]) == ("40", "tiny")
        assert one.data.tags["mlflow.note.content"] == " ".join(WORDS)
    record, other = (next(one.run for one in offline_records(run) if one.HasField("run")) for run in runs)
    config = {item.key: json.loads(item.value_json) for item in record.config.update}
    assert (record.display_name, record.project, config["train.iterations"]) == (runs[0].path.name, "tiny", 40)
    assert record.run_id != other.run_id


def test_hparams_of_tensorboard_have_the_configuration(run: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    write(Tracker.tensorboard, run, [line(10, 4.5)])
    read = EventAccumulator(str(run.path / "tensorboard")).Reload()
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["train.iterations"].number_value == 40
    assert hparams["parallel.partition"].string_value == "1-3"


@pytest.mark.slow
def test_a_run_cut_short_is_not_called_finished(run: RunDir) -> None:
    write(Tracker.mlflow, run, [line(10, 4.5)])
    assert [one.info.status for one in mlflow_runs(run)] == ["KILLED"]


def test_two_writers_do_not_write_one_run(run: RunDir, killed: list[Writer]) -> None:
    writer = Writer(Tracker.tensorboard, run)
    killed.append(writer)
    log(run, [line(10, 4.5)])
    wait_for(lambda: found_loss(Tracker.tensorboard, run))
    with pytest.raises(LaunchError, match="the run's own writer is active"):
        write(Tracker.tensorboard, run, [line(10, 4.5)])


def test_a_tracker_that_fails_says_so_once(run: RunDir, killed: list[Writer]) -> None:
    (run.path / "tensorboard").write_text("no folder")
    writer = Writer(Tracker.tensorboard, run)
    killed.append(writer)
    code, err = writer.end()
    assert code == 1
    (said,) = err.splitlines()
    assert said.startswith("log=tensorboard ended: ")
    assert said.endswith("the run continues, and 'tdpp report RUN --tensorboard' writes what is missing")


def test_mlflow_takes_a_folder(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "others")
    write(Tracker.mlflow, run, [line(10, 4.5)])
    client = MlflowClient(tracking_uri=str(tmp_path / "mlruns"))
    experiment = client.get_experiment_by_name("others")
    assert experiment is not None
    (known,) = client.search_runs([experiment.experiment_id])
    assert known.data.metrics["train/loss"] == 4.5


@pytest.mark.parametrize(
    ("kind", "package", "environment"),
    [(Tracker.tensorboard, "tensorboard", {}), (Tracker.mlflow, "alembic", {}), (Tracker.wandb, "wandb", {})],
    ids=lambda value: str(value) or "-",
)
def test_a_missing_library_is_named_before_the_start(
    kind: Tracker, package: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.tracking.run_info.find_spec", lambda name: None if name == package else object())
    with pytest.raises(LaunchError) as error:
        require_ready([kind], environment)
    assert str(error.value) == (
        f"log={kind}: {package} is not installed here; install all trackers with "
        "pip install 'tdpp[trackers]', or leave it out"
    )


def test_an_mlflow_server_needs_no_database_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.tracking.run_info.find_spec", lambda name: object() if name == "mlflow" else None)
    require_ready([Tracker.mlflow], {"MLFLOW_TRACKING_URI": "https://mlflow.example"})


def test_wandb_needs_an_account_or_to_be_offline(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    nobody = {"NETRC": str(netrc)}
    with pytest.raises(LaunchError, match="not logged in to Weights & Biases here; run 'wandb login'"):
        require_ready([Tracker.wandb], nobody)
    for known in ({"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "x" * 40}):
        require_ready([Tracker.wandb], nobody | known)
    netrc.write_text("machine wandb.example login user password secret\n")
    netrc.chmod(0o600)
    require_ready([Tracker.wandb], nobody | {"WANDB_BASE_URL": "https://wandb.example"})
    with pytest.raises(LaunchError, match="not logged in"):
        require_ready([Tracker.wandb], nobody)
