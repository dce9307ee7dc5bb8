"""The files in a folder, a tar file or a Debian package, by name and content, and files as they were before they were
compressed: all is streamed, nothing unpacked onto the disk."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from data_prep.errors import DataPrepError, missing_package
from megatron_ext.contract.files import MOST_BYTES, read_regular

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
        """Whether there is more of the file. Raises EOFError: there is not, but the frame has no end yet."""
        self._compressed = self._file.read(BLOCK)
        if not self._compressed and self._begun:
            raise EOFError
        return bool(self._compressed)


TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz", ".tar.zst")
PACKAGE = ".deb"
_AR = b"!<arch>\n"
_AR_HEADER = 60
"""Bytes before each member of an ar archive: 16 of the name, from 48 on 10 of the size."""
MOST_PACKAGE = 1 << 30
"""Bytes of a package's files, compressed."""
MOST_UNPACKED = 1 << 35
"""Bytes of all that an archive says to hold: a few MB may stand for more than anybody waits for."""
MOST_HEADER = 1 << 20
"""Bytes of what describes a member, such as its long name."""
_DAMAGED = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError, RecursionError)
"""The last one of a member that is described without end."""


class _Member(tarfile.TarInfo):
    """One whose description fills no memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in (*_DESCRIBING, tarfile.XGLTYPE) and not 0 <= self.size <= MOST_HEADER:
            raise tarfile.ReadError(f"a header in it has {self.size} bytes, more than {MOST_HEADER}")
        return super()._proc_member(tar)  # type: ignore[misc]


_DESCRIBING = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith((*TARS, PACKAGE))


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file whose name is wanted: of a folder sorted by name, of an archive as they lie there.

    Names are those below the folder, or in the archive, without a leading `./`. Hidden files, and links, are left out.

    Raises:
        DataPrepError: it cannot be read, or is damaged.
    """
    if path.is_dir():
        for file in files_below(path):
            name = str(file.relative_to(path))
            if wanted(name):
                yield name, content_of(file)
        return
    yield from _in_tar(path, wanted)


def names(path: Path) -> list[str]:
    """Returns the names of the files in a folder or an archive; see `members`."""
    if path.is_dir():
        return [str(file.relative_to(path)) for file in files_below(path)]
    found: list[str] = []

    def note(name: str) -> bool:
        found.append(name)
        return False

    for _ in _in_tar(path, note):
        pass
    return found


def files_below(folder: Path) -> list[Path]:
    """All regular files in a folder and those below it but hidden ones, sorted. Raises DataPrepError: a folder cannot
    be read."""
    return [path for path in below(folder, is_seen) if path.is_file()]


def is_seen(name: str) -> bool:
    """Whether a file or folder of this name is not hidden."""
    return not name.startswith(".")


def below(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """All files in a folder and those below it, sorted; of wanted names, and only through folders of such names. Raises
    DataPrepError: a folder cannot be read."""
    found = []
    for above, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = filter(wanted, folders)
        found += [Path(above, name) for name in files if wanted(name)]
    return sorted(found)


def _unreadable(error: OSError) -> NoReturn:
    raise unreadable(Path(error.filename), error) from error


def content_of(path: Path) -> bytes:
    """Raises DataPrepError: the file cannot be read."""
    try:
        return read_regular(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _in_tar(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    try:
        with _tar_stream(path) as stream, tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
            unpacked = 0
            for member in tar:
                unpacked += member.size
                if member.size < 0 or unpacked > MOST_UNPACKED:
                    raise ValueError(f"it has {unpacked} bytes when it is unpacked, more than {MOST_UNPACKED}")
                name = member.name.removeprefix("./")
                hidden = any(part.startswith(".") for part in name.split("/"))
                if not member.isfile() or hidden or not wanted(name):
                    continue
                if member.size > MOST_BYTES:
                    raise ValueError(f"{name} in it has {member.size} bytes, more than {MOST_BYTES}")
                content = tar.extractfile(member)
                assert content is not None
                yield name, content.read()
    except _DAMAGED as error:
        raise DataPrepError(
            f"{path}: cannot be read as an archive ({error or 'it ends in the middle'}); it is damaged or was not "
            "copied whole: get it again"
        ) from error


def _tar_stream(path: Path) -> IO[bytes]:
    name = path.name.lower()
    if name.endswith(PACKAGE):
        return _decompressed(path, *_data_of_package(path))
    if name.endswith((".xz", ".txz")):
        return lzma.open(path, "rb")
    if name.endswith(".tgz"):
        return io.BufferedReader(gzip.open(path, "rb"))
    return io.BufferedReader(Decompressed(path), 1 << 18)


def _decompressed(path: Path, name: str, content: bytes) -> IO[bytes]:
    """Opens a compressed part of the file."""
    if name.endswith(".xz"):
        return lzma.open(io.BytesIO(content))
    return io.BufferedReader(Decompressed(path, (name, content)), 1 << 18)


def _data_of_package(path: Path) -> tuple[str, bytes]:
    """Name and content of the tar file of a Debian package's files: the member `data.tar…` of an ar archive. Raises
    ValueError: it has none."""
    with path.open("rb") as file:
        if file.read(len(_AR)) != _AR:
            raise ValueError("it is not a Debian package: it does not begin with !<arch>")
        while header := file.read(_AR_HEADER):
            name, size = header[:16].decode("latin-1").strip().rstrip("/"), int(header[48:58])
            if name.startswith("data.tar"):
                if not 0 <= size <= MOST_PACKAGE:
                    raise ValueError(f"{name} in it has {size} bytes, more than {MOST_PACKAGE}")
                content = file.read(size)
                if len(content) < size:
                    raise EOFError
                return name, content
            if size < 0:
                raise ValueError(f"{name} in it has {size} bytes")
            file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError("it has no data.tar")
