"""Samples for translation: marks, padding, which pairs there are, and in which order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.contract.errors import DataError
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.pairs import BEGIN, END, PAD, Pairs, PairSamples, side_prefix
from megatron_ext.data.samples import Split

U16 = np.dtype("<u2")


def write(prefix: Path, source: list[list[int]], target: list[list[int]], split: str = "train") -> Path:
    for side, sentences in (("source", source), ("target", target)):
        write_indexed(side_prefix(prefix, split, side), map(np.array, sentences), U16)
    return prefix


def numbered(count: int) -> list[list[int]]:
    return [[4 + number] for number in range(count)]


def sources(samples: PairSamples, numbers: range) -> list[int]:
    return samples.batch(np.array(numbers))["text_enc"][:, 0].tolist()


def test_a_sample_is_marked_and_padded(tmp_path: Path) -> None:
    prefix = write(tmp_path / "p", [[7, 8]], [[9, 10, 11]])
    sample = PairSamples(prefix, Split(1, 5), 4, 6, 20).sample(0)
    expected = {
        "text_enc": [7, 8, END, PAD],
        "enc_mask": [1, 1, 1, 0],
        "text_dec": [BEGIN, 9, 10, 11, PAD, PAD],
        "labels": [9, 10, 11, END, PAD, PAD],
        "loss_mask": [1, 1, 1, 1, 0, 0],
    }
    assert {name: content.tolist() for name, content in sample.items()} == expected


def test_every_epoch_has_every_pair_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    prefix = write(tmp_path / "p", numbered(30), numbered(30))
    samples = PairSamples(prefix, Split(100, 5), 4, 4, 50)
    first, second = sources(samples, range(30)), sources(samples, range(30, 60))
    assert sorted(first) == sorted(second) == [4 + number for number in range(30)]
    assert first != second
    assert first != sources(PairSamples(prefix, Split(100, 6), 4, 4, 50), range(30))


def test_the_order_follows_from_the_numbers_alone(tmp_path: Path) -> None:
    """Whatever was asked for before, as ranks ask for different samples."""
    prefix = write(tmp_path / "p", numbered(7), numbered(7))
    samples = PairSamples(prefix, Split(70, 5), 4, 4, 50)
    every = sources(samples, range(70))
    fresh = PairSamples(prefix, Split(70, 5), 4, 4, 50)
    for number in (69, 3, 33, 40, 0, 12, 69):
        assert sources(fresh, range(number, number + 1)) == [every[number]]


def test_pairs_that_are_too_long_or_empty_are_left_out_and_counted(tmp_path: Path) -> None:
    source = [[4], [5] * 3, [6] * 4, [7], [8], []]
    target = [[4], [5], [6], [7] * 3, [8] * 2, [9]]
    pairs = Pairs(write(tmp_path / "p", source, target), "train", 4, 3)
    assert pairs.kept.tolist() == [0, 1, 4]
    assert pairs.left_out == 3


def test_splits_are_files(tmp_path: Path) -> None:
    prefix = write(tmp_path / "p", [[4]], [[4]])
    write(prefix, [[5]], [[5]], "valid")
    assert PairSamples(prefix, Split(1, 0, name="valid"), 4, 4, 9).sample(0)["text_enc"][0] == 5


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ([[4], [5]], [[4]], "2 sentences, but p-train.target.idx has 1"),
        ([[4] * 9], [[4]], "none of 1 pairs fits model.sequence_length=4 and model.decoder_sequence_length=4"),
        ([], [], "none of 0 pairs"),
    ],
    ids=["unequal", "too-long", "empty"],
)
def test_data_that_cannot_be_used_say_why(
    tmp_path: Path, source: list[list[int]], target: list[list[int]], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        PairSamples(write(tmp_path / "p", source, target), Split(1, 0), 4, 4, 9)


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    samples = PairSamples(write(tmp_path / "p", [[9]], [[4]]), Split(1, 0), 4, 4, 9)
    with pytest.raises(DataError, match=r"sentence 0 has token id 9, but model\.vocab_size=9 allows 0 to 8"):
        samples.sample(0)
