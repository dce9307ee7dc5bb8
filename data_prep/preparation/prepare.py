"""From text to indexed data."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial as bound
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_prep import making
from data_prep.errors import BadDocument, DataPrepError
from data_prep.files.archives import Decompressed
from data_prep.files.journal import Journal, publish, work_folder
from data_prep.files.progress import hashes, shown
from data_prep.files.workers import in_order
from data_prep.indexed.manifest import Manifest
from data_prep.text.corpus import Corpus
from data_prep.text.encode import Chunk, Encoded, Options, Seen, encode, texts, without
from data_prep.text.formats import LARGEST, Format, Raw, format_of, raw_documents
from data_prep.text.parquet import rows
from data_prep.tokenizers.special import AT_FIRST, AT_LAST, SEPARATOR, vocabulary_of, with_special
from data_prep.tokenizers.tokenizer import END_OF_TEXT, JsonTokenizer, Tokenizer, train_bpe, train_wordpiece
from data_prep.tokenizers.vocabulary import TOKENIZER, count_id, doubt, unknown_id, warn
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.index_maps import saved_maps
from megatron_ext.data.indexed_dataset import OFFSET, IndexedWriter, data_file, token_dtype
from megatron_ext.data.masked.sentence_maps import saved_sentence_maps
from megatron_ext.data.masked.vocabulary import VOCABULARY

TOKENIZER_FILE, VOCABULARY_FILE = "tokenizer.json", "vocabulary.json"
"""In the work folder: the tokeniser, if it has a file; what will be `.vocabulary.json`, for data of sentences."""
TOKENS, INDEX, DIGESTS, BOUNDARIES, MASK = "tokens", "index", "digests", "boundaries", "answers"
"""In the work folder: what will be `.bin` and `.idx`, whose header comes last; digests of the texts so far, where
duplicates are left out; boundaries of the documents so far, where they have several sequences; of conversations the
mask of the answers."""
STEP = "tokenize"
DOCUMENTS_MADE, SEQUENCES, LONGEST, FILE, NUMBER = "documents", "sequences", "longest", "file", "number"
COUNTED = (DOCUMENTS_MADE, SEQUENCES, TOKENS, MASK, LONGEST, FILE, NUMBER)
"""What the journal counts besides documents that were left out: `MASK` tokens of answers, `LONGEST` tokens of a
sequence; the last two are the place of the next raw document."""


@dataclass(frozen=True, kw_only=True)
class Request(making.Request):
    """Text that is to be prepared, and how."""

    tokenizer: Tokenizer | int
    """A number: a vocabulary of so many ids is learned from the corpus."""
    wordpiece: bool = False
    """What is learned is BERT's kind of tokenizer, not a byte-level BPE."""
    sentinels: int = 0
    """That a tokenizer of data of sentences has; T5 needs some."""
    options: Options = field(default_factory=Options)

    def recipe(self) -> dict[str, Any]:
        given = self.tokenizer
        kind = "train_wordpiece" if self.wordpiece else "train_bpe"
        tokenizer = {kind: given} if isinstance(given, int) else {"tokenizer": given.identity}
        options = asdict(self.options)
        if options.pop("split_sentences"):  # other data have the recipe that they had before there were sentences
            options |= {"split_sentences": True, "vocab_extra_ids": self.sentinels}
        return {"corpus_sha256": self.corpus.digest(), **options, **tokenizer}


