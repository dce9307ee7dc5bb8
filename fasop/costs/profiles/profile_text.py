"""A profile as a YAML file that people read and edit: one line for each part of a model."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from enum import Enum
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from fasop.costs.profiles.profile import LayerProfile

UNITS = (
    "Times of a part are milliseconds of one micro-batch on one rank; spread is half of the median's 95 % confidence\n"
    "interval. docs/profile.md explains every key."
)


def profile_text(profile: LayerProfile, comment: str) -> str:
    """What `read_profile` reads; `comment` comes first, by lines. What is not known is left out."""
    known = _known(asdict(profile))
    known["costs"] = known.pop("costs")  # the longest part, last
    if not profile.costs:
        del known["costs"]
    head = "".join(f"# {line}\n" for line in f"{comment}\n{UNITS}".splitlines())
    body: str = yaml.dump(known, Dumper=_Dumper, sort_keys=False, width=math.inf)
    return head + body


def _known(value: Any) -> Any:
    """Without keys that have no value, or no key below them that has one."""
    match value:
        case dict():
            some = {key: _known(one) for key, one in value.items()}
            return {_known(key): one for key, one in some.items() if one is not None and one != {}}
        case list():
            return [_known(one) for one in value]
        case Enum():
            return str(value)
        case _:
            return value


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """What has no mapping or list below it on one line; numbers and words so that OmegaConf reads what was written."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = all(isinstance(value, yaml.ScalarNode) for _, value in node.value)
        return node

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        node = super().represent_sequence(tag, sequence, flow_style)
        node.flow_style = all(isinstance(value, yaml.ScalarNode) for value in node.value)
        return node


def _number(dumper: _Dumper, value: float) -> yaml.ScalarNode:
    """Without an exponent, which YAML 1.1 reads as text unless it has a dot and a sign; read again it is the same."""
    text = np.format_float_positional(value, trim="-")
    return dumper.represent_scalar(f"tag:yaml.org,2002:{'float' if '.' in text else 'int'}", text)


def _word(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Quoted where YAML could read it as something else, such as a version or a date."""
    plain = re.fullmatch(r"[A-Za-z][\w-]*", text) and OmegaConf.create(f"word: {text}").word == text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(float, _number)
_Dumper.add_representer(str, _word)
