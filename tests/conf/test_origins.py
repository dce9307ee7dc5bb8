"""A rule that a value breaks names the file of the user's and the line where the value stands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conf import origins
from conf.compose import compose
from conf.errors import ConfigError
from conf.origins import origins_named, with_origins
from launch import cli

MODEL = "name: mine\nlayers: 4\nhidden: 65\nheads: 4\nsequence_length: 64\nvocab_size: 256\n"
GOOD = MODEL.replace("65", "64")
CLUSTER = """\
defaults:
  - /gpu@gpus.fast: a10
name: mixed
groups:
  left:
    gpu: fast
    count: 1
    gpus_per_node: 4
    intra_gbit_per_s: 100
    inter_gbit_per_s: 10
    intra_latency_us: 1
    inter_latency_us: 1
"""
EXPERIMENT = """\
# @package _global_
defaults:
  - override /model: mine
  - override /cluster: local
train:
  lr: 0.1
  iterations: 10
parallel:
  data: 2
  pipeline: 2
  partition: 1-2
"""
GPU = "name: A\nmemory_gib: -1\nfp32_tflops: 1\nfp16_tflops: 1\nbf16_tflops: 1\nmemory_gb_per_s: 1\n"

CASES = {
    "two-lines": (
        {"model/mine.yaml": MODEL},
        ["model=mine"],
        "model/mine.yaml, lines 3 and 4: model.hidden=65 is not divisible by model.heads=4;",
    ),
    "one-from-the-command-line": (
        {"model/mine.yaml": GOOD},
        ["model=mine", "model.heads=5"],
        "model/mine.yaml, line 3: model.hidden=64 is not divisible by model.heads=5;",
    ),
    "all-from-the-command-line": (
        {"model/mine.yaml": MODEL},
        ["model=mine", "train.lr=-1", "model.hidden=64"],
        "train.lr=-1.0 must be a number above 0",
    ),
    "nested-group": (
        {"cluster/mixed.yaml": CLUSTER.replace("gpu: fast", "gpu: slow")},
        ["cluster=mixed"],
        "cluster/mixed.yaml, line 6: cluster.groups.left.gpu=slow is not in cluster.gpus; that has fast",
    ),
    "not-set-in-a-group": (
        {"cluster/mixed.yaml": CLUSTER.replace("    intra_gbit_per_s: 100\n", "")},
        ["cluster=mixed"],
        "cluster/mixed.yaml, line 5: cluster.groups.left.intra_gbit_per_s is not set: give",
    ),
    "not-set-in-a-file": (
        {"model/mine.yaml": MODEL.replace("layers: 4\n", "")},
        ["model=mine"],
        "model/mine.yaml: model.layers is not set: give",
    ),
    "file-of-a-nested-package": (
        {"cluster/mixed.yaml": CLUSTER.replace("a10", "mine"), "gpu/mine.yaml": GPU},
        ["cluster=mixed"],
        "gpu/mine.yaml, line 2: cluster.gpus.fast.memory_gib=-1.0 must be a number above 0",
    ),
    "package-of-a-word": (
        {"gpu/mine.yaml": GPU},
        ["+gpu@cluster.gpus.fast=mine"],
        "gpu/mine.yaml, line 2: cluster.gpus.fast.memory_gib=-1.0 must be a number above 0",
    ),
    "experiment-and-the-file-that-it-chooses": (
        {"experiment/mine.yaml": EXPERIMENT, "model/mine.yaml": GOOD},
        ["experiment=mine"],
        "experiment/mine.yaml, line 11; {folder}/model/mine.yaml, line 2: parallel.partition=1-2 has",
    ),
    "experiment-over-a-file": (
        {"experiment/mine.yaml": EXPERIMENT + "model:\n  heads: 5\n", "model/mine.yaml": GOOD},
        ["experiment=mine"],
        "model/mine.yaml, line 3; {folder}/experiment/mine.yaml, line 13: model.hidden=64 is not divisible by",
    ),
    "shipped-file-over-the-users": (
        {
            "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /model: mine\n",
            "model/mine.yaml": MODEL,
        },
        ["experiment=mine", "model=tiny", "model.hidden=65"],
        "model.hidden=65 is not divisible by",
    ),
    "two-lengths": (
        {"train/mine.yaml": "defaults: [demo]\nepochs: 2\niterations: 5\n"},
        ["train=mine"],
        "train/mine.yaml, lines 2 and 3: train.iterations=5 and train.epochs=2 both set the length",
    ),
    "reference-to-nothing": (
        {"model/mine.yaml": GOOD.replace("64", "${modle.width}", 1)},
        ["model=mine"],
        "model/mine.yaml, line 3: model.hidden cannot be resolved: Interpolation key 'modle.width' not found",
    ),
    "entry-of-a-list": (
        {"data/mine.yaml": "prefix: a\nblend:\n  - {prefix: b, weight: 1}\n  - {prefix: c, weight: -1}\n"},
        ["data=mine"],
        "data/mine.yaml, line 4: data.blend[1].weight=-1.0 must be a number above 0",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_rule_names_the_lines_of_the_users_files(tmp_path: Path, case: str) -> None:
    files, words, expected = CASES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    words = [f"--config-dir={tmp_path}", *words]
    with pytest.raises(ConfigError) as caught, origins_named(words):
        compose(words)
    of_file = expected.startswith(tuple(files))
    expected = expected.replace("{folder}", str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}/{expected}" if of_file else expected)


def test_a_file_that_was_given_by_its_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "a b.yaml").write_text(MODEL)
    words = [f"model={tmp_path}/a b.yaml"]
    with pytest.raises(ConfigError) as caught, origins_named(words):
        compose(words)
    assert str(caught.value).startswith(f"{tmp_path}/a b.yaml, lines 3 and 4: model.hidden=65 is not")


def test_a_message_that_names_a_line_already_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MODEL)
    message = f"{tmp_path}/mine.yaml, line 3: model.hidden: must be a whole number"
    assert with_origins(ConfigError(message), [f"model={tmp_path}/mine.yaml"]) == message


def test_a_word_that_cannot_be_composed_is_not_the_fault_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(CLUSTER)
    words = [f"cluster={tmp_path}/mine.yaml", "cluster.groups.lft.count=2"]
    with (
        pytest.raises(ConfigError, match=r"^cluster\.groups\.lft does not exist: cluster\.groups has left"),
        origins_named(words),
    ):
        compose(words)


@pytest.mark.parametrize("words", [[], ["model=moon"], ["--config-dir"], ["experiment=[1"], ["pipedream=nowhere"]])
def test_words_that_choose_no_file_leave_a_message_as_it_is(words: list[str]) -> None:
    assert with_origins(ConfigError("model.hidden=65 is wrong"), words) == "model.hidden=65 is wrong"


def test_in_a_checkout_the_users_files_are_those_that_git_does_not_track(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "conf/model").mkdir(parents=True)
    for name in ("shipped", "mine"):
        (tmp_path / f"conf/model/{name}.yaml").write_text(MODEL)
    subprocess.run(["git", "-C", tmp_path, "add", "conf/model/shipped.yaml"], check=True)
    monkeypatch.setattr(origins, "SHIPPED", tmp_path / "conf")
    assert origins._untracked() == {tmp_path / "conf/model/mine.yaml"}


def test_each_command_and_each_combination_of_a_sweep_names_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own/model").mkdir(parents=True)
    Path("own/model/mine.yaml").write_text(MODEL)
    place = "own/model/mine.yaml, lines 3 and 4: model.hidden=65 is not divisible by"
    for command in ("launch", "search"):
        assert cli.main([command, "--config-dir", "own", "model=mine"]) == 1
        assert capsys.readouterr().err.startswith(f"tdpp: error: {place}")
    assert cli.main(["launch", "--config-dir=own", "-m", "model=mine", "train.seed=1,2"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"tdpp: error: all 2 combinations, such as train.seed=1: {place}")


def test_what_combinations_have_in_common_is_looked_up_once() -> None:
    words = ["model=mine", "experiment=demo", "--config-dir=own"]
    assert origins.what_counts([*words, "train.seed=1"]) == origins.what_counts([*words, "train.seed=2"])
    for other in (["model=other", *words[1:]], [*words[:2], "--config-dir=x"], [*words, "train.lr=1"], words[:1]):
        assert origins.what_counts([*other, "train.seed=1"]) != origins.what_counts([*words, "train.seed=1"])
