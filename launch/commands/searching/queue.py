"""`start=now`: which plan's training would end first if it were submitted now, its time in Slurm's queue included.

Slurm says when a job of so many nodes of each group would start (`sbatch --test-only`). More nodes train faster and may
wait longer. A search on all that starts by a certain time finds the best plan for that time, since it may leave nodes
out; so there is one search for each time at which more nodes become available.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from conf.run_folder.run_folders import usual_runs_dir
from conf.schema.cluster import Cluster
from conf.schema.executor import ExecutorKind, Het
from conf.visible import plural, span
from fasop.errors import SearchError
from launch.control.executors.free_nodes import NOW_S, expected_start
from launch.control.executors.sbatch import JobRequest, component
from launch.errors import LaunchError
from launch.history.ledger import announcement, records
from launch.machine.slurm_commands import SlurmSilent
from launch.screen import clock, print_table, remark

if TYPE_CHECKING:
    from fasop.search.arguments import Arguments
    from fasop.search.inputs import Inputs
    from fasop.search.plan import Plan

Counts = Mapping[str, int]
"""Nodes by the name of their group."""
MOST_SETS = 64
"""So many sets of nodes Slurm is asked about; of more, in larger steps of a group's count."""
RUNS = 50
"""So many runs, the newest, show how right Slurm's estimates are."""
SEARCHES = 6
"""So many times are searched for, at most."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """When a job on so many nodes would start."""

    counts: Counts
    seconds: float
    """From now on."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan, and when its training would end."""

    plan: Plan
    waits_s: float
    trains_s: float

    @property
    def ends_s(self) -> float:
        return self.waits_s + self.trains_s


def rank_by_end(inputs: Inputs, args: Arguments) -> list[Choice]:
    """The best plan for each time at which it could start, the training that ends first first. Raises SearchError: the
    length of the training is not known, or Slurm gives no start."""
    from fasop.search.run import best_plans

    if inputs.executor.kind is not ExecutorKind.slurm:
        raise SearchError("start=now asks Slurm when nodes are free: add executor=slurm")
    if not inputs.run.known:
        raise SearchError(
            "start=now adds waiting and training, so the training's length is needed: add tokens=N, train.samples=N or "
            "train.iterations=N"
        )
    known = list(waiting(inputs.cluster, inputs.executor.het))
    if not known:
        raise SearchError(
            "start=now: Slurm says of no set of these nodes when it would start; 'tdpp launch … dry_run=true' shows a "
            "job, and 'sbatch --test-only' what Slurm says of it"
        )
    remark(idle_now(inputs.cluster, known))
    remark(estimates_so_far(runs_dir(args.overrides)))
    found: dict[str, Choice] = {}
    searched: list[Counts] = []
    for largest in _to_search(known):
        if largest in searched:
            continue
        searched.append(largest)
        kinds = [
            replace(kind, group=replace(kind.group, count=largest[kind.name]))
            for kind in inputs.kinds
            if largest[kind.name]
        ]
        plan = best_plans(replace(inputs, kinds=kinds), replace(args, top=1)).plans[0]
        choice = Choice(plan=plan, waits_s=_wait_for(plan, known), trains_s=plan.total * inputs.run.iterations)
        found.setdefault(str(plan.parallel), choice)
    return sorted(found.values(), key=lambda choice: (choice.ends_s, choice.waits_s))


def print_choices(choices: Sequence[Choice], now_unix: float) -> None:
    """A row for each, the one that ends first first."""
    from fasop.tables.plans import ranking

    head, rows = ranking([choice.plan for choice in choices])
    first = [
        [
            clock(now_unix + choice.ends_s, now_unix),
            span(choice.waits_s) if choice.waits_s else "none",
            span(choice.trains_s, 3),
        ]
        for choice in choices
    ]
    print_table(
        [head[0], "ends", "waits", "trains", *head[1:]],
        [[row[0], *more, *row[1:]] for row, more in zip(rows, first, strict=True)],
    )


def waiting(cluster: Cluster, het: Het) -> Iterator[Waiting]:
    """What Slurm says of each set of nodes that it would start."""
    now = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for counts in sets_of(cluster):
            try:
                start = max(expected_start(request, Path(folder)) for request in _requests(cluster, counts, het))
            except SlurmSilent as error:
                raise SearchError(f"start=now: Slurm does not answer: {error}; try again") from error
            except LaunchError:  # more nodes than are up now
                continue
            seconds = max(0.0, start - now)
            yield Waiting(counts=counts, seconds=0.0 if seconds < NOW_S else seconds)


