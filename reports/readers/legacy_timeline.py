"""From the calls in a Megatron-LM log to the events of a run: which iteration, micro-batch and peer each belongs to.

The log tells only when each call of a timer began and ended on a rank. What it belongs to follows from the order:

- An iteration of a rank ends with its `optimizer`, which is called once in each, also where the gradients overflowed
  and the steps inside it were not; only `params-all-gather` comes after it.
- The k-th `forward-compute` of an iteration is micro-batch k, and the k-th `backward-compute`. What is inside a pass
  has its micro-batch; what receives, that of the pass after it; what sends, that of the pass before it. The call that
  does both has that of what it receives, for which it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.readers.events import EVENT, REACH_NS, Timeline, frame, legend_order
from reports.readers.legacy_log import Blocks, Calls

SPANS = ("forward-backward",)
"""Timers that only span others; they are no events."""
AFTER_OPTIMIZER = ("params-all-gather",)
INTERLEAVED = (
    "forward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)
"""Only the interleaved schedule calls these."""

LATEST_S = (1 << 62) / 1e9
"""Later times, from the year 2116 on, do not fit an event."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a timer's calls have to do with the passes and the neighbours."""

    part: str
    """The pass that has its micro-batch."""
    before: bool = False
    """Whether it comes before that pass."""
    peer: int = 0
    """The other rank's stage less the own one."""


