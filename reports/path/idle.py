"""Why ranks are idle in an iteration: each cause is what it adds, in a replay, to the idle time without it.

The causes are let in one after another, in the order of `IDLE`:

- *pipeline order*: passes and updates alone, equally long on all stages, and nothing else takes time. It is what the
  schedule itself costs.
- *slow neighbour*: passes and updates last as long as they did, so that a rank waits for one that is slower.
- *message*: messages take time.
- *collective*: so do all-reduces and the other collectives.
- *data*: so does loading data.
- *host*: so does what lies between the events.

A rank cannot lose by a cause what it gains again by another one: idle time that a later cause takes away was none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from megatron_ext.contract.plan import Plan
from reports.path.graph import COLLECTIVES, Graph, Integers, Kind

BUSY = (Kind.COMPUTE, Kind.OPTIMIZER)
LET_IN: Sequence[Sequence[Kind]] = ((), (), (Kind.MESSAGE,), COLLECTIVES, (Kind.DATA,), (Kind.HOST,))
IDLE = ("pipeline order", "slow neighbour", "message", "collective", "data", "host")


def idle_frame(graph: Graph, plan: Plan) -> pd.DataFrame:
    """A row for each rank that has events, in ms: `compute`, `optimizer` and the causes of IDLE, which together are an
    iteration; `under_way`, for how long its messages and collectives were, and `hidden`, for how much of that it went
    on; beside them its `stage` and `node`."""
    ranks = sorted(graph.last)
    busy = {kind: graph.by_rank(np.where(graph.kind == kind, graph.lasts_ns, 0))[ranks] for kind in BUSY}
    lasts = np.where(np.isin(graph.kind, BUSY), graph.lasts_ns, 0)
    equal = _equal(graph)
    together = busy[Kind.COMPUTE] + busy[Kind.OPTIMIZER]
    idle = [graph.period_ns(equal) - graph.by_rank(equal)[ranks]]
    for kinds in LET_IN[1:]:
        lasts = np.where(np.isin(graph.kind, kinds), graph.lasts_ns, lasts)
        idle.append(graph.period_ns(lasts) - together)
    grown = np.maximum(np.minimum.accumulate(np.array(idle)[::-1], axis=0)[::-1], 0)
    causes = np.diff(grown, axis=0, prepend=0)
    places = {place.rank: place for place in plan.ranks}
    under_way, hidden = _overlap(graph, ranks)
    frame = {
        "rank": ranks,
        "stage": [places[rank].stage for rank in ranks],
        "node": [plan.node_of(rank) for rank in ranks],
        "compute": busy[Kind.COMPUTE] / 1e6,
        "optimizer": busy[Kind.OPTIMIZER] / 1e6,
        **{cause: added / 1e6 for cause, added in zip(IDLE, causes, strict=True)},
        "under_way": under_way / 1e6,
        "hidden": hidden / 1e6,
    }
    return pd.DataFrame(frame).set_index("rank")


def _equal(graph: Graph) -> Integers:
    """The lengths of passes and updates, were those of each rank as long together as of the mean of all."""
    lasts = np.zeros(len(graph.lasts_ns), np.int64)
    for kind in BUSY:
        sums = graph.by_rank(np.where(graph.kind == kind, graph.lasts_ns, 0))
        mean = float(sums[sorted(graph.last)].mean())
        lasts = np.where(graph.kind == kind, graph.scaled(kind, mean / np.maximum(sums, 1)), lasts)
    return lasts


def _overlap(graph: Graph, ranks: Sequence[int]) -> tuple[Integers, Integers]:
    """By rank, how long its messages and collectives took, and for how much of that it went on, in ns."""
    apart = {rank: [0, 0] for rank in ranks}
    for edge in graph.edges:
        if edge.rank in apart and ((edge.kind == Kind.MESSAGE and edge.sender >= 0) or edge.kind in COLLECTIVES):
            apart[edge.rank][0] += edge.lasts_ns
            apart[edge.rank][1] += max(edge.lasts_ns - edge.stood_ns, 0)
    both = np.array([apart[rank] for rank in ranks], np.int64)
    return both[:, 0], both[:, 1]
