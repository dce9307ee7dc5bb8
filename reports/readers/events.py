"""Reads `events/rank-*.bin` of a run into one table, all ranks on rank 0's clock.

The format of the files and of their `clock` records is in `docs/formats.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from conf.errors import RunFolderError, reworded
from conf.run_folder.json_values import Count, Rule, typed
from conf.run_folder.run_files import parse_json, read_bytes
from conf.visible import numbered
from megatron_ext.contract.events import CLOCK, CORE_WAIT, CORE_WAIT_IN_PASSES, FIELDS, MAGIC, VERSION, header_of
from reports.errors import ReportError

RECORD = np.dtype(list(FIELDS))
EVENT = np.dtype(
    [
        ("rank", "<i4"),
        ("name", "<u2"),
        ("chunk", "<u2"),
        ("iteration", "<i8"),
        ("micro_batch", "<i4"),
        ("peer", "<i4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
NAMES = (
    "forward-compute",
    "backward-compute",
    "backward-input-compute",
    "backward-weight-compute",
    "forward-recv",
    "backward-recv",
    "forward-send",
    "backward-send",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "forward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
    "overlapped-grads-all-reduce",
    "grads-all-reduce",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "optimizer",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "tensor-all-reduce",
    "tensor-all-gather",
    "tensor-reduce-scatter",
    "grad-norm-all-reduce",
    "params-all-gather",
    "islands-all-reduce",
    "batch-generator",
    "post-process",
    "loss-compute",
)
"""Names that the engine and Megatron-LM give, in the order in which legends list and charts draw them: what may lie
inside another comes after it."""
WAITS = ["rank", "iteration", "ns", "in_passes_ns"]
MOST_BYTES = 1 << 30
"""The largest file: 33 million events."""
Nanoseconds = Annotated[int, Rule("nanoseconds", lambda value: abs(value) < 1 << 62)]
REACH_NS = 1 << 51
"""26 days. Events further from the middle of a run are no times of it, and a page could not hold them exactly."""


@dataclass(frozen=True)
class RankEvents:
    """One file as it is on disk: times are this rank's monotonic clock, names index `names`."""

    rank: int
    host: str
    names: tuple[str, ...]
    wall_offset_ns: int
    """System clock minus monotonic clock when the file was opened."""
    records: NDArray[Any]
    """(events,) of RECORD, without `clock`, `core-wait` and `core-wait-in-passes`, in file order."""
    clock: NDArray[Any]
    """(anchors,) of RECORD: the `clock` records, by start."""
    notes: tuple[str, ...]
    core_waits: NDArray[Any]
    """(iterations,) of RECORD: the `core-wait` records."""
    core_waits_in_passes: NDArray[Any]
    """(iterations,) of RECORD: the `core-wait-in-passes` records."""
    cores: int | None
    """CPU cores that it could use; None in files of earlier versions."""
    load: float | None
    """Load average of the host when the file was opened, over a minute."""


