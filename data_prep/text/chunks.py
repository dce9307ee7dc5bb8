"""A corpus as a stream of chunks, from any place in it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice

from data_prep.errors import BadDocument
from data_prep.files.compressed import Decompressed
from data_prep.text.corpus import Corpus
from data_prep.text.encode import Chunk
from data_prep.text.formats import Documents, Format, Raw, format_of, raw_documents

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
