"""What must be the same on every machine that a run without a shared installation uses."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from typing import TypedDict

from launch.machine.provenance import PROJECT

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
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return Software(python=platform.python_version(), torch=torch, tdpp=source_digest())


def source_digest() -> str:
    """Of the source files of tdpp that run on hosts."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((PROJECT / room).rglob("*.py")):
            digest.update(f"{path.relative_to(PROJECT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
