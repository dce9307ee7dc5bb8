"""What is to be thought of a run: a state, the rule that led to it, a reason, the evidence.

A run whose launch did not come as far as a plan has a verdict of its own."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from conf.errors import RunFolderError
from conf.run_folder.run_files import entries
from conf.run_folder.rundir import RunDir
from launch.files.locks import is_launching, launcher
from launch.files.records import Submitted
from launch.judge.causes import causes
from launch.judge.evidence import Evidence, evidence_of
from launch.judge.rules import RULES
from launch.judge.state import EXIT_CODES, State
from launch.observe.look import observe
from launch.observe.observation import Observation, RunKind


@dataclass(frozen=True)
class Verdict:
    """The judgement, and what it rests on."""

    state: State
    rule: str
    reason: str
    facts: tuple[Evidence, ...]

    def __str__(self) -> str:
        return f"{self.state}, {self.reason}"

    @property
    def evidence(self) -> tuple[str, ...]:
        """The facts, a line each."""
        return tuple(map(str, self.facts))

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


def judge(run: RunDir, now: float | None = None) -> Verdict:
    """Looks at a run and decides. `now` is in seconds since 1970. Raises RunFolderError: plan.json or jobs.json is not
    what it should be."""
    return decide(observe(run, now))


def decide(seen: Observation) -> Verdict:
    state, rule, reason = next(finding for rule in RULES if (finding := rule(seen)) is not None)
    later = [cause.reason for cause in causes(seen)[1:]]
    hosts = HostNames(seen)
    facts = [
        Evidence(hosts.beside(fact.label), hosts.beside(fact.text), hosts.of(fact.node))
        for fact in evidence_of(seen, state, later)
    ]
    return Verdict(state, rule, hosts.beside(reason), tuple(facts))


PLANNING_S = 10.0
"""A launch has written its plan by then, where nothing shows whether it goes on."""


def verdict_without_plan(run: RunDir) -> Verdict | None:
    """The verdict on a run that has no plan; None for one that has. Raises RunFolderError: it had a plan, or is
    gone."""
    launching = is_launching(run)
    if RunDir.is_one(run.path):
        return None
    _check_it_never_ran(run)
    stopped = run.stop_request.exists()
    if launching is None:
        launching = is_young(run, PLANNING_S) and not stopped
    if launching:
        return Verdict(State.starting, "launching", "its launch is still under way", ())
    if stopped:
        return Verdict(State.stopped, "stopped", "ended on request before anything was started", ())
    reason = f"its launch ({launcher(run)}) was interrupted before it had a plan; nothing was started"
    return Verdict(State.lost, "launch-cut-off", reason, ())


def verdict_on(run: RunDir) -> Verdict:
    """The verdict on a run, whether it has a plan or not."""
    return verdict_without_plan(run) or judge(run)


def is_young(run: RunDir, seconds: float) -> bool:
    """Whether a run's folder has changed within so many seconds: somebody may just be making it, or deleting it."""
    try:
        return time.time() - run.path.stat().st_mtime < seconds
    except FileNotFoundError:
        return False


def _check_it_never_ran(run: RunDir) -> None:
    """The plan is the last thing that is written before anything is started."""
    if not run.path.is_dir():
        raise RunFolderError(f"{run.path} no longer exists")
    lacking = " and ".join(path.name for path in (run.config, run.plan) if not path.is_file())
    started = run.plan.is_file() or run.metrics.exists() or any(entries(run.nodes))
    submitted = run.read(run.jobs, Submitted)
    if started or (submitted is not None and submitted.jobs):
        raise RunFolderError(f"{run.path} is damaged: {lacking} missing, although the run was started")


class HostNames:
    """Says of each node of a run on which host it is: `node gpu2-1` becomes `node gpu2-1 on gpu2-002`.

    A run on one machine alone needs no such words.
    """

    def __init__(self, seen: Observation) -> None:
        remote = seen.kind in (RunKind.slurm, RunKind.hosts)
        self._hosts = {node.name: node.host for node in seen.nodes if remote and node.host not in (None, node.name)}
        names = "|".join(sorted(map(re.escape, self._hosts), key=len, reverse=True))
        self._node = re.compile(rf"\bnode ({names})(?![\w-])(?! on )") if names else None

    def beside(self, text: str) -> str:
        """The text, with the host behind each node that it names."""
        return text if self._node is None else self._node.sub(self._named, text)

    def _named(self, found: re.Match[str]) -> str:
        """What says the host next anyway stays as it is."""
        follows = found.string.startswith(f": {self._hosts[found[1]]} ", found.end())
        return found[0] if follows else f"node {self.of(found[1])}"

    def of(self, node: str) -> str:
        """`gpu2-1 on gpu2-002`, or the node's name alone."""
        host = self._hosts.get(node)
        return node if host is None else f"{node} on {host}"
