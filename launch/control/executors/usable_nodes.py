"""Whether a partition has as many nodes that take jobs now as a plan, or the cluster's file, counts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from launch.control.executors.jobs import Component
from launch.machine.gres import Gres, parse_gres
from launch.machine.sinfo import RESERVED, Membership
from launch.screen.text import some

MOST_NAMES = 4
"""Of nodes in one state."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Too few nodes of a group take jobs now."""

    group: str
    wanted: int
    usable: int
    fitting: int
    """Nodes that sinfo lists and that a job of the group could have, in whatever state."""
    absent: str
    """The others, such as `gpu2-002 is down`; empty where there never were enough."""
    reserved: bool
    """Whether a reservation is all that keeps them."""

    def __str__(self) -> str:
        return f"{self.group}: {self.usable} of {self.fitting} usable" + (f", {self.absent}" if self.absent else "")

    @property
    def way_out(self) -> str:
        """What to do before a job is submitted."""
        if self.usable == 0:
            fewer = f"leave {self.group} out of the cluster and of the plan (parallel.node_order)"
        else:
            count = f"cluster.groups.{self.group}.count={self.usable}"
            fewer = f"go on with {count} (a launch needs a plan for it: 'tdpp search … {count} plan=NAME' writes one)"
        if not self.absent:
            return f"there are no more such nodes; {fewer}"
        asked = "scontrol show reservation" if self.reserved else "sinfo -R"
        return f"wait for them ('{asked}' says more), or {fewer}"


def shortages(wanted: Iterable[tuple[Component, int]], rows: Sequence[Membership]) -> list[Shortage]:
    """Of components with the nodes that each needs, those that have too few of what sinfo lists. A component that no
    listed node fits is not among them: what is wrong with it, Slurm knows better."""
    found = []
    for component, count in wanted:
        fitting = [row for row in rows if _fits(row, component)]
        usable = sum(row.usable for row in fitting)
        if fitting and usable < count:
            states = {row.hindrance for row in fitting if not row.usable}
            found.append(
                Shortage(
                    group=component.group,
                    wanted=count,
                    usable=usable,
                    fitting=len(fitting),
                    absent=_absent(fitting),
                    reserved=states <= RESERVED,
                )
            )
    return found


def _absent(rows: Sequence[Membership]) -> str:
    """`gpu2-002, gpu2-003 are down, gpu2-007 is reserved`."""
    absent = sorted((str(row.hindrance), row.node) for row in rows if not row.usable)
    parts = []
    for why, pairs in groupby(absent, key=lambda pair: pair[0]):
        names = [name for _, name in pairs]
        parts.append(f"{some(names, MOST_NAMES)} {'is' if len(names) == 1 else 'are'} {why}")
    return ", ".join(parts)


def _fits(row: Membership, component: Component) -> bool:
    """Whether a job of the component may run on the node once it is up."""
    in_partition = row.default if component.partition is None else row.partition in component.partition.split(",")
    return (
        in_partition
        and row.cpus >= (component.cpus_per_task or 0)
        and all(_has(row.gres, asked) for asked in parse_gres(component.gres or ""))
        and _satisfies(row.features, component.constraint)
    )


def _has(there: Sequence[Gres], asked: Gres) -> bool:
    return asked.count <= sum(gres.count for gres in there if asked.type in (None, gres.type))


def _satisfies(features: frozenset[str], constraint: str | None) -> bool:
    """Of `a&b` and `a|b`; what else Slurm understands is taken to fit."""
    if constraint is None or not re.fullmatch(r"[\w.-]+([&|][\w.-]+)*", constraint):
        return True
    return any(features.issuperset(words.split("&")) for words in constraint.split("|"))
