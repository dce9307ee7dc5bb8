"""`tdpp data pairs`: what it writes, splits and leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_prep.errors import DataPrepError
from data_prep.pairs.pair import THRESHOLD, HeldOut, Pair, Sentences, jaccard, runs
from launch.commands.data import main
from megatron_ext.data.indexed_dataset import IndexedDataset
from megatron_ext.data.pairs import SIDES
from megatron_ext.data.samples import SPLITS

NOUNS = ["Hund", "Baum", "Weg", "Tisch", "Berg", "Stern", "Fluss", "Wald", "Ring", "Brief"]
ENGLISH = ["dog", "tree", "way", "table", "hill", "star", "river", "wood", "ring", "letter"]


def numbered(count: int) -> list[tuple[str, str]]:
    """Different pairs, no two of them nearly alike."""
    rng = np.random.default_rng(1)
    found = []
    for digits in rng.integers(10, size=(count, 3)).tolist():
        name = "".join(rng.choice(list("abdeilmnorstu"), 7)).capitalize()
        both = (" und ".join(NOUNS[d] for d in digits), " and ".join(ENGLISH[d] for d in digits))
        found.append((f"{both[0]} {name}.", f"{both[1]} {name}."))
    return found


def write(folder: Path, pairs: Sequence[tuple[str, str]], name: str = "corpus") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.de").write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
    (folder / f"{name}.en").write_text("".join(f"{target}\n" for _, target in pairs), encoding="utf-8")
    return folder / name


def prepare(source: Path | list[Path], output: Path, *options: str) -> int:
    paths = [str(path) for path in (source if isinstance(source, list) else [source])]
    languages = ["--source-lang", "de", "--target-lang", "en"]
    return main(["pairs", "--source", *paths, *languages, "--output", str(output), *options])


def texts(prefix: Path, split: str) -> list[tuple[str, str]]:
    sides = [Path(f"{prefix}-{split}.{side}.txt").read_text(encoding="utf-8").split("\n")[:-1] for side in SIDES]
    return list(zip(*sides, strict=True))


def all_texts(prefix: Path) -> set[tuple[str, str]]:
    return {pair for split in SPLITS for pair in texts(prefix, split)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_sentence_lies_beside_its_translation_as_tokens_and_as_text(tmp_path: Path) -> None:
    pairs = numbered(300)
    assert prepare(write(tmp_path / "in", pairs), tmp_path / "out" / "x", "--train-bpe", "300") == 0
    prefix = tmp_path / "out" / "x"
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    assert {key: manifest[key] for key in ("version", "kind", "source", "target", "vocab_size", "made_by")} == {
        "version": 1, "kind": "pairs", "source": "de", "target": "en", "vocab_size": 300, "made_by": "tdpp data pairs",
    }  # fmt: skip
    assert all_texts(prefix) == set(pairs)
    tokenizer = Tokenizer.from_file(f"{prefix}.tokenizer.json")
    assert [tokenizer.id_to_token(number) for number in range(4)] == ["<pad>", "<unk>", "<s>", "</s>"]
    for split in SPLITS:
        sides = [IndexedDataset(f"{prefix}-{split}.{side}") for side in SIDES]
        written = texts(prefix, split)
        assert len(written) == len(sides[0]) == len(sides[1]) == manifest["splits"][split]["pairs"] > 0
        for number, pair in enumerate(written):
            assert tuple(tokenizer.decode(side[number].tolist()) for side in sides) == pair
        assert manifest["splits"][split] == {
            "pairs": len(written),
            "source_tokens": len(sides[0].tokens),
            "target_tokens": len(sides[1].tokens),
            "longest": max(int(side.lengths.max()) for side in sides),
        }
        assert min(int(side.tokens.min()) for side in sides) > 3


def test_pairs_that_are_there_are_left_alone_and_others_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, prefix = write(tmp_path / "in", numbered(100)), tmp_path / "x"
    prepare(source, prefix)
    before = Path(f"{prefix}.json").stat().st_ino
    capsys.readouterr()
    prepare(source, prefix)
    out, err = capsys.readouterr()
    assert out == f"{prefix}\n"
    assert "exists already, unchanged; --force makes it again" in err
    assert Path(f"{prefix}.json").stat().st_ino == before
    prepare(source, prefix, "--seed", "2")
    assert Path(f"{prefix}.json").stat().st_ino != before
    Path(f"{prefix}-train.source.bin").write_bytes(b"")
    prepare(source, prefix, "--seed", "2")
    assert Path(f"{prefix}-train.source.bin").stat().st_size > 0


@pytest.mark.slow
def test_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    source = write(tmp_path / "in", numbered(5000))
    for workers in ("1", "3"):
        prepare(source, tmp_path / workers / "x", "--workers", workers, "--train-bpe", "300")
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_what_is_unfit_is_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfit = [
        ("", "empty"), ("leer", "  "), ("Same", "Same"), ("kurz", "short"), ("ein zwei " * 30, "one two " * 30),
        ("ein zwei", "one two three four five six seven"), ("  Hund  und\tBaum ", "dog and tree"),
    ]  # fmt: skip
    source = write(tmp_path / "in", [*numbered(100), *unfit, ("Hund und Baum", "dog and tree")])
    prepare(source, tmp_path / "x", "--min-words", "2", "--max-words", "50", "--max-ratio", "3", "--split", "1,0,0")
    assert json.loads((tmp_path / "x.json").read_text())["left_out"] == {
        "empty": 2, "untranslated": 1, "short": 1, "long": 1, "ratio": 1, "duplicate": 1,
    }  # fmt: skip
    assert ("Hund und Baum", "dog and tree") in all_texts(tmp_path / "x")
    assert "2 empty, 1 untranslated, 1 short, 1 long, 1 ratio, 1 duplicate" in capsys.readouterr().err


def test_languages_without_spaces_are_measured_in_characters(tmp_path: Path) -> None:
    pairs = [(source, "我們在山上看見一隻狗和一棵樹"[: 10 + number % 5] + str(number)) for number, (source, _) in
             enumerate(numbered(60))]  # fmt: skip
    prepare(write(tmp_path / "in", pairs), tmp_path / "x", "--min-words", "3", "--split", "1,0,0")
    assert all_texts(tmp_path / "x") == set(pairs)


def test_named_files_are_the_held_out_splits(tmp_path: Path) -> None:
    pairs = numbered(130)
    for name, part in (("train", pairs[:100]), ("dev", pairs[100:110]), ("test", pairs[110:])):
        write(tmp_path / "in", part, name)
    prepare(tmp_path / "in", tmp_path / "x")
    assert [set(texts(tmp_path / "x", split)) for split in SPLITS] == [
        set(pairs[:100]), set(pairs[100:110]), set(pairs[110:]),
    ]  # fmt: skip


def test_training_has_nothing_that_is_nearly_held_out(tmp_path: Path) -> None:
    held = "Der Hund läuft mit dem Ring im Maul über den Berg nach Hause zurück."
    near = ["DER HUND läuft mit dem Ring im Maul über den Berg nach Hause zurück!",
            "Der Hund läuft mit dem Brief im Maul über den Berg nach Hause zurück."]  # fmt: skip
    far = "Der Hund läuft mit dem Brief im Maul durch den Wald zu dem Fluss hinunter."
    write(tmp_path / "in", [(held, "The dog runs home over the hill with the ring.")], "test")
    pairs = [*numbered(30), *((text, f"{number} one thing") for number, text in enumerate([*near, far]))]
    write(tmp_path / "in", [*pairs, ("Zu Hause ist es.", "The dog runs home over the hill with the ring!")], "train")
    prepare(tmp_path / "in", tmp_path / "x", "--split", "1,0,0", "--max-ratio", "9")
    assert set(texts(tmp_path / "x", "train")) == {*numbered(30), (far, "2 one thing")}
    assert json.loads((tmp_path / "x.json").read_text())["left_out"] == {"near-duplicate": 3}


def test_the_index_of_near_duplicates_equals_comparing_all_with_all() -> None:
    rng = np.random.default_rng(5)
    vocabulary = [f"w{number}" for number in range(12)]
    sentences = [" ".join(rng.choice(vocabulary, rng.integers(1, 14))) for _ in range(700)]
    held, others = sentences[:100], sentences[100:]
    for sentence in list(held):  # some that are nearly the same
        found = sentence.split()
        found[int(rng.integers(len(found)))] = "new"
        others.append(" ".join(found))
    index = Sentences.of(held)
    for sentence in others:
        near = any(jaccard(runs(sentence), runs(one)) >= THRESHOLD for one in held)
        assert index.nearly_has(sentence) == near
    assert 10 < sum(index.nearly_has(sentence) for sentence in others) < len(others) - 10


def test_sentences_without_words_are_near_nothing() -> None:
    held = HeldOut.of([Pair("...", "!?"), Pair("", "")])
    assert not held.nearly_has(Pair("...", "---"))


def test_pairs_that_are_all_held_out_are_one_message(tmp_path: Path) -> None:
    source = write(tmp_path / "in", numbered(60), "dev")
    with pytest.raises(DataPrepError, match="every pair is held out, by the name of its file"):
        prepare(source, tmp_path / "out" / "x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--train-bpe", "5000"],
            r"--train-bpe 5000: the training pairs give only \d+ ids; take .* or less",
        ),
        (["--train-bpe", "200"], "--train-bpe 200: the bytes and the special tokens take 260 ids"),
        (["--max-ratio", "1", "--min-words", "20"], r"no pair is left \(60 short\); .*loosen --min-words"),
        (["--max-ratio", "0.5"], "--max-ratio 0.5: must be 1 or more"),
        (["--min-words", "9", "--max-words", "8"], "--min-words 9 is more than --max-words 8"),
        (["--split", "0,1,1"], "--split .*must be three weights"),
        (["--source-lang", "en"], "are the same language"),
        (["--source-lang", "Deutsch!"], "--source-lang Deutsch!: not the code of a language"),
        (["--source-lang", "fr"], r"there is no .*corpus\.fr"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_asked_for_is_one_message(tmp_path: Path, options: list[str], message: str) -> None:
    source = write(tmp_path / "in", numbered(60))
    with pytest.raises(DataPrepError, match=message):
        prepare(source, tmp_path / "out" / "x", *options)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_tokenizer_of_other_pairs_is_taken_and_another_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in", numbered(100))
    prepare(source, tmp_path / "a", "--train-bpe", "300")
    prepare(source, tmp_path / "b", "--tokenizer", str(tmp_path / "a.tokenizer.json"), "--seed", "3")
    assert (tmp_path / "a.tokenizer.json").read_bytes() == (tmp_path / "b.tokenizer.json").read_bytes()
    content = json.loads((tmp_path / "a.tokenizer.json").read_text())
    content["model"]["vocab"]["<pad>"], content["model"]["vocab"]["<unk>"] = 1, 0
    for token in content["added_tokens"][:2]:
        token["id"] = 1 - token["id"]
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(DataPrepError, match=r"other\.json: <pad> has the id 1, but pairs need <pad>, <unk>"):
        prepare(source, tmp_path / "c", "--tokenizer", str(tmp_path / "other.json"))


def test_data_of_another_kind_are_replaced_only_when_asked(tmp_path: Path) -> None:
    source = write(tmp_path / "in", numbered(60))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataPrepError, match=r"x\.json is there, and is not of pairs; choose another --output"):
        prepare(source, tmp_path / "x")
    assert prepare(source, tmp_path / "x", "--force") == 0
