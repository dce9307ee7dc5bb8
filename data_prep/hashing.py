"""SHA-256 of files of any size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

BLOCK = 1 << 20


def file_hash(path: Path, read: Callable[[int], object]) -> str:
    """In hexadecimal digits.

    Args:
        read: told how many bytes have been read since the last time.
    """
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            content.update(block)
            read(len(block))
    return content.hexdigest()
