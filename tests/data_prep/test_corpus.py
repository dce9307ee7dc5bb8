"""The standard library is a corpus that every machine has, in an order of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.errors import DataPrepError
from data_prep.text.corpus import LEFT_OUT, Corpus, corpus_of, stdlib_corpus
from tests.data_prep.conftest import TEXTS


def test_documents_are_the_librarys_sources_in_the_order_of_their_names(corpus: Corpus) -> None:
    assert list(corpus.names) == list(TEXTS)
    assert [file.read_text(encoding="utf-8") for file in corpus.files] == list(TEXTS.values())


def test_this_pythons_library_is_found_without_its_tests() -> None:
    corpus = stdlib_corpus()
    names = [Path(name) for name in corpus.names]
    assert Path("argparse.py") in names and Path("json/decoder.py") in names
    assert not any(LEFT_OUT.intersection(name.parts) for name in names)
    assert corpus.bytes > 5_000_000


def test_a_limit_takes_the_first_files_that_fit() -> None:
    files = stdlib_corpus().files
    limited = stdlib_corpus(max_mb=1)
    taken, size = limited.files, limited.bytes
    assert taken == files[: len(taken)]
    assert size <= 10**6 < size + files[len(taken)].stat().st_size
    assert limited.description.endswith("standard library, first 1 MB")


def test_a_python_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataPrepError, match="no Python sources there"):
        stdlib_corpus(folder=tmp_path)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataPrepError, match=r"gone: cannot be read \(No such file or directory\)"):
        stdlib_corpus(folder=tmp_path / "gone")


def test_a_folder_gives_its_files_sorted_without_hidden_ones(library: Path) -> None:
    (library / ".git").mkdir()
    (library / ".git" / "config").touch()
    (library / ".hidden").touch()
    corpus = corpus_of([library / "data.txt", library])
    assert corpus.names == (
        "data.txt", "a.py", "b.py", "data.txt", "pkg/__init__.py", "pkg/c.py", "site-packages/z.py", "test/test_a.py"
    )  # fmt: skip


def test_a_source_that_is_not_there_or_holds_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataPrepError, match=r"--source .*gone: no such file or folder"):
        corpus_of([tmp_path / "gone"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataPrepError, match=r"--source .*empty: the folder has no files"):
        corpus_of([tmp_path / "empty"])


def test_a_digest_is_of_names_and_contents_wherever_they_lie(library: Path, tmp_path: Path) -> None:
    digest = corpus_of([library]).digest()
    library.rename(tmp_path / "moved")
    assert corpus_of([tmp_path / "moved"]).digest() == digest
    (tmp_path / "moved" / "a.py").rename(tmp_path / "moved" / "aa.py")
    renamed = corpus_of([tmp_path / "moved"]).digest()
    (tmp_path / "moved" / "aa.py").write_text("x = 2\n")
    assert len({digest, renamed, corpus_of([tmp_path / "moved"]).digest()}) == 3


def test_a_file_that_cannot_be_read_is_named(corpus: Corpus) -> None:
    corpus.files[1].unlink()
    with pytest.raises(DataPrepError, match=r"b\.py: cannot be read \(No such file or directory\)"):
        corpus.digest()
