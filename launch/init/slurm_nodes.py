"""Groups of equal nodes, each of which Slurm can be asked for, of what sinfo lists. Nothing here acts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from launch.init.gpu_kinds import YAML_WORDS
from launch.machine.sinfo import Gres, Membership
from launch.machine.sinfo import parse as parse

LIKE = 1.1
"""Nodes whose memory differs by no more than this factor are alike."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal nodes of a partition."""

    name: str
    partition: str
    nodes: tuple[str, ...]
    """That take jobs now."""
    unusable: tuple[str, ...]
    gres: Gres | None
    other_gres: tuple[Gres, ...]
    """GPUs of another type in the same nodes, which the group leaves alone."""
    constraint: str | None
    strangers: tuple[str, ...]
    """Nodes that Slurm may give instead of these, since no constraint tells them apart."""
    cpus: int
    time_limit: str
    availability: str
    """Whether the partition is up, as sinfo has it."""
    others: tuple[str, ...]
    """Partitions that have some of these nodes, too."""

    @property
    def options(self) -> list[str]:
        """Returns the options for srun."""
        given = {"partition": self.partition, "gres": self.gres, "constraint": self.constraint}
        return [f"--{name}={value}" for name, value in given.items() if value is not None]


def groups(memberships: Iterable[Membership]) -> list[Group]:
    """Nodes by partition, GPUs, CPUs and memory; those with GPUs first.

    A node counts in one partition alone: one that starts jobs, that has the most of its kind, and whose jobs need not
    give way. Nodes of a partition that Slurm cannot be asked for apart, since neither their GPUs nor a feature differ,
    are one group.
    """
    rows = list(memberships)
    kinds = [group for kind in _kinds(rows) for group in _in_partitions(kind)]
    return _named(_told_apart(kinds, rows))


def _kinds(rows: Sequence[Membership]) -> list[list[Membership]]:
    """Rows of equal nodes."""
    ordered = sorted(rows, key=lambda row: (not row.gres, str(row.gres), row.cpus, row.memory_mb, row.node))
    found: list[list[Membership]] = []
    for _, alike in groupby(ordered, key=lambda row: (row.gres, row.cpus)):
        for row in alike:
            last = found[-1][0] if found else None
            same = last is not None and (last.gres, last.cpus) == (row.gres, row.cpus)
            if same and last is not None and row.memory_mb <= LIKE * last.memory_mb:
                found[-1].append(row)
            else:
                found.append([row])
    return found


def _in_partitions(kind: Sequence[Membership]) -> list[list[Membership]]:
    """The rows of each partition that is chosen; together they have every node once."""
    left, found = list(kind), []
    while left:
        members: dict[str, list[Membership]] = {}
        for row in left:
            members.setdefault(row.partition, []).append(row)

        def merit(name: str, members: dict[str, list[Membership]] = members) -> tuple[bool, bool, int, bool, str]:
            rows = members[name]
            return not rows[0].is_open, rows[0].yields, -len(rows), not rows[0].default, name

        chosen = members[min(members, key=merit)]
        found.append(chosen)
        taken = {row.node for row in chosen}
        left = [row for row in left if row.node not in taken]
    return found


def _told_apart(kinds: Sequence[list[Membership]], rows: Sequence[Membership]) -> list[Group]:
    """A group for each, but one for all that Slurm cannot be asked for apart."""
    asked: dict[tuple[str, frozenset[str | None]], list[list[Membership]]] = {}
    for kind in kinds:
        types = frozenset(gres.type for gres in kind[0].gres[:1])  # {None} of GPUs without a type, {} without GPUs
        asked.setdefault((kind[0].partition, types), []).append(kind)
    found = []
    for alike in asked.values():
        features = [_own_feature(kind, _others_given(kind, rows)) for kind in alike]
        if len(alike) == 1:
            found.append(_group(alike[0], rows, features[0]))
        elif all(features):
            found += [_group(kind, rows, feature) for kind, feature in zip(alike, features, strict=True)]
        else:
            found.append(_group([row for kind in alike for row in kind], rows, None))
    return found


def _others_given(kind: Sequence[Membership], rows: Sequence[Membership]) -> list[Membership]:
    """Other nodes of the partition that fit a job which asks for this kind's GPUs: all nodes if it asks for none, and
    those with any GPU if it asks for no type."""
    nodes, gres = {row.node for row in kind}, kind[0].gres

    def fits(row: Membership) -> bool:
        return not gres or any(gres[0].type in (None, other.type) for other in row.gres)

    return [row for row in rows if row.partition == kind[0].partition and row.node not in nodes and fits(row)]


def _own_feature(kind: Sequence[Membership], others: Sequence[Membership]) -> str | None:
    """A feature that all of these nodes have, and none of the others; None also where there are no others."""
    if not others:
        return None
    common = frozenset.intersection(*(row.features for row in kind))
    foreign = frozenset[str]().union(*(row.features for row in others))
    return min(common - foreign, default=None)


def _group(kind: Sequence[Membership], rows: Sequence[Membership], constraint: str | None) -> Group:
    names = {row.node for row in kind}
    least = min(kind, key=lambda row: row.gres[0].count if row.gres else 0)
    others = {row.partition for row in rows if row.node in names} - {kind[0].partition}
    strangers = () if constraint else {row.node for row in _others_given(kind, rows)}
    return Group(
        name=_word(kind[0].partition),
        partition=kind[0].partition,
        nodes=tuple(sorted(row.node for row in kind if row.usable)),
        unusable=tuple(sorted(row.node for row in kind if not row.usable)),
        gres=least.gres[0] if least.gres else None,
        other_gres=least.gres[1:],
        constraint=constraint,
        strangers=tuple(sorted(strangers)),
        cpus=min(row.cpus for row in kind),
        time_limit=kind[0].time_limit,
        availability=kind[0].availability,
        others=tuple(sorted(others)),
    )


def _named(found: Sequence[Group]) -> list[Group]:
    """Names that differ: the partition's, with the type of GPU, then a number, where it has several groups."""

    def several(groups: Sequence[Group]) -> set[str]:
        return {name for name, count in Counter(group.name for group in groups).items() if count > 1}

    double = several(found)
    found = [
        replace(group, name=f"{group.name}-{group.gres.type if group.gres and group.gres.type else 'nodes'}")
        if group.name in double
        else group
        for group in found
    ]
    double, numbers = several(found), Counter[str]()
    named = []
    for group in found:
        numbers[group.name] += 1
        number = f"-{numbers[group.name]}" if group.name in double else ""
        named.append(replace(group, name=f"{_word(group.name)}{number}"))
    return named


def _word(text: str) -> str:
    """Returns a name that a group may have: in keys of the command line, dots separate names."""
    word = re.sub(r"[^A-Za-z0-9_-]", "_", text)
    return word if word[0].isalpha() and word.lower() not in YAML_WORDS else f"p_{word}"
