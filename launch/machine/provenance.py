"""Where a run comes from: source, versions, machine, command; and what must be the same on every host."""

from __future__ import annotations

import getpass
import hashlib
import os
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

PROJECT = Path(__file__).resolve().parents[2]
"""The folder of the source tree; on PYTHONPATH of every process of a run."""


_GIT_TIMEOUT_S = 10
_PACKAGES = ("tdpp", "torch", "hydra-core", "omegaconf", "submitit", "numpy")


def path_of_agents() -> str:
    """PYTHONPATH of tdpp's own processes, which run under `python -P`: an empty part of it would be whatever folder
    they start in, where others may have put a module of the same name."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(PROJECT), *(path for path in given if path not in ("", str(PROJECT)))])


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source tree at one moment; without git or a repository nothing of it is known."""

    commit: str | None
    changed: list[str] | None
    """Files that differ from the commit or are not in it, as `git status --porcelain` prints them."""
    diff: str
    """What differs from the commit in tracked files; empty if nothing, or if there is no repository."""


def read_source() -> Source:
    """Asks git about the source tree."""
    commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return Source(
        commit=None if commit is None else commit.strip(),
        changed=None if changed is None else changed.splitlines(),
        diff=_git("diff", "--no-ext-diff", "--binary", "HEAD") or "",
    )


def provenance(source: Source) -> dict[str, Any]:
    """The content of provenance.json; what cannot be known is null."""
    import platform  # few commands need it

    return {
        "unix": time.time(),
        "commit": source.commit,
        "changed": source.changed,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "user": user_name(),
        "host": socket.gethostname(),
        "cwd": str(Path.cwd()),
        "command": shlex.join(sys.orig_argv),
    }


def git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints about the tree of a folder, whatever tree GIT_DIR names; None without git or a repository."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _git(*arguments: str) -> str | None:
    """What git prints about the source tree."""
    printed = git(PROJECT, *arguments)
    return None if printed is None else printed.decode(errors="replace")


def _version(package: str) -> str | None:
    from importlib import metadata  # few commands need it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def user_name() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return None


ROOMS = ("conf", "launch", "megatron_ext")
"""Whose sources run on a host."""


class Software(TypedDict):
    """Versions."""

    python: str
    torch: str | None
    """None where it is not installed."""
    tdpp: str
    """`source_digest`."""


def software() -> Software:
    """What must be the same wherever a run's agents and launcher are."""
    import platform

    return Software(python=platform.python_version(), torch=_version("torch"), tdpp=source_digest())


def source_digest() -> str:
    """Returns the digest of the source files of tdpp that run on hosts."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((PROJECT / room).rglob("*.py")):
            digest.update(f"{path.relative_to(PROJECT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
