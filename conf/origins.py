"""Where a value comes from: the user's file and line of one that breaks a rule, and values that nobody chose.

A rule knows keys and values, not files. A message names its keys, so the files are looked up once it is to be shown:
Hydra lists the files that a command line merges, in their order, and the last one that sets a key has set its value.
A command line takes the other values from the demo, or from the schema.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.compose import command_line, command_line_as_given, with_texts
from conf.composition_cache import kept_values, state_of
from conf.errors import CompositionError, ConfigError, TdppError
from conf.foreign_files import READERS
from conf.reading.own_folders import SHIPPED, groups
from conf.reading.user_files import Words, config_dirs
from conf.reading.words import CONFIG_DIR

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from conf.reading.yaml_lines import Lines

_MENTION = re.compile(r"(?<![\w./@+~-])(?P<key>[a-z_][\w.\[\]<>*-]*)(?P<after>=| is not set)?")
"""What may be a key in a message, and what follows."""
_LACKING = " is not set"
_GIT_S = 5
"""Seconds that git has to list files."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file that Hydra merges."""

    path: Path
    package: tuple[str, ...]
    """The key below which it is merged."""
    own: bool
    """Whether it is the user's, not one that ships with tdpp."""

    def below(self, parts: Sequence[str]) -> Sequence[str] | None:
        """What the file itself calls a key; None if the key lies elsewhere."""
        depth = len(self.package)
        return parts[depth:] if tuple(parts[:depth]) == self.package else None


@contextmanager
def origins_named(words: Sequence[str]) -> Iterator[None]:
    """An error that is raised within names the files and lines that set its keys."""
    try:
        yield
    except TdppError as error:
        error.args = (with_origins(error, words),)
        raise


def with_origins(error: TdppError, words: Sequence[str]) -> str:
    """The message of an error, behind the user's files and the lines in them that set the keys which it names.

    `words` may be those of any command. Keys that they set themselves are not looked up, nor is a file that the message
    already names.
    """
    from conf.hydra_errors import COMPOSING
    from conf.hydra_files import hydra_session

    message = str(error)
    composed = not isinstance(error, CompositionError) and not isinstance(error.__cause__, CompositionError)
    if not (composed and any(map(_chooses, words))):
        return message
    try:
        folders = [f"{CONFIG_DIR}={folder}" for folder in config_dirs(words)[0]]
        with command_line([*folders, *filter(_chooses, words)]) as found, hydra_session():
            given = {_key(word) for word in (*found.overrides, *words) if not _chooses(word)}
            return _places(message, _sources(found), given) + message
    except (TdppError, *COMPOSING):  # words that cannot be composed; the message is about something else
        return message


def what_counts(words: Sequence[str]) -> tuple[str, ...]:
    """What the origins of an error depend on: equal for words that differ in values alone."""
    return tuple(word if _chooses(word) or word.startswith("-") else _key(word) for word in words)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _chooses(word: str) -> bool:
    """Whether a word chooses a file of a group, or stands for others that may."""
    return "=" in word and (_key(word).partition("@")[0] in groups() or word.startswith(tuple(READERS)))


