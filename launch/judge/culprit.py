"""Who brought a run down, or keeps it from going on, and what that one wrote last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.visible import shortened
from launch.files.faults import Faults
from launch.files.run_files import read_submitted
from launch.judge.causes import causes
from launch.judge.pace import held_up_by, held_up_words, lost_unix
from launch.judge.state import State
from launch.observe.agent_logs import agent_logs
from launch.observe.observation import Observation

LINES = 20
"""Of its log, the last ones."""
_BYTES = 128 * 1024
_BAD = (State.failed, State.failing, State.lost, State.stalled, State.hung, State.not_finite)
_RANK = re.compile(r"\[rank (\d+) \([^)]*\)\] (error:)?")
"""How a rank begins what it says of its end: an error of one line, or a traceback."""


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """The end of a file."""

    path: Path
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The first one, where there are several."""

    node: str
    ranks: tuple[int, ...]
    """Of it, and others that failed alike; none where the node itself is meant."""
    what: str
    """In words; a node's and a rank's name is not in them."""
    said: tuple[LastWords, ...]
    """`LINES` at most, without what other ranks of the node say: of stderr first; none where it wrote nothing."""


def culprit(run: RunDir, seen: Observation, state: State) -> Culprit | None:
    """None of a run that is well, was stopped on request, or whose culprit nobody knows."""
    found = _found(seen, state)
    if found is None:
        return None
    node, ranks, what = found
    return Culprit(node=node, ranks=ranks, what=what, said=tuple(_last_words(run, seen, node, ranks)))


def _found(seen: Observation, state: State) -> tuple[str, tuple[int, ...], str] | None:
    """Its node, its ranks and what it did, or what became of it."""
    if state not in _BAD:
        return None
    if found := causes(seen):
        return found[0].node, found[0].ranks, found[0].what
    if held := held_up_by(seen):
        verb, how = "stands still" if lost_unix(seen) is None else "stood still", held_up_words(seen, held)[1]
        return held[0].node, tuple(doing.rank for doing in held), f"{verb}: {how}"
    ended = [node for node in seen.nodes if node.ended and node.exit_code and node.reason]
    if seen.over and ended:
        first = min(ended, key=lambda node: node.seen_unix)
        return first.name, (), str(first.reason)
    if state is State.not_finite:
        return seen.plan.nodes[seen.plan.ranks[-1].node].name, (), f"logged a loss of {seen.log[-1].loss}"
    return None


def _last_words(run: RunDir, seen: Observation, name: str, ranks: Sequence[int]) -> Iterator[LastWords]:
    """What it wrote to stderr; where that is not much, also what its agent printed, and what it wrote to stdout."""
    node = next(node for node in seen.nodes if node.name == name)
    faults = Faults()
    of_agents = (
        {} if ranks else faults.tried(lambda: agent_logs(run, seen.plan, read_submitted(run, len(seen.nodes))), {})
    )
    files = [
        (run.node_err(name), node.err_begin),
        *((path, 0) for path in of_agents.get(name, ())),
        (run.node_out(name), node.out_begin),
    ]
    left = LINES
    for path, begin in files:
        text = faults.tail(path, _BYTES, begin).decode(errors="replace")
        if left and (lines := [*_of_ranks(text, ranks)][-left:]):
            left -= len(lines)
            yield LastWords(path=path, lines=tuple(map(shortened, lines)))


def _of_ranks(text: str, ranks: Sequence[int]) -> Iterator[str]:
    """The lines but for those of other ranks; all of them without `ranks`."""
    others = False
    for line in text.splitlines():
        if not line.strip():
            continue
        if said := _RANK.match(line):
            others = bool(ranks) and int(said[1]) not in ranks
        if not others:
            yield line.rstrip()
        if said and said[2]:
            others = False
