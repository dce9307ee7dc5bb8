"""`tdpp translate` and `tdpp evaluate`, of runs that were trained a little."""

from __future__ import annotations

import io
import json
import math
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.tokenizers.special import train_both
from launch import cli
from megatron_ext import translate as of_file
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.pairs import side_prefix
from megatron_ext.families.tasks import task_of
from megatron_ext.inference.held_out import SAMPLES
from megatron_ext.inference.text import tokenizer_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.support import ROOT
from tests.support.megatron_ext.engine_run import EngineRun, make_corpus, make_run
from tests.support.megatron_ext.sentences import write_sentences
from tests.support.megatron_ext.users_files import users_file

WORDS = {
    **{"hund": "dog", "katze": "cat", "haus": "house", "rot": "red", "blau": "blue"},
    **{"ist": "is", "und": "and", "ein": "a", "mag": "likes", "alt": "old"},
}
PAGE = ROOT / "docs" / "translation.md"
TRAINED = [
    "train.iterations=40",
    "train.lr=1e-2",
    "model.layers=2",
    "model.sequence_length=12",
    "model.decoder_sequence_length=12",
]
FAMILIES = {
    "transformer": ["model.family=transformer", "model.position_embedding_type=sinusoidal"],
    "gnmt": ["model.family=gnmt", "model.position_embedding_type=none", "model.heads=1"],
}


def sentence(source: random.Random) -> tuple[str, str]:
    words = [source.choice(list(WORDS)) for _ in range(source.randint(2, 5))]
    return " ".join(words), " ".join(WORDS[word] for word in words)


