"""Clocks of nodes that were set while a run went on, or differ from the shared file system's: ages count without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from conf.run_folder.rundir import RunDir
from conf.visible import span
from launch.files.node_state import CLOCK_S
from launch.files.records import NodeRecord
from launch.observe.iterations import Iteration
from launch.screen.text import clock

MOST_S = 86400.0
"""Files that are older or newer than what is in them by more are copies."""


@dataclass(frozen=True)
class Clocks:
    """Of the nodes of a run, by name."""

    ahead_s: Mapping[str, float] = field(default_factory=dict)
    """By how much a node's clock is ahead of the file system's, where that is much."""
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
    """As nodes at work show them; of those that have ended no age is asked for.

    Args:
        follows_files: whether the times of files are those of their writing; a copy of a run has others.
    """
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
