"""The standard library is a corpus that every machine has, in an order of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.corpus import LEFT_OUT, StdlibCorpus, read_documents
from data_prep.errors import DataPrepError
from tests.data_prep.conftest import TEXTS


def test_documents_are_the_librarys_sources_in_the_order_of_their_names(corpus: StdlibCorpus) -> None:
    assert [str(file.relative_to(corpus.folder)) for file in corpus.files()] == list(TEXTS)
    assert list(read_documents(corpus.files())) == [text for text in TEXTS.values() if text]


def test_this_pythons_library_is_found_without_its_tests() -> None:
    corpus = StdlibCorpus.of_this_python()
    files = corpus.files()
    names = [file.relative_to(corpus.folder) for file in files]
    assert Path("argparse.py") in names and Path("json/decoder.py") in names
    assert not any(LEFT_OUT.intersection(name.parts) for name in names)
    assert sum(file.stat().st_size for file in files) > 5_000_000


def test_a_limit_takes_the_first_files_that_fit() -> None:
    files = StdlibCorpus.of_this_python().files()
    limited = StdlibCorpus.of_this_python(max_mb=1)
    taken = limited.files()
    size = sum(file.stat().st_size for file in taken)
    assert taken == files[: len(taken)]
    assert size <= 10**6 < size + files[len(taken)].stat().st_size
    assert limited.description.endswith("standard library, first 1 MB")


def test_a_python_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataPrepError, match="no Python sources there"):
        StdlibCorpus(tmp_path).files()


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataPrepError, match=r"gone: cannot be read \(No such file or directory\)"):
        StdlibCorpus(tmp_path / "gone").files()


def test_a_file_that_is_not_utf8_names_the_line(corpus: StdlibCorpus) -> None:
    (corpus.folder / "b.py").write_bytes(b"a\nb\n# \xe9t\xe9\n")
    with pytest.raises(DataPrepError, match=r"b\.py:3: not UTF-8 \(byte 0xe9\)"):
        list(read_documents(corpus.files()))


def test_a_file_that_cannot_be_read_is_named(corpus: StdlibCorpus) -> None:
    files = corpus.files()
    files[1].unlink()
    with pytest.raises(DataPrepError, match=r"b\.py: cannot be read \(No such file or directory\)"):
        list(read_documents(files))
