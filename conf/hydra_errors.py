"""What Hydra, OmegaConf and YAML say about a configuration, as one message: the key or file, the rule, the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from conf.errors import ConfigError
from conf.reading.own_folders import SUFFIX, groups
from conf.reading.user_files import Words, names_in
from conf.reading.yaml_file import NO_KEYS, NO_VALUE, NOT_TEXT, load_yaml, rule, yaml_fault
from conf.reading.yaml_lines import endless, line_of
from conf.schema import experiment
from conf.visible import NEAREST, nearest

COMPOSING = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    RecursionError,
)
"""What words and files raise that Hydra cannot compose."""
EVERY_KEY = "'tdpp launch --cfg job' prints every key"
_IN_FILE = re.compile(r"In '(?P<config>[^']+)': (?:\w+ raised while composing config:\n)?(?P<fault>.*)", re.DOTALL)
_FULL_KEY = re.compile(r"^\s*full_key: (?P<key>.*)$", re.MULTILINE)
_NO_KEY = re.compile(r"Key '(?P<key>[^']*)' (?:not in '\w+'|is not in struct)")
_OVERRIDDEN = re.compile(r"Could not override '(?P<key>[^']*)'|Error merging override (?P<word>.*)")
_DELETED = re.compile(r"Could not delete from config\. '(?P<key>[^']*)' does not exist")
_NO_GROUP = re.compile(r"Override (?P<word>.*) looks like .* config group '(?P<group>.*)' does not exist")
_SEVERAL = re.compile(r"Ambiguous value for argument '(?P<word>.*)'\n|Sweep parameters '(?P<sweep>.*)' requires")


def message(error: Exception, words: Words) -> str:
    """What an error of `COMPOSING` says to a user. Raises Exception: the error, if no word and no file is the cause."""
    return words.as_given(" ".join(_message(error, words).split()))


def _message(error: Exception, words: Words) -> str:
    match error:
        case OverrideParseException():
            return _unparsed(error)
        case MissingConfigException():
            return _no_choice(error, words)
        case HydraException():
            return _refused(str(error), error.__cause__, words)
        case OmegaConfBaseException() if files := _unreadable(words, rule(error)):
            return files
        case OmegaConfBaseException():
            return f"{error.full_key}: {rule(error)}" if error.full_key else rule(error)
        case YAMLError() if (mark := getattr(error, "problem_mark", None)) is not None:
            return f"{mark.name}: not YAML: {yaml_fault(error)}"
        case YAMLError() if (name := getattr(error, "name", None)) is not None:  # a character that none may have
            return f"{name}: not YAML: {yaml_fault(error)}"
        case UnicodeDecodeError() if files := _unreadable(words, NOT_TEXT):
            return files
        case OSError() if files := _unreadable(words, error.strerror or NO_KEYS):
            return files
        case OSError() if error.filename is not None:  # of a folder, or made of a word that is too long for a name
            return f"{error.filename}: {error.strerror}"
        case ValueError() if files := _unreadable(words, NO_VALUE):
            return files
        case OverflowError() if (key := _FULL_KEY.search(str(error))) is not None:
            return f"{key['key']}: must be a number of at most 300 digits"
        case RecursionError():
            return endless(words.folders, words.overrides)
        case AttributeError() if _raised_by_hydra(error):
            return f"{' '.join(words.overrides)}: Hydra cannot apply all of these; leave out what conflicts"
        case ValueError() | TypeError() | AssertionError() if _raised_by_hydra(error):
            return _no_name(words.overrides) or f"{' '.join(words.overrides)}: Hydra cannot read this: {error}"
        case _:
            raise error


def unknown_key(key: str) -> str:
    parts = key.split(".")
    known = [
        [parts[number] if part == "*" and number < len(parts) else part for number, part in enumerate(pattern)]
        for pattern in known_keys()
    ]
    names = (name for name in map(".".join, known) if "*" not in name)
    return f"{key} is not a key; {nearest(key, names, _meant(parts, known))}{EVERY_KEY}"


def _meant(parts: list[str], keys: Sequence[list[str]]) -> list[str]:
    """The keys that an unknown one may well stand for."""
    parent, leaf = parts[:-1], parts[-1]
    like = [known for known in keys if known[:-1] == parent and get_close_matches(leaf, known[-1:], cutoff=0.7)]
    elsewhere = [known for known in keys if known[-1] == leaf]  # lr is train.lr
    near = like or elsewhere if parent else elsewhere or like
    if not near and not parent:
        near = [known for known in keys if get_close_matches(leaf, known[-1:], cutoff=0.75)]
    dotted = [".".join(known) for known in near]
    if parent and parent not in keys:
        dotted = get_close_matches(".".join(parts), map(".".join, keys), cutoff=0.75)
    return [known for known in dict.fromkeys(dotted) if "*" not in known]


@cache
def known_keys() -> Sequence[tuple[str, ...]]:
    """The parts of every key of the schema, with `*` for the entries of dictionaries, and every group."""
    return [*_fields(experiment.Experiment), *((group,) for group in sorted(groups()))]


def _fields(of: Any) -> Iterator[tuple[str, ...]]:
    for name, kind in get_type_hints(of).items():
        yield (name,)
        entries = get_origin(kind) is dict
        inner = get_args(kind)[1] if entries else kind
        if is_dataclass(inner):
            yield (name, *["*"] * entries)
            yield from ((name, *["*"] * entries, *parts) for parts in _fields(inner))


_UNREADABLE = re.compile(r"[1-9][0-9]*[^0-9]|0.")
"""The beginning of a name in a key that Hydra's grammar does not know: a digit, but no number."""


