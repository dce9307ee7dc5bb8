"""A small ViT learns scikit-learn's digits, by the command and the configuration that docs/images.md shows."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest

from launch.cli import main
from megatron_ext.data.vision.images import open_images
from tests.support import cases
from tests.support.megatron_ext.engine_run import make_run

ADAPTIVE = Path(__file__).resolve().parents[2] / "docs" / "adaptive.md"
pytestmark = pytest.mark.slow
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


@pytest.mark.skipif(not cases.thorough, reason="a minute; the batch that adapts learns the same digits")
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


def test_a_batch_that_adapts_learns_them_with_fewer_updates(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command of docs/adaptive.md, after as many samples as the fixed batch of the test above takes."""
    command = re.search(r"^tdpp (launch experiment=vit_digits .*adapt.*)$", ADAPTIVE.read_text(), re.MULTILINE)
    assert command is not None
    assert main(command[1].split()) == 0
    assert "48,000 of 48,000 samples" in capsys.readouterr().out
    (run,) = Path("runs/vit_digits").glob("2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["consumed_samples"] == 48_000
    assert lines[-1]["iteration"] < 700, "a batch of 48 takes 1,000"
    assert accuracy(run) >= LEAST


def test_the_commands_of_the_page_run(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["train.iterations=6", "train.lr_warmup_iterations=1", "train.log_interval=2"]
    assert main(["launch", "experiment=vit_digits", *few]) == 0
    two = ["parallel.pipeline=2", "parallel.data=2", "parallel.micro_batch_size=16", "parallel.shares=2-1"]
    for model in cases.drawn(("vit-tiny", "resnet-tiny", "vgg-tiny"), 0, always=["resnet-tiny"]):
        assert main(["launch", "experiment=vit_digits", f"model={model}", *few, *two]) == 0
    shown = capsys.readouterr()
    assert "top-1" in shown.out + shown.err


def test_pipedream_trains_them_and_its_report_is_made(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["train.iterations=6", "train.lr_warmup_iterations=1", "train.log_interval=2"]
    stages = ["parallel.pipeline=2", "parallel.replicas=3-1", "parallel.partition=3-1", "parallel.micro_batch_size=12"]
    assert main(["launch", "experiment=vit_digits", *few, "parallel.schedule=pipedream", *stages]) == 0
    (run,) = Path("runs/vit_digits").glob("2*")
    assert main(["report", str(run)]) == 0
    assert (run / "report" / "timeline.html").is_file()
    assert "iteration 6 of 6" in capsys.readouterr().out
    assert 0.0 <= accuracy(run) <= 1.0
