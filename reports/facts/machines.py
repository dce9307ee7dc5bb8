"""What the nodes of runs are made of, and in what that differs between runs: an answer to why a run is slower or ends
elsewhere than another one with the same configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

IDS = ("gpus.uuid",)
"""Differ between any two nodes."""


def made_of(machines: Mapping[str, Mapping[str, Any]], images: Sequence[str] = ()) -> dict[str, str]:
    """Returns by dotted key the values of all nodes of a run, each once; `images` are the nodes' containers."""
    found: dict[str, dict[str, None]] = {}
    for machine in machines.values():
        for key, value in _leaves(machine, ""):
            found.setdefault(key, {})[value] = None
    for image in images:
        found.setdefault("image", {})[image] = None
    return {key: ", ".join(sorted(values)) for key, values in found.items() if key not in IDS}


def differing(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the keys in which runs differ. A run that noted nothing differs in none."""
    known = [run for run in runs if run]
    keys = dict.fromkeys(key for run in known for key in run)
    return [key for key in keys if len({run.get(key) for run in known}) > 1]


def _leaves(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, key)
    elif value is not None:
        yield key, str(value)
