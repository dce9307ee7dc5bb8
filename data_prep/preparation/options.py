"""`tdpp data prepare`: its options, and what they mean together."""

from __future__ import annotations

import argparse
from pathlib import Path

from conf.reading.parser import option
from conf.reading.values import prefix_path
from conf.visible import plural
from data_prep.errors import DataPrepError, of_option
from data_prep.files.journal import work_folder_of
from data_prep.indexed.manifest import Manifest, text_prefix
from data_prep.making import add_number, add_source, make_unless_there
from data_prep.preparation.prepare import Request, prepare
from data_prep.text.corpus import Corpus, corpus_of, stdlib_corpus
from data_prep.text.encode import Options
from data_prep.text.formats import Documents
from data_prep.tokenizers.special import AT_FIRST, AT_LAST, SEPARATOR, with_special
from data_prep.tokenizers.tokenizer import (
    END_OF_TEXT,
    LARGEST_BPE,
    SMALLEST_BPE,
    SMALLEST_WORDPIECE,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    content_of,
    content_of_files,
    end_token_of,
)
from megatron_ext.contract.cores import usable_cores
from megatron_ext.contract.models.model import TEXT
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file

STDLIB = ["stdlib"]
"""The value of --source for this Python's library."""


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data prepare` takes."""
    add_source(
        make,
        "files and folders: JSON lines (.jsonl, .json), Parquet (.parquet), MediaWiki dumps (.xml), all others "
        "plain text; each but Parquet also with .gz, .bz2 or .zst; or stdlib: the sources of this Python's library",
    )
    make.add_argument(
        "--output",
        type=option(prefix_path),
        help="the files are <output>_text_document.bin, .idx, .json (default: data/stdlib, for --source stdlib alone)",
    )
    make.add_argument(
        "--key", default="text", help="the text's key in a JSON object, or its column in Parquet (default: %(default)s)"
    )
    make.add_argument(
        "--documents",
        type=Documents,
        choices=list(Documents),
        default=Documents.file,
        help="what a document is in plain text; paragraphs end with an empty line (default: %(default)s)",
    )
    words = make.add_mutually_exclusive_group()
    words.add_argument(
        "--tokenizer",
        default="byte",
        metavar="PATH",
        help="a tokenizer.json, a folder with one or with vocab.json and merges.txt, or BERT's vocab.txt (default: "
        "byte, the bytes of UTF-8)",
    )
    words.add_argument(
        "--vocab-file", type=Path, metavar="PATH", help="GPT-2's vocab.json, with --merge-file; or BERT's vocab.txt"
    )
    add_number(words, "--train-wordpiece", "learn BERT's kind of vocabulary, of N ids, from the source")
    add_number(words, "--train-bpe", "learn a byte-level BPE of N ids from the source")
    make.add_argument("--merge-file", type=Path, metavar="PATH", help="GPT-2's merges.txt, with --vocab-file")
    make.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help=f"the token that ends a document in a given tokenizer (default: {END_OF_TEXT}, or the end of a text that "
        "its tokenizer_config.json names)",
    )
    make.add_argument(
        "--split-sentences",
        action="store_true",
        help="make each sentence a sequence, as BERT and T5 need it, and add the special tokens that the tokenizer "
        "lacks; the files are <output>_text_sentence.bin, .idx, .json",
    )
    sentinels = (
        "with --split-sentences: add N sentinels to the tokenizer, <extra_id_0> and so on, as T5 needs them (100)"
    )
    add_number(make, "--vocab-extra-ids", sentinels)
    add_number(make, "--min-chars", "leave out shorter texts", 1)
    add_number(make, "--max-chars", "leave out longer texts")
    make.add_argument("--unique", action="store_true", help="leave out texts that occurred before")
    add_number(make, "--max-mb", "with --source stdlib: at most this many megabytes of text")
    add_number(make, "--workers", "processes (default: one for each CPU; for bytes, one)")
    make.add_argument("--force", action="store_true", help="make the data again if they exist")


def run(arguments: argparse.Namespace) -> None:
    """Prepares data, or says that they are there; prints their prefix."""
    output: Path | None = arguments.output or (Path("data/stdlib") if arguments.source == STDLIB else None)
    if output is None:
        raise DataPrepError("--output is missing: a folder and a name for the data, such as --output data/books")
    request, prefix = _request(arguments), text_prefix(output, arguments.split_sentences)
    unknown = data_file(prefix, ".bin").exists() and not data_file(prefix, ".json").exists()
    if unknown and not arguments.force and not work_folder_of(prefix).is_dir():
        raise DataPrepError(
            f"--output {output}: {data_file(prefix, '.bin')} is there, and no manifest beside it says that it came "
            "from here; choose another --output, or replace it with --force"
        )

    def summary(made: Manifest) -> str:
        left_out = "".join(f", {count} {reason} left out" for reason, count in made.left_out.items())
        sentences = f" of {len(IndexedDataset(prefix))} sentences" if arguments.split_sentences else ""
        return (
            f"{plural(made.documents, 'document')}{sentences}{left_out}, {made.tokens} tokens of {made.source}; "
            f"model.vocab_size={made.vocab_size}"
        )

    make_unless_there(prefix, arguments.force, TEXT, request, prepare, summary)


def _request(arguments: argparse.Namespace) -> Request:
    sentences: bool = arguments.split_sentences
    if arguments.vocab_extra_ids is not None and not sentences:
        raise DataPrepError(
            f"--vocab-extra-ids {arguments.vocab_extra_ids} is for data of sentences, which T5 reads; add "
            "--split-sentences, or leave it out"
        )
    tokenizer = _tokenizer(arguments)
    cpus = 1 if isinstance(tokenizer, ByteTokenizer) else usable_cores()
    return Request(
        corpus=_corpus(arguments.source, arguments.max_mb),
        tokenizer=tokenizer,
        options=Options(
            key=arguments.key,
            documents=arguments.documents,
            min_chars=arguments.min_chars,
            max_chars=arguments.max_chars,
            unique=arguments.unique,
            split_sentences=sentences,
        ),
        wordpiece=arguments.train_wordpiece is not None,
        sentinels=arguments.vocab_extra_ids or 0,
        workers=arguments.workers or cpus,
    )


def _corpus(source: list[str], max_mb: int | None) -> Corpus:
    if source == STDLIB:
        return stdlib_corpus(max_mb)
    if max_mb is not None:
        raise DataPrepError(f"--max-mb {max_mb} is for --source stdlib alone; give fewer files, or leave it out")
    return corpus_of([Path(path) for path in source])


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | int:
    vocab, merges, end = arguments.vocab_file, arguments.merge_file, arguments.end_of_document or END_OF_TEXT
    sentences: bool = arguments.split_sentences
    if vocab is not None and merges is None and vocab.suffix == ".txt":
        arguments.tokenizer, vocab = str(vocab), None
    if (vocab is None) != (merges is None):
        raise DataPrepError(
            "--vocab-file and --merge-file belong together: give both, or BERT's vocab.txt alone, or --tokenizer"
        )
    learned = _learned_size(arguments)
    own_end = learned is not None or sentences or (vocab is None and arguments.tokenizer == "byte")
    if arguments.end_of_document is not None and own_end:
        raise DataPrepError(
            f"--end-of-document {end} is for a tokenizer that is given with --tokenizer or --vocab-file, and not for "
            "sentences; bytes and a tokenizer that is learned have an end of a document of their own: leave it out"
        )
    if learned is not None:
        return learned
    if vocab is None and arguments.tokenizer == "byte":
        if sentences:
            raise DataPrepError(
                "--split-sentences needs a tokenizer with special tokens, which bytes do not have; learn one with "
                "--train-wordpiece 30000, or give one with --tokenizer"
            )
        return ByteTokenizer()
    path = Path(arguments.tokenizer) if vocab is None else vocab
    with of_option("--tokenizer" if arguments.vocab_file is None else "--vocab-file", path):
        if sentences:
            content = content_of(path) if vocab is None else content_of_files(vocab, merges)
            return with_special(content, arguments.vocab_extra_ids or 0)
        if vocab is not None:
            return JsonTokenizer.from_files(vocab, merges, end)
        if arguments.end_of_document is None:
            end = SEPARATOR if path.suffix == ".txt" else end_token_of(path)
        return JsonTokenizer.from_file(path, end)


def _learned_size(arguments: argparse.Namespace) -> int | None:
    """Ids of the vocabulary that is to be learned, if one is."""
    sizes = {"--train-bpe": arguments.train_bpe, "--train-wordpiece": arguments.train_wordpiece}
    for option_, size in sizes.items():
        if size is None:
            continue
        bytes_first = option_ == "--train-bpe"
        what = "the bytes and the end of a document" if bytes_first else "letters and special tokens"
        least = SMALLEST_BPE if bytes_first else SMALLEST_WORDPIECE
        if arguments.split_sentences:
            least += len(AT_FIRST) + len(AT_LAST) + (arguments.vocab_extra_ids or 0)
            what += " with all special tokens"
        if size < least:
            raise DataPrepError(f"{option_} {size}: {what} take {least} ids; give {least} or more")
        if size > LARGEST_BPE:
            raise DataPrepError(f"{option_} {size}: must be at most {LARGEST_BPE} ids")
        return int(size)
    return None
