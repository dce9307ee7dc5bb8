"""What would fail only on the ranks is told before anything is started, with its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import TdppError
from launch import cli
from launch.commands.launching.preflight import preflight as checked
from megatron_ext.contract.schedule.iteration import schedule
from tests.support.megatron_ext.checkpoints import save_run
from tests.support.ordinary_user import ordinary_user


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data have tests of their own."""
    monkeypatch.setattr("data_prep.training.check_for_training", lambda _: [])


def preflight(*overrides: str) -> None:
    checked(compose(["train.iterations=50", *overrides]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run folder with a checkpoint."""
    save_run(tmp_path, 40)
    return tmp_path


def test_a_checkpoint_that_fits_is_taken(saved: Path) -> None:
    preflight(f"train.load={saved}")


def test_a_checkpoint_that_cannot_be_gone_on_with_is_told(saved: Path) -> None:
    def told(*overrides: str) -> str:
        with pytest.raises(TdppError, match=f"^train.load={saved}") as raised:
            preflight(f"train.load={saved}", *overrides)
        return str(raised.value)

    assert "another model: expected hidden=32; found hidden=64; give the run the same" in told("model.hidden=32")
    assert "iter_0000040 is of iteration 40 and train.iterations=40: nothing is left" in told("train.iterations=40")
    (saved / "checkpoints" / "latest").write_text("\n")
    assert "latest: names '', but no such checkpoint exists" in told()
    (saved / "checkpoints" / "latest").unlink()
    assert "no checkpoint found; give a run folder" in told()


def test_a_checkpoint_that_nobody_lets_read_is_told(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    saved.chmod(0o700)
    for folder in (saved, saved / "checkpoints"):
        folder.chmod(0)
    told = r"^train.load=checkpoints: .* cannot be read: Permission denied$"
    with ordinary_user(), pytest.raises(TdppError, match=told):
        preflight("train.load=checkpoints")
    saved.chmod(0o700)


@pytest.mark.parametrize("sweep", [[], ["-m", "parallel.micro_batch_size=1,2"]], ids=["single", "sweep"])
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("train.load=nowhere", "train.load=nowhere: no checkpoint found; give a run folder"),
        ("parallel.schedule_file=nowhere.json", "parallel.schedule_file=nowhere.json: cannot be read"),
    ],
    ids=["checkpoint", "schedule"],
)
def test_a_dry_run_is_shown_and_ends_as_the_launch_would(
    tmp_path: Path,
    word: str,
    told: str,
    sweep: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "dry_run=true", "--full", word, *sweep]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("plan.json\n{") == (2 if sweep else 1)
    assert shown.err.count(told) == 1
    assert ("all 2 combinations, such as " in shown.err) == bool(sweep)
    assert cli.main(["launch", "dry_run=true", *sweep]) == 0
    assert not list(tmp_path.iterdir())


def test_a_schedule_of_ones_own_that_fits_is_taken_and_any_other_is_told(tmp_path: Path) -> None:
    path = tmp_path / "own.json"

    def tried(stages: int, micro_batches: int) -> None:
        actions = schedule("one_f_one_b", stages, 1, micro_batches)
        sizes = {"stages": stages, "chunks": 1, "micro_batches": micro_batches}
        lists = [[[action.kind.value, action.micro_batch, action.chunk] for action in one] for one in actions]
        path.write_text(json.dumps({"version": 1, **sizes, "actions": lists}))
        preflight(f"parallel.schedule_file={path}")

    tried(2, 4)
    with pytest.raises(TdppError, match=rf"^parallel.schedule_file={path}: stages=4, but the plan has 2 \(para"):
        tried(4, 4)
    with pytest.raises(TdppError, match="micro_batches=8, but the plan has 4"):
        tried(2, 8)
    path.unlink()
    with pytest.raises(TdppError, match=f"^parallel.schedule_file={path}: cannot be read as a schedule"):
        preflight(f"parallel.schedule_file={path}")


def test_a_stream_of_unlike_replicas_is_proved() -> None:
    preflight(
        *("model.untie_embeddings_and_output_weights=true", "parallel.schedule=pipedream", "parallel.data=1"),
        *("parallel.pipeline=2", "parallel.replicas=3-1"),
    )