def prepare(request: Request, prefix: Path, recipe: dict[str, Any] | None = None) -> Manifest:
    """Writes indexed data and their manifest; shows progress on stderr. Nothing half-written takes their names.

    What an earlier call left unfinished is gone on with. The bytes do not depend on `request.workers`.

    Raises:
        DataPrepError: the text cannot be read, there is none, or the files cannot be written.
    """
    recipe = recipe or request.recipe()
    try:
        with work_folder(prefix, recipe) as folder:
            journal = Journal(folder)
            tokenizer = _tokenizer(request, folder)
            counts = write_documents(
                request,
                bound(encode, tokenizer=tokenizer, options=request.options),
                request.options,
                token_dtype(tokenizer.vocab_size),
                journal,
                noun="documents",
                none="no text in its files",
            )
            _require_known(request, tokenizer, journal)
            made = {".bin": folder / TOKENS, TOKENIZER: folder / TOKENIZER_FILE, VOCABULARY: folder / VOCABULARY_FILE}
            made = {suffix: path for suffix, path in (made | {".idx": folder / INDEX}).items() if path.exists()}
            manifest = Manifest(
                source=request.corpus.description,
                recipe=recipe,
                tokenizer=tokenizer.name,
                vocab_size=tokenizer.vocab_size,
                end_of_document=tokenizer.end_of_document,
                end_token=tokenizer.end_token if isinstance(tokenizer, JsonTokenizer) else None,
                documents=counts[DOCUMENTS_MADE],
                tokens=counts[TOKENS],
                left_out=left_out(counts),
                sha256=hashes(made),
            )
            # Index maps of older data would keep a run from beginning.
            older = [data_file(prefix, suffix) for suffix in (".idx", TOKENIZER, VOCABULARY)]
            older += [*saved_maps(prefix), *saved_sentence_maps(prefix)]
            publish(folder, prefix, {suffix: path.name for suffix, path in made.items()}, manifest.to_json(), older)
            return manifest
    except BadDocument as error:
        raise error.in_file(request.corpus.files[error.file]) from error


def _tokenizer(request: Request, folder: Path) -> Tokenizer:
    """The tokeniser, its file in the folder if it has one; learned only once."""
    tokenizer = request.tokenizer
    if isinstance(tokenizer, int):
        end = SEPARATOR if request.options.split_sentences or request.wordpiece else END_OF_TEXT
        there = (folder / TOKENIZER_FILE).exists()
        tokenizer = JsonTokenizer.from_file(folder / TOKENIZER_FILE, end) if there else _learned(request, tokenizer)
    if request.options.split_sentences:
        assert isinstance(tokenizer, JsonTokenizer)
        tokenizer = with_special(tokenizer.content, request.sentinels)
        write_atomic(folder / VOCABULARY_FILE, vocabulary_of(tokenizer).to_json())
    if tokenizer.content is not None:
        write_atomic(folder / TOKENIZER_FILE, tokenizer.content)
    return tokenizer


def _learned(request: Request, vocab_size: int) -> JsonTokenizer:
    corpus = request.corpus
    with shown(f"learning the tokenizer from {corpus.description}", corpus.bytes) as show:
        work = bound(_texts, options=request.options)
        read = show.reading(chunks(corpus, request.options))
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


def write_documents(
    request: making.Request,
    work: Callable[[Chunk], Encoded],
    options: Options,
    dtype: np.dtype[Any],
    journal: Journal,
    *,
    noun: str,
    none: str,
) -> Counter[str]:
    """Writes tokens, index, and the mask of answers to their end.

    Args:
        request: whose corpus is read, by so many workers.
        work: makes tokens of `dtype` of raw documents; can be pickled.
        options: what a document is, and whether its sentences are sequences.
        noun: what documents are called.
        none: says that there is none.

    Returns:
        COUNTED, and how many documents were left out by reason.

    Raises:
        DataPrepError: there is none.
    """
    if (found := journal.finished(STEP)) is not None:
        return found
    corpus = request.corpus
    bar = shown(f"tokenizing {corpus.description}", corpus.bytes)
    with bar as show, journal.step(STEP, (TOKENS, INDEX, DIGESTS, BOUNDARIES, MASK)) as step:
        counts, files = step.counts, step.files
        writer = IndexedWriter(files[TOKENS], files[INDEX], dtype, counts[SEQUENCES], counts[TOKENS])
        if counts[DOCUMENTS_MADE]:
            show.say(f"continuing after {counts[DOCUMENTS_MADE]:,} {noun}")
        seen = Seen(files[DIGESTS])
        read = show.reading(chunks(corpus, options, counts[FILE], counts[NUMBER]))
        try:
            with closing(in_order(work, read, request.workers)) as results:
                for encoded in results:
                    left = without(encoded, seen.duplicates(encoded.digests))
                    if options.split_sentences:
                        files[BOUNDARIES].write((writer.documents + np.cumsum(left.sequences)).astype(OFFSET).data)
                    writer.extend(left.lengths, left.tokens)
                    files[MASK].write(left.answers.data)
                    counts.update(left.left_out)
                    counts[DOCUMENTS_MADE] += len(left.sequences)
                    counts[SEQUENCES], counts[TOKENS] = writer.documents, writer.tokens
                    counts[MASK] += int(left.answers.sum(dtype=int))
                    counts[LONGEST] = max(counts[LONGEST], int(left.lengths.max(initial=0)))
                    counts[FILE], counts[NUMBER] = left.file, left.number + 1
                    step.done(len(left.sequences))
                    show.tokens(writer.tokens)
        except KeyboardInterrupt:
            show.say(f"interrupted after {counts[DOCUMENTS_MADE]:,} {noun}; the same command continues from there")
            raise
        if not writer.documents:
            why = ", ".join(f"{count} {reason}" for reason, count in left_out(counts).items())
            raise DataPrepError(f"{corpus.description}: {none}{why and f' ({why})'}")
        writer.finish(_boundaries(files[BOUNDARIES]) if options.split_sentences else None)
    return counts


