"""The index maps are Megatron's, bit for bit; files that do not fit the data are never used."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext import index_maps
from megatron_ext.errors import DataError
from megatron_ext.index_maps import IndexMaps, build_or_load, compute, layout, map_files, split_documents
from megatron_ext.indexed_dataset import IndexedDataset, data_file, write_indexed
from tests.full_disk import largest_file
from tests.megatron_ext.golden import DOCUMENTS, PREFIX, SEED, SEQUENCE_LENGTH

GOLDEN = [
    pytest.param(20, 1, False, id="one epoch"),
    pytest.param(130, 3, True, id="last epoch shuffled apart"),
    pytest.param(105, 2, False, id="two epochs shuffled together"),
]


@pytest.mark.parametrize(("samples", "epochs", "apart"), GOLDEN)
def test_the_maps_are_megatrons_to_the_byte(tmp_path: Path, samples: int, epochs: int, apart: bool) -> None:
    data = IndexedDataset(PREFIX)
    prefix = tmp_path / PREFIX.name
    build_or_load(prefix, data, DOCUMENTS, "train", samples, SEQUENCE_LENGTH, SEED)
    for ours, theirs in zip(
        map_files(prefix, "train", samples, SEQUENCE_LENGTH, SEED),
        map_files(PREFIX, "train", samples, SEQUENCE_LENGTH, SEED),
        strict=True,
    ):
        assert ours.read_bytes() == theirs.read_bytes()
    plan = layout(int(data.lengths[2:25].sum()), samples, SEQUENCE_LENGTH)
    assert (plan.epochs, plan.separate_last_epoch) == (epochs, apart)


def test_the_files_have_megatrons_names() -> None:
    names = [file.name for file in map_files("data/my-gpt2_text_document", "train", 1600, 1024, 1234)]
    stem = "my-gpt2_text_document_train_indexmap_1600ns_1024sl_1234s_"
    assert names == [f"{stem}doc_idx.npy", f"{stem}sample_idx.npy", f"{stem}shuffle_idx.npy"]


def plain_maps(
    lengths: list[int], documents: range, samples: int, sequence_length: int, seed: int
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """The maps by walking through the documents token by token, epoch after epoch."""
    in_epoch = sum(lengths[document] for document in documents)
    epochs = 1
    while (epochs * in_epoch - 1) // sequence_length < samples:
        epochs += 1
    before_last = ((epochs - 1) * in_epoch - 1) // sequence_length
    apart = epochs > 1 and samples - before_last < int(0.8 * ((in_epoch - 1) // sequence_length))
    random = np.random.RandomState(seed)

    def shuffled(items: list[int]) -> list[int]:
        order = np.array(items, np.int32)
        random.shuffle(order)
        return order.tolist()

    if apart:
        order = shuffled(list(documents) * (epochs - 1)) + shuffled(list(documents))
    else:
        order = shuffled(list(documents) * epochs)
    starts = [(0, 0)]
    token = 0
    for place, document in enumerate(order):
        for offset in range(lengths[document]):
            if token % sequence_length == 0 and token:
                starts.append((place, offset))
            token += 1
    count = len(starts) - 1
    if apart:
        return order, starts, shuffled(list(range(before_last))) + shuffled(list(range(before_last, count)))
    return order, starts, shuffled(list(range(count)))


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    first=st.integers(0, 3),
    left=st.integers(0, 3),
    samples=st.integers(1, 60),
    sequence_length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    block=st.integers(1, 40),
)
def test_the_maps_are_those_of_a_walk_through_every_token(
    lengths: list[int], first: int, left: int, samples: int, sequence_length: int, seed: int, block: int
) -> None:
    documents = range(first, len(lengths) - left)
    assume(sum(lengths[document] for document in documents) > sequence_length)
    with patch.object(index_maps, "BLOCK", block):
        maps = compute(np.array(lengths, np.int32), documents, samples, sequence_length, seed)
    order, starts, shuffle = plain_maps(lengths, documents, samples, sequence_length, seed)
    assert maps.doc_idx.tolist() == order
    assert maps.sample_idx.tolist() == [list(start) for start in starts]
    assert maps.shuffle_idx.tolist() == shuffle
    assert len(shuffle) >= samples
    assert [found.dtype.name for found in maps] == ["int32", "int32", "uint32"]


def plain_split(weights: list[float], documents: int) -> list[range]:
    """Bounds by adding rounded shares up, then moved so that the last is the end."""
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / sum(weights) * float(documents)))
    excess = bounds[-1] - documents
    moved = [0] + [bound - excess for bound in bounds[1:]]
    return [range(moved[i], moved[i + 1]) for i in range(len(weights))]


@given(
    weights=st.tuples(st.floats(0.01, 1000), st.floats(0, 1000), st.floats(0, 1000)),
    documents=st.integers(0, 10_000_000),
)
def test_splits_cover_all_documents_and_are_megatrons(weights: tuple[float, ...], documents: int) -> None:
    splits = split_documents(weights, documents)
    assert splits == plain_split(list(weights), documents)
    assert splits[0].start == 0 and splits[-1].stop == documents
    assert all(before.stop == after.start for before, after in pairwise(splits))


@pytest.mark.parametrize(
    ("weights", "documents", "bounds"),
    [
        ((969, 30, 1), 1719, [0, 1665, 1717, 1719]),
        ((1, 1, 1), 2, [0, 0, 1, 2]),
        ((1, 0, 0), 5, [0, 5, 5, 5]),
    ],
    ids=["usual weights", "rounded up twice", "all for training"],
)
def test_documents_are_split_by_weight(weights: tuple[float, ...], documents: int, bounds: list[int]) -> None:
    splits = split_documents(weights, documents)
    assert [splits[0].start, *(split.stop for split in splits)] == bounds


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    """Six documents of 10 to 15 tokens."""
    write_indexed(tmp_path / "text", (np.arange(10 + i) for i in range(6)), np.dtype("<u2"))
    return IndexedDataset(tmp_path / "text")


def load(data: IndexedDataset, documents: range = range(1, 6)) -> IndexMaps:
    return build_or_load(data.bin.with_suffix(""), data, documents, "train", 30, 4, 1)


def files(data: IndexedDataset) -> list[Path]:
    return map_files(data.bin.with_suffix(""), "train", 30, 4, 1)


def test_the_maps_are_built_once_and_mapped(data: IndexedDataset) -> None:
    built = load(data)
    before = [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files(data)]
    again = load(data)
    assert [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files(data)] == before
    for first, second in zip(built, again, strict=True):
        assert isinstance(second, np.memmap)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("missing", range(3), ids=IndexMaps._fields)
def test_a_missing_file_is_built_anew(data: IndexedDataset, missing: int) -> None:
    expected = [found.tolist() for found in load(data)]
    files(data)[missing].unlink()
    assert [found.tolist() for found in load(data)] == expected


def build(prefix: Path, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    load(IndexedDataset(prefix))


def test_processes_that_build_at_the_same_time_get_the_same_maps(data: IndexedDataset) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    builders = [context.Process(target=build, args=(data.bin.with_suffix(""), barrier)) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0] * 4
    expected = compute(data.lengths, range(1, 6), 30, 4, 1)
    for found, wanted in zip(load(data), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert len(list(data.bin.parent.iterdir())) == 5


def swapped(array: NDArray[np.int32]) -> NDArray[np.int32]:
    """The same documents in another order: lengths differ, so the samples begin elsewhere."""
    return array[::-1].copy()


def repeated(array: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([array[:1], array[:-1]])


MISFITS = {
    "not an array": (0, None, r"doc_idx\.npy: this index map cannot be read"),
    "another length": (0, lambda a: a[:-1], r"doc_idx\.npy: .*: expected int32 \[10\], found int32 \[9\]; delete it"),
    "another dtype": (
        2,
        lambda a: a.astype(np.int64),
        r"shuffle_idx\.npy: .*expected uint32 \[32\], found int64 \[32\]",
    ),
    "documents of another split": (0, lambda a: a - 1, r"expected documents 1 to 5, found 0 to 4"),
    "documents more than once": (0, repeated, r"doc_idx\.npy: .*expected document \d 2 times, found [13] times"),
    "samples that begin elsewhere": (0, swapped, r"sample_idx\.npy: .*expected sample \d+ to begin at \[\d+, \d+\]"),
    "a sample row of its own": (1, lambda a: a + 1, r"expected sample 0 to begin at \[0, 0\], found \[1, 1\]"),
    "samples more than once": (2, repeated, r"shuffle_idx\.npy: .*expected every sample of \d+ once, found no sample"),
    "samples that are not there": (2, lambda a: a + 1, r"expected every sample of \d+ once, found no sample 0"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_maps_that_do_not_fit_the_data_name_the_file_to_delete(data: IndexedDataset, misfit: str) -> None:
    which, change, message = MISFITS[misfit]
    load(data)
    spoil(files(data)[which], change)
    with pytest.raises(DataError, match=message):
        load(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 2), share=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_maps_with_any_byte_changed_are_refused_or_the_same(
    data: IndexedDataset, which: int, share: float, value: int
) -> None:
    file = files(data)[which]
    whole = [found.tolist() for found in load(data)]
    sound = file.read_bytes()
    at = int(share * len(sound))
    file.write_bytes(sound[:at] + bytes([value]) + sound[at + 1 :])
    try:
        found = load(data)
    except DataError as error:
        assert re.search(r"_idx\.npy: this index map .*; delete it, it will be built anew", str(error))
    else:
        assert [map.tolist() for map in found] == whole
    finally:
        file.write_bytes(sound)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18)], ids=["empty", "zip", "empty zip"])
def test_a_map_that_is_another_kind_of_file_is_refused(data: IndexedDataset, content: bytes) -> None:
    load(data)
    files(data)[1].write_bytes(content)
    with pytest.raises(DataError, match=r"sample_idx\.npy: this index map cannot be read .*; delete it"):
        load(data)


def test_a_full_disk_leaves_no_map_cut_short(data: IndexedDataset) -> None:
    with largest_file(150), pytest.raises(DataError, match=r"doc_idx\.npy: cannot be written .*that has room"):
        load(data)
    assert set(data.bin.parent.iterdir()) == {data.bin, data.idx}


def spoil(file: Path, change: Callable[[NDArray[np.int32]], NDArray[np.int32]] | None) -> None:
    if change is None:
        file.write_bytes(b"not an array")
    else:
        np.save(file, change(np.load(file)))


def test_maps_of_data_prepared_anew_are_refused(data: IndexedDataset) -> None:
    load(data)
    prefix = data.bin.with_suffix("")
    write_indexed(prefix, (np.arange(length) for length in (10, 15, 14, 13, 12, 11)), np.dtype("<u2"))
    with pytest.raises(DataError, match=r"sample_idx\.npy: this index map was made for other data or another split"):
        load(IndexedDataset(prefix))


@pytest.mark.parametrize(
    ("documents", "found"),
    [(range(0, 0), "0 tokens in 0 of 6 documents"), (range(0, 1), "10 tokens in 1 of 6 documents")],
    ids=["an empty split", "too few tokens"],
)
def test_a_split_too_short_for_one_sample_is_refused_with_its_numbers(
    data: IndexedDataset, documents: range, found: str
) -> None:
    message = rf"text\.bin: the train split has {found}, but one sample takes 11 \(model\.sequence_length=10 and one"
    with pytest.raises(DataError, match=message):
        build_or_load(data.bin.with_suffix(""), data, documents, "train", 1, 10, 1)


def test_maps_that_cannot_be_written_are_told(data: IndexedDataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"doc_idx\.npy: cannot be written .*choose a folder that you may write to"):
        build_or_load(tmp_path / "gone" / "text", data, range(1, 6), "train", 30, 4, 1)


def test_only_whole_files_lie_beside_the_data(data: IndexedDataset) -> None:
    load(data)
    prefix = data.bin.with_suffix("")
    expected = {data_file(prefix, ".bin"), data_file(prefix, ".idx"), *files(data)}
    assert set(prefix.parent.iterdir()) == expected
