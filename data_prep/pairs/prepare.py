"""From pairs of sentences to what translation models read, and the options of `tdpp data pairs`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from conf.reading.parser import option
from conf.reading.values import above_0
from data_prep import making
from data_prep.errors import DataPrepError, of_option
from data_prep.files.archives import files_below
from data_prep.files.journal import Journal, publish
from data_prep.files.progress import hashes
from data_prep.kinds import PairsManifest, PairsSplit, weights_of
from data_prep.pairs import steps
from data_prep.pairs.lines import Finished, finished, is_finished
from data_prep.pairs.pair import Languages, Reader, Rules
from data_prep.pairs.sources import languages_of, readers_of
from data_prep.text.corpus import Corpus
from data_prep.tokenizers.special import SMALLEST, given_for_both
from data_prep.tokenizers.tokenizer import LARGEST_BPE, JsonTokenizer
from data_prep.tokenizers.vocabulary import TOKENIZER, doubt, shown, warn
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.pairs import SIDES
from megatron_ext.data.samples import SPLITS


@dataclass(frozen=True, kw_only=True)
class PairsRequest(making.SplitRequest):
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

    Raises:
        DataPrepError: the pairs cannot be read, none are left, or the files cannot be written.
    """
    left_out: Counter[str] = Counter()
    with making.making(prefix, recipe) as journal:
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
        names = {name: name for name in (*sorted(files), TOKENIZER)}
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
        write_atomic(journal.folder / TOKENIZER, tokenizer.content)
    places = product(SPLITS, SIDES)
    return (
        tokenizer,
        {place: steps.encode_texts(journal, place, tokenizer, request.workers) for place in places},
        +left_out,
    )


def _finished(request: PairsRequest, given: Finished, journal: Journal) -> tuple[JsonTokenizer, Counts]:
    """The tokenizer, and the counts of what is written."""
    tokenizer = given.tokenizer()
    write_atomic(journal.folder / TOKENIZER, tokenizer.content)
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
    """Warns on stderr where the vocabulary lacks more than a few per cent of a text. Raises DataPrepError: it lacks
    nearly all."""
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


VOCABULARY = 8000
"""Ids of the tokenizer where nobody says how many; fewer if the pairs do not give as many."""
SPLIT = "96,2,2"


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data pairs` takes."""
    rules = Rules()
    making.add_source(
        make,
        "two files of lines, source first; Moses' corpus for corpus.de and corpus.en; .tsv, .mo and .po files, or "
        "folders of them; .deb packages, tar files and folders with catalogues or LibreOffice's help pages; or the "
        "finished WMT16 folder of the GNMT examples; lines also with .gz, .bz2 or .zst",
        Path,
    )
    make.add_argument("--source-lang", metavar="CODE", help="such as de (default: what the names of two files end in)")
    make.add_argument("--target-lang", metavar="CODE", help="such as en")
    making.add_output(make, "<output>-train.source.bin")
    words = make.add_mutually_exclusive_group()
    learned = f"learn a byte-level BPE of N ids from both languages (default: at most {VOCABULARY})"
    making.add_number(words, "--train-bpe", learned)
    words.add_argument("--tokenizer", type=Path, metavar="PATH", help="the .tokenizer.json of other pairs")
    making.add_split(make, SPLIT, "divided by whole pages")
    making.add_number(make, "--min-words", "leave out shorter sentences", rules.min_words)
    making.add_number(make, "--max-words", "leave out longer sentences (default: %(default)s)", rules.max_words)
    make.add_argument(
        "--max-ratio",
        type=option(above_0),
        default=rules.max_ratio,
        metavar="R",
        help="leave out pairs of which one side has more than R times the words of the other (default: %(default)s)",
    )
    making.add_common_options(make, "pages")


def summary(made: PairsManifest) -> str:
    """What was prepared, in a line."""
    splits = ", ".join(f"{split.pairs} {name}" for name, split in made.splits.items())
    left_out = "".join(f", {count} {reason}" for reason, count in made.left_out.items())
    unknown = f", {made.unknown} unknown tokens" if made.unknown else ""
    tokens = sum(split.source_tokens + split.target_tokens for split in made.splits.values())
    return (
        f"{splits} pairs {made.source}-{made.target}, {tokens} tokens{unknown} of {made.corpus}; "
        f"{f'left out:{left_out[1:]}; ' if left_out else ''}model.vocab_size={made.vocab_size}"
    )


def request_of(arguments: argparse.Namespace) -> PairsRequest:
    """What the options ask for."""
    paths: list[Path] = arguments.source
    rules = Rules(min_words=arguments.min_words, max_words=arguments.max_words, max_ratio=arguments.max_ratio)
    if rules.min_words > rules.max_words:
        raise DataPrepError(f"--min-words {rules.min_words} is more than --max-words {rules.max_words}; lower it")
    if rules.max_ratio < 1:
        raise DataPrepError(f"--max-ratio {rules.max_ratio:g}: must be 1 or more, or it leaves no pair")
    languages = languages_of(arguments.source_lang, arguments.target_lang, paths)
    pairs = _pairs(paths, languages)
    if isinstance(pairs, Finished) and (arguments.train_bpe or arguments.tokenizer):
        raise DataPrepError(
            f"--source {paths[0]} is in tokens already, by its own vocabulary; leave out --train-bpe and --tokenizer"
        )
    corpus = _corpus(paths, pairs)
    return PairsRequest(
        corpus=corpus,
        languages=languages,
        pairs=pairs,
        rules=rules,
        weights=weights_of(arguments.split),
        seed=arguments.seed,
        tokenizer=_tokenizer(arguments.train_bpe, arguments.tokenizer),
        all_ids=arguments.train_bpe is not None,
        workers=making.workers_of(arguments, corpus),
    )


def _pairs(paths: Sequence[Path], languages: Languages) -> list[Reader] | Finished:
    found = [path for path in paths if is_finished(path)]
    if not found:
        return readers_of(paths, languages)
    if len(paths) > 1:
        raise DataPrepError(
            f"--source {found[0]} is a finished WMT16 folder with a vocabulary of its own; give it alone"
        )
    return finished(found[0], languages)


def _corpus(paths: Sequence[Path], pairs: Sequence[Reader] | Finished) -> Corpus:
    """All files that the pairs follow from, those of folders by their names below these."""
    given = pairs.files if isinstance(pairs, Finished) else [file for reader in pairs for file in reader.files]
    files: dict[Path, str] = {}
    for path in given:
        if path.is_dir():
            files |= {file: str(file.relative_to(path)) for file in files_below(path)}
        else:
            files[path] = path.name
    return Corpus.of(", ".join(map(str, paths)), files)


def _tokenizer(size: int | None, given: Path | None) -> JsonTokenizer | int:
    if given is not None:
        with of_option("--tokenizer", given):
            return given_for_both(given)
    if size is None:
        return VOCABULARY
    if size < SMALLEST:
        raise DataPrepError(f"--train-bpe {size}: the bytes and the special tokens take {SMALLEST} ids")
    if size > LARGEST_BPE:
        raise DataPrepError(f"--train-bpe {size}: must be at most {LARGEST_BPE} ids")
    return size