def left_out(counts: Mapping[str, int]) -> dict[str, int]:
    """How many documents were left out, by reason, of what `write_documents` returns."""
    return {reason: count for reason, count in counts.items() if reason not in COUNTED}


def _require_known(request: Request, tokenizer: Tokenizer, journal: Journal) -> None:
    """Warns on stderr where the vocabulary lacks more than a few per cent of the text. Raises DataPrepError: it lacks
    nearly all."""
    unknown = None if tokenizer.content is None else unknown_id(tokenizer.content)
    if unknown is None:
        return
    tokens = np.memmap(journal.folder / TOKENS, token_dtype(tokenizer.vocab_size), "r")
    way_out = f"give the {tokenizer.name} vocabulary of this text, or learn one with --train-bpe N"
    try:
        warn(doubt(count_id(tokens, unknown), len(tokens), request.corpus.description, way_out))
    except DataPrepError:
        journal.delete()  # the same command would fail again
        raise


def _boundaries(file: BinaryIO) -> NDArray[np.int64]:
    """Returns where documents of several sequences end, after the beginning of the first."""
    file.flush()
    ends = np.memmap(file.name, OFFSET, "r")
    return np.concatenate([np.zeros(1, OFFSET), ends])


BYTES = 1 << 20
DOCUMENTS = 2048
"""A chunk ends with the document that brings it to either."""


def chunks(corpus: Corpus, options: Options, file: int = 0, number: int = 0) -> Iterator[Chunk]:
    """All raw documents from `number` of `file` on, a bounded part of them in memory at a time. Raises DataPrepError: a
    file cannot be read; it names the file and the line."""
    held: list[Raw] = []
    size = position = 0
    kind = Format.text
    for raw, raw_kind, raw_position in _raw(corpus, options, file, number):
        if held and (raw_kind is not kind or size >= BYTES or len(held) >= DOCUMENTS):
            yield Chunk(kind, held, position)
            held, size = [], 0
        held.append(raw)
        size += len(raw.content)
        kind, position = raw_kind, raw_position
    if held:
        yield Chunk(kind, held, position)


def _raw(corpus: Corpus, options: Options, first: int, number: int) -> Iterator[tuple[Raw, Format, int]]:
    before = sum(path.stat().st_size for path in corpus.files[:first])
    for file in range(first, len(corpus.files)):
        path = corpus.files[file]
        kind, skipped = format_of(path), number if file == first else 0
        try:
            if kind is Format.parquet:
                for row, raw, position in rows(path, options.key, skipped, LARGEST):
                    yield Raw(file, row, row + 1, raw), kind, before + position
            else:
                with Decompressed(path) as content:
                    stream = io.BufferedReader(content, 1 << 18)
                    found = enumerate(raw_documents(stream, kind, options.documents))
                    for place, (line, raw) in islice(found, skipped, None):
                        yield Raw(file, place, line, raw), kind, before + content.position
        except BadDocument as error:
            raise error.in_file(path) from error
        before += path.stat().st_size
