"""Indexed data are Megatron's to the byte, whole or absent, and never read when they are damaged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.contract.errors import DataError
from megatron_ext.data import indexed_dataset
from megatron_ext.data.indexed_dataset import DTYPES, IndexedDataset, data_file, token_dtype, write_indexed
from tests.support.full_disk import largest_file
from tests.support.megatron_ext.golden import PREFIX, golden_documents
from tests.support.ordinary_user import ordinary_user

U16 = np.dtype("<u2")
INTEGERS = [dtype for dtype in DTYPES.values() if dtype.kind in "iu"]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Three documents, of 3, 0 and 5 tokens."""
    prefix = tmp_path / "v1.5_text"
    write_indexed(prefix, [np.arange(3), np.arange(0), np.arange(10, 15)], U16)
    return prefix


def test_the_files_are_megatrons_to_the_byte(tmp_path: Path) -> None:
    write_indexed(tmp_path / "tiny", golden_documents(), U16)
    for suffix in (".bin", ".idx"):
        assert data_file(tmp_path / "tiny", suffix).read_bytes() == data_file(PREFIX, suffix).read_bytes()


def test_megatrons_files_are_read() -> None:
    data = IndexedDataset(PREFIX)
    documents = golden_documents()
    assert (len(data), data.documents, len(data.tokens)) == (25, 25, sum(map(len, documents)))
    for i, document in enumerate(documents):
        np.testing.assert_array_equal(data[i], document)


