"""How the nodes of an elastic run agree on the next plan when a node or a rank is lost, by files in the run's folder.

Every node that notices a loss ends its ranks and says that it waits. When each of the others waits, too, or is known to
be gone, the first of those that wait writes the plan of the next start. Only one process can (the file is made by a
link, which fails where there is one), and all follow what it wrote, also one that was thought gone and was not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conf.errors import RunFolderError
from conf.run_folder.run_files import parse_json, read_text
from conf.run_folder.rundir import RunDir
from conf.visible import plural
from launch.errors import LaunchError
from launch.files.records import ChangeRecord, NodeRecord, Start
from launch.files.run_files import planned_start
from launch.node.elastic.peer_status import SILENCE_S, Fellow, Standing, created
from launch.node.elastic.replan import of_start, replanned, with_measured
from launch.node.peers import Finding
from megatron_ext.contract.files import json_line, write_atomic
from megatron_ext.contract.kept import newest as newest_kept
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import checkpoint_iteration

RESTART_S = 60.0
"""A node whose job Slurm starts again waits for the others' jobs so long; those that come later are taken in then."""
TOGETHER_S = 60.0
"""The same for a node of one's own job that does not begin; if it comes later, the run takes it in."""
MOST_IN_VAIN = 3
"""Starts in a row with the same nodes and from the same checkpoint; one more would end as they did."""


def newest(run: RunDir, submission: int) -> tuple[Start, Plan]:
    """The newest start of a submission that has a plan, and that plan."""
    start = planned_start(run, submission)
    return start, _read(run, start) or run.read_plan()


def others_train(run: RunDir, start: Start, plan: Plan) -> bool:
    """Whether nodes are at work in a start: one whose job Slurm starts again later waits until they take it in."""
    records = (run.read(run.node_state(plan.node_names[rank]), NodeRecord) for rank in plan.used)
    there = (one for one in records if one is not None and one.of == start and one.state == "running")
    return any(time.time() - one.beat_unix < SILENCE_S for one in there)


def _read(run: RunDir, start: Start) -> Plan | None:
    path = run.plan_of(str(start))
    try:
        return Plan.parse(parse_json(read_text(path), str(path)), run.path)
    except FileNotFoundError:
        return None


