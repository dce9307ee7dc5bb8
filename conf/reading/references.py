"""References `${…}` in the place of groups of keys and of lists: OmegaConf takes any value for them unasked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from conf.errors import ConfigError

_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def require_shapes(node: Any, kind: Any, key: str = "") -> None:
    """Raises ConfigError where what stands at `key` is not a group of keys, no list, or one of another kind."""
    origin = get_origin(kind)
    if not (is_dataclass(kind) or origin in (dict, list)):
        if isinstance(node, DictConfig | ListConfig) and kind is not Any:
            raise ConfigError(f"{key}={node} must be one value, not several")
        return
    what = "a list" if origin is list else "a group of keys"
    if not isinstance(node, ListConfig if origin is list else DictConfig):
        raise ConfigError(f"{key}={node} refers to a single value, but {key} is {what}; write it as one")
    if OmegaConf.get_type(node) is not (origin or kind):
        raise ConfigError(f"{key} refers to {what} of another kind, {node}; write it out")
    hints = _hints(kind) if is_dataclass(kind) else {}
    inner = get_args(kind)[-1] if origin else None
    names: list[Any] = [field.name for field in fields(kind)] if is_dataclass(kind) else _names(node)
    for name in names:
        if not OmegaConf.is_missing(node, name):
            require_shapes(node[name], hints.get(str(name), inner), f"{key}.{name}" if key else str(name))


def is_of(node: Any, kind: Any) -> bool:
    """Whether a configuration is of a class of the schema throughout, and has no keys but those of its classes."""
    if OmegaConf.get_type(node) is not kind or node.keys() - _hints(kind).keys():
        return False
    return all(_fits(node._get_node(name), hint) for name, hint in _hints(kind).items())


def _fits(node: Any, hint: Any) -> bool:
    """Whether what stands in the place of a class, or of several by their names, is of it; no value is looked at."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        return True
    kinds = [kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
    if not kinds:
        return True
    if get_origin(hint) is dict:
        return all(is_of(node._get_node(name), kinds[0]) for name in node)
    return is_of(node, kinds[0])


def _names(node: DictConfig | ListConfig) -> list[Any]:
    return list(node) if isinstance(node, DictConfig) else list(range(len(node)))
