"""Slurm's way to write many names of nodes: `gpu2-[001-003,007]`."""

from __future__ import annotations

import re


def expanded(nodelist: str = "") -> tuple[str, ...]:
    """`a[1-2,07-08],b` as a1, a2, a07, a08, b; a part that is written in another way stays as it is."""
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return tuple(host for part in parts if part != "None assigned" for host in _hosts(part))


def _hosts(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\]([^\[\]]*)", part)
    if match is None:
        return [part]
    before, ranges, after = match.groups()
    numbers = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{after}" for number in numbers]
