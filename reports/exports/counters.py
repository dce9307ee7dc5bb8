"""What a trace counts over time, for each rank: micro-batches whose activations it holds, and messages on their way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from reports.facts.breakdown import BACKWARD, FORWARD
from reports.facts.waits import Integers
from reports.readers.events import Timeline


@dataclass(frozen=True, kw_only=True)
class Count:
    """A number of each rank, which is 0 before its first change."""

    name: str
    unit: str
    rank: Integers
    """(changes,) ascending."""
    at_ns: Integers
    """(changes,) on the timeline's clock, ascending for each rank, each time once."""
    value: Integers
    """(changes,) from then on."""


def counts(timeline: Timeline, pairs: Sequence[tuple[Integers, Integers]]) -> Iterator[Count]:
    """Those of a run.

    Args:
        pairs: receives and the sends that they take (`reports.facts.waits.message_pairs`).
    """
    events = timeline.events
    rank, start, end = (events[key].to_numpy(np.int64) for key in ("rank", "start_ns", "end_ns"))
    forward, backward = _held(events)
    yield _count("micro-batches", "held", rank[forward], start[forward], end[backward])
    receives, sends = (np.concatenate(side) for side in zip(*pairs, strict=True))
    sound = start[sends] <= end[receives]  # where clocks differ, a message may seem to come before it is sent
    receives, sends = receives[sound], sends[sound]
    yield _count("messages to this rank", "under way", rank[receives], start[sends], end[receives])


def _held(events: pd.DataFrame) -> tuple[Integers, Integers]:
    """The forward passes that have a backward pass, and the last part of each of these.

    The k-th forward pass of a micro-batch through a chunk of a rank belongs to its k-th backward pass.
    """
    keys = ["rank", "micro_batch", "chunk"]
    known = events[events["micro_batch"] >= 0]
    sides = []
    for names in (FORWARD, BACKWARD):
        some = known[known["name"].isin(list(names))]
        turn = some.groupby([*keys, some["name"].astype(str)], sort=False).cumcount()
        sides.append(some[keys].assign(turn=turn, event=some.index, end_ns=some["end_ns"]))
    forward, backward = sides
    last = backward.sort_values("end_ns", kind="stable").drop_duplicates([*keys, "turn"], keep="last")
    both = forward.merge(last, on=[*keys, "turn"])
    return both["event_x"].to_numpy(np.int64), both["event_y"].to_numpy(np.int64)


def _count(name: str, unit: str, rank: Integers, start: Integers, end: Integers) -> Count:
    """How many of these spans are open at a time."""
    changes = pd.DataFrame(
        {
            "rank": np.concatenate([rank, rank]),
            "at": np.concatenate([start, end]),
            "by": np.repeat([1, -1], len(rank)),
        }
    )
    sums = changes.groupby(["rank", "at"])["by"].sum()
    value = sums.groupby(level="rank").cumsum().to_numpy(np.int64)
    return Count(
        name=name,
        unit=unit,
        rank=sums.index.get_level_values("rank").to_numpy(np.int64),
        at_ns=sums.index.get_level_values("at").to_numpy(np.int64),
        value=value,
    )
