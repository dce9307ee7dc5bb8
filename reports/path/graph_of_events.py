"""Makes the graphs of iterations from the events of their ranks.

- What a rank does itself lasts from the point before it to the point after it; what lies between its events does, too.
- A message lasts from when the other rank begins to send it until the receive ends. Where a receive begins after its
  message must have come, as others of its kind show, the message did not keep it waiting, and it has a length of its
  own.
- A collective lasts from when the last rank of its group begins until it ends on each rank. One that goes on beside the
  backward pass ends before the rank has taken all sums.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from megatron_ext.contract.plan_parts import Place
from reports.errors import ReportError
from reports.facts.breakdown import (
    ALL_REDUCE,
    BACKWARD,
    EMBEDDING,
    FORWARD,
    LOSS,
    NORM,
    TENSOR,
    Integers,
    meetings,
    message_pairs,
    messages,
)
from reports.path.graph import HUB, Edge, EdgeKind, Graph
from reports.readers.events import Timeline

GAP = -1
"""In the place of an event: nothing was recorded."""


class Span(NamedTuple):
    """An event of a rank; times in ns."""

    start: int
    end: int
    event: int
    """Its number."""


class Piece(NamedTuple):
    """A part of an event that no other event lies inside of; times in ns."""

    start: int
    end: int
    event: int
    """The number of the event, or GAP."""


def pieces(begin: int, spans: Sequence[Span]) -> list[Piece]:
    """Cuts the events of a rank into pieces that follow each other without a gap, from `begin` to the latest end.

    What lies inside an event takes its time from it; one that goes on when another begins, and ends before that, ends
    there. An event without any length is a piece without any length.
    `spans` come by start; of those that start together, the longest first.
    """
    found: list[Piece] = []
    around: list[Span] = []
    now = begin

    def go(until: int, event: int) -> None:
        nonlocal now
        if until > now:
            found.append(Piece(now, until, event))
            now = until

    def close(until: int) -> None:
        span = around.pop()
        if span.start == span.end:
            found.append(Piece(now, now, span.event))
        go(min(span.end, until), span.event)

    for span in spans:
        while around and (around[-1].end <= span.start or around[-1].end < span.end):
            close(span.start)
        go(span.start, around[-1].event if around else GAP)
        around.append(span)
    while around:
        close(around[-1].end)
    return found


NEAR = 4
"""Iterations that a message may be under way, without a flush."""
BESIDE, GRADIENTS = "overlapped-grads-all-reduce", "grads-all-reduce"
KINDS = {
    **dict.fromkeys((*FORWARD, *BACKWARD, LOSS), EdgeKind.COMPUTE),
    **dict.fromkeys(TENSOR, EdgeKind.TENSOR),
    **dict.fromkeys((*ALL_REDUCE, BESIDE), EdgeKind.GRADIENTS),
    EMBEDDING: EdgeKind.EMBEDDING,
    NORM: EdgeKind.NORM,
    "params-all-gather": EdgeKind.WEIGHTS,
    "batch-generator": EdgeKind.DATA,
}


WAITED = 0.25
"""A receive that lasts longer than this part of what its message took waited for it."""
Way = tuple[str, int, int]
"""The name of a message's receive, its sender, its receiver."""


@cache
def kind_of(name: str) -> EdgeKind:
    """Returns what the time of an event of this name goes into."""
    if messages(name):
        return EdgeKind.MESSAGE
    return KINDS.get(name, EdgeKind.OPTIMIZER if name.startswith("optimizer") else EdgeKind.HOST)


class Sent(NamedTuple):
    """What a receive takes."""

    at_ns: int
    """When the other rank began to send it."""
    event: int
    """The number of the send; of one in an earlier iteration, that of its like in this one."""
    back: int
    """How many iterations ago it was sent."""


