"""What a node of an elastic run does beside what every node does: it parks, has its ranks save where other nodes were
chosen, and goes on with the start that the nodes agree on."""

from __future__ import annotations

import signal
import time

from conf.run_folder.rundir import RunDir
from launch.files.records import NodeState, Start
from launch.node.elastic.claim import Claim
from launch.node.elastic.epochs import EpochEnds
from launch.node.elastic.growth import Growth
from launch.node.elastic.peer_status import REGROUPS
from launch.node.elastic.regroup import Company
from launch.node.peers import Finding
from launch.node.rank_failures import failures, lost_a_rank
from launch.node.worker_process import StopSignals, ask_all_to_save
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
        self._epochs = (
            EpochEnds(run, plan, self.company, state.started_unix)
            if choosing is not None and node_rank == plan.used[0]
            else None
        )
        self._growth = (
            Growth(run, plan, self.company, state.started_unix)
            if choosing is None and node_rank == plan.used[0]
            else None
        )

    @property
    def takes_part(self) -> bool:
        return bool(self._plan.nodes[self._node_rank].ranks)

    def look(self) -> None:
        """Looks for a request to save for other nodes."""
        self.changes = self.changes or self._run.change_request(str(self._start)).exists()

    def choose(self) -> None:
        """Asks for other nodes, if it is this node that does: at the end of an epoch, or when a lost one is back."""
        if self.changes or self._signals.save:
            return
        if self._epochs is not None:
            self._epochs.look()
        if self._growth is not None:
            self._growth.look()

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
