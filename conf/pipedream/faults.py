"""What is wrong with a file of PipeDream's, gathered key by key, and the values of its keys, each taken once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from conf.errors import ConfigError
from conf.reading.yaml_file import NOT_TEXT, require_small, yaml_fault

T = TypeVar("T")


def content_of(path: Path, said: str) -> dict[Any, Any]:
    """The keys of a YAML or JSON file, which `said` names. JSON is YAML; keys without quotes are read too.

    Raises:
        ConfigError: it is not there, or is not such a file.
    """
    try:
        require_small(path)
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{said}: cannot be read: {error.strerror}; give the path of a file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{said}: {NOT_TEXT}: byte {error.start} is not UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{said}: neither YAML nor JSON: {yaml_fault(error)}") from error
    except (ConfigError, RecursionError, ValueError) as error:
        raise ConfigError(f"{said}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{said}: the file has no keys")
    return found


@dataclass
class Keys:
    """The keys of a file, each taken once; `refused` has a line for each value that cannot be."""

    left: dict[Any, Any]
    refused: list[str] = field(default_factory=list)

    def text(self, key: str, rule: str) -> str:
        """One that must be there."""
        value = self.left.pop(key, None)
        if isinstance(value, str) and value.strip() and value.isprintable():
            return value
        self.refused.append(f"{key}={value}: it must be {rule}" if value is not None else f"{key} is missing: {rule}")
        return ""

    def choice(self, key: str, choices: Mapping[str, T], why: str, default: str | None = None) -> T:
        """What one of the choices stands for; the first one's where it is none, which is refused."""
        value = self.left.pop(key, default)
        if not isinstance(value, str) or value not in choices:
            said = f"{key}={value}" if value is not None else f"{key} is missing"
            self.refused.append(f"{said}: {why}; it must be {' or '.join(choices)}")
            return next(iter(choices.values()))
        return choices[value]

    def whole(self, key: str, least: int, default: int) -> int:
        value = self.left.pop(key, default)
        if type(value) is int and value >= least:
            return value
        self.refused.append(f"{key}={value}: it must be a whole number, at least {least}")
        return default

    def number(self, key: str, default: float) -> float:
        """Not below 0. YAML takes 1e-3 for a text."""
        value = self.left.pop(key, default)
        try:
            found = float(value) if type(value) in (int, float, str) else -1.0
        except ValueError:
            found = -1.0
        if 0.0 <= found < float("inf"):
            return found
        self.refused.append(f"{key}={value}: it must be a number, at least 0")
        return default

    def flag(self, key: str) -> bool:
        value = self.left.pop(key, False)
        if type(value) is bool:
            return value
        self.refused.append(f"{key}={value}: it must be True or False")
        return False

    def check(self, said: str) -> None:
        """Raises ConfigError with all that was refused."""
        if self.refused:
            raise ConfigError(f"{said} cannot be trained unchanged:" + "".join(f"\n  {line}" for line in self.refused))
