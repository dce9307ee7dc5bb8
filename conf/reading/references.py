"""References `${…}` in the place of groups of keys and of lists: OmegaConf takes any value for them unasked."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from conf.errors import ConfigError


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
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    inner = get_args(kind)[-1] if origin else None
    names: list[Any] = [field.name for field in fields(kind)] if is_dataclass(kind) else _names(node)
    for name in names:
        if not OmegaConf.is_missing(node, name):
            require_shapes(node[name], hints.get(str(name), inner), f"{key}.{name}" if key else str(name))


def _names(node: DictConfig | ListConfig) -> list[Any]:
    return list(node) if isinstance(node, DictConfig) else list(range(len(node)))
