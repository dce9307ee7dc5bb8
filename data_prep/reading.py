"""A corpus as a stream of chunks, from any place in it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice

from data_prep.compressed import Decompressed
from data_prep.corpus import Corpus
from data_prep.encode import BadRaw, Chunk
from data_prep.errors import DataPrepError
from data_prep.formats import BadDocument, Documents, Format, Raw, format_of, raw_documents
from data_prep.mediawiki import BadXml

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
            except BadXml as error:
                raise DataPrepError(
                    f"{path}:{error.line}: not XML from here on ({error}); the dump is damaged or was not copied whole"
                ) from error
            except BadDocument as error:
                raise DataPrepError(f"{path}:{error.line + 1}: {error.why}") from error
            before += content.position


def told(corpus: Corpus, bad: BadRaw) -> DataPrepError:
    """The error of a document without text, with its file's name."""
    return DataPrepError(f"{corpus.files[bad.file]}:{bad.line}: {bad.why}")
