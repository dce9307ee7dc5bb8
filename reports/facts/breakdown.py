"""Where every rank's time of an iteration goes. Every page, and docs/reports.md, has these parts and no others:

- *forward*, *backward*: the passes, and with the forward passes the loss, without the communication inside them.
  Together they are the *compute* time. Where a schedule splits the backward pass, both halves count.
- *bubble*: waiting for other stages. A receive waits until the other rank begins to send, an all-reduce over stages
  (of the embedding's gradients, of the gradient's norm) until the last stage begins. Without a flush, also time without
  any event of the rank (reports/facts/statistics.py).
- *exposed communication*: what computation stands still for, once nobody has to be waited for any more. *tensor*: in
  the tensor group, inside the passes. *messages*: between stages. *all-reduce*: of gradients and of their norm, and
  handing out the weights of a sharded optimizer. What is summed beside the backward pass is not exposed.
- *imbalance*: waiting in a collective for a slower rank of the same stage.
- *optimizer*: clipping and the update, without the communication and the waiting inside.
- *other*: the rest, such as data, and Python between the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron_ext.contract.plan_parts import Place
from reports.readers.events import Timeline

NORM, CLIP = "grad-norm-all-reduce", "optimizer-clip-main-grad"
"""Where all stages wait for each other: files that do not have the first, have it inside the second."""
EMBEDDING = "embedding-grads-all-reduce"
ISLANDS_MEET = "islands-all-reduce"
_REPLICAS = ("stage", "tp")
_TENSOR_GROUP = ("stage", "dp")
COLLECTIVES = {
    "grads-all-reduce": _REPLICAS,
    "overlapped-grads-all-reduce": _REPLICAS,
    "grads-reduce-scatter": _REPLICAS,
    "params-all-gather": _REPLICAS,
    ISLANDS_MEET: _REPLICAS,
    "layernorm-grads-all-reduce": _TENSOR_GROUP,
    "tensor-all-reduce": _TENSOR_GROUP,
    "tensor-all-gather": _TENSOR_GROUP,
    "tensor-reduce-scatter": _TENSOR_GROUP,
    EMBEDDING: ("dp", "tp"),
    NORM: ("dp",),
    CLIP: ("dp",),
}
"""What the ranks of a group have in common."""
WITHIN_ISLANDS = ("grads-all-reduce", "overlapped-grads-all-reduce")
"""What the replicas of an island do by themselves."""
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


def waiting_ns(
    timeline: Timeline, ranks: Sequence[Place], streams: bool = False, islands: Sequence[int] = ()
) -> Integers:
    """(events,) the part of each event that is waiting for another rank, or UNKNOWN. `streams`: whether nothing is
    flushed. `islands`: replicas of each island, where there are islands."""
    events = timeline.events
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    until = np.full(len(events), _NEVER)
    for receive, send in message_pairs(timeline, ranks, streams):
        until[receive] = np.maximum(until[receive], start[send])
    meeting = meetings(timeline, ranks, streams, islands)
    together = meeting >= 0
    begun = pd.Series(start[together]).groupby(meeting[together], sort=False).transform("max")
    until[together] = begun.to_numpy()
    return np.where(until > _NEVER, np.clip(until, start, end) - start, UNKNOWN)


def message_pairs(timeline: Timeline, ranks: Sequence[Place], streams: bool = False) -> list[tuple[Integers, Integers]]:
    """The events that receive, and beside each the event that sends what it takes; forward, then backward. `streams`:
    whether nothing is flushed, so that a message may be taken in a later iteration."""
    found = []
    for way in ("forward", "backward"):
        sent, received = (_messages(timeline, verb, way, len(ranks)) for verb in ("send", "recv"))
        pairs = _joined(received, sent, ["channel", "turn"])
        one, other = pairs["micro_batch_x"], pairs["micro_batch_y"]
        if _named_singly(timeline) and ((one >= 0) & (other >= 0) & (one != other)).any():
            keys = ["ranks" if streams else "channel", "micro_batch"]
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


def island_of(ranks: Sequence[Place], islands: Sequence[int]) -> Integers:
    """(ranks,) the number of each rank's island, by the replicas of each island; 0 without islands."""
    first_of_next = np.cumsum(islands)[:-1]
    return np.searchsorted(first_of_next, [rank.dp for rank in ranks], side="right")


