"""A vocabulary is read as what it is, and text that it lacks is never turned into unknown tokens without a word."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import DataPrepError
from data_prep.pairs.check import check_pairs
from data_prep.tokenizers.tokenizer import JsonTokenizer
from data_prep.tokenizers.vocabulary import unknown_id, words_of
from launch.commands.data import main
from megatron_ext.contract.errors import EngineError
from megatron_ext.inference.text import Counting, tokenizer_of
from tests.data_prep.pairs.test_wmt16 import TOKENS, TRAIN, folder, prepare

__all__ = ["folder"]
ALL = [*TOKENS, "die"]
FORMS = {
    "words": "{word}",
    "counts": "{word} {count}",
    "tabs": "{word}\t{count}",
    "likelihoods": "{word}\t-{count}.25",
    "uniq": "   {count} {word}",
    "windows": "{word} {count}\r",
    "mark": "\ufeff{word} {count}",
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_beside_the_words_change_nothing(folder: Path, tmp_path: Path, form: str) -> None:
    vocabulary = folder / "vocab.bpe.32000"
    for name, pattern in (("plain", FORMS["words"]), ("other", FORMS[form])):
        lines = (pattern.format(word=word, count=90 - number) for number, word in enumerate(ALL))
        vocabulary.write_bytes("".join(f"{line}\n" for line in lines).encode())
        prepare(folder, tmp_path / name)
    names = [*(f"-{split}.{side}.bin" for split in ("train", "test") for side in ("source", "target"))]
    for ending in (*names, ".tokenizer.json"):
        assert (tmp_path / f"plain{ending}").read_bytes() == (tmp_path / f"other{ending}").read_bytes()
    assert json.loads((tmp_path / "other.json").read_text())["unknown"] == 0


def test_ids_beside_the_words_give_their_order() -> None:
    assert words_of(["b 1", "0 2", "a 0"], Path("x")) == ["a", "b", "0"]
    assert words_of(["b 7", "0 9", "a 7"], Path("x")) == ["b", "0", "a"]
    assert words_of(["b 7", "3 words here", "a"], Path("x")) == ["b 7", "3 words here", "a"]


@pytest.mark.parametrize("word", ["\u00a0", "\u3000", "\u2028", "\x85", "a\u2009b"])
def test_a_word_may_be_any_space_but_those_between_it_and_its_number(word: str) -> None:
    assert words_of(["b 1", f"{word} 2", "c 3"], Path("x")) == ["b", word, "c"]
    assert words_of([f"7\t{word}", "9\tb"], Path("x")) == [word, "b"]


def test_a_vocabulary_of_bert_s_has_a_word_a_line(tmp_path: Path) -> None:
    """Others' lines end at U+2028 too, after which every word had another id."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2028", "the", "\x85", "cat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenizer = JsonTokenizer.from_file(tmp_path / "vocab.txt", "[SEP]")
    assert tokenizer.vocab_size == len(words)


def test_a_file_with_numbers_on_some_lines_is_refused() -> None:
    with pytest.raises(DataPrepError, match="2 of 3 lines have a number beside the word, but 'c' has none"):
        words_of(["a 1", "b 2", "c"], Path("x"))


def test_special_words_in_the_file_get_no_second_id(folder: Path, tmp_path: Path) -> None:
    (folder / "vocab.bpe.32000").write_text("\n".join(["<unk>", "<s>", *TOKENS]) + "\n")
    prepare(folder, tmp_path / "x")
    assert json.loads((tmp_path / "x.json").read_text())["unknown"] == 4
    assert unknown_id((tmp_path / "x.tokenizer.json").read_text()) == 1


def test_more_than_a_few_unknown_tokens_are_a_warning(folder: Path, tmp_path: Path, capsys) -> None:
    prepare(folder, tmp_path / "x")
    said = capsys.readouterr().err
    assert "target of train: 3 of 30 tokens (10%) are not in the vocabulary" in said
    assert "source of train" not in said
    main(["check", str(tmp_path / "x")])
    assert "x-train.target: 3 of 30 tokens" in capsys.readouterr().err


def test_nearly_all_are_an_error_that_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "vocab.bpe.32000").write_text("".join(f"{word},7\n" for word in ALL))
    with pytest.raises(DataPrepError, match=r"30 of 30 tokens \(100%\).* has 14 words, which begin with 'the,7'"):
        prepare(folder, tmp_path / "out/x")
    assert not list((tmp_path / "out").iterdir())