def _sources(found: Words) -> list[Source]:
    """The files of a command line, in the order in which Hydra merges them."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    from conf.hydra_errors import file_of
    from conf.reading.yaml_lines import parts_of

    words = replace(found, overrides=tuple(filter(_chooses, found.overrides)))
    listed = GlobalHydra.instance().config_loader().compute_defaults_list("config", words.all, RunMode.RUN).defaults
    beside = _untracked()
    files = [(file_of(default.config_path or "", found), default.package or "") for default in listed]
    return [
        Source(path=path, package=parts_of(package), own=SHIPPED not in path.parents or path in beside)
        for path, package in files
        if path is not None
    ]


def _untracked() -> set[Path]:
    """In a checkout, the files that the user has put beside the shipped ones."""
    if not (SHIPPED.parent / ".git").exists():
        return set()
    command = ["git", "-C", str(SHIPPED), "ls-files", "-z", "--others"]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {SHIPPED / name.decode(errors="surrogateescape") for name in listed.split(b"\0") if name}


def _places(message: str, sources: Sequence[Source], given: set[str]) -> str:
    """`FILE, lines 3 and 5: `, for the keys in a message that are not among those `given`; empty without any."""
    from conf.hydra_errors import shown
    from conf.reading.yaml_lines import Lines, parts_of

    of_file = {source.path: Lines.read(source.path) for source in sources}
    lines: dict[str, set[int]] = {}
    for mention in _MENTION.finditer(message):
        parts, has_value = parts_of(mention["key"].rstrip(".")), mention["after"] == "="
        is_word = len(parts) == 1 and not has_value
        is_set = any(".".join(parts[:end]) in given for end in range(1, len(parts) + 1))
        if is_word or is_set or "<" in mention["key"]:
            continue
        place = _setting(parts, has_value, sources, of_file)
        if place is None and mention["after"] == _LACKING:
            place = _containing(parts, sources, of_file)
        if place is not None and place[0].own and (file := shown(place[0].path)) not in message:
            lines.setdefault(file, set()).update(place[1])
    return "; ".join(file + _numbers(of) for file, of in lines.items()) + (": " if lines else "")


def _setting(
    parts: Sequence[str], has_value: bool, sources: Sequence[Source], of_file: Mapping[Path, Lines]
) -> tuple[Source, list[int]] | None:
    """The file that has set a key, and its line."""
    for source in reversed(sources):
        below = source.below(parts)
        found = of_file[source.path].find(below) if below else None
        if found is not None and not (found.is_group and has_value):  # model=mine is a choice
            return source, [found.line]
    return None


def _containing(
    parts: Sequence[str], sources: Sequence[Source], of_file: Mapping[Path, Lines]
) -> tuple[Source, list[int]] | None:
    """The file where a key that is not set would belong, and the line above it."""
    for end in range(len(parts) - 1, 0, -1):
        for source in reversed(sources):
            below = source.below(parts[:end])
            if below is not None and (not below or of_file[source.path].find(below) is not None):
                found = of_file[source.path].find(below)
                return source, [] if found is None else [found.line]
    return None


def _numbers(lines: set[int]) -> str:
    if not lines:
        return ""
    *others, last = map(str, sorted(lines))
    return f", lines {', '.join(others)} and {last}" if others else f", line {last}"


SEARCHED = ("cluster.name", "model.name", "parallel.global_batch_size", "train.precision")
"""What decides the result of a search."""
TRAINED = (*SEARCHED, "parallel.micro_batch_size", "data.prefix", "train.iterations", "train.lr")
"""What decides the result of a run."""
_SUBJECT = ("cluster.name", "model.name", "data.prefix")
"""Whoever chose none of these wants the demo, with its values."""
_UNDECIDED = "undecided"


def defaults_taken(words: Sequence[str], composed: object, keys: Sequence[str]) -> str | None:
    """In words, those of these keys that nobody chose, with their values; None if there are none, or the demo is meant.

    A value is chosen by a word of the command line, by an experiment, or by a file of a group that one of the two
    names. `composed` is what the command line gives: an `Experiment`, or the like of it.
    """
    folders, others = config_dirs(words)
    given = {word.partition("=")[0].lstrip("+"): word for word in others}
    choices = [word for key, word in given.items() if key in groups()]
    try:
        with command_line_as_given([*(f"--config-dir={folder}" for folder in folders), *choices]) as found:
            chosen = kept_values([_UNDECIDED, *found.overrides], found.folders, partial(_undecided, found))
    except ConfigError:  # files that rely on what the demo has
        return None
    if getattr(getattr(composed, "model", None), "code", None) is not None:  # a module brings its data
        keys = [key for key in keys if key != "data.prefix"]
    train = getattr(composed, "train", None)
    if any(getattr(train, key, None) is not None for key in ("epochs", "samples")):
        keys = [key for key in keys if key != "train.iterations"]
    left = [key for key in (*_SUBJECT, *keys) if key not in given and not _has(chosen, key.split("."))]
    if all(key in left for key in _SUBJECT):
        return None
    defaults = [f"{key.removesuffix('.name')}={attrgetter(key)(composed)}" for key in keys if key in left]
    return f"defaults in use: {' '.join(defaults)}" if defaults else None


def _undecided(found: Words) -> tuple[DictConfig, Mapping[Path, str]]:
    """What a command line gives where the defaults list makes no choices, and what Hydra looked up for that."""
    from hydra.core.config_store import ConfigStore

    from conf.hydra_files import composed
    from conf.reading.yaml_file import load_yaml

    begins = SHIPPED / "config.yaml"
    state = state_of(begins)
    entries = [
        {key: value if key.startswith("override ") else None for key, value in entry.items()}
        for entry in load_yaml(begins).defaults
        if not isinstance(entry, str)
    ]
    ConfigStore.instance().store(name=_UNDECIDED, node={"defaults": ["_self_", *entries]})
    made, looked_up = composed(_UNDECIDED, with_texts(found).all)
    return made, {**looked_up, begins: state}


def _has(chosen: Any, parts: Sequence[str]) -> bool:
    for part in parts:
        if not isinstance(chosen, dict) or part not in chosen:
            return False
        chosen = chosen[part]
    return bool(chosen != "???")
