"""The index maps are Megatron's, bit for bit; files that do not fit the data are never used."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.contract.errors import DataError
from megatron_ext.data import index_maps
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.index_maps import (
    IndexMaps,
    build_or_load,
    check_saved,
    compute,
    fingerprint_of,
    layout,
    map_files,
    saved_maps,
    split_documents,
)
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file, write_indexed
from megatron_ext.data.samples import Split
from tests.support.full_disk import largest_file
from tests.support.megatron_ext.golden import DOCUMENTS, PREFIX, SEED, SEQUENCE_LENGTH

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
    made = fingerprint_of(data.lengths, DOCUMENTS, samples, SEQUENCE_LENGTH, SEED)
    for ours, theirs in zip(
        map_files(prefix, "train", samples, SEQUENCE_LENGTH, SEED, made),
        map_files(PREFIX, "train", samples, SEQUENCE_LENGTH, SEED),
        strict=True,
    ):
        assert ours.read_bytes() == theirs.read_bytes()
    plan = layout(int(data.lengths[2:25].sum()), samples, SEQUENCE_LENGTH)
    assert (plan.epochs, plan.separate_last_epoch) == (epochs, apart)


def test_the_files_have_megatrons_names() -> None:
    for fingerprint, end in (("", ""), ("0123456789abcdef", "0123456789abcdef_")):
        files = map_files("data/my-gpt2_text_document", "train", 1600, 1024, 1234, fingerprint)
        stem = f"my-gpt2_text_document_train_indexmap_1600ns_1024sl_1234s_{end}"
        assert [file.name for file in files] == [
            f"{stem}doc_idx.npy",
            f"{stem}sample_idx.npy",
            f"{stem}shuffle_idx.npy",
        ]


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


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where maps go that cannot lie beside their data."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "tdpp"


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    """Six documents of 10 to 15 tokens."""
    write_indexed(tmp_path / "text", (np.arange(10 + i) for i in range(6)), np.dtype("<u2"))
    return IndexedDataset(tmp_path / "text")


def load(data: IndexedDataset, documents: range = range(1, 6)) -> IndexMaps:
    return build_or_load(data.bin.with_suffix(""), data, documents, "train", 30, 4, 1)


def files(data: IndexedDataset, documents: range = range(1, 6)) -> list[Path]:
    made = fingerprint_of(data.lengths, documents, 30, 4, 1)
    return map_files(data.bin.with_suffix(""), "train", 30, 4, 1, made)


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
        assert re.search(r"_idx\.npy: this index map .*; delete it, it will be rebuilt", str(error))
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


def test_maps_of_data_prepared_anew_are_made_anew(data: IndexedDataset) -> None:
    before = load(data)
    prefix = data.bin.with_suffix("")
    write_indexed(prefix, (np.arange(length) for length in (10, 15, 14, 13, 12, 11)), np.dtype("<u2"))
    anew = IndexedDataset(prefix)
    expected = compute(anew.lengths, range(1, 6), 30, 4, 1)
    assert [found.tolist() for found in load(anew)] == [found.tolist() for found in expected]
    assert before.sample_idx.tolist() != expected.sample_idx.tolist()
    assert len(saved_maps(prefix)) == 6


def test_two_splits_of_the_same_data_have_maps_of_their_own(data: IndexedDataset) -> None:
    for documents in (range(1, 6), range(0, 5)):
        assert sorted(set(load(data, documents).doc_idx.tolist())) == list(documents)
    assert len({*files(data), *files(data, range(0, 5))}) == len(saved_maps(data.bin.with_suffix(""))) == 6


LENGTHS = st.lists(st.integers(0, 9), min_size=2, max_size=4)


@given(*(st.tuples(LENGTHS, st.integers(0, 1), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)) for _ in "ab"))
def test_maps_have_one_name_if_and_only_if_all_that_they_follow_from_is_equal(one: tuple, other: tuple) -> None:
    def name(lengths: list[int], first: int, *rest: int) -> str:
        return fingerprint_of(np.array(lengths, np.int32), range(first, len(lengths)), *rest)

    def relevant(lengths: list[int], first: int, *rest: int) -> tuple:
        return (lengths[first:], first, *rest)

    assert (name(*one) == name(*other)) is (relevant(*one) == relevant(*other))


def test_maps_that_megatron_has_made_are_used_where_they_fit(data: IndexedDataset) -> None:
    load(data)
    theirs = map_files(data.bin.with_suffix(""), "train", 30, 4, 1)
    for ours, name in zip(files(data), theirs, strict=True):
        ours.rename(name)
    assert Path(load(data).doc_idx.filename) == theirs[0]  # type: ignore[attr-defined]
    assert Path(load(data, range(0, 5)).doc_idx.filename) == files(data, range(0, 5))[0]  # type: ignore[attr-defined]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders on which a file system is read-only, for root too."""
    folders: list[Path] = []
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode, **options: Path(path) not in folders and access(path, mode, **options)
    )
    return folders


