"""Files of keys and values that people may have edited."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from conf.errors import ConfigError
from conf.reading.written_text import load
from megatron_ext.contract.files import why

NOT_TEXT = "not a text file"
NO_KEYS = "the file has no keys"
NO_VALUE = "a value cannot be read"
MOST_BYTES = 2**24
MOST_VALUES = 200_000
"""The most values of a file whose aliases (`*name`) are written out: a few lines of them may stand for more than a
machine holds."""
MOST_DEEP = 50
"""Mappings and lists within each other."""
TOO_DEEP = f"mappings and lists are nested more than {MOST_DEEP} deep"


def load_yaml(path: Path, kind: Any = None) -> DictConfig:
    """The keys of a YAML file, which are those of a class `kind` where one is given.

    Raises:
        ConfigError: it is not YAML, is too large, has no keys, or has a reference `${…}` that cannot be read.
        OSError: it cannot be read.
    """
    try:
        require_small(path)
        with path.open(encoding="utf-8") as file:
            loaded: Any = load(file, kind)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{NOT_TEXT}: byte {error.start} is not UTF-8") from error
    except YAMLError as error:
        raise ConfigError(f"not YAML: {yaml_fault(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(fault(error)) from error
    except RecursionError as error:  # behind what libyaml calls a fault, and PyYAML does not
        raise ConfigError(TOO_DEEP) from error
    except ValueError as error:  # a number of too many digits
        raise ConfigError(f"{NO_VALUE}: {why(error)}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        loaded = None  # what OmegaConf says of a lone word or number
    except AssertionError:  # or of a lone truth or date
        loaded = None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(NO_KEYS)
    return loaded


def load_frozen(path: Path, kind: Any) -> DictConfig:
    """The same of a file that tdpp wrote, in which nothing refers to anything else.

    Whoever can write to it could otherwise have the reader's own environment put into what the reader publishes.

    Raises:
        ConfigError: as `load_yaml`, or it has a reference.
    """
    loaded = load_yaml(path, kind)
    for key in _references(OmegaConf.to_container(loaded)):
        raise ConfigError(f"{key} refers to another key (${{…}}), which no file written by tdpp does")
    return loaded


def _references(value: Any, of: str = "") -> Iterator[str]:
    """The keys whose values are references: `${` behind no odd number of backslashes, which would escape it."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _references(part, f"{of}.{key}" if of else str(key))
    elif isinstance(value, str) and re.search(r"(?<!\\)(\\\\)*\$\{", value):
        yield of


def require_small(path: Path) -> None:
    """Raises ConfigError for a file that would take more memory or time than any configuration is worth."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("not a regular file")
    if found.st_size > MOST_BYTES:
        raise ConfigError(f"it has {found.st_size} bytes; a configuration has at most {MOST_BYTES}")
    with path.open(encoding="utf-8") as file, suppress(YAMLError):  # reading it tells where
        _require_few(yaml.parse(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _require_few(events: Iterable[yaml.Event]) -> None:
    """Counts values with their aliases written out, event by event, for to build them could already be too much."""
    known: dict[str | None, int] = {}
    """Values in what an anchor names."""
    begun: list[tuple[str | None, int]] = [(None, 0)]
    """The mappings and lists that are open, outermost first: their anchors, and their values so far."""
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, 1))
            if len(begun) > MOST_DEEP:
                raise ConfigError(TOO_DEEP)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, values = begun.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, values = event.anchor, known.get(event.anchor, MOST_VALUES)  # an open one contains itself
        elif isinstance(event, yaml.ScalarEvent):
            anchor, values = event.anchor, 1
        else:
            continue
        known[anchor] = values
        begun[-1] = (begun[-1][0], begun[-1][1] + values)
        if begun[-1][1] > MOST_VALUES:
            raise ConfigError(f"with its aliases (*name) expanded it has more than {MOST_VALUES} values")


def yaml_fault(error: YAMLError) -> str:
    """Why a text is not YAML, and where."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = ": ".join(filter(None, (error.context, error.problem)))
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})"


def fault(error: OmegaConfBaseException) -> str:
    """The key whose value cannot be, and why; of an unknown one, those of its class that it may stand for."""
    where = f"{error.full_key}: " if error.full_key else ""
    keys = getattr(error.object_type, "__dataclass_fields__", ()) if isinstance(error, ConfigKeyError) else ()
    near = get_close_matches(str(error.key), keys)
    return where + rule(error) + (f"; did you mean {' or '.join(near)}?" if near else "")


_RULES = (
    (r"Value '(.*)' of type '\w+' could not be converted to Integer", "must be a whole number, not {!r}"),
    (r"Value '(.*)' of type '\w+' could not be converted to Float", "must be a number, not {!r}"),
    (r"Value '(.*)' is not a valid bool \(type \w+\)", "must be true or false, not {!r}"),
    (
        r"field '.*' is not Optional",
        "must have a value, not null; put the word null in quotes if it is meant literally",
    ),
    (r"Invalid value '(.*)', expected one of \[(.*)\]", "{!r} is not one of {}"),
    (r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.", "must be a list, such as [a,b]"),
    (
        r"Invalid type assigned: dict is not a subclass of \w+\. value: .*",
        "a group of keys cannot be added on the command line, but a file of your own can add it (docs/first-day.md)",
    ),
    (r"Invalid type assigned: \w+ is not a subclass of \w+\. value: (.*)", "must be a group of keys, not {!r}"),
    (r"Cannot assign \w+ to Dict\[.*\]", "must be a group of keys"),
    (r"Cannot convert '\w+' to string: .*", "must be a string; put a string with brackets or braces in quotes"),
    (r".* \(DictConfig\) does not support deletion", "no key can be removed; give it a value, or leave the word out"),
)
"""What OmegaConf says of a value, and the rule that the value breaks."""


def rule(error: BaseException) -> str:
    """What is wrong with a value, in a line."""
    reported = next(iter(str(error).splitlines()), type(error).__name__)
    for pattern, words in _RULES:
        if (found := re.fullmatch(pattern, reported)) is not None:
            return words.format(*found.groups())
    return reported
