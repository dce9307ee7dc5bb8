"""Whether indexed data can be used, before a run depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conf.schema.experiment import EngineKind, Experiment
from data_prep.errors import DataPrepError, named
from data_prep.indexed.manifest import Manifest, has_manifest, read_manifest, same_vocabulary
from data_prep.kinds import require_unchanged, weights_of
from data_prep.tokenizers.vocabulary import BLOCK, SAMPLED, TOKENIZER, unknown_doubt
from megatron_ext.data.blend import normalized, samples_of
from megatron_ext.data.gpt_samples import order_of, samples_in_epoch
from megatron_ext.data.index_maps import check_saved, require_one_sample, split_documents
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from megatron_ext.data.masked import bert_samples, sentence_maps, t5_samples
from megatron_ext.data.masked.masked_samples import vocabulary_for
from megatron_ext.data.samples import SPLITS, Split


def samples_of_split(experiment: Experiment, split: str) -> int | None:
    """How many samples a split has before any of them comes again.

    None where no number says that: those of BERT and T5 are cut anew in every epoch, and corpora of a blend end apart.

    Raises:
        DataPrepError: the split of a corpus cannot be used, or has no sample.
    """
    model, corpora = experiment.model, experiment.data.corpora()
    weights = weights_of(experiment.data.split)
    count = None
    for number, corpus in enumerate(corpora):
        key, prefix = f"data.blend[{number - 1}].prefix" if number else "data.prefix", Path(corpus.prefix)
        with named(f"{key}={prefix}"):
            if model.traits.running_text:
                count = samples_in_epoch(prefix, weights, split, model.sequence_length)
            else:
                data, (cut, _) = IndexedDataset(prefix), _cut_of(experiment, 1)
                sentence_maps.usable(data, _documents(weights, data, split), split, cut)
    return count if len(corpora) == 1 else None


def order_of_text(experiment: Experiment, samples: int) -> dict[str, float]:
    """What a launch knows of `Samples.order` of so many samples: that of running text, of other text the seed."""
    model, seed, corpora = experiment.model, experiment.train.seed, experiment.data.corpora()
    weights, found = weights_of(experiment.data.split), dict[str, float]()
    for number, share in enumerate(normalized([corpus.weight for corpus in corpora])):
        order: dict[str, float] = {"seed": seed}
        if model.traits.running_text:
            data = IndexedDataset(corpora[number].prefix)
            count = samples_of(share, samples) if len(corpora) > 1 else samples
            order = order_of(data.lengths, split_documents(weights, len(data))[0], count, model.sequence_length, seed)
        found |= {f"{number}.{key}" if len(corpora) > 1 else key: value for key, value in order.items()}
    return found


def _documents(weights: Sequence[float], data: IndexedDataset, split: str) -> range:
    """Returns the documents of data for BERT or T5 that belong to a split."""
    return split_documents(weights, data.documents)[SPLITS.index(split)]


def check_text(experiment: Experiment) -> list[str]:
    """Checks that text can feed this experiment; returns what is odd about that, in words.

    Raises:
        DataPrepError: the files are missing, damaged, of another vocabulary, or too short for one sample, or the index
            maps beside them are of other data.
    """
    corpora = experiment.data.corpora()
    samples = _samples(experiment)
    shares = normalized([corpus.weight for corpus in corpora])
    doubts = []
    for number, (corpus, share) in enumerate(zip(corpora, shares, strict=True)):
        key, of_corpus = f"data.blend[{number - 1}].prefix" if number else "data.prefix", samples_of(share, samples)
        doubts += _check_corpus(experiment, Path(corpus.prefix), key, of_corpus if len(corpora) > 1 else samples)
    prefixes = [Path(corpus.prefix) for corpus in corpora]
    _check_different(prefixes)
    check_vocabularies(prefixes)
    return doubts


def _samples(experiment: Experiment) -> int:
    """That a run takes of its data."""
    train = experiment.train
    if train.samples is not None:
        return train.samples
    if train.epochs is not None:
        return train.epochs * (samples_of_split(experiment, "train") or 1)  # a launch says where there is no number
    return experiment.parallel.global_batch_size * train.last_iteration


def _check_different(prefixes: Sequence[Path]) -> None:
    """Checks that no corpus is given twice; links may give one several paths."""
    for number, prefix in enumerate(prefixes):
        for first in prefixes[:number]:
            if data_file(first, ".bin").samefile(data_file(prefix, ".bin")):
                raise DataPrepError(
                    f"data.blend[{number - 1}].prefix={prefix} is the same data as {first}; give it the weight of both "
                    "there"
                )


def check_vocabularies(prefixes: Sequence[Path]) -> None:
    """Checks that all corpora have one vocabulary, where that is known."""
    known = [(number, prefix) for number, prefix in enumerate(prefixes) if has_manifest(prefix)]
    for number, prefix in known[1:]:
        first = known[0][1]
        if not same_vocabulary(first, prefix):
            beside = data_file(first, TOKENIZER)
            raise DataPrepError(
                f"data.blend[{number - 1}].prefix={prefix} was made with another tokenizer than {first}: the same "
                f"token id would mean different text; prepare one again with the other's, such as --tokenizer "
                f"{beside if beside.exists() else 'byte'}"
            )


def _check_corpus(experiment: Experiment, prefix: Path, key: str, samples: int) -> list[str]:
    """Checks one corpus, from which a run takes so many samples."""
    require_files(prefix, f"{key}={prefix}")
    data, model = open_checked(prefix, key), experiment.model
    made = made_with(data, read_manifest(prefix))
    doubts = check_vocabulary(made, f"{key}={prefix}", model.vocab_size)
    if (lacking := unknown_doubt(data, prefix, f"{key}={prefix}", in_full=False)) is not None:
        doubts.append(lacking)
    with named(f"{key}={prefix}"):
        if model.traits.masks:
            return doubts + _check_sentences(experiment, prefix, data, samples, f"{key}={prefix}")
        train = split_documents(weights_of(experiment.data.split), len(data))[0]
        require_one_sample(data, train, "train", model.sequence_length)
        if experiment.engine.kind is not EngineKind.megatron_lm:
            seed, cache = experiment.train.seed, experiment.data.cache
            check_saved(prefix, data, train, "train", samples, model.sequence_length, seed, cache)
    return doubts


def require_files(prefix: Path, given: str) -> None:
    """Raises DataPrepError where there are no indexed data."""
    for suffix in (".bin", ".idx"):
        if not (file := data_file(prefix, suffix)).is_file():
            raise DataPrepError(
                f"{given}: {file.absolute()} is not there; 'tdpp data prepare --source stdlib --output data/stdlib' "
                f"makes sample data; for your own, set {given.partition('=')[0]} to their path without .bin"
            )


def _cut_of(experiment: Experiment, samples: int) -> tuple[sentence_maps.Cut, Sequence[str]]:
    """How so many samples of BERT or T5 are cut, and the special tokens that they need."""
    model, split = experiment.model, Split(samples, experiment.train.seed)
    masking = experiment.data.masking(str(model.family))
    assert masking is not None, "of bert and t5 alone"
    if not model.traits.decoder:
        cut = bert_samples.cut_of(split, model.sequence_length, masking, model.bert_binary_head)
        return cut, bert_samples.SPECIAL
    return t5_samples.cut_of(split, model.sequence_length, masking), t5_samples.SPECIAL


def _check_sentences(experiment: Experiment, prefix: Path, data: IndexedDataset, samples: int, given: str) -> list[str]:
    """Checks data for BERT or T5; returns what is odd. Raises DataError: their vocabulary, sentences or sentence map
    cannot be used."""
    cut, special = _cut_of(experiment, samples)
    vocabulary_for(prefix, experiment.model.vocab_size, special)
    train = _documents(weights_of(experiment.data.split), data, "train")
    usable = sentence_maps.usable(data, train, "train", cut)
    sentence_maps.check_saved(prefix, data, train, "train", cut, experiment.data.cache)
    if 2 * usable >= len(train):
        return []
    return [
        f"{given}: only {usable} of {len(train)} training documents are used; the others have fewer than "
        f"{cut.least_sentences} sentences, or one of more than {sentence_maps.LONGEST_SENTENCE} tokens, and Megatron "
        "leaves these out: split long sentences and join short documents before the data are prepared"
    ]


def made_with(data: IndexedDataset, manifest: Manifest | None) -> tuple[int, str, str]:
    """The ids that data need, the fact behind that, and how model.vocab_size is set; in data that others made, ids of
    some places show how large their vocabulary is at least."""
    if manifest is None:
        needed = highest_id(data) + 1
        return needed, f"has token ids up to {needed - 1}", "model.vocab_size to that of the data's tokenizer"
    needed = manifest.vocab_size
    return needed, f"was made with a vocabulary of {needed} ({manifest.tokenizer})", f"model.vocab_size={needed}"


def check_vocabulary(made: tuple[int, str, str], given: str, allowed: int) -> list[str]:
    """Checks what `made_with` says against the model's vocabulary; returns what is odd. Raises DataPrepError: it is
    larger."""
    needed, fact, other = made
    if needed > allowed:
        raise DataPrepError(f"{given} {fact}, but model.vocab_size={allowed}; set {other}, or choose other data")
    if 2 * needed > allowed:
        return []
    return [
        f"{given} {fact}, of model.vocab_size={allowed}: most of the embedding is never trained; set {other}, or "
        "choose other data"
    ]


def highest_id(data: IndexedDataset) -> int:
    """The highest token id of a sample of the data, evenly spread; 0 of none."""
    places, size = SAMPLED
    begins = np.linspace(0, max(0, len(data.tokens) - size), places, dtype=np.int64)
    return max(int(data.tokens[begin : begin + size].max(initial=0)) for begin in np.unique(begins))


def check(prefix: Path, vocab_size: int | None = None) -> IndexedDataset:
    """Checks indexed data in full: index, sizes, token ids, and the hashes of the manifest, where there is one.

    Ids must be below `vocab_size`, or that of the manifest.

    Raises:
        DataPrepError: they cannot be used.
    """
    data, manifest = open_checked(prefix), read_manifest(prefix)
    if not np.issubdtype(data.dtype, np.integer):
        raise DataPrepError(f"{data.idx}: the tokens are {data.dtype.name}, but token ids are whole numbers")
    if manifest is not None:
        require_unchanged(manifest.sha256, prefix)
    check_ids(data, vocab_size or (manifest.vocab_size if manifest is not None else None))
    return data


def check_ids(data: IndexedDataset, limit: int | None) -> None:
    """Raises DataPrepError for a token id that is not below the limit, where there is one, or below 0."""
    for first in range(0, len(data.tokens), BLOCK):
        block = data.tokens[first : first + BLOCK]
        low, high = int(block.min()), int(block.max())
        if low < 0 or (limit is not None and high >= limit):
            place = first + int(np.argmin(block) if low < 0 else np.argmax(block))
            sequence = int(np.searchsorted(data.offsets, place * data.dtype.itemsize, "right")) - 1
            raise DataPrepError(
                f"{data.bin}: sequence {sequence} has token id {low if low < 0 else high}, but the vocabulary has 0 to "
                f"{'…' if limit is None else limit - 1}; the data were prepared with another tokenizer, or are damaged"
            )


def open_checked(prefix: Path, key: str = "data.prefix") -> IndexedDataset:
    """Opens indexed data, which `key` names; opening checks them in full. Raises DataPrepError: they cannot be used."""
    with named(f"{key}={prefix}"):
        return IndexedDataset(prefix)
