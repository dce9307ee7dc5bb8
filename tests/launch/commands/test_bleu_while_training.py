"""BLEU while a model trains is that of `tdpp evaluate`, under every layout, and may be the goal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import TdppError
from launch import cli
from launch.commands.launching.preflight import preflight
from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.meta import Checkpoint
from tests.launch.commands.test_translate import FAMILIES, TRAINED, said, write_text
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run

EVALUATED = ("train.eval_interval=20", "train.best=bleu", "train.keep_checkpoints=9", "train.save_interval=20")
LAYOUTS = {
    "single": ["parallel=single", "parallel.micro_batch_size=4"],
    "stages and replicas": ["parallel.micro_batch_size=2", "parallel.partition=1-3"],
    "replicas with a sharded optimizer": ["parallel=single", "parallel.data=2", "parallel.sharded_optimizer=true",
                                          "cluster.groups.local.gpus_per_node=2", "parallel.micro_batch_size=2"],
    "a tensor group": ["parallel=single", "parallel.tensor=2", "cluster.groups.local.gpus_per_node=2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return write_text(tmp_path_factory.mktemp("text"))


def trained(folder: Path, text: tuple[Path, int], family: str, *overrides: str) -> EngineRun:
    prefix, vocabulary = text
    given = {
        word.partition("=")[0]: word
        for word in (*TRAINED, *FAMILIES[family], *EVALUATED, f"model.vocab_size={vocabulary}", *overrides)
    }
    run = make_run(folder / "20260101-000000-00000000", prefix, *given.values())
    assert run.go() == 0, run.stderr()
    return run


def bleus(run: EngineRun) -> list[float]:
    return [line["valid_bleu"] for line in run.metrics() if "valid_loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    cases.drawn(
        [*(("transformer", layout) for layout in LAYOUTS), ("gnmt", "stages and replicas"), ("gnmt", "single")],
        0,
        always=[
            ("transformer", "replicas with a sharded optimizer"),
            ("transformer", "a tensor group"),
            ("gnmt", "stages and replicas"),
        ],
    ),
)
def test_it_is_what_evaluate_says_of_the_checkpoint(
    tmp_path: Path, text: tuple[Path, int], family: str, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 20 if family == "transformer" else 60
    length = (f"train.iterations={2 * steps}", f"train.eval_interval={steps}", f"train.save_interval={steps}")
    run = trained(tmp_path, text, family, "train.ema=0.8", *length, *LAYOUTS[layout])
    found = bleus(run)
    assert len(found) == 2
    assert max(found) > 5
    for number, weights in ((0, "ema"), (1, "ema"), (1, "trained")):
        arguments = ("--split", "valid", "--greedy", "--checkpoint", f"iter_{steps * (number + 1):07d}", "--json")
        chosen = ("--weights", weights) if weights == "trained" else ()
        content = json.loads(said(capsys, "evaluate", run.run.path, *arguments, *chosen))
        assert content["weights"] == weights
        score = content["bleu"]["score"]
        assert score == pytest.approx(found[number], rel=1e-9) or weights == "trained"
    best = Checkpoint.at(run.run.best_checkpoint).meta
    assert best.evaluation is not None
    assert best.evaluation["bleu"] == max(found)


def test_a_run_ends_where_it_reaches_its_bleu(tmp_path: Path, text: tuple[Path, int]) -> None:
    run = trained(
        tmp_path, text, "transformer", "train.until='bleu>=1.5'", "train.eval_interval=5", "train.eval_iterations=1"
    )
    goal = json.loads(run.run.goal.read_text())
    assert goal["ended_by"] == "until"
    assert goal["value"] >= 1.5
    assert run.metrics()[-1]["iteration"] == goal["iteration"] < 40


@pytest.mark.slow
def test_training_does_not_notice_it(tmp_path: Path, text: tuple[Path, int]) -> None:
    with_it = trained(tmp_path / "with", text, "transformer", "model.hidden_dropout=0.1")
    without = trained(tmp_path / "without", text, "transformer", "model.hidden_dropout=0.1", "train.best=loss")
    assert with_it.losses().tolist() == without.losses().tolist()
    assert all(one.equal(without.weights()[name]) for name, one in with_it.weights().items())


def test_text_that_is_not_there_is_one_message_before_the_start(tmp_path: Path) -> None:
    prefix, vocabulary = write_text(tmp_path)
    words = [*FAMILIES["transformer"], *TRAINED, *EVALUATED, f"data.prefix={prefix}", f"model.vocab_size={vocabulary}"]
    experiment = compose([*words, "train.lr_warmup_iterations=1"])
    preflight(experiment)
    lines = Path(f"{prefix}-valid.target.txt").read_text()
    for file, content, message in (
        ("-valid.target.txt", lines + "one more\n", "has 9 lines, and .target.txt has 10"),
        ("-valid.target.txt", None, "BLEU compares text, which cannot be read"),
        (".tokenizer.json", None, "BLEU compares text, which cannot be read"),
    ):
        path = Path(f"{prefix}{file}")
        kept = path.read_text()
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(TdppError, match=message):
            preflight(experiment)
        path.write_text(kept)


def test_a_metric_that_a_translation_does_not_have_is_one_message() -> None:
    words = ["model=transformer-tiny", "parallel=single", "train.eval_interval=20", "train.until='top-1>=0.5'"]
    with pytest.raises(TdppError, match="measures loss and nll and accuracy and perplexity and bleu; use one of these"):
        compose(words)


@pytest.mark.slow
def test_weights_are_those_asked_for(
    tmp_path: Path, text: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The average is the default where the run kept one; the output says so."""
    run = trained(tmp_path, text, "transformer", "train.ema=0.9", "train.best=loss", "train.iterations=20")
    files = {weights: tmp_path / f"{weights or 'default'}.safetensors" for weights in ("", "ema", "trained")}
    for weights, file in files.items():
        arguments = [
            "translate",
            str(run.run.path),
            "--export",
            str(file),
            *(["--weights", weights] if weights else []),
        ]
        assert cli.main(arguments) == 0
        assert ("average of the weights" in capsys.readouterr().err) == (not weights)
    found = {weights: safetensors.read(file) for weights, file in files.items()}
    state = run.state()
    for name, tensor in found["trained"].items():
        part, parameter = next(
            (key.split("/", 1)[1], key) for key in state if key.startswith("weights/") and tensor.equal(state[key])
        )
        assert found["ema"][name].equal(state[f"ema/{part}"]), parameter
        assert found[""][name].equal(found["ema"][name])
    assert "average of its weights" in said(capsys, "evaluate", run.run.path, "--greedy")
    plain = trained(tmp_path / "plain", text, "transformer", "train.best=loss", "train.iterations=20")
    assert "average" not in said(capsys, "evaluate", plain.run.path, "--greedy")
    assert "has no average of its weights" in said(capsys, "evaluate", plain.run.path, "--weights", "ema", code=1)
