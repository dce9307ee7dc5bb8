"""The replicas of a plan, each with its own GPUs and its own number of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fasop.costs.layers import Basis
from fasop.costs.stream_rates import StreamRates, stream_rates
from fasop.costs.training import PlacedTraining
from fasop.simulation.iteration import Durations, Pipeline
from fasop.simulation.nodes import Nodes
from fasop.simulation.on_nodes import handing_out, on_nodes
from megatron_ext.contract.schedule.iteration import as_json
from megatron_ext.contract.schedule.iteration import schedule as make_schedule


class Replicas:
    """Those of a plan, whatever its partition. Raises SearchError: a profile has no costs for the tensor size."""

    def __init__(self, plan: PlacedTraining) -> None:
        parallel = plan.training.parallel
        groups = [node.name for node in plan.nodes for _ in range(node.gpus // parallel.tensor_size)]
        self.kinds = [tuple(groups[replica :: parallel.data]) for replica in range(parallel.data)]
        """For each replica, the kind of node that has it, stage by stage: a tensor group lies in one node."""
        self._parallel = parallel
        training = plan.training
        self._rates = {
            kind.name: stream_rates(kind.profile, training.model, training.precision, parallel.micro_batch_size)
            for kind in (plan.kinds if training.in_streams else ())
        }
        """Rates of streams, for each kind of node."""
        self._whole = _Lines(plan)
        """Lines by the slowest GPU of each stage."""
        self._alone = {kind.name: _Lines(_all_of(plan, kind.name)) for kind in plan.kinds if self.unlike}
        """Lines for each kind of node, as if all nodes were of that kind."""

    @property
    def unlike(self) -> bool:
        """Whether some lie on other kinds of nodes than others."""
        return len(set(self.kinds)) > 1

    @property
    def basis(self) -> Basis:
        """The worst of what their times rest on."""
        return self._whole.basis

    def whole(self, layers: Sequence[int]) -> Durations:
        """What the stages take, by the slowest of their GPUs."""
        return self._whole.durations(layers)

    def of(self, layers: Sequence[int]) -> list[Durations]:
        """What each replica takes: its own GPUs' time to compute and to step, and of all else, which replicas do
        together or over links that they share, what the stage takes. Where a sharded optimizer hands out its results,
        every replica waits for the slowest step. Replicas that take the same share an object.
        """
        whole = self.whole(layers)
        every = self.stepping_alone(layers)
        if not self.unlike or not any(whole.weights):
            return every
        known = {id(one): replace(one, optimizer=_with_waits(one, whole)) for one in every}
        return [known[id(one)] for one in every]

    def stepping_alone(self, layers: Sequence[int]) -> list[Durations]:
        """The same without these waits."""
        whole = self.whole(layers)
        if not self.unlike:
            return [whole] * len(self.kinds)
        alone = {name: lines.durations(layers) for name, lines in self._alone.items()}
        known = {kinds: _own(whole, [alone[kind] for kind in kinds]) for kinds in set(self.kinds)}
        return [known[kinds] for kinds in self.kinds]

    def with_streams(self, layers: Sequence[int]) -> list[Durations]:
        """The same of replicas with so many streams as the plan says."""
        every, streams = self.of(layers), self._parallel.streams_of
        if not self._rates:
            return list(every)
        alike: dict[tuple[int, int, tuple[str, ...]], Durations] = {}
        for durations, count, kinds in zip(every, streams, self.kinds, strict=True):
            key = id(durations), count, kinds
            alike.setdefault(key, in_streams(durations, count, self._rates[kinds[0]]))
        keys = zip(map(id, every), streams, self.kinds, strict=True)
        return [alike[key] for key in keys]

    def pipelines(self, layers: Sequence[int], schedule: Mapping[str, Any] | None = None) -> list[Pipeline]:
        """What they do and take, each kind of replica once, that of the first one first; `schedule` replaces the named
        one."""
        parallel = self._parallel
        alike: dict[tuple[int, int], list[int]] = {}
        every, counts = self.with_streams(layers), parallel.micro_batches_of
        for replica, (durations, count) in enumerate(zip(every, counts, strict=True)):
            alike.setdefault((id(durations), count), []).append(replica)
        return [
            Pipeline(
                schedule=_actions(parallel.schedule, parallel.pipeline, parallel.chunks, count)
                if schedule is None
                else schedule,
                durations=every[some[0]],
                replicas=tuple(some),
                kinds=self.kinds[some[0]],
            )
            for (_, count), some in alike.items()
        ]


class _Lines:
    """What the stages of a plan take as functions of their layers."""

    def __init__(self, plan: PlacedTraining) -> None:
        names = [kind.name for kind in plan.kinds]
        nodes = Nodes(plan.kinds, np.array([[names.index(node.name) for node in plan.nodes]]))
        self._lines, self._handing = on_nodes(plan.training, nodes), handing_out(plan.training, nodes)
        self.basis = Basis(int(self._lines.basis[0]))

    def durations(self, layers: Sequence[int]) -> Durations:
        return Durations.of(self._lines, self._handing, layers)


def _all_of(plan: PlacedTraining, kind: str) -> PlacedTraining:
    """With all nodes of one kind."""
    one = next(node for node in plan.nodes if node.name == kind)
    alike = {node.name: replace(one, name=node.name, gpus=node.gpus) for node in plan.kinds}
    return replace(plan, nodes=[alike[node.name] for node in plan.nodes])


def in_streams(one: Durations, streams: int, rates: StreamRates) -> Durations:
    """Return the durations of a replica with so many streams on its GPU, each micro-batch its share of what they take
    together."""
    rate = rates.rate(streams)
    return replace(
        one,
        times=[
            replace(
                times,
                forward=[seconds / rate for seconds in times.forward],
                backward=[seconds / rate for seconds in times.backward],
            )
            for times in one.times
        ],
        optimizer=[step + (streams - 1) * rates.copy_s for step in one.optimizer],
    )


def _own(whole: Durations, own: Sequence[Durations]) -> Durations:
    """Return the durations of a replica whose GPU of each stage takes what that stage takes in `own`."""
    steps = [one.optimizer[stage] - one.weights[stage] for stage, one in enumerate(own)]
    return replace(
        whole,
        times=[
            replace(sends, forward=one.times[stage].forward, backward=one.times[stage].backward)
            for stage, (one, sends) in enumerate(zip(own, whole.times, strict=True))
        ],
        optimizer=[step + handing for step, handing in zip(steps, whole.weights, strict=True)],
    )


def _with_waits(own: Durations, whole: Durations) -> list[float]:
    """The steps of a replica, by stage, where those that hand out their results last as long as the slowest one's."""
    stages = zip(own.optimizer, whole.optimizer, whole.weights, strict=True)
    return [slowest if handing else step for step, slowest, handing in stages]


def _actions(name: str, stages: int, chunks: int, micro_batches: int) -> Mapping[str, Any]:
    return as_json(make_schedule(str(name), stages, chunks, micro_batches), chunks, micro_batches)
