"""Configurations that are written for a user: whether they can be, whether they compose, and writing them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from conf.compose import compose
from conf.reading.own_folders import SHIPPED, SUFFIX, path_of
from conf.reading.scratch import Scratch
from conf.reading.writable import why_not_kept, write_whole
from launch.errors import LaunchError

OWN_FOLDER = "create a folder that you may write to, and name it in TDPP_CONFIG"
"""Where the usual folder of configurations is closed to the user."""


def checked_name(name: str) -> str:
    """Raises LaunchError for one that Hydra and a folder of runs cannot both have."""
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or name.endswith(SUFFIX):
        raise LaunchError(
            f"{name!r} cannot name a configuration; a name is a letter followed by letters, digits, '.', '_' and '-'"
        )
    return name


def free_path(name: str, group: str, force: bool) -> Path:
    """Where a configuration of this name is written.

    Raises:
        LaunchError: there is one, or it cannot be written.
    """
    shipped = SHIPPED / group
    path = path_of(name, group, shipped)
    if (why := why_not_kept(name, path, instead=OWN_FOLDER)) is not None:
        raise LaunchError(f"{group}={name}: {why}")
    if path.exists() and path.parent == shipped:
        raise LaunchError(f"{group}={name} comes with tdpp ({path}); choose another NAME")
    if path.exists() and not force:
        raise LaunchError(f"{path} already exists; choose another NAME, or add --force to replace it")
    return path


def check_composes(name: str, texts: Mapping[str, str], word: str) -> None:
    """Raises ConfigError where files with these texts, by group, would break a rule: then none is written."""
    with Scratch() as folder:
        for group, text in texts.items():
            file = folder.path / group / f"{name}{SUFFIX}"
            file.parent.mkdir()
            file.write_text(text, encoding="utf-8")
        compose([word, f"--config-dir={folder.path}"])


def write_all(paths: Mapping[str, Path], texts: Mapping[str, str]) -> None:
    """Raises LaunchError where there is no room."""
    for group, path in paths.items():
        try:
            write_whole(path, texts[group])
        except OSError as error:
            raise LaunchError(f"cannot write {path}: {error.strerror}") from error
