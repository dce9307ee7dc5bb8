"""A small ViT learns scikit-learn's digits, by the command and the configuration that docs/images.md shows."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from launch.cli import main
from megatron_ext.data.images import open_images
from tests.support.megatron_ext.engine_run import make_run

LEAST = 0.95
CPU_SECONDS = 120


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "images", "--source", "digits", "--output", "data/digits"]) == 0
    return tmp_path / "data" / "digits"


def accuracy(folder: Path) -> float:
    """Over all test images, each once."""
    assert main(["evaluate", str(folder)]) == 0
    found = json.loads((folder / "evaluation-test.json").read_text())
    assert found["samples"] == len(open_images("data/digits", "test").images)
    reached: float = found["metrics"]["top-1"]
    return reached


def test_the_vit_of_the_digits_reads_at_least_95_percent_of_unseen_ones(digits: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", digits, base=["experiment=vit_digits"])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.go() == 0, run.stderr()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    reached = accuracy(run.run.path)
    print(f"{reached:.1%} in {taken:.0f} CPU s")
    assert reached >= LEAST
    assert taken < CPU_SECONDS


def test_the_commands_of_the_page_run(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["train.iterations=6", "train.lr_warmup_iterations=1", "train.log_interval=2"]
    assert main(["launch", "experiment=vit_digits", *few]) == 0
    two = ["parallel.pipeline=2", "parallel.data=2", "parallel.micro_batch_size=16", "parallel.shares=2-1"]
    for model in ("vit-tiny", "resnet-tiny", "vgg-tiny"):
        assert main(["launch", "experiment=vit_digits", f"model={model}", *few, *two]) == 0
    shown = capsys.readouterr()
    assert "top-1" in shown.out + shown.err
