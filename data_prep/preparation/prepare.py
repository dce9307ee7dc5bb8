"""From text to indexed data."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial as bound
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import BadDocument, DataPrepError
from data_prep.files.compressed import Decompressed
from data_prep.files.progress import shown
from data_prep.files.workers import in_order
from data_prep.indexed.manifest import Manifest, is_true, read_manifest
from data_prep.preparation.partial import Partial, Progress, partial
from data_prep.text.corpus import Corpus
from data_prep.text.encode import Chunk, Options, Seen, encode, texts, without
from data_prep.text.formats import Documents, Format, Raw, format_of, raw_documents
from data_prep.tokenizers.special import AT_FIRST, AT_LAST, SEPARATOR, vocabulary_of, with_special
from data_prep.tokenizers.tokenizer import END_OF_TEXT, JsonTokenizer, Tokenizer, train_bpe, train_wordpiece
from data_prep.tokenizers.vocabulary import count_id, doubt, unknown_id, warn
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.indexed_dataset import OFFSET, IndexedWriter, token_dtype

SAVE_EVERY_S = 15.0
"""At most so much work is lost when a preparation is interrupted."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be prepared, and how."""

    corpus: Corpus
    tokenizer: Tokenizer | int
    """A number: a vocabulary of so many ids is learned from the corpus."""
    wordpiece: bool = False
    """What is learned is BERT's kind of tokenizer, not a byte-level BPE."""
    sentinels: int = 0
    """That a tokenizer of data of sentences has; T5 needs some."""
    options: Options = field(default_factory=Options)
    workers: int = 1

    def recipe(self) -> dict[str, Any]:
        """All that the data follow from. Reads the whole corpus, with progress on stderr.

        Raises:
            DataPrepError: a file cannot be read.
        """
        given = self.tokenizer
        kind = "train_wordpiece" if self.wordpiece else "train_bpe"
        tokenizer = {kind: given} if isinstance(given, int) else {"tokenizer": given.identity}
        options = asdict(self.options)
        if options.pop("split_sentences"):  # other data have the recipe that they had before there were sentences
            options |= {"split_sentences": True, "vocab_extra_ids": self.sentinels}
        return {"corpus_sha256": self.corpus.digest(), **options, **tokenizer}


def is_prepared(prefix: Path, recipe: dict[str, Any]) -> bool:
    """Whether the files are there, unchanged, and of this recipe."""
    try:
        manifest = read_manifest(prefix)
    except DataPrepError:  # Nobody can tell what the data are: that is for `prepare` to mend.
        return False
    return manifest is not None and manifest.recipe == recipe and is_true(manifest, prefix)


def prepare(request: Request, prefix: Path, recipe: dict[str, Any] | None = None) -> Manifest:
    """Writes indexed data and their manifest; shows progress on stderr. Nothing half-written takes their names.

    What an earlier call left unfinished is gone on with. The bytes do not depend on `request.workers`.

    Args:
        request: what to prepare.
        prefix: the data's path without endings.
        recipe: of the request, where it is known.

    Raises:
        DataPrepError: the text cannot be read, there is none, or the files cannot be written.
    """
    recipe = recipe or request.recipe()
    try:
        with partial(prefix, recipe) as folder:
            tokenizer = _tokenizer(request, folder)
            end = _write(request, tokenizer, folder)
            _require_known(request, tokenizer, folder)
            return folder.publish(
                Manifest(
                    source=request.corpus.description,
                    recipe=recipe,
                    tokenizer=tokenizer.name,
                    vocab_size=tokenizer.vocab_size,
                    end_of_document=tokenizer.end_of_document,
                    end_token=tokenizer.end_token if isinstance(tokenizer, JsonTokenizer) else None,
                    documents=end.documents,
                    tokens=end.tokens,
                    left_out=end.left_out,
                    sha256={},
                )
            )
    except BadDocument as error:
        raise error.in_file(request.corpus.files[error.file]) from error


def _tokenizer(request: Request, folder: Partial) -> Tokenizer:
    """The tokeniser, its file in the folder if it has one; learned only once."""
    tokenizer = request.tokenizer
    if isinstance(tokenizer, int):
        end = SEPARATOR if request.options.split_sentences or request.wordpiece else END_OF_TEXT
        there = folder.tokenizer.exists()
        tokenizer = JsonTokenizer.from_file(folder.tokenizer, end) if there else _learned(request, tokenizer)
    if request.options.split_sentences:
        assert isinstance(tokenizer, JsonTokenizer)
        tokenizer = with_special(tokenizer.content, request.sentinels)
        write_atomic(folder.vocabulary, vocabulary_of(tokenizer).to_json())
    if tokenizer.content is not None:
        write_atomic(folder.tokenizer, tokenizer.content)
    return tokenizer


