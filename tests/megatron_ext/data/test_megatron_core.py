"""Where megatron-core is installed, our files and maps are held against its own; elsewhere golden files stand for it.

make .venv/dev,megatron.installed
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ext.data import blend
from megatron_ext.data.index_maps import compute, layout
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file, indexed_writer

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
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
