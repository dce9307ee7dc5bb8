"""Megatron's indexed dataset: `<prefix>.bin` holds tokens, `<prefix>.idx` says where each sequence lies.

docs/formats.md ("Indexed data") has the layout. Both directions stream: the reader maps the files, the writer keeps
neither tokens nor lengths, so its memory does not grow with the data.
"""

from __future__ import annotations

import os
import stat
import struct
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Dict, Iterable, Iterator, Optional, Tuple, Union

import numpy as np

from megatron_ext.contract.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, sequences, document boundaries."""
DTYPES: Dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LENGTH = np.dtype("<i4")
OFFSET = np.dtype("<i8")
BLOCK = 1 << 20
"""Sequences handled at once where all are gone through."""


def data_file(prefix: Union[str, Path], suffix: str) -> Path:
    """`<prefix><suffix>`; a dot in the prefix stays part of the name."""
    return Path(str(prefix) + suffix)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron stores tokens in: two bytes where the ids fit, with its own margin, else four."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class IndexedDataset:
    """A memory-mapped view of an indexed dataset, checked in full when it is opened.

    `lengths` (i32, tokens) and `offsets` (i64, bytes) have one entry per sequence; `boundaries` (i64) has one entry
    more than there are documents: document d is the sequences `boundaries[d]` to `boundaries[d + 1]`.
    `tokens` is the whole `.bin`, one-dimensional.

    Raises:
        DataError: a file is missing, is not an indexed dataset, or the two do not belong together.
    """

    def __init__(self, prefix: Union[str, Path]) -> None:
        self.bin = data_file(prefix, ".bin")
        self.idx = data_file(prefix, ".idx")
        size, bin_size = _size(self.idx), _size(self.bin)
        self.dtype, sequences, boundaries = self._header()
        expected = HEADER.size + sequences * (LENGTH.itemsize + OFFSET.itemsize) + boundaries * OFFSET.itemsize
        if size != expected:
            raise DataError(
                f"{self.idx}: expected {expected} bytes for the {sequences} sequences and {boundaries} document "
                f"boundaries in its header, found {size}; the file is damaged or was not copied completely"
            )
        index = _map(self.idx, size)
        lengths_end = HEADER.size + sequences * LENGTH.itemsize
        offsets_end = lengths_end + sequences * OFFSET.itemsize
        self.lengths: NDArray[np.int32] = index[HEADER.size : lengths_end].view(LENGTH)
        self.offsets: NDArray[np.int64] = index[lengths_end:offsets_end].view(OFFSET)
        self.boundaries: NDArray[np.int64] = index[offsets_end:].view(OFFSET)
        self._check_boundaries()
        expected = self._check_offsets()
        if bin_size != expected:
            raise DataError(
                f"{self.bin}: expected {expected} bytes, as {self.idx.name} says, but found {bin_size}; the two files "
                "do not belong together, or one was not copied completely"
            )
        self.tokens: NDArray[Any] = _map(self.bin, bin_size).view(self.dtype)

    def __len__(self) -> int:
        """Sequences."""
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        """The tokens of one sequence: a view of the file, in its dtype."""
        start = int(self.offsets[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    @property
    def documents(self) -> int:
        return len(self.boundaries) - 1

    def _header(self) -> Tuple[np.dtype[Any], int, int]:
        try:
            with self.idx.open("rb") as file:
                raw = file.read(HEADER.size)
        except OSError as error:
            raise _unreadable(self.idx, error) from error
        if raw[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"{self.idx}: expected {MAGIC!r} at the start, found {raw[: len(MAGIC)]!r}; this is not the index of "
                "a Megatron indexed dataset"
            )
        if len(raw) < HEADER.size:
            raise DataError(
                f"{self.idx}: expected a header of {HEADER.size} bytes, found {len(raw)}; the file was not copied "
                f"completely"
            )
        _, version, code, sequences, boundaries = HEADER.unpack(raw)
        if version != VERSION:
            raise DataError(f"{self.idx}: expected version {VERSION}, found {version}")
        if code not in DTYPES:
            known = ", ".join(f"{known} {dtype.name}" for known, dtype in DTYPES.items())
            raise DataError(f"{self.idx}: expected a dtype code out of {known}; found {code}")
        return DTYPES[code], sequences, boundaries

    def _check_boundaries(self) -> None:
        found = self.boundaries
        if not len(found) or found[0] != 0 or found[-1] != len(self) or bool(np.any(found[1:] < found[:-1])):
            ends = f"{found[0]} … {found[-1]}" if len(found) else "none"
            raise DataError(
                f"{self.idx}: expected document boundaries that rise from 0 to {len(self)}, the number of sequences, "
                f"found {len(found)} of them: {ends}; the file is damaged"
            )

    def _check_offsets(self) -> int:
        """Every sequence must begin where the one before ends. Returns the bytes that all take."""
        end = 0
        for first in range(0, len(self), BLOCK):
            lengths = self.lengths[first : first + BLOCK].astype(np.int64)
            if lengths.min() < 0:
                wrong = int(np.argmax(lengths < 0))
                raise DataError(
                    f"{self.idx}: expected a length of at least 0 for sequence {first + wrong}, found "
                    f"{lengths[wrong]}; the file is damaged"
                )
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            starts = ends - lengths * self.dtype.itemsize
            differs = self.offsets[first : first + BLOCK] != starts
            if differs.any():
                wrong = int(np.argmax(differs))
                raise DataError(
                    f"{self.idx}: expected sequence {first + wrong} to begin at byte {starts[wrong]}, where the one "
                    f"before it ends, found {self.offsets[first + wrong]}; the file is damaged"
                )
            end = int(ends[-1])
        return end


class IndexedWriter:
    """Appends documents to the open files of an indexed dataset, one sequence per document; see `indexed_writer`.

    It goes on after the first `documents` and their `tokens`, which the files hold already; what they have beyond
    goes away.
    """

    def __init__(
        self, tokens: BinaryIO, index: BinaryIO, dtype: np.dtype[Any], documents: int = 0, written: int = 0
    ) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._limits = np.iinfo(self.dtype)
        self._tokens = tokens
        self._index = index
        self.documents = documents
        self.tokens = written
        # The lengths follow the header, so they are written as they come; `finish` fills the header in.
        for file, size in (
            (tokens, written * self.dtype.itemsize),
            (index, HEADER.size + documents * LENGTH.itemsize),
        ):
            file.truncate(size)
            file.seek(size)

    def add(self, document: NDArray[Any]) -> None:
        """Appends one document, a one-dimensional array of token ids. Raises DataError: it does not fit the format or
        the dtype."""
        if len(document) > np.iinfo(LENGTH).max:
            raise DataError(
                f"document {self.documents} has {len(document)} tokens, but the format allows "
                f"{np.iinfo(LENGTH).max}: cut it"
            )
        self._check_ids(document, f"document {self.documents} has")
        self.extend(np.array([len(document)], LENGTH), document)

    def extend(self, lengths: NDArray[np.int32], tokens: NDArray[Any]) -> None:
        """Appends documents of these `lengths`, their `tokens` laid end to end. Raises DataError: an id does not fit
        the dtype."""
        self._check_ids(tokens, f"document {self.documents} or one after it has")
        self._tokens.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._index.write(np.ascontiguousarray(lengths, LENGTH).data)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def _check_ids(self, tokens: NDArray[Any], who: str) -> None:
        if tokens.dtype == self.dtype or not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < self._limits.min or high > self._limits.max:
            raise DataError(
                f"{who} token ids from {low} to {high}, but {self.dtype.name} holds {self._limits.min} to "
                f"{self._limits.max}: use a wider dtype"
            )

    def finish(self, boundaries: Optional[NDArray[np.int64]] = None) -> None:
        """Writes the rest of the index: offsets, document boundaries, header.

        Without `boundaries` (see `IndexedDataset`) each sequence is a document.
        """
        self._index.flush()
        lengths = np.empty(0, LENGTH)
        if self.documents:
            lengths = np.memmap(self._index.name, LENGTH, "r", HEADER.size, self.documents)
        end = 0
        for first in range(0, self.documents, BLOCK):
            sizes = lengths[first : first + BLOCK].astype(OFFSET) * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            self._index.write((ends - sizes).astype(OFFSET).data)
            end = int(ends[-1])
        count = self.documents + 1 if boundaries is None else len(boundaries)
        for first in range(0, count, BLOCK):
            last = min(first + BLOCK, count)
            block = np.arange(first, last) if boundaries is None else boundaries[first:last]
            self._index.write(np.ascontiguousarray(block, OFFSET).data)
        self._index.seek(0)
        self._index.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.documents, count))


@contextmanager
def indexed_writer(
    prefix: Union[str, Path], dtype: np.dtype[Any], boundaries: Optional[NDArray[np.int64]] = None
) -> Iterator[IndexedWriter]:
    """A writer whose files take their names when the block ends well; otherwise nothing of them is left.

    `boundaries` are those of documents of several sequences (see `IndexedWriter.finish`).
    An older index of that name goes away first, so that it never lies beside new tokens.

    Raises:
        DataError: the files cannot be written, or as `IndexedWriter.add`.
    """
    idx = data_file(prefix, ".idx")
    with replacing(idx) as index, replacing(data_file(prefix, ".bin")) as tokens:
        writer = IndexedWriter(tokens, index, dtype)
        yield writer
        writer.finish(boundaries)
        for file in (tokens, index):
            sync(file)
        idx.unlink(missing_ok=True)


def write_indexed(prefix: Union[str, Path], documents: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> None:
    """Writes `documents`, one-dimensional arrays of token ids; see `indexed_writer`."""
    with indexed_writer(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name `path`, complete and on disk, when the block ends well; otherwise it is gone.

    Safe on a shared file system: whoever opens `path` gets the old file or the new one, whole.

    Raises:
        DataError: for any `OSError`, of the block too, which is to do nothing but write.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        file = partial.open("xb", buffering=1 << 20)
        try:
            with file:
                yield file
                sync(file)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); choose a folder that you may write to and that "
            "has room"
        ) from error


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: not a regular file; prepare the data again, or correct data.prefix")
    return found.st_size


def _map(path: Path, size: int) -> NDArray[np.uint8]:
    """The file's bytes, mapped; numpy cannot map a file of no bytes."""
    try:
        return np.asarray(np.memmap(path, np.uint8, "r")) if size else np.empty(0, np.uint8)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: no such file; prepare the data, or correct data.prefix")
    return DataError(f"{path}: cannot be read ({error.strerror})")
