"""All that `tdpp status` says of a run: the verdict, who brought the run down, and what its nodes' files say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conf.run_folder import judgement
from conf.run_folder.judgement import Culprit, LastWords, LineGroup
from conf.run_folder.rundir import RunDir
from conf.visible import shortened
from launch.files.run_files import Faults, agent_logs, read_submitted
from launch.judge.causes import causes
from launch.judge.node_reports import grouped_lines, mismatches, warnings
from launch.judge.progress import held_up_by, held_up_words, lost_unix
from launch.judge.state import State
from launch.judge.verdict import Verdict, decide
from launch.observe.look import observe
from launch.observe.observation import Observation, SeenNode

STDERR_BYTES = 128 * 1024
"""How many bytes at the end of each node's stderr are read."""


@dataclass(frozen=True, kw_only=True)
class Findings(judgement.Findings):
    """A run at one moment, judged."""

    run: RunDir
    seen: Observation
    verdict: Verdict
    faults: tuple[str, ...] = ()
    """What of the run's files cannot be read, or is not what it should be."""

    @property
    def over(self) -> bool:
        return self.seen.over


def findings(run: RunDir, seen: Observation) -> Findings:
    """What else is found out about a run; what of it cannot be read is a fault."""
    faults = Faults(seen.faults)
    stderr = _ends(run, by_failure(seen), faults)
    mismatching = mismatches(run, seen.plan, seen.nodes, faults)
    lost = _of_lost_agents(run, seen, faults)
    verdict = decide(seen)
    return Findings(
        run=run,
        seen=seen,
        verdict=verdict,
        culprit=culprit(run, seen, verdict.state),
        mismatches=tuple(mismatching),
        stderr=tuple(grouped_lines(stderr, *_messages(seen))),
        agents=tuple(lost),
        faults=tuple(fault.text for fault in faults),
    )


def all_findings(run: RunDir) -> Findings:
    """The same with warnings. Raises RunFolderError if plan.json or jobs.json is not what it should be."""
    found = findings(run, observe(run))
    stderr = _ends(run, found.seen.nodes, Faults())
    return replace(found, warnings=tuple(warnings(stderr)))


def by_failure(seen: Observation) -> list[SeenNode]:
    """The nodes, those first that failed first by themselves."""
    failed: dict[str, float] = {}
    for error in seen.errors:
        if not error.symptom:
            failed.setdefault(error.node, error.unix)
    for node in seen.nodes:
        if node.ended and node.exit_code and not node.stopped:
            failed.setdefault(node.name, node.seen_unix)
    return sorted(seen.nodes, key=lambda node: failed.get(node.name, float("inf")))


def _messages(seen: Observation) -> tuple[list[str], list[str]]:
    """First lines of what ranks reported: causes, and symptoms."""

    def first_lines(symptom: bool) -> list[str]:
        return [error.message.strip().split("\n")[0] for error in seen.errors if error.symptom is symptom]

    return first_lines(False), first_lines(True)


def _of_lost_agents(run: RunDir, seen: Observation, faults: Faults) -> list[LineGroup]:
    lost = {node.name for node in seen.nodes if not node.ended and not node.alive}
    if not lost:
        return []
    submitted = read_submitted(run, len(seen.nodes))
    its_jobs = {f"job {job.id}" for job in seen.jobs if lost & set(job.nodes)}
    logs = faults.tried(lambda: agent_logs(run, seen.plan, submitted), {})
    return grouped_lines(
        {
            source: b"".join(faults.tail(path, STDERR_BYTES) for path in paths)
            for source, paths in logs.items()
            if source in lost | its_jobs
        }
    )


def _ends(run: RunDir, nodes: Sequence[SeenNode], faults: Faults) -> dict[str, bytes]:
    return {node.name: faults.tail(run.node_err(node.name), STDERR_BYTES, node.err_begin) for node in nodes}


LINES = 20
"""How many of the last lines of its log are shown."""
_BYTES = 128 * 1024
_BAD = (State.failed, State.failing, State.lost, State.stalled, State.hung, State.not_finite)
_RANK = re.compile(r"\[rank (\d+) \([^)]*\)\] (error:)?")
"""How a rank begins what it says of its end: an error of one line, or a traceback."""


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
        if found := _RANK.match(line):
            others = bool(ranks) and int(found[1]) not in ranks
        if not others:
            yield line.rstrip()
        if found and found[2]:
            others = False
