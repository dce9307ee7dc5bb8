"""`tdpp generate` continues a text as the run has learned it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import cli
from tests.support.megatron_ext.engine_run import EngineRun, make_corpus, make_run

LETTERS = "abcdefgh"
WORDS = (
    *("model.layers=2", "model.hidden=32", "model.heads=4", "model.sequence_length=16", "model.vocab_size=257"),
    *("parallel=single", "parallel.partition=null", "parallel.global_batch_size=16", "parallel.micro_batch_size=16"),
    *("train.lr=1e-2", "train.min_lr=1e-3", "train.lr_warmup_iterations=1", "train.log_interval=1"),
)
SHORTEST, LONGEST = 40, 60


def trained(folder: Path, prefix: Path, *words: str) -> EngineRun:
    run = make_run(folder / "runs" / "mine" / "20260101-120000-0123abcd", prefix, *words, base=WORDS)
    (run.run.path / "config.yaml").touch()
    assert run.go() == 0, run.stderr()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has learned in which order letters come, in texts that end after 40 to 60 of them."""
    folder = tmp_path_factory.mktemp("letters")
    texts = [(LETTERS * 9)[first : first + SHORTEST + first * 2 % 21] for first in range(8)] * 8
    (folder / "letters.txt").write_text("\n".join(texts))
    words = ["--source", str(folder / "letters.txt"), "--documents", "line", "--output", str(folder / "letters")]
    assert cli.main(["data", "prepare", *words]) == 0
    return trained(folder, folder / "letters_text_document", "train.iterations=60").run.path


def generated(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    assert cli.main(["generate", str(run), *options]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_likeliest_text_is_what_was_learned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generated(run, capsys, "--prompt", "cdef", "--tokens", "12") == "cdefghabcdefghab\n"
    text = generated(run, capsys, "--prompt", "cdef", "--tokens", "30").strip()  # more than the model sees at once
    assert (LETTERS * 9)[2:].startswith(text)


@pytest.mark.slow
def test_a_drawn_text_follows_from_its_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "abc", "--tokens", "20", "--temperature", "30")
    first, again, other = (generated(run, capsys, *options, "--seed", seed) for seed in "112")
    assert first == again != other
    assert first.startswith("abc")


@pytest.mark.slow
def test_without_a_prompt_a_text_begins(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = generated(run, capsys, "--tokens", "5").strip()
    assert text in LETTERS * 3
    assert len(text) == 5


@pytest.mark.slow
def test_data_without_a_tokenizer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = make_corpus(tmp_path)
    path = trained(tmp_path, prefix, "train.iterations=2").run.path
    assert cli.main(["generate", str(path)]) == 1
    assert f"{prefix} has no manifest, so its tokens cannot be turned into text" in capsys.readouterr().err
