"""The lab on distributed training as one command, at a small size: data are made, and two hosts train, evaluate and
count what they cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conf.run_folder.rundir import RunDir
from launch.commands.data import main as data_command
from launch.commands.launch import main as launch_command
from launch.judge.state import State
from launch.judge.verdict import judge
from tests.support.hosts.fleet import Fleet

WORDS = ("the", "a", "house", "tree", "runs", "sees", "small", "large", "red", "green", "and", "or", "dog", "cat")


def write_sentences(path: Path, count: int) -> None:
    """Each with the same words backwards as its translation."""
    random = np.random.default_rng(0)
    sentences = [random.choice(WORDS, random.integers(3, 9)) for _ in range(count)]
    path.write_text("".join(f"{' '.join(words)}\t{' '.join(words[::-1])}\n" for words in sentences))


def test_the_lab_trains_on_two_hosts(fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, prefix, runs = tmp_path / "sentences.tsv", tmp_path / "data" / "wmt", tmp_path / "runs"
    write_sentences(source, 400)
    languages = ["--source-lang", "en", "--target-lang", "de"]
    assert data_command(["pairs", "--source", str(source), *languages, "--output", str(prefix)]) == 0
    vocabulary = "".join(capsys.readouterr()).partition("model.vocab_size=")[2].split()[0]
    tiny = ["model=transformer-tiny", f"model.vocab_size={vocabulary}", "+gpu@cluster.gpus.cpu=cpu"]
    tiny += ["cluster.groups.v100.gpu=cpu", "container=none", "executor.hosts=[a:2,b:2]", f"data.prefix={prefix}"]
    tiny += ["parallel.micro_batch_size=2", "parallel.global_batch_size=16", "train.precision=fp32"]
    tiny += ["train.iterations=6", "train.lr_warmup_iterations=2", "train.eval_interval=3", "train.log_interval=1"]
    assert launch_command(["experiment=nmt_lab", *tiny, f"runs_dir={runs}"]) == 0
    run = RunDir.find(runs, None)
    assert judge(run).state is State.succeeded, judge(run)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    evaluated = [line for line in lines if "valid_loss" in line]
    assert [line["iteration"] for line in evaluated] == [3, 6]
    assert all(np.isfinite(line["valid_nll"]) for line in evaluated)
    assert (run.checkpoints / "best").exists()
    spent = list(tiny)
    spent += ["train.iterations=100000", "train.max_cost=0.003"]  # 13 dollars an hour: less than a second
    assert launch_command(["experiment=nmt_lab", *spent, f"runs_dir={runs}"]) == 8
    verdict = judge(RunDir.find(runs, None))
    assert (verdict.state, verdict.rule) == (State.interrupted, "max-cost"), verdict