def sets_of(cluster: Cluster) -> list[Counts]:
    """All numbers of nodes of each group, or some of each where these are too many."""
    names, steps = list(cluster.groups), 1
    while True:
        each = [sorted({0, *range(group.count, 0, -steps)}) for group in cluster.groups.values()]
        sets = [dict(zip(names, counts, strict=True)) for counts in product(*each) if any(counts)]
        if len(sets) <= MOST_SETS:
            return list(sets)
        steps += 1


def _requests(cluster: Cluster, counts: Counts, het: Het) -> list[JobRequest]:
    parts = [component(name, cluster, tuple(range(count))) for name, count in counts.items() if count]
    if het is Het.hetjob:
        return [JobRequest(role="job", components=tuple(parts))]
    return [JobRequest(role="job", components=(part,)) for part in parts]


def _to_search(known: Sequence[Waiting]) -> Iterator[Counts]:
    """For each time, the sets that start by then and that none of the others contains; the soonest first."""
    times: list[float] = []
    for seconds in sorted({one.seconds for one in known}):
        if not times or seconds - times[-1] >= NOW_S:
            times.append(seconds)
    for until in [*times[: SEARCHES - 1], *times[SEARCHES - 1 :][-1:]]:
        by_then = [one.counts for one in known if one.seconds < until + NOW_S]
        yield from (one for one in by_then if not any(one != other and _within(one, other) for other in by_then))


def _within(one: Counts, other: Counts) -> bool:
    return all(count <= other[name] for name, count in one.items())


def _wait_for(plan: Plan, known: Sequence[Waiting]) -> float:
    """How long a job on the plan's nodes waits: as the set that Slurm was asked about and that has them."""
    used = {name: sum(node.name == name for node in plan.nodes) for name in known[0].counts}
    return min(one.seconds for one in known if _within(used, one.counts))


def idle_now(cluster: Cluster, known: Sequence[Waiting]) -> str:
    """Which nodes would start now, in words."""
    parts = []
    for name, group in cluster.groups.items():
        most = max((one.counts[name] for one in known if not one.seconds), default=0)
        parts.append(f"{most} of {plural(group.count, 'node')} of {name}")
    return f"free now, by Slurm: {', '.join(parts)}"


def runs_dir(words: Sequence[str]) -> Path:
    """Return the folder of the runs that a search looks at."""
    given = [word.partition("=")[2] for word in words if word.startswith("runs_dir=")]
    return Path(given[-1]) if given else usual_runs_dir()


def estimates_so_far(runs: Path) -> str | None:
    """How far Slurm's estimates were off for the last runs; None where there are none."""
    known = [
        (one.waited_s, one.expected_wait_s)
        for one in records(runs, announcement(runs))
        if one.waited_s is not None and one.expected_wait_s is not None
    ][-RUNS:]
    if not known:
        return None
    off = median(abs(waited - expected) for waited, expected in known)
    earlier = sum(waited < expected - NOW_S for waited, expected in known)
    later = sum(waited > expected + NOW_S for waited, expected in known)
    return (
        f"of the last {plural(len(known), 'run')} {earlier} began earlier than Slurm had expected and {later} later; "
        f"at the median it was off by {span(off)}"
    )


def with_first_plan(words: Sequence[str], profile: str | None) -> list[str]:
    """The words of a launch with the plan whose training would end first; says on stderr which that is."""
    from fasop.search.arguments import Arguments
    from fasop.search.inputs import read
    from fasop.tables.plans import launch_words

    args = Arguments(overrides=tuple(words), profile=profile)
    inputs = read(words, profile)
    if inputs.run.iterations > 1:  # a launch trains as long as its configuration says
        inputs = replace(inputs, run=replace(inputs.run, known=True))
    (first, *_) = rank_by_end(inputs, args)
    waits = f"waits {span(first.waits_s)}" if first.waits_s else "starts now"
    nodes, took = first.plan.parallel.node_order, span(first.trains_s, 3)
    remark(f"start=now: {nodes} {waits} and trains {took}, by Slurm's estimate and the prediction")
    (chosen,) = launch_words(words, [first.plan], {})
    return chosen
