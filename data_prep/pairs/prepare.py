"""From pairs of sentences to what translation models read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from data_prep.errors import DataPrepError
from data_prep.files.journal import Journal, publish
from data_prep.files.progress import hashes
from data_prep.kinds import PairsManifest, PairsSplit
from data_prep.making import SplitRequest, making
from data_prep.pairs import steps
from data_prep.pairs.cleaning import Rules
from data_prep.pairs.lines import Finished
from data_prep.pairs.pair import SIDES, Languages, Reader
from data_prep.tokenizers.tokenizer import JsonTokenizer
from data_prep.tokenizers.vocabulary import doubt, shown, warn
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.samples import SPLITS


@dataclass(frozen=True, kw_only=True)
class PairsRequest(SplitRequest):
    languages: Languages
    pairs: Sequence[Reader] | Finished
    rules: Rules
    tokenizer: JsonTokenizer | int
    """A number: a vocabulary of so many ids is learned from the training pairs."""
    all_ids: bool
    """Whether what is learned must have as many; else it may have fewer."""

    def recipe(self) -> dict[str, Any]:
        recipe: dict[str, Any] = {"corpus_sha256": self.corpus.digest(), "languages": list(self.languages)}
        if isinstance(self.pairs, Finished):
            return {**recipe, "numbers_in_vocabulary": True} if self.pairs.has_numbers else recipe
        given = self.tokenizer
        tokenizer = {"train_bpe": given} if isinstance(given, int) else {"tokenizer": given.identity}
        return {**recipe, **asdict(self.rules), "split": list(self.weights), "seed": self.seed, **tokenizer}


def prepare(request: PairsRequest, prefix: Path, recipe: dict[str, Any]) -> PairsManifest:
    """Writes pairs and their manifest; shows progress on stderr. Nothing half-written takes their names.

    What an earlier call left unfinished is gone on with. The bytes do not depend on `request.workers`.

    Args:
        request: what to prepare.
        prefix: the data's path without endings.
        recipe: of the request.

    Raises:
        DataPrepError: the pairs cannot be read, none are left, or the files cannot be written.
    """
    with making(prefix, recipe) as journal:
        return _prepare(request, journal, prefix, recipe)


def _prepare(request: PairsRequest, journal: Journal, prefix: Path, recipe: dict[str, Any]) -> PairsManifest:
    left_out: Counter[str] = Counter()
    if isinstance(request.pairs, Finished):
        tokenizer, counts = _finished(request, request.pairs, journal)
    else:
        tokenizer, counts, left_out = _cleaned(request, request.pairs, journal)
    try:
        _require_known(request, counts)
    except DataPrepError:
        journal.delete()  # the same command would fail again
        raise
    files = {f"-{split}.{side}{suffix}" for split, side in counts for suffix in (".txt", ".bin", ".idx")}
    names = {name: name for name in (*sorted(files), steps.TOKENIZER)}
    manifest = PairsManifest(
        source=request.languages.source,
        target=request.languages.target,
        vocab_size=tokenizer.vocab_size,
        splits={split: _split(counts[split, "source"], counts[split, "target"]) for split in SPLITS},
        corpus=request.corpus.description,
        left_out=dict(left_out),
        unknown=sum(count["unknown"] for count in counts.values()),
        sha256=hashes({suffix: journal.folder / name for suffix, name in names.items()}),
    )
    publish(journal.folder, prefix, names, manifest.to_json(recipe))
    return manifest


Counts = dict[tuple[str, str], Counter[str]]
"""Counts by split and side."""


def _cleaned(
    request: PairsRequest, readers: Sequence[Reader], journal: Journal
) -> tuple[JsonTokenizer, Counts, Counter[str]]:
    """The tokenizer, the counts of what is written, and what is left out."""
    what = request.corpus.description
    read = steps.read_pairs(journal, readers, request.rules, what)
    split = steps.split_pairs(journal, request.weights, request.seed, what, request.workers)
    left_out = +Counter({reason: count for reason, count in read.items() if reason != "kept"})
    left_out[steps.NEAR] += split[steps.NEAR]
    if isinstance(request.tokenizer, int):
        tokenizer = steps.learned(journal, request.tokenizer, request.all_ids)
    else:
        tokenizer = request.tokenizer
        write_atomic(journal.folder / steps.TOKENIZER, tokenizer.content)
    places = product(SPLITS, SIDES)
    return (
        tokenizer,
        {place: steps.encode_texts(journal, place, tokenizer, request.workers) for place in places},
        +left_out,
    )


def _finished(request: PairsRequest, given: Finished, journal: Journal) -> tuple[JsonTokenizer, Counts]:
    """The tokenizer, and the counts of what is written."""
    tokenizer = given.tokenizer()
    write_atomic(journal.folder / steps.TOKENIZER, tokenizer.content)
    counts: Counts = {}
    for split in SPLITS:
        for side, language in zip(SIDES, request.languages, strict=True):
            counts[split, side] = steps.encode_finished(
                journal, (split, side), given, language, tokenizer, request.workers
            )
        source, target = (counts[split, side]["sentences"] for side in SIDES)
        if source != target:
            files = [given.tokens[split, language] for language in request.languages]
            raise DataPrepError(
                f"{files[0]} has {source} lines, {files[1]} has {target}: line k of one must be the translation of "
                "line k of the other; get them again"
            )
    return tokenizer, counts


def _require_known(request: PairsRequest, counts: Counts) -> None:
    """Warns on stderr where the vocabulary lacks more than a few per cent of a text.

    Raises:
        DataPrepError: it lacks nearly all.
    """
    way_out = "give the tokenizer of pairs in these languages, or learn one with --train-bpe N"
    if isinstance(request.pairs, Finished):
        words = shown(request.pairs.words())
        way_out = f"{request.pairs.vocabulary} has {words}; give the vocabulary of this text, a word a line"
    for (split, side), count in counts.items():
        warn(doubt(count["unknown"], count["tokens"], f"{request.corpus.description}: {side} of {split}", way_out))


def _split(source: Counter[str], target: Counter[str]) -> PairsSplit:
    return PairsSplit(
        pairs=source["sentences"],
        source_tokens=source["tokens"],
        target_tokens=target["tokens"],
        longest=max(source["longest"], target["longest"]),
    )
