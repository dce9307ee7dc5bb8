"""Files that users name for results: whether they can be written, before the work is done, and writing them whole."""

from __future__ import annotations

import os
from pathlib import Path

from conf.reading.own_folders import is_file
from megatron_ext.contract.files import write_atomic


def why_not_writable(path: Path) -> str | None:
    """In words, with a way out; None if there can be such a file."""
    try:
        if path.is_dir():
            return "this is a folder; give the path of a file"
        if not path.parent.is_dir():
            return f"no folder {path.parent}; create it, or choose another one"
        if os.access(path if _is_device(path) else path.parent, os.W_OK, effective_ids=True):
            return None
    except PermissionError:  # a folder above is closed
        pass
    except OSError as error:  # the name is too long
        return f"{error.strerror}; give another path"
    return "permission denied; choose a folder that you may write to"


def why_not_kept(name: str, path: Path, instead: str | None = None) -> str | None:
    """The same of what is kept under a name in the file `path`, whose folder is made if it is missing. `instead` is the
    way out where the name cannot be a file's path."""
    if not is_file(name):
        instead = instead or f"give the path of a file instead, such as ./{name}.yaml"
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"cannot create {folder}: {error.strerror}; {instead}"
        if not os.access(folder, os.W_OK, effective_ids=True):
            return f"you may not write to {folder}; {instead}"
    return why_not_writable(path)


def write_whole(path: Path, text: str) -> None:
    """Writes a result: what is there stays until the new one is complete; a link is replaced, not followed.

    Raises:
        OSError: it cannot be written.
    """
    if _is_device(path):  # or a pipe: nothing takes its place
        path.write_text(text, encoding="utf-8")
    else:
        write_atomic(path, text)


def _is_device(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())