@given(
    dtype=st.sampled_from(INTEGERS),
    block=st.integers(1, 4),
    documents=st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=9),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, dtype: np.dtype[Any], block: int, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("round") / "trip"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "BLOCK", block)
        write_indexed(prefix, (np.array(document, np.int64) for document in documents), dtype)
        data = IndexedDataset(prefix)
    assert [data[i].tolist() for i in range(len(data))] == documents
    assert data.boundaries.tolist() == list(range(len(documents) + 1))
    assert data.tokens.dtype == dtype


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(257, "uint16"), (50257, "uint16"), (65499, "uint16"), (65500, "int32"), (128256, "int32")],
    ids=str,
)
def test_tokens_take_two_bytes_where_megatron_gives_them_two(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def overwrite(suffix: str, at: int, content: bytes) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        with data_file(prefix, suffix).open("r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


def cut(suffix: str, size: int) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = data_file(prefix, suffix)
        path.write_bytes(path.read_bytes()[:size])

    return damage


def extend(suffix: str) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = data_file(prefix, suffix)
        path.write_bytes(path.read_bytes() + b"\0")

    return damage


def remove(suffix: str) -> Callable[[Path], None]:
    return lambda prefix: data_file(prefix, suffix).unlink()


def folder(suffix: str) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        data_file(prefix, suffix).unlink()
        data_file(prefix, suffix).mkdir()

    return damage


LENGTHS, OFFSETS, BOUNDARIES = 34, 34 + 3 * 4, 34 + 3 * 12
DAMAGES = {
    "no index": (remove(".idx"), r"_text\.idx: no such file; prepare the data, or correct data\.prefix"),
    "no tokens": (remove(".bin"), r"_text\.bin: no such file"),
    "an index that is a folder": (folder(".idx"), r"_text\.idx: not a regular file"),
    "tokens that are a folder": (folder(".bin"), r"_text\.bin: not a regular file"),
    "an empty index": (cut(".idx", 0), r"_text\.idx: expected b'MMIDIDX\\x00\\x00' at the start, found b''"),
    "another format": (overwrite(".idx", 0, b"TNTIDX\0\0\0"), r"found b'TNTIDX\\x00\\x00\\x00'"),
    "half a header": (cut(".idx", 20), "expected a header of 34 bytes, found 20"),
    "another version": (overwrite(".idx", 9, b"\2"), "expected version 1, found 2"),
    "an unknown dtype": (overwrite(".idx", 17, b"\x63"), "expected a dtype code out of 1 uint8.*8 uint16; found 99"),
    "an index cut short": (cut(".idx", 100), "expected 102 bytes for the 3 sequences and 4 .*found 100"),
    "an index that goes on": (extend(".idx"), "expected 102 bytes.* found 103"),
    "an absurd count": (overwrite(".idx", 18, b"\xff" * 8), r"sequences .*found 102"),
    "a negative length": (overwrite(".idx", LENGTHS + 4, b"\xff" * 4), "at least 0 for sequence 1, found -1"),
    "another length": (overwrite(".idx", LENGTHS, b"\4"), "expected sequence 1 to begin at byte 8.* found 6"),
    "offsets that fall": (overwrite(".idx", OFFSETS + 16, b"\2"), "sequence 2 to begin at byte 6.* found 2"),
    "a last length too long": (overwrite(".idx", LENGTHS + 8, b"\6"), r"_text\.bin: expected 18 bytes.* found 16"),
    "another dtype": (overwrite(".idx", 17, b"\4"), "expected sequence 1 to begin at byte 12"),
    "boundaries that do not begin at 0": (overwrite(".idx", BOUNDARIES, b"\1"), "rise from 0 to 3.* 4 of them: 1 … 3"),
    "boundaries that end elsewhere": (overwrite(".idx", BOUNDARIES + 24, b"\2"), "rise from 0 to 3.*: 0 … 2"),
    "boundaries that fall": (overwrite(".idx", BOUNDARIES + 8, b"\3"), "rise from 0 to 3"),
    "tokens cut short": (cut(".bin", 15), r"_text\.bin: expected 16 bytes, as v1\.5_text\.idx says, but found 15"),
    "too many tokens": (extend(".bin"), "expected 16 bytes.* found 17"),
    "no tokens left": (cut(".bin", 0), "expected 16 bytes.* found 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_are_refused_with_what_was_expected_and_found(prefix: Path, damage: str) -> None:
    inflict, message = DAMAGES[damage]
    inflict(prefix)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_an_index_cut_at_any_byte_is_refused(prefix: Path) -> None:
    idx = data_file(prefix, ".idx")
    whole = idx.read_bytes()
    for size in range(len(whole)):
        idx.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"_text\.idx: expected .* found "):
            IndexedDataset(prefix)


@given(at=st.integers(0, 101), value=st.integers(0, 255))
def test_an_index_with_any_byte_changed_is_refused_or_tells_the_same_tokens(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    """Two changes cannot be told from a sound index: another dtype of the same width, other document boundaries."""
    prefix = tmp_path_factory.mktemp("changed") / "text"
    write_indexed(prefix, [np.arange(3), np.arange(0), np.arange(10, 15)], U16)
    overwrite(".idx", at, bytes([value]))(prefix)
    try:
        data = IndexedDataset(prefix)
    except DataError as error:
        assert re.search(r"text\.(idx|bin): .*expected .*found", str(error))
    else:
        assert [data[i].tolist() for i in range(len(data))] == [[0, 1, 2], [], [10, 11, 12, 13, 14]]


def test_damage_is_found_in_every_block(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "BLOCK", 2)
    overwrite(".idx", OFFSETS + 16, b"\2")(prefix)
    with pytest.raises(DataError, match="sequence 2 to begin at byte 6"):
        IndexedDataset(prefix)


def test_a_failing_source_leaves_the_old_data_and_nothing_else(prefix: Path) -> None:
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}

    def failing() -> Iterator[NDArray[np.int64]]:
        yield np.arange(7)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_indexed(prefix, failing(), U16)
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


@pytest.mark.parametrize("room", [20, 4096, 12000], ids=["for no header", "for few tokens", "for no offsets"])
def test_a_full_disk_leaves_nothing_under_the_final_names(tmp_path: Path, room: int) -> None:
    documents = [np.arange(1)] * 2000 if room == 12000 else [np.arange(10_000)]
    with largest_file(room), pytest.raises(DataError, match=r"cannot be written \(File too large\); choose a folder"):
        write_indexed(tmp_path / "data", documents, U16)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone/data\.idx: cannot be written \(No such file or directory\)"):
        write_indexed(tmp_path / "gone" / "data", [], U16)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("taken/data", "Not a directory"), ("n" * 240, "File name too long"), ("locked/data", "Permission denied")],
    ids=["below a file", "a name too long", "in a folder of others"],
)
def test_a_place_that_cannot_take_the_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    (tmp_path / "locked").mkdir(mode=0o555)
    tmp_path.chmod(0o555)
    with ordinary_user(), pytest.raises(DataError, match=rf"{name}\.idx: cannot be written \({reason}\); choose a"):
        write_indexed(name, [np.arange(3)], U16)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["locked", "taken"]


@pytest.mark.parametrize("ids", [[0, 65536], [-1, 5]], ids=str)
def test_ids_that_the_dtype_cannot_hold_are_refused(tmp_path: Path, ids: list[int]) -> None:
    message = f"document 1 has token ids from {ids[0]} to {ids[1]}, but uint16 holds 0 to 65535: use a wider dtype"
    with pytest.raises(DataError, match=message):
        write_indexed(tmp_path / "data", [np.arange(3), np.array(ids)], U16)
    assert list(tmp_path.iterdir()) == []


def test_files_may_be_read_by_whom_the_umask_lets(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    assert data_file(prefix, ".bin").stat().st_mode == (tmp_path / "plain").stat().st_mode
