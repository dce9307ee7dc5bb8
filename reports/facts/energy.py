"""What energy a run has taken, from the readings of its GPUs' power."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.run_folder.gpu_energy import GpuEnergy
from megatron_ext.contract.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The GPUs' energy; processors, memory and cooling come in addition."""

    kwh: float
    hours: float
    """How long the GPU of a rank was read that was read for the longest time."""
    gpus: int
    by_stage: Mapping[int, float]
    """kWh by stage, of the GPUs that are a rank's."""
    watts: float
    """The mean of all GPUs together, without those of nodes that an elastic run has lost."""
    counter: float | None
    """What the GPUs' own counters say of the time between readings, divided by what the readings of their power make of
    it; None where no driver counts."""

    def kwh_per_million_tokens(self, tokens_per_s: float) -> float:
        """Returns what a million tokens take at the speed of the run."""
        return self.watts / tokens_per_s / 3.6


def energy_of(readings: Mapping[str, Sequence[GpuEnergy]], plan: Plan) -> Energy | None:
    """Returns what the readings show; None where no GPU told its power.

    Args:
        readings: `GpuReport.energy`.
    """
    once = _once(readings)
    places: dict[tuple[str, int], list[GpuEnergy]] = {}
    for node, gpu in once:
        places.setdefault((node, gpu.place), []).append(gpu)
    hours = {place: total for place, own in places.items() if (total := sum(gpu.hours for gpu in own)) > 0}
    if not hours:
        return None
    kwh = {place: sum(gpu.kwh for gpu in places[place]) for place in hours}
    ranks = {node.name: node.ranks for node in plan.nodes}
    by_stage: dict[int, float] = {}
    for (node, place), taken in kwh.items():
        own = ranks.get(node, [])
        if place < len(own):
            stage = plan.ranks[own[place]].stage
            by_stage[stage] = by_stage.get(stage, 0.0) + taken
    beside = sum(gpu.beside_kwh for _, gpu in once)
    there = [place for place in hours if place[0] in ranks] or [*hours]  # those of lost nodes draw nothing now
    return Energy(
        kwh=sum(kwh.values()),
        hours=max(hours.values()),
        gpus=len({gpu.uuid for _, gpu in once}),
        by_stage=dict(sorted(by_stage.items())),
        watts=sum(kwh[place] / hours[place] for place in there) * 1000,
        counter=sum(gpu.counted_kwh for _, gpu in once) / beside if beside else None,
    )


def _once(readings: Mapping[str, Sequence[GpuEnergy]]) -> list[tuple[str, GpuEnergy]]:
    """Leaves out a GPU that another node read at the same time, for fewer hours."""
    kept: dict[str, list[tuple[str, GpuEnergy]]] = {}
    every = ((node, gpu) for node, gpus in readings.items() for gpu in gpus)
    for node, gpu in sorted(every, key=lambda one: -one[1].hours):
        own = kept.setdefault(gpu.uuid, [])
        if not any(
            other != node and gpu.begin_unix < known.end_unix and known.begin_unix < gpu.end_unix
            for other, known in own
        ):
            own.append((node, gpu))
    return [one for own in kept.values() for one in own]
