"""Data of sentences, as BERT and T5 read them: where sentences end, what is written, and what keeps them from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from data_prep.errors import DataPrepError
from data_prep.indexed.manifest import tokenizer_of
from data_prep.preparation import prepare as preparation
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import corpus_of
from data_prep.text.encode import Options, sentences
from data_prep.tokenizers.special import vocabulary_of, with_special
from data_prep.tokenizers.tokenizer import JsonTokenizer, content_of, train_bpe
from data_prep.training import check_for_training
from launch.commands.data import main
from megatron_ext.contract.plan_parts import Masking
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from megatron_ext.data.masked.bert_samples import BertSamples
from megatron_ext.data.masked.sentence_maps import saved_sentence_maps
from megatron_ext.data.masked.vocabulary import VOCABULARY, Vocabulary
from megatron_ext.data.samples import Split

TEXT = "The first sentence is short. The second asks: is it? Dr. Jones says so!\n\nA heading\n\nThe last one"
SENTENCES = [
    "The first sentence is short.",
    "The second asks: is it?",
    "Dr. Jones says so!",
    "A heading",
    "The last one",
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty documents of five sentences, one of spaces, and one of a single sentence."""
    path = tmp_path / "texts.jsonl"
    texts = [*(f"Number {n} is here. {TEXT}" for n in range(40)), " \n ", "One alone."]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def prepared(source: Path, *options: str) -> Path:
    output = source.parent / "out" / "text"
    given = ["--source", str(source), "--output", str(output), "--split-sentences", "--workers", "1"]
    assert main(["prepare", *given, *(options or ("--train-wordpiece", "150"))]) == 0
    return output.with_name("text_text_sentence")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT, SENTENCES),
        ("", []),
        (" \n\n ", []),
        ("no end", ["no end"]),
        ("It is 3.14, e.g. here. Yes.", ["It is 3.14, e.g. here.", "Yes."]),
        ("J. R. Smith came. So did I. He left.", ["J. R. Smith came.", "So did I.", "He left."]),
        ('"Really?" he asked. "Yes!" (So.) Well', ['"Really?" he asked.', '"Yes!"', "(So.)", "Well"]),
        ("Wait... what? Wait… No.", ["Wait... what?", "Wait…", "No."]),
        ("你好。今天好吗？很好！", ["你好。", "今天好吗？", "很好！"]),
        ("Über allem. Ähnlich.", ["Über allem.", "Ähnlich."]),
        ("One line\nand its end. 2 is next.", ["One line\nand its end.", "2 is next."]),
    ],
)
def test_sentences_end_where_a_reader_would_say(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@given(st.text(alphabet="aB .!?…\n\"'(。", max_size=80))
def test_no_text_is_lost_or_changes_places(text: str) -> None:
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())


def test_each_sentence_is_a_sequence_and_each_text_a_document(source: Path) -> None:
    prefix = prepared(source)
    data, content = IndexedDataset(prefix), content_of(data_file(prefix, ".tokenizer.json"))
    tokenizer = JsonTokenizer(content, "[SEP]")
    assert (data.documents, len(data)) == (41, 40 * 6 + 1)
    assert np.diff(data.boundaries).tolist() == [6] * 40 + [1]
    found = [tokenizer.decode(data[sequence]) for sequence in range(6)]
    plain = [text.replace(" ", "") for text in ("number 0 is here.", *(text.lower() for text in SENTENCES))]
    assert [text.replace(" ", "") for text in found] == plain
    special = set(range(5)) | {148, 149}
    assert not special & set(data.tokens.tolist())


def test_the_vocabulary_beside_the_data_says_what_its_tokens_mean(source: Path) -> None:
    prefix = prepared(source, "--train-wordpiece", "160", "--vocab-extra-ids", "10")
    found = Vocabulary.read(prefix)
    ids = json.loads(content_of(data_file(prefix, ".tokenizer.json")))["model"]["vocab"]
    assert found.size <= 160
    assert (found.pad, found.cls, found.sep, found.mask) == (0, 2, 3, 4)
    assert [found.bos, found.eos, *found.sentinels] == list(range(found.size - 12, found.size))
    assert found.continues == sorted(number for token, number in ids.items() if token.startswith("##"))
    assert found.continues


def test_berts_own_vocabulary_gets_what_megatron_adds(source: Path, tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "one", "##s", "alone", "."]
    for case, tokens in (("lower", words), ("cased", [*words, "Number"])):
        (path := tmp_path / f"{case}.txt").write_text("\n".join(tokens) + "\n")
        prefix = prepared(source, "--vocab-file", str(path), "--vocab-extra-ids", "3")
        found, size = Vocabulary.read(prefix), len(tokens)
        assert (found.bos, found.eos, found.sentinels) == (size, size + 1, [size + 2, size + 3, size + 4])
        assert found.continues == [7]
        data = IndexedDataset(prefix)
        assert data[len(data) - 1].tolist() == ([6, 8, 9] if case == "lower" else [1, 8, 9])