def write_text(folder: Path) -> tuple[Path, int]:
    """Pairs with their text and tokenizer, as `tdpp data pairs` makes them; the vocabulary's size."""
    prefix, source = folder / "toy", random.Random(0)
    splits = {split: [sentence(source) for _ in range(n)] for split, n in (("train", 200), ("valid", 9), ("test", 11))}
    content = train_both([text for pair in splits["train"] for text in pair], 320).content
    Path(f"{prefix}.tokenizer.json").write_text(content)
    tokenizer = tokenizer_of(content)
    for split, pairs in splits.items():
        for side, lines in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
            Path(f"{prefix}-{split}.{side}.txt").write_text("".join(f"{line}\n" for line in lines))
            ids = [np.array(tokenizer.encode(line)) for line in lines]
            write_indexed(side_prefix(prefix, split, side), ids, np.dtype("<u2"))
    return prefix, len(json.loads(content)["model"]["vocab"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """A run of two stages of each family."""
    prefix, vocabulary = write_text(tmp_path_factory.mktemp("text"))
    layout = ["parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-3", "parallel.micro_batch_size=4"]
    found = {}
    for family, options in FAMILIES.items():
        folder = tmp_path_factory.mktemp("runs") / family / "20260101-000000-00000000"
        found[family] = make_run(folder, prefix, *TRAINED, *options, f"model.vocab_size={vocabulary}", *layout)
        assert found[family].go() == 0, found[family].stderr()
    return found


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.main([str(one) for one in arguments]) == code
    out, err = capsys.readouterr()
    return err if code else out


def output_of(code: str, text: str, **options: Path) -> str:
    """Of a Python of its own, which reads the text."""
    return subprocess.run(
        [sys.executable, "-c", code], input=text, stdout=subprocess.PIPE, text=True, check=True, **options
    ).stdout


def lines_of(run: EngineRun) -> list[str]:
    return [*Path(f"{run.plan.data_prefix}-test.source.txt").read_text().splitlines(), "", "Hund?"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_line_is_translated_alike_from_stdin_from_a_file_and_by_the_exported_model(
    trained: dict[str, EngineRun],
    family: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = trained[family].run.path
    lines = lines_of(trained[family])
    text = "".join(f"{line}\n" for line in lines)
    (tmp_path / "in").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    found = said(capsys, "translate", run)
    assert len(found.splitlines()) == len(lines)
    assert found.splitlines()[-2] == ""
    assert len(set(found.splitlines())) > 3
    assert said(capsys, "translate", run, "--input", tmp_path / "in", "--output", tmp_path / "out") == ""
    assert (tmp_path / "out").read_text() == found
    file = tmp_path / "model.safetensors"
    assert said(capsys, "translate", run, "--export", file) == f"{file}\n"
    alone = (
        "import sys; sys.modules['tokenizers'] = None; from megatron_ext.translate import main; "
        f"sys.exit(main([{str(file)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", alone], input=text, capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == found


@pytest.mark.slow
def test_the_exported_file_needs_torch_numpy_and_nothing_else_of_ours(
    trained: dict[str, EngineRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.safetensors"
    said(capsys, "translate", trained["gnmt"].run.path, "--export", file)
    (tmp_path / "megatron_ext").symlink_to(ROOT / "megatron_ext")
    rooms = [
        "conf",
        "launch",
        "fasop",
        "reports",
        "data_prep",
        "hydra",
        "omegaconf",
        "submitit",
        "pandas",
        "plotly",
        "tokenizers",
        "rich",
        "pynvml",
    ]
    alone = (
        f"import sys; sys.path[0] = {str(tmp_path)!r}; sys.modules.update(dict.fromkeys({rooms!r})); "
        f"from megatron_ext.translate import main; sys.exit(main([{str(file)!r}, '--greedy']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", alone], input="hund mag katze\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluation_has_loss_metrics_perplexity_and_bleu_with_its_signature(
    trained: dict[str, EngineRun], family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained[family].run
    text = said(capsys, "evaluate", run.path)
    kept = json.loads((run.path / "evaluation-test.json").read_text())
    assert kept["samples"] == kept["bleu"]["sentences"] == 11
    assert kept["perplexity"] == pytest.approx(math.exp(kept["metrics"]["nll"]))
    assert re.search(rf"BLEU +{kept['bleu']['score']:.2f} \(11 sentences; nrefs:1\|case:mixed.*version:", text)
    assert f"loss        {kept['loss']:.4f}" in text
    from sacrebleu import corpus_bleu

    prefix = trained[family].plan.data_prefix
    source, target = (Path(f"{prefix}-test.{side}.txt") for side in ("source", "target"))
    translations = said(capsys, "translate", run.path, "--input", source).splitlines()
    assert kept["bleu"]["score"] == corpus_bleu(translations, [target.read_text().splitlines()]).score
    greedy = json.loads(said(capsys, "evaluate", run.path, "--split=valid", "--samples=5", "--greedy", "--json"))
    assert greedy["samples"] == greedy["bleu"]["sentences"] == 5
    assert greedy["bleu"]["scoring"]["beam"] == 1


OTHERS = {
    "gpt": [],
    "bert": ["model.family=bert", "data.short_seq_prob=0.2"],
    "t5": ["model.family=t5", "model.layers=2", "model.decoder_sequence_length=24"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_the_loss_of_any_family_is_that_of_all_samples_of_the_split_with_nothing_dropped(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = make_corpus(tmp_path)
    if family != "gpt":
        prefix = tmp_path / "sentences"
        write_sentences(prefix, 0, vocab_size=120, documents=30)
    vocabulary = ["model.vocab_size=120"] if family != "gpt" else []
    options = [*OTHERS[family], *vocabulary, "model.hidden_dropout=0.5", "data.split='70,30,0'", "train.iterations=2"]
    folder = tmp_path / "runs" / family / "20260101-000000-00000000"
    run = make_run(folder, prefix, "parallel.tensor=2", "parallel=single", *options)
    assert run.go() == 0, run.stderr()
    found = json.loads(said(capsys, "evaluate", folder, "--split", "valid", "--json"))
    task = task_of(run.plan)
    samples = task.samples("valid", found["samples"])
    assert found["samples"] == task.samples("valid", 1).in_epoch > 3
    from megatron_ext.checkpoints.meta import Checkpoint
    from megatron_ext.inference.held_out import whole_model

    stage = whole_model(task, Checkpoint.at(folder), torch.device("cpu"))
    total = 0.0
    for number in range(0, found["samples"], run.plan.micro_batch_size):
        numbers = np.arange(number, min(number + run.plan.micro_batch_size, found["samples"]))
        micro = task.micro({name: torch.from_numpy(one) for name, one in samples.batch(numbers).items()})
        total += len(numbers) * float(task.loss(stage(micro.inputs), micro, TensorGroup()))
    assert found["loss"] == pytest.approx(total / found["samples"])
    perplexity = math.exp(found["loss"]) if family != "bert" else None
    assert found["perplexity"] == (None if perplexity is None else pytest.approx(perplexity))
    assert found["bleu"] is None


def test_what_cannot_be_done_is_one_message(
    trained: dict[str, EngineRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained["gnmt"].run.path
    for command in ("translate", "evaluate"):
        message = said(capsys, command, run, "--checkpoint=best9", code=1)
        assert re.fullmatch(r"tdpp: error: --checkpoint best9: the run has iter_\d+\n", message)
    assert "--input" in said(capsys, "translate", run, "--input", tmp_path / "none", code=1)
    assert "iter_" in said(capsys, "evaluate", run, "--checkpoint=latest", "--samples=1000000", code=0)
    message = said(capsys, "translate", run, "--output", tmp_path / "none" / "file", "--input", "/dev/null", code=1)
    assert "cannot be written (No such file or directory)" in message
    empty = make_run(tmp_path / "runs" / "x" / "20260101-000000-00000000", make_corpus(tmp_path), "parallel=single")
    assert "no checkpoint found" in said(capsys, "evaluate", empty.run.path, code=1)
    assert empty.go() == 0, empty.stderr()
    assert "model.family=gpt, which does not translate" in said(capsys, "translate", empty.run.path, code=1)
    assert "model.family=gpt, which does not translate" in said(capsys, "translate", empty.run.path, "--bleu", code=1)
    for wrong in ("--beam=0", "--length-norm=x", "--coverage=-1"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["translate", str(run), wrong])
        assert ended.value.code == 2
    assert of_file.main([str(tmp_path / "none.safetensors")]) == 1


@pytest.mark.slow
def test_the_pages_commands_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = random.Random(1)
    pairs = [sentence(source) for _ in range(400)]
    Path("sentences.tsv").write_text("".join(f"{de}\t{en}\n" for de, en in pairs))
    Path("new.de").write_text("hund mag katze\nein haus ist rot\n")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if "gnmt-tiny" not in line]
    assert len(commands) == 6
    for command in commands:
        few = re.sub(r"train.iterations=\d+", "train.iterations=40", command)
        if few.startswith("tdpp "):
            assert cli.main(shlex.split(few)[1:]) == 0, capfd.readouterr().err
        else:
            capfd.readouterr()
            few = few.replace("python", shlex.quote(sys.executable), 1)
            subprocess.run(f"PYTHONPATH={shlex.quote(str(ROOT))} {few}", shell=True, check=True)
    assert capfd.readouterr().out == Path("new.en").read_text()
    assert len(Path("new.en").read_text().splitlines()) == 2


def test_a_module_of_the_users_own_is_measured_on_samples_of_which_nobody_knows_how_many_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = users_file(tmp_path / "code", "convnet")
    folder = tmp_path / "runs" / "mine" / "20260101-000000-00000000"
    options = ["model=module", f"model.code={file}:convnet", "parallel=single", "parallel.micro_batch_size=4"]
    base = ["train.iterations=2", "train.lr_warmup_iterations=1", "train.min_lr=1e-5", "parallel.global_batch_size=8"]
    run = make_run(folder, tmp_path / "none", *options, base=base)
    assert run.go() == 0, run.stderr()
    few = json.loads(said(capsys, "evaluate", folder, "--samples=10", "--json"))
    assert few["samples"] == 10
    assert math.isfinite(few["loss"])
    assert few["perplexity"] is None
    assert few["bleu"] is None
    assert json.loads(said(capsys, "evaluate", folder, "--json"))["samples"] == SAMPLES