def test_beside_data_that_may_only_be_read_nothing_is_written(
    data: IndexedDataset, cache: Path, closed: list[Path]
) -> None:
    closed.append(data.bin.parent)
    before = set(data.bin.parent.iterdir())
    check_saved(data.bin.with_suffix(""), data, range(1, 6), "train", 30, 4, 1)
    built = load(data)
    assert set(data.bin.parent.iterdir()) == before
    assert {path.name for path in cache.iterdir()} == {file.name for file in files(data)}
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [Path(found.filename).parent for found in load(data)] == [cache] * 3
    closed.clear()  # what is there already is taken wherever it lies
    assert [Path(found.filename).parent for found in load(data)] == [cache] * 3
    assert [found.tolist() for found in built] == [found.tolist() for found in load(data)]


def test_a_folder_that_was_given_is_the_only_one(data: IndexedDataset, tmp_path: Path) -> None:
    prefix, given = data.bin.with_suffix(""), tmp_path / "given" / "maps"
    load(data)
    maps = build_or_load(prefix, data, range(1, 6), "train", 30, 4, 1, str(given))
    assert [Path(found.filename).parent for found in maps] == [given] * 3
    assert {path.name for path in given.iterdir()} == {file.name for file in files(data)}


def test_without_a_place_the_way_out_is_named(data: IndexedDataset, cache: Path, closed: list[Path]) -> None:
    closed += [data.bin.parent, cache.parent, cache]
    message = rf"cannot be written in {data.bin.parent} or in {cache}; give .*, data\.cache=FOLDER"
    with pytest.raises(DataError, match=message):
        load(data)
    with pytest.raises(DataError, match=message):
        check_saved(data.bin.with_suffix(""), data, range(1, 6), "train", 30, 4, 1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_a_file_system_that_is_read_only_trains(tmp_path: Path, cache: Path) -> None:
    write_indexed(tmp_path / "text", (np.arange(10 + i) for i in range(6)), np.dtype("<u2"))
    (mounted := tmp_path / "mounted").mkdir()
    (source := tmp_path / "source").mkdir()
    for suffix in (".bin", ".idx"):
        data_file(tmp_path / "text", suffix).rename(data_file(source / "text", suffix))
    if subprocess.run(["mount", "--bind", "-o", "ro", source, mounted], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        samples = GptSamples(mounted / "text", Split(3, 1, (8, 1, 1)), 4, 100)
        assert len(samples.tokens(2)) == 5
        assert sorted(path.name for path in source.iterdir()) == ["text.bin", "text.idx"]
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)
    assert len(list(cache.iterdir())) == 3


def test_a_planted_link_is_replaced_and_not_followed(data: IndexedDataset, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("before")
    for file in files(data):
        file.symlink_to(tmp_path / "mine")
    files(data)[0].unlink()
    load(data)
    assert (tmp_path / "mine").read_text() == "before"
    assert not any(file.is_symlink() for file in files(data))


def test_a_pipe_is_no_map(data: IndexedDataset) -> None:
    os.mkfifo(files(data)[0])
    load(data)
    assert files(data)[0].is_file()


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


def test_only_whole_files_lie_beside_the_data(data: IndexedDataset) -> None:
    load(data)
    prefix = data.bin.with_suffix("")
    expected = {data_file(prefix, ".bin"), data_file(prefix, ".idx"), *files(data)}
    assert set(prefix.parent.iterdir()) == expected
