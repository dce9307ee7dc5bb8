"""From conversations to indexed data with a mask of the answers, and the options of `tdpp data chats`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.visible import plural
from data_prep.chats.encode import Encoder, special_tokens
from data_prep.chats.template import template_of
from data_prep.errors import BadDocument, DataPrepError, of_option
from data_prep.files.journal import Journal, publish, work_folder
from data_prep.files.progress import hashes
from data_prep.kinds import ChatsManifest
from data_prep.making import Request, add_common_options, add_number, add_output, add_source, workers_of
from data_prep.preparation.prepare import (
    DOCUMENTS_MADE,
    INDEX,
    LONGEST,
    MASK,
    TOKENIZER_FILE,
    TOKENS,
    left_out,
    write_documents,
)
from data_prep.text.corpus import corpus_of
from data_prep.text.encode import Options
from data_prep.text.formats import Format, format_of
from data_prep.tokenizers.tokenizer import JsonTokenizer, content_of, eos_token_of, loaded
from data_prep.tokenizers.vocabulary import TOKENIZER
from megatron_ext.contract.data_parts import ANSWERS
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.indexed_dataset import token_dtype


@dataclass(frozen=True, kw_only=True)
class ChatsRequest(Request):
    encoder: Encoder
    end: str
    """How the tokenizer calls the end of a text; of the data's manifest."""

    def recipe(self) -> dict[str, Any]:
        encoder, template = self.encoder, self.encoder.template
        return {
            "corpus_sha256": self.corpus.digest(),
            "tokenizer": JsonTokenizer(encoder.content, self.end).identity,
            "template": None if template is None else template.source,
            "tokens": None if template is None else template.tokens,
            "day": template.day if template is not None and template.dated else None,
            "end": encoder.end,
            "max_tokens": encoder.max_tokens,
            "unique": encoder.unique,
        }


def prepare(request: ChatsRequest, prefix: Path, recipe: dict[str, Any]) -> ChatsManifest:
    """Writes conversations and their manifest; shows progress on stderr. Nothing half-written takes their names.

    What an earlier call left unfinished is gone on with. The bytes do not depend on `request.workers`.

    Raises:
        DataPrepError: a file cannot be read, a record is no conversation, none is left, or the files cannot be written.
    """
    for path in request.corpus.files:
        if format_of(path) not in (Format.jsonl, Format.parquet):
            raise DataPrepError(f"--source {path}: not JSON lines (.jsonl, .json, .ndjson) or Parquet (.parquet)")
    encoder = request.encoder
    try:
        with work_folder(prefix, recipe) as folder:
            dtype = token_dtype(encoder.vocab_size)
            none = "no conversation with an answer"
            counts = write_documents(
                request, encoder, Options(key=None), dtype, Journal(folder), noun="conversations", none=none
            )
            write_atomic(folder / TOKENIZER_FILE, encoder.content)
            files = {".bin": TOKENS, ".idx": INDEX, ANSWERS: MASK, TOKENIZER: TOKENIZER_FILE}
            manifest = ChatsManifest(
                conversations=counts[DOCUMENTS_MADE],
                tokens=counts[TOKENS],
                answers=counts[MASK],
                longest=counts[LONGEST],
                vocab_size=encoder.vocab_size,
                end_token=request.end,
                corpus=request.corpus.description,
                left_out=left_out(counts),
                sha256=hashes({suffix: folder / name for suffix, name in files.items()}),
            )
            publish(folder, prefix, files, manifest.to_json(recipe))
            return manifest
    except BadDocument as error:
        raise error.in_file(request.corpus.files[error.file]) from error


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data chats` takes."""
    add_source(
        make,
        "files and folders of JSON lines (.jsonl, .json; also .gz, .bz2, .zst) or Parquet, a conversation each: "
        "messages with role and content, prompt and completion, or ShareGPT's conversations with from and value",
        Path,
    )
    make.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="PATH",
        help="the model's folder with tokenizer.json and its chat template, or a tokenizer.json",
    )
    make.add_argument(
        "--template", type=Path, metavar="FILE", help="a chat template of Jinja, instead of the tokenizer's own"
    )
    add_output(make, "<output>.bin, .idx, .answers")
    add_number(make, "--max-tokens", "leave out longer conversations")
    make.add_argument("--unique", action="store_true", help="leave out conversations that occurred before")
    add_common_options(make)


def summary(made: ChatsManifest) -> str:
    """What was prepared, in a line."""
    left_out = "".join(f", {count} {reason}" for reason, count in made.left_out.items())
    return (
        f"{plural(made.conversations, 'conversation')} of up to {made.longest} tokens, {made.tokens} tokens, "
        f"{made.answers} of them in answers, of {made.corpus}; {f'left out:{left_out[1:]}; ' if left_out else ''}"
        f"model.vocab_size={made.vocab_size}"
    )


def request_of(arguments: argparse.Namespace) -> ChatsRequest:
    """What the options ask for."""
    path: Path = arguments.tokenizer
    with of_option("--tokenizer", path):
        content, end = content_of(path), eos_token_of(path)
        tokenizer = loaded(content)
    special = special_tokens(tokenizer)
    with of_option("--tokenizer" if arguments.template is None else "--template", arguments.template or path):
        template = template_of(path, arguments.template, special)
    corpus = corpus_of(arguments.source)
    return ChatsRequest(
        corpus=corpus,
        encoder=Encoder(
            content=content,
            end=end,
            template=template,
            max_tokens=arguments.max_tokens,
            unique=arguments.unique,
        ),
        end=end or next(iter(special), next(iter(tokenizer.get_vocab()))),
        workers=workers_of(arguments, corpus),
    )
