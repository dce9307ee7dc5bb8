"""Tokenisers of words: GPT-2's files, any tokenizer.json, or one learned from the text; all give the library's ids."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.implementations import ByteLevelBPETokenizer

from data_prep.errors import DataPrepError
from data_prep.indexed.manifest import tokenizer_of
from data_prep.preparation import prepare as module
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import corpus_of, stdlib_corpus
from data_prep.tokenizers.tokenizer import END_OF_TEXT, JsonTokenizer, train_bpe
from launch.commands.data import main
from megatron_ext.data.indexed_dataset import IndexedDataset


@cache
def sample() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in stdlib_corpus(max_mb=1).files]


@cache
def trained() -> JsonTokenizer:
    return train_bpe(sample(), 600)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("gpt2")
    Tokenizer.from_str(trained().content).model.save(str(folder))
    return folder


def test_gpt2_files_give_the_ids_of_the_librarys_own_gpt2_tokenizer(gpt2: Path) -> None:
    ours = JsonTokenizer.from_files(gpt2 / "vocab.json", gpt2 / "merges.txt")
    theirs = ByteLevelBPETokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    assert ours.encode(sample()[:9]) == [theirs.encode(text).ids for text in sample()[:9]]
    assert (ours.vocab_size, ours.name, ours.end_of_document) == (600, "BPE", theirs.token_to_id(END_OF_TEXT))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_its_tokens_and_never_holds_an_end(text: str) -> None:
    (ids,) = trained().encode([text + END_OF_TEXT])
    assert trained().end_of_document not in ids
    assert trained().decode(np.append(ids, trained().end_of_document)) == text + END_OF_TEXT


def test_a_tokenizer_json_is_never_cut_padded_or_marked(tmp_path: Path) -> None:
    told = Tokenizer.from_str(trained().content)
    told.enable_truncation(3)
    told.enable_padding(length=8)
    told.save(str(tmp_path / "tokenizer.json"))
    assert JsonTokenizer.from_file(tmp_path).encode(sample()[:2]) == trained().encode(sample()[:2])


def test_an_end_that_the_tokenizer_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained().content)
    with pytest.raises(DataPrepError, match=r"tokenizer\.json: .* no token '</s>' for the end .*are <\|endoftext\|>"):
        JsonTokenizer.from_file(tmp_path, "</s>")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: cannot be read \(No such file"),
        ("tokenizer.json", b"{}", r"tokenizer\.json: not a tokenizer of the tokenizers library"),
        ("tokenizer.json", b"\xff", r"tokenizer\.json: not UTF-8"),
        ("vocab.json", b"{}", r"merges\.txt: cannot be read"),
    ],
    ids=["none", "another file", "bytes", "no merges"],
)
def test_files_of_no_tokenizer_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataPrepError, match=message):
        JsonTokenizer.from_file(tmp_path)


def test_the_bytes_are_the_same_whatever_the_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES", 50_000)
    corpus = stdlib_corpus(max_mb=1)
    for workers in (1, 3):
        prepare(Request(corpus=corpus, tokenizer=trained(), workers=workers), tmp_path / str(workers) / "x")
    one, three = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "13")
    assert one == three
    data, documents = IndexedDataset(tmp_path / "3" / "x"), [text for text in map(_read, corpus.files) if text]
    assert [tokenizer_of(tmp_path / "3" / "x").decode(data[i]) for i in range(len(data))] == documents


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_of_two_faults_is_told_whatever_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(module, "DOCUMENTS", 2)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 5 + "{\n" + '{"text": "two"}\n' * 5)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"three")[:-4])
    corpus = corpus_of([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"])
    with pytest.raises(DataPrepError, match=r"a\.jsonl:6: not JSON"):
        prepare(Request(corpus=corpus, tokenizer=trained(), workers=workers), tmp_path / "out" / "x")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_a_learned_tokenizer_lies_beside_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(sample()[0])
    learn = ["prepare", "--source", str(tmp_path / "a.txt"), "--output", str(tmp_path / "a"), "--workers", "1"]
    assert main([*learn, "--train-bpe", "300"]) == 0
    assert "model.vocab_size=300" in capsys.readouterr().err
    prefix = tmp_path / "a_text_document"
    learned = tmp_path / "a_text_document.tokenizer.json"
    assert learned.read_text() == train_bpe([sample()[0]], 300).content
    assert main([*learn, "--train-bpe", "300"]) == 0
    assert "exists already, unchanged" in capsys.readouterr().err
    again = ["--tokenizer", str(learned), "--output", str(tmp_path / "b")]
    assert main([*learn, *again]) == 0
    assert (tmp_path / "b_text_document.bin").read_bytes() == prefix.with_suffix(".bin").read_bytes()
    assert main(["inspect", str(prefix), "--document", "0"]) == 0
    assert capsys.readouterr().out.endswith(sample()[0] + "\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-file", "v"], "--vocab-file and --merge-file belong together"),
        (["--train-bpe", "256"], "--train-bpe 256: the bytes and the end of a document take 257 ids"),
        (["--train-bpe", "2147483648"], "--train-bpe 2147483648: must be at most 1048576 ids"),
        (["--end-of-document", "</s>"], "--end-of-document </s> is for a tokenizer that is given"),
        (["--max-mb", "1"], "--max-mb 1 is for --source stdlib alone"),
        (["--tokenizer", "nosuch"], "--tokenizer nosuch: cannot be read"),
        ([], "--output is missing"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else None,
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    output = ["--output", str(tmp_path / "a")] if options else []
    with pytest.raises(DataPrepError, match=message):
        main(["prepare", "--source", str(tmp_path / "a.txt"), *output, *options])
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == '["a.txt"]'
