"""The work of one process on a part of the corpus: raw documents become text, pass the filters, become tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import BadDocument
from data_prep.text.formats import DIGEST, Documents, Format, Raw, digest, text_of
from data_prep.tokenizers.tokenizer import Tokenizer
from megatron_ext.data.indexed_dataset import token_dtype


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides, beside the corpus and the tokeniser, on the data."""

    key: str | None = "text"
    """The key of the text in a JSON object; None: a document is the whole object."""
    documents: Documents = Documents.file
    min_chars: int = 1
    max_chars: int | None = None
    unique: bool = False
    """Leave out a text that was there before."""
    split_sentences: bool = False
    """Each sentence is a sequence, without an end."""


class Chunk(NamedTuple):
    """Raw documents that follow each other, of one format."""

    kind: Format
    raw: list[Raw]
    position: int
    """Bytes of the corpus, as it lies on the disk, that have been read for all up to here."""


class Encoded(NamedTuple):
    """A chunk's documents that are left, tokenised; each with its end, or in sentences."""

    lengths: NDArray[np.int32]
    """Lengths of their sequences."""
    sequences: NDArray[np.int64]
    """How many each document has: one, or its sentences."""
    tokens: NDArray[Any]
    """Tokens of all documents, laid end to end."""
    answers: NDArray[np.uint8]
    """[tokens] of conversations: 1 where a token is to be learned. Empty of text, which is learned as a whole."""
    digests: list[bytes]
    """Digests of the texts, where duplicates are to be left out; else none."""
    left_out: Counter[str]
    """How many documents were left out, by reason: `empty`, `short`, `long`, `unanswered`, `special`, `duplicate`."""
    file: int
    """The file of the chunk's last raw document."""
    number: int
    """The number of that document in its file."""


def texts(chunk: Chunk, options: Options, left_out: Counter[str]) -> Iterator[str]:
    """The texts of a chunk that pass the filters; the others are counted. Raises BadDocument: a document has no
    text."""
    for raw in chunk.raw:
        try:
            text = text_of(raw.content, chunk.kind, options.key or "")
        except BadDocument as error:
            raise BadDocument(raw.line - 1 + error.line, error.why, raw.file) from error
        if not text:
            left_out["empty"] += 1
        elif len(text) < options.min_chars:
            left_out["short"] += 1
        elif options.max_chars is not None and len(text) > options.max_chars:
            left_out["long"] += 1
        else:
            yield text


def encode(chunk: Chunk, tokenizer: Tokenizer, options: Options) -> Encoded:
    """Pure: the same chunk gives the same arrays in any process. Raises BadDocument: a document has no text."""
    left_out: Counter[str] = Counter()
    kept = list(texts(chunk, options, left_out))
    if options.split_sentences:
        found, ids = _in_sentences(kept, tokenizer)
        left_out["empty"] += int((found == 0).sum())
        kept = [text for text, count in zip(kept, found.tolist(), strict=True) if count]
        sequences = found[found > 0]
    else:
        ids, sequences = tokenizer.encode(kept), np.ones(len(kept), np.int64)
    lengths, tokens = _laid_end_to_end(ids, tokenizer, with_ends=not options.split_sentences)
    digests = [digest(text) for text in kept] if options.unique else []
    last = chunk.raw[-1]
    return Encoded(lengths, sequences, tokens, np.zeros(0, np.uint8), digests, +left_out, last.file, last.number)


Ids = Sequence[int] | NDArray[np.integer]


