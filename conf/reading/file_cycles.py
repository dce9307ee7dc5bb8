"""Configuration files whose `defaults` lead back to themselves, which Hydra would follow without end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from conf.errors import ConfigError
from conf.reading.own_folders import SHIPPED, SUFFIX
from conf.reading.yaml_file import require_small


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
