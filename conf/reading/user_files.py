"""Configurations of your own: the words of a command line that lead to files outside of `conf/`.

`--config-dir DIR` is a folder of groups, such as DIR/model/mine.yaml, which model=mine then takes; so are those of
`own_folders`, without being named. `GROUP=FILE.yaml` takes a single file, wherever it lies. Hydra gets all of them as
folders of its search path.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from conf.errors import ConfigError
from conf.reading.files import Scratch
from conf.reading.own_folders import SHIPPED, SUFFIX, groups, is_file, own_folders, require_other_names
from conf.reading.words import quoted

OPTIONS = ("--config-dir", "-cd")
SCHEME = "tdpp"
"""The scheme of folders in Hydra's search path (conf/hydra_files.py)."""
PARTS = "parts"
_PATHS = ("/", "./", "../", "~")
"""How a value begins that is a path and never a name."""

COMPARED = ("train.until",)
"""Keys whose values hold < or >, which Hydra reads only between quotes."""
COMMANDS = ("notify.command",)
"""Keys whose values are command lines, with quotes of their own around some of their words."""
LISTED = ("log",)
"""Keys whose values are lists, which Hydra takes for a sweep unless there are brackets."""
_QUOTED = re.compile(r"""(['"])(?:(?!\1)[^\\]|\\.)*\1""", re.DOTALL)
"""A text that is quoted for Hydra already."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """A command line, as Hydra takes it."""

    overrides: tuple[str, ...]
    """And Hydra's own options."""
    folders: tuple[Path, ...]
    """Where configurations are looked for, in this order."""
    given: dict[str, str] = field(default_factory=dict)
    """The files and texts that were given, by what stands in their place."""
    notes: tuple[str, ...] = ()
    """What files of other programs say that has no place here, a sentence each."""

    @property
    def all(self) -> list[str]:
        """The overrides, and beside the first one, for Hydra takes them in one row only, where else it is to look."""
        others = [folder.absolute() for folder in self.folders if folder != SHIPPED]
        places = ",".join(quoted(f"{SCHEME}://{folder}") for folder in others)
        first = next(
            (n for n, word in enumerate(self.overrides) if word.startswith("~") or ("=" in word and word[0] != "-")),
            len(self.overrides),
        )
        searched = [f"hydra.searchpath=[{places}]"] if others else []
        return [*self.overrides[: first + 1], *searched, *self.overrides[first + 1 :]]

    def as_given(self, text: str) -> str:
        """A text of Hydra's, in which files are called as they were given."""
        for choice, file in self.given.items():
            text = text.replace(choice, file)
        return text


def choices(group: str, command: Sequence[str]) -> list[str]:
    """Names of a group's files (`names_in`) in tdpp's folder, your own, and those that a command line adds."""
    return names_in(group, (SHIPPED, *config_dirs(command)[0], *own_folders()))


def names_in(group: str, folders: Sequence[Path]) -> list[str]:
    """The names of a group's files; of what lies in a folder of the group, `FOLDER/NAME`.

    Folders called `parts` hold what others are made of.
    """
    roots = [folder / group for folder in folders]
    found = {file.relative_to(root).with_suffix("") for root in roots for file in root.rglob(f"*{SUFFIX}")}
    return sorted(path.as_posix() for path in found if PARTS not in path.parts)


@contextmanager
def found_files(command: Sequence[str]) -> Iterator[Words]:
    """The words of a command line, for as long as Hydra reads the files that they lead to. Raises ConfigError: a folder
    or file is not there, or a file has the name of one of tdpp's own."""
    with Scratch() as links:
        try:
            words = _found(command, links)
        except PermissionError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        yield words


def _found(command: Sequence[str], links: Scratch) -> Words:
    folders, words = config_dirs(command)
    overrides: list[str] = []
    given: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        group = key.lstrip("+").partition("@")[0]
        if is_file(value) and group in groups():
            files = [value] if Path(value).is_file() else [file.strip() for file in value.split(",")]
            choices = [_link(links, group, file, given) if is_file(file) else file for file in files]
            overrides.append(f"{key}={','.join(choices)}")
        elif value.startswith(_PATHS) and group in groups():
            what = "no such file" if not Path(value).exists() else f"no file of YAML whose name ends in {SUFFIX}"
            raise ConfigError(f"{key}={value}: {what}; give a file's path with {SUFFIX}, or a name without a folder")
        elif key.lstrip("+") in COMPARED and re.fullmatch(r"[^'\",]*[<>][^'\",]*", value):
            given[f"'{value}'"] = value
            overrides.append(f"{key}='{value}'")
        elif key.lstrip("+") in COMMANDS and re.search(r"['\"=;(){}]", value) and not _QUOTED.fullmatch(value):
            given[quoted(value)] = value
            overrides.append(f"{key}={quoted(value)}")
        elif key.lstrip("+") in LISTED and re.fullmatch(r"[\w ,-]+", value) and value != "null":
            given[f"{key}=[{value}]"] = word
            overrides.append(f"{key}=[{value}]")
        else:
            overrides.append(word)
    found = (SHIPPED, *([links.path] if links.files else []), *folders, *own_folders())
    return Words(overrides=tuple(overrides), folders=found, given=given)


def config_dirs(command: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The folders that are given by `--config-dir`, and all other words."""
    folders, others, words = [], [], iter(command)
    for word in words:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            folders.append(_config_dir(option, value if equals else next(words, "")))
        else:
            others.append(word)
    return folders, others


def _config_dir(option: str, name: str) -> Path:
    folder = Path(name)
    if not (name and folder.is_dir()):
        raise ConfigError(
            f"{option} {shlex.quote(name)}: no such folder; give one with groups, such as DIR/model/mine.yaml"
        )
    require_other_names(folder)
    return folder


def _link(links: Scratch, group: str, file: str, given: dict[str, str]) -> str:
    """A choice of the group that leads to the file. Its own name may be one that Hydra cannot read, or taken."""
    if Path(file).exists() and not Path(file).is_file():
        raise ConfigError(f"{group}={file}: not a regular file; give a file of YAML")
    if not Path(file).is_file():
        what = "a link that leads to no file" if Path(file).is_symlink() else "no such file"
        raise ConfigError(
            f"{group}={file}: {what}; without {SUFFIX} the value is one of the names in {SHIPPED / group}, or "
            f"in the folder {group} of your own configurations (TDPP_CONFIG, --config-dir)"
        )
    from conf.reading.yaml_file import require_small  # what else needs this module does without OmegaConf

    try:
        require_small(Path(file))
    except UnicodeDecodeError:  # reading it tells where
        pass
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    choice = f"tdpp-file-{len(given) + 1}-given"
    (links.path / group).mkdir(exist_ok=True)
    (links.path / group / f"{choice}{SUFFIX}").symlink_to(Path(file).absolute())
    given[choice] = file
    return choice
