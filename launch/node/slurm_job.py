"""A Slurm job of a run, as its agents see it from inside."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence

from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.files.locks import is_launching, launcher, owner_of
from launch.files.records import JobRecord, NodeRecord
from launch.files.run_files import read_submitted
from launch.machine import slurm_commands
from launch.machine.job_states import JobState, expanded
from launch.node.missing_run_dir import Unseen, not_started
from launch.node.peers import SILENCE_S, JobFate, OtherJob

ASK_S = 5.0
"""Between two questions to Slurm."""
READ_S = 1.0
"""Between two looks at jobs.json: the first node of a large run asks for each of a thousand others."""
LAUNCH_S = 60.0
"""A launch has submitted its other jobs by then, where nothing shows whether it goes on."""
ANSWER_S = SILENCE_S / 3
"""For each of the two commands of a question: meanwhile this node gives no sign of life."""

GRACE_ANSWER_S = 5.0
"""For the answer why a job is to end: it may be killed soon (KillWait)."""


class SlurmJob:
    """The job of this process. One of its tasks speaks with Slurm; the others learn by the run's files.

    That is the first task, and once it has ended well the first of the others.
    """

    def __init__(
        self, run: RunDir, job: str, restarts: int, nodes: tuple[int, ...], task: int, hosts: Sequence[str] = ()
    ) -> None:
        """`hosts` are the names that Slurm has for the job's nodes, by task."""
        self.id = job
        self.restarts = restarts
        self._run = run
        self._plan = run.read_plan()
        names = self._plan.node_names
        own = [names[rank] for rank in nodes]
        self._own = own
        self._before = own[:task]
        self._hosts = dict(zip(own, hosts, strict=False))
        """The host of each node, as long as the job has it."""
        self._counted = -math.inf
        self._names = names
        self._job_of: dict[str, str] = {}
        """The job of each node, as it was in jobs.json at `_read`."""
        self._unseen: dict[str, Unseen] = {}
        """The nodes that do not see the run's folder."""
        self._read = -math.inf
        self._began = time.monotonic()
        self._asked_all = -math.inf
        """When Slurm was asked for all jobs of the run, by their comment."""
        self._never_since: float | None = None
        """Since when Slurm has known no further one."""
        self._asked = -math.inf
        self._about: set[str] = set()
        self._states: dict[str, JobState] | None = None
        """What Slurm said of the jobs `_about` at `_asked`; None if it gave no answer."""

    @classmethod
    def here(cls, run: RunDir, nodes: tuple[int, ...], task: int, given: Mapping[str, str] = os.environ) -> SlurmJob:
        """`nodes` are the node ranks of the job by task, `task` is this one."""
        # In a step of a heterogeneous job SLURM_JOB_ID is each component's own; the whole job goes by the leader's.
        job = given.get("SLURM_HET_JOB_ID") or given["SLURM_JOB_ID"]
        hosts = expanded(given.get("SLURM_JOB_NODELIST", ""))
        return cls(run, job, int(given.get("SLURM_RESTART_COUNT", 0)), nodes, task, hosts)

    def other(self, name: str, not_before: float) -> OtherJob | None:
        """The job of another node, if it is not this one; as it was at most `ASK_S` ago, and not before a time.

        Of a node of this job only that it does not see the run's folder.
        """
        self._read_jobs()
        if name in self._unseen:
            return OtherJob(self._unseen[name].message(str(self._run.runs)), JobFate.over)
        if name in self._own:
            return None
        if not self._speaks():
            return OtherJob("the first node of this job asks Slurm", JobFate.lives)
        job = self._job_of.get(name)
        if job is None:
            return self._unnamed()
        if self._asked < max(not_before, time.monotonic() - ASK_S) or job not in self._about:
            self._ask()
        if self._states is None:  # asked again: a controller that restarts must not end the run
            return OtherJob(f"job {job}: Slurm does not answer", JobFate.lives)
        state = self._states.get(job)
        if state is None:
            return OtherJob(f"Slurm does not know job {job}", JobFate.over)
        fate = JobFate.over if state.over else JobFate.waits if state.pending else JobFate.lives
        return OtherJob(str(state), fate)

    def _unnamed(self) -> OtherJob:
        """A job of which nobody has written down the id: its launch is under way, or was cut off just then.

        Slurm knows by the run's comment whether it was submitted at all; what it says counts if it says so twice.
        """
        awaited = OtherJob("its job has not been submitted yet", JobFate.lives)
        launching = is_launching(self._run)
        patience = LAUNCH_S if launching is None else 0.0
        if launching or time.monotonic() - self._began < patience:
            self._never_since = None
            return awaited
        if time.monotonic() - self._asked_all >= ASK_S:
            self._asked_all = time.monotonic()
            jobs = read_submitted(self._run, len(self._names))
            try:
                comment = slurm_commands.comment_of(jobs.token)
                queued = {*slurm_commands.submitted(comment, owner_of(self._run))} - {self.id, *jobs.by_id}
            except LaunchError as error:
                print(f"Slurm was asked about the run's other jobs: {error}", flush=True)
                return awaited
            if queued or jobs.by_id.keys() - set(self._job_of.values()):
                self._never_since = None
            elif self._never_since is None:
                self._never_since = time.monotonic()
        if self._never_since is None or time.monotonic() - self._never_since < ASK_S:
            return awaited
        who = launcher(self._run)
        return OtherJob(f"its job was never submitted, because the launch ({who}) was interrupted", JobFate.over)

    def _read_jobs(self) -> None:
        if time.monotonic() - self._read < READ_S:
            return
        jobs = self._submitted()
        self._job_of = {self._names[node]: job for job, record in jobs.items() for node in record.nodes}
        if self.restarts == 0:  # what was said then may stand there still
            found = [not_started(self._run, self._plan, job, record.nodes) for job, record in jobs.items()]
            self._unseen = {name: why for unseen in found for name, why in unseen.items()}
        self._read = time.monotonic()

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self._about = self._submitted().keys() - {self.id}
        try:
            self._states = slurm_commands.job_states(self._about, ANSWER_S)
        except LaunchError as error:
            print(f"Slurm was asked about the run's other jobs: {error}", flush=True)
            self._states = None

    def may_save(self) -> bool:
        """Whether Slurm, which has asked this job to end (SIGTERM), gives it time to save first: before a preemption
        it may (GraceTime), but not after scancel, at a time limit or without an answer."""
        try:
            return slurm_commands.is_preempted(self.id, GRACE_ANSWER_S)
        except LaunchError as error:
            print(f"Slurm was asked why it ends this job: {error}", flush=True)
            return False

    def requeue(self, *, from_any: bool = False) -> None:
        """Has the job ended and started again.

        `from_any`: every task asks, since the first one may be lost, and Slurm refuses all but the fastest. The job may
        have been submitted with --no-requeue.

        Raises:
            LaunchError: Slurm does not.
        """
        if from_any:
            slurm_commands.allow_requeue(self.id)
        if from_any or self._speaks():
            slurm_commands.requeue(self.id)

    def waiting(self) -> list[str]:
        """The run's other jobs that may wait in the queue for this one; none if another task speaks for this job."""
        jobs = self._submitted().keys()
        if self.id not in jobs or not self._speaks():  # resumed meanwhile, these would be other jobs
            return []
        over = {job for job, state in (self._states or {}).items() if state.over}
        return sorted(jobs - {self.id} - over)

    def cancel_waiting(self) -> None:
        """Takes those that do out of the queue: what they wait for has failed."""
        try:
            slurm_commands.cancel(self.waiting(), only_pending=True)
        except LaunchError as error:  # printed, and the job that starts later finds the failure itself
            print(f"could not remove the run's other jobs from the queue: {error}", flush=True)

    def give_back(self, taking: Collection[str]) -> None:
        """Gives back the nodes of this job whose agents have ended well; to be called often.

        Slurm takes none back of a job once it has noticed that the node where the job's script ran is lost. `taking`:
        names of the nodes that take part, as this one does. The first of them in this job speaks.
        """
        if time.monotonic() - self._counted < ASK_S or any(name in taking for name in self._before):
            return
        self._counted = time.monotonic()
        first, *others = self._own
        done = [
            name for name in others if name in self._hosts and (own := self._own_record(name)) and own.exit_code == 0
        ]
        if not done:
            return
        given = {self._hosts.pop(name) for name in done}
        try:
            self._shrink(given, self._hosts[first])
        except LaunchError as error:  # they are given back when the job ends
            print(f"nodes {', '.join(done)} could not be given back: {error}", flush=True)

    def _shrink(self, given: Collection[str], first: str) -> None:
        has = slurm_commands.hosts_of(self.id)
        if not {*has} & {*given}:
            return
        if first not in has:
            raise LaunchError("Slurm takes no nodes back of a job that has lost its first one")
        slurm_commands.keep_only(self.id, [host for host in has if host not in given])

    def end_without_script(self) -> None:
        """Ends the job of an elastic run once none of its nodes is at work, where the first was lost and with it the
        job's script: nobody else would.

        To be called when this node has written its end. Where another is still at work, that one does so later.
        """
        if not self._before or ((first := self._own_record(self._own[0])) and first.state == "ended"):
            return
        before = self._beats()
        time.sleep(SILENCE_S)
        if any(beat != before.get(name) for name, beat in self._beats().items()):
            return
        try:
            slurm_commands.cancel([self.id])
        except LaunchError as error:
            print(f"the job could not be ended: {error}", flush=True)

    def first_job_of(self, name: str) -> JobState | None:
        """The job that had a node at first, where this one has brought it back; None where it is the same, or Slurm
        does not know it or does not answer."""
        jobs, node = self._submitted(), self._names.index(name)
        if self.id not in jobs or not jobs[self.id].joins:
            return None
        first = next(job for job, record in jobs.items() if node in record.nodes)
        if first == self.id:
            return None
        try:
            return slurm_commands.job_states([first], ANSWER_S).get(first)
        except LaunchError as error:
            print(f"Slurm was asked about job {first}: {error}", flush=True)
            return None

    def _beats(self) -> dict[str, float]:
        """The last signs of life of this job's nodes, but of those that have ended."""
        states = {name: self._run.read(self._run.node_state(name), NodeRecord) for name in self._own}
        return {name: state.beat_unix for name, state in states.items() if state and state.state != "ended"}

    def _own_record(self, name: str) -> NodeRecord | None:
        """What a node wrote in this job; None if that is of another one, or nothing."""
        state = self._run.read(self._run.node_state(name), NodeRecord)
        return state if state is not None and state.job == self.id else None

    def _speaks(self) -> bool:
        return all(
            state and state.of.restarts == self.restarts and state.state == "ended" and state.exit_code == 0
            for state in map(self._own_record, self._before)
        )

    def _submitted(self) -> dict[str, JobRecord]:
        return read_submitted(self._run, len(self._names)).by_id
