"""What is known of a YAML file beside its values: the lines of its keys, defaults that lead back to it, references.

Hydra would follow `defaults` that lead back to themselves without end, and OmegaConf takes any value for a reference
`${…}` in the place of a group of keys or a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError

from conf.errors import ConfigError
from conf.reading.own_folders import SHIPPED, SUFFIX
from conf.reading.yaml_file import require_small
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
    """The lines of one file."""

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


def endless(folders: Sequence[Path], overrides: Sequence[str]) -> str:
    """What to say of files in these folders that Hydra cannot read to an end, those that the words lead to first."""
    own = [folder for folder in folders if folder != SHIPPED]
    included = {path: [*_included(path, folder, own)] for folder in own for path in sorted(folder.rglob(f"*{SUFFIX}"))}
    chosen = [word.lstrip("+").partition("@")[0].replace("=", "/", 1) for word in overrides]
    reached = [path for word in chosen for folder in own if (path := folder / f"{word}{SUFFIX}") in included]
    for path in reached:
        reached.extend(other for other in included.get(path, ()) if other not in reached)
    for start in [*reached, *included]:
        if (way := _way_back(start, included)) is not None:
            more = " includes ".join(map(str, way))
            return f"{more}: a file cannot include itself; take the last one out of its 'defaults'"
    return "the files are nested too deeply: each includes another one in its 'defaults'; put them together"


def _way_back(start: Path, included: dict[Path, list[Path]]) -> list[Path] | None:
    """The files by which one includes itself."""
    before: dict[Path, Path] = {}
    waiting = [start]
    while waiting:
        path = waiting.pop(0)
        for other in included.get(path, ()):
            if other == start:
                way = [start, path]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1] if len(way) > 2 or path != start else [start, start]
            if other not in before:
                before[other] = path
                waiting.append(other)
    return None


def _included(path: Path, folder: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """The files in a file's `defaults`: names of its own group, or behind a slash of any."""
    group = path.parent.relative_to(folder)
    for entry in _defaults(path):
        if isinstance(entry, dict):
            names = [f"{key}/{name}" for key, value in entry.items() for name in _listed(value)]
        else:
            names = [str(entry)]
        for name in (name.removeprefix("override ").removeprefix("optional ").partition("@")[0] for name in names):
            place = Path(name[1:]) if name.startswith("/") else group / name
            yield from (found for other in folders if (found := other / f"{place}{SUFFIX}").is_file())


def _defaults(path: Path) -> list[Any]:
    try:
        require_small(path)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ConfigError, yaml.YAMLError, RecursionError):
        return []
    found = content.get("defaults") if isinstance(content, dict) else None
    return found if isinstance(found, list) else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def require_shapes(node: Any, kind: Any, key: str = "") -> None:
    """Raises ConfigError where what stands at `key` is not a group of keys, no list, or one of another kind."""
    if type(None) in get_args(kind) and node is not None:
        (kind,) = (one for one in get_args(kind) if one is not type(None))
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
