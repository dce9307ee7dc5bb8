"""What a node of an elastic run does beside what every node does: it parks, has its ranks save where other nodes were
chosen, and goes on with the start that the nodes agree on, also with lost nodes that are there again."""

from __future__ import annotations

import signal
import time

from conf.run_folder.run_files import read_tail
from conf.run_folder.rundir import RunDir
from conf.visible import plural
from launch.errors import LaunchError
from launch.files.records import NodeState, Start
from launch.files.run_files import read_joins
from launch.node.elastic.epochs import EpochEnds
from launch.node.elastic.peer_status import REGROUPS, Claim
from launch.node.elastic.regroup import Company
from launch.node.elastic.replan import replanned
from launch.node.peers import Finding
from launch.node.rank_failures import failures, lost_a_rank
from launch.node.worker_process import StopSignals, ask_all_to_save
from megatron_ext.contract.files import json_line
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import SAVED

TOLD_TO_END = 128 + signal.SIGTERM
_POLL_S = 0.1


class ElasticNode:
    """A node of an elastic run in one start."""

    def __init__(
        self,
        company: Company,
        run: RunDir,
        node_rank: int,
        start: Start,
        plan: Plan,
        state: NodeState,
        signals: StopSignals,
        claim: Claim | None = None,
        *,
        restarted: bool = False,
    ) -> None:
        """`restarted`: Slurm has started the node's job again, after its ranks saved in this start, so that the node
        takes part in the next one."""
        assert plan.elastic is not None
        self._run = run
        self._node_rank = node_rank
        self._start = start
        self._plan = plan
        self._state = state
        self._signals = signals
        self._claim = claim
        self.company = company
        choosing = plan.elastic.choosing
        self.releases = choosing is not None and choosing.release
        """Whether nodes that are not chosen end."""
        self.restarted = restarted
        self.changes = False
        """Whether ranks are to save because others than these nodes were chosen."""
        choices = Growth if choosing is None else EpochEnds
        self._choices = choices(run, plan, company, state.started_unix) if node_rank == plan.used[0] else None

    @property
    def takes_part(self) -> bool:
        return bool(self._plan.nodes[self._node_rank].ranks)

    def look(self) -> None:
        """Looks for a request to save for other nodes."""
        self.changes = self.changes or self._run.change_request(str(self._start)).exists()

    def choose(self) -> None:
        """Asks for other nodes, if it is this node that does: at the end of an epoch, or when a lost one is back."""
        if self._choices is not None and not (self.changes or self._signals.save):
            self._choices.look()

    def fails_again(self, code: int, finding: Finding | None, reason: str | None) -> bool:
        """Whether the node ended by something that would come again.

        Args:
            code: of the worker.
            finding: why the others had this node end, if they had.
            reason: why it ended, where the code does not say it.
        """
        if finding is not None:
            return not finding.again
        failed = failures(self._run, self._plan, self._node_rank, self._start)
        return reason is not None or not (code == TOLD_TO_END or lost_a_rank(code, failed))

    def next_start(self, code: int, fails_again: bool) -> tuple[Start, Plan] | None:
        """The start that follows, once the nodes have agreed on it; None where this node ends for good.

        Raises:
            Replaced: another agent runs this node.
            LaunchError: the nodes cannot go on.
        """
        changes = code == SAVED and self.company.change is not None
        if code == 0 or self._signals.end is not None or self._signals.save:
            return None
        if not changes and (code == SAVED or fails_again):
            return None
        self._state.publish(state=REGROUPS, exit_code=SAVED if changes else None)
        return self._agreed()

    def _agreed(self) -> tuple[Start, Plan] | None:
        while self._signals.end is None and not self._signals.save:
            if self._claim is not None:
                self._claim.check()
            out_of_time = self.company.out_of_time
            following = None if out_of_time else self.company.next_plan()
            if following is not None:
                return following
            self._state.beat()
            self._signals.look_for_stop(self._run)
            asked = not self.restarted and self._run.save_request(str(self._start)).exists()
            if out_of_time or asked:
                self._signals.save = True
            time.sleep(_POLL_S)
        return None

    def out_of_time(self, code: int, fails_again: bool) -> bool:
        """Whether the run's time is over, and the others were asked to save, too: also between two plans, while ranks
        start, or where some of them were lost."""
        if code == 0 or self._signals.end is not None or not self._signals.save or (code != SAVED and fails_again):
            return False
        for start in (self._start, self._start.next):  # to which others may have gone on
            ask_all_to_save(self._run, start, self._plan.node_names[self._node_rank])
        return True


LOOK_S = 1.0
"""Between two looks."""
STEADY_S = 5.0
"""A node that was lost once has to be there for so long; one that was lost again, four times as long each time."""
COST_S = 60.0
"""What a change of nodes costs at most: what is left to train has to be longer by what it gains."""
_LINES_BYTES = 16 * 1024


class Growth:
    """Whether others can train, too, as the first node of one start sees it."""

    def __init__(self, run: RunDir, plan: Plan, company: Company, began_unix: float) -> None:
        self._run = run
        self._plan = plan
        self._company = company
        self._began_unix = began_unix
        self._looked = 0.0
        self._later = {one.node for one in read_joins(run, company.submission)}
        """Nodes that were not free when the run was launched, or were lost."""
        self._back: dict[int, float] = {}
        """Since when each node that was lost is there again, on the monotonic clock."""

    def look(self) -> None:
        """Asks for nodes that are back."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        waiting = [rank for rank in self._company.available if rank not in self._plan.used]
        self._back = {rank: self._back.get(rank, now) for rank in waiting}
        if not waiting:
            return
        back = []
        for rank, since in self._back.items():
            losses = self._company.losses(rank)
            if not losses and rank not in self._later:  # the launch left it out, and a lost node brings it in
                continue
            if now - since >= STEADY_S * 4 ** max(0, losses - 1):
                back.append(rank)
        if not back:
            return
        nodes = sorted([*self._plan.used, *back])
        try:
            plan = replanned(self._company.measured_plan(), nodes)
        except LaunchError:  # no plan for more nodes either
            return
        more = [rank for rank in plan.used if rank not in self._plan.used]
        if more and self._left_s() * (1.0 - len(self._plan.ranks) / len(plan.ranks)) > COST_S:
            names = ", ".join(self._plan.node_names[rank] for rank in more)
            back_again = all(self._company.losses(rank) for rank in more)
            how = "came back" if back_again else "joined"
            self._company.ask_for(nodes, f"{plural(len(more), 'node')} {how}: {names}")

    def _left_s(self) -> float:
        """Seconds that these nodes would still train; 0 as long as this start has logged nothing."""
        try:
            content, _ = read_tail(self._run.metrics, _LINES_BYTES)
        except FileNotFoundError:
            return 0.0
        lines = (json_line(text) for text in reversed(content.decode(errors="replace").splitlines()))
        line = next((found for found in lines if found is not None and "elapsed_ms" in found), None)
        if line is None or line["unix"] <= self._began_unix:
            return 0.0
        train = self._plan.train
        total = train.samples or train.iterations * self._plan.global_batch_size
        batch = line.get("global_batch_size", self._plan.global_batch_size)
        return float((total - line["consumed_samples"]) / batch * line["elapsed_ms"] / 1e3)
