"""`tdpp data`: prepare indexed data, look into them, check them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data_prep.check import open_checked
from data_prep.corpus import StdlibCorpus
from data_prep.errors import DataPrepError
from data_prep.manifest import hashes, read_manifest
from data_prep.prepare import is_prepared, prepare, text_prefix
from data_prep.tokenizer import TOKENIZERS, ByteTokenizer
from megatron_ext.indexed_dataset import data_file


def main(argv: list[str]) -> int:
    """Runs one `tdpp data` command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    command: str = arguments.command
    if command == "prepare":
        _prepare(arguments.output, arguments.max_mb, arguments.force)
    elif command == "inspect":
        _inspect(arguments.prefix, arguments.document)
    else:
        _check(arguments.prefix)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tdpp data", description="Turn text into the indexed data that Megatron reads."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser("prepare", help="write indexed data from a source of text")
    make.add_argument(
        "--source", choices=["stdlib"], required=True, help="stdlib: the sources of this Python's library"
    )
    make.add_argument(
        "--output",
        type=Path,
        default=Path("data/stdlib"),
        help="the files are <output>_text_document.bin, .idx, .json; without it %(default)s",
    )
    make.add_argument("--max-mb", type=_positive, metavar="N", help="at most so many megabytes of text")
    make.add_argument("--force", action="store_true", help="also if the data are there already")
    look = commands.add_parser("inspect", help="tell what indexed data hold")
    look.add_argument("prefix", type=Path, help="path without .bin or .idx")
    look.add_argument("--document", type=int, metavar="N", help="print the text of one document")
    check = commands.add_parser("check", help="check indexed data in full")
    check.add_argument("prefix", type=Path, help="path without .bin or .idx")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _prepare(output: Path, max_mb: int | None, force: bool) -> None:
    corpus, tokenizer, prefix = StdlibCorpus.of_this_python(max_mb), ByteTokenizer(), text_prefix(output)
    if not force and is_prepared(prefix, corpus.description, tokenizer):
        print(f"{prefix}: there already, unchanged; --force makes it anew", file=sys.stderr)
    else:
        if not force and data_file(prefix, ".bin").exists() and not data_file(prefix, ".json").exists():
            raise DataPrepError(
                f"--output {output}: {data_file(prefix, '.bin')} is there, and no manifest beside it says that it came "
                "from here; choose another --output, or replace it with --force"
            )
        manifest = prepare(corpus, tokenizer, prefix)
        print(f"{manifest.documents} documents, {manifest.tokens} tokens of {manifest.source}", file=sys.stderr)
    print(prefix)


def _inspect(prefix: Path, document: int | None) -> None:
    data, manifest = open_checked(prefix), read_manifest(prefix)
    if document is None:
        told: dict[str, object] = {
            "documents": data.documents,
            "sequences": len(data),
            "tokens": len(data.tokens),
            "number format": data.dtype.name,
        }
        if manifest is not None:
            told |= {"source": manifest.source, "tokenizer": manifest.tokenizer, "vocabulary": manifest.vocab_size}
        print("\n".join(f"{key}: {value}" for key, value in told.items()))
        return
    if not 0 <= document < data.documents:
        raise DataPrepError(f"--document {document}: {prefix} has the documents 0 to {data.documents - 1}")
    if manifest is None or manifest.tokenizer not in TOKENIZERS:
        made_by = "no manifest" if manifest is None else f"the tokenizer {manifest.tokenizer!r}"
        raise DataPrepError(f"--document {document}: {prefix} has {made_by}, so its tokens cannot be turned into text")
    first, last = data.boundaries[document : document + 2].tolist()
    print("".join(TOKENIZERS[manifest.tokenizer].decode(data[sequence]) for sequence in range(first, last)))


def _check(prefix: Path) -> None:
    data, manifest = open_checked(prefix), read_manifest(prefix)
    if manifest is not None and hashes(prefix) != manifest.sha256:
        raise DataPrepError(f"{prefix}: the files are not those that the manifest describes; prepare them anew")
    print(f"{prefix}: sound, {data.documents} documents, {len(data.tokens)} tokens")
