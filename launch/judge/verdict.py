"""What is to be thought of a run: a state, the rule that led to it, a reason, the evidence."""

from __future__ import annotations

from dataclasses import dataclass

from conf.run_folder.rundir import RunDir
from launch.judge.causes import causes
from launch.judge.evidence import Evidence, evidence_of
from launch.judge.hosts import HostNames
from launch.judge.rules import RULES
from launch.judge.state import EXIT_CODES, State
from launch.observe.look import observe
from launch.observe.observation import Observation


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
    """Looks at a run and decides. `now` is in seconds since 1970.

    Raises:
        RunFolderError: plan.json or jobs.json is not what it should be.
    """
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
