"""Training samples are Megatron's, and the same for every parallel layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.schedule.iteration import dealt_to
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.index_maps import compute
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.samples import BEGINNING, SPLITS, Split

VOCAB = 1000
LENGTHS = [5, 0, 1, 40, 3, 2, 17, 1, 1, 8]
SAMPLES, SEQUENCE, SEED = 96, 7, 3


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents shorter and longer than a sample, each token with an id of its own."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    ends = np.cumsum(LENGTHS)
    write_indexed(prefix, (np.arange(end - n, end) for n, end in zip(LENGTHS, ends, strict=True)), np.dtype("<u2"))
    return prefix


@pytest.fixture(scope="module")
def samples(prefix: Path) -> GptSamples:
    return GptSamples(prefix, Split(SAMPLES, SEED, (8, 1, 1)), SEQUENCE, VOCAB)


def test_a_sample_is_cut_from_the_shuffled_documents_laid_end_to_end(samples: GptSamples) -> None:
    maps = compute(np.array(LENGTHS, np.int32), range(8), SAMPLES, SEQUENCE, SEED)
    ends = np.cumsum(LENGTHS)
    text = np.concatenate([np.arange(ends[document] - LENGTHS[document], ends[document]) for document in maps.doc_idx])
    assert len(samples) == SAMPLES
    for sample in range(SAMPLES):
        start = int(maps.shuffle_idx[sample]) * SEQUENCE
        found = samples.tokens(sample)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, text[start : start + SEQUENCE + 1])


@given(
    data=st.sampled_from([1, 2, 3, 4]),
    micro=st.sampled_from([1, 2, 4]),
    turns=st.integers(1, 2),
    step=st.integers(1, 3),
)
def test_every_layout_trains_on_the_same_global_batch(
    samples: GptSamples, data: int, micro: int, turns: int, step: int
) -> None:
    size = data * micro * turns
    taken = [np.array(dealt_to(dp, (turns,) * data)) for dp in range(data)]
    shares = [samples.batch(BEGINNING.share(step, own, size, micro)) for own in taken]
    assert {share["tokens"].shape for share in shares} == {(turns, micro, SEQUENCE + 1)}
    together = np.stack([share["tokens"] for share in shares], axis=1).reshape(size, SEQUENCE + 1)
    np.testing.assert_array_equal(together, [samples.tokens((step - 1) * size + i) for i in range(size)])
    numbers = np.stack([share["number"] for share in shares], axis=1)
    assert numbers.dtype == np.int64
    assert numbers.ravel().tolist() == list(range((step - 1) * size, step * size))


def test_no_two_samples_of_a_run_have_the_same_number(prefix: Path) -> None:
    splits = [GptSamples(prefix, Split(30, SEED, (5, 3, 2), name), 5, VOCAB) for name in SPLITS]
    numbers = [split.batch(np.arange(30))["number"] for split in splits]
    assert len(np.unique(numbers)) == 90


def test_a_replica_takes_megatrons_slices(samples: GptSamples) -> None:
    own = BEGINNING.share(iteration=3, numbers=np.array([1, 3]), global_batch_size=12, micro_batch_size=3)
    batch = samples.batch(own)["tokens"]
    taken = [[24 + 3, 24 + 4, 24 + 5], [24 + 9, 24 + 10, 24 + 11]]
    np.testing.assert_array_equal(batch, [[samples.tokens(i) for i in micro_batch] for micro_batch in taken])


def test_splits_have_no_token_in_common(prefix: Path) -> None:
    train, valid, test = (GptSamples(prefix, Split(30, SEED, (5, 3, 2), name), 5, VOCAB) for name in SPLITS)
    bounds = np.cumsum([0, sum(LENGTHS[:5]), sum(LENGTHS[5:8]), sum(LENGTHS[8:])])
    for part, low, high in zip((train, valid, test), bounds, bounds[1:], strict=False):
        ids = {int(token) for i in range(30) for token in part.tokens(i)}
        assert low <= min(ids) and max(ids) < high


@pytest.mark.parametrize("sample", [-1, SAMPLES], ids=str)
def test_only_samples_that_were_asked_for_exist(samples: GptSamples, sample: int) -> None:
    with pytest.raises(IndexError, match=f"sample {sample} of {SAMPLES}"):
        samples.batch(np.array([0, sample]))


@pytest.mark.parametrize("wrong", [300, -2], ids=["too large", "negative"])
def test_a_token_outside_the_vocabulary_names_itself_and_the_file(tmp_path: Path, wrong: int) -> None:
    write_indexed(tmp_path / "text", [np.array([1, 2, wrong, 3, 299])], np.dtype("<i4"))
    samples = GptSamples(tmp_path / "text", Split(1, SEED), 4, 300)
    message = rf"text\.bin: sample 0 has token id {wrong}, but model\.vocab_size=300 allows 0 to 299; .*tokenizer"
    with pytest.raises(DataError, match=message):
        samples.tokens(0)


@pytest.mark.parametrize(
    ("split", "sequence", "message"),
    [
        ([1, 1, 1], 100, r"the train split has 46 tokens in 4 of 10 documents, but one sample takes 101"),
        ([0.01, 1, 1], 7, r"the train split has 0 tokens in 0 of 10 documents, but one sample takes 8 .*data\.split"),
    ],
    ids=["too few tokens", "an empty split"],
)
def test_a_training_split_without_a_sample_is_refused(
    prefix: Path, split: list[float], sequence: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        GptSamples(prefix, Split(1, SEED, tuple(split)), sequence, VOCAB)
