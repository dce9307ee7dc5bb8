"""Damage: what crashes, full disks, other programs and strangers make of a file."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from random import Random

TOKENS = (
    *(
        b"",
        b"0",
        b"-1",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e400",
        b"9" * 5000,
        b"null",
        b"true",
        b'""',
        b"[]",
        b"{}",
    ),
    *(b"\n", b"\r\n", b"\x00", b"\xff\xfe", b"\x1b]52;c;eA==\x07", b"\xf0\x9f\xa6\x99", b"\xe2\x80\xae", b"\\ud800"),
    *(b"[" * 2000, b'{"a":' * 500, b"${oc.env:HOME}", b"../../x", b"/dev/zero", b"&a [*a]", b"!!python/name:os.system"),
)
"""Pieces that parsers stumble over."""


def damaged(random: Random, content: bytes) -> bytes:
    """The content with one to four faults; sometimes nothing of it is left."""
    for _ in range(random.choice((1, 1, 2, 4))):
        content = random.choice((_flipped, _cut, _without, _twice, _with, _number, _filled, _swapped))(random, content)
    return content


def replaced_oddly(random: Random, path: Path) -> None:
    """Puts something else than a readable file of a sensible size in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match random.randrange(9):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.symlink_to("/dev/null")
        case 5:
            path.write_bytes(b"")
        case 6:
            with path.open("wb") as file:
                file.truncate(2**40)
        case 7:
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case _:
            pass  # it is not there


def hurt(random: Random, path: Path) -> None:
    """Damages a file, or now and then puts something odd in its place."""
    if random.random() < 0.15 or not path.is_file() or path.stat().st_size > 2**26:
        replaced_oddly(random, path)
    else:
        path.write_bytes(damaged(random, path.read_bytes()))


def _place(random: Random, content: bytes) -> tuple[int, int]:
    start = random.randrange(len(content) + 1)
    return start, min(len(content), start + random.choice((1, 1, 2, 8, 100)))


def _flipped(random: Random, content: bytes) -> bytes:
    start, end = _place(random, content)
    return content[:start] + bytes(byte ^ (1 << random.randrange(8)) for byte in content[start:end]) + content[end:]


def _cut(random: Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _without(random: Random, content: bytes) -> bytes:
    start, end = _place(random, content)
    return content[:start] + content[end:]


def _twice(random: Random, content: bytes) -> bytes:
    start, end = _place(random, content)
    return content[:end] + content[start:end] * random.choice((1, 1, 3, 1000)) + content[end:]


def _with(random: Random, content: bytes) -> bytes:
    start, _ = _place(random, content)
    return content[:start] + random.choice(TOKENS) + content[start:]


def _number(random: Random, content: bytes) -> bytes:
    """Another value in the place of a word, as in text formats."""
    start, end = _place(random, content)
    while start and content[start - 1 : start].isalnum():
        start -= 1
    while end < len(content) and content[end : end + 1].isalnum():
        end += 1
    return content[:start] + random.choice(TOKENS) + content[end:]


def _filled(random: Random, content: bytes) -> bytes:
    start, end = _place(random, content)
    return content[:start] + random.choice((b"\x00", b"\xff", b" ")) * (end - start) + content[end:]


def _swapped(random: Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    random.shuffle(lines)
    return b"".join(lines)
