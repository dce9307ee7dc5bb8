"""`tdpp translate RUN --epochs all --bleu`: every checkpoint of a run that trained without a flush."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch import cli
from tests.launch.commands.test_translate import FAMILIES, TRAINED, said, write_text
from tests.support.megatron_ext.engine_run import EngineRun, make_run

SIGNATURE = r"nrefs:1\|case:(mixed|lc)\|eff:no\|tok:(13a|intl)\|smooth:exp\|version:[0-9.]+"


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """A GNMT in two stages without a flush; a checkpoint after each second epoch of 200 pairs."""
    prefix, vocabulary = write_text(tmp_path_factory.mktemp("text"))
    layout = ["parallel.pipeline=2", "parallel.data=1", "parallel.partition=2-2", "parallel.micro_batch_size=4"]
    options = [
        *("parallel.schedule=pipedream", "parallel.global_batch_size=16", f"model.vocab_size={vocabulary}"),
        *("model.untie_embeddings_and_output_weights=true", "train.save_interval=25", "train.keep_checkpoints=9"),
    ]
    folder = tmp_path_factory.mktemp("runs") / "gnmt" / "20260101-000000-00000000"
    words = [*TRAINED, *FAMILIES["gnmt"], *layout, *options, "train.iterations=75"]
    made = make_run(folder, prefix, *words)
    assert made.go() == 0, made.stderr()
    return made


def scores(text: str) -> list[tuple[str, str, str, float, bool]]:
    found = re.findall(r"^(iter_\d+) +(\d+) +(\S+) +([0-9.]+)( +best)?$", text, re.MULTILINE)
    return [(name, iteration, epoch, float(score), bool(best)) for name, iteration, epoch, score, best in found]


@pytest.mark.slow
def test_every_checkpoint_has_its_bleu_and_the_best_one_is_marked(
    streamed: EngineRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = streamed.run.path
    text = said(capsys, "translate", run, "--epochs", "all", "--bleu")
    rows = scores(text)
    assert [row[:3] for row in rows] == [
        ("iter_0000025", "25", "2.00"),
        ("iter_0000050", "50", "4.00"),
        ("iter_0000075", "75", "6.00"),
    ]
    assert [row[4] for row in rows] == [row[3] == max(one[3] for one in rows) for row in rows]
    assert len({row[3] for row in rows}) > 1
    assert re.search(rf"^11 sentences; {SIGNATURE}$", text, re.MULTILINE)
    for name, *_, score, _ in rows:
        one = said(capsys, "evaluate", run, "--checkpoint", name)
        assert f"BLEU        {score:.2f} (11 sentences;" in one


def test_other_words_and_text_are_compared_where_they_are_asked_for(
    streamed: EngineRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, run = streamed.plan.data_prefix, streamed.run.path
    text = said(capsys, "translate", run, "--bleu", "--lowercase", "--tokenize", "intl", "--samples", "5")
    assert "5 sentences; nrefs:1|case:lc|eff:no|tok:intl" in text
    assert [row[0] for row in scores(text)] == ["iter_0000075"]
    files = ("--input", f"{prefix}-test.source.txt", "--reference", f"{prefix}-test.target.txt")
    assert scores(said(capsys, "translate", run, "--bleu", *files)) == scores(said(capsys, "translate", run, "--bleu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "all"], "--epochs all: this option works only with --bleu; add --bleu"),
        (["--bleu", "--export", "m.safetensors"], "--export m.safetensors: --bleu writes no file"),
        (["--bleu", "--input", "x"], "--bleu compares translations of --input with --reference"),
        (["--bleu", "--epochs", "all", "--checkpoint", "iter_0000025"], "--epochs all scores every checkpoint"),
        (["--bleu", "--input", "nowhere", "--reference", "nowhere"], "nowhere: cannot be read (No such file"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together_are_refused(
    streamed: EngineRun, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["translate", str(streamed.run.path), *options]) == 1
    assert message in capsys.readouterr().err
