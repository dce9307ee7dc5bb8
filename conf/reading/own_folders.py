"""Folders of configurations of your own, in which every command looks, and where new ones are written.

They are those of the variable TDPP_CONFIG, joined by colons, which may be empty; without it `conf` in the working
folder, if it has groups of configurations, and `~/.config/tdpp`. Measured profiles lie there in `profiles`.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from conf.errors import ConfigError

VARIABLE = "TDPP_CONFIG"
SHIPPED = Path(__file__).parents[1]
"""What ships with tdpp. Hydra looks there first."""
SUFFIX = ".yaml"
PROFILES = "profiles"


@cache
def groups() -> frozenset[str]:
    """The groups of configurations."""
    return frozenset(file.parent.name for file in SHIPPED.glob(f"*/*{SUFFIX}"))


def own_folders() -> list[Path]:
    """Those that there are, the first one that counts first. Raises ConfigError: the variable names none, or a file in
    one has the name of a shipped one."""
    given = os.environ.get(VARIABLE)
    if given is None:
        found = [folder for folder in (_here(), _home()) if folder is not None and folder.is_dir()]
    else:
        found = [Path(folder) for folder in given.split(os.pathsep) if folder]
        for folder in found:
            if not folder.is_dir():
                raise ConfigError(f"{VARIABLE}={given}: no folder {folder}; create it, or give another one")
    found = [folder for folder in found if folder.resolve() != SHIPPED]
    for folder in found:
        require_other_names(folder)
    return found


def path_of(name: str, kind: str, shipped: Path) -> Path:
    """The file of a configuration of a group, or of a profile, that is known by a name, or whose path `name` is.

    Of a name that nothing has, where it is to be written: in the first folder of your own, or, where the working folder
    is a checkout, in the folder `shipped` of tdpp's.
    """
    if is_file(name):
        return Path(name)
    known = [*(folder / kind for folder in own_folders()), shipped]
    for folder in known:
        if (path := folder / f"{name}{SUFFIX}").exists():
            return path
    return _place_for_new(kind, shipped) / f"{name}{SUFFIX}"


def _place_for_new(kind: str, shipped: Path) -> Path:
    given = os.environ.get(VARIABLE)
    if given is not None:
        folders = [folder for folder in given.split(os.pathsep) if folder]
        return Path(folders[0]) / kind if folders else shipped
    here = _here()
    if here is not None and here.resolve() == SHIPPED:
        return shipped
    return (here or _home()) / kind


def is_file(value: str) -> bool:
    """Whether a value is the path of a file, not the name of one of tdpp's own."""
    return value.endswith(SUFFIX)


def require_other_names(folder: Path) -> None:
    """Raises ConfigError where a file in the folder's groups has the name of a shipped one, which Hydra would read."""
    for file in sorted(folder.glob(f"*/*{SUFFIX}")):
        shipped = SHIPPED / file.relative_to(folder)
        if shipped.is_file() and shipped.read_bytes() != file.read_bytes():
            raise ConfigError(f"{file} has the same name as {shipped}, which takes precedence; rename your file")


def _here() -> Path | None:
    folder = Path("conf")
    return folder if any((folder / group).is_dir() for group in groups()) else None


def _home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tdpp"
