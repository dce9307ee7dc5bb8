"""Whatever lies in the place of a run's file, it is read at once or refused in one message."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.errors import ClosedError, RunFolderError
from conf.run_folder import run_files
from conf.run_folder.run_files import appended, entries, parse_json, read_bytes, read_tail, read_text
from tests.support.ordinary_user import open_to_others, ordinary_user


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (lambda path: path.mkdir(), "is a folder, not a regular file"),
    "pipe": (lambda path: os.mkfifo(path), "is a named pipe, not a regular file"),
    "socket": (listening, r"cannot be read \(No such device or address\)"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a regular file"),
    "circle": (lambda path: path.symlink_to(path.name), r"cannot be read \(Too many levels of symbolic links\)"),
    "terabyte": (huge, "has 1099511627776 bytes; at most 268435456 are read of such a file"),
}


@pytest.mark.parametrize(("put", "why"), PLACES.values(), ids=PLACES.keys())
def test_what_is_no_file_of_a_run_is_refused(tmp_path: Path, put: Callable[[Path], object], why: str) -> None:
    path = tmp_path / "x.json"
    put(path)
    with pytest.raises(RunFolderError, match=rf"x\.json:? {why}"):
        read_text(path)


@pytest.mark.parametrize("put", [put for name, (put, _) in PLACES.items() if name != "terabyte"])
def test_nor_is_its_end_read(tmp_path: Path, put: Callable[[Path], object]) -> None:
    put(tmp_path / "x")
    with pytest.raises(RunFolderError):
        read_tail(tmp_path / "x", 10)


def test_the_end_of_a_file_has_no_more_than_was_asked_for_and_nothing_before_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    assert read_tail(path, 4) == (b"6789", True)
    assert read_tail(path, 10) == (b"0123456789", False)
    assert read_tail(path, 4, 8) == (b"89", False)
    assert read_tail(path, 99, 2) == (b"23456789", False)
    assert read_tail(path, 4, 2) == (b"6789", True)
    assert read_tail(path, 4, 99) == (b"", False)


def test_what_may_not_be_read_is_told_apart() -> None:
    with open_to_others() as folder:
        (folder / "file").touch(0o600)
        (folder / "folder").mkdir(0o700)
        with ordinary_user():
            for read in (lambda: read_text(folder / "file"), lambda: entries(folder / "folder")):
                with pytest.raises(ClosedError, match=r"cannot be read \(Permission denied\)"):
                    read()


def test_what_is_not_there_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "x")
    assert entries(tmp_path / "x") == []


JSON = {
    "deep list": ("[" * 60 + "]" * 60, "too deeply"),
    "very deep list": ("[" * 10**6, "too deeply"),
    "deep object": ('{"a":' * 60 + "1" + "}" * 60, "too deeply"),
    "long number": ("9" * 5000, "is not JSON: a whole number has too many digits"),
    "half a character": ('["\\ud800"]', "half of a character"),
    "cut off": ('{"a": 1', "is not JSON: Expecting"),
}


@pytest.mark.parametrize(("text", "why"), JSON.values(), ids=JSON.keys())
def test_json_that_no_reader_could_go_through_is_refused(text: str, why: str) -> None:
    with pytest.raises(RunFolderError, match=rf"^x\.json .*{why}"):
        parse_json(text, "x.json")


def test_json_that_is_as_deep_as_tdpps_is_read() -> None:
    assert parse_json("[" * 40 + "]" * 40 + " ", "x") != parse_json('{"a": ["\\ud83e\\udd99", [[]], {}]}', "x")


def stale_open(patch: pytest.MonkeyPatch, errors: list[OSError]) -> None:
    real = os.open
    patch.setattr(os, "open", lambda *given: fail(errors) or real(*given))


def stale_read(patch: pytest.MonkeyPatch, errors: list[OSError]) -> None:
    real = run_files.opened

    def opened(path: Path, most: int | None = None) -> object:
        file = real(path, most)
        return _Stale(file, errors)

    patch.setattr(run_files, "opened", opened)


class _Stale:
    def __init__(self, file: object, errors: list[OSError]) -> None:
        self._file, self._errors = file, errors

    def __enter__(self) -> _Stale:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # type: ignore[attr-defined]

    def read(self, most: int) -> bytes:
        fail(self._errors)
        return self._file.read(most)  # type: ignore[attr-defined]


def fail(errors: list[OSError]) -> None:
    if errors:
        raise errors.pop()


@pytest.mark.parametrize("stale", [stale_open, stale_read])
def test_a_file_that_was_replaced_while_it_was_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: Callable[[pytest.MonkeyPatch, list[OSError]], None]
) -> None:
    (tmp_path / "x").write_bytes(b"new")
    errors = [OSError(errno.ESTALE, "Stale file handle")]
    stale(monkeypatch, errors)
    assert read_bytes(tmp_path / "x") == b"new"
    errors += [OSError(errno.ESTALE, "Stale file handle")] * 2
    with pytest.raises(RunFolderError, match="Stale file handle"):
        read_bytes(tmp_path / "x")


def test_a_file_is_not_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "planted")
    with pytest.raises(OSError, match="symbolic links"):
        appended(tmp_path / "out")
    assert not (tmp_path / "planted").exists()
    for _ in range(2):
        with appended(tmp_path / "err") as file:
            file.write(b"a")
    assert (tmp_path / "err").read_bytes() == b"aa"
    assert (tmp_path / "err").stat().st_mode & 0o022 == 0
