"""A key that holds text gets the characters that are written, in a YAML file as on the command line.

YAML 1.1 and Hydra's grammar know nothing of a key: `00123` would be 83, `2024_01` 202401, `yes` True, `12:30` 750. The
schema says which keys hold text. Only `null` (in YAML also `~`, or nothing) still means that a key is not set; a text
of these characters needs quotes. Whole numbers are decimal in both places: `010` is 10, where YAML 1.1 has 8.

Here is what the schema says, and YAML; `word_texts.py` has the words of a command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import IO, Any, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

_TAG = "tag:yaml.org,2002:"
_TEXT, _NULL, _MERGE = f"{_TAG}str", f"{_TAG}null", f"{_TAG}merge"
_ODD_NUMBER = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9][0-9_]*(:[0-9.]+)+")
"""Octal, and minutes and seconds."""
CHOICES = list[dict[str, str]]
"""The kind of a file's `defaults`: names of other files."""


def kind_at(kind: Any, parts: Sequence[str]) -> Any:
    """The type of what lies at a key below a value of type `kind`; None where the schema has no such key."""
    for part in parts:
        kind = below(kind, part)
    return kind


def below(kind: Any, part: str) -> Any:
    """`kind_at` of one part; any name is an entry of a list or a dictionary."""
    if is_dataclass(kind):
        return _hints(kind).get(part)  # type: ignore[arg-type]
    if get_origin(kind) in (list, dict):
        return _required(get_args(kind)[-1])
    return Any if kind is Any else None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return {name: _required(hint) for name, hint in get_type_hints(kind).items()}


def _required(kind: Any) -> Any:
    """Without the `| None`."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    others = [one for one in get_args(kind) if one is not type(None)]
    return others[0] if len(others) == 1 else Any


def holds_text(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, str | Enum)


def load(file: IO[str], kind: Any) -> DictConfig | ListConfig:
    """Loads as `OmegaConf.load` does a file that is to be merged into a `kind`. Raises OSError: it holds a lone word or
    number."""
    loader = get_yaml_loader()(file)
    try:
        node = loader.get_single_node()
        found = None if node is None else loader.construct_document(_as_written(node, kind, {}))
    finally:
        loader.dispose()
    if found is not None and not isinstance(found, list | dict | str):
        raise OSError(f"Invalid loaded object type: {type(found).__name__}")
    return OmegaConf.create() if found is None else OmegaConf.create(found)


def _as_written(node: yaml.Node, kind: Any, made: dict[tuple[int, str], yaml.Node]) -> yaml.Node:
    """The same tree with text where the schema has text; what an alias names may be text in one place only.

    `made` has what is there already, by node and kind: a mapping may contain itself.
    """
    known = (id(node), str(kind))
    if known in made:
        return made[known]
    if isinstance(node, yaml.ScalarNode):
        is_text = (holds_text(kind) and node.tag != _NULL) or _ODD_NUMBER.fullmatch(node.value)
        copy = _text(node) if is_text and not node.style else node
        made[known] = copy
        return copy
    copy = type(node)(node.tag, [], node.start_mark, node.end_mark, node.flow_style)
    made[known] = copy
    if isinstance(node, yaml.SequenceNode):
        copy.value = [_as_written(one, below(kind, "0"), made) for one in node.value]
    else:
        copy.value = [
            (name, _as_written(value, list[kind] if isinstance(value, yaml.SequenceNode) else kind, made))
            if name.tag == _MERGE
            else (_name(name, kind), _as_written(value, _of_name(kind, name), made))
            for name, value in node.value
        ]
    return copy


def _of_name(kind: Any, name: yaml.Node) -> Any:
    if is_dataclass(kind) and name.value == "defaults":
        return CHOICES
    return below(kind, str(name.value))


def _name(node: yaml.Node, kind: Any) -> yaml.Node:
    """A key: text in every mapping of the schema, but for sizes in bytes in a table of links."""
    if not isinstance(node, yaml.ScalarNode) or node.style:
        return node
    holds = is_dataclass(kind) or (get_origin(kind) is dict and get_args(kind)[0] is str)
    return _text(node) if holds or not re.fullmatch(r"[-+]?[0-9.]+", node.value) else node


def _text(node: yaml.ScalarNode) -> yaml.ScalarNode:
    return yaml.ScalarNode(_TEXT, node.value, node.start_mark, node.end_mark, style="'")
