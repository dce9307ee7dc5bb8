"""What no machine knows: prices, and the network where nodes do not say. Options say it, or the person who is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from launch.errors import LaunchError
from launch.first_day.found import ASSUMED_GBIT_PER_S, Found, FoundGroup

Asked = Callable[[str], str]
"""A question's answer."""


def priced(found: Found, given: Mapping[str, float]) -> Found:
    """With the prices of `--price`, by group, kind of GPU or Slurm's type of it.

    Raises:
        LaunchError: a name is none of these.
    """
    unknown = [name for name in given if not any(name in _names(group) for group in found.groups)]
    if unknown:
        known = ", ".join(dict.fromkeys(name for group in found.groups for name in _names(group)))
        raise LaunchError(
            f"--price {unknown[0]}={given[unknown[0]]:g}: no group or GPU type {unknown[0]}; the known ones are {known}"
        )

    def of(group: FoundGroup) -> FoundGroup:
        prices = [given[name] for name in _names(group) if name in given]
        return replace(group, price_per_hour=prices[0]) if prices else group

    return replace(found, groups=tuple(map(of, found.groups)))


def with_network(found: Found, gbit_per_s: float) -> Found:
    """With the figure of `--network`, between all nodes."""
    return replace(found, groups=tuple(replace(group, network_gbit_per_s=gbit_per_s) for group in found.groups))


def answered(found: Found, ask: Asked) -> Found:
    """With what the person at the terminal says; nothing is as good as Enter."""
    if found.executor == "local":
        return found
    groups = []
    for group in found.groups:
        price = group.price_per_hour
        if price is None:
            price = _number(ask, f"{group.name}: US dollars an hour of one node ({group.title}) [leave out]: ")
        groups.append(replace(group, price_per_hour=price))
    found = replace(found, groups=tuple(groups))
    if any(group.network_gbit_per_s is None for group in groups):
        rate = _number(ask, f"network between nodes, Gbit/s [{ASSUMED_GBIT_PER_S:g}]: ")
        found = found if rate is None else with_network(found, rate)
    return found


def at_the_terminal(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _number(ask: Asked, question: str) -> float | None:
    while answer := ask(question).strip():
        try:
            if 0 < (value := float(answer)) < float("inf"):
                return value
        except ValueError:
            pass
        print(f"{answer!r} is not a number above 0; Enter keeps the default", file=sys.stderr)
    return None


def _names(group: FoundGroup) -> Sequence[str]:
    return [name for name in (group.name, group.gpu.key, group.gres_type) if name is not None]
