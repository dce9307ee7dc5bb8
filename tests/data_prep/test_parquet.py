"""Parquet files give the text of one column, resumed within a file; what is broken is named with file and row."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.errors import BadDocument, DataPrepError
from data_prep.files import journal as journal_module
from data_prep.preparation import prepare as module
from data_prep.preparation.prepare import Request, chunks, prepare
from data_prep.text.corpus import Corpus, corpus_of
from data_prep.text.encode import Options
from data_prep.text.formats import Format, format_of
from data_prep.text.parquet import rows
from data_prep.tokenizers.tokenizer import ByteTokenizer
from launch.commands.data import main
from megatron_ext.data.indexed_dataset import IndexedDataset
from tests.data_prep.test_resume import CutOff, PowerCut, contents

TEXTS = ["first", "Grüße, 世界\nsecond line", "third " * 100]


def write(path: Path, texts: list[str | None], column: str = "text", group: int = 50, kind: object = None) -> Path:
    table = pyarrow.table({"id": range(len(texts)), column: pyarrow.array(texts, kind or pyarrow.string())})
    parquet.write_table(table, path, row_group_size=group)
    return path


def texts_of(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    return [ByteTokenizer().decode(data[number]) for number in range(len(data))]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()], ids=str)
def test_each_row_is_a_document(tmp_path: Path, kind: object) -> None:
    path = write(tmp_path / "a.PARQUET", [*TEXTS, ""], "body", 2, kind)
    request = Request(corpus=corpus_of([path]), tokenizer=ByteTokenizer(), options=Options(key="body"))
    assert prepare(request, tmp_path / "x").left_out == {"empty": 1}
    assert texts_of(tmp_path / "x") == TEXTS


def test_files_of_several_formats_are_the_same_data_with_any_number_of_workers(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder / "a.parquet", TEXTS * 40)
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(300)))
    write(folder / "c.parquet", ["last", *TEXTS])
    for workers in (1, 3):
        given = ["prepare", "--source", str(folder), "--workers", str(workers)]
        main([*given, "--output", f"{tmp_path}/{workers}/x"])
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert texts_of(tmp_path / "1" / "x_text_document") == [
        *TEXTS * 40, *(f"line {number}" for number in range(300)), "last", *TEXTS
    ]  # fmt: skip


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr(module, "DOCUMENTS", 7)
    monkeypatch.setattr(journal_module, "SAVE_EVERY_S", 0.0)
    (tmp_path / "source").mkdir()
    for name, first in (("a.parquet", 0), ("b.parquet", 50)):
        write(tmp_path / "source" / name, [f"text {number % 60}" for number in range(first, first + 100)], group=30)
    return corpus_of([tmp_path / "source"])


def test_data_that_were_cut_off_at_every_chunk_are_the_same(corpus: Corpus, tmp_path: Path) -> None:
    request = Request(corpus=corpus, tokenizer=ByteTokenizer(), options=Options(unique=True))
    prepare(request, tmp_path / "whole" / "x")
    cuts = 0
    while True:
        try:
            prepare(replace(request, tokenizer=CutOff(1)), tmp_path / "cut" / "x")
        except PowerCut:
            cuts += 1
        else:
            break
    assert cuts == 28
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_groups_of_rows_that_are_done_are_not_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [f"text {number}" for number in range(100)], group=50)
    content = bytearray(path.read_bytes())
    begin = parquet.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    content[begin : begin + 40] = b"\xff" * 40
    path.write_bytes(content)
    corpus = corpus_of([path])
    assert [raw.content for chunk in chunks(corpus, Options(), 0, 98) for raw in chunk.raw] == [b"text 98", b"text 99"]
    with pytest.raises(DataPrepError, match=r"a\.parquet: not a Parquet file, or damaged \(.*\); get it again"):
        list(chunks(corpus, Options()))


@pytest.mark.parametrize(
    ("texts", "key", "message"),
    [
        (["a", "b", None], "text", r"a\.parquet:3: 'text' has no text in this row; choose another column with --key"),
        (["a"], "words", r"a\.parquet: no column 'words'; its columns are 'id', 'text'; choose one with --key"),
        (["a"], "id", r"a\.parquet: the column 'id' is not text, but int64; choose another with --key"),
    ],
    ids=["null", "no column", "numbers"],
)
def test_a_file_without_text_is_named_with_the_way_out(
    tmp_path: Path, texts: list[str | None], key: str, message: str
) -> None:
    path = write(tmp_path / "a.parquet", texts)
    with pytest.raises(DataPrepError, match=message):
        main(["prepare", "--source", str(path), "--key", key, "--output", f"{tmp_path}/x"])


def test_what_is_not_utf8_is_named_with_its_row(tmp_path: Path) -> None:
    binary = pyarrow.array([b"ok", b"line\nline\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": binary}), tmp_path / "a.parquet")
    request = Request(corpus=corpus_of([tmp_path / "a.parquet"]), tokenizer=ByteTokenizer())
    with pytest.raises(DataPrepError, match=r"a\.parquet:2: not UTF-8 \(byte 0xff\)"):
        prepare(request, tmp_path / "x")


def test_something_else_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("text\n" * 20)
    with pytest.raises(DataPrepError, match=r"a\.parquet: not a Parquet file, or damaged \(.*\); get it again"):
        list(chunks(corpus_of([tmp_path / "a.parquet"]), Options()))
    assert format_of(tmp_path / "a.parquet") is Format.parquet


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpus_of([write(tmp_path / "a.parquet", list(TEXTS))])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataPrepError, match=r"package pyarrow is needed to read Parquet files, but missing: pip inst"):
        list(chunks(corpus, Options()))


def test_a_column_may_lie_within_another(tmp_path: Path) -> None:
    records = [{"by": {"text": "one"}, "id": 1}, {"by": {"text": "two"}, "id": 2}, {"by": None, "id": 3}]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"record": records}), path)

    assert [content for _, content, _ in islice(rows(path, "record.by.text", 0, 99), 2)] == [b"one", b"two"]
    with pytest.raises(BadDocument, match=r"'record\.by\.text' has no text in this row"):
        list(rows(path, "record.by.text", 2, 99))
    for column, message in (
        ("record.by.words", "no column 'record.by.words', in which 'words' is missing; its columns are 'text'; choose"),
        ("record.id.text", "no column 'record.id.text', in which 'text' is missing; its columns are none; choose"),
        ("record.id", "the column 'record.id' is not text, but int64; choose another"),
        ("record", "the column 'record' is not text, but struct<"),
    ):
        with pytest.raises(DataPrepError, match=message):
            list(rows(path, column, 0, 99))
