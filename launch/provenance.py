"""Where a run comes from: source, versions, machine, command."""

from __future__ import annotations

import getpass
import platform
import shlex
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
"""The folder of the source tree; on PYTHONPATH of every process of a run."""

_GIT_TIMEOUT_S = 10
_PACKAGES = ("tdpp", "torch", "hydra-core", "omegaconf", "submitit", "numpy")


def provenance() -> dict[str, Any]:
    """The content of provenance.json; what cannot be known is null."""
    commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return {
        "unix": time.time(),
        "commit": None if commit is None else commit.strip(),
        "changed": None if changed is None else changed.splitlines(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "user": user_name(),
        "host": socket.gethostname(),
        "cwd": str(Path.cwd()),
        "command": shlex.join(sys.orig_argv),
    }


def source_diff() -> str:
    """What differs from the commit in tracked files; empty if nothing, or if there is no repository."""
    return _git("diff", "--no-ext-diff", "--binary", "HEAD") or ""


def _git(*arguments: str) -> str | None:
    """What git prints about the source tree; None without git or a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(PROJECT), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def user_name() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return None