@dataclass(frozen=True)
class Timeline:
    """The events of a run."""

    events: pd.DataFrame
    """The columns of EVENT, an event a row numbered from 0, sorted by rank, then start. `name` is a category of the
    names that occur, in the order of legends. Times are ns on rank 0's monotonic clock, of a log on those of its nodes;
    -1 stands for no micro-batch or peer."""
    hosts: Mapping[int, str]
    """Host of each rank that has a file."""
    uncertainty_ns: int | None
    """Largest uncertainty of any clock measurement used; None where clocks were not compared."""
    notes: tuple[str, ...]
    """What is missing or was left out, one sentence each."""
    core_waits: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=WAITS))
    """How long a rank waited for a CPU core in an iteration, and in its passes, ns; a row each, none where that is not
    known."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """The CPU cores that each rank of a host could use, as far as known."""
    load: Mapping[str, float] = field(default_factory=dict)
    """Each host's load average when the ranks began, over a minute."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tasks that have an event: those in NAMES in its order, then others."""
        return tuple(self.events["name"].cat.categories)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have at least one event."""
        return sorted(self.events["rank"].unique().tolist())


def read_rank(path: Path) -> RankEvents:
    """Reads one file.

    Raises:
        ReportError: it is not an event file, or one of another version; says what was expected and found.
        RunFolderError: it cannot be read.
    """
    content = read_bytes(path, MOST_BYTES)
    if content[: len(MAGIC)] != MAGIC:
        raise ReportError(
            f"{path} is not an event file: expected it to start with {MAGIC!r}, found {content[: len(MAGIC)]!r}"
            + (" (an empty file)" if not content else "")
        )
    header, start = _header(path, content)
    whole, rest = divmod(len(content) - start, RECORD.itemsize)
    records = np.frombuffer(content, RECORD, whole, start)
    names = header.names
    sound = (records["name"] < len(names)) & (
        (records["end_ns"] >= records["start_ns"]) | (records["name"] == _index(names, CLOCK))
    )
    notes = []
    if rest:
        notes.append(f"rank {header.rank}: the last record is cut short ({rest} of {RECORD.itemsize} bytes); ignored")
    if not sound.all():
        notes.append(
            f"rank {header.rank}: {int((~sound).sum())} of {whole} records have an unknown name or end before "
            "they start; ignored"
        )
        records = records[sound]
    is_clock, waits, inside = (
        records["name"] == _index(names, name) for name in (CLOCK, CORE_WAIT, CORE_WAIT_IN_PASSES)
    )
    return RankEvents(
        rank=header.rank,
        host=header.host,
        names=names,
        wall_offset_ns=header.unix_ns - header.monotonic_ns,
        records=records[~is_clock & ~waits & ~inside],
        clock=np.sort(records[is_clock], order="start_ns"),
        notes=tuple(notes),
        core_waits=records[waits],
        core_waits_in_passes=records[inside],
        cores=header.cores,
        load=header.load,
    )


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What is read of it."""

    rank: Count
    host: str
    names: tuple[str, ...]
    monotonic_ns: Nanoseconds
    unix_ns: Nanoseconds
    cores: Count | None = None
    load: float | None = None


def _header(path: Path, content: bytes) -> tuple[_Header, int]:
    """The header of a file and the offset of its first record."""
    with reworded(
        ReportError,
        f"{path}: expected a JSON header after the first 12 bytes, found none (",
        ")",
        of=(struct.error, ValueError, RunFolderError),
    ):
        text, start = header_of(content)
        header = parse_json(text.decode(), "its content")
    found = header.get("version") if isinstance(header, dict) else header
    if found != VERSION:
        raise ReportError(f"{path}: expected an event file of version {VERSION}, found version {found!r}")
    return typed(_Header, header, f"{path}: its header"), start


def _index(names: Sequence[str], name: str) -> int:
    """Index of a name; where it is absent, one that no record can have."""
    return names.index(name) if name in names else 1 << 16


def read_run(paths: Mapping[int, Path]) -> Timeline:
    """Reads and aligns the files of a run. A file that is absent or not sound becomes a note. `paths`: where the file
    of each rank is or should be, by rank."""
    files, notes, absent = [], [], []
    for rank, path in sorted(paths.items()):
        try:
            file = read_rank(path)
        except FileNotFoundError:
            absent.append(rank)
        except (ReportError, RunFolderError) as error:
            notes.append(f"rank {rank}: {error}")
        else:
            if file.rank == rank:
                files.append(file)
                notes.extend(file.notes)
            else:
                notes.append(f"rank {rank}: {path} belongs to rank {file.rank}; ignored")
    if absent:
        notes.append(f"no event file for {numbered('rank', absent)}")
    return merge(files, notes)