def meetings(
    timeline: Timeline, ranks: Sequence[Place], streams: bool = False, islands: Sequence[int] = ()
) -> Integers:
    """(events,) which collective of a group each event is a rank's part in, numbered in any way; -1 for none.
    `streams`: whether nothing is flushed. `islands`: replicas of each island, where there are islands."""
    events, found, count = timeline.events, np.full(len(timeline.events), -1), 0
    island = island_of(ranks, islands)
    for name, alike in COLLECTIVES.items():
        if name in timeline.names and not (name == CLIP and (streams or NORM in timeline.names)):
            some = events[events["name"] == name]
            unlike = name == ISLANDS_MEET and _differ(ranks, island)
            turn = some.groupby(["iteration", "rank"], sort=False).cumcount(ascending=not unlike)
            group = _numbered(ranks, () if unlike else alike)[some["rank"]]
            own = island[some["rank"]] if name in WITHIN_ISLANDS else np.zeros(len(some), np.int64)
            number = some.groupby([some["iteration"], group, own, turn], sort=False).ngroup()
            found[some.index] = count + number
            count += int(number.max()) + 1
    return found


def _differ(ranks: Sequence[Place], island: Integers) -> bool:
    """Whether islands have plans of their own: all their ranks then take a common step together, before which those of
    the last stages sum the loss."""
    places: dict[int, set[tuple[int, int]]] = {}
    for rank, number in zip(ranks, island.tolist(), strict=True):
        places.setdefault(number, set()).add((rank.stage, rank.tp))
    return any(own != places[0] for own in places.values())


def _numbered(ranks: Sequence[Place], alike: Sequence[str]) -> Integers:
    """(ranks,) the group of each, numbered in any way: those that have the same of all `alike` are one."""
    numbers: dict[tuple[int, ...], int] = {}
    return np.array([numbers.setdefault(tuple(getattr(rank, key) for key in alike), len(numbers)) for rank in ranks])


def _messages(timeline: Timeline, verb: str, way: str, ranks: int) -> pd.DataFrame:
    """Returns of each event that sends or receives `way`, whose other rank is known, its micro-batch, its ranks, the
    channel from one to the other in its iteration, and how many messages of the channel come before."""
    names = [name for name in timeline.names if way in messages(name).get(verb, ())]
    events = timeline.events
    some = events[events["name"].isin(names) & events["peer"].between(0, ranks - 1)]
    sender, receiver = ("rank", "peer") if verb == "send" else ("peer", "rank")
    between = some[sender].astype(np.int64) * ranks + some[receiver]
    channel = some["iteration"] * ranks * ranks + between
    turn = channel.groupby(channel, sort=False).cumcount()
    return pd.DataFrame({"channel": channel, "turn": turn, "ranks": between, "micro_batch": some["micro_batch"]})


LOSS = "loss-compute"
FORWARD = ("forward-compute",)
BACKWARD = ("backward-compute", "backward-input-compute", "backward-weight-compute")
TENSOR = ("tensor-all-reduce", "tensor-all-gather", "tensor-reduce-scatter")
ALL_REDUCE = (
    "grads-all-reduce",
    "grads-reduce-scatter",
    "layernorm-grads-all-reduce",
    EMBEDDING,
    NORM,
    "params-all-gather",
    ISLANDS_MEET,
)
OPTIMIZER = "optimizer"

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


