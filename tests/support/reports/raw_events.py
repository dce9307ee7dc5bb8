"""The files of a run's events read without the rooms' own reader, and what they say, by brute force over lists."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PASSES = ("forward-compute", "backward-compute", "backward-input-compute", "backward-weight-compute", "loss-compute")
WAYS = {"forward-recv": ("forward-send", -1), "backward-recv": ("backward-send", 1)}
"""Of a receive: the send that it takes, and how many virtual stages further that is."""
NORM = "grad-norm-all-reduce"
NO_EVENTS = ("clock", "core-wait", "core-wait-in-passes")
"""Records that are none (docs/formats.md)."""


@dataclass(frozen=True)
class Raw:
    """A record, in ns of its rank's clock: the ranks of these tests are on one host."""

    rank: int
    stage: int
    dp: int
    name: str
    iteration: int
    micro_batch: int
    chunk: int
    peer: int
    start: int
    end: int


def raw_events(run: Path, ranks: int) -> list[Raw]:
    """By rank, then start, then file order."""
    found = []
    for rank in range(ranks):
        content = (run / f"events/rank-{rank:05d}.bin").read_bytes()
        assert content[:8] == b"TDPPEVT1"
        (length,) = struct.unpack_from("<I", content, 8)
        head = json.loads(content[12 : 12 + length])
        own = [
            Raw(rank, head["stage"], head["dp"], head["names"][name], iteration, micro_batch, chunk, peer, start, end)
            for name, chunk, iteration, micro_batch, peer, start, end in struct.iter_unpack(
                "<HHIiiqq", content[12 + length :]
            )
        ]
        found += sorted((one for one in own if one.name not in NO_EVENTS), key=lambda one: one.start)
    return found


def sends(events: Sequence[Raw], stages: int) -> dict[Raw, Raw]:
    """By receive the send that it takes; found by micro-batch and virtual stage, not by order."""
    known = defaultdict(list)
    for one in events:
        if one.name.endswith("-send"):
            known[one.name, one.rank, one.peer, one.micro_batch, one.chunk * stages + one.stage].append(one)
    found = {}
    for one in events:
        if one.name in WAYS:
            name, step = WAYS[one.name]
            sender = one.chunk * stages + one.stage + step
            same = known[name, one.peer, one.rank, one.micro_batch, sender]
            found[one] = max((send for send in same if send.start <= one.end), key=lambda send: send.start)
    return found


def waited(events: Sequence[Raw], stages: int, streams: bool) -> dict[tuple[int, int], int]:
    """By rank and iteration, the ns for which it waited for other stages, or, without a flush, did nothing."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for receive, send in sends(events, stages).items():
        found[receive.rank, receive.iteration] += max(min(send.start, receive.end) - receive.start, 0)
    for name in ("embedding-grads-all-reduce", *([NORM] if stages > 1 else [])):
        groups = defaultdict(list)
        for one in events:
            if one.name == name:
                groups[one.iteration, one.dp].append(one)
        for group in groups.values():
            last = max(one.start for one in group)
            for one in group:
                found[one.rank, one.iteration] += max(min(last, one.end) - one.start, 0)
    if streams:
        for iteration in {one.iteration for one in events}:
            begun = min(one.start for one in events if one.iteration == iteration)
            for rank in {one.rank for one in events}:
                own = [one for one in events if one.rank == rank]
                before = [one.end for one in own if one.iteration < iteration]
                since = max([begun, *before])
                found[rank, iteration] += blank(
                    [one for one in own if one.iteration == iteration],
                    since,
                    max((one.end for one in own if one.iteration == iteration), default=since),
                )
    return found


def blank(events: Iterable[Raw], start: int, end: int) -> int:
    """The ns between two times in which none of a rank's events goes on."""
    nothing, reached = 0, start
    for one in sorted(events, key=lambda one: one.start):
        nothing += max(min(one.start, end) - reached, 0)
        reached = max(reached, min(one.end, end))
    return nothing + max(end - reached, 0)


def passes(events: Iterable[Raw], rank: int, iteration: int) -> int:
    """ns of forward and backward passes and losses."""
    return sum(
        one.end - one.start for one in events if (one.rank, one.iteration) == (rank, iteration) and one.name in PASSES
    )
