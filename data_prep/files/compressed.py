"""Files as they were before they were compressed, streamed; an error names file and line."""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from pathlib import Path
from typing import Any, Protocol

from data_prep.errors import DataPrepError, missing_package

SUFFIXES = (".gz", ".bz2", ".zst")
BLOCK = 1 << 16
MOST_READ = 1 << 20
"""Bytes: who asks for more gets it in such parts, as each takes memory a second time."""


class _Readable(Protocol):
    def read1(self, size: int, /) -> bytes: ...


class Decompressed(io.RawIOBase):
    """The content of a file that may be compressed with gzip, bzip2 or zstd, by the ending of its name.

    Args:
        path: of the file.
        part: what lies within that file and is to be read instead, if anything: its name and its bytes.

    Raises:
        DataPrepError: when opened or read: the file cannot be read, is damaged or is cut short.
    """

    def __init__(self, path: Path, part: tuple[str, bytes] | None = None) -> None:
        super().__init__()
        self._path = path
        self._lines = 0
        try:
            self._file: io.BufferedReader[Any]
            self._file = path.open("rb") if part is None else io.BufferedReader(io.BytesIO(part[1]))
        except OSError as error:
            raise unreadable(path, error) from error
        self._content: _Readable = _reader(self._file, Path(part[0] if part else path).suffix.lower())

    @property
    def position(self) -> int:
        """Bytes of the file that have been read."""
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # bytearray and others are not passed here
        try:
            data = self._content.read1(min(len(buffer), MOST_READ))
        except OSError as error:
            if error.errno is not None:
                raise unreadable(self._path, error) from error
            raise self._damaged(str(error)) from error  # gzip and bz2 on bytes that are not theirs
        except (EOFError, zlib.error, _Damaged) as error:
            raise self._damaged("it ends in the middle" if isinstance(error, EOFError) else str(error)) from error
        if not data and self._content is not self._file and not self.position:
            raise self._damaged("it is empty")  # of nothing it had a header; gzip and zstandard take no bytes for one
        self._lines += data.count(b"\n")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_file"):
            self._file.close()
        super().close()

    def _damaged(self, why: str) -> DataPrepError:
        return DataPrepError(
            f"{self._path}:{self._lines + 1}: cannot be decompressed any further ({why}); the file is damaged or was "
            "not copied whole: get it again"
        )


def unreadable(path: Path, error: OSError) -> DataPrepError:
    return DataPrepError(f"{path}: cannot be read ({error.strerror})")


class _Damaged(Exception):
    """Bytes that are not zstd's."""


def _reader(file: io.BufferedReader[Any], suffix: str) -> _Readable:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if suffix == ".bz2":
        return bz2.BZ2File(file)
    return _Zstd(file) if suffix == ".zst" else file


class _Zstd:
    """Frame after frame of a zstd file. zstandard's own reader takes a file cut short for a whole one."""

    def __init__(self, file: io.BufferedReader[Any]) -> None:
        try:
            import zstandard
        except ModuleNotFoundError as error:
            raise missing_package("zstandard", "to read .zst files") from error
        self._file = file
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._begun = False
        self._compressed = b""
        self._content = memoryview(b"")

    def read1(self, size: int, /) -> bytes:
        while not self._content:
            if not self._compressed and not self._next_block():
                return b""
            try:
                self._content = memoryview(self._frame.decompress(self._compressed))
            except self._error as error:
                raise _Damaged(str(error)) from error
            self._begun, self._compressed = True, b""
            if self._frame.eof:
                self._begun, self._compressed = False, self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
        data, self._content = bytes(self._content[:size]), self._content[size:]
        return data

    def _next_block(self) -> bool:
        """Whether there is more of the file.

        Raises:
            EOFError: there is not, but the frame has no end yet.
        """
        self._compressed = self._file.read(BLOCK)
        if not self._compressed and self._begun:
            raise EOFError
        return bool(self._compressed)
