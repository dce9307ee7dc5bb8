"""A plan that one can launch at once: few nodes of every kind, a small model."""

from __future__ import annotations

from dataclasses import dataclass

from conf.visible import plural
from launch.first_day.found import Found, FoundGroup

MOST_STAGES = 4
"""The model `tiny` has so many layers."""
RANKS_HERE = 4
MICRO_BATCH, MICRO_BATCHES = 2, 4
"""Samples of a micro-batch, and micro-batches of a replica in an iteration."""


@dataclass(frozen=True, kw_only=True)
class FirstPlan:
    """The keys of `parallel` that are not as in `parallel=single`."""

    data: int
    pipeline: int
    node_order: str | None
    why: str
    """What it does, in words."""

    @property
    def keys(self) -> dict[str, int | str]:
        found: dict[str, int | str] = {"data": self.data, "pipeline": self.pipeline}
        found |= {"micro_batch_size": MICRO_BATCH, "global_batch_size": MICRO_BATCH * MICRO_BATCHES * self.data}
        return found | ({} if self.node_order is None else {"node_order": self.node_order})


def first_plan(found: Found) -> FirstPlan:
    """A stage on each of a few nodes, one of every kind or two of the only one; where they have unequal numbers of
    ranks, or are one, replicas."""
    if found.hosts:
        nodes = [int(host.rpartition(":")[2]) if "gpu" not in host else host.count("+") + 1 for host in found.hosts]
        order = _written(found.order) if len(found.groups) > 1 or found.groups[0].count != len(nodes) else None
        return _over(nodes, order)
    if len(found.groups) > 1:
        chosen = found.groups[:MOST_STAGES]
        return _over([_ranks(group) for group in chosen], _written([group.name for group in chosen]))
    (group,) = found.groups
    count = min(2, group.count)
    return _over([_ranks(group)] * count, None if count == group.count else f"{group.name}*{count}")


def _over(nodes: list[int], order: str | None) -> FirstPlan:
    ranks = sum(nodes)
    if len(nodes) == 1:
        stages = 2 if ranks % 2 == 0 else 1
    else:
        stages = len(nodes) if len(set(nodes)) == 1 and len(nodes) <= MOST_STAGES else 1
    data = ranks // stages
    what = f"{plural(data, 'replica')} of {plural(stages, 'stage')}"
    where = f"{plural(len(nodes), 'node')}, {plural(ranks, 'rank')}"
    return FirstPlan(data=data, pipeline=stages, node_order=order, why=f"{what} on {where}")


def _ranks(group: FoundGroup) -> int:
    return RANKS_HERE if group.ranks is None else group.ranks


def _written(names: list[str] | tuple[str, ...]) -> str:
    """As `parallel.node_order` takes it, neighbours of a group together."""
    found: list[tuple[str, int]] = []
    for name in names:
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    return "+".join(name if count == 1 else f"{name}*{count}" for name, count in found)
