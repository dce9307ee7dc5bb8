"""What is hard to believe of links between nodes, and of a table of links between pairs of node groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from conf.schema.cluster import NodeGroup
from conf.schema.values.links import KEY, PairLink
from fasop.costs.hardware_doubts import latency_doubts

OTHER = 2.0
"""How many times directions may differ, or a pair may be faster than its groups' own links."""
UNLIKE = 500.0
"""How many times as much a network card of one group may carry as one of another."""
LEAST_GBIT_PER_S = 1e-3


def link_doubts(groups: Mapping[str, NodeGroup], links: Mapping[tuple[str, str], PairLink]) -> Iterator[str]:
    """In words: GPUs of a node that reach each other more slowly than other nodes, pairs that the table leaves out,
    directions that differ, and links that are faster than the nodes'."""
    for name, group in groups.items():
        card = group.inter_gbit_per_s / group.nics
        if group.gpus_per_node != 1 and card > OTHER * group.intra_gbit_per_s:
            yield (
                f"cluster.groups.{name}.intra_gbit_per_s={group.intra_gbit_per_s:g}, but a GPU sends to other nodes "
                f"with {card:g} Gbit/s (inter_gbit_per_s={group.inter_gbit_per_s:g}, nics={group.nics}); check both "
                f"values, or measure again"
            )
    rates = {name: group.inter_gbit_per_s / group.nics for name, group in groups.items()}
    slow, fast = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    if rates[fast] > UNLIKE * rates[slow]:
        yield (
            f"cluster.groups.{slow}.inter_gbit_per_s={groups[slow].inter_gbit_per_s:g}, but a network card of {fast} "
            f"carries {rates[fast]:g}; check both values and their units"
        )
    if any(row != column for row, column in links):
        for pair in combinations(groups, 2):
            if pair not in links:
                own, latency = _own(groups, pair)
                yield (
                    f"{KEY}.{pair[0]}.{pair[1]} and its counterpart are missing: messages between these groups are "
                    f"assumed to have the groups' own figures, {own:g} Gbit/s and {latency:g} us; measure the pair "
                    f"with 'tdpp profile', or set these figures"
                )
    for (row, column), link in links.items():
        rate, back = _rate(link), _rate(links[column, row])
        if link.latency_us is not None:
            yield from latency_doubts(f"{KEY}.{row}.{column}.latency_us", link.latency_us, rate)
        if rate is None:
            continue
        own, _ = _own(groups, (row, column))
        if row < column and back is not None and max(rate, back) > OTHER * min(rate, back):
            yield (
                f"{KEY}.{row}.{column} has up to {rate:g} Gbit/s and {KEY}.{column}.{row} {back:g}: most networks are "
                f"equal in both directions; check both values, or measure again"
            )
        if rate < LEAST_GBIT_PER_S:
            yield f"{KEY}.{row}.{column} has up to {rate:g} Gbit/s, less than a telephone line; check the unit, Gbit/s"
        if rate > OTHER * own:
            yield (
                f"{KEY}.{row}.{column} has up to {rate:g} Gbit/s, but a node's own link (inter_gbit_per_s) has "
                f"{own:g}; check both values, or measure again"
            )


def _rate(link: PairLink) -> float | None:
    """Gbit/s of large messages; None: by the groups' own figures."""
    return link.gbit_per_s_by_bytes[-1][1] if link.gbit_per_s_by_bytes else link.gbit_per_s


def _own(groups: Mapping[str, NodeGroup], pair: tuple[str, str]) -> tuple[float, float]:
    """Bandwidth and latency by the groups' own figures."""
    ends = [groups[name] for name in pair]
    return min(one.inter_gbit_per_s for one in ends), max(one.inter_latency_us for one in ends)
