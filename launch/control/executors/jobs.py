"""Which Slurm jobs a plan takes: one for each group of nodes, or one with a component for each."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema.cluster import NodeGroup
from conf.schema.experiment import Experiment, Het


@dataclass(frozen=True, kw_only=True)
class Component:
    """Nodes of one group, as they are asked for. What is None is left to Slurm's defaults."""

    group: str
    nodes: tuple[int, ...]
    """Node ranks, by task."""
    partition: str | None
    gres: str | None
    cpus_per_task: int | None
    mem: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    time_min: int | None


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job; with several components it is a heterogeneous one, which Slurm starts on all of them at once."""

    role: str
    """Names its file: `job`, or `master` and `slave` of a run of several jobs."""
    components: tuple[Component, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node ranks, by task: those of a heterogeneous job's step go through its components in order."""
        return tuple(node for component in self.components for node in component.nodes)

    @property
    def het_groups(self) -> tuple[int | None, ...]:
        """By task: the component of a heterogeneous job that the node is of; None in any other job."""
        if len(self.components) == 1:
            return (None,) * len(self.nodes)
        return tuple(number for number, component in enumerate(self.components) for _ in component.nodes)

    @property
    def cpus_per_task(self) -> tuple[int | None, ...]:
        """By task."""
        return tuple(component.cpus_per_task for component in self.components for _ in component.nodes)


def job_requests(experiment: Experiment) -> tuple[JobRequest, ...]:
    """The jobs in the order of their submission: the first has node rank 0, and the others wait for its start."""
    groups = experiment.node_order.groups
    components = tuple(
        component(name, experiment.cluster.groups[name], tuple(rank for rank, of in enumerate(groups) if of == name))
        for name in dict.fromkeys(groups)
    )
    if len(components) == 1 or experiment.executor.het is Het.hetjob:
        return (JobRequest(role="job", components=components),)
    master, *slaves = components
    numbered = len(slaves) > 1
    return (
        JobRequest(role="master", components=(master,)),
        *(
            JobRequest(role=f"slave-{number}" if numbered else "slave", components=(slave,))
            for number, slave in enumerate(slaves, start=1)
        ),
    )


def component(name: str, group: NodeGroup, nodes: tuple[int, ...]) -> Component:
    return Component(
        group=name,
        nodes=nodes,
        partition=group.partition,
        gres=group.gres,
        cpus_per_task=group.cpus_per_task,
        mem=group.mem,
        account=group.account,
        qos=group.qos,
        constraint=group.constraint,
        time_min=group.time_min,
    )
