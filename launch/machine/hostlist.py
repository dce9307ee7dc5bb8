"""Slurm's way to write many names of nodes: `gpu2-[001-003,007]`."""

from __future__ import annotations

import re
from collections.abc import Iterable


def expanded(nodelist: str = "") -> tuple[str, ...]:
    """`a[1-2,07-08],b` as a1, a2, a07, a08, b; a part that is written in another way stays as it is."""
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return tuple(host for part in parts if part != "None assigned" for host in _hosts(part))


def compressed(hosts: Iterable[str]) -> str:
    """`a1, a2, a3, b` as `a[1-3],b`, each host once: what `expanded` reads."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain = []
    for host in sorted(set(hosts)):
        match = re.fullmatch(r"(.*?)(\d+)", host)
        if match is None:
            plain.append(host)
        else:
            groups.setdefault((match[1], len(match[2])), []).append(int(match[2]))
    return ",".join([*(_ranges(*key, numbers) for key, numbers in groups.items()), *plain])


def _ranges(before: str, width: int, numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(numbers) == 1:
        return f"{before}{numbers[0]:0{width}d}"
    written = [f"{run[0]:0{width}d}" + (f"-{run[-1]:0{width}d}" if len(run) > 1 else "") for run in runs]
    return f"{before}[{','.join(written)}]"


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
