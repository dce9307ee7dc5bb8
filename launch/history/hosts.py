"""What the records of runs say of the hosts of a cluster: which are slow, which fail, and since when."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median, median_low

from conf.visible import plural
from launch.history.record import HostRecord, RunRecord

RECENT = 20
"""A host is judged by so many of its last runs: what was repaired is well again."""
SLOWER = 1.05
"""Times as long as other hosts take for the same work, from which a host is slow."""
AGAIN = 1.02
"""At least three of four of its runs show this much: a host is not slow for one run beside somebody else's job."""
SLOWER_LINK = 1.5
AGAIN_LINK = 1.2
"""The same two for messages, whose times vary more."""
LINK_RUNS = 5 * RECENT
"""A link between two hosts is judged by so many of their last runs, of which few use it."""
SLOW_RUNS = 3
"""Runs from which on it can be known whether a host is slow."""
FAILURES = 2
"""So many failures of its own make a host a failing one."""
UNLIKELY = 0.02
"""Failures that may come from the program count where chance would give as many to a host less often than this."""
HOT = 0.2
"""The part of the readings with heat or power brakes from which a host throttles."""


class Health(StrEnum):
    healthy = "healthy"
    slow = "slow"
    failing = "failing"
    throttled = "throttled"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as far as one host took part in it."""

    run: RunRecord
    node: HostRecord
    slower: float | None
    """Times as long as other hosts, the median over what it computed; None where nobody else computed the same."""

    @property
    def failed(self) -> bool:
        return bool(self.node.rule)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine, over all its runs."""

    name: str
    """Its newest one."""
    before: tuple[str, ...]
    """Names that its GPUs were seen under earlier."""
    gpu: str
    runs: tuple[Run, ...]
    """Oldest first."""
    health: Health
    why: str
    """In words, what is wrong and since when; empty of a healthy one."""
    links: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with slow links to hosts with later names, where neither host is slow to all others."""

    def __str__(self) -> str:
        return f"{self.name}: {self.health}" + (f": {self.why}" if self.why else "")

    @property
    def slow_links(self) -> list[str]:
        """In words."""
        return [f"{self.name} - {other}: {why}" for other, why in self.links.items()]

    @property
    def rank_hours(self) -> float:
        return sum(run.node.rank_hours for run in self.runs)

    @property
    def slower(self) -> float | None:
        """The median over its last runs."""
        runs = self.runs[-RECENT:]
        known = [run.slower for run in runs if run.slower is not None]
        return median(known) if known else None

    @property
    def driver(self) -> tuple[str, str] | None:
        """That of its GPUs when it was last known, and the run that noted it."""
        known = ((run.node.driver, run.run.run) for run in reversed(self.runs) if run.node.driver)
        return next(known, None)


def hosts_of(records: Sequence[RunRecord]) -> list[Host]:
    """Every host of the records, by name. Records come oldest first."""
    machines = _machines(records)
    peers, links = _peers(records, machines), Links(records, machines)
    found = defaultdict[str, list[Run]](list)
    for record in records:
        for host in record.hosts:
            machine = machines[host.host]
            found[machine].append(Run(run=record, node=host, slower=_beside(host, machine, peers)))
    alike = defaultdict[str, list[Run]](list)
    for runs in found.values():
        alike[runs[-1].node.gpu] += runs
    names = {machine: runs[-1].node.host for machine, runs in found.items()}
    beside = {machine: [(run, [*links.beside(machine, run)]) for run in runs] for machine, runs in found.items()}
    slow = {machine: told for machine, known in beside.items() if (told := _slow_network(known))}
    well = {machine: name for machine, name in names.items() if machine not in slow}
    return sorted(
        (
            replace(
                _host(runs, alike[runs[-1].node.gpu], slow.get(machine)),
                links=dict(_slow_links(well[machine], beside[machine], well)) if machine in well else {},
            )
            for machine, runs in found.items()
        ),
        key=lambda host: host.name,
    )


def _machines(records: Sequence[RunRecord]) -> dict[str, str]:
    """A name for each host, the same for two that have had the same GPU: machines come back under other names."""
    same: dict[str, str] = {}
    of_gpu: dict[str, str] = {}

    def root(name: str) -> str:
        while same.setdefault(name, name) != name:
            name = same[name]
        return name

    for record in records:
        for host in record.hosts:
            for uuid in host.uuids:
                if (other := of_gpu.setdefault(uuid, host.host)) != host.host:
                    same[root(other)] = root(host.host)
            root(host.host)
    return {name: root(name) for name in same}


Peers = dict[str, dict[str, float | None]]
"""For each thing that is computed and each machine, the median milliseconds of all others; None where there are
none."""


def _peers(records: Sequence[RunRecord], machines: dict[str, str]) -> Peers:
    times = defaultdict[str, defaultdict[str, list[float]]](lambda: defaultdict(list))
    for record in records:
        for host in record.hosts:
            for key, took in host.work.items():
                times[key][machines[host.host]].append(took)
    found: Peers = {}
    for key, by in times.items():
        usual = {machine: median(of) for machine, of in by.items()}
        found[key] = {
            machine: median(others) if (others := [one for of, one in usual.items() if of != machine and one]) else None
            for machine in usual
        }
    return found


def _beside(host: HostRecord, machine: str, peers: Peers) -> float | None:
    ratios = [took / others for key, took in host.work.items() if (others := peers[key][machine]) is not None]
    return None if not ratios else ratios[0] if len(ratios) == 1 else median(ratios)


def _host(runs: Sequence[Run], alike: Sequence[Run], network: str | None) -> Host:
    """Judges a host. `alike` are the runs of all hosts with such GPUs: a program fails where its first rank is, on
    whatever host. `network` says that it is slow to all others."""
    recent = runs[-RECENT:]
    names = list(dict.fromkeys(run.node.host for run in reversed(runs)))
    health, why = Health.healthy, ""
    for check in (
        _failing(recent, alike),
        _slow(runs),
        None if network is None else (Health.slow, network),
        _throttled(recent),
    ):
        if check is not None:
            health, why = check
            break
    return Host(name=names[0], before=tuple(names[1:]), gpu=runs[-1].node.gpu, runs=tuple(runs), health=health, why=why)


def _failing(recent: Sequence[Run], alike: Sequence[Run]) -> tuple[Health, str] | None:
    failed = [run for run in recent if run.failed]
    own = [run for run in failed if run.node.failed_itself]
    if len(own) < FAILURES:
        if len(failed) < FAILURES:
            return None
        beside = [run for run in alike if run.run.began_unix >= recent[0].run.began_unix]
        by_chance = _chance(len(failed), sum(run.failed for run in beside), len(recent) / len(beside))
        if by_chance >= UNLIKELY:
            return None
        own = failed
    causes = Counter(run.node.rule for run in own).most_common()
    by_cause = ", ".join(f"{rule}{f', {times} times' if times > 1 else ''}" for rule, times in causes)
    return Health.failing, (
        f"{len(own)} of its last {plural(len(recent), 'run')} failed here ({by_cause}), first {own[0].run.run}, last "
        f"{own[-1].run.run}: {own[-1].node.reason}"
    )


def _chance(failures: int, of: int, share: float) -> float:
    """Probability that at least so many of all failures fall on a host with this share of the runs."""
    # By those that are fewer: numbers of combinations of thousands of failures are larger than any float.
    return 1.0 - sum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(failures))


def _slow(runs: Sequence[Run]) -> tuple[Health, str] | None:
    known = [(run, run.slower) for run in runs if run.slower is not None]
    if (told := _slow_since(known, SLOWER, AGAIN)) is None:
        return None
    usual, since = told
    return Health.slow, f"takes {usual:.2f} times as long as other hosts for the same work, {since}"


def _slow_since(known: Sequence[tuple[Run, float]], slower: float, again: float) -> tuple[float, str] | None:
    """How many times as long as others something took in the last runs, if that is slow, and since when, in words."""
    ratios = [ratio for _, ratio in known]
    recent = ratios[-RECENT:]
    usual = median(recent) if recent else 1.0
    if len(recent) < SLOW_RUNS or usual < slower or sum(one >= again for one in recent) < 0.75 * len(recent):
        return None
    less = [one < (1 + usual) / 2 for one in ratios]  # one such run alone may be by chance
    well = max((at + 1 for at in range(1, len(less)) if less[at] and less[at - 1]), default=0)
    at = next((at for at in range(well, len(less)) if not less[at]), 0)
    first, before = known[at][0], [run.node.driver for run, _ in known[:at] if run.node.driver]
    changed = bool(before and first.node.driver) and before[-1] != first.node.driver
    driver = f", the first with driver {first.node.driver} after {before[-1]}" if changed else ""
    return usual, f"the median of {len(recent)} runs; since {first.run.run}{driver}"


Beside = Sequence[tuple[Run, Sequence[tuple[str, float]]]]
"""A machine's runs, and in each how long its messages took beside others, by peer (`Links.beside`)."""