def test_tokens_of_a_byte_level_bpe_go_on_with_a_word_unless_a_space_precedes_them() -> None:
    tokenizer = with_special(train_bpe([TEXT] * 9, 320).content, 2)
    found, ids = vocabulary_of(tokenizer), json.loads(tokenizer.content)["model"]["vocab"]
    goes_on = set(found.continues)
    assert {ids["e"], ids["x"]} <= goes_on
    assert not {ids["Ġ"], ids["."], ids["Ġsentence"], found.cls, *found.sentinels} & goes_on


def test_what_is_interrupted_goes_on_with_the_same_bytes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_special(train_bpe([TEXT], 300).content, 0)
    options = Options(split_sentences=True, unique=True)
    request = Request(corpus=corpus_of([source]), tokenizer=tokenizer, options=options)
    whole, cut = source.parent / "whole", source.parent / "cut"
    prepare(request, whole)
    monkeypatch.setattr("data_prep.preparation.prepare.DOCUMENTS", 7)
    monkeypatch.setattr("data_prep.files.journal.SAVE_EVERY_S", 0.0)
    encode, calls = preparation.encode, []

    def interrupted(*given: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(preparation, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(request, cut)
    assert not data_file(cut, ".bin").exists()
    prepare(request, cut)
    for suffix in (".bin", ".idx", VOCABULARY):
        assert data_file(cut, suffix).read_bytes() == data_file(whole, suffix).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "byte"], "--split-sentences needs a tokenizer with special tokens, .*--train-wordpiece 30000"),
        (["--train-wordpiece", "60"], "--train-wordpiece 60: letters and special tokens .* take 71 ids"),
        (["--train-bpe", "260"], "--train-bpe 260: the bytes .* with all special tokens take 264 ids"),
        (["--train-bpe", "300", "--end-of-document", "x"], "--end-of-document x is for .* and not for sentences"),
    ],
    ids=["bytes", "few words", "few ids", "an end"],
)
def test_options_that_contradict_each_other_are_refused(source: Path, options: list[str], message: str) -> None:
    with pytest.raises(DataPrepError, match=message):
        prepared(source, *options)


def test_sentinels_are_for_sentences(source: Path) -> None:
    given = ["--source", str(source), "--output", str(source.parent / "x"), "--vocab-extra-ids", "3"]
    with pytest.raises(DataPrepError, match=r"--vocab-extra-ids 3 is for data of sentences"):
        main(["prepare", *given])


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "one part"])
def test_inspect_prints_what_a_bert_reads_and_is_to_find(
    source: Path, capsys: pytest.CaptureFixture[str], pairs: bool
) -> None:
    prefix = prepared(source)
    sizes = [
        "--sequence-length",
        "48",
        "--samples",
        "30",
        "--seed",
        "7",
        "--split",
        "1,0,0",
        "--set",
        "data.mask_prob=0.3",
    ]
    masking = Masking(0.3, 0.1, 3, True, False, False)
    size = Vocabulary.read(prefix).size
    run = BertSamples(prefix, Split(30, 7, cache=str(source.parent / "cache")), 48, size, masking, pairs)
    tokenizer = tokenizer_of(prefix)
    before = {path.name for path in prefix.parent.iterdir()}
    for number in (0, 29):
        capsys.readouterr()
        more = [] if pairs else ["--set", "model.bert_binary_head=false"]
        assert main(["inspect", str(prefix), "--sample", str(number), "--family", "bert", *sizes, *more]) == 0
        text, found, *second = capsys.readouterr().out.splitlines()
        sample = run.sample(number)
        assert text.startswith("text: [CLS] ")
        assert text.endswith(" [SEP]")
        assert text.count("[SEP]") == (2 if pairs else 1)
        places = np.flatnonzero(sample["loss_mask"])
        hidden = [f"{place} {tokenizer.decode(sample['labels'][[place]])!r}" for place in places]
        assert found == f"to predict: {', '.join(hidden)}"
        order = "preceded the first" if sample["is_random"] else "follows the first"
        assert second == [f"the second part {order} in the text"] * pairs
    assert {path.name for path in prefix.parent.iterdir()} == before


