"""Lines of decisions.jsonl: what a run changed about its batch or its nodes, and why (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conf.errors import RunFolderError
from conf.run_folder.json_values import Count, typed
from conf.run_folder.run_files import parse_json

_MOST = 5
"""So many lines that are none are named."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One about the batch; those that change nothing are there, too."""

    iteration: Count
    """After which it was made."""
    consumed_samples: Count
    before: Count
    """The global batch, in samples."""
    global_batch_size: Count
    """The next one."""
    shares_before: tuple[Count, ...]
    shares: tuple[Count, ...]
    learning_rate_factor: float
    reason: str
    similarity: float | None = None
    noise_scale: float | None = None
    """In samples."""
    micro_batch_sizes_before: tuple[Count, ...] = ()
    """By replica, in samples; empty in runs of earlier versions, where all are alike."""
    micro_batch_sizes: tuple[Count, ...] = ()
    streams_before: tuple[Count, ...] = ()
    """By replica; empty in runs of earlier versions, where they stay."""
    streams: tuple[Count, ...] = ()

    @property
    def resizes(self) -> bool:
        """Whether micro-batches have other sizes afterwards."""
        return self.micro_batch_sizes_before != self.micro_batch_sizes

    @property
    def changes_streams(self) -> bool:
        """Whether replicas run other numbers of copies of the model afterwards."""
        return self.streams_before != self.streams

    @property
    def changes(self) -> bool:
        """Whether anything is another afterwards."""
        return (self.before, self.shares_before) != (self.global_batch_size, self.shares) or (
            self.resizes or self.changes_streams
        )


@dataclass(frozen=True, kw_only=True)
class Regrouping:
    """A start of an elastic run with another plan."""

    iteration: Count
    """Of the checkpoint that it goes on from; 0 without one."""
    start: str
    nodes_before: tuple[str, ...]
    nodes: tuple[str, ...]
    shares_before: tuple[Count, ...]
    shares: tuple[Count, ...]
    reason: str


def decisions(lines: Iterable[str], notes: list[str]) -> tuple[Decision | Regrouping, ...]:
    """In their order; lines that are none become notes."""
    found: list[Decision | Regrouping] = []
    strange = 0
    for number, line in enumerate(lines, 1):
        name = f"decisions.jsonl: line {number}"
        try:
            content = parse_json(line, name)
            moves = isinstance(content, dict) and "nodes" in content
            found.append(typed(Regrouping, content, name) if moves else typed(Decision, content, name))
        except RunFolderError as error:
            strange += 1
            if strange <= _MOST:
                notes.append(f"{error}; ignored")
    if strange > _MOST:
        notes.append(f"decisions.jsonl: {strange - _MOST} other lines are not decisions; ignored")
    return tuple(found)
