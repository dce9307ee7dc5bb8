"""A user who may not write everywhere, for any test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534
DAEMON = 1
"""A third one, where there are two ordinary users."""


def run_by(user: int) -> tuple[str, ...]:
    """Before a command: it is run by that user, who can read all that root can, for Python may lie in root's home."""
    reading = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    without = ("env", "--unset=TORCHINDUCTOR_CACHE_DIR")  # root's own, once a test of this process has compiled
    return (*without, "setpriv", f"--reuid={user}", "--clear-groups", *reading)


ANOTHER = run_by(NOBODY)
only_root_is_two_users = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can be two users"
)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Takes root's rights from root. Use relative paths in the block: the folders above may be closed."""
    if os.getuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def open_to_others() -> Iterator[Path]:
    """An empty folder that other users can reach and read; those of pytest are closed to them."""
    with tempfile.TemporaryDirectory(prefix="tdpp-open-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
