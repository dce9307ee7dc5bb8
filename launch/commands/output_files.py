"""Files that a command writes: whether they can be, before it begins, and writing them."""

from __future__ import annotations

from pathlib import Path

import conf
from conf.reading.files import why_not_kept, why_not_writable, write_whole
from conf.reading.own_folders import path_of
from fasop.errors import SearchError

PLANS = Path(conf.__file__).resolve().parent / "parallel"


def plan_path(name: str) -> Path:
    """Where a plan is kept under this name, or the file whose path it is."""
    return path_of(name, "parallel", PLANS)


def check_plan_free(name: str, overwrite: bool) -> None:
    """Raises SearchError before the search, so that no time is lost, where the plan could not be kept.

    Raises:
        SearchError: there is such a configuration, or none can be written.
    """
    path = plan_path(name)
    if (why := why_not_kept(name, path)) is not None:
        raise SearchError(f"plan={name}: {why}")
    if path.exists() and not overwrite:
        raise SearchError(f"plan={name}: {path} already exists; choose another name, or add overwrite=true")


def check_writable(path: Path) -> None:
    """Raises SearchError before the search, so that no time is lost and either all of its files are there or none.

    Raises:
        SearchError: there cannot be such a file.
    """
    if (why := why_not_writable(path)) is not None:
        raise SearchError(f"cannot write {path}: {why}")


def write(path: Path, text: str) -> None:
    """
    Raises:
        SearchError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise SearchError(
            f"cannot write {path}: {error.strerror}; choose a folder with free space that you may write to"
        ) from error
