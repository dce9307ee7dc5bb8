"""A training ends by iterations, epochs or samples: one of them, and what the command line says counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose, compose_unchecked, config_text, read_experiment
from conf.errors import ConfigError
from conf.origins import TRAINED, defaults_taken


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ([], (50, None, None)),
        (["train.iterations=7"], (7, None, None)),
        (["train.epochs=3"], (None, 3, None)),
        (["train.samples=1000"], (None, None, 1000)),
        (["train.samples=1000", "train.epochs=null"], (None, None, 1000)),
        (["train.epochs=null"], (50, None, None)),
        (["experiment=vit_digits", "train.epochs=3"], (None, 3, None)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_takes_the_place_of_what_files_say(words: list[str], length: tuple[int | None, ...]) -> None:
    for train in (compose(words).train, compose_unchecked(words).train):
        assert (train.iterations, train.epochs, train.samples) == length


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.epochs=3", "train.iterations=9"], r"train.iterations=9 and train.epochs=3 both set the length"),
        (["train.epochs=3", "train.samples=9"], r"train.epochs=3 and train.samples=9 both set the length"),
        (
            ["train.epochs=3", "train.samples=9", "train.iterations=2"],
            r"train.iterations=2 and train.epochs=3 and train.samples=9 all set the length of the training; give one",
        ),
        (["train.iterations=null"], r"no length: give train.iterations, train.epochs or train.samples"),
        (["train.epochs=0"], r"train.epochs=0 must be at least 1"),
        (["train.samples=-4"], r"train.samples=-4 must be at least 1"),
        (
            ["train.epochs=2", "executor.rehearse=virtual"],
            r"train.epochs=2 counts the samples of the data, but executor.rehearse=virtual reads none",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_two_lengths_or_none_are_one_message(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(words)


def test_a_file_that_gives_epochs_leaves_out_the_iterations_of_others(tmp_path: Path) -> None:
    own = tmp_path / "experiment" / "mine.yaml"
    own.parent.mkdir()
    words = [f"--config-dir={tmp_path}", "experiment=mine"]
    own.write_text("# @package _global_\ntrain:\n  epochs: 2\n")
    with pytest.raises(ConfigError, match=r"train.iterations=50 and train.epochs=2 .* add train.iterations=null"):
        compose(words)
    own.write_text("# @package _global_\ntrain:\n  epochs: 2\n  iterations: null\n")
    assert compose(words).train.epochs == 2
    assert compose([*words, "train.iterations=9"]).train.epochs is None


def test_a_runs_configuration_may_hold_what_follows(tmp_path: Path) -> None:
    experiment = compose(["train.epochs=3"])
    found = replace(experiment, train=replace(experiment.train, iterations=10, samples=99))
    (tmp_path / "config.yaml").write_text(config_text(found))
    assert read_experiment(tmp_path / "config.yaml") == found
    with pytest.raises(ConfigError, match=r"train.samples=100 must be a multiple of train.epochs=3"):
        replace(found, train=replace(found.train, samples=100))


def test_a_length_in_epochs_is_no_default_taken() -> None:
    words = ["data.prefix=own", "train.epochs=3"]
    note = defaults_taken(words, compose(words), TRAINED)
    assert note is not None
    assert "train.iterations" not in note