def make_graphs(
    timeline: Timeline,
    ranks: Sequence[Place],
    iterations: Sequence[int],
    streams: bool = False,
    islands: Sequence[int] = (),
) -> list[Graph]:
    """The graphs of iterations that have events.

    A rank begins when it was done with the iteration before, but not before the first event of any rank in this one:
    what all ranks do in between, such as an evaluation, is not a part of it.

    Args:
        streams: whether nothing is flushed, so that an iteration may take messages of earlier ones.
        islands: replicas of each island, where there are islands.

    Raises:
        ReportError: events contradict each other, as where two messages were taken before either was sent; or too
            little is there of the iterations before.
    """
    every = timeline.events
    part = _part(timeline, every[every["iteration"].isin(iterations)])
    meeting = meetings(part, ranks, streams, islands)
    taken = [] if streams else message_pairs(part, ranks)
    label = part.events["iteration"].to_numpy()
    graphs = []
    for iteration in iterations:
        here = np.flatnonzero(label == iteration)
        if streams:
            near = every[(every["iteration"] - iteration).between(-NEAR, NEAR)]
            sent = _of_earlier(near, message_pairs(_part(timeline, near), ranks, streams), iteration)
        else:
            sent = _within(part.events, taken, here)
        events = part.events.iloc[here].reset_index(drop=True)
        before = every[every["iteration"] == every["iteration"][every["iteration"] < iteration].max()]
        ended = before.groupby("rank")["end_ns"].max().to_dict()
        maker = _Maker(events, ended, sent, meeting[here].tolist())
        numbers = every.index[every["iteration"] == iteration].tolist()
        edges = [edge._replace(event=numbers[edge.event]) if edge.event >= 0 else edge for edge in maker.edges]
        inside, outside = _core_waits(timeline, iteration)
        graphs.append(
            Graph(
                iteration=iteration,
                rank=maker.rank,
                first=maker.first,
                last=maker.last,
                ready_ns=maker.ready,
                ended_ns=maker.ended,
                in_passes_ns=inside,
                outside_ns=outside,
                edges=_in_order(edges, len(maker.rank), iteration),
            )
        )
    return graphs


def _within(events: pd.DataFrame, pairs: Sequence[tuple[Integers, Integers]], here: Integers) -> dict[int, Sent]:
    """Returns by number of a receive within an iteration what it takes, in the same one; `here` are its events, and
    `pairs` those of this and others."""
    number = np.full(len(events), -1)
    number[here] = np.arange(len(here))
    start = events["start_ns"].to_numpy()
    found = {}
    for receives, sends in pairs:
        own = number[receives] >= 0
        receive, send = receives[own], sends[own]
        columns = (number[receive].tolist(), start[send].tolist(), number[send].tolist())
        found.update({one: Sent(at, event, 0) for one, at, event in zip(*columns, strict=True)})
    return found


def _core_waits(timeline: Timeline, iteration: int) -> tuple[dict[int, int], dict[int, int]]:
    """Returns by rank how long it waited for a core, ns: in its passes, and outside of them."""
    waits = timeline.core_waits
    chosen = waits[waits["iteration"] == iteration]
    ranks, inside = chosen["rank"].tolist(), chosen["in_passes_ns"].tolist()
    outside = (chosen["ns"] - chosen["in_passes_ns"]).clip(lower=0).tolist()
    return dict(zip(ranks, inside, strict=True)), dict(zip(ranks, outside, strict=True))


def _part(timeline: Timeline, events: pd.DataFrame) -> Timeline:
    """A timeline of these events alone, numbered from 0."""
    events = events.reset_index(drop=True)
    events["name"] = events["name"].cat.remove_unused_categories()
    return replace(timeline, events=events)


