"""Preparing writes whole data with a manifest that is true of them, or nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from data_prep.errors import DataPrepError
from data_prep.indexed.manifest import read_manifest
from data_prep.making import is_prepared
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import Corpus
from data_prep.tokenizers.tokenizer import ByteTokenizer
from megatron_ext.contract.models.model import TEXT
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from tests.data_prep.conftest import TEXTS
from tests.support.full_disk import largest_file

TOKENIZER = ByteTokenizer()


def asked(corpus: Corpus) -> Request:
    return Request(corpus=corpus, tokenizer=TOKENIZER)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_text_is_a_document_with_an_end(corpus: Corpus, tmp_path: Path) -> None:
    prefix = tmp_path / "deep" / "down" / "text"
    prepare(asked(corpus), prefix)
    data = IndexedDataset(prefix)
    assert [data[i].tolist() for i in range(len(data))] == [
        [*text.encode(), TOKENIZER.end_of_document] for text in TEXTS.values() if text
    ]
    assert data.dtype.name == "uint16"


def test_the_manifest_is_true_of_the_files(corpus: Corpus, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "text"
    manifest = prepare(asked(corpus), prefix)
    data = IndexedDataset(prefix)
    assert json.loads(data_file(prefix, ".json").read_text()) == {
        "version": 2,
        "source": corpus.description,
        "recipe": asked(corpus).recipe(),
        "tokenizer": "byte",
        "vocab_size": 257,
        "end_of_document": 256,
        "end_token": None,
        "documents": data.documents,
        "tokens": len(data.tokens),
        "left_out": {"empty": 1},
        "sha256": {
            suffix: hashlib.sha256(data_file(prefix, suffix).read_bytes()).hexdigest() for suffix in (".bin", ".idx")
        },
    }
    assert read_manifest(prefix) == manifest


def test_the_same_source_gives_the_same_bytes(corpus: Corpus, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(asked(corpus), tmp_path / name / "text")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_data_count_as_prepared_only_while_nothing_differs(corpus: Corpus, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "text"
    assert not is_prepared(prefix, TEXT, asked(corpus).recipe())
    prepare(asked(corpus), prefix)
    assert is_prepared(prefix, TEXT, asked(corpus).recipe())
    assert not is_prepared(prefix, TEXT, asked(corpus).recipe() | {"key": "other"})
    whole = data_file(prefix, ".bin").read_bytes()
    data_file(prefix, ".bin").write_bytes(whole[:-2] + b"zz")
    assert not is_prepared(prefix, TEXT, asked(corpus).recipe())
    data_file(prefix, ".bin").unlink()
    assert not is_prepared(prefix, TEXT, asked(corpus).recipe())


def test_a_text_that_cannot_be_read_leaves_the_old_data(corpus: Corpus, library: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "text"
    prepare(asked(corpus), prefix)
    before = contents(prefix.parent)
    (library / "pkg" / "c.py").write_bytes(b"\xff")
    with pytest.raises(DataPrepError, match=r"pkg/c\.py:1: not UTF-8"):
        prepare(asked(corpus), prefix)
    assert contents(prefix.parent) == before


def test_a_full_disk_leaves_nothing(corpus: Corpus, tmp_path: Path) -> None:
    with (
        largest_file(2000),
        pytest.raises(DataPrepError, match=r"text: cannot be written \(File too large\); .* begins again"),
    ):
        prepare(asked(corpus), tmp_path / "out" / "text")
    assert contents(tmp_path / "out") == {}


def test_an_output_below_a_file_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(DataPrepError, match=r"out: cannot be written \(File exists\)"):
        prepare(asked(corpus), tmp_path / "out" / "text")
