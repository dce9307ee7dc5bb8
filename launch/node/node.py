"""A node of a run, for one start: prepares its container, runs its worker, reports how it goes, leaves nothing running.

Whatever happens, the worker and its ranks end with it: it ends them when it has to, when another node failed or when
the run is stopped. When time is running out (SIGUSR2, or SIGTERM before a preemption with GraceTime) it has the ranks
save, and on Slurm its job started again.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from conf.run_folder.run_files import appended
from launch.errors import LaunchError
from launch.files.records import BEAT_S, REQUEUED, NodeState, Start
from launch.machine.container_runtimes import Command, SlurmStep
from launch.machine.gpu_sampler import gpu_sampling
from launch.node.container_setup import Setup
from launch.node.elastic.elastic_node import TOLD_TO_END, ElasticNode
from launch.node.elastic.joins import Joins, cancel_joins
from launch.node.elastic.peer_status import PARKED, Claim
from launch.node.elastic.regroup import Company
from launch.node.own_caches import with_own_caches
from launch.node.peers import SILENCE_S, Finding, Peers, watched
from launch.node.rank_failures import failures, only_lost_others
from launch.node.run_notices import AlarmWatch, note_requeue, note_restart, notify_if_last
from launch.node.settings import NodeSettings
from launch.node.slurm_job import SlurmJob
from launch.node.worker_command import GRACE_S, ModuleWorker, given_environment, job_info
from launch.node.worker_process import StopSignals, Wanted, WorkerProcess, ask_all_to_save, process_to_start
from launch.tracking.writer_processes import Writers, written
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import AGENT, SAVED

INTERRUPT_GRACE_S = 0.5
"""The same after SIGINT: submitit kills its tasks 1 s after that signal."""
WRITTEN_S = 15.0
"""For trackers to write what was logged last, once the ranks have ended."""
_SAVED_IN_TIME = "its ranks saved because their time ran out or a signal asked them to"
REQUEUE_S = 120.0
"""Slurm has ended a job that is to be started again by then."""
_POLL_S = 0.1
_LOOK_S = 0.3
_NOT_FOUND = 127
"""The exit code of shells for a command that is not there."""
_NOT_READY = 1
_Found = TypeVar("_Found")


class NodeAgent:
    """One node of the run, for one start."""

    def __init__(
        self,
        settings: NodeSettings,
        task: int,
        slurm: SlurmJob | None,
        signals: StopSignals,
        start: Start,
        plan: Plan,
        claim: Claim | None = None,
        *,
        restarted: bool,
    ) -> None:
        """`restarted`: Slurm has started the node's job again. `claim`: of a node of an elastic run."""
        self._claim = claim
        self._run = settings.run
        self._settings = settings
        self._node_rank = node_rank = settings.nodes[task]
        self._het_group = settings.het_groups[task]
        self._slurm = slurm
        self._signals = signals
        self._start = start
        self._plan = plan
        names = self._plan.node_names
        self._name = names[node_rank]
        ask = slurm.other if slurm else lambda _name, _time: None
        job_id, holds = slurm.id if slurm else None, lambda: claim is None or claim.holds
        self._state = NodeState(settings.run, self._name, node_rank, self._start, job_id, holds=holds)
        if slurm is not None and restarted and node_rank == plan.used[0]:
            note_restart(settings.run, start, len(names), slurm.id)
        own = settings.run, node_rank, start, plan
        self._elastic: ElasticNode | None = None
        self._peers: Peers | Company
        if plan.elastic is None:
            self._peers = Peers(settings.run, watched(names, node_rank, settings.nodes), start, settings.meet_s, ask)
        else:
            self._peers = Company(*own, settings.meet_s, together=settings.nodes, restarted=restarted)
            self._elastic = ElasticNode(self._peers, *own, self._state, signals, claim, restarted=restarted)
        self._joins = Joins(settings.run, plan, start, together=settings.nodes, job=job_id, group=settings.group_writes)
        self._finding: Finding | None = None
        self._found_unix: float | None = None
        self.reason: str | None = None
        """Why the node ended, where its exit code does not say it."""
        self.following: tuple[Start, Plan] | None = None
        """The start of an elastic run that follows this one."""
        self._next_look = 0.0
        self._weighs = (
            slurm is not None
            and settings.resumable
            and isinstance(settings.worker, ModuleWorker)
            and (settings.container is None or settings.container.runtime.child)
        )
        """Whether this agent decides what its worker makes of a SIGTERM."""
        self._out_of_time = False
        """Whether an elastic run has saved because its time runs out."""

    def run(self) -> int:
        """Starts the worker unless the run is over already; returns its exit code, negative for a signal.

        Beside its worker, three causes end a node: it is told to (`_signals.end`), time runs out (`_signals.save`), or
        another node failed (`_finding`). Only after the last two is a job started again.

        Raises:
            Replaced: another agent runs the node; nothing of this one runs on.
        """
        try:
            code = TOLD_TO_END if self._elastic is not None and self._elastic.restarted else self._work()
        except LaunchError as error:  # something of the worker does not even end when it is killed
            code = self._failed("could not clean up", error)
        else:
            if self._elastic is not None:
                code = self._follow_others(self._elastic, code)
        if self.following is not None:
            return code
        self._await_finding(code)
        if self._slurm is not None and self._goes_on(self._slurm, code) and self._started_again(self._slurm):
            code = TOLD_TO_END
        self._end(code)
        return code

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.check()

    def _follow_others(self, elastic: ElasticNode, code: int) -> int:
        """Agrees with the other nodes of an elastic run on the start that follows, if one does.

        Returns the node's exit code: that it has saved, where time ran out and a checkpoint is there.
        """
        try:
            self.following = elastic.next_start(code, elastic.fails_again(code, self._finding, self.reason))
        except LaunchError as error:
            self.reason = str(error)
        if self.following is not None:
            return code
        fails_again = elastic.fails_again(code, self._finding, self.reason)
        self._out_of_time = elastic.out_of_time(code, fails_again)
        if not self._out_of_time:
            return code
        self.reason = None
        return SAVED if self._run.latest_checkpoint.exists() else code  # what was saved before is gone on from

    def _end(self, code: int) -> None:
        """Says how the node ended, and has the jobs that only wait for it end, too, where it ended for good."""
        self._check_claim()
        saves = signal.SIGUSR2 if self._signals.save else None
        failed = self._finding is not None and self.reason is not None
        stopped = self._signals.end or (signal.SIGTERM if failed else saves)
        # After SIGTERM Slurm may be about to start this job again, and the others with it.
        may_come_back = self._signals.end is not None and self._settings.resumable
        for_good = code != 0 and not may_come_back and not self._settings.for_itself
        if self._slurm is not None and self._elastic is not None and (for_good or self._trained(code)):
            cancel_joins(self._run, self._start.submission)
        self._state.publish(
            state="ended",
            exit_code=code,
            stopped=stopped.name if stopped else None,
            stopped_unix=min(filter(None, (self._signals.end_unix, self._found_unix)), default=None),
            reason=self.reason,
            withdrew=self._slurm.waiting() if self._slurm is not None and for_good else [],
            ended_unix=time.time(),
        )
        if self._slurm is not None and for_good:
            self._slurm.cancel_waiting()
        notify_if_last(self._run, self._name, self._start, code)
        if self._slurm is not None and self._elastic is not None:
            self._slurm.end_without_script()

    def _trained(self, code: int) -> bool:
        return code == 0 and self._elastic is not None and self._elastic.takes_part

    def _work(self) -> int:
        if self._elastic is None and self._start.restarts > self._settings.max_requeues:
            self.reason = f"was restarted more often than executor.max_requeues={self._settings.max_requeues} allows"
            return TOLD_TO_END
        self._look_around()
        if self._elastic is not None and not self._elastic.takes_part:
            return self._park(self._elastic)
        container = self._settings.container
        # It is held until the worker has ended.
        with nullcontext() if container is None else Setup(container, self._node_rank) as setup:
            try:
                ready = self._awaited(lambda: setup is None or self._prepared(setup))
            except LaunchError as error:
                return self._failed("could not prepare its container", error)
            if not ready:
                return TOLD_TO_END
            command = self._settings.worker.command(self._run, self._node_rank, str(self._start))
            try:
                given = self._environment()
            except LaunchError as error:
                return self._failed("could not start its worker", error)
            logs = self._plan.ranks[-1].node == self._node_rank
            with (
                gpu_sampling(self._run, self._name, self._settings.gpu_interval_s, given),
                written(self._run, self._name, self._settings.trackers if logs else (), given) as writers,
            ):
                in_step = container is not None and container.runtime.in_step
                step = SlurmStep.own(os.environ, self._het_group) if in_step else None
                name = "" if setup is None else setup.name
                code = self._run_worker(process_to_start(container, name, command, given, os.environ, step))
                self._let_finish(writers)
                return code

    def _park(self, elastic: ElasticNode) -> int:
        """Takes no part until the run is over, or the nodes need a new plan."""
        if elastic.releases:
            return 0
        self._state.publish(state=PARKED)
        return 0 if self._awaited(lambda: elastic.company.over) else TOLD_TO_END

    def _let_finish(self, writers: Writers) -> None:
        """Waits for the trackers; a run that is being stopped does not."""
        writers.finish()
        until = time.monotonic() + WRITTEN_S
        while writers.busy and time.monotonic() < until:
            if self._ending():
                until = min(until, time.monotonic() + INTERRUPT_GRACE_S)
            self._pause()

    def _environment(self) -> dict[str, str]:
        """Returns what the worker's environment has beside what it inherits."""
        settings = self._settings
        copied = {name: os.environ[name] for name in settings.environment_from if name in os.environ}
        given = copied | given_environment(settings.environment, self._plan, self._node_rank, str(self._start))
        if self._slurm is not None and "CUDA_VISIBLE_DEVICES" in os.environ:  # here it names the job's GPUs
            given["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        if self._weighs:
            given[AGENT] = str(os.getpid())
        return with_own_caches(given, self._run, self._name, inherits=settings.container is None)

    def _ending(self) -> bool:
        """Whether the worker is not to go on: it is asked to end, and killed if it does not."""
        return self._signals.end is not None or (self._finding is not None and not self._settings.for_itself)

    def _awaited(self, look: Callable[[], _Found]) -> _Found | None:
        """What `look` gives once that is true; None when the node has to end before."""
        while not self._ending() and not self._signals.save:
            if found := look():
                return found
            self._pause()
        return None

    def _prepared(self, setup: Setup) -> bool:
        ready = setup.step()
        self._state.prepares(setup.doing)
        if ready and setup.image is not None:
            self._state.publish(image=setup.image)
        return ready

    def _run_worker(self, command: Command) -> int:
        run, rank, name = self._run, self._node_rank, self._name
        try:
            with appended(run.node_out(name)) as out, appended(run.node_err(name)) as err:
                out.write(job_info(self._plan, self._settings.model, rank).encode())
                out.flush()
                self._check_claim()
                worker = WorkerProcess(command, rank, out, err, group_writes=self._settings.group_writes)
        except FileNotFoundError:  # for example a profiler, which only its nodes can have
            self._complain(f"{command.argv[0]}: no such command on {socket.gethostname()}")
            return _NOT_FOUND
        try:
            self._state.publish(state="running")
            self._signals.weighs = self._weighs
            self._watch(worker)
        finally:
            self._signals.weighs = False
            code = worker.clear()
        self._weigh()
        changes = self._elastic is not None and self._elastic.company.change is not None and not self._signals.save
        if code == SAVED and not changes:
            # Slurm's signal reaches the ranks, too, and they may be faster than this process.
            self._signals.save = True
            ask_all_to_save(self._run, self._start, self._name)
        return code

    def _failed(self, what: str, error: LaunchError) -> int:
        """Says why the node cannot run its worker, and returns its exit code."""
        self._complain(str(error))
        self.reason = f"{what}: {error}"
        return _NOT_READY

    def _complain(self, text: str) -> None:
        with appended(self._run.node_err(self._name)) as err:
            err.write(f"{text}\n".encode())

    def _watch(self, worker: WorkerProcess) -> None:
        """Returns when the worker has ended, or is to be killed, because it did not end although it was asked to or
        because the other nodes wait for this one."""
        alarms = AlarmWatch(self._run, self._name) if self._plan.ranks[-1].node == self._node_rank else None
        save_by: float | None = None
        kill_at: float | None = None
        next_request = 0.0
        while not worker.ended:
            now = time.monotonic()
            self._state.beat(worker.stopped)
            if alarms is not None:
                alarms.look()
            if kill_at is None:
                self._look_around()
                self._choose_nodes()
                wanted = self._wanted()
                if wanted is Wanted.saved:
                    if save_by is None:
                        save_by = now + (math.inf if self._signals.stop_saves else self._settings.save_s - GRACE_S)
                    if self._signals.save:
                        ask_all_to_save(self._run, self._start, self._name)
                    if now >= next_request:  # again: a worker that is still starting does not listen yet
                        worker.ask_to_save()
                        next_request = now + 1.0
                if self._finding is not None and self.reason is None and worker.listens:  # examined for itself
                    self.reason = f"ended because {self._finding.reason}"
                    worker.ask_to_end()
                if wanted is Wanted.killed:
                    return
                if wanted is Wanted.ended or (wanted is Wanted.saved and save_by is not None and now > save_by):
                    worker.ask_to_end()
                    kill_at = now + (INTERRUPT_GRACE_S if self._signals.end is signal.SIGINT else GRACE_S)
            elif now > kill_at:
                return
            time.sleep(_POLL_S)

    def _wanted(self) -> Wanted:
        """What is wanted of the worker.

        | cause | the worker is to be |
        | --- | --- |
        | another node of an elastic run failed | killed: the others wait for this node |
        | the run is stopped, or another node failed | ended |
        | time runs out, or an elastic run goes on with other nodes | saved; ended, if it saves no checkpoints |
        | none of these | left alone |
        """
        if self._finding is not None and self._elastic is not None:
            return Wanted.killed
        if self._ending():
            return Wanted.ended
        if self._signals.save or (self._elastic is not None and self._elastic.changes):
            return Wanted.saved if self._settings.resumable else Wanted.ended
        return Wanted.left_alone

    def _choose_nodes(self) -> None:
        """Asks for other nodes of an elastic run, and gives back those that were not chosen."""
        if self._elastic is not None:
            self._elastic.choose()
            if self._slurm is not None and self._node_rank == self._plan.used[0] and not self._elastic.releases:
                self._joins.look(self._elastic.company)
            if self._elastic.releases and self._slurm is not None:
                self._slurm.give_back([self._plan.node_names[rank] for rank in self._plan.used])

    def _pause(self) -> None:
        """Waits for a moment, in which the node gives a sign of life and looks around."""
        self._state.beat()
        self._look_around()
        time.sleep(_POLL_S)

    def _weigh(self) -> None:
        """Has the ranks save where SIGTERM has come and leaves time for it; else the node ends."""
        if not self._signals.asked:
            return
        self._signals.asked = False
        self._signals.look_for_stop(self._run)
        if self._signals.end is None and self._slurm is not None and self._slurm.may_save():
            self._signals.save = True
        elif not self._signals.stop_saves:
            self._signals.note_end(signal.SIGTERM)

    def _look_around(self) -> None:
        """Ends this node too when the run is being stopped, or another node has failed or is lost."""
        self._weigh()
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_S
        self._check_claim()
        self._signals.look_for_stop(self._run)
        self._signals.save = self._signals.save or self._run.save_request(str(self._start)).exists()
        if self._elastic is not None:
            self._elastic.look()
        if self._signals.end is None and self._finding is None:
            self._finding = self._peers.look()
            if self._finding is not None and not self._settings.for_itself:
                self._found_unix = time.time()
                self.reason = f"ended because {self._finding.reason}"

    def _await_finding(self, code: int) -> None:
        """Waits for the reason where ranks ended because others are gone: they notice that within moments, but it takes
        longer until it is seen which node failed."""
        if code in (0, SAVED) or len(self._plan.nodes) == 1 or self._elastic or self._finding or self._signals.end:
            return
        failed = failures(self._run, self._plan, self._node_rank, self._start)
        if not only_lost_others(self._run, self._plan, self._node_rank, failed, self._state.started_unix):
            return
        until = time.monotonic() + SILENCE_S + 2 * BEAT_S
        while not self._ending() and (time.monotonic() < until or self._peers.undecided):
            self._pause()

    def _goes_on(self, slurm: SlurmJob, code: int) -> bool:
        """Whether the job is to be started again; if that is wanted in vain, `reason` says why."""
        unfinished = code != 0 and not self._signals.end
        behind = unfinished and self._finding is not None and self._finding.again
        out_of_time = unfinished and self._finding is None and self._signals.save
        wanted = behind or out_of_time if self._elastic is None else unfinished and self._out_of_time
        if not wanted or self._run.stop_request.exists():
            return False
        if not self._settings.resumable:
            self.reason = "cannot be resumed, because it saves no checkpoints (train.checkpoint=false)"
        elif code != SAVED and not behind and self._run.metrics.exists() and not self._run.latest_checkpoint.exists():
            self.reason = (
                f"could not save in time and has no earlier checkpoint (executor.save_s={self._settings.save_s:g})"
            )
        elif slurm.restarts >= self._settings.max_requeues:
            self.reason = (
                f"has already been restarted as often as executor.max_requeues={self._settings.max_requeues} allows"
            )
        else:
            return True
        return False

    def _started_again(self, slurm: SlurmJob) -> bool:
        """Asks Slurm to start the job again, and waits to be ended for that; False, and `reason`, if it does not."""
        why = self._finding.reason if self._finding is not None else _SAVED_IN_TIME
        if self._elastic is not None:
            cancel_joins(self._run, self._start.submission, self._settings.nodes)
            if self._taken_back(slurm):
                return False
        note_requeue(self._run, self._start.next, why)
        self._state.publish(state=REQUEUED)
        try:
            slurm.requeue(from_any=self._elastic is not None)
        except LaunchError as error:
            self.reason = f"could not be started again: {error}"
            if self._elastic is None:
                return False
        until = time.monotonic() + (REQUEUE_S if self.reason is None else SILENCE_S)
        while time.monotonic() < until:
            if self._signals.end:  # Slurm ends the job: what happens to this task no longer matters
                os._exit(TOLD_TO_END)
            time.sleep(_POLL_S)
        self.reason = self.reason or f"was not started again by Slurm within {REQUEUE_S:g} s"
        return False

    def _taken_back(self, slurm: SlurmJob) -> bool:
        """Whether the job that had this node at first decides whether it is started again, with all its nodes. Does not
        return where it is."""
        until = time.monotonic() + REQUEUE_S
        lent = False
        while time.monotonic() < until and (first := slurm.first_job_of(self._name)) is not None and not first.over:
            lent = True
            if first.pending:
                self._state.publish(state=REQUEUED)
            if first.pending or self._signals.end:
                os._exit(0)
            self._state.beat()
            time.sleep(_LOOK_S)
        return lent