def _of_earlier(near: pd.DataFrame, pairs: Sequence[tuple[Integers, Integers]], iteration: int) -> dict[int, Sent]:
    """Returns by number of a receive in an iteration what it takes; numbers are those within the iteration.

    Where a channel's first receives take what was sent before, as many of its last sends are taken later. Each of them
    is the like, one iteration later, of one of the former.
    `near` are the events of this and neighbouring iterations.
    """
    here = near["iteration"].to_numpy() == iteration
    number = np.where(here, np.cumsum(here) - 1, -1).tolist()
    label, start = near["iteration"].tolist(), near["start_ns"].tolist()
    rank, peer = near["rank"].tolist(), near["peer"].tolist()
    found = {}
    for receives, sends in pairs:
        received: dict[tuple[int, int], list[tuple[int, int]]] = {}
        sent: dict[tuple[int, int], list[int]] = {}
        for receive, send in sorted(zip(receives.tolist(), sends.tolist(), strict=True)):
            if label[receive] == iteration:
                received.setdefault((peer[receive], rank[receive]), []).append((receive, send))
            if label[send] == iteration:
                sent.setdefault((rank[send], peer[send]), []).append(send)
        for channel, own in received.items():
            likes = sent.get(channel, [])
            if len(likes) != len(own):
                raise ReportError(f"in iteration {iteration} the received messages do not match the sent ones")
            late = sum(label[send] < iteration for _, send in own)
            for turn, (receive, send) in enumerate(own):
                back, like = divmod(turn - late, len(likes))
                found[number[receive]] = Sent(start[send], number[likes[like]], -back)
    return found


