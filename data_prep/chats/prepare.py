"""From conversations to indexed data with a mask of the answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.chats.encode import Encoder
from data_prep.errors import BadDocument, DataPrepError
from data_prep.files.journal import Journal, publish, work_folder
from data_prep.files.progress import hashes
from data_prep.kinds import ChatsManifest
from data_prep.making import Request
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
from data_prep.text.encode import Options
from data_prep.text.formats import Format, format_of
from data_prep.tokenizers.tokenizer import JsonTokenizer
from data_prep.tokenizers.vocabulary import TOKENIZER
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan_parts import ANSWERS
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
