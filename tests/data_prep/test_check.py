"""A launch is refused when its data cannot feed it, with the way out."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from data_prep.errors import DataPrepError
from data_prep.indexed.check import SAMPLED
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import Corpus
from data_prep.tokenizers.tokenizer import ByteTokenizer, JsonTokenizer, train_bpe
from data_prep.tokenizers.vocabulary import TOKENIZER
from data_prep.training import check_for_training
from megatron_ext.data.blend import BlendedSamples
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.index_maps import saved_maps
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file, write_indexed
from megatron_ext.data.samples import Split
from tests.support.megatron_ext.pairs import write_pairs


@pytest.fixture
def prefix(corpus: Corpus, tmp_path: Path) -> Path:
    prefix = tmp_path / "out" / "text"
    prepare(Request(corpus=corpus, tokenizer=ByteTokenizer()), prefix)
    return prefix


def check(prefix: Path, *overrides: str) -> list[str]:
    return check_for_training(compose([f"data.prefix={prefix}", "data.split='1,0,0'", *overrides]))


def test_prepared_data_feed_the_demo(prefix: Path) -> None:
    check(prefix, "model.vocab_size=257")


def test_data_of_others_need_no_manifest(prefix: Path) -> None:
    data_file(prefix, ".json").unlink()
    check(prefix)


def test_every_corpus_of_a_blend_is_checked(prefix: Path) -> None:
    with pytest.raises(DataPrepError, match=r"data\.blend\[0\]\.prefix=gone: /.*/gone\.bin is not there"):
        check(prefix, "model.vocab_size=257", "data.blend=[{prefix:gone}]")


def test_a_corpus_that_a_link_leads_to_is_not_blended_with_itself(prefix: Path, tmp_path: Path) -> None:
    for ending in (".bin", ".idx"):
        data_file(tmp_path / "other", ending).symlink_to(data_file(prefix, ending))
    message = rf"data\.blend\[0\]\.prefix={tmp_path}/other is the same data as {prefix}; give it the weight of both"
    with pytest.raises(DataPrepError, match=message):
        check(prefix, "model.vocab_size=257", "data.split='1,0,0'", f"data.blend=[{{prefix:{tmp_path}/other}}]")


def test_corpora_of_a_blend_must_be_of_one_vocabulary(corpus: Corpus, tmp_path: Path) -> None:
    library = [path.read_text(encoding="utf-8") for path in corpus.files]
    first, second = train_bpe(library, 260), train_bpe([text[::-1] for text in library], 260)
    respelt = JsonTokenizer(json.dumps(json.loads(first.content), indent=1))
    made = {"bytes": ByteTokenizer(), "first": first, "respelt": respelt, "second": second}
    for name, tokenizer in made.items():
        prepare(Request(corpus=corpus, tokenizer=tokenizer), tmp_path / name)
    write_indexed(tmp_path / "others", [np.arange(200)] * 3, np.dtype("<u2"))

    def blend(prefix: str, *further: str) -> None:
        corpora = ",".join(f"{{prefix:{tmp_path / name}}}" for name in further)
        check(tmp_path / prefix, "model.vocab_size=260", f"data.blend=[{corpora}]")

    blend("others", "first", "respelt")
    blend("bytes", "others")
    for pair in (("first", "second"), ("first", "bytes"), ("bytes", "first")):
        with pytest.raises(DataPrepError, match=r"data\.blend\[0\]\.prefix=.* was made with another tokenizer than"):
            blend(*pair)
    with pytest.raises(DataPrepError, match=r"data\.blend\[1\]\.prefix=.*--tokenizer .*first\.tokenizer\.json"):
        blend("others", "first", "second")
    data_file(tmp_path / "second", TOKENIZER).write_text("{}")
    with pytest.raises(DataPrepError, match=r"second\.tokenizer\.json: not the tokenizer that its data were made"):
        blend("first", "second")


@pytest.mark.parametrize("blended", [False, True], ids=["alone", "blended"])
def test_damaged_index_maps_are_refused_before_anything_is_submitted(prefix: Path, blended: bool) -> None:
    other = prefix.with_name("other")
    write_indexed(other, [np.arange(200)] * 50, np.dtype("<u2"))
    blend = [f"data.blend=[{{prefix:{other},weight:0.3}}]", "data.weight=0.7"] if blended else []
    one = compose([f"data.prefix={prefix}", "data.split='1,0,0'", "model.vocab_size=257", *blend])
    whole = Split(one.parallel.global_batch_size * one.train.iterations, one.train.seed)
    make = partial(GptSamples, sequence_length=one.model.sequence_length, vocab_size=257)
    if blended:
        BlendedSamples([prefix, other], [0.7, 0.3], whole, make)
    else:
        make(prefix, whole)
    check_for_training(one)
    changed = other if blended else prefix
    for file in saved_maps(changed):
        np.save(file, np.load(file)[:-1])
    message = r"train_indexmap_.*_doc_idx\.npy: this index map was made for .*, or is damaged: .*; delete it"
    with pytest.raises(DataPrepError, match=message):
        check_for_training(one)
    write_indexed(changed, [np.arange(100)] * 40, np.dtype("<u2"))
    data_file(prefix, ".json").unlink()
    check_for_training(one)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_data_come_with_the_command_that_makes_some(prefix: Path, suffix: str) -> None:
    data_file(prefix, suffix).unlink()
    with pytest.raises(DataPrepError, match=rf"data\.prefix=.*text\{suffix} is not there; 'tdpp data prepare --source"):
        check(prefix)


def test_damaged_data_are_told_under_their_key(prefix: Path) -> None:
    data_file(prefix, ".bin").write_bytes(b"")
    with pytest.raises(DataPrepError, match=r"data\.prefix=.*: .*text\.bin: expected \d+ bytes, as .* but found 0"):
        check(prefix)


def test_a_vocabulary_too_small_for_the_data_is_refused(prefix: Path) -> None:
    message = r"made with a vocabulary of 257 \(byte\), but model\.vocab_size=256; set model\.vocab_size=257"
    with pytest.raises(DataPrepError, match=message):
        check(prefix, "model.vocab_size=256")


def test_ids_beyond_the_vocabulary_are_found_in_data_of_others(tmp_path: Path) -> None:
    """Also at the very end of data that are not looked at in full."""
    places, size = SAMPLED
    several = [np.full(size, 7)] * (2 * places)
    several[-1] = np.append(several[-1][:-1], 300)
    for documents in (several, [np.arange(301)]):
        write_indexed(tmp_path / "others", documents, np.dtype("<u2"))
        message = (
            r"data\.prefix=.*others has token ids up to 300, but model\.vocab_size=300; set model\.vocab_size to that"
        )
        with pytest.raises(DataPrepError, match=message):
            check(tmp_path / "others", "model.vocab_size=300")
        assert check(tmp_path / "others", "model.vocab_size=301") == []


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "ids"])
def test_a_vocabulary_far_larger_than_the_datas_is_odd(prefix: Path, manifest: bool) -> None:
    told = "was made with a vocabulary of 257 (byte)"
    if not manifest:
        highest = int(IndexedDataset(prefix).tokens.max())
        data_file(prefix, ".json").unlink()
        told = f"has token ids up to {highest}"
    (doubt,) = check(prefix, "model.vocab_size=50257")
    assert doubt.startswith(f"data.prefix={prefix} {told}, of model.vocab_size=50257: most of the embedding is never")
    assert check(prefix, "model.vocab_size=320") == []


@pytest.mark.parametrize(
    ("split", "found"),
    [("'1,0,0'", "the train split has 8 tokens in 2 of 2 documents"), ("'1,1,1'", "0 tokens in 0 of 2")],
    ids=["too few tokens", "an empty split"],
)
def test_a_corpus_without_one_training_sample_is_refused(tmp_path: Path, split: str, found: str) -> None:
    write_indexed(tmp_path / "text", [np.arange(3), np.arange(5)], np.dtype("<u2"))
    with pytest.raises(DataPrepError, match=rf"data\.prefix=.*{found}.*, but one sample takes 9"):
        check_for_training(
            compose([f"data.prefix={tmp_path / 'text'}", f"data.split={split}", "model.sequence_length=8"])
        )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", ": cannot be read"),
        ("[]", "it is not a JSON object"),
        ('{"version": 1}', "version 1"),
        ('{"version": 2}', "it lacks source"),
    ],
    ids=["not JSON", "not an object", "another version", "without content"],
)
def test_a_manifest_that_is_none_is_refused(prefix: Path, content: str, problem: str) -> None:
    data_file(prefix, ".json").write_text(content)
    with pytest.raises(DataPrepError, match=rf"text\.json.*{problem}"):
        check(prefix)


PAIRS = ("model=gnmt-tiny", "model.vocab_size=61")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_pairs(tmp_path, 61, longest=20)


def test_pairs_feed_a_family_that_translates(pairs: Path) -> None:
    assert check(pairs, *PAIRS) == []


def test_pairs_that_are_mostly_too_long_are_a_doubt(pairs: Path) -> None:
    (doubt,) = check(pairs, *PAIRS, "model.sequence_length=6")
    assert re.search(r"only \d+ of 40 pairs are used; the others are longer than model.sequence_length=6", doubt)


def test_pairs_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataPrepError, match=r"none-train\.source\.idx is not there; model\.family=gnmt learns"):
        check(tmp_path / "none", *PAIRS)


def test_pairs_of_a_larger_vocabulary_are_refused(pairs: Path) -> None:
    with pytest.raises(DataPrepError, match=r"has token ids up to 60, but model\.vocab_size=60"):
        check(pairs, "model=transformer-tiny", "model.vocab_size=60")


def test_pairs_that_do_not_belong_together_are_refused(pairs: Path) -> None:
    for ending in (".bin", ".idx"):
        shutil.copy(f"{pairs}-valid.target{ending}", f"{pairs}-train.target{ending}")
    with pytest.raises(DataPrepError, match="40 sentences, but pairs-train"):
        check(pairs, *PAIRS)
