"""What messages between nodes took, as a table of pairs of node groups for `cluster.links`."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from conf.reading.writable import why_not_writable, write_whole
from conf.schema.values.links import KEY, from_file
from launch.errors import LaunchError
from launch.profile.arguments import Arguments
from launch.profile.findings import Found, medians
from launch.profile.link_fit import fit, rounded

Table = dict[str, dict[str, dict[str, Any]]]

LARGE = 2**16
"""Bytes from which on a message's size is worth a bandwidth of its own."""
POINTS = (LARGE, 2**20)
"""And the largest that was measured."""
OFF = 0.2
"""The part by which times of large messages may differ from those of one bandwidth."""


def measured_table(found: Found) -> Table:
    """By row and column. Of several pairs of nodes the medians; where these have other numbers of ranks, of those that
    have most.

    Raises:
        LaunchError: times do not grow with the size.
    """
    node_of = {rank: node for node, (_, ranks) in enumerate(found.nodes) for rank in ranks}
    times: dict[tuple[str, str], dict[int, list[Mapping[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for rank, content in found.ranks.items():
        for link in content.get("p2p", ()):
            ends = node_of[rank], node_of[link["to"]]
            if ends[0] != ends[1]:
                sharing = min(len(found.nodes[node][1]) for node in ends)
                times[found.groups[ends[0]], found.groups[ends[1]]][sharing].append(link["us_by_bytes"])
    table: Table = {}
    for row, column in sorted(times, key=lambda pair: [found.groups.index(name) for name in pair]):
        sharing, alike = max(times[row, column].items())
        table.setdefault(row, {})[column] = entry(medians(alike), sharing)
    return table


def entry(us_by_bytes: Mapping[int, float], sharing: int) -> dict[str, Any]:
    """One bandwidth, if it explains the times of large messages while `sharing` ranks of a node sent, or else points.

    Raises:
        LaunchError: times do not grow with the size.
    """
    latency, slope = fit(us_by_bytes)
    off = max((abs(latency + size * slope - us) / us for size, us in us_by_bytes.items() if size >= LARGE), default=0.0)
    first = us_by_bytes[min(us_by_bytes)]
    busy = [
        (size, (us_by_bytes[size] - first) / sharing)
        for size in sorted({*POINTS, max(us_by_bytes)} & us_by_bytes.keys())
    ]
    if off > OFF and len(busy) > 1 and busy[0][1] > 0 and all(more > less for (_, less), (_, more) in pairwise(busy)):
        points = {size: rounded(8e-3 * size / us) for size, us in busy}
        return {"gbit_per_s_by_bytes": points, "latency_us": rounded(first)}
    return {"gbit_per_s": rounded(8e-3 * sharing / slope), "latency_us": rounded(latency)}


def override(table: Table) -> str:
    """The table as a word of a command line."""
    text = yaml.safe_dump(table, default_flow_style=True, sort_keys=False, width=1 << 30).strip()
    return shlex.quote(f"+{KEY}={text}")


def check_free(path: Path, arguments: Arguments) -> None:
    """Whether a table may be written there; before anything is measured.

    Raises:
        LaunchError: it may not.
    """
    if (why := why_not_writable(path)) is not None:
        raise LaunchError(f"links={path}: {why}")
    if path.exists() and not (arguments.overwrite or arguments.add):
        raise LaunchError(
            f"links={path}: the file already exists; choose another name, or use add=true to add the measured pairs, "
            f"or overwrite=true to replace it"
        )


def write_table(path: Path, table: Table, arguments: Arguments, comment: str) -> None:
    """With `add` beside the pairs that are there.

    Raises:
        ConfigError: what is there is no table.
        LaunchError: it cannot be written.
    """
    whole: Table = from_file(str(path)) if arguments.add and path.exists() else {}
    for row, columns in table.items():
        whole.setdefault(row, {}).update(columns)
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    try:
        write_whole(path, lines + yaml.safe_dump(whole, sort_keys=False))
    except OSError as error:
        raise LaunchError(f"links={path}: cannot be written: {error.strerror}") from error
