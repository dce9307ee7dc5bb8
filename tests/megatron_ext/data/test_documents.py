"""Documents as samples: shared out over splits, packed without loss, the same for every layout and at every restart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.plan_parts import ANSWERS
from megatron_ext.data.documents import Documents, DocumentSamples, packed
from megatron_ext.data.indexed_dataset import data_file, write_indexed
from megatron_ext.data.samples import Split

LENGTH = 10
WEIGHTS = (80.0, 10.0, 10.0)


def write(prefix: Path, lengths: list[int], answered: int | None = None) -> Path:
    """Documents of so many tokens, whose tokens are their numbers; conversations whose last `answered` tokens are
    answers."""
    write_indexed(prefix, (np.full(n, at, np.uint16) for at, n in enumerate(lengths)), np.dtype(np.uint16))
    if answered is not None:
        masks = (bytes(max(0, n - answered)) + b"\1" * min(n, answered) for n in lengths)
        data_file(prefix, ANSWERS).write_bytes(b"".join(masks))
    return prefix


def samples(prefix: Path, packing: bool, split: str = "train", seed: int = 1) -> DocumentSamples:
    return DocumentSamples(prefix, Split(50, seed, WEIGHTS, split), LENGTH, 100, packing)


@given(st.lists(st.integers(1, 10), max_size=60), st.integers(0, 99))
def test_packing_loses_nothing_and_keeps_within_the_room(lengths: list[int], seed: int) -> None:
    order = np.random.RandomState(seed).permutation(len(lengths))
    found = packed(np.array(lengths, np.int64), order, 10)
    assert sorted(number for one in found for number in one) == list(range(len(lengths)))
    totals = [sum(lengths[number] for number in one) for one in found]
    assert all(total <= 10 for total in totals)
    assert sum(total <= 5 for total in totals) <= 1  # no two samples have room for each other


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_has_every_document_once_in_an_order_of_its_own(packing: bool, tmp_path: Path) -> None:
    lengths = [2 + number % 9 for number in range(40)]
    made = samples(write(tmp_path / "x", lengths, 1), packing)
    assert made.in_epoch is not None
    epochs = []
    for epoch in range(2):
        found = [made.sample(epoch * made.in_epoch + at) for at in range(made.in_epoch)]
        learned = [token for one in found for token in one["labels"][one["loss_mask"] == 1].tolist()]
        assert len(set(learned)) == len(learned) == 32  # an answer of one token in each
        epochs.append(learned)
        if packing:
            assert made.in_epoch < 32
            for one in found:
                begins = np.flatnonzero(one["positions"] == 0)
                assert all(len({*part.tolist()}) == 1 for part in np.split(one["tokens"], begins[1:]))
        else:
            assert all("positions" not in one for one in found)
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_the_held_out_conversations_are_the_same_for_every_seed_and_in_no_other_split(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [5] * 50, 2)
    found = {split: Documents(prefix, WEIGHTS, split, LENGTH).pieces.document.tolist() for split in ("train", "valid")}
    assert (len(found["train"]), len(found["valid"])) == (40, 5)
    assert not {*found["train"]} & {*found["valid"]}
    assert found["valid"] != list(range(40, 45))  # but drawn: data are often sorted by where they come from
    tokens = [{int(samples(prefix, False, "valid", seed).sample(n)["tokens"][0]) for n in range(5)} for seed in (1, 2)]
    assert tokens[0] == tokens[1] == {*found["valid"]}


def test_a_longer_conversation_is_cut_and_one_without_an_answer_left_is_left_out(tmp_path: Path) -> None:
    found = Documents(write(tmp_path / "x", [30, 8, 12, 11], 2), (1.0, 0.0, 0.0), "train", LENGTH)
    assert (found.documents, found.cut, found.left_out) == (4, 2, 1)
    assert found.pieces.document.tolist() == [1, 2, 3]
    made = found.sample([1], LENGTH)
    assert made["loss_mask"].tolist() == [0] * 9 + [1]


def test_a_longer_text_is_cut_into_pieces_of_which_every_token_is_predicted_once(tmp_path: Path) -> None:
    found = Documents(write(tmp_path / "x", [24, 3]), (1.0, 0.0, 0.0), "train", LENGTH)
    assert found.pieces.begin.tolist() == [0, 10, 20, 0]
    assert found.pieces.length.tolist() == [10, 10, 3, 2]


def test_a_mask_of_other_data_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [5, 5], 2)
    data_file(prefix, ANSWERS).write_bytes(bytes(9))
    with pytest.raises(DataError, match=re.escape("x.answers: expected 10 bytes, one for each token, found 9")):
        samples(prefix, False)


def test_a_split_without_a_conversation_says_what_to_change(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [5, 5], 2)
    with pytest.raises(DataError, match=r"the test split has 0 of 2 documents; give more data, or test a larger share"):
        samples(prefix, False, "test")
    long = write(tmp_path / "y", [30, 30], 2)
    with pytest.raises(DataError, match=r"of which 2 have no answer within model\.sequence_length"):
        Documents(long, (1.0, 0.0, 0.0), "train", LENGTH)
