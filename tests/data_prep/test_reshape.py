"""Merged and split data are what their parts were; what does not fit together is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.errors import DataPrepError
from data_prep.indexed import reshape
from data_prep.indexed.inspect import token_counts
from data_prep.indexed.manifest import read_manifest
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import Corpus, corpus_of
from data_prep.tokenizers.tokenizer import ByteTokenizer, JsonTokenizer, train_bpe
from launch.commands.data import main
from megatron_ext.data.indexed_dataset import HEADER, IndexedDataset, data_file, indexed_writer, write_indexed
from tests.support.full_disk import largest_file

MANY = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=2, max_size=12)


def documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [
        [token for sequence in range(first, last) for token in data[sequence].tolist()]
        for first, last in zip(data.boundaries[:-1].tolist(), data.boundaries[1:].tolist(), strict=True)
    ]


@settings(max_examples=25)
@given(texts=MANY, weights=st.lists(st.integers(1, 3), min_size=2, max_size=2))
def test_what_is_split_and_merged_again_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], weights: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("data")
    write_indexed(folder / "a", (np.array(text, np.uint16) for text in texts), np.dtype("<u2"))
    if round(len(texts) * weights[1] / sum(weights)) in (0, len(texts)):
        return
    parts = reshape.split(folder / "a", weights, folder / "part")
    assert [text for part in parts for text in documents(part)] == texts
    merged = reshape.merge(parts, folder / "b")
    for suffix in (".bin", ".idx"):
        assert data_file(merged, suffix).read_bytes() == data_file(folder / "a", suffix).read_bytes()


def test_documents_of_several_sequences_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshape, "SEQUENCES", 2)
    with indexed_writer(tmp_path / "a", np.dtype("<i4"), np.array([0, 2, 2, 5])) as writer:
        for number in range(5):
            writer.add(np.arange(number + 1))
    reshape.merge([tmp_path / "a", tmp_path / "a"], tmp_path / "twice")
    assert documents(tmp_path / "twice_text_document") == documents(tmp_path / "a") * 2
    first, second = reshape.split(tmp_path / "a", [2, 1], tmp_path / "part")
    assert documents(first) + documents(second) == documents(tmp_path / "a")


def test_parts_keep_their_tokenizer_and_tell_where_they_come_from(corpus: Corpus, tmp_path: Path) -> None:
    prepare(Request(corpus=corpus, tokenizer=train_bpe(["x = 1"], 260)), tmp_path / "a")
    assert main(["split", str(tmp_path / "a"), "--weights", "2,1", "--output", str(tmp_path / "part")]) == 0
    second = tmp_path / "part-1_text_document"
    manifest = read_manifest(second)
    assert manifest is not None and manifest.source.endswith("standard library, documents 2 to 2")
    assert main(["check", str(second)]) == 0
    assert main(["inspect", str(second), "--document", "0"]) == 0


def test_data_of_different_tokenizers_are_not_merged(corpus: Corpus, tmp_path: Path) -> None:
    prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), tmp_path / "a")
    prepare(Request(corpus=corpus, tokenizer=train_bpe(["x = 1"], 260)), tmp_path / "b")
    with pytest.raises(
        DataPrepError,
        match=r"b has tokens of another kind than .*: uint16, BPE tokenizer \w+, .* uint16, byte",
    ):
        reshape.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")


def test_data_are_merged_by_what_their_tokens_mean(corpus: Corpus, tmp_path: Path) -> None:
    """The same tokeniser may be written in another way; but all documents must end with the same token."""
    first = train_bpe(["x = 1"], 260)
    respelt = JsonTokenizer(json.dumps(json.loads(first.content), indent=1))
    token = min(json.loads(first.content)["model"]["vocab"])
    for name, tokenizer in {"a": first, "b": respelt, "c": JsonTokenizer(first.content, token)}.items():
        prepare(Request(corpus=corpus, tokenizer=tokenizer), tmp_path / name)
    merged = reshape.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert documents(merged) == documents(tmp_path / "a") * 2
    with pytest.raises(DataPrepError, match=r"c has tokens of .*, documents end with \d+ instead of .* end with \d+"):
        reshape.merge([tmp_path / "a", tmp_path / "c"], tmp_path / "more")


def test_nothing_is_overwritten_and_no_part_is_empty(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a_text_document", [np.arange(3)] * 2, np.dtype("<u2"))
    with pytest.raises(DataPrepError, match=r"a_text_document\.bin exists; delete it, or choose another --output"):
        reshape.merge([tmp_path / "a_text_document"], tmp_path / "a")
    with pytest.raises(DataPrepError, match=r"--weights: 1 of 9 is not a document of 2"):
        reshape.split(tmp_path / "a_text_document", [8, 1], tmp_path / "part")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("weights", ["1", "1,0", "a,b", "1,inf"])
def test_weights_that_are_none_are_wrong_usage(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["split", "a", "--weights", weights, "--output", "b"])
    assert "9,1" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "ids"), [("<u2", [3, 900]), ("<i4", [5, -1])], ids=["beyond", "below 0"])
def test_check_names_the_sequence_with_a_token_out_of_bounds(tmp_path: Path, dtype: str, ids: list[int]) -> None:
    texts = [np.array([1]), np.array([], int), np.array(ids)]
    write_indexed(tmp_path / "a", texts, np.dtype(dtype))
    with pytest.raises(DataPrepError, match=rf"a\.bin: sequence 2 has token id {ids[1]}, but the vocabulary has 0 to"):
        main(["check", str(tmp_path / "a"), "--vocab-size", "900"])


def test_check_refuses_a_dtype_that_the_tokens_are_not_of(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a", [np.arange(4)] * 3, np.dtype("<i4"))
    content = bytearray((tmp_path / "a.idx").read_bytes())
    for code, message in ((7, "the tokens are float32, but token ids are whole numbers"), (8, "to begin at byte 8")):
        content[17 : 17 + 1] = struct.pack("<B", code)
        assert HEADER.unpack(bytes(content[: HEADER.size]))[2] == code
        (tmp_path / "a.idx").write_bytes(content)
        with pytest.raises(DataPrepError, match=message):
            main(["check", str(tmp_path / "a")])


@settings(max_examples=25)
@given(texts=MANY)
def test_tokens_are_counted(tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]]) -> None:
    prefix = tmp_path_factory.mktemp("data") / "a"
    write_indexed(prefix, (np.array(text, np.uint16) for text in texts), np.dtype("<u2"))
    flat = [token for text in texts for token in text]
    assert token_counts(IndexedDataset(prefix)).tolist() == [flat.count(i) for i in range(max(flat, default=-1) + 1)]


def test_a_full_disk_leaves_no_part_of_a_split(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a", [np.arange(10), np.arange(5000)], np.dtype("<u2"))
    with largest_file(4000), pytest.raises(DataPrepError, match=r"part-1_text.*cannot be written \(File too large\)"):
        reshape.split(tmp_path / "a", [1, 1], tmp_path / "part")
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.idx"}


def test_a_disk_that_is_full_before_the_manifest_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "source.jsonl").write_text('{"text": "x = 1"}\n' * 2)
    request = Request(corpus=corpus_of([tmp_path / "source.jsonl"]), tokenizer=train_bpe(["x = 1"], 260))
    prepare(request, tmp_path / "a")
    before = {path.name for path in tmp_path.iterdir()}
    with (
        largest_file(1000),
        pytest.raises(DataPrepError, match=r"cannot be written \(File too large\); choose an --out"),
    ):
        reshape.split(tmp_path / "a", [1, 1], tmp_path / "part")
    with (
        largest_file(1000),
        pytest.raises(DataPrepError, match=r"cannot be written \(File too large\); choose an --out"),
    ):
        reshape.merge([tmp_path / "a"], tmp_path / "all")
    assert {path.name for path in tmp_path.iterdir()} == before


def test_index_maps_of_data_that_had_the_name_go_away(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a", [np.arange(3)] * 2, np.dtype("<u2"))
    old = tmp_path / "all_text_document_train_indexmap_8ns_4sl_1s_doc_idx.npy"
    old.touch()
    reshape.merge([tmp_path / "a"], tmp_path / "all")
    assert not old.exists()
