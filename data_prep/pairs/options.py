"""`tdpp data pairs`: its options, and what they mean together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from conf.reading.values import above_0, option, whole
from data_prep.errors import DataPrepError, of_option
from data_prep.files.archives import files_below
from data_prep.kinds import PairsManifest, weights_of
from data_prep.making import add_common_options, add_output, add_split, make_unless_there, workers_of
from data_prep.pairs.cleaning import Rules
from data_prep.pairs.lines import Finished, finished, is_finished
from data_prep.pairs.pair import Languages, Reader
from data_prep.pairs.prepare import PairsRequest, prepare
from data_prep.pairs.sources import languages_of, readers_of
from data_prep.text.corpus import Corpus
from data_prep.tokenizers.special import SMALLEST, given_for_both
from data_prep.tokenizers.tokenizer import LARGEST_BPE, JsonTokenizer
from megatron_ext.contract.models.model import PAIRS

VOCABULARY = 8000
"""Ids of the tokenizer where nobody says how many; fewer if the pairs do not give as many."""
SPLIT = "96,2,2"


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data pairs` takes."""
    rules = Rules()
    make.add_argument(
        "--source",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="two files of lines, source first; Moses' corpus for corpus.de and corpus.en; .tsv, .mo and .po files, or "
        "folders of them; .deb packages, tar files and folders with catalogues or LibreOffice's help pages; or the "
        "finished WMT16 folder of the GNMT examples; lines also with .gz, .bz2 or .zst",
    )
    make.add_argument("--source-lang", metavar="CODE", help="such as de (default: what the names of two files end in)")
    make.add_argument("--target-lang", metavar="CODE", help="such as en")
    add_output(make, "<output>-train.source.bin")
    words = make.add_mutually_exclusive_group()
    words.add_argument(
        "--train-bpe",
        type=option(whole),
        metavar="N",
        help=f"learn a byte-level BPE of N ids from both languages (default: at most {VOCABULARY})",
    )
    words.add_argument("--tokenizer", type=Path, metavar="PATH", help="the .tokenizer.json of other pairs")
    add_split(make, SPLIT, "divided by whole pages")
    make.add_argument(
        "--min-words", type=option(whole), default=rules.min_words, metavar="N", help="leave out shorter sentences"
    )
    make.add_argument(
        "--max-words",
        type=option(whole),
        default=rules.max_words,
        metavar="N",
        help="leave out longer sentences (default: %(default)s)",
    )
    make.add_argument(
        "--max-ratio",
        type=option(above_0),
        default=rules.max_ratio,
        metavar="R",
        help="leave out pairs of which one side has more than R times the words of the other (default: %(default)s)",
    )
    add_common_options(make, "pages")


def run(arguments: argparse.Namespace) -> None:
    """Prepares pairs, or says that they are there; prints their prefix."""
    make_unless_there(arguments.output, arguments.force, PAIRS, _request(arguments), prepare, summary)


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


def _request(arguments: argparse.Namespace) -> PairsRequest:
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
        workers=workers_of(arguments, corpus),
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
    described = ", ".join(str(path) for path in paths)
    return Corpus(description=described, files=tuple(files), names=tuple(files.values()))


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
