"""Where megatron-core is installed, our files and maps are held against its own; elsewhere golden files stand for it.

make test-megatron
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.plan_parts import Masking
from megatron_ext.data import blend
from megatron_ext.data.index_maps import compute, layout
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file, indexed_writer
from megatron_ext.data.masked import sentence_maps
from megatron_ext.data.masked.bert_samples import BertSamples
from megatron_ext.data.masked.sentence_maps import _usable
from megatron_ext.data.masked.t5_samples import T5Samples
from megatron_ext.data.masked.vocabulary import Vocabulary
from megatron_ext.data.samples import Samples, Split
from tests.support.megatron_ext.sentences import write_sentences

pytest.importorskip("megatron", reason="megatron-core is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    samples=st.integers(1, 90),
    sequence_length=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_three_maps_are_those_of_its_own_functions(
    lengths: list[int], samples: int, sequence_length: int, seed: int
) -> None:
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index
    from megatron.core.datasets.helpers import build_sample_idx

    tokens = sum(lengths)
    assume(tokens > sequence_length)
    sizes, documents = np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)
    plan = layout(tokens, samples, sequence_length)
    random = np.random.RandomState(seed)
    order = _build_document_index(documents, plan.epochs, random, plan.separate_last_epoch)
    starts = build_sample_idx(sizes, order, sequence_length, plan.epochs, tokens, True, True)
    shuffle = _build_shuffle_index(plan.shuffled_together, starts.shape[0] - 1, random)
    maps = compute(sizes, range(len(lengths)), samples, sequence_length, seed)
    for ours, theirs in zip(maps, (order, starts, shuffle), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=100)
@given(weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=6), samples=st.integers(1, 500))
def test_a_blend_is_its_own_to_the_last_rounding(weights: list[float], samples: int) -> None:
    from megatron.core.datasets.helpers import build_blending_indices
    from megatron.core.datasets.utils import normalize

    shares = normalize(weights)
    assert blend.normalized(weights) == shares
    chosen, numbers = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
    build_blending_indices(chosen, numbers, shares, len(shares), samples, False)
    maps = blend.compute(shares, samples)
    np.testing.assert_array_equal(maps.dataset_idx, chosen)
    np.testing.assert_array_equal(maps.sample_idx, numbers)


def test_its_builder_writes_the_same_bytes_and_its_reader_reads_ours(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(0)
    texts = [random.integers(0, 60000, size) for size in random.integers(0, 90, 60)]
    boundaries = np.array([0, *range(2, 61, 2)])
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for first in range(0, 60, 2):
        pair = texts[first : first + 2]
        builder.add_document(torch.from_numpy(np.concatenate(pair)), [len(text) for text in pair])
    builder.finalize(str(tmp_path / "theirs.idx"))
    with indexed_writer(tmp_path / "ours", np.dtype("<u2"), boundaries) as writer:
        for text in texts:
            writer.add(text)
    for suffix in (".bin", ".idx"):
        ours, theirs = (data_file(tmp_path / name, suffix).read_bytes() for name in ("ours", "theirs"))
        assert ours == theirs
    read, own = Theirs(str(tmp_path / "ours")), IndexedDataset(tmp_path / "theirs")
    assert all(np.array_equal(read[i], texts[i]) and np.array_equal(own[i], texts[i]) for i in range(60))


@settings(max_examples=300, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    longest=st.sampled_from((3, 40, 700)),
    samples=st.integers(1, 300),
    length=st.integers(2, 120),
    short_seq_prob=st.one_of(st.just(0.1), st.floats(0, 1)),
    seed=st.integers(1, 2**31 - 2),
    least=st.sampled_from((1, 2)),
)
def test_the_sentence_map_is_that_of_its_compiled_helper(
    counts: list[int], longest: int, samples: int, length: int, short_seq_prob: float, seed: int, least: int
) -> None:
    from megatron.core.datasets.helpers import build_mapping

    assume(short_seq_prob == 0 or short_seq_prob > 1e-8)
    boundaries = np.cumsum([0, *counts])
    lengths = np.random.default_rng(seed).integers(0, longest, boundaries[-1]).astype(np.int32)
    assume(len(_usable(lengths, boundaries, least)[0]))
    many = np.iinfo(np.int32).max - 1
    theirs = build_mapping(boundaries, lengths, many, samples, length, short_seq_prob, seed, False, least)
    ours = sentence_maps.compute(lengths, boundaries, sentence_maps.Cut(samples, length, short_seq_prob, seed, least))
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


class Words:
    """A tokenizer as megatron-core wants one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        goes_on = set(vocabulary.continues)
        self.inv_vocab = {token: "##a" if token in goes_on else "a" for token in range(vocabulary.size)}
        self.cls, self.sep, self.mask, self.pad = vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.pad
        self.bos, self.eos, self.eod = vocabulary.bos, vocabulary.eos, vocabulary.eos
        self.additional_special_tokens_ids = vocabulary.sentinels
        self.unique_identifiers = {"size": vocabulary.size}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["bert", "t5"])
@pytest.mark.parametrize("trial", range(25))
def test_masked_samples_are_its_own(tmp_path: Path, family: str, trial: int) -> None:
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
    from megatron.core.datasets.utils import Split as TheirSplit

    random = np.random.default_rng(trial)
    prefix, seed, length = tmp_path / "text", int(random.integers(1, 2**31 - 500)), int(random.integers(8, 90))
    vocabulary = write_sentences(prefix, trial, longest=int(random.choice([4, 20, 60])))
    how = Masking(
        float(random.choice([0.15, 0.05, 0.5, 0.9])),
        float(random.choice([0.1, 0, 0.5])),
        int(random.integers(1, 12)),
        *(bool(random.integers(2)) for _ in range(3)),
    )
    common: dict[str, Any] = {
        "random_seed": seed,
        "sequence_length": length,
        "split": "3,1,0",
        "path_to_cache": str(tmp_path / "theirs"),
        "tokenizer": Words(vocabulary),
        "masking_probability": how.mask_prob,
        "short_sequence_probability": how.short_seq_prob,
        "masking_max_ngram": how.max_ngram,
        "masking_do_full_word": how.full_word,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": how.longer_ngrams,
        "masking_use_geometric_distribution": how.geometric,
    }
    split, pairs = Split(60, seed, (3, 1, 0)), bool(random.integers(2))
    given = (Theirs(str(prefix)), str(prefix), np.arange(9, dtype=np.int32), split.samples, TheirSplit.train)
    ours: Samples
    if family == "bert":
        config = BERTMaskedWordPieceDatasetConfig(**common, classification_head=pairs)
        theirs = BERTMaskedWordPieceDataset(*given, config)
        ours = BertSamples(prefix, split, length, vocabulary.size, how, pairs)
    else:
        config = T5MaskedWordPieceDatasetConfig(**common, sequence_length_decoder=2 * length)
        theirs = T5MaskedWordPieceDataset(*given, config)
        ours = T5Samples(prefix, split, length, 2 * length, vocabulary.size, how)
    for number in range(split.samples):
        try:
            wanted = theirs[number]
        except (IndexError, AssertionError):  # more spans than sentinels, or a decoder that is too short
            with pytest.raises(DataError):
                ours.sample(number)
            continue
        found = ours.sample(number)
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], f"{name} of sample {number}")