def merge(files: Sequence[RankEvents], notes: Sequence[str] = ()) -> Timeline:
    """Joins the events of all ranks on rank 0's clock; a rank that cannot be placed there becomes a note."""
    message = list(notes)
    found = {file.names[index] for file in files for index in np.unique(file.records["name"])}
    names = legend_order(found)
    first = next((file for file in files if file.rank == 0), None)
    parts = []
    for file in files:
        if len(file.clock) or (first is not None and file.host == first.host):
            moved = aligned(file.records, file.clock)
        elif first is not None:
            moved = file.records.copy()
            for key in ("start_ns", "end_ns"):
                moved[key] += file.wall_offset_ns - first.wall_offset_ns
            message.append(f"rank {file.rank}: no clock record; placed by the system clocks, with unknown error")
        else:
            message.append(f"rank {file.rank}: no clock record, and no file of rank 0 to align it with; left out")
            continue
        part = np.zeros(len(moved), EVENT)
        part["rank"] = file.rank
        part["name"] = np.array([_index(names, name) for name in file.names], "<i8")[moved["name"]]
        for key in ("iteration", "chunk", "micro_batch", "peer", "start_ns", "end_ns"):
            part[key] = moved[key]
        parts.append(part[np.argsort(part["start_ns"], kind="stable")])
    events = _near(np.concatenate(parts), message) if parts else np.zeros(0, EVENT)
    return Timeline(
        events=frame(events, names),
        hosts={file.rank: file.host for file in files},
        uncertainty_ns=max((int(file.clock["peer"].max()) for file in files if len(file.clock)), default=0),
        notes=tuple(message),
        core_waits=_core_waits(files),
        cores={file.host: file.cores for file in files if file.cores is not None},
        load={file.host: file.load for file in files if file.load is not None},
    )


def _core_waits(files: Sequence[RankEvents]) -> pd.DataFrame:
    """Tabulates waits for cores. None in passes is noted on GPUs, where passes go on without the rank."""
    rows = []
    for file in files:
        every, inside = (
            pd.Series(one["end_ns"] - one["start_ns"], index=one["iteration"].astype(np.int64))
            for one in (file.core_waits, file.core_waits_in_passes)
        )
        # An iteration may be there twice, where a run went back to one.
        every, inside = every.groupby(level=0).last(), inside.groupby(level=0).last()
        columns = {"ns": every, "in_passes_ns": inside.reindex(every.index, fill_value=0)}
        rows.append(pd.DataFrame(columns).rename_axis("iteration").reset_index().assign(rank=file.rank))
    found = [one for one in rows if len(one)]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=WAITS)


def frame(records: NDArray[Any], names: Sequence[str]) -> pd.DataFrame:
    """Records of EVENT, whose names index `names`, as the table of a Timeline."""
    columns = {key: records[key] for key in EVENT.names or ()}
    used = np.unique(records["name"])
    index = np.full(len(names), -1, np.int64)
    index[used] = np.arange(len(used))
    codes = index[records["name"]]
    return pd.DataFrame(columns | {"name": pd.Categorical.from_codes(codes, [names[number] for number in used])})


def _near(events: NDArray[Any], notes: list[str]) -> NDArray[Any]:
    """The events within REACH_NS of the middle one; of others it is noted."""
    middle = np.sort(events["start_ns"])[len(events) // 2] if len(events) else 0
    low, high = int(middle) - REACH_NS, int(middle) + REACH_NS
    # A clock that cannot be may have moved an end before its start.
    near = (low < events["start_ns"]) & (events["start_ns"] <= events["end_ns"]) & (events["end_ns"] < high)
    if near.all():
        return events
    notes.append(f"{np.count_nonzero(~near)} events are at least 26 days away from the others; ignored")
    return np.asarray(events[near])


def legend_order(names: Set[str]) -> tuple[str, ...]:
    """Sorts names: those in NAMES in its order, then others."""
    return tuple([name for name in NAMES if name in names] + sorted(names - set(NAMES)))


def aligned(records: NDArray[Any], clock: NDArray[Any]) -> NDArray[Any]:
    """Records with their times moved to rank 0's clock.

    The offset is linear between two `clock` records, and that of the nearest before the first and after the
    last. Without any the clocks are the same.
    """
    moved = records.copy()
    if len(clock) == 0:
        return moved
    base, offset = clock["start_ns"][0], clock["end_ns"] - clock["start_ns"]
    for key in ("start_ns", "end_ns"):
        # Differences from the first anchor are small enough to be exact in a double; the clocks are not.
        drift = np.interp(records[key] - base, clock["start_ns"] - base, offset - offset[0])
        moved[key] += offset[0] + np.rint(drift).astype(np.int64)
    return moved
