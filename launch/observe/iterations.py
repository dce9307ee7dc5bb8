"""The last iterations that a run has logged, and how far the clocks of its nodes differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from conf.errors import RunFolderError
from conf.run_folder import run_files
from conf.run_folder.iteration_time import LineTime
from conf.run_folder.json_values import Count, Rule, Unix, typed
from conf.run_folder.rundir import RunDir
from conf.visible import plural, span
from launch.files.records import CLOCK_S, NodeRecord
from launch.files.run_files import Faults
from launch.screen import clock

TAIL_BYTES = 64 * 1024
"""Some 200 iterations at the end of metrics.jsonl: enough for the pace."""
TIMES_BYTES = 1 << 26
"""The end of metrics.jsonl that is read for times alone: some 200,000 iterations."""
_TIMES = tuple(re.compile(rb'"%s": ([-+.\dEe]+)' % key) for key in (b"iteration", b"elapsed_ms", b"consumed_samples"))
_EVALUATED = "valid_"
_NAMED = 3
"""So many lines that are no iterations are named."""
_Line = TypeVar("_Line")
Milliseconds = Annotated[float, Rule("from 0 to 1e12 ms", lambda value: 0 <= value <= 1e12)]


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A logged iteration. `elapsed_ms` is the mean per iteration since the one logged before."""

    iteration: Count
    unix: Unix
    elapsed_ms: Milliseconds
    loss: float | None
    """None where all iterations since the line before were skipped, and in a rehearsal."""
    nan: Count
    consumed_samples: Count | None = None
    evaluation_s: float | None = None
    """How long its evaluation took, where it had one."""
    evaluation: dict[str, float | None] = field(default_factory=dict)
    """What that gave, by metric."""


@dataclass(frozen=True, kw_only=True)
class SampleWait:
    """A minute of a rank's iterations, on average."""

    iteration: Count
    unix: Unix
    wait_ms: Milliseconds
    """For how long one of them waited for its samples."""


def read_log(path: Path, faults: Faults) -> tuple[Iteration, ...]:
    """The last lines of metrics.jsonl. A line that is not a logged iteration is a fault, and the others count."""
    found, bad = [], list[tuple[int, str]]()
    lines = faults.tail(path, TAIL_BYTES, decisive=True).split(b"\n")[
        :-1
    ]  # one that is still being written is left out
    for number, line in enumerate(lines):
        try:
            content = run_files.parse_json(line.strip(b"\0").decode(errors="replace"), "")
            found.append(replace(typed(Iteration, content, ""), evaluation=_evaluation(content)))
        except RunFolderError as error:
            bad.append((number - len(lines), str(error).strip()))
    if bad:
        whole = _lines(path)
        named = [f"line {whole + number + 1} {why}" for number, why in bad[-_NAMED:]]
        more = f", and {plural(len(bad) - _NAMED, 'other line')}" if len(bad) > _NAMED else ""
        faults.add(f"{path} has lines that are not iterations: {'; '.join(named)}{more}")
    return tuple(found)


def read_times(path: Path, tail: Sequence[Iteration]) -> tuple[LineTime, ...]:
    """What all lines say of time, since the time of an iteration is a median over all of them; of a log of hundreds of
    megabytes the last of them. `tail`: what `read_log` found."""
    short = tuple(_time(one) for one in tail)
    try:
        if path.stat().st_size <= TAIL_BYTES:
            return short
        whole, cut = run_files.read_tail(path, TIMES_BYTES)
    except (OSError, RunFolderError):
        return short
    begun = whole[whole.find(b"\n") + 1 if cut else 0 : whole.rfind(b"\n") + 1]
    columns, count = [pattern.findall(begun) for pattern in _TIMES], begun.count(b"\n")
    with suppress(ValueError):
        if all(len(column) == count for column in columns):
            return tuple(LineTime(int(n), float(ms), int(samples)) for n, ms, samples in zip(*columns, strict=True))
    return tuple(map(_time, iterations_in(begun))) or short