def test_data_that_an_older_version_made_of_such_a_file_are_made_again(folder: Path, tmp_path: Path, capsys) -> None:
    (folder / "vocab.bpe.32000").write_text("".join(f"{word} 7\n" for word in ALL))
    prepare(folder, tmp_path / "x")
    manifest = json.loads((tmp_path / "x.json").read_text())
    assert manifest["recipe"].pop("numbers_in_vocabulary")
    (tmp_path / "x.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    prepare(folder, tmp_path / "x")
    assert "exists already" not in capsys.readouterr().err


def wordpiece(path: Path, words: list[str], form: str = "{word}") -> Path:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.write_text("".join(f"{form.format(word=word, count=7)}\n" for word in [*special, *words]))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_berts_vocabulary_may_have_counts(tmp_path: Path, form: str, capsys) -> None:
    (tmp_path / "text.txt").write_text("one two one two\n")
    vocabulary = wordpiece(tmp_path / "vocab.txt", ["one", "two"], FORMS[form])
    main(
        ["prepare", "--source", str(tmp_path / "text.txt"), "--tokenizer", str(vocabulary), "--output", f"{tmp_path}/x"]
    )
    assert "warning" not in capsys.readouterr().err
    main(["inspect", f"{tmp_path}/x_text_document", "--document", "0"])
    assert "one two one two" in capsys.readouterr().out


@pytest.mark.parametrize("sentences", [[], ["--split-sentences"]], ids=["documents", "sentences"])
def test_text_of_another_language_is_refused(tmp_path: Path, sentences: list[str]) -> None:
    (tmp_path / "text.txt").write_text("Ein ganz anderer Text. Noch einer.\n" * 30)
    vocabulary = wordpiece(tmp_path / "vocab.txt", ["one", "two"])
    given = ["--source", str(tmp_path / "text.txt"), "--tokenizer", str(vocabulary), "--output", f"{tmp_path}/out/x"]
    with pytest.raises(DataPrepError, match=r"tokens \(\S+%\) are not in the vocabulary; give the WordPiece vocab"):
        main(["prepare", *given, *sentences])
    assert not list((tmp_path / "out").iterdir())


def test_counts_in_the_place_of_ids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 40000, "b": 12, "c": 3}))
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "text.txt").write_text("a b c\n")
    given = ["--vocab-file", f"{tmp_path}/vocab.json", "--merge-file", f"{tmp_path}/merges.txt"]
    command = [
        "prepare",
        "--source",
        f"{tmp_path}/text.txt",
        *given,
        "--output",
        f"{tmp_path}/x",
        "--end-of-document",
        "a",
    ]
    with pytest.raises(
        DataPrepError, match="'a' has the id 40000, but the vocabulary has 3 words; give a file with ids"
    ):
        main(command)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "c": 2}))
    with pytest.raises(DataPrepError, match="lacks 253 of the 256 bytes, such as '!'; text with them would vanish"):
        main(command)


def test_a_launch_refuses_pairs_of_unknown_tokens(folder: Path, tmp_path: Path) -> None:
    from conf.compose import compose

    prepare(folder, tmp_path / "x")
    model = compose(["model=gnmt-tiny", "model.vocab_size=17"]).model
    assert "target of train: 3 of 30 tokens" in check_pairs(model, tmp_path / "x")[0]
    path = tmp_path / "x-train.target.bin"
    path.write_bytes(np.full(path.stat().st_size // 2, 1, np.uint16).tobytes())
    with pytest.raises(DataPrepError, match=r"target of train: 30 of 30 tokens \(100%\) are not in the vocabulary"):
        check_pairs(model, tmp_path / "x")


def test_translating_text_that_the_model_does_not_know_is_reported(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path / "x")
    content = (tmp_path / "x.tokenizer.json").read_text()
    usual, odd, other = (Counting(tokenizer_of(content)) for _ in range(3))
    usual.encode(TRAIN["en"][0])
    odd.encode(TRAIN["de"][0])
    other.encode("kein Wort davon")
    assert usual.doubt() is None
    assert (odd.doubt() or "").startswith("1 of 6 tokens of the text (16.7%) are not in the model's vocabulary")
    with pytest.raises(EngineError, match="3 of 3 tokens of the text"):
        other.doubt()
