"""BERT's and T5's samples: what they hold, their order, and what keeps them from being made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.plan_parts import Masking
from megatron_ext.data.blend import BlendedSamples
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file, indexed_writer
from megatron_ext.data.masked.bert_samples import BertSamples
from megatron_ext.data.masked.sentence_maps import Cut, build_or_load, compute, saved_sentence_maps
from megatron_ext.data.masked.t5_samples import T5Samples
from megatron_ext.data.masked.vocabulary import VOCABULARY, Vocabulary
from megatron_ext.data.samples import SPLITS, Samples, Split
from tests.support.megatron_ext.sentences import SENTINELS, write_sentences

MASKING = Masking(0.15, 0.1, 3, full_word=True, longer_ngrams=False, geometric=False)
SPANS = replace(MASKING, max_ngram=10, geometric=True)
SEQUENCE, VOCAB, SAMPLES, SEED = 48, 120, 200, 1234
WHOLE = Split(SAMPLES, SEED)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_sentences(tmp_path / "text", 0, documents=40, text=range(6, VOCAB - SENTINELS))
    return tmp_path / "text"


def bert(prefix: Path | str, split: Split = WHOLE, pairs: bool = True) -> BertSamples:
    return BertSamples(prefix, split, SEQUENCE, VOCAB, MASKING, pairs)


def t5(prefix: Path | str, split: Split = WHOLE) -> T5Samples:
    return T5Samples(prefix, split, SEQUENCE, SEQUENCE, VOCAB, SPANS)


def digest(samples: Samples) -> str:
    batch = samples.batch(np.arange(SAMPLES))
    return hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()[:16]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("bert", "37fce8fba58279d2"), ("one part", "19b60382787d7c4a"), ("t5", "6014e0b5c6bbafcd")],
)
def test_samples_stay_those_that_were_held_against_megatrons(prefix: Path, kind: str, expected: str) -> None:
    samples = {"bert": bert, "one part": lambda prefix: bert(prefix, pairs=False), "t5": t5}[kind](prefix)
    assert digest(samples) == expected


def test_a_bert_sample_is_two_parts_of_a_text_some_tokens_of_which_are_hidden(prefix: Path) -> None:
    data, samples = IndexedDataset(prefix), bert(prefix)
    batch = samples.batch(np.arange(SAMPLES))
    for number in range(SAMPLES):
        sample = {name: content[number] for name, content in batch.items()}
        first, stop, aim = samples._map[number].tolist()
        text = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])
        part = [text[(sample["types"] == kind) & (sample["padding_mask"] == 1)] for kind in (0, 1)]
        assert part[0][0] == 1 and part[0][-1] == 2 and part[1][-1:].tolist() in ([], [2])
        assert len(part[0][1:-1]) + len(part[1][:-1]) <= aim
        if not sample["truncated"]:
            parts = [part[0][1:-1], part[1][:-1]]
            original = np.concatenate([data[sentence] for sentence in range(first, stop)])
            np.testing.assert_array_equal(np.concatenate(parts[::-1] if sample["is_random"] else parts), original)
        hidden = int(sample["loss_mask"].sum())
        assert hidden <= max(1, round(0.15 * (len(part[0]) + len(part[1]))))
        assert (sample["labels"][sample["loss_mask"] == 0] == -1).all()
    share = (batch["text"] == 3)[batch["loss_mask"] == 1].mean()
    assert 0.75 < share < 0.85
    assert 0.4 < batch["is_random"].mean() < 0.6


def test_a_t5_decoder_writes_what_the_encoder_lacks(prefix: Path) -> None:
    data, samples = IndexedDataset(prefix), t5(prefix)
    sentinels = set(samples._vocabulary.sentinels)
    for number in range(SAMPLES):
        sample = samples.sample(number)
        first, stop, aim = samples._map[number].tolist()
        original = np.concatenate([data[sentence] for sentence in range(first, stop)])[:aim].tolist()
        written = sample["labels"][sample["loss_mask"] == 1].tolist()
        assert sample["text_dec"][sample["loss_mask"] == 1].tolist() == [4, *written[:-1]]
        assert written[-1] == 5
        spans: dict[int, list[int]] = {}
        for token in written[:-1]:
            if token in sentinels:
                spans[token] = []
            else:
                spans[next(reversed(spans))].append(token)
        read = sample["text_enc"][sample["enc_mask"] == 1].tolist()
        assert [part for token in read for part in spans.get(token, [token])] == original


@pytest.mark.parametrize("make", [bert, t5])
def test_each_split_has_documents_and_numbers_of_its_own(prefix: Path, make) -> None:
    boundaries, numbers = IndexedDataset(prefix).boundaries, []
    for name, documents in zip(SPLITS, (range(20), range(20, 30), range(30, 40)), strict=True):
        samples = make(prefix, Split(20, SEED, (2, 1, 1), name))
        assert samples._map[:, 0].min() >= boundaries[documents.start]
        assert samples._map[:, 1].max() <= boundaries[documents.stop]
        numbers.append(samples.batch(np.arange(20))["number"])
    assert len(np.unique(numbers)) == 60


def test_corpora_are_blended_as_gpts_are(tmp_path: Path) -> None:
    prefixes = [tmp_path / "a", tmp_path / "b"]
    for seed, prefix in enumerate(prefixes):
        write_sentences(prefix, seed)
    blended = BlendedSamples(prefixes, [0.7, 0.3], WHOLE, bert)
    batch = blended.batch(np.arange(SAMPLES))
    for corpus, share in enumerate((140, 60)):
        own = np.flatnonzero(blended._maps.dataset_idx == corpus)
        assert abs(len(own) - share) <= 1
        alone = bert(prefixes[corpus], WHOLE._replace(samples=len(own) + 2))
        np.testing.assert_array_equal(batch["text"][own[0]], alone.sample(0)["text"])
    assert {key for key in blended.order if key.endswith("mask_prob")} == {"0.mask_prob", "1.mask_prob"}


def test_a_map_lies_under_a_name_of_its_own_and_is_found_again(prefix: Path, tmp_path: Path) -> None:
    bert(prefix)
    (file,) = saved_sentence_maps(prefix)
    assert file.name.startswith("text_train_indexmap_200mns_45msl_0.10ssp_1234s_")
    before = file.stat().st_mtime_ns
    bert(prefix)
    bert(prefix, WHOLE._replace(cache=str(tmp_path / "cache")))
    assert (file.stat().st_mtime_ns, len(list((tmp_path / "cache").iterdir()))) == (before, 1)
    write_sentences(prefix, 9)
    bert(prefix)
    assert len(saved_sentence_maps(prefix)) == 2


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((7, 0), 10**6, r"expected sentences 0 to \d+ in sample 7, found 1000000 to .*"),
        ((7, 2), 1, r"expected an aim of 2 to 45 tokens in sample 7, found 1"),
        ((7, 2), 46, r"expected an aim of 2 to 45 tokens in sample 7, found 46"),
        ((7, 1), None, r"expected sentence \d+ \d+ times, found \d+ times"),
        (None, slice(10, None), r"expected uint32 \[200 or more, 3\], found uint32 \[\d+, 3\]"),
    ],
    ids=["outside", "an aim too small", "an aim too large", "another end", "too few"],
)
def test_a_damaged_map_is_named_with_the_way_out(prefix: Path, place, value, message: str) -> None:
    bert(prefix)
    (file,) = saved_sentence_maps(prefix)
    content = np.load(file)
    if place is None:
        content = content[: SAMPLES - 1]
    else:
        content[place] = value if value is not None else content[place] - 1
    np.save(file, content)
    with pytest.raises(DataError, match=rf"{file.name}: this sentence map was made for .*{message}; delete it"):
        bert(prefix)


def test_a_map_cut_short_is_named(prefix: Path) -> None:
    t5(prefix)
    (file,) = saved_sentence_maps(prefix)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match=f"{file.name}: this index map cannot be read"):
        t5(prefix)


def test_data_without_sentences_say_how_to_make_some(tmp_path: Path) -> None:
    with indexed_writer(tmp_path / "text", np.dtype("<u2"), np.array([0, 1, 2, 5])) as writer:
        for length in (3, 3, 3, 600, 3):
            writer.add(np.ones(length, np.int64))
    vocabulary = Vocabulary(VOCAB, 1, 2, 3, 0, 4, 5, [7], [])
    data_file(tmp_path / "text", VOCABULARY).write_text(vocabulary.to_json())
    message = (
        r"text\.bin: no document of the train split gives a sample: of 3 \(of 3\), 2 lack two sentences or more, and 1 "
        r"have a sentence of more than 512 tokens; .*--split-sentences"
    )
    with pytest.raises(DataError, match=message):
        bert(tmp_path / "text")
    assert len(t5(tmp_path / "text")) == SAMPLES  # takes documents of one sentence


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, r"no such file, .*\[CLS\].*tdpp data prepare --split-sentences"),
        (lambda path: path.write_text("{"), "not a description of a vocabulary, or damaged"),
        (lambda path: path.write_text('{"version": 2}'), "expected version 1"),
        (lambda path: edit(path, size=0), "size is 0"),
        (lambda path: edit(path, cls=VOCAB), "cls has 120, which is not an id below size=120"),
        (lambda path: edit(path, continues=[1, -1]), "continues has -1"),
        (lambda path: edit(path, sentinels=3), "sentinels is 3"),
        (lambda path: edit(path, mask=None), "the tokenizer has no token for 'mask'"),
    ],
    ids=["missing", "no JSON", "another version", "no size", "an id too large", "no id", "no list", "no mask"],
)
@pytest.mark.parametrize("make", [bert, t5])
def test_a_vocabulary_that_cannot_be_used_is_one_message(prefix: Path, make, spoil, message: str) -> None:
    spoil(data_file(prefix, VOCABULARY))
    with pytest.raises(DataError, match=rf"text\.vocabulary\.json: .*{message}"):
        make(prefix)


def edit(path: Path, **changed: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_t5_needs_sentinels_and_bert_none(prefix: Path) -> None:
    edit(data_file(prefix, VOCABULARY), sentinels=[])
    assert bert(prefix).sample(0)
    with pytest.raises(DataError, match=r"no sentinels, .*--vocab-extra-ids 100"):
        t5(prefix)


def test_more_spans_than_sentinels_and_longer_results_than_a_decoder_takes_name_the_sample(prefix: Path) -> None:
    every = replace(MASKING, mask_prob=0.9, max_ngram=1)
    short = T5Samples(prefix, WHOLE, SEQUENCE, 8, VOCAB, replace(SPANS, mask_prob=0.9))
    with pytest.raises(DataError, match=r"sample \d+ takes \d+ tokens, but model\.decoder_sequence_length=8; "):
        short.batch(np.arange(SAMPLES))
    edit(data_file(prefix, VOCABULARY), sentinels=[118, 119])
    few = T5Samples(prefix, WHOLE, SEQUENCE, 2 * SEQUENCE, VOCAB, every)
    with pytest.raises(DataError, match=r"sample \d+ has \d+ spans, but the tokenizer has 2 sentinels; .*extra-ids"):
        few.batch(np.arange(SAMPLES))


@pytest.mark.parametrize("make", [bert, t5])
def test_other_words_than_the_models_are_refused(prefix: Path, make) -> None:
    edit(data_file(prefix, VOCABULARY), size=VOCAB + 1)
    with pytest.raises(DataError, match=r"a vocabulary of 121, but model\.vocab_size=120; set model\.vocab_size=121"):
        make(prefix)
    edit(data_file(prefix, VOCABULARY), size=90, sentinels=list(range(6, 26)), continues=[])
    with pytest.raises(DataError, match=r"text\.bin: sentence \d+ has token id 9\d, .* allows 0 to 89"):
        make(prefix).batch(np.arange(SAMPLES))


def test_a_map_of_many_epochs_goes_through_every_document_equally_often(prefix: Path) -> None:
    data = IndexedDataset(prefix)
    cut = Cut(3000, 20, 0.3, 7, 1)
    found = build_or_load(prefix, data, range(40), "train", cut)
    np.testing.assert_array_equal(found, compute(data.lengths, data.boundaries, cut))
    times = np.zeros(len(data), np.int64)
    for first, stop, _ in found.tolist():
        times[first:stop] += 1
    assert len(np.unique(times)) == 1