class _Maker:
    """Collects points and edges, rank by rank."""

    def __init__(
        self, events: pd.DataFrame, before: Mapping[int, int], sent: Mapping[int, Sent], met: Sequence[int]
    ) -> None:
        self.rank: list[int] = []
        self.edges: list[Edge] = []
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self._names = events["name"].astype(str).tolist()
        self._start, self._end = events["start_ns"].tolist(), events["end_ns"].tolist()
        self._owner, self._peer = events["rank"].tolist(), events["peer"].tolist()
        self._sent = sent
        self._usual = self._usual_transfers()
        self._meeting = met
        self._together: dict[int, int] = {}
        """When the last rank came to each meeting."""
        for start, meeting in zip(self._start, self._meeting, strict=True):
            self._together[meeting] = max(self._together.get(meeting, start), start)
        self._begins: dict[int, int] = {}
        """The point at which each event begins."""
        self._hubs: dict[int, int] = {}
        """The point of each meeting."""
        self._receives: list[tuple[int, int, int]] = []
        """Events, and the points between which they lie."""
        origin = min(self._start)
        for rank, rows in events.groupby("rank"):
            self._follow(int(rank), rows.index.tolist(), max(origin, int(before.get(rank, origin))))
        for event, begin, end in self._receives:
            self._receive(event, begin, end)

    def _usual_transfers(self) -> dict[Way, float]:
        """What messages take, by name of the receive and by ranks: the median of those that were waited for.

        Where there are none it is what messages take the other way, or else between any ranks, but no more than the
        quickest of its own can have taken.
        """
        sure: dict[Way, list[int]] = {}
        most: dict[Way, int] = {}
        for receive, sent in self._sent.items():
            way, start, end = self._way(receive), self._start[receive], self._end[receive]
            lasted = max(end - sent.at_ns, 0)
            most[way] = min(most.get(way, lasted), lasted)
            if start <= sent.at_ns or end - start > WAITED * lasted:
                sure.setdefault(way, []).append(lasted)
        known = {way: float(np.median(lasted)) for way, lasted in sure.items()}
        between = {(sender, receiver): lasts for (_, sender, receiver), lasts in known.items()}
        longest = max(known.values(), default=np.inf)
        return {way: known.get(way, min(least, between.get((way[2], way[1]), longest))) for way, least in most.items()}

    def _way(self, receive: int) -> Way:
        return self._names[receive], self._peer[receive], self._owner[receive]

    def _follow(self, rank: int, rows: Sequence[int], begin: int) -> None:
        """A rank from the beginning of the iteration to its end."""
        beside = {row for row in rows if self._names[row] == BESIDE}
        spans = [Span(self._start[row], self._start[row] if row in beside else self._end[row], row) for row in rows]
        spans.sort(key=lambda span: (span.start, -span.end))
        begin = min(begin, spans[0].start)
        done = pieces(begin, spans)
        parts = Counter(piece.event for piece in done)
        here = self._point(rank)
        self.first[rank], self.ready[rank], self.ended[rank] = here, begin, done[-1].end
        for piece in done:
            before, here = here, self._point(rank)
            self._begins.setdefault(piece.event, before)
            self._piece(rank, piece, before, here, parts[piece.event] == 1, beside)
        self.last[rank] = here

    def _piece(self, rank: int, piece: Piece, before: int, here: int, whole: bool, beside: set[int]) -> None:
        event, lasts = piece.event, piece.end - piece.start
        name = "" if event == GAP else self._names[event]
        kind = kind_of(name)
        if event in beside:
            self._meet(event, before)
            self._edge(before, here, 0, kind, rank, event)
        elif name == GRADIENTS and beside and whole:
            # Where weights are updated bucket by bucket, each of several such events takes what is done by its end.
            taken = [one for one in beside if self._end[one] <= piece.end]
            own = piece.end - max([piece.start, *(self._end[one] for one in taken)])
            self._edge(before, here, own, kind, rank, event, stood=own)
            for one in taken:
                took = self._end[one] - self._together[self._meeting[one]]
                stood = self._end[one] - max(piece.start, self._together[self._meeting[one]])
                self._edge(self._hub(one), here, took, kind, rank, one, stood=stood)
        elif whole and event in self._sent and "recv" in messages(name):
            self._receives.append((event, before, here))
            self._edge(before, here, 0, kind, rank, event)
        elif whole and event != GAP and self._meeting[event] >= 0:
            self._meet(event, before)
            took = piece.end - self._together[self._meeting[event]]
            self._edge(self._hub(event), here, took, kind, rank, event, stood=took)
        else:
            self._edge(before, here, lasts, kind, rank, event, stood=lasts)

    def _receive(self, event: int, before: int, point: int) -> None:
        """A message; a receive that it did not keep waiting takes a time of its own."""
        sent, usual = self._sent[event], self._usual[self._way(event)]
        start, end = self._start[event], self._end[event]
        rank, sender = self._owner[event], self._peer[event]
        lasts = end - sent.at_ns
        if start >= sent.at_ns + usual and end - start <= usual:
            lasts = min(lasts, int(usual))
            self._edge(before, point, end - start, EdgeKind.MESSAGE, rank, event, sender, end - start)
            stood = 0
        else:
            stood = end - max(start, sent.at_ns)
        if sent.event in self._begins:
            self._edge(self._begins[sent.event], point, lasts, EdgeKind.MESSAGE, rank, event, sender, stood, sent.back)

    def _point(self, rank: int) -> int:
        self.rank.append(rank)
        return len(self.rank) - 1

    def _hub(self, event: int) -> int:
        meeting = self._meeting[event]
        if meeting not in self._hubs:
            self._hubs[meeting] = self._point(HUB)
        return self._hubs[meeting]

    def _meet(self, event: int, begins: int) -> None:
        self._edge(begins, self._hub(event), 0, kind_of(self._names[event]), HUB, event)

    def _edge(
        self,
        source: int,
        target: int,
        lasts: int,
        kind: EdgeKind,
        rank: int,
        event: int,
        sender: int = -1,
        stood: int = 0,
        back: int = 0,
    ) -> None:
        self.edges.append(Edge(source, target, max(lasts, 0), kind, rank, sender, event, max(stood, 0), back))


def _in_order(edges: Sequence[Edge], points: int, iteration: int) -> list[Edge]:
    """The edges to a point before those from it; first those from earlier iterations."""
    leave: list[list[Edge]] = [[] for _ in range(points)]
    missing = [0] * points
    if any(edge.back < 0 for edge in edges):
        raise ReportError(f"iteration {iteration} receives messages of a later one")
    for edge in (edge for edge in edges if not edge.back):
        leave[edge.source].append(edge)
        missing[edge.target] += 1
    ready = deque(point for point in range(points) if not missing[point])
    found = [edge for edge in edges if edge.back]
    while ready:
        for edge in leave[ready.popleft()]:
            found.append(edge)
            missing[edge.target] -= 1
            if not missing[edge.target]:
                ready.append(edge.target)
    if len(found) < len(edges):
        raise ReportError(
            f"the events of iteration {iteration} contradict each other: ranks wait for each other in a cycle"
        )
    return found
