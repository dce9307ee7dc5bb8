"""Which part of an event is waiting for another rank; the rest is work or transfer (static/waits.js tells the same).

- A receive waits until the other rank begins to send. Messages carry no label: of those that a rank sends to another in
  an iteration, forward or backward, the k-th is what the other receives k-th.
- A collective waits until the last rank of its group begins: the k-th of a name in an iteration is the same on all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reports.readers.events import Timeline
from reports.readers.record import Rank

Integers = NDArray[np.int64]

NORM, CLIP = "grad-norm-all-reduce", "optimizer-clip-main-grad"
"""Where all stages wait for each other: files that do not have the first, have it inside the second."""
EMBEDDING = "embedding-grads-all-reduce"
_REPLICAS = ("stage", "tp")
_TENSOR_GROUP = ("stage", "dp")
COLLECTIVES = {
    "grads-all-reduce": _REPLICAS,
    "overlapped-grads-all-reduce": _REPLICAS,
    "grads-reduce-scatter": _REPLICAS,
    "params-all-gather": _REPLICAS,
    "layernorm-grads-all-reduce": _TENSOR_GROUP,
    "tensor-all-reduce": _TENSOR_GROUP,
    "tensor-all-gather": _TENSOR_GROUP,
    "tensor-reduce-scatter": _TENSOR_GROUP,
    EMBEDDING: ("dp", "tp"),
    NORM: ("dp",),
    CLIP: ("dp",),
}
"""What the ranks of a group have in common."""
_UNKNOWN = np.iinfo(np.int64).min


def messages(name: str) -> dict[str, tuple[str, ...]]:
    """What an event of this name sends ("send") and receives ("recv"): "forward", "backward" or both; Megatron-LM does
    several at once, such as `forward-send-backward-recv`. Empty for any other event.
    """
    found: dict[str, tuple[str, ...]] = {}
    ways: tuple[str, ...] = ()
    for word in name.split("-"):
        if word in ("forward", "backward"):
            ways += (word,)
        elif word in ("send", "recv") and ways:
            found[word], ways = ways, ()
        else:
            return {}
    return {} if ways else found


def waiting_ns(timeline: Timeline, ranks: Sequence[Rank]) -> Integers:
    """(events,) the part of each event that is waiting for another rank; 0 where that cannot be told."""
    events = timeline.columns
    until = np.full(len(events), _UNKNOWN)
    for way in ("forward", "backward"):
        _until_sent(timeline, until, way, len(ranks))
    for name, alike in COLLECTIVES.items():
        if name in timeline.names and not (name == CLIP and NORM in timeline.names):
            _until_all_begun(timeline, until, name, _numbered(ranks, alike))
    waits = np.zeros(len(events), np.int64)
    known = until > _UNKNOWN
    waits[known] = np.clip(until[known] - events["start_ns"][known], 0, (events["end_ns"] - events["start_ns"])[known])
    return waits


def _numbered(ranks: Sequence[Rank], alike: Sequence[str]) -> Integers:
    """(ranks,) the group of each, numbered in any way: those that have the same of all `alike` are one."""
    keys = np.array([[getattr(rank, key) for key in alike] for rank in ranks])
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1]).reshape(-1)


def _until_all_begun(timeline: Timeline, until: Integers, name: str, group: Integers) -> None:
    chosen = np.flatnonzero(timeline.columns["name"] == timeline.names.index(name))
    events = timeline.columns.at(chosen)
    turn = _turns(events["iteration"] * len(group) + events["rank"])
    key = (events["iteration"] * (group.max() + 1) + group[events["rank"]]) * (turn.max(initial=0) + 1) + turn
    _, member = np.unique(key, return_inverse=True)
    last = np.full(len(key), _UNKNOWN)
    np.maximum.at(last, member, events["start_ns"])
    until[chosen] = last[member]


def _until_sent(timeline: Timeline, until: Integers, way: str, ranks: int) -> None:
    """Of events that receive `way`, and perhaps the other way too: then both must have been sent."""
    sends, receives = (_with_peer(timeline, verb, way, ranks) for verb in ("send", "recv"))
    if not len(sends) or not len(receives):
        return
    sent, received = timeline.columns.at(sends), timeline.columns.at(receives)
    channels = [
        (events["iteration"] * ranks + events[sender]) * ranks + events[receiver]
        for events, sender, receiver in ((sent, "rank", "peer"), (received, "peer", "rank"))
    ]
    turns = [_turns(channel) for channel in channels]
    most = max(int(turn.max()) for turn in turns) + 1
    keys, wanted = (channel * most + turn for channel, turn in zip(channels, turns, strict=True))
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    match = keys[order][place] == wanted
    until[receives[match]] = np.maximum(until[receives[match]], sent["start_ns"][order[place[match]]])


def _with_peer(timeline: Timeline, verb: str, way: str, ranks: int) -> Integers:
    """Indices of the events that send or receive `way`, and whose other rank is known."""
    names = [index for index, name in enumerate(timeline.names) if way in messages(name).get(verb, ())]
    peer = timeline.columns["peer"]
    return np.flatnonzero(np.isin(timeline.columns["name"], names) & (peer >= 0) & (peer < ranks))


def _turns(keys: Integers) -> Integers:
    """(events,) how many of the same key come before each."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    new = np.ones(len(keys), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    begin = np.flatnonzero(new)
    turns = np.empty(len(keys), np.int64)
    turns[order] = np.arange(len(keys)) - np.repeat(begin, np.diff(np.append(begin, len(keys))))
    return turns
