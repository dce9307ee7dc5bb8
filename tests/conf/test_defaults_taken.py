"""What nobody chose is named, with its value; what an experiment, a file or a word chose is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose_unchecked
from conf.origins import SEARCHED, TRAINED, defaults_taken
from conf.reading.own_folders import SHIPPED

SHIPPED_FILES = {
    "cluster/mine.yaml": "defaults:\n  - a10x8\n  - _self_\nname: mine\n",
    "parallel/batch.yaml": "global_batch_size: 32\n",
    "train/long.yaml": "defaults:\n  - gpt2\n  - _self_\nprecision: bf16\n",
    "experiment/mine.yaml": (
        "# @package _global_\n"
        "defaults:\n  - override /cluster: mine\n  - override /model: xl\n  - override /parallel: batch\n  - _self_\n"
        "train: {precision: bf16}\n"
    ),
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in SHIPPED_FILES.items():
        file = tmp_path / "own" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    monkeypatch.chdir(tmp_path)


OF_DEMO_TRAIN = "train.iterations=50 train.lr=0.003"


@pytest.mark.parametrize(
    ("words", "searched", "also_trained"),
    [
        ([], "", ""),
        (["experiment=demo"], "", ""),
        (["parallel.global_batch_size=32", "cluster.groups.local.count=1"], "", ""),
        (
            ["--config-dir=own", "cluster=mine", "model=6.7b"],
            "parallel.global_batch_size=16 train.precision=fp32",
            f"parallel.micro_batch_size=2 data.prefix=data/stdlib_text_document {OF_DEMO_TRAIN}",
        ),
        (
            ["cluster=own/cluster/mine.yaml", "parallel.global_batch_size=64", "++train.precision=bf16"],
            "model=tiny",
            f"parallel.micro_batch_size=2 data.prefix=data/stdlib_text_document {OF_DEMO_TRAIN}",
        ),
        (
            ["model=xl", "parallel=own/parallel/batch.yaml", "train=own/train/long.yaml"],
            "cluster=local",
            "parallel.micro_batch_size=1 data.prefix=data/stdlib_text_document",
        ),
        (
            ["data.prefix=mine", "train=gpt2"],
            "cluster=local model=tiny parallel.global_batch_size=16 train.precision=fp32",
            "parallel.micro_batch_size=2",
        ),
        (
            ["experiment=mine", "--config-dir", "own", "train.iterations=7", "train.lr=1e-4", "data=my_gpt2"],
            "",
            "parallel.micro_batch_size=1",
        ),
        (["experiment=seed_a10x8", "cluster.groups.gpu2.count=4"], "", ""),
    ],
    ids=["demo", "its-experiment", "changed-demo", "cluster", "file", "files", "data", "experiment", "seed"],
)
@pytest.mark.usefixtures("own")
def test_what_nobody_chose_is_named(words: list[str], searched: str, also_trained: str) -> None:
    composed = compose_unchecked(words)
    for keys, told in ((SEARCHED, [searched]), (TRAINED, [searched, also_trained])):
        expected = " ".join(filter(None, told))
        assert defaults_taken(words, composed, keys) == (f"defaults in use: {expected}" if expected else None)


@pytest.mark.slow
def test_every_shipped_experiment_chooses_all_but_the_number_format() -> None:
    for file in (SHIPPED / "experiment").glob("*.yaml"):
        words = [f"experiment={file.stem}", "train.precision=bf16"]
        assert defaults_taken(words, compose_unchecked(words), TRAINED) is None