def _slow_network(beside: Beside) -> str | None:
    """Why a machine's messages are slow whatever host they come from or go to, in words."""
    usual = [median(ratio for _, ratio in known) for known in _by_peer(beside[-RECENT:]).values()]
    if len(usual) < 2 or median_low(usual) < SLOWER_LINK:  # one peer alone may be the slow one, or the link to it
        return None
    known = [(run, median_low(ratio for _, ratio in ratios)) for run, ratios in beside if ratios]
    if (told := _slow_since(known, SLOWER_LINK, AGAIN_LINK)) is None:
        return None
    return (
        f"its messages to and from {plural(len(usual), 'host')} take {told[0]:.1f} times as long as those between "
        f"others, {told[1]}"
    )


def _slow_links(own: str, beside: Beside, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields a machine's slow links to those of `names`, which has the machines that are not slow to all others."""
    every = _by_peer(beside)
    for peer, recent in sorted(_by_peer(beside[-LINK_RUNS:]).items()):
        if peer not in names or own >= names[peer] or _slow_since(recent, SLOWER_LINK, AGAIN_LINK) is None:
            continue
        if (told := _slow_since(every[peer], SLOWER_LINK, AGAIN_LINK)) is not None:
            yield names[peer], f"messages take {told[0]:.1f} times as long as between other hosts, {told[1]}"


def _by_peer(beside: Beside) -> dict[str, list[tuple[Run, float]]]:
    found = defaultdict[str, list[tuple[Run, float]]](list)
    for run, ratios in beside:
        for peer, ratio in ratios:
            found[peer].append((run, ratio))
    return found


def _throttled(recent: Sequence[Run]) -> tuple[Health, str] | None:
    readings = sum(run.node.readings for run in recent)
    reasons = Counter[str]()
    for run in recent:
        reasons.update(run.node.throttled)
    if not readings or not reasons or (share := reasons.most_common(1)[0][1] / readings) < HOT:
        return None
    return Health.throttled, f"its GPUs were slowed down by {reasons.most_common(1)[0][0]} in {share:.0%} of readings"


Pair = tuple[str, str]
"""Machines at the ends of a link, sorted."""


class Links:
    """How long messages take between hosts, beside the same messages between others."""

    def __init__(self, records: Sequence[RunRecord], machines: Mapping[str, str]) -> None:
        self._machines = machines
        times = defaultdict[str, defaultdict[Pair, list[float]]](lambda: defaultdict(list))
        for record in records:
            for host in record.hosts:
                for name, took in host.links.items():
                    key, _, peer = name.partition(" ")
                    times[key][self._pair(host.host, peer)].append(took)
        self._others = {key: _others({pair: median(of) for pair, of in by.items()}) for key, by in times.items()}

    def beside(self, machine: str, run: Run) -> Iterator[tuple[str, float]]:
        """Yields each machine that one exchanged messages with in a run, and how many times as long as between others
        they took."""
        for host in run.run.hosts:
            for name, took in host.links.items():
                key, _, peer = name.partition(" ")
                pair = self._pair(host.host, peer)
                others = self._others[key][pair]
                if machine in pair and pair[0] != pair[1] and others:
                    yield pair[0] if pair[1] == machine else pair[1], took / others

    def _pair(self, one: str, other: str) -> Pair:
        one, other = self._machines.get(one, one), self._machines.get(other, other)
        return (one, other) if one < other else (other, one)


def _others(usual: Mapping[Pair, float]) -> dict[Pair, float | None]:
    """For each pair the lower median of all others: of three hosts with one slow network, two links are slow."""
    ranked = sorted(usual, key=usual.__getitem__)
    at = (len(ranked) - 2) // 2
    return {pair: None if at < 0 else usual[ranked[at if at < place else at + 1]] for place, pair in enumerate(ranked)}
