"""The finished WMT16 folder of the GNMT examples is taken as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from data_prep.errors import DataPrepError
from launch.commands.data import main
from megatron_ext.data.indexed_dataset import IndexedDataset

TOKENS = ["the", "Haus@@", "tür", "ist", "offen", ".", "door", "is", "open", "&apos;s", "@-@", "&quot;", "it"]
TRAIN = {
    "de": ["die Haus@@ tür ist offen .", "&quot; offen &quot; ."] * 3,
    "en": ["the door is open .", "it &apos;s open @-@ door"] * 3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the names that the examples' prepare_dataset.sh gives."""
    found = tmp_path / "wmt16_de_en"
    found.mkdir()
    (found / "vocab.bpe.32000").write_text("".join(f"{token}\n" for token in TOKENS), encoding="utf-8")
    for language, lines in TRAIN.items():
        for name, part in (
            ("train.tok.clean", lines),
            ("newstest_dev.tok.clean", lines[:2]),
            ("newstest2014.tok", lines[1:2]),
        ):
            (found / f"{name}.bpe.32000.{language}").write_text("".join(f"{line}\n" for line in part), encoding="utf-8")
        (found / f"newstest2014.{language}").write_text(f"raw {language}\n")
        (found / f"train.{language}").write_text("another number of lines\n")
    return found


def prepare(folder: Path, output: Path, *options: str) -> None:
    main(
        [
            "pairs",
            "--source",
            str(folder),
            "--source-lang",
            "en",
            "--target-lang",
            "de",
            "--output",
            str(output),
            *options,
        ]
    )


def test_ids_are_those_of_the_examples_and_no_pair_is_left_out(folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "wmt"
    prepare(folder, prefix)
    ids = {token: number for number, token in enumerate(["<pad>", "<unk>", "<s>", "</s>", *TOKENS])}
    for side, language in (("source", "en"), ("target", "de")):
        data = IndexedDataset(f"{prefix}-train.{side}")
        expected = [[ids.get(token, 1) for token in line.split()] for line in TRAIN[language]]
        assert [data[number].tolist() for number in range(len(data))] == expected
    manifest = json.loads((tmp_path / "wmt.json").read_text())
    assert {name: split["pairs"] for name, split in manifest["splits"].items()} == {"train": 6, "valid": 2, "test": 1}
    assert (manifest["vocab_size"], manifest["left_out"], manifest["unknown"]) == (4 + len(TOKENS), {}, 4)


def test_text_is_as_it_was_written_or_put_together_again(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path / "wmt")
    assert (tmp_path / "wmt-train.target.txt").read_text().split("\n")[:2] == ["die Haustür ist offen.", '"offen".']
    assert (tmp_path / "wmt-train.source.txt").read_text().split("\n")[:2] == ["the door is open.", "it's open-door"]
    assert (tmp_path / "wmt-test.target.txt").read_text() == "raw de\n"
    tokenizer = Tokenizer.from_file(str(tmp_path / "wmt.tokenizer.json"))
    assert tokenizer.decode(IndexedDataset(tmp_path / "wmt-valid.source")[1].tolist()) == "it's open-door"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.tok.clean.bpe.32000.de", "one\n", r"has 6 lines, .*\.de has 1: line k of one must be the translation"),
        ("newstest2014.de", "one\ntwo\n", r"has 1 lines, .*newstest2014\.de has 2: line k of one must be line k of"),
        (
            "train.tok.clean.bpe.32000.en",
            None,
            r"vocab\.bpe\.32000 is there, but not train\.tok\.clean\.bpe\.32000\.en",
        ),
    ],
    ids=["sides", "text", "no training pairs"],
)
def test_files_that_do_not_belong_together_are_one_message(
    folder: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(DataPrepError, match=message):
        prepare(folder, tmp_path / "wmt")


def test_a_vocabulary_of_its_own_takes_no_other(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataPrepError, match="is in tokens already, by its own vocabulary; leave out --train-bpe"):
        prepare(folder, tmp_path / "wmt", "--train-bpe", "300")
