"""Whether a file can be written, before the work is done whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

from conf.config_files import is_file, path_of


def why_not_writable(path: Path) -> str | None:
    """In words, with a way out; None if there can be such a file."""
    try:
        if path.is_dir():
            return "it is a folder; give the path of a file"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}; make it, or choose another one"
        if os.access(path if path.exists() else path.parent, os.W_OK, effective_ids=True):
            return None
    except PermissionError:  # a folder above is closed
        pass
    return "permission denied; choose a folder where you may write"


def why_not_kept(name: str, folder: Path) -> str | None:
    """The same of what is kept under a name in a folder of tdpp's own, or in the file whose path `name` is."""
    if not (is_file(name) or os.access(folder, os.W_OK, effective_ids=True)):
        return f"you may not write in {folder}, a part of tdpp; give the path of a file instead, such as ./{name}.yaml"
    return why_not_writable(path_of(name, folder))
