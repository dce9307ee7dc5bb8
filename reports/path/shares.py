"""Replicas that take unequally long: what other shares of the micro-batches would bring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from fasop.errors import SearchError
from fasop.simulation.ranks.replay import StageTimes, simulate
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.schedules import as_json, schedule
from reports.facts.breakdown import BACKWARD, FORWARD, LOSS
from reports.facts.dashed import dashed
from reports.path.change import Cause, Gain
from reports.path.graph import Graph
from reports.path.slow_ranks import computing
from reports.readers.events import Timeline

MS = 1e6
MOST_CHARACTERS = 40
"""Of shares that are spelled out."""


def other_shares(timeline: Timeline, graphs: Sequence[Graph], recorded: Sequence[Graph], plan: Plan) -> Iterator[Gain]:
    """Shares in proportion to how fast the replicas are; what they take is simulated, from mean times of passes.

    Args:
        recorded: the same graphs with the waits for CPU cores.
    """
    counts = list(plan.micro_batches)
    alone = plan.schedule_file or plan.stream or plan.streams or plan.adapt or not plan.layout.even
    if alone or len(counts) < 2 or not all(counts):
        return
    events = timeline.events
    own = [events[events["iteration"] == graph.iteration] for graph in graphs]
    times = [
        [_times(one, plan, dp, computing(graph), computing(was)) for dp in range(len(counts))]
        for one, graph, was in zip(own, graphs, recorded, strict=True)
    ]
    try:
        each = [_lengths(plan, one, counts) for one in times]
        paces = [[max(sum(stage.forward) + sum(stage.backward) for stage in dp) for dp in one] for one in times]
        shares = _shares(np.median(paces, axis=0).tolist(), sum(counts), plan.pipeline if plan.chunks > 1 else 1)
        if shares == counts:
            return
        after = [_lengths(plan, one, shares) for one in times]
    except SearchError:
        return
    lengths = np.median(each, axis=0)
    gained = [max(was) - max(then) for was, then in zip(each, after, strict=True)]
    slow, quick = int(np.argmax(lengths)), int(np.argmin(lengths))
    yield Gain(
        cause=Cause.SHARES,
        change=f"shares of the replicas {_spelled(shares)}, as simulated",
        because=(
            f"Replica {slow} takes {lengths[slow] / MS:,.0f} ms for its {counts[slow]} micro-batches, replica {quick} "
            f"{lengths[quick] / MS:,.0f} ms for {counts[quick]}."
        ),
        before_ns=round(float(np.median([graph.now_ns for graph in recorded]))),
        shares=[ns / graph.now_ns for ns, graph in zip(gained, recorded, strict=True)],
        beyond=[ns / graph.now_ns for ns, graph in zip(gained, graphs, strict=True)],
        keys={"parallel.shares": dashed(shares)},
    )


def _lengths(plan: Plan, times: Sequence[Sequence[StageTimes]], counts: Sequence[int]) -> list[float]:
    """What each replica takes, ns."""
    return [_length(plan, one, count) for one, count in zip(times, counts, strict=True)]


def _spelled(shares: Sequence[int]) -> str:
    """As for `parallel.shares`, or from where to where they go."""
    text = dashed(shares)
    if len(text) <= MOST_CHARACTERS:
        return text
    least, most = min(shares), max(shares)
    return f"from {least} (replica {shares.index(least)}) to {most} micro-batches (replica {shares.index(most)})"


def _times(
    events: pd.DataFrame, plan: Plan, dp: int, worked: Mapping[int, int], took: Mapping[int, int]
) -> list[StageTimes]:
    """What the stages of a replica take for a micro-batch, ns, without waits for a CPU core; messages are free.

    Args:
        worked, took: by rank, what it computes without and with these waits.
    """
    found = []
    for stage in range(plan.pipeline):
        ranks = [place.rank for place in plan.ranks if (place.stage, place.dp) == (stage, dp)]
        own = events[events["rank"].isin(ranks)]
        lasted = (own["end_ns"] - own["start_ns"]) / len(ranks) / max(len(plan.taken_by(stage, dp)), 1)
        lasted = lasted * sum(worked.get(rank, 0) for rank in ranks) / max(sum(took.get(rank, 0) for rank in ranks), 1)
        forward, backward = (
            [
                float(lasted[own["name"].isin(list(names)) & (own["chunk"] == chunk)].sum())
                for chunk in range(plan.chunks)
            ]
            for names in ((*FORWARD, LOSS), BACKWARD)
        )
        found.append(StageTimes(forward=forward, backward=backward, send_forward=0.0, send_backward=0.0))
    return found


def _length(plan: Plan, times: Sequence[StageTimes], micro_batches: int) -> float:
    """Of a replica's pipeline, ns."""
    lists = schedule(plan.schedule, plan.pipeline, plan.chunks, micro_batches)
    return max(event.end for event in simulate(as_json(lists, plan.chunks, micro_batches), times))


def _shares(paces: Sequence[float], total: int, step: int) -> list[int]:
    """Of replicas whose longest stage takes so long for a micro-batch: `step` more go to whoever has done them first,
    again and again; each gets some."""
    shares = [step] * len(paces)
    for _ in range(total // step - len(paces)):
        quick = min(range(len(paces)), key=lambda dp: (shares[dp] + step) * paces[dp])
        shares[quick] += step
    return shares
