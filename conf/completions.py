"""What the beginning of a word of `tdpp launch` may become: groups, their choices, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from conf.compose import compose_unchecked
from conf.errors import ConfigError
from conf.reading.own_folders import groups
from conf.reading.user_files import choices
from conf.schema import experiment

_ALONE = {"gpu"}
"""Groups that are chosen for a place: gpu@cluster.gpus.NAME."""


def candidates(word: str, others: Sequence[str]) -> list[str]:
    """Whole words that begin with `word`; `others` are those before it.

    What can be gone on with ends with `=` or a dot.
    """
    key = word.lstrip("+~")
    before = word[: len(word) - len(key)]
    key, equals, value = key.partition("=")
    if not equals:
        names = [f"{group}=" for group in sorted(groups() - _ALONE)] if "." not in key else []
        found = [*names, *_keys(key, others)]
        return [before + name for name in dict.fromkeys(found) if name.startswith(key)]
    several, comma, last = value.rpartition(",")
    return [f"{before}{key}={several}{comma}{one}" for one in _values(key, others) if one.startswith(last)]


def _values(key: str, others: Sequence[str]) -> list[str]:
    """The values of a group or key; none of one that takes any number or text."""
    group = key.partition("@")[0]
    if group in groups():
        return choices(group, others)
    kind: Any = experiment.Experiment
    for part in key.split("."):
        if is_dataclass(kind):
            kind = get_type_hints(kind).get(part)
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
        if get_origin(kind) in (UnionType, Union):
            kind = next(one for one in get_args(kind) if one is not type(None))
    if kind is bool:
        return ["true", "false"]
    return [str(one.value) for one in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _keys(key: str, others: Sequence[str]) -> list[str]:
    """Those of the part of the configuration that `key` leads into, as the other words make it."""
    try:
        cfg = compose_unchecked(others)
    except ConfigError:  # the other words are not finished yet, either
        cfg = compose_unchecked()
    parent, dot, _ = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    if not isinstance(node, DictConfig):
        return []
    return [f"{parent}{dot}{name!s}{'.' if OmegaConf.is_dict(node._get_node(name)) else '='}" for name in node]
