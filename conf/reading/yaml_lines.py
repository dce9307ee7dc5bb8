"""The lines of a YAML file in which its keys stand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from yaml import YAMLError

from megatron_ext.contract.files import read_regular_text


def parts_of(key: str) -> tuple[str, ...]:
    """`a.b[0]` as `a`, `b`, `0`."""
    return tuple(re.findall(r"[^.\[\]]+", key))


@dataclass(frozen=True, kw_only=True)
class Found:
    line: int
    is_group: bool
    """Whether other keys stand below the key."""


@dataclass(frozen=True)
class Lines:
    """Of one file."""

    root: yaml.Node | None
    """None where the file cannot be read."""

    @classmethod
    def read(cls, path: Path) -> Lines:
        try:
            return cls(yaml.compose(read_regular_text(path), Loader=yaml.SafeLoader))
        except (OSError, ValueError, YAMLError, RecursionError):
            return cls(None)

    def find(self, parts: Sequence[str]) -> Found | None:
        """Where the key is; None if the file does not have it."""
        node, line = self.root, None
        for part in parts:
            if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
                node = node.value[int(part)]
                line = node.start_mark.line + 1
                continue
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            found = next(((name, value) for name, value in pairs if str(name.value) == part), None)
            if found is None:
                return None
            line, node = found[0].start_mark.line + 1, found[1]
        return None if line is None else Found(line=line, is_group=isinstance(node, yaml.MappingNode))


def line_of(path: Path, key: str) -> int | None:
    """The line where a file has a key, which may also be named as seen from above the file; None if it has it not."""
    lines, parts = Lines.read(path), parts_of(key)
    places = (lines.find(parts[start:]) for start in range(len(parts)))
    return next((found.line for found in places if found is not None), None)
