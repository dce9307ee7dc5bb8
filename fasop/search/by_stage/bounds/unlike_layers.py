"""Which layers the stages of one layout may have in a partition that takes less than some seconds, where layers differ:
the chains of `fasop.search.by_stage.bounds.whole_layers` but for those that turn before the last stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fasop.costs.arrays import Floats
from fasop.partition.possible_stages import StepChains
from fasop.search.by_stage.bounds.chains import left, until_returned
from fasop.search.by_stage.bounds.layout_batch import UnlikeReplicas
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages, RankColumns
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import Schedule


def chains_of_layout(
    stages: HeterogeneousStages, layers: int, schedule: Schedule, layout: Layout, counts: Sequence[Sequence[int]]
) -> StepChains:
    """Work out what all steps of each stage take; `counts` are the micro-batches of each replica by stage."""
    columns, cuts, last = _columns_of_steps(stages, layers, layout.stages), layers + 1, layout.stages - 1
    share, total = schedule.definition.input_share, sum(counts[0])
    unlike = UnlikeReplicas.of(layout, counts, [*map(id, columns[0])])
    taken = [[columns[stage % 2][rank] for rank in some] for stage, some in enumerate(unlike.ranks.tolist())]
    heads, count = [some[0] for some in taken], unlike.counts[..., np.newaxis]

    def table(seconds: Floats) -> Floats:
        return seconds.reshape(len(seconds), cuts, cuts)

    forward, backward = (
        np.array([[getattr(rank, way)[0] for rank in some] for some in taken]) for way in ("forward", "backward")
    )
    update = table(np.array([[rank.optimizer for rank in some] for some in taken]).min(axis=1))
    gradients = table(np.array([one.gradients for one in heads]))
    tied = max(heads[0].embedding, heads[last].embedding) if last else 0.0
    number = np.arange(layout.stages)[:, np.newaxis, np.newaxis]
    way_back = np.where(number == 0, 1.0, share) * backward
    together, apart = (forward + way_back).min(axis=1), forward.min(axis=1) + way_back.min(axis=1)
    ahead, busy, back, busy_back = _messages(heads, cuts)
    until = until_returned(schedule, unlike.lag[:, np.newaxis, np.newaxis], count, first=number == 0)
    after = [part[..., np.newaxis] for part in left(schedule, unlike, total)]
    passes_left = after[1] * backward
    if not (schedule is Schedule.gpipe and not layout.even):  # there they precede the way back
        passes_left = passes_left + after[0] * forward
    most = np.array([max(some) for some in counts])[:, np.newaxis]
    queue = np.maximum((most - 1) * busy, (np.append(most[1:], most[-1:], axis=0) - 1) * busy_back)
    begin = update[0] + gradients[0] + tied
    begin[1:] = np.inf  # the first stage has the first layers
    return StepChains(
        begin=begin,
        update=update,
        there=table(forward.min(axis=1)) + ahead[:, np.newaxis],
        trip=table(together if layout.even else apart) + (ahead + back)[:, np.newaxis],
        last=table((count * forward + until * backward).max(axis=1)),
        turned=np.maximum(table(passes_left.max(axis=1)), queue[:, np.newaxis]),
        summed=table((count * (forward + backward)).max(axis=1))
        + gradients
        + np.where((number == 0) | (number == last), tied, 0.0),
    )


def _columns_of_steps(stages: HeterogeneousStages, layers: int, number: int) -> list[list[RankColumns]]:
    """What ranks take with the layers from each cut to each other one, [steps]: those of stages with even numbers, and
    those of the others, between which cuts then lie the other way round."""
    cut = np.arange(layers + 1)
    begin, end = np.repeat(cut, layers + 1), np.tile(cut, layers + 1)
    behind = [np.where(np.arange(number)[:, np.newaxis] % 2 == odd, end, begin) for odd in (0, 1)]
    return [stages.columns(np.diff(some, axis=0, prepend=0)) for some in behind]


def _messages(heads: Sequence[RankColumns], cuts: int) -> tuple[Floats, Floats, Floats, Floats]:
    """[stages, layers + 1] each, of the cut behind a stage: a message ahead, for how long it occupies its link, and the
    same of one back, which the next stage sends. Nothing leaves the last stage."""
    ahead, busy = (
        np.array([getattr(one, f"{what}_forward").reshape(cuts, cuts)[0] for one in heads]) for what in ("send", "busy")
    )
    back, busy_back = (
        np.array([getattr(one, f"{what}_backward").reshape(cuts, cuts)[:, 0] for one in [*heads[1:], heads[-1]]])
        for what in ("send", "busy")
    )
    for seconds in (ahead, busy, back, busy_back):
        seconds[-1] = 0.0
    return ahead, busy, back, busy_back
