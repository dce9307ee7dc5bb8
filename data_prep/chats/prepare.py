"""From conversations to indexed data with a mask of the answers."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.chats.encode import Encoder, without
from data_prep.errors import BadDocument, DataPrepError
from data_prep.files.journal import Journal, publish
from data_prep.files.progress import hashes, shown
from data_prep.files.workers import in_order
from data_prep.kinds import ChatsManifest
from data_prep.making import Request, making
from data_prep.preparation.prepare import chunks
from data_prep.text.encode import Options, Seen
from data_prep.text.formats import Format, format_of
from data_prep.tokenizers.tokenizer import JsonTokenizer
from data_prep.tokenizers.vocabulary import TOKENIZER
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.plan_parts import ANSWERS
from megatron_ext.data.indexed_dataset import IndexedWriter, token_dtype

TOKENIZER_FILE, TOKENS, INDEX, MASK, DIGESTS = "tokenizer.json", "tokens", "index", "answers", "digests"
"""In the work folder."""
STEP = "render"
MADE, FILE, NUMBER, LONGEST = "conversations", "file", "number", "longest"
COUNTED = (MADE, TOKENS, MASK, FILE, NUMBER, LONGEST)
"""What the journal counts besides conversations that were left out."""


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
    with making(prefix, recipe) as journal:
        try:
            counts = _write(request, journal)
        except BadDocument as error:
            raise error.in_file(request.corpus.files[error.file]) from error
        folder = journal.folder
        write_atomic(folder / TOKENIZER_FILE, request.encoder.content)
        files = {".bin": TOKENS, ".idx": INDEX, ANSWERS: MASK, TOKENIZER: TOKENIZER_FILE}
        manifest = ChatsManifest(
            conversations=counts[MADE],
            tokens=counts[TOKENS],
            answers=counts[MASK],
            longest=counts[LONGEST],
            vocab_size=request.encoder.vocab_size,
            end_token=request.end,
            corpus=request.corpus.description,
            left_out={reason: count for reason, count in counts.items() if reason not in COUNTED},
            sha256=hashes({suffix: folder / name for suffix, name in files.items()}),
        )
        publish(folder, prefix, files, manifest.to_json(recipe))
        return manifest


def _write(request: ChatsRequest, journal: Journal) -> Counter[str]:
    """Writes tokens, index and mask to their end; returns COUNTED, and how many were left out by reason.

    Raises:
        DataPrepError: there is no conversation.
    """
    if (found := journal.finished(STEP)) is not None:
        return found
    corpus, encoder = request.corpus, request.encoder
    for path in corpus.files:
        if format_of(path) not in (Format.jsonl, Format.parquet):
            raise DataPrepError(f"--source {path}: not JSON lines (.jsonl, .json, .ndjson) or Parquet (.parquet)")
    bar = shown(f"tokenizing {corpus.description}", corpus.bytes)
    with bar as show, journal.step(STEP, (TOKENS, INDEX, MASK, DIGESTS)) as step:
        counts, files = step.counts, step.files
        writer = IndexedWriter(
            files[TOKENS], files[INDEX], token_dtype(encoder.vocab_size), counts[MADE], counts[TOKENS]
        )
        if counts[MADE]:
            show.say(f"continuing after {counts[MADE]:,} conversations")
        seen = Seen(files[DIGESTS])
        read = show.reading(chunks(corpus, Options(key=None), counts[FILE], counts[NUMBER]))
        with closing(in_order(encoder, read, request.workers)) as results:
            for encoded in results:
                left = without(encoded, seen.duplicates(encoded.digests))
                writer.extend(left.lengths, left.tokens)
                files[MASK].write(left.answers.data)
                counts.update(left.left_out)
                counts[MADE], counts[TOKENS] = writer.documents, writer.tokens
                counts[MASK] += int(left.answers.sum(dtype=int))
                counts[LONGEST] = max(counts[LONGEST], int(left.lengths.max(initial=0)))
                counts[FILE], counts[NUMBER] = left.file, left.number + 1
                step.done(len(left.lengths))
                show.tokens(writer.tokens)
        if not writer.documents:
            why = ", ".join(f"{count} {reason}" for reason, count in counts.items() if reason not in COUNTED)
            raise DataPrepError(f"{corpus.description}: no conversation with an answer{why and f' ({why})'}")
        writer.finish()
    return counts