def _in_sentences(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[NDArray[np.int64], list[Ids]]:
    """How many sentences with tokens each text has, and their ids."""
    split = [sentences(text) for text in texts]
    encoded = iter(tokenizer.encode([sentence for text in split for sentence in text]))
    full = [[ids for ids in islice(encoded, len(text)) if len(ids)] for text in split]
    return np.array([len(text) for text in full], np.int64), [ids for text in full for ids in text]


def _laid_end_to_end(
    ids: Sequence[Ids], tokenizer: Tokenizer, with_ends: bool
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    lengths = np.fromiter((len(found) + with_ends for found in ids), np.int32, len(ids))
    tokens = np.empty(int(lengths.sum(dtype=np.int64)), token_dtype(tokenizer.vocab_size))
    end = 0
    for found in ids:
        start, end = end, end + len(found) + with_ends
        tokens[start : start + len(found)] = found
        if with_ends:
            tokens[end - 1] = tokenizer.end_of_document
    return lengths, tokens


def without(encoded: Encoded, duplicates: Sequence[int]) -> Encoded:
    """The same less the documents of these numbers."""
    if not duplicates:
        return encoded
    kept = np.ones(len(encoded.sequences), bool)
    kept[duplicates] = False
    sequences = np.repeat(kept, encoded.sequences)
    tokens = np.repeat(sequences, encoded.lengths)
    return encoded._replace(
        lengths=encoded.lengths[sequences],
        sequences=encoded.sequences[kept],
        tokens=encoded.tokens[tokens],
        answers=encoded.answers[tokens] if len(encoded.answers) else encoded.answers,
        left_out=encoded.left_out + Counter(duplicate=len(duplicates)),
    )


class Seen:
    """The texts so far, by their digests, which a file keeps: some 100 bytes of memory for each."""

    def __init__(self, file: BinaryIO) -> None:
        """Takes up what the file holds."""
        self._file = file
        file.seek(0)
        self._digests = set(iter(lambda: file.read(DIGEST), b""))

    def duplicates(self, digests: Sequence[bytes]) -> list[int]:
        """Which of the texts were there before; the others are there from now on."""
        found = []
        for number, own in enumerate(digests):
            if own in self._digests:
                found.append(number)
            else:
                self._digests.add(own)
                self._file.write(own)
        return found


_END = re.compile(
    r"""
    (?: [.!?…]+ ["'”’»)\]]* (?= \s )      # an end of a sentence, with what closes around it, before a space
      | [。！？｡]+ [”’」』）]*              # where no spaces are written
      | (?= \n\s*\n )                     # an empty line
    ) \s*
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"([^\W\d_][\w.]*)\.$")
_OPENING = "\"'“‘«([¿¡*-–—"
ABBREVIATIONS = frozenset(
    (
        *("al", "approx", "bd", "ca", "cf", "ch", "col", "dept", "dr", "ed", "eds", "eg", "est", "fig", "figs", "gen"),
        *("gov", "hon", "ie", "jr", "lt", "maj", "messrs", "mr", "mrs", "ms", "mt", "nos", "op", "p", "pp", "prof"),
        *("rev", "sec", "sen", "sgt", "sr", "st", "vol", "vols", "vs", "z.b", "d.h", "bzw", "e.g", "i.e", "ph.d"),
    )
)
"""Words that end in a full stop within a sentence."""


def sentences(text: str) -> list[str]:
    """The sentences of a text, without the spaces around them; together they have all its words.

    A sentence ends with `.`, `!`, `?` or `…` before a space, where no lower-case letter follows; a full stop ends none
    after a single capital letter or one of `ABBREVIATIONS`. One also ends before an empty line, and with
    `。`, `！` or `？`.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        mark = text[end.start() : end.end()]
        if mark.strip() and not _ends(text[start : end.start()], mark.strip(), text[end.end() : end.end() + 2]):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def _ends(before: str, mark: str, after: str) -> bool:
    first = after.lstrip(_OPENING)[:1]
    if first.islower():
        return False
    if mark != ".":
        return True
    word = _LAST_WORD.search(before[-30:] + mark)
    if word is None:
        return True
    single_capital = len(word[1]) == 1 and word[1].isupper() and word[1] != "I"
    return not single_capital and word[1].lower() not in ABBREVIATIONS
