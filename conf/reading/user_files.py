"""Configurations of your own: the words of a command line that lead to files outside of `conf/`.

`--config-dir DIR` is a folder of groups, such as DIR/model/mine.yaml, which model=mine then takes. `GROUP=FILE.yaml`
takes a single file, wherever it lies. Hydra gets both as folders of its search path.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from conf.errors import ConfigError

OWN = Path(__file__).parents[1]
"""What ships with tdpp. Hydra looks there first."""
OPTIONS = ("--config-dir", "-cd")
SUFFIX = ".yaml"

COMPARED = ("train.until",)
"""Keys whose values hold < or >, which Hydra reads only between quotes."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """A command line, as Hydra takes it."""

    overrides: tuple[str, ...]
    """And Hydra's own options."""
    folders: tuple[Path, ...]
    """Where configurations are looked for, in this order."""
    given: dict[str, str] = field(default_factory=dict)
    """The files and texts that were given, by what stands in their place."""

    @property
    def all(self) -> list[str]:
        """The overrides, and where else Hydra is to look."""
        others = [folder.absolute() for folder in self.folders if folder != OWN]
        return [*self.overrides, *([f"hydra.searchpath=[{','.join(map(_quoted, others))}]"] if others else [])]

    def as_given(self, text: str) -> str:
        """A text of Hydra's, in which files are called as they were given."""
        for choice, file in self.given.items():
            text = text.replace(choice, file)
        return text


def is_file(value: str) -> bool:
    """Whether a value is the path of a file, not the name of one of tdpp's own."""
    return value.endswith(SUFFIX)


def path_of(name: str, folder: Path) -> Path:
    """Of what is kept under a name in a folder of tdpp's own, or in the file whose path `name` is."""
    return Path(name) if is_file(name) else folder / f"{name}{SUFFIX}"


def groups() -> set[str]:
    """The groups of configurations."""
    return {file.parent.name for file in OWN.glob(f"*/*{SUFFIX}")}


def choices(group: str, command: Sequence[str]) -> list[str]:
    """The names of a group's files, in tdpp's own folder and those that a command line adds."""
    folders, _ = config_dirs(command)
    return sorted({file.stem for folder in (OWN, *folders) for file in (folder / group).glob(f"*{SUFFIX}")})


@contextmanager
def found_files(command: Sequence[str]) -> Iterator[Words]:
    """The words of a command line, for as long as Hydra reads the files that they lead to.

    Raises:
        ConfigError: a folder or file is not there, or a file has the name of one of tdpp's own.
    """
    with tempfile.TemporaryDirectory(prefix="tdpp-") as links:
        try:
            words = _found(command, Path(links))
        except PermissionError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        yield words


def _found(command: Sequence[str], links: Path) -> Words:
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
        elif key.lstrip("+") in COMPARED and re.fullmatch(r"[^'\",]*[<>][^'\",]*", value):
            given[f"'{value}'"] = value
            overrides.append(f"{key}='{value}'")
        else:
            overrides.append(word)
    found = (OWN, *([links] if any(links.iterdir()) else []), *folders)
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
            f"{option} {shlex.quote(name)}: there is no such folder; give one with groups, such as DIR/model/mine.yaml"
        )
    for file in sorted(folder.glob(f"*/*{SUFFIX}")):
        own = OWN / file.relative_to(folder)
        if own.is_file() and own.read_bytes() != file.read_bytes():
            raise ConfigError(f"{file} has the name of {own}, which would be read in its place; give it another name")
    return folder


def _link(links: Path, group: str, file: str, given: dict[str, str]) -> str:
    """A choice of the group that leads to the file. Its own name may be one that Hydra cannot read, or taken."""
    if not Path(file).is_file():
        raise ConfigError(
            f"{group}={file}: there is no such file; without {SUFFIX} a value is one of the names in {OWN / group}, or "
            f"in the folder {group} of a --config-dir"
        )
    from conf.reading.yaml_file import require_small  # what else needs this module does without OmegaConf

    try:
        require_small(Path(file))
    except UnicodeDecodeError:  # reading it tells where
        pass
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    choice = f"tdpp-file-{len(given) + 1}-given"
    (links / group).mkdir(exist_ok=True)
    (links / group / f"{choice}{SUFFIX}").symlink_to(Path(file).absolute())
    given[choice] = file
    return choice


def _quoted(folder: Path) -> str:
    """As Hydra's grammar takes a text with any character."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(folder))
    return f"'file://{escaped}'"
