"""A node as sinfo lists it: its partition, what it has, and whether it takes jobs now. Nothing here acts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launch.errors import LaunchError
from launch.machine.gres import Gres, parse_gres

UNUSABLE = {
    "down": "down",
    "drain": "drained",
    "drng": "draining",
    "fail": "failing",
    "futr": "not set up yet",
    "unk": "unknown to Slurm",
    "inval": "invalid, since it has less than slurm.conf says",
    "maint": "under maintenance",
    "resv": "reserved",
}
"""How sinfo's states of nodes begin that take no job for now, and what they mean. A node that is powered off to save
power (idle~), or powers up or down, does take jobs: Slurm wakes it."""
UNUSABLE_MARKS = {"*": "not answering Slurm", "$": "under maintenance"}
"""How such states end."""
RESERVED = frozenset({"reserved", "under maintenance"})
"""Among the meanings, those of reservations, which end by themselves."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A node in one of its partitions."""

    node: str
    partition: str
    default: bool
    state: str
    availability: str
    """Of the partition; only `up` ones start jobs."""
    cpus: int
    memory_mb: int
    time_limit: str
    """As Slurm writes it, such as 1-00:00:00 or infinite."""
    yields: bool
    """Whether jobs of this partition give way to those of others."""
    gres: tuple[Gres, ...]
    features: frozenset[str]

    @property
    def usable(self) -> bool:
        return self.hindrance is None

    @property
    def is_open(self) -> bool:
        return self.availability == "up"

    @property
    def hindrance(self) -> str | None:
        """What the node is that keeps it from taking jobs now, such as `down`; None: it takes some."""
        for begin, meaning in UNUSABLE.items():
            if self.state.startswith(begin):
                return meaning
        for mark, meaning in UNUSABLE_MARKS.items():
            if self.state.endswith(mark):
                return meaning
        return None if self.is_open else f"in a partition that is {self.availability}"


def parse(text: str) -> list[Membership]:
    """Lines of `slurm_commands.NODES_FORMAT`.

    Raises:
        LaunchError: a line is none.
    """
    rows = [line.strip().split("|", 12) for line in text.splitlines() if line.strip()]
    if wrong := next((row for row in rows if len(row) != 13), None):
        raise LaunchError(f"cannot parse a line of sinfo: {'|'.join(wrong)}")
    top = max((int(row[9]) for row in rows if row[9].isdigit()), default=0)
    return [_membership(row, top) for row in rows]


def _membership(row: Sequence[str], top: int) -> Membership:
    node, partition, marked, availability, state, cpus, most, memory, limit, tier, preempt, gres, features = row
    of_node = int(re.sub(r"\D.*", "", cpus) or 1)
    return Membership(
        node=node,
        partition=partition,
        default=marked.endswith("*"),
        state=state.lower(),
        availability=availability.lower(),
        cpus=min(of_node, int(most)) if most.isdigit() and int(most) else of_node,
        memory_mb=int(re.sub(r"\D.*", "", memory) or 0),
        time_limit=limit,
        yields=preempt.lower() != "off" and tier.isdigit() and int(tier) < top,
        gres=parse_gres(gres),
        features=frozenset(word for word in features.split(",") if word and word != "(null)"),
    )
