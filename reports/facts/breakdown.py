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
from reports.facts.waits import CLIP, EMBEDDING, NORM, messages
from reports.readers.events import Timeline

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
    over_stages = (exchanges | named([EMBEDDING])) | ((named([NORM]) | clips) & (_stages(ranks) > 1))
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


def _stages(ranks: Sequence[Place]) -> int:
    return max((rank.stage for rank in ranks), default=0) + 1


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