class Company:
    """The other nodes, for one start of an elastic run."""

    def __init__(
        self,
        run: RunDir,
        node_rank: int,
        start: Start,
        plan: Plan,
        meet_s: float,
        *,
        together: Collection[int] = (),
        restarted: bool = False,
    ) -> None:
        """`together`: nodes of the same job, whose agents start at once. `restarted`: Slurm has started this node's job
        again, after its ranks saved; the others may not be back."""
        self._run = run
        self._node_rank = node_rank
        self._start = start
        self._plan = plan
        self._restarted = restarted
        self.submission = start.submission
        meet_s = min(meet_s, RESTART_S) if restarted else meet_s
        soon_s = min(meet_s, TOGETHER_S)
        waits = {rank: soon_s if rank in together else meet_s for rank in plan.used}  # the others have had their time
        self._fellows = {
            rank: Fellow(run, name, start.submission, waits.get(rank, 0.0))
            for rank, name in enumerate(plan.node_names)
            if rank != node_rank
        }

    undecided = False
    """What befalls another node decides nothing about this one (`Peers.undecided`)."""

    def look(self) -> Finding | None:
        """Why this node's ranks cannot go on, if they cannot."""
        if self._run.plan_of(str(self._start.next)).exists():
            return Finding("the others have a new plan", again=True)
        for rank, found in self._standings().items():
            name = self._plan.nodes[rank].name
            if found is Standing.waits:
                return Finding(f"node {name} waits for a new plan", again=True)
            if found is Standing.failed:
                return Finding(f"node {name} failed", again=False)
            if found is Standing.gone and self._plan.nodes[rank].ranks:
                return Finding(f"node {name} was lost", again=True)
        return None

    @property
    def over(self) -> bool:
        """Whether all that take part have done so."""
        found = self._standings()
        return all(found.get(rank) in (Standing.done, Standing.saved) for rank in self._plan.used)

    @property
    def out_of_time(self) -> bool:
        """Whether a node has ended because time runs out; the others are to end, too."""
        return Standing.saved in self._standings().values()

    @property
    def change(self) -> ChangeRecord | None:
        """The nodes to go on with once all have saved, where others than those of the plan were chosen."""
        return self._run.read(self._run.change_request(str(self._start)), ChangeRecord)

    def ask_for(self, nodes: Sequence[int], reason: str) -> None:
        """Has all nodes save, and go on with these."""
        self._run.write_json(
            self._run.change_request(str(self._start)), {"nodes": list(nodes), "reason": reason, "unix": time.time()}
        )

    @property
    def available(self) -> list[int]:
        """Nodes that take part, or could."""
        found = self._standings()
        there = [rank for rank, one in found.items() if one in (Standing.working, Standing.parked)]
        return sorted([self._node_rank, *there])

    @property
    def lost(self) -> list[int]:
        """Nodes that take no part and show no sign of life."""
        found = self._standings()
        return sorted(rank for rank, one in found.items() if one is Standing.gone and rank not in self._plan.used)

    def losses(self, rank: int) -> int:
        """How often a node was left out since the run was submitted, having trained before."""
        name = self._plan.node_names[rank]
        return sum(name in line["nodes_before"] and name not in line["nodes"] for line in self._earlier())

    def next_plan(self) -> tuple[Start, Plan] | None:
        """The next start and its plan, once there is one. Raises LaunchError: there will be none."""
        start = self._start.next
        if (made := _read(self._run, start)) is not None:
            self._show(made)
            return start, made
        found = self._standings(doubted=True)
        names = self._plan.node_names
        if failed := [rank for rank, one in found.items() if one is Standing.failed]:
            raise LaunchError(f"ended because node {names[failed[0]]} failed")
        if any(one in (Standing.working, Standing.coming) for one in found.values()):
            return None
        here = sorted([self._node_rank, *(rank for rank, one in found.items() if one in _HERE)])
        waiting = [rank for rank, one in found.items() if one in (Standing.waits, Standing.ready)]
        if self._node_rank != min([self._node_rank, *waiting]):
            return None
        change = self.change
        nodes = self._next_nodes(here, change)
        plan = replanned(self.measured_plan(), nodes)
        iteration = self._goes_on_from(here)
        self._check(plan.used, iteration)
        if self._restarted:  # all were to save in whichever start they were, and have
            self._run.save_request(str(start)).unlink(missing_ok=True)
        if not created(self._run.plan_of(str(start)), _text(plan)):
            return None  # what another one made is read at the next look
        self._show(plan)
        reason = change.reason if change is not None and nodes == sorted(change.nodes) else None
        self._note(start, plan, iteration, reason)
        return start, plan

    def measured_plan(self) -> Plan:
        """The plan of this start, with what its replicas have been measured to take."""
        return with_measured(self._plan, of_start(_decided(self._run), self._start))

    def _next_nodes(self, here: list[int], change: ChangeRecord | None) -> list[int]:
        """Those that were chosen, if all are here. Where nodes are chosen, a loss brings no others in as long as enough
        are left: the next choice does."""
        if change is not None and {*change.nodes} <= {*here}:
            return sorted(change.nodes)
        elastic = self._plan.elastic
        assert elastic is not None
        kept = [rank for rank in here if rank in self._plan.used] if elastic.choosing is not None else here
        return kept if len(kept) >= elastic.min_nodes else here

    def _show(self, plan: Plan) -> None:
        """Whoever looks at the run reads plan.json, which the node that made the plan may have had no time to write."""
        if self._run.read_plan() != plan:
            write_atomic(self._run.plan, _text(plan))

    def _standings(self, *, doubted: bool = False) -> Mapping[int, Standing]:
        """Returns the standing of each node, by node rank."""
        return {
            rank: fellow.look(self._start, doubted=doubted, restarted=self._restarted)
            for rank, fellow in self._fellows.items()
        }

    def _goes_on_from(self, here: Sequence[int]) -> int:
        """The iteration of the newest checkpoint, on disk or in the memory of these nodes."""
        on_disk = saved(self._run)
        if self._plan.train.save_memory is None:
            return on_disk
        kept = newest_kept(self._plan.files, [self._plan.node_names[rank] for rank in here], str(self._start))
        return max(on_disk, 0 if kept is None else kept.at.iteration)

    def _check(self, here: Sequence[int], iteration: int) -> None:
        elastic = self._plan.elastic
        assert elastic is not None
        if len(here) < elastic.min_nodes:
            raise LaunchError(
                f"cannot continue: {plural(len(here), 'node')} left, fewer than elastic.min_nodes={elastic.min_nodes}"
            )
        names, last = self._plan.node_names, self._earlier()[-MOST_IN_VAIN:]
        before = [([names.index(name) for name in line["nodes"]], line["iteration"]) for line in last]
        if before == [([*here], iteration)] * MOST_IN_VAIN:
            raise LaunchError(f"was started {MOST_IN_VAIN} times on the same nodes without saving anything")

    def _earlier(self) -> list[dict[str, Any]]:
        """The lines of decisions.jsonl about each later start of this submission."""
        lines, own = _decided(self._run), self._start.submission
        return [line for line in lines if "nodes" in line and Start.parse(line["start"]).submission == own]

    def _note(self, start: Start, plan: Plan, iteration: int, reason: str | None) -> None:
        """A line of decisions.jsonl (docs/formats.md)."""
        names, before = plan.node_names, self._plan
        lost = [f"node {names[rank]} was lost" for rank in before.used if rank not in plan.used]
        again = [f"node {names[rank]} is back" for rank in plan.used if rank not in before.used]
        why = "the run was started again" if self._restarted else "a rank was lost"
        cut = "-".join(map(str, plan.partition))
        anew = [] if plan.partition == before.partition else [f"layers by stage are {cut} now"]
        line = {
            "iteration": iteration,
            "unix": time.time(),
            "start": str(start),
            "nodes_before": [names[rank] for rank in before.used],
            "nodes": [names[rank] for rank in plan.used],
            "shares_before": list(before.micro_batches),
            "shares": list(plan.micro_batches),
            "reason": reason or "; ".join([*(lost or [why]), *again, *anew]),
        }
        _append(self._run.decisions, json.dumps(line))


_HERE = (Standing.waits, Standing.ready, Standing.parked)


def _text(plan: Plan) -> str:
    return json.dumps(plan.as_json(), indent=1) + "\n"


def saved(run: RunDir) -> int:
    """Iteration of the newest checkpoint on disk; 0 where there is none."""
    with suppress(FileNotFoundError, RunFolderError):
        return checkpoint_iteration(read_text(run.latest_checkpoint).strip()) or 0
    return 0


def _decided(run: RunDir) -> list[dict[str, Any]]:
    """The lines of decisions.jsonl but for damaged ones, such as one that a rank was writing when it was killed."""
    try:
        lines = read_text(run.decisions, errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [found for line in lines if line.endswith("\n") and (found := json_line(line)) is not None]


def _append(path: Path, line: str) -> None:
    """Adds a line, in the place of one that was cut short."""
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(f"{line}\n".encode())