def test_inspect_prints_what_a_t5_reads_and_writes(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = prepared(source, "--train-wordpiece", "250", "--vocab-extra-ids", "20")
    capsys.readouterr()
    sizes = ["--sequence-length", "64", "--split", "1,0,0", "--set", "model.decoder_sequence_length=60"]
    assert main(["inspect", str(prefix), "--sample", "3", "--family", "t5", *sizes]) == 0
    encoder, decoder = capsys.readouterr().out.splitlines()
    read, written = encoder[len("encoder: ") :], decoder[len("decoder: ") :]
    assert written.endswith(" [EOS]")
    spans = re.findall(r"\[(\d+)\] (.*?)(?= \[)", written)
    assert [int(number) for number, _ in spans] == list(range(len(spans)))
    assert spans
    for number, span in spans:
        read = read.replace(f"[{number}]", span)
    whole = "".join(json.loads(line)["text"] for line in source.read_text().splitlines()).lower()
    squeezed = "".join(read.replace("##", "").split())
    assert squeezed in "".join(whole.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "t5"], r"--sample 0: .*no sentinels"),
        (["--family", "bert", "--set", "data.mask_prob=2"], r"--sample 0: data\.mask_prob=2"),
        (["--family", "bert", "--set", "data.mask=2"], r"--sample 0: .*mask"),
        (["--set", "data.mask_prob=0.2"], r"--set data\.mask_prob=0\.2: applies only to --family bert and t5"),
        (["--family", "bert", "--sequence-length", "4"], r"--sample 0: .*samples have room for 1 tokens"),
    ],
    ids=["no sentinels", "a value that cannot be", "no such key", "gpt", "too short"],
)
def test_a_masked_sample_that_no_run_has_is_refused(source: Path, options: list[str], message: str) -> None:
    prefix = prepared(source)
    with pytest.raises(DataPrepError, match=message):
        main(["inspect", str(prefix), "--sample", "0", *options])


def test_check_merge_and_split_know_sentences(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = prepared(source)
    capsys.readouterr()
    assert main(["check", str(prefix)]) == 0
    assert capsys.readouterr().out.startswith(f"{prefix}: sound, 41 documents, 241 sentences, ")
    main(["split", str(prefix), "--weights", "3,1", "--output", str(prefix.parent / "part")])
    parts = capsys.readouterr().out.split()
    assert [Path(part).name for part in parts] == ["part-0_text_sentence", "part-1_text_sentence"]
    main(["merge", *parts, "--output", str(prefix.parent / "again")])
    again = Path(capsys.readouterr().out.strip())
    for suffix in (".bin", ".idx", VOCABULARY):
        assert data_file(again, suffix).read_bytes() == data_file(prefix, suffix).read_bytes()
    content = data_file(prefix, VOCABULARY).read_text()
    data_file(prefix, VOCABULARY).write_text(content.replace('"cls": 2', '"cls": 3'))
    with pytest.raises(DataPrepError, match="the files are not those that the manifest describes"):
        main(["check", str(prefix)])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=bert-tiny"], None),
        (["model=t5-tiny"], r"no sentinels, .*--vocab-extra-ids 100"),
        (
            ["model=bert-tiny", "model.vocab_size=20"],
            r"vocabulary of \d+ .*; set model\.vocab_size=",
        ),
        (["model=bert-tiny", "model.sequence_length=4"], r"samples have room for 1 tokens .*model\.sequence_length"),
    ],
    ids=["sound", "no sentinels", "another vocabulary", "too short"],
)
def test_a_launch_is_refused_when_its_sentences_cannot_feed_it(
    source: Path, overrides: list[str], message: str | None
) -> None:
    prefix = prepared(source)
    experiment = compose(["experiment=demo", f"data.prefix={prefix}", *overrides])
    if message is None:
        check_for_training(experiment)
        data_file(prefix, VOCABULARY).unlink()
        message = r"no such file, which describes the tokens of the data"
    with pytest.raises(DataPrepError, match=message):
        check_for_training(experiment)


def test_a_launch_says_when_most_documents_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join([TEXT.replace("\n\n", ". "), *["Only one sentence."] * 9]))
    prefix = prepared(path, "--train-wordpiece", "150", "--documents", "paragraph")
    common = ["experiment=demo", f"data.prefix={prefix}", "data.split='1,0,0'", "model.vocab_size=150"]
    message = "only 1 of 10 training documents are used; the others have fewer than 2 sentences"
    assert any(message in doubt for doubt in check_for_training(compose([*common, "model=bert-tiny"])))
    alone = ["model=bert-tiny", "model.bert_binary_head=false"]
    assert check_for_training(compose([*common, *alone])) == []


def test_maps_of_replaced_data_go_away(source: Path) -> None:
    prefix = prepared(source)
    stale = prefix.with_name(f"{prefix.name}_train_indexmap_8mns_61msl_0.10ssp_1s.npy")
    stale.touch()
    assert saved_sentence_maps(prefix) == [stale]
    prepared(source, "--train-wordpiece", "140")
    assert saved_sentence_maps(prefix) == []
