"""How long messages take between hosts, over all runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from launch.history.record import RunRecord

Pair = tuple[str, str]
"""Machines at the ends of a link, sorted."""


class Links:
    """How long messages take between hosts, beside the same messages between others."""

    def __init__(self, records: Sequence[RunRecord], machines: Mapping[str, str]) -> None:
        self._machines = machines
        times = defaultdict[str, defaultdict[Pair, list[float]]](lambda: defaultdict(list))
        for record in records:
            for host in record.hosts:
                for name, took in host.links.items():
                    key, _, peer = name.partition(" ")
                    times[key][self._pair(host.host, peer)].append(took)
        self._others = {key: _others({pair: median(of) for pair, of in by.items()}) for key, by in times.items()}

    def beside(self, machine: str, run: RunRecord) -> Iterator[tuple[str, float]]:
        """Yields each machine that one exchanged messages with in a run, and how many times as long as between others
        they took."""
        for host in run.hosts:
            for name, took in host.links.items():
                key, _, peer = name.partition(" ")
                pair = self._pair(host.host, peer)
                others = self._others[key][pair]
                if machine in pair and pair[0] != pair[1] and others:
                    yield pair[0] if pair[1] == machine else pair[1], took / others

    def _pair(self, one: str, other: str) -> Pair:
        one, other = self._machines.get(one, one), self._machines.get(other, other)
        return (one, other) if one < other else (other, one)


def _others(usual: Mapping[Pair, float]) -> dict[Pair, float | None]:
    """For each pair the lower median of all others: of three hosts with one slow network, two links are slow."""
    ranked = sorted(usual, key=usual.__getitem__)
    at = (len(ranked) - 2) // 2
    return {pair: None if at < 0 else usual[ranked[at if at < place else at + 1]] for place, pair in enumerate(ranked)}
