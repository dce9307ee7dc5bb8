"""The table `cluster.links`: what messages from a node of one group (the row) to one of another (the column) take.

A pair that the table leaves out has the groups' own figures, and so has what an entry leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from conf.errors import ConfigError
from conf.schema.values.ranges import check_number
from conf.visible import plural
from megatron_ext.contract.keys import Range, from_0, positive

KEY, FILE = "cluster.links", "cluster.links_file"
MOST_BYTES = 2**40
"""The most bytes of a message."""
EXAMPLE = "gbit_per_s: 10"


@dataclass(frozen=True, kw_only=True)
class PairLink:
    """From a node of one group to another node."""

    gbit_per_s: float | None = None
    """Shared by the ranks of a node that send, or receive, at the same time."""
    gbit_per_s_by_bytes: tuple[tuple[int, float], ...] = ()
    """In its place: (bytes of a message, bandwidth), sizes rising."""
    latency_us: float | None = None
    price_per_gb: float | None = None
    """US dollars for 10^9 bytes that are sent from the row to the column."""


def pairs(links: Mapping[str, Any], groups: Collection[str]) -> dict[tuple[str, str], PairLink]:
    """The table, by row and column. Raises ConfigError: it is none for these groups."""
    found = {}
    for row, columns in links.items():
        check_group(f"{KEY}.{row}", row, groups)
        for column, entry in _mapping(f"{KEY}.{row}", columns, f"{{{row}: {{{EXAMPLE}}}}}").items():
            check_group(f"{KEY}.{row}.{column}", column, groups)
            found[row, column] = _entry(f"{KEY}.{row}.{column}", entry)
    for row, column in found:
        if (column, row) not in found:
            raise ConfigError(
                f"{KEY}.{row}.{column} has no counterpart {KEY}.{column}.{row}: a table needs both directions of a "
                f"pair; add {KEY}.{column}.{row}, with the same figures if both directions are equal"
            )
    return found


def from_file(name: str) -> dict[str, Any]:
    """The table in a YAML file, unchecked: its keys are the rows. Raises ConfigError: it cannot be read."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from conf.reading.yaml_file import fault, load_yaml

    try:
        return cast(dict[str, Any], OmegaConf.to_container(load_yaml(Path(name), dict[str, Any]), resolve=True))
    except ConfigError as error:
        raise ConfigError(f"{FILE}={name}: {error}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{FILE}={name}: {fault(error)}") from error
    except OSError as error:
        raise ConfigError(
            f"{FILE}={name} cannot be read: {error.strerror}; 'tdpp profile links=FILE.yaml' writes such a file"
        ) from error


def only(links: Mapping[str, Any], groups: Collection[str]) -> dict[str, dict[str, Any]]:
    """What of a table is of some groups."""
    return {
        row: {column: entry for column, entry in columns.items() if column in groups}
        for row, columns in links.items()
        if row in groups
    }


def check_group(key: str, name: object, groups: Collection[str]) -> None:
    """Raises ConfigError if a name is none of these node groups."""
    if name not in groups:
        raise ConfigError(
            f"{key}: {name!r} is not a node group; cluster.groups has {', '.join(groups)}; correct the name, or leave "
            f"the entry out"
        )


def _entry(key: str, entry: object) -> PairLink:
    values = _mapping(key, entry, f"{{{EXAMPLE}}}")
    names = [field.name for field in fields(PairLink)]
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"{key}.{unknown[0]} is not a key of a link; those are {', '.join(names)}")
    link = PairLink(
        gbit_per_s=_number(f"{key}.gbit_per_s", values.get("gbit_per_s"), positive()),
        gbit_per_s_by_bytes=_points(f"{key}.gbit_per_s_by_bytes", values.get("gbit_per_s_by_bytes")),
        latency_us=_number(f"{key}.latency_us", values.get("latency_us"), from_0()),
        price_per_gb=_number(f"{key}.price_per_gb", values.get("price_per_gb"), from_0()),
    )
    if link == PairLink():
        raise ConfigError(f"{key} is empty: give it a figure, such as {EXAMPLE}, or leave the entry out")
    if link.gbit_per_s is not None and link.gbit_per_s_by_bytes:
        raise ConfigError(
            f"{key} gives both gbit_per_s={link.gbit_per_s:g} and gbit_per_s_by_bytes: keep the second if bandwidth "
            f"depends on the message size, otherwise the first"
        )
    return link


def _points(key: str, value: object) -> tuple[tuple[int, float], ...]:
    """Sizes rise, and so do the times of messages of those sizes."""
    if value is None:
        return ()
    points = []
    for size, rate in _mapping(key, value, "{65536: 5, 16777216: 20}").items():
        if isinstance(size, bool) or not (isinstance(size, int) or re.fullmatch("[0-9]{1,18}", str(size))):
            raise ConfigError(f"{key}.{size} must be a message's size in bytes, such as {2**20}")
        check_number(f"{key}: size", int(size), Range(1, MOST_BYTES))
        rate = _number(f"{key}.{size}", rate, positive())
        if rate is None:
            raise ConfigError(f"{key}.{size}=null must be a bandwidth in Gbit/s; leave the size out, or give it one")
        points.append((int(size), rate))
    if len(points) < 2:
        raise ConfigError(
            f"{key} has {plural(len(points), 'point')}, but needs at least two, such as "
            "{65536: 5, 16777216: 20}; for one bandwidth at all sizes use gbit_per_s"
        )
    for (size, rate), (larger, its_rate) in pairwise(points):
        if larger <= size:
            raise ConfigError(f"{key}: sizes must increase, but {larger} follows {size}; sort the points by size")
        if larger / its_rate <= size / rate:
            raise ConfigError(
                f"{key}: {larger} bytes at {its_rate:g} Gbit/s would not take longer than {size} bytes at {rate:g}; "
                f"correct a bandwidth, or leave a point out"
            )
    return tuple(points)


def _mapping(key: str, value: object, example: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value} must be a group of keys, such as {example}")
    return value


def _number(key: str, value: object, allowed: Range) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key}={value} must be a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ConfigError(
            f"{key} has a number of {len(str(value))} digits; it must be at most {allowed.high:g}"
        ) from error
    check_number(key, number, allowed)
    return number