ROLES = {
    "forward-compute": Role(part="forward-compute"),
    "batch-generator": Role(part="forward-compute"),
    "post-process": Role(part="forward-compute"),
    "loss-compute": Role(part="forward-compute"),
    "forward-recv": Role(part="forward-compute", before=True, peer=-1),
    "backward-send-forward-recv": Role(part="forward-compute", before=True, peer=-1),
    "forward-send": Role(part="forward-compute", peer=1),
    "backward-compute": Role(part="backward-compute"),
    "backward-recv": Role(part="backward-compute", before=True, peer=1),
    "forward-send-backward-recv": Role(part="backward-compute", before=True, peer=1),
    "backward-send": Role(part="backward-compute", peer=-1),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the ranks are: rank = (stage * data + dp) * tensor + tp."""

    tensor: int
    data: int
    pipeline: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.pipeline


def timeline(blocks: Blocks, layout: Layout) -> Timeline:
    """The events of a log whose ranks lie so; times in ns since 1970, by the clock of each rank's node."""
    notes = list(blocks.notes)
    starts, ends = np.frombuffer(blocks.starts), np.frombuffer(blocks.ends)
    known = [call for call in blocks.calls if call.rank < layout.ranks]
    if strangers := sorted({call.rank for call in blocks.calls if call.rank >= layout.ranks}):
        notes.append(
            f"calls of rank {', '.join(map(str, strangers[:5]))}, but there are only {layout.ranks} ranks; left out"
        )
    calls = _possible(_latest(known, notes), starts, ends, notes)
    placed = list(_placed(calls, starts, ends, notes))
    names = legend_order({call.name for call, _ in placed})
    events = _table(placed, starts, ends, names)
    if any(name in names for name in INTERLEAVED):
        notes.append("interleaved schedule: the log does not say which call has which micro-batch")
    else:
        _number(events, names)
    _peers(events, names, layout)
    return Timeline(events=frame(events, names), hosts={}, uncertainty_ns=None, notes=tuple(notes))


def _latest(calls: Sequence[Calls], notes: list[str]) -> list[Calls]:
    """Without the blocks whose iterations were run again, from a checkpoint, and logged again."""
    kept: set[int] = set()
    soonest = 1 << 62
    for block, iteration in sorted({(call.block, call.iteration) for call in calls}, reverse=True):
        if iteration < soonest:
            kept.add(block)
            soonest = iteration
    if again := sorted({call.iteration for call in calls if call.block not in kept}):
        notes.append(f"iterations up to {', '.join(map(str, again))} were logged again; the last log counts")
    return [call for call in calls if call.block in kept]


def _possible(
    calls: Sequence[Calls], starts: NDArray[np.float64], ends: NDArray[np.float64], notes: list[str]
) -> list[Calls]:
    """The lists that are events and whose times can be; of others it is noted."""
    listed = [call for call in calls if call.count and call.name not in SPANS]
    middle = float(np.median([starts[call.at] for call in listed])) if listed else 0.0
    reach = REACH_NS / 1e9
    possible = []
    for call in listed:
        start, end = starts[call.at : call.at + call.count], ends[call.at : call.at + call.count]
        # Comparisons with NaN are false.
        near = abs(start[0] - middle) < reach and abs(end[-1] - middle) < reach and start[0] > 0 and end[-1] < LATEST_S
        if near and (end >= start).all() and (start[1:] >= end[:-1]).all():
            possible.append(call)
        else:
            notes.append(f"{_which(call)}: the calls overlap in time; left out")
    return possible


def _which(call: Calls) -> str:
    return f"rank {call.rank}, {call.name} up to iteration {call.iteration} (line {call.line})"


def _placed(
    calls: Sequence[Calls], starts: NDArray[np.float64], ends: NDArray[np.float64], notes: list[str]
) -> Iterator[tuple[Calls, NDArray[np.int64]]]:
    """Each list with the iterations of its calls; of those that cannot be placed it is noted."""
    lengths = _lengths(calls, notes)
    ended = {
        (call.iteration, call.rank): ends[call.at : call.at + call.count]
        for call in calls
        if call.name == "optimizer" and call.count == lengths.get(call.iteration)
    }
    for call in calls:
        length = lengths.get(call.iteration)
        if length is None:
            continue
        over = ended.get((call.iteration, call.rank))
        if over is not None:
            before = np.searchsorted(over, starts[call.at : call.at + call.count], side="right")
            index = np.clip(before - (call.name in AFTER_OPTIMIZER), 0, length - 1)
        elif call.count % length == 0:
            index = np.arange(call.count) // (call.count // length)
        else:
            notes.append(f"{_which(call)}: {call.count} calls cannot be divided among {length} iterations; left out")
            continue
        yield call, call.iteration - length + 1 + index


def _lengths(calls: Sequence[Calls], notes: list[str]) -> dict[int, int]:
    """How many iterations each block covers: as many as there are calls of `optimizer` on most ranks."""
    blocks = sorted({call.iteration for call in calls})
    counts: dict[int, Counter[int]] = {block: Counter() for block in blocks}
    for call in calls:
        if call.name == "optimizer":
            counts[call.iteration][call.count] += 1
    lengths = {}
    for before, block in zip([None, *blocks], blocks, strict=False):
        if counts[block]:
            lengths[block] = counts[block].most_common(1)[0][0]
        elif before is not None:
            lengths[block] = block - before
        else:
            notes.append(f"up to iteration {block}: no optimizer calls show how many iterations there are; left out")
    return lengths


def _table(
    placed: Sequence[tuple[Calls, NDArray[np.int64]]],
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    names: Sequence[str],
) -> NDArray[Any]:
    """EVENT, sorted by rank, then start, what holds another before it; without micro-batches and peers."""
    if not placed:
        return np.zeros(0, EVENT)
    counts = [call.count for call, _ in placed]
    where = np.concatenate([np.arange(call.at, call.at + call.count) for call, _ in placed])
    number = {name: index for index, name in enumerate(names)}
    events = np.zeros(len(where), EVENT)
    events["rank"] = np.repeat([call.rank for call, _ in placed], counts)
    events["name"] = np.repeat([number[call.name] for call, _ in placed], counts)
    events["iteration"] = np.concatenate([iterations for _, iterations in placed])
    events["micro_batch"] = events["peer"] = -1
    base = int(starts[where].min())  # what is left is small enough to be exact to the nanosecond
    for key, times in (("start_ns", starts), ("end_ns", ends)):
        events[key] = base * 10**9 + np.rint((times[where] - base) * 1e9).astype(np.int64)
    return events[np.lexsort((-events["end_ns"], events["start_ns"], events["rank"]))]


def _number(events: NDArray[Any], names: Sequence[str]) -> None:
    """Sets the micro-batches."""
    for part in ("forward-compute", "backward-compute"):
        if part not in names:
            continue
        is_pass = events["name"] == names.index(part)
        passes = events[is_pass]
        new = np.ones(len(passes), bool)
        new[1:] = (np.diff(passes["rank"]) != 0) | (np.diff(passes["iteration"]) != 0)
        position = np.arange(len(passes))
        number = position - position[new][np.cumsum(new) - 1]
        before = np.cumsum(is_pass)
        for name, role in ROLES.items():
            if role.part != part or name not in names:
                continue
            mine = events["name"] == names.index(name)
            index = before[mine] - (0 if role.before else 1)
            there = np.clip(index, 0, len(passes) - 1)
            fits = (
                (index == there)
                & (passes["rank"][there] == events["rank"][mine])
                & (passes["iteration"][there] == events["iteration"][mine])
            )
            events["micro_batch"][mine] = np.where(fits, number[there], -1)


def _peers(events: NDArray[Any], names: Sequence[str], layout: Layout) -> None:
    """Sets the other rank of each call that sends or receives."""
    apart = layout.tensor * layout.data
    for name, role in ROLES.items():
        if role.peer and name in names:
            mine = events["name"] == names.index(name)
            peers = events["rank"][mine] + role.peer * apart
            events["peer"][mine] = np.where((peers >= 0) & (peers < layout.ranks), peers, -1)
