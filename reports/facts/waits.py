"""Which part of an event is waiting for another rank; the rest is work or transfer.

- A receive waits until the other rank begins to send. Of the messages that a rank sends to another in an iteration,
  forward or backward, the k-th is what the other receives k-th. Without a flush a message may be taken in a later
  iteration than it was sent in: there the number of its micro-batch tells.
- A collective waits until the last rank of its group begins: the k-th of a name in an iteration is the same on all.
- Without a flush each stage clips and updates alone; its clipping waits for no other stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron_ext.contract.plan_parts import Place
from reports.readers.events import Timeline

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
UNKNOWN = -1
"""In the place of a wait: the events do not say how long it was."""
_NEVER = np.iinfo(np.int64).min


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


def waiting_ns(timeline: Timeline, ranks: Sequence[Place], streams: bool = False) -> Integers:
    """(events,) the part of each event that is waiting for another rank, or UNKNOWN.

    Args:
        streams: whether nothing is flushed.
    """
    events = timeline.events
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    until = np.full(len(events), _NEVER)
    for receive, send in message_pairs(timeline, ranks):
        until[receive] = np.maximum(until[receive], start[send])
    meeting = meetings(timeline, ranks, streams)
    together = meeting >= 0
    begun = pd.Series(start[together]).groupby(meeting[together], sort=False).transform("max")
    until[together] = begun.to_numpy()
    return np.where(until > _NEVER, np.clip(until, start, end) - start, UNKNOWN)


def message_pairs(timeline: Timeline, ranks: Sequence[Place]) -> list[tuple[Integers, Integers]]:
    """The events that receive, and beside each the event that sends what it takes; forward, then backward."""
    found = []
    for way in ("forward", "backward"):
        sent, received = (_messages(timeline, verb, way, len(ranks)) for verb in ("send", "recv"))
        pairs = _joined(received, sent, ["channel", "turn"])
        one, other = pairs["micro_batch_x"], pairs["micro_batch_y"]
        if _named_singly(timeline) and ((one >= 0) & (other >= 0) & (one != other)).any():
            keys = ["ranks", "micro_batch"]
            for side in (sent, received):
                side["turn"] = side.groupby(keys, sort=False).cumcount()
            pairs = _joined(received, sent, [*keys, "turn"])
        found.append((pairs["index_x"].to_numpy(np.int64), pairs["index_y"].to_numpy(np.int64)))
    return found


def _joined(received: pd.DataFrame, sent: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    return received.reset_index().merge(sent.reset_index(), on=list(keys))


def _named_singly(timeline: Timeline) -> bool:
    """Whether each event that exchanges messages has but one, so that its micro-batch is that of the message."""
    every = [messages(name) for name in timeline.names]
    return all(len(one) <= 1 and sum(map(len, one.values())) <= 1 for one in every)


def meetings(timeline: Timeline, ranks: Sequence[Place], streams: bool = False) -> Integers:
    """(events,) which collective of a group each event is a rank's part in, numbered in any way; -1 for none.

    Args:
        streams: whether nothing is flushed.
    """
    events, found, count = timeline.events, np.full(len(timeline.events), -1), 0
    for name, alike in COLLECTIVES.items():
        if name in timeline.names and not (name == CLIP and (streams or NORM in timeline.names)):
            some = events[events["name"] == name]
            turn = some.groupby(["iteration", "rank"], sort=False).cumcount()
            group = _numbered(ranks, alike)[some["rank"]]
            number = some.groupby([some["iteration"], group, turn], sort=False).ngroup()
            found[some.index] = count + number
            count += int(number.max()) + 1
    return found


def _numbered(ranks: Sequence[Place], alike: Sequence[str]) -> Integers:
    """(ranks,) the group of each, numbered in any way: those that have the same of all `alike` are one."""
    keys = pd.MultiIndex.from_tuples([tuple(getattr(rank, key) for key in alike) for rank in ranks])
    return np.asarray(keys.factorize()[0])


def _messages(timeline: Timeline, verb: str, way: str, ranks: int) -> pd.DataFrame:
    """Of each event that sends or receives `way`, and whose other rank is known: its micro-batch, its two ranks, the
    channel from one to the other in its iteration, and how many messages of the channel come before."""
    names = [name for name in timeline.names if way in messages(name).get(verb, ())]
    events = timeline.events
    some = events[events["name"].isin(names) & events["peer"].between(0, ranks - 1)]
    sender, receiver = ("rank", "peer") if verb == "send" else ("peer", "rank")
    between = some[sender].astype(np.int64) * ranks + some[receiver]
    channel = some["iteration"] * ranks * ranks + between
    turn = channel.groupby(channel, sort=False).cumcount()
    return pd.DataFrame({"channel": channel, "turn": turn, "ranks": between, "micro_batch": some["micro_batch"]})