def _unparsed(error: OverrideParseException) -> str:
    if "=" not in error.override:
        near = get_close_matches(error.override, groups(), n=1)
        return f"{error.override} is not KEY=VALUE" + (f"; did you mean {near[0]}=…?" if near else "")
    key, _, value = error.override.partition("=")
    parts = key.split(".")
    if (odd := next((number for number, part in enumerate(parts) if _UNREADABLE.match(part)), 0)) > 0:
        for part in reversed(parts[odd:]):
            value = f"{{{part}: {value}}}"
        return (
            f"{error.override}: a key cannot be read here in which a name begins with a digit, as {parts[odd]} does; "
            f"write '{'.'.join(parts[:odd])}={value}'"
        )
    fault = next(line for line in str(error).splitlines() if not line.startswith("Error parsing override"))
    return f"{error.override}: the value cannot be read: {fault}; put a value with such characters in quotes, '\"…\"'"


def _no_choice(error: MissingConfigException, words: Words) -> str:
    """`error` says which file has it in its defaults, or `config` for a word of the command line."""
    missing = error.missing_cfg_file or ""
    group, inside, choice = missing.partition("/")
    found = _IN_FILE.match(str(error))
    place = f"{_file(found['config'], words)}: " if found and found["config"] not in ("config", "hydra/config") else ""
    if not error.options:
        return f"{place}Could not find '{missing}'" if inside else rule(error)
    options = names_in(group, words.folders) or error.options
    near = get_close_matches(choice, options, n=NEAREST)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    if not names_in(group, words.folders):  # of Hydra's own groups, which have parts
        group = missing.rpartition("/")[0]
    return f"{place}Could not find '{missing}'; {hint}{group} can be {', '.join(options)}"


