"""What somebody should hear of a run that goes on: it became slow, its samples come late, a GPU is slowed down or has
errors, or its loss jumped. A run in which nothing happens raises none of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from conf.run_folder.gpu_lines import WAYS_OUT, GpuEntry, GpuReading, GpuTrouble
from conf.visible import plural
from launch.observe.iterations import Iteration, SampleWait

HOUR_S = 3600.0
SLOWER = 1.04
"""Times as long as in the first hour, from which the last hour was slow: noise is less, and 5 % are more."""
LATER = 0.04
"""The part of an iteration by which a rank waits longer for its samples, from which somebody should hear of it."""
CACHED_S = 300.0
"""Seconds at the beginning in which files come into the nodes' memory, and samples later than usual."""
CHANCE = 4.0
"""Standard errors by which the medians of two hours may differ by chance."""
LINES = 20
"""Fewer lines of the log do not tell the time of an hour."""
WARM_UP = 10
"""Lines at the beginning that do not count."""
HOT_S = 900.0
HOT = 0.2
"""The part of the readings of a GPU in so many seconds from which it counts as slowed down."""
SPIKE = 10.0
"""A loss that is so many usual deviations above those before it has jumped."""
FARTHER, LONGER, RARE = 3.0, 500, 2
"""So many times as far above as so many lines before, but for the highest of them: losses of some data now and then lie
far above, and one that jumped must not hide those that jump after it."""
SPIKE_PART = 0.05
"""The least part of the loss that a jump has."""
BEFORE = 50
"""So many lines say what is usual for the loss."""
NEWEST = 2000
"""In so many lines a jump is looked for: older ones were looked at before."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    kind: str
    """A run tells one of each kind."""
    text: str


def alarms(
    first: Sequence[Iteration],
    last: Sequence[Iteration],
    gpus: Mapping[str, Sequence[GpuEntry]],
    waits: Mapping[str, Sequence[SampleWait]] = MappingProxyType({}),
) -> list[Alarm]:
    """Returns what there is to tell.

    Args:
        first: lines from the beginning of the log on, at least an hour of them.
        last: the newest lines, at least of an hour.
        gpus: the newest readings of each node's GPUs.
        waits: how long each rank, named as people know it, waited for its samples, at least in the first and the last
            hour.
    """
    hot = next(_throttled(gpus), None)
    faults = [Alarm(kind="gpu-fault", text=text) for text in _faults(gpus)][:1]
    data = _data(waits, last)
    causes = [alarm.text for alarm in (*faults, hot, data) if alarm is not None]
    slow = _slow(first, last, causes[0] if causes else None)
    return [alarm for alarm in (*faults, hot, data, slow, _spike(last)) if alarm is not None]


def _data(waits: Mapping[str, Sequence[SampleWait]], last: Sequence[Iteration]) -> Alarm | None:
    """The rank whose samples come later than before by most."""
    worst, most = None, 0.0
    for rank, lines in waits.items():
        begun = [line for line in lines if line.unix > lines[0].unix + CACHED_S]
        if not begun or begun[-1].unix - begun[0].unix < 2 * HOUR_S:
            continue
        before = [line.wait_ms for line in begun if line.unix <= begun[0].unix + HOUR_S]
        since = [line.wait_ms for line in begun if line.unix > begun[-1].unix - HOUR_S]
        times = [line.elapsed_ms for line in last if line.unix > last[-1].unix - HOUR_S]
        if min(len(before), len(since)) < LINES or not times:
            continue
        usual, now, whole = median(before), median(since), median(times)
        more = now - usual
        if more > max(most, LATER * whole, CHANCE * math.hypot(_error(before), _error(since))):
            most = more
            text = (
                f"{rank} waited {now:,.4g} ms an iteration for its samples in the last hour, and {usual:,.4g} ms in "
                f"the first one ({now / whole:.0%} of an iteration): look at the disk or network that its data come "
                "from, and at what else uses them"
            )
            worst = Alarm(kind="late-data", text=text)
    return worst


def _slow(first: Sequence[Iteration], last: Sequence[Iteration], cause: str | None) -> Alarm | None:
    begun = first[WARM_UP:]
    if not begun or not last or last[-1].unix - begun[0].unix < 2 * HOUR_S:
        return None
    before = [line.elapsed_ms for line in begun if line.unix <= begun[0].unix + HOUR_S]
    since = [line.elapsed_ms for line in last if line.unix > last[-1].unix - HOUR_S]
    if min(len(before), len(since)) < LINES:
        return None
    usual, now = median(before), median(since)
    chance = CHANCE * math.hypot(_error(before), _error(since))
    if now < SLOWER * usual or now - usual < chance:
        return None
    why = f"; {cause}" if cause else "; 'tdpp report' compares its ranks, and 'tdpp nodes' its hosts with others"
    return Alarm(
        kind="slower",
        text=f"an iteration took {now:,.4g} ms in the last hour, and {usual:,.4g} ms in the first one "
        f"({now / usual - 1:+.0%}), up to iteration {last[-1].iteration}{why}",
    )


def _error(values: Sequence[float]) -> float:
    """The standard error of a median, by the usual deviation of the values."""
    usual = median(values)
    return 1.2533 * 1.4826 * median(abs(one - usual) for one in values) / math.sqrt(len(values))


def _spike(last: Sequence[Iteration]) -> Alarm | None:
    known = [(line.iteration, line.loss) for line in last[-NEWEST:] if line.loss is not None]
    above: list[float] = []
    for at in range(BEFORE, len(known)):
        iteration, loss = known[at]
        before = [one for _, one in known[at - BEFORE : at]]
        usual = median(before)
        deviation = 1.4826 * median(abs(one - usual) for one in before)
        highest = sorted(above[-LONGER:])[:-RARE][-1:]
        least = max(SPIKE * deviation, SPIKE_PART * abs(usual), *(FARTHER * one for one in highest))
        above.append(loss - usual)
        if len(above) > BEFORE and above[-1] > least:
            text = f"the loss jumped to {loss:.4g} at iteration {iteration}, from {usual:.4g} in the lines before"
            return Alarm(kind="loss-spike", text=text)
    return None


def _throttled(gpus: Mapping[str, Sequence[GpuEntry]]) -> Iterator[Alarm]:
    for node, entries in gpus.items():
        readings = [entry for entry in entries if isinstance(entry, GpuReading)]
        readings = [one for one in readings if one.unix > readings[-1].unix - HOT_S]
        if not readings or readings[-1].unix - readings[0].unix < HOT_S / 2:
            continue
        slowed = Counter((gpu.index, gpu.throttled[0]) for reading in readings for gpu in reading.gpus if gpu.throttled)
        for (index, reason), times in slowed.most_common(1):
            if times >= HOT * len(readings):
                yield Alarm(
                    kind="throttled",
                    text=f"GPU {index} of {node} is slowed down by {reason} in {times / len(readings):.0%} of "
                    f"{plural(len(readings), 'reading')}: {WAYS_OUT[reason]}",
                )


def _faults(gpus: Mapping[str, Sequence[GpuEntry]]) -> Iterator[str]:
    for node, entries in gpus.items():
        for entry in entries:
            if isinstance(entry, GpuTrouble):
                yield f"{node}: {entry.text}"
            else:
                yield from (f"GPU {gpu.index} of {node}: {gpu.fault}" for gpu in entry.gpus if gpu.fault is not None)
