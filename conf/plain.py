"""A configuration as plain values, and the schema's objects made of such, for which OmegaConf need not be imported.

The values are those that OmegaConf has brought to their types already; here only enumerations are still names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


class Plain(dict[str, Any]):
    """A group of keys, which are attributes too, as those of OmegaConf's."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError as error:
            raise AttributeError(key) from error


def filled(kind: type[T], values: Mapping[str, Any]) -> T:
    """An object of a class of the schema. Its own checks raise ConfigError where a rule is broken."""
    hints = _hints(kind)
    return kind(**{key: _typed(hints[key], value) for key, value in values.items()})


def _typed(hint: Any, value: Any) -> Any:
    if value is None or hint is Any:
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value if isinstance(value, hint) else hint[value]
    if is_dataclass(hint):
        return filled(cast(type[Any], hint), value)
    arguments = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is list:
        return [_typed(arguments[0], one) for one in value]
    if get_origin(hint) is dict:
        key_kind, kind = arguments
        return {key_kind(key): _typed(kind, one) for key, one in value.items()}
    return _typed(arguments[0], value) if len(arguments) == 1 else value