def _refused(reported: str, cause: BaseException | None, words: Words) -> str:
    """What Hydra says of a word, whose `cause` is OmegaConf's error, or of a file, in whose words that is quoted."""
    if (several := _SEVERAL.match(reported)) is not None:
        word = several["word"] or several["sweep"]
        key, _, value = word.partition("=")
        return (
            f"{word}: several values make a sweep, which needs 'tdpp launch -m'; write a list as [a,b], a value with "
            f"commas in two pairs of quotes, '{key}=\"{value}\"'"
        )
    if (in_file := _IN_FILE.match(reported)) is not None:
        key, place = _FULL_KEY.search(reported), _file(in_file["config"], words)
        if key is None or not key["key"]:
            return f"{place}: {in_file['fault'].splitlines()[0]}"
        if (line := line_of(Path(place), key["key"])) is not None:
            place = f"{place}, line {line}"
        if _NO_KEY.match(in_file["fault"]):
            return f"{place}: {unknown_key(key['key'])}"
        return f"{place}: {key['key']}: {rule(ValueError(in_file['fault']))}"
    if (no_group := _NO_GROUP.match(reported)) is not None:
        near = get_close_matches(no_group["group"], groups(), n=NEAREST)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        return f"{no_group['word']}: no group {no_group['group']}; {hint}{_every_group()}"
    if (deleted := _DELETED.match(reported)) is not None:
        return f"~{deleted['key']}: {unknown_key(deleted['key'])}"
    if not isinstance(cause, OmegaConfBaseException):
        return reported
    overridden = _OVERRIDDEN.match(reported)
    if overridden is None:
        return _message(cause, words)
    word = overridden["key"] or overridden["word"]
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and _NO_KEY.match(str(cause)):
        return _no_key(word, cause)
    return f"{word}: {rule(cause)}"


def _no_key(word: str, error: OmegaConfBaseException) -> str:
    """Says of a word that it leads to no key; a dictionary may have others than it has."""
    full_key = str(error.full_key)
    if error.object_type is not dict:
        is_start = word == full_key or word.startswith(f"{full_key}.")
        return unknown_key(word) if is_start else f"{word}: {unknown_key(full_key)}"
    parent, _, name = full_key.rpartition(".")
    known = [str(key) for key in error.parent_node] if error.parent_node is not None else []
    near = get_close_matches(name, known)
    hint = f"did you mean {' or '.join(f'{parent}.{one}' for one in near)}? " if near else ""
    of_keys = (*parent.split("."), "*") in known_keys()
    adding = "a file of your own can add it (docs/first-day.md)" if of_keys else f"+{word}=… adds it"
    return f"{full_key} does not exist: {parent} has {', '.join(known) or 'nothing'}; {hint}{adding}"


def _unreadable(words: Words, fault: str) -> str:
    """The files with this fault, where the error that they have caused does not say which one it was."""
    faults = []
    for file in (file for folder in words.folders for file in sorted(folder.glob(f"*/*{SUFFIX}"))):
        try:
            load_yaml(file, Any)
        except ConfigError as error:
            faults.append(f"{shown(file)}: {error}")
        except OSError as error:
            faults.append(f"{shown(file)}: {error.strerror}")
    return "; ".join(one for one in faults if fault in one)


def _no_name(overrides: Sequence[str]) -> str:
    """The word that gives a group something else than the name of a choice, such as a number; empty without any."""
    words = [word for word in overrides if "=" in word and not word.startswith("-")]
    for override in OverridesParser.create().parse_overrides(words):
        group = override.get_key_element().lstrip("+~").partition("@")[0]
        value = override.value()
        names = value if isinstance(value, list) else [value]
        if group in ("", *groups()) and not all(isinstance(name, str) for name in names):
            return f"{override.input_line}: give a group the name of one of its files; {_every_group()}"
    return ""


def _every_group() -> str:
    return f"the groups are {', '.join(sorted(groups()))}"


def _raised_by_hydra(error: Exception) -> bool:
    """Whether Hydra raised it, for example for options that do not go together."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith(("hydra.", "omegaconf."))


def _file(config: str, words: Words) -> str:
    """What `file_of` finds, to be shown; for a config without a file, its name."""
    file = file_of(config, words)
    return config if file is None else shown(file)


def file_of(config: str, words: Words) -> Path | None:
    """The path of what Hydra calls `model/tiny`; None if it is no file."""
    files = (folder / f"{config}{SUFFIX}" for folder in words.folders)
    return next((file for file in files if file.is_file()), None)


def shown(file: Path) -> str:
    """A file that was given by its path is a link."""
    return os.path.realpath(file) if file.is_symlink() else str(file)
