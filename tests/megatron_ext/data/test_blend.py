"""A blend takes from each corpus its share, as Megatron's own blended datasets do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.contract.errors import DataError
from megatron_ext.data import blend
from megatron_ext.data.blend import BlendedSamples, build_or_load, compute, map_files, normalized, samples_of
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.samples import BEGINNING, Position, Split
from tests.support.megatron_ext.engine_run import VOCAB as MODEL_VOCAB
from tests.support.megatron_ext.engine_run import make_corpus, make_run
from tests.support.megatron_ext.golden import PREFIX

WEIGHTS = [0.7, 0.2, 0.1]
SAMPLES, SEQUENCE, SEED, VOCAB = 60, 7, 3, 1000
ONE = ["parallel.data=1", "parallel.pipeline=1"]
MAKE = partial(GptSamples, sequence_length=SEQUENCE, vocab_size=VOCAB)
WITH = (Split(SAMPLES, SEED, (8, 1, 1)), MAKE)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three corpora whose tokens are 0 to 99, 100 to 199, 200 to 299."""
    folder, random = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    for number in range(3):
        texts = (random.integers(0, 100, length) + 100 * number for length in random.integers(1, 40, 20))
        write_indexed(folder / str(number), texts, np.dtype("<u2"))
    return [folder / str(number) for number in range(3)]


@given(weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=5), samples=st.integers(1, 300))
def test_each_corpus_gives_its_samples_in_order_and_never_more_than_are_laid_out(
    weights: list[float], samples: int
) -> None:
    shares = normalized(weights)
    maps = compute(shares, samples)
    for corpus, share in enumerate(shares):
        numbers = maps.sample_idx[maps.dataset_idx == corpus].tolist()
        assert numbers == list(range(len(numbers)))
        assert len(numbers) <= samples_of(share, samples)


@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=4), samples=st.integers(1, 200))
def test_at_every_sample_the_corpus_furthest_behind_is_taken(weights: list[int], samples: int) -> None:
    """In whole numbers, where no rounding can hide a wrong choice."""
    maps = compute(normalized(weights), samples)
    taken = [0] * len(weights)
    for sample, corpus in enumerate(maps.dataset_idx.tolist()):
        behind = [weight * max(sample, 1) - count * sum(weights) for weight, count in zip(weights, taken, strict=True)]
        assert behind[corpus] == max(behind)
        taken[corpus] += 1


def test_a_blend_is_megatrons() -> None:
    stem = str(PREFIX.with_name("blend_400ns_7-2-1_dataset"))
    maps = compute(normalized(WEIGHTS), 400)
    np.testing.assert_array_equal(maps.dataset_idx, np.load(f"{stem}_index.npy"))
    np.testing.assert_array_equal(maps.sample_idx, np.load(f"{stem}_sample_index.npy"))


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compute(WEIGHTS, 100)
    monkeypatch.setattr(blend, "BLOCK", 7)
    for found, expected in zip(compute(WEIGHTS, 100), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_samples_are_those_of_the_corpora(prefixes: Sequence[Path]) -> None:
    blended = BlendedSamples(prefixes, WEIGHTS, *WITH)
    shares = normalized(WEIGHTS)
    maps = compute(shares, SAMPLES)
    for sample, (corpus, number) in enumerate(zip(*(found.tolist() for found in maps), strict=True)):
        count = samples_of(shares[corpus], SAMPLES)
        own = MAKE(prefixes[corpus], WITH[0]._replace(samples=count))
        np.testing.assert_array_equal(blended.sample(sample)["tokens"], own.tokens(number))
    first = blended.batch(np.arange(SAMPLES))["tokens"][:, 0]
    assert np.bincount(first // 100).tolist() == [42, 12, 6]
    with pytest.raises(IndexError, match=f"sample {SAMPLES} of {SAMPLES}"):
        blended.batch(np.array([SAMPLES]))


def test_a_resumed_run_goes_on_at_the_exact_sample(prefixes: Sequence[Path]) -> None:
    whole = BlendedSamples(prefixes, WEIGHTS, *WITH)
    resumed = BlendedSamples(prefixes, WEIGHTS, WITH[0], MAKE)
    assert resumed.order == whole.order
    own = Position(iteration=3, samples=24).share(4, np.array([1, 3]), 8, 2)
    expected = whole.batch(BEGINNING.share(4, np.array([1, 3]), 8, 2))
    np.testing.assert_array_equal(resumed.batch(own)["tokens"], expected["tokens"])


def test_other_weights_are_another_order(prefixes: Sequence[Path]) -> None:
    assert BlendedSamples(prefixes, [1, 1, 1], *WITH).order != BlendedSamples(prefixes, WEIGHTS, *WITH).order


MISFITS = {
    "another length": (0, lambda a: a[:-1], "expected 60 numbers of int16"),
    "another corpus": (0, lambda a: a + 1, "expected corpora 0 to 2"),
    "other shares": (0, lambda a: a * 0, "expected about 42 samples of corpus 0"),
    "other samples": (1, lambda a: a + 1, "expected the samples of corpus 0 one after the other"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_maps_that_do_not_fit_name_the_file_to_delete(tmp_path: Path, misfit: str) -> None:
    which, change, message = MISFITS[misfit]
    build_or_load(tmp_path / "a", "train", WEIGHTS, SAMPLES)
    file = map_files(tmp_path / "a", "train", WEIGHTS, SAMPLES)[which]
    np.save(file, change(np.load(file)))
    with pytest.raises(DataError, match=rf"_idx\.npy: this map of a blend .*{message}.*; delete it"):
        build_or_load(tmp_path / "a", "train", WEIGHTS, SAMPLES)


def test_training_on_a_blend_is_the_same_for_every_layout(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    write_indexed(tmp_path / "b", [np.arange(40) % MODEL_VOCAB] * 40, np.dtype("<u2"))
    mixed = f"data.blend=[{{prefix:{tmp_path}/b,weight:2}}]"
    runs = {
        "one": make_run(tmp_path / "one", corpus, mixed, *ONE),
        "two": make_run(tmp_path / "two", corpus, mixed, "parallel.data=2", "parallel.pipeline=1"),
    }
    for run in runs.values():
        assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(runs["one"].losses(), runs["two"].losses(), rtol=1e-5)
    assert len(list(tmp_path.glob("text_document_train_blendmap_32ns_*_idx.npy"))) == 2
