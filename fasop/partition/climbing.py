"""Pipelines as tables for the compiled loops that move their layers (`fasop.partition.local_search.improved`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fasop.compiled import climbs, replicas
from fasop.costs.arrays import Floats, Integers, rolled
from fasop.partition.chains import own_and_way
from fasop.simulation.pipelines import FULL, Pipelines
from fasop.simulation.vectorised import SHARES_OF_PASSES, actions_of, links_of


def climb_of(pipelines: Pipelines) -> climbs.Climb | None:
    """What moves layers of so many pipelines; None where numpy does: where layers differ, where stages wait for what
    they send, and where there was no compiler or an earlier version was built."""
    if not hasattr(climbs, "Climb") or pipelines.order is not None or pipelines.blocking:
        return None
    members = [*_members(pipelines)]
    owner, *places = np.concatenate([one for _, one in members], axis=1)
    order = np.argsort(owner, kind="stable")
    shares = pipelines.shares
    return climbs.Climb(
        [_replica(lines) for lines, _ in members],
        np.searchsorted(owner[order], np.arange(len(pipelines) + 1)),
        np.stack(places, axis=1)[order],
        pipelines.capacity,
        np.empty((0, pipelines.parts_count, len(pipelines))) if shares is None else shares,
        FULL,
    )


def _members(pipelines: Pipelines) -> Iterator[tuple[Pipelines, Integers]]:
    """Yield pipelines whose replicas are alike, and [3, members]: the number of the pipeline that each belongs to, that
    of these pipelines, and that of the member among them. No two are of the same pipeline."""
    of = np.concatenate([one.of for one in pipelines.replicas]) if pipelines.replicas else np.zeros(0, np.int64)
    alone = np.setdiff1d(np.arange(len(pipelines)), of)
    yield pipelines, np.stack([alone, np.zeros_like(alone), alone])
    number = 1
    for one in pipelines.replicas:
        turn = np.arange(len(one.of)) - np.searchsorted(one.of, one.of)
        for each in range(int(turn.max()) + 1):
            own = np.nonzero(turn == each)[0]
            yield one.lines, np.stack([one.of[own], np.full_like(own, number), own])
            number += 1


def _replica(lines: Pipelines) -> replicas.Replica:
    stages, chunks = lines.stages, lines.parts_count // lines.stages
    one_way_out = np.full(stages, stages == 2) if lines.one_way_out is None else lines.one_way_out
    return replicas.Replica(
        *actions_of(lines.schedule, stages, chunks, lines.micro_batches),
        chunks,
        links_of(one_way_out, chunks),
        one_way_out.view(np.uint8),
        SHARES_OF_PASSES,
        _table(lines),
    )


def _table(lines: Pipelines) -> Floats:
    """[pipelines, rows]: what `replicas.Replica` reads: five rows of all parts, 20 of all stages, and three more."""
    hop, busy = lines.hop, lines.occupied
    hop_back, busy_back = (hop, busy) if lines.back is None else lines.back.messages(None)
    nothing, none = np.zeros_like(hop), np.zeros(len(lines))
    again = lines.backward.again
    hidden = [nothing] * 3 + [nothing - np.inf] + [nothing] * 3 if lines.hidden is None else lines.hidden.rows
    own, way = own_and_way(lines)
    parts = [lines.forward.fixed, lines.forward.layer, lines.backward.fixed, lines.backward.layer]
    parts.append(np.zeros_like(lines.backward.fixed) if again is None else again.layer)
    of_stages = [
        hop,
        rolled(hop_back, 1, 0),
        busy,
        rolled(busy_back, 1, 0),
        lines.optimizer.fixed,
        lines.optimizer.layer,
    ]
    of_stages += [lines.sums.fixed, lines.sums.layer, *hidden]
    of_stages += [own.fixed, own.layer, way.fixed, way.layer, 2 * lines.mean_hop]
    ending = lines.optimizer.fixed[0] + lines.least_exposed[0] + lines.embedding
    scalars = [lines.embedding, ending, none if again is None else again.most]
    return np.ascontiguousarray(np.concatenate([*parts, *of_stages, np.stack(scalars)]).T)