PARTS = ("forward", "backward", "bubble", "tensor", "messages", "all_reduce", "imbalance", "optimizer")
"""Those that events tell; `other` is the rest of the iteration."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """(ranks, iterations) ms of each of PARTS, and of the passes whole, with the communication and waiting inside."""

    passes: Floats
    forward: Floats
    backward: Floats
    bubble: Floats
    tensor: Floats
    messages: Floats
    all_reduce: Floats
    imbalance: Floats
    optimizer: Floats

    @property
    def compute(self) -> Floats:
        return self.forward + self.backward

    @property
    def communication(self) -> Floats:
        """Exposed."""
        return self.tensor + self.messages + self.all_reduce


def spent(timeline: Timeline, ranks: Sequence[Place], waits: Integers, cell: Integers, shape: tuple[int, int]) -> Spent:
    """Sums up the events of each rank and iteration.

    Args:
        waits: (events,) ns of each that are waiting.
        cell: (events,) rank and iteration of each, as an index into a flat array of `shape`.
    """
    events = timeline.events
    lasted = (events["end_ns"] - events["start_ns"]).to_numpy()

    def named(wanted: Iterable[str]) -> NDArray[np.bool_]:
        return np.asarray(events["name"].isin(list(wanted)))

    passes, loss, tensor = named((*FORWARD, *BACKWARD)), named([LOSS]), named(TENSOR)
    steps, reduces = named([OPTIMIZER]), named(ALL_REDUCE)
    exchanges = named(name for name in timeline.names if messages(name))
    # Files without the norm's all-reduce have its wait in the clipping around it.
    clips = named([CLIP]) if NORM not in timeline.names else np.zeros(len(events), bool)
    loss_apart = loss & (holder(events, loss, passes) < 0)  # Megatron-LM computes it inside the forward pass
    of_tensor = holder(events, tensor, passes | loss_apart)
    of_steps = holder(events, reduces | clips, steps)
    backward, forward = named(BACKWARD), named(FORWARD) | loss_apart
    over_stages = (exchanges | named([EMBEDDING])) | ((named([NORM]) | clips) & any(rank.stage for rank in ranks))
    in_backward = tensor & backward[of_tensor] & (of_tensor >= 0)
    in_forward = tensor & forward[of_tensor] & (of_tensor >= 0)
    in_steps = of_steps >= 0
    within = exchanges | tensor | reduces | clips

    def sums(*signed: tuple[int, NDArray[np.bool_], Integers]) -> Floats:
        total = np.zeros(shape[0] * shape[1])
        for sign, chosen, amounts in signed:
            total += sign * np.bincount(cell[chosen], weights=amounts[chosen], minlength=len(total))
        return np.asarray((total / 1e6).reshape(shape))

    return Spent(
        passes=sums((1, forward | backward, lasted)),
        forward=sums((1, forward, lasted), (-1, in_forward, lasted)),
        backward=sums((1, backward, lasted), (-1, in_backward, lasted)),
        bubble=sums((1, within & over_stages, waits)),
        tensor=sums((1, tensor, lasted - waits)),
        messages=sums((1, exchanges, lasted - waits)),
        all_reduce=sums((1, reduces, lasted - waits)),
        imbalance=sums((1, within & ~over_stages, waits)),
        optimizer=sums((1, steps, lasted), (-1, reduces & in_steps, lasted), (-1, clips & in_steps, waits)),
    )


def holder(events: pd.DataFrame, inner: NDArray[np.bool_], outer: NDArray[np.bool_]) -> Integers:
    """(events,) of each of the `inner` events the index of that one of the `outer` in which it lies, else -1.

    Those of the `outer` of a rank do not overlap.
    """
    found = np.full(len(events), -1)
    if not inner.any() or not outer.any():
        return found
    chosen = np.flatnonzero(inner | outer)
    some = events.iloc[chosen]
    order = chosen[np.lexsort((~outer[chosen], -some["end_ns"], some["start_ns"], some["rank"]))]
    holding = pd.Series(np.where(outer[order], order, np.nan))
    around = holding.groupby(events["rank"].to_numpy()[order]).ffill().fillna(-1).to_numpy(np.int64)
    end = events["end_ns"].to_numpy()
    fits = inner[order] & (around >= 0) & (end[around] >= end[order])
    found[order[fits]] = around[fits]
    return found
