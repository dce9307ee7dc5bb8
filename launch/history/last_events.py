"""What the last events of a rank say: how long it computes for a micro-batch, and its messages to other ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import RunFolderError
from conf.run_folder.run_files import opened, parse_json
from megatron_ext.contract import events

if TYPE_CHECKING:
    from numpy.typing import NDArray

TAIL_BYTES = 1 << 22
"""So much of a rank's events is read, from the end: some 130,000."""
MESSAGES = 1024
"""So many of a rank's last sends and receives of a kind are compared with those of other ranks."""
FEW = 3
"""Messages of each way that found their receiver waiting, from which a link's time is known."""
_PASSES = ("forward-compute", "backward-compute", "backward-input-compute", "backward-weight-compute")
_FIRST_PASS = _PASSES[0]
_MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")


@dataclass(frozen=True)
class LastEvents:
    """What they say of one rank."""

    ms_per_micro_batch: float | None
    """The median over the last iterations of how long it computes, without what it waits for its tensor group; None
    where no pass was recorded."""
    messages: Mapping[str, NDArray[Any]]
    """Its last sends and receives, by their names, on rank 0's clock; empty where clocks were not compared lately."""

    @property
    def peers(self) -> list[int]:
        """Ranks that it sent activations to."""
        sent = self.messages.get("forward-send")
        return [] if sent is None else sorted({*sent["peer"].tolist()})


def last_events(path: Path) -> LastEvents:
    """Reads the end of a file of events.

    Raises:
        OSError, RunFolderError, ValueError, struct.error: it is cut off or damaged.
    """
    names, records = _read(path)
    return LastEvents(_ms_per_micro_batch(names, records), _messages(names, records))


def round_trip_ms(one: LastEvents, other: LastEvents, ranks: tuple[int, int]) -> float | None:
    """Milliseconds that a message takes from `one` to the next stage's `other`, and its gradient back: the medians of
    those that found their receiver waiting. An error of the clocks cancels out.

    None where no such messages are known.
    """
    there = _ms(one, other, "forward", *ranks)
    back = _ms(other, one, "backward", *reversed(ranks))
    return None if there is None or back is None else there + back


def _ms(sender: LastEvents, receiver: LastEvents, way: str, source: int, target: int) -> float | None:
    import numpy as np

    sent, got = sender.messages.get(f"{way}-send"), receiver.messages.get(f"{way}-recv")
    if sent is None or got is None:
        return None
    sent, got = sent[sent["peer"] == target], got[got["peer"] == source]
    common = np.intersect1d(sent["iteration"], got["iteration"])[1:]  # of the first one, a part may be missing
    sent, got = (each[np.isin(each["iteration"], common)] for each in (sent, got))
    order = ["iteration", "micro_batch", "chunk"]
    sent, got = np.sort(sent, order=order), np.sort(got, order=order)
    if len(sent) != len(got):
        return None
    waited = got["start_ns"] <= sent["start_ns"]
    took = (got["end_ns"] - sent["start_ns"])[waited]
    return float(np.median(took)) / 1e6 if len(took) >= FEW else None


def _messages(names: list[str], records: NDArray[Any]) -> dict[str, NDArray[Any]]:
    import numpy as np

    clock = np.sort(records[records["name"] == _index(names, events.CLOCK)], order="start_ns")
    if not len(clock):
        return {}
    ahead = clock["end_ns"] - clock["start_ns"]
    found = {}
    for name in _MESSAGES:
        own = records[records["name"] == _index(names, name)][-MESSAGES:].copy()
        for field in ("start_ns", "end_ns"):
            own[field] += np.interp(own[field], clock["start_ns"], ahead).astype(np.int64)
        found[name] = own
    return found


def _ms_per_micro_batch(names: list[str], records: NDArray[Any]) -> float | None:
    import numpy as np

    passes = np.isin(records["name"], [names.index(name) for name in _PASSES if name in names])
    waits = np.isin(records["name"], [number for number, name in enumerate(names) if name.startswith("tensor-")])
    first = records["name"] == _index(names, _FIRST_PASS)
    iterations, inverse = np.unique(records["iteration"], return_inverse=True)
    took = (records["end_ns"] - records["start_ns"]).astype(float)

    def sums(which: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        return np.bincount(inverse[which], values[which], minlength=len(iterations))

    counts = sums(first, np.ones_like(took))
    whole = np.flatnonzero(counts > 0)[1:]  # of the first one the beginning may be missing, or it warms up
    if not len(whole):
        return None
    each = (sums(passes, took) - sums(waits, took))[whole] / counts[whole]
    return float(np.median(each)) / 1e6


def _index(names: list[str], name: str) -> int:
    """The number of a name; where it is absent, one that no record has."""
    return names.index(name) if name in names else -1


def _read(path: Path) -> tuple[list[str], NDArray[Any]]:
    """The names, and the last records, of a file of events."""
    import numpy as np

    with opened(path) as file:
        head = file.read(1 << 16)
        if not head.startswith(events.MAGIC):
            raise RunFolderError(f"{path} is no file of events")
        names_json, begin = events.header_of(head)
        size = events.RECORD.size
        last = begin + (os.fstat(file.fileno()).st_size - begin) // size * size
        file.seek(max(begin, last - TAIL_BYTES // size * size))
        content = file.read(last - file.tell())
    header = parse_json(names_json.decode(), str(path))
    names = header.get("names") if isinstance(header, dict) else None
    if not isinstance(names, list):
        raise RunFolderError(f"{path} is damaged: its header has no names of events")
    return list(map(str, names)), np.frombuffer(content, np.dtype(list(events.FIELDS)))
