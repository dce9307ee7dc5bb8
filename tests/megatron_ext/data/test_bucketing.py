"""Samples of alike length beside each other: the same ones as without, in an order that nothing but their numbers
decides."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.blend import BlendedSamples
from megatron_ext.data.pairs import BatchAssignment, Bucketed, PairSamples, Side
from megatron_ext.data.samples import Split
from tests.support.megatron_ext.pairs import write_pairs

LONGEST, VOCAB, PAIRS, BATCH, BATCHES = 24, 61, 150, 6, 5
SIDES = (
    Side("sequence", ("text_enc", "enc_mask"), LONGEST),
    Side("decoder sequence", ("text_dec", "labels", "loss_mask"), LONGEST),
)
ASSIGNMENT = BatchAssignment(BATCHES, BATCH, 7)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PairSamples:
    prefix = write_pairs(tmp_path_factory.mktemp("pairs"), VOCAB, PAIRS, LONGEST - 1)
    return PairSamples(prefix, Split(600, 7), LONGEST, LONGEST, VOCAB)


def bucketed(plain: PairSamples, multiple: int = 1, samples: int = 600) -> Bucketed:
    return Bucketed(plain, samples, "train", SIDES, multiple, ASSIGNMENT)


def sources(samples: PairSamples | Bucketed, numbers: range) -> list[tuple[int, ...]]:
    return [tuple(samples.sample(number)["text_enc"]) for number in numbers]


def test_a_window_has_the_samples_that_it_would_have_had(plain: PairSamples) -> None:
    """Also where an epoch ends within it."""
    assert PAIRS % ASSIGNMENT.window == 0
    assert 140 % ASSIGNMENT.window != 0
    shorter = PairSamples(plain._pairs.source.idx.parent / "pairs", Split(600, 7), 20, 20, VOCAB)
    assert shorter.in_epoch is not None
    assert shorter.in_epoch % ASSIGNMENT.window != 0
    for samples in (plain, shorter):
        found = bucketed(samples)
        for first in range(0, 600, ASSIGNMENT.window):
            window = range(first, first + ASSIGNMENT.window)
            assert Counter(sources(found, window)) == Counter(sources(samples, window))
            assert sources(found, window) != sources(samples, window)


def test_a_global_batch_has_samples_of_alike_length_and_batches_come_in_any_order(plain: PairSamples) -> None:
    found = bucketed(plain)
    window = np.arange(ASSIGNMENT.window).reshape(BATCHES, BATCH)
    targets = [plain.lengths(found._dealt(batch))[:, 1] for batch in window]
    shortest, longest = (np.array([pick(one) for one in targets]) for pick in (np.min, np.max))
    order = np.argsort(shortest, kind="stable")
    assert (longest[order][:-1] <= shortest[order][1:]).all()
    assert any(
        (np.diff(plain.lengths(found._dealt(np.arange(first, first + ASSIGNMENT.window)))[::BATCH, 1]) < 0).any()
        for first in range(0, 600, ASSIGNMENT.window)
    )


def test_the_order_follows_from_the_numbers_alone(plain: PairSamples) -> None:
    every = sources(bucketed(plain), range(600))
    fresh = bucketed(plain)
    for number in (599, 3, 31, 333, 0, 61, 599):
        assert sources(fresh, range(number, number + 1)) == [every[number]]
    assert sources(bucketed(plain, samples=100), range(100)) == every[:100]
    other = Bucketed(plain, 600, "train", SIDES, 1, ASSIGNMENT._replace(seed=8))
    assert sources(other, range(600)) != every


@pytest.mark.parametrize("multiple", [1, 4, 100])
def test_a_micro_batch_is_as_long_as_its_longest(plain: PairSamples, multiple: int) -> None:
    found = bucketed(plain, multiple)
    for first in range(0, 60, 3):
        numbers = np.arange(first, first + 3)
        batch, sizes = found.batch(numbers), found.sizes(numbers)
        lengths = [batch[name].sum(1).max() for name in ("enc_mask", "loss_mask")]
        assert list(sizes.values()) == [min(LONGEST, -(-int(one) // multiple) * multiple) for one in lengths]
        for side in SIDES:
            for name in side.arrays:
                assert batch[name].shape == (3, sizes[side.size])
                whole = np.stack([found.sample(number)[name] for number in numbers])
                assert (whole[:, : sizes[side.size]] == batch[name]).all()
                assert not np.isin(whole[:, sizes[side.size] :], [1, 2, 3]).any()  # a mask's 1, or a mark
        assert (batch["number"] == numbers).all()


def test_little_is_padding(plain: PairSamples) -> None:
    found = bucketed(plain)
    micros = np.arange(600).reshape(-1, 3)
    tokens = sum(int(plain.lengths(found._dealt(micro)).sum()) for micro in micros)
    padded = sum(3 * sum(found.sizes(micro).values()) for micro in micros)
    assert tokens == int(plain.lengths(np.arange(600)).sum())
    assert tokens / padded > 0.85
    assert tokens / (600 * 2 * LONGEST) < 0.6


def test_held_out_samples_are_sorted_and_all_are_there(tmp_path: Path) -> None:
    prefix = write_pairs(tmp_path, VOCAB, 40, LONGEST - 1)
    plain = PairSamples(prefix, Split(8, 7, name="valid"), LONGEST, LONGEST, VOCAB)
    found = Bucketed(plain, 8, "valid", SIDES, 1)
    assert Counter(sources(found, range(8))) == Counter(sources(plain, range(8)))
    assert (np.diff([found.sizes(np.array([number]))["decoder sequence"] for number in range(8)]) >= 0).all()
    assert found.order == plain.order
    assert (found.batch(np.arange(3))["number"] == plain.batch(np.arange(3))["number"]).all()


def test_a_blend_is_sorted_as_one(tmp_path: Path) -> None:
    prefixes = []
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        prefixes.append(write_pairs(folder, VOCAB, 40, LONGEST - 1, seed))
    blend = BlendedSamples(
        prefixes, [1.0, 2.0], Split(60, 7), lambda prefix, split: PairSamples(prefix, split, LONGEST, LONGEST, VOCAB)
    )
    for number in range(60):
        sample = blend.sample(number)
        assert blend.lengths(np.array([number])).tolist() == [[sample["enc_mask"].sum(), sample["loss_mask"].sum()]]
    found = Bucketed(blend, 50, "train", SIDES, 1, ASSIGNMENT)
    assert Counter(sources(found, range(30))) == Counter(sources(blend, range(30)))
    assert found.order["bucketing"] == BATCHES
    assert found.order["global_batch_size"] == BATCH