def iterations_in(text: bytes) -> Iterator[Iteration]:
    """The logged iterations among the lines of a text; other lines are left out."""
    return lines_in(text, Iteration)


def lines_in(text: bytes, kind: type[_Line]) -> Iterator[_Line]:
    """The lines of a text that are of a kind; other lines are left out."""
    for line in text.split(b"\n"):
        with suppress(RunFolderError):
            yield typed(kind, run_files.parse_json(line.strip(b"\0").decode(errors="replace"), ""), "")


def _time(line: Iteration) -> LineTime:
    return LineTime(line.iteration, line.elapsed_ms, line.consumed_samples)


def _evaluation(content: Any) -> dict[str, float | None]:
    """What a line that is one says of an evaluation."""
    return {
        name.removeprefix(_EVALUATED): value if isinstance(value, float) else None
        for name, value in content.items()
        if name.startswith(_EVALUATED)
    }


def _lines(path: Path) -> int:
    """How many whole lines a file has."""
    count = 0
    with suppress(OSError, RunFolderError), run_files.opened(path) as file:
        while part := file.read(1 << 20):
            count += part.count(b"\n")
    return count


MOST_S = 86400.0
"""Files that are older or newer than what is in them by more are copies."""


@dataclass(frozen=True)
class Clocks:
    """How the clocks of a run's nodes differ, by name."""

    ahead_s: Mapping[str, float] = field(default_factory=dict)
    """The seconds by which a node's clock is ahead of the file system's, where that is much."""
    set_at: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """When a clock was set, by itself afterwards, and by how many seconds forward."""

    def of_node(self, name: str, state: NodeRecord | None) -> NodeRecord | None:
        """What a node says of itself, by the file system's clock."""
        by = self.ahead_s.get(name)
        if state is None or by is None:
            return state
        return replace(state, beat_unix=max(0.0, state.beat_unix - by), started_unix=max(0.0, state.started_unix - by))

    def of_line(self, line: Iteration, node: str) -> Iteration:
        """A logged iteration that `node` wrote, by the clock as it is set now, less what that is ahead."""
        at, by_s = self.set_at.get(node, (0.0, 0.0))
        # Before a clock was set forward it read at most `at - by_s`. One set back has lines that may be of either time.
        moved = by_s if by_s > 0 and line.unix <= at - by_s / 2 else 0.0
        return replace(line, unix=max(0.0, line.unix + moved - self.ahead_s.get(node, 0.0)))

    @property
    def words(self) -> tuple[str, ...]:
        """A sentence for each."""
        apart = [
            f"that of node {name} is {span(abs(by))} {'ahead of' if by > 0 else 'behind'} the file system's of the run"
            for name, by in self.ahead_s.items()
        ]
        moved = [
            f"that of node {name} was set {'forward' if by > 0 else 'back'} by {span(abs(by))}, at {clock(at, at)}"
            for name, (at, by) in self.set_at.items()
        ]
        return (*apart, *moved)


def clocks_of(run: RunDir, states: Mapping[str, NodeRecord | None], *, follows_files: bool) -> Clocks:
    """Returns the clocks of nodes at work; of those that have ended no age is asked for. `follows_files`: whether the
    times of files are those of their writing; a copy of a run has others."""
    ahead, moved = dict[str, float](), dict[str, tuple[float, float]]()
    for name, state in states.items():
        if state is None or state.state == "ended":
            continue
        if follows_files and (by := _ahead_s(run, name, state)) is not None:
            ahead[name] = by
        if state.clock_set_unix is not None:
            moved[name] = (state.clock_set_unix, state.clock_set_by_s)
    return Clocks(ahead, moved)


def _ahead_s(run: RunDir, name: str, state: NodeRecord) -> float | None:
    """The agent writes its time into its file, and the file system, on a server of its own, notes when."""
    try:
        by = state.beat_unix - run.node_state(name).stat().st_mtime
    except OSError:
        return None
    return by if CLOCK_S < abs(by) < MOST_S else None
