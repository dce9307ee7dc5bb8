"""Whether documents that are samples, conversations above all, can be used: for a run, or all of them in full."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conf.schema.experiment import EngineKind, Experiment
from conf.visible import plural
from data_prep import kinds
from data_prep.errors import DataPrepError, named
from data_prep.indexed import check
from data_prep.indexed.manifest import read_manifest, tokenizer_of
from megatron_ext.contract.models.model import CHATS
from megatron_ext.contract.plan_parts import ANSWERS
from megatron_ext.data.documents import Documents, DocumentSamples
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from megatron_ext.data.samples import Split

ANSWER = "▌"
"""Stands before and behind an answer where a conversation is shown."""


def check_documents(experiment: Experiment) -> list[str]:
    """Checks that documents can feed this experiment; returns what is odd about that, in words. Raises DataPrepError:
    the files are missing, damaged, of another vocabulary, or none has a place in a sample."""
    if experiment.engine.kind is not EngineKind.tdpp:
        raise DataPrepError(
            f"data.prefix={experiment.data.prefix} holds chats, which engine.kind={experiment.engine.kind} cannot "
            "learn; use engine=tdpp"
        )
    doubts, length = [], experiment.model.sequence_length
    prefixes = [Path(corpus.prefix) for corpus in experiment.data.corpora()]
    for number, prefix in enumerate(prefixes):
        given = f"data.blend[{number - 1}].prefix={prefix}" if number else f"data.prefix={prefix}"
        check.require_files(prefix, given)
        data = check.open_checked(prefix, given.partition("=")[0])
        if kinds.kind_of(prefix) == CHATS:
            needed = kinds.read_described(prefix, kinds.ChatsManifest).vocab_size
            made = (needed, f"was made with a vocabulary of {needed}", f"model.vocab_size={needed}")
        else:
            made = check.made_with(data, read_manifest(prefix))
        doubts += check.check_vocabulary(made, given, experiment.model.vocab_size)
        with named(given):
            found = Documents(prefix, kinds.weights_of(experiment.data.split), "train", length)
        doubts += _doubts(found, given, length)
    check.check_vocabularies(prefixes)
    return doubts


def _doubts(found: Documents, given: str, length: int) -> list[str]:
    """What is lost of conversations."""
    if found.answers is None or not found.cut:
        return []
    left_out = f", {found.left_out} of them left out because no answer is left" if found.left_out else ""
    return [
        f"{given}: {found.cut} of {plural(found.documents, 'training conversation')} are cut at "
        f"model.sequence_length={length}{left_out}; choose a longer one, or prepare the data with --max-tokens {length}"
    ]


def samples_of_documents(experiment: Experiment, split: str) -> int | None:
    """How many samples a split has before any of its documents comes again; None: corpora of a blend end apart. Raises
    DataPrepError: the split cannot be used."""
    data, length = experiment.data, experiment.model.sequence_length
    if data.blend:
        return None
    one = Split(1, experiment.train.seed, tuple(kinds.weights_of(data.split)), split)
    with named(f"data.prefix={data.prefix}"):
        return DocumentSamples(data.prefix, one, length, experiment.model.vocab_size, data.packing).in_epoch


def check_in_full(prefix: Path, vocab_size: int | None) -> kinds.ChatsManifest:
    """Checks hashes, token ids and the mask. Ids must be below `vocab_size`, or that of the manifest. Raises
    DataPrepError: they cannot be used."""
    manifest = kinds.read_unchanged(prefix, kinds.ChatsManifest)
    data = check.open_checked(prefix)
    check.check_ids(data, vocab_size or manifest.vocab_size)
    mask = np.fromfile(data_file(prefix, ANSWERS), np.uint8)
    found = (len(data), len(data.tokens), len(mask), int(mask.sum(dtype=np.int64)))
    if found != (manifest.conversations, manifest.tokens, manifest.tokens, manifest.answers) or mask.max(initial=0) > 1:
        raise DataPrepError(
            f"{prefix}: {found[0]} conversations of {found[1]} tokens, {found[3]} of them in answers, are not those "
            f"that {prefix}.json describes; prepare the data again"
        )
    return manifest


def described(prefix: Path) -> dict[str, str]:
    """What the manifest says, for people."""
    manifest = kinds.read_described(prefix, kinds.ChatsManifest)
    left_out = ", ".join(f"{count} {reason}" for reason, count in manifest.left_out.items())
    return {
        "kind": CHATS,
        "conversations": str(manifest.conversations),
        "tokens": f"{manifest.tokens}, {manifest.answers} of them in answers",
        "longest": plural(manifest.longest, "token"),
        "vocabulary": str(manifest.vocab_size),
        "left out": left_out or "none",
        "source": manifest.corpus,
    }


def document_text(prefix: Path, number: int) -> str:
    """A conversation as the model reads it, with `ANSWER` around what it learns. Raises DataPrepError: there is none of
    this number."""
    data, tokenizer = IndexedDataset(prefix), tokenizer_of(prefix)
    kinds.require_training_document(prefix, CHATS, number, len(data))
    tokens = np.asarray(data[number])
    first = int(data.offsets[number]) // data.dtype.itemsize
    mask = np.memmap(data_file(prefix, ANSWERS), np.uint8, "r")[first : first + len(tokens)]
    ends = np.flatnonzero(np.diff(mask)) + 1
    parts = [tokenizer.decode(part, whole=True) for part in np.split(tokens, ends)]
    return "".join(f"{ANSWER}{part}{ANSWER}" if mask[at] else part for at, part in zip([0, *ends], parts, strict=True))