def _learned(request: Request, vocab_size: int) -> JsonTokenizer:
    corpus = request.corpus
    with shown(f"learning the tokenizer from {corpus.description}", corpus.bytes) as show:
        work = bound(_texts, options=request.options)
        read = show.reading(chunks(corpus, request.options.documents))
        with closing(in_order(work, read, request.workers)) as results:
            found = (text for texts in results for text in texts)
            left = vocab_size - len(AT_LAST) - request.sentinels  # these come after what is learned
            if request.wordpiece:
                return train_wordpiece(found, left, AT_FIRST)
            if request.options.split_sentences:
                return train_bpe(found, left, AT_FIRST)
            return train_bpe(found, vocab_size)


def _texts(chunk: Chunk, options: Options) -> list[str]:
    return list(texts(chunk, options, Counter()))


def _write(request: Request, tokenizer: Tokenizer, folder: Partial) -> Progress:
    """Writes tokens and index to their end; returns the counts.

    Raises:
        DataPrepError: there is no text.
    """
    corpus, options, dtype = request.corpus, request.options, token_dtype(tokenizer.vocab_size)
    bar = shown(f"tokenizing {corpus.description}", corpus.bytes)
    with folder.open(dtype.itemsize, options.unique, options.split_sentences) as (progress, files), bar as show:
        writer = IndexedWriter(files.tokens, files.idx, dtype, progress.sequences, progress.tokens)
        if progress.documents:
            show.say(f"continuing after {progress.documents:,} documents")
        seen = Seen(files.digests)
        saved = time.monotonic()
        read = show.reading(chunks(corpus, options.documents, progress.file, progress.number))
        work = bound(encode, tokenizer=tokenizer, options=options)
        try:
            with closing(in_order(work, read, request.workers)) as results:
                for encoded in results:
                    left = without(encoded, seen.duplicates(encoded.digests))
                    if options.split_sentences:
                        files.boundaries.write((writer.documents + np.cumsum(left.sequences)).astype(OFFSET).data)
                    writer.extend(left.lengths, left.tokens)
                    progress = progress.after(left, writer.documents, writer.tokens)
                    show.tokens(writer.tokens)
                    if time.monotonic() - saved >= SAVE_EVERY_S:
                        folder.save(progress, files)
                        saved = time.monotonic()
        except KeyboardInterrupt:
            folder.save(progress, files)
            show.say(f"interrupted after {progress.documents:,} documents; the same command continues from there")
            raise
        if not writer.documents:
            why = ", ".join(f"{count} {reason}" for reason, count in progress.left_out.items())
            raise DataPrepError(f"{corpus.description}: no text in its files{why and f' ({why})'}")
        writer.finish(_boundaries(files.boundaries) if options.split_sentences else None)
    return progress


def _require_known(request: Request, tokenizer: Tokenizer, folder: Partial) -> None:
    """Warns on stderr where the vocabulary lacks more than a few per cent of the text.

    Raises:
        DataPrepError: it lacks nearly all.
    """
    unknown = None if tokenizer.content is None else unknown_id(tokenizer.content)
    if unknown is None:
        return
    tokens = np.memmap(folder.folder / "tokens", token_dtype(tokenizer.vocab_size), "r")
    way_out = f"give the {tokenizer.name} vocabulary of this text, or learn one with --train-bpe N"
    try:
        warn(doubt(count_id(tokens, unknown), len(tokens), request.corpus.description, way_out))
    except DataPrepError:
        folder.give_up()
        raise


def _boundaries(file: BinaryIO) -> NDArray[np.int64]:
    """Returns where documents of several sequences end, after the beginning of the first."""
    file.flush()
    ends = np.memmap(file.name, OFFSET, "r")
    return np.concatenate([np.zeros(1, OFFSET), ends])


BYTES = 1 << 20
DOCUMENTS = 2048
"""A chunk ends with the document that brings it to either."""


def chunks(corpus: Corpus, documents: Documents, file: int = 0, number: int = 0) -> Iterator[Chunk]:
    """All raw documents from `number` of `file` on, a bounded part of them in memory at a time.

    Raises:
        DataPrepError: a file cannot be read; it names the file and the line.
    """
    held: list[Raw] = []
    size = position = 0
    kind = Format.text
    for raw, raw_kind, raw_position in _raw(corpus, documents, file, number):
        if held and (raw_kind is not kind or size >= BYTES or len(held) >= DOCUMENTS):
            yield Chunk(kind, held, position)
            held, size = [], 0
        held.append(raw)
        size += len(raw.content)
        kind, position = raw_kind, raw_position
    if held:
        yield Chunk(kind, held, position)


def _raw(corpus: Corpus, documents: Documents, first: int, number: int) -> Iterator[tuple[Raw, Format, int]]:
    before = sum(path.stat().st_size for path in corpus.files[:first])
    for file in range(first, len(corpus.files)):
        path = corpus.files[file]
        kind, skipped = format_of(path), number if file == first else 0
        with Decompressed(path) as content:
            stream = io.BufferedReader(content, 1 << 18)
            try:
                found = enumerate(raw_documents(stream, kind, documents))
                for place, (line, raw) in islice(found, skipped, None):
                    yield Raw(file, place, line, raw), kind, before + content.position
            except BadDocument as error:
                raise error.in_file(path) from error
            before += content.position
