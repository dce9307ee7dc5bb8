"""Ends a run, and makes sure that nothing of it is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Set
from contextlib import suppress

from conf.errors import RunFolderError
from conf.run_folder.run_files import entries, read_text
from conf.run_folder.rundir import RunDir
from conf.visible import plural
from launch.control.executors.parallel_ssh import end as end_on_hosts
from launch.errors import LaunchError
from launch.files.locks import check_may_stop, is_launching, owner_of
from launch.files.records import Submitted
from launch.judge.state import State
from launch.judge.verdict import verdict_without_plan
from launch.machine import docker, processes, slurm_commands
from launch.machine.provenance import user_name
from launch.node.peers import SILENCE_S
from launch.node.worker_command import GRACE_S
from launch.observe.executors import is_here
from launch.observe.look import observe

SUBMISSION_S = 3.0
"""A submission that was under way when the run was stopped has shown its processes by then."""
LAUNCH_S = slurm_commands.TIMEOUT_S + 10.0
"""A launch that is under way has seen the request by then, unless it is held up: it looks between two submissions."""
LOOK_S = 0.1
_COMMENT = re.compile(rf"^#SBATCH --comment='{slurm_commands.COMMENT} ([0-9a-f]+)'$", re.MULTILINE)
"""In the script of a job: what it is found by."""
STOP_S = GRACE_S + 4
"""Running jobs have ended by themselves by then: their agents see the request, and end their workers."""


SAVE_S = 120.0
"""A run has saved by then, or is ended without: as long as executor.save_s gives it before a time limit."""


def save_first(run: RunDir) -> bool:
    """Has a run save a checkpoint and end; whether it has ended within `SAVE_S`. `stop` ends what is left. Raises
    LaunchError: it is another user's."""
    check_may_stop(run)
    _request(run, saves=True)
    until = time.monotonic() + SAVE_S
    while not (ended := _all_ended(run)) and time.monotonic() < until:
        time.sleep(slurm_commands.QUEUE_S)
    return ended


def stop(run: RunDir) -> str:
    """Ends everything that belongs to a run; returns what that was, in words. Takes at most some 15 s, or on Slurm
    as long as Slurm takes to end a job (its KillWait).

    The agents end their workers in order, and record it; what does not end that way is killed. An agent that has
    not started yet finds the request when it does, and so does a launch that is under way.

    Raises:
        LaunchError: it is another user's, or a process or a job cannot be ended.
    """
    check_may_stop(run)
    _request(run, saves=False)
    until = time.monotonic() + LAUNCH_S
    while is_launching(run) and time.monotonic() < until:
        time.sleep(LOOK_S)
    submitted = _submitted(run)
    if submitted is None:
        return "nothing had been started"
    if submitted.on_slurm:
        return _stop_jobs(slurm_commands.comment_of(submitted.token), owner_of(run), {job.id for job in submitted.jobs})
    if submitted.on_hosts:
        return _stop_on_hosts(run, submitted)
    if is_here(run, submitted.jobs):
        return _stop_processes(run, submitted)
    until = time.monotonic() + STOP_S
    while not observe(run).over and time.monotonic() < until:
        time.sleep(LOOK_S)
    return "its agents run on another machine and were asked to end it"


def _request(run: RunDir, saves: bool) -> None:
    request = {"unix": time.time(), "user": user_name(), "host": socket.gethostname(), "saves": saves}
    try:
        run.write_json(run.stop_request, request)
    except OSError as error:  # a full disk; one that is mounted read-only, or that root may not write
        print(
            f"{run.path}: {error.strerror}: cannot record the request to stop; the run is ended anyway", file=sys.stderr
        )


def _stop_jobs(comment: str, owner: int, known: Set[str | None]) -> str:
    """Found by their comment: also those of a submission that was cut off before it wrote them down.

    `known` are the ids in jobs.json, None for one that was not written down.
    """
    until = time.monotonic() + (SUBMISSION_S if None in known else 0.0)
    while not set(ids := slurm_commands.submitted(comment, owner)) - known and time.monotonic() < until:
        time.sleep(slurm_commands.QUEUE_S)
    with suppress(LaunchError):  # one of them starts or ends at this moment: the end below takes all that are left
        slurm_commands.cancel(ids, only_pending=True)  # what waits for a running one must not start now
    until = time.monotonic() + STOP_S
    # Agents see the request, end their workers and record it; only what is still there after a while is cancelled.
    while slurm_commands.submitted(comment, owner) and time.monotonic() < until:
        time.sleep(slurm_commands.QUEUE_S)
    slurm_commands.end(comment, owner)
    return f"{plural(len(ids), 'job')} ended ({', '.join(ids)})" if ids else "no job was left to end"


def _stop_processes(run: RunDir, submitted: Submitted) -> str:
    token = submitted.token
    found = _find(token, 0.0 if submitted.jobs else SUBMISSION_S)
    try:
        agents = {node.pid for node in observe(run).nodes if node.pid and not node.ended}
    except RunFolderError:  # they see the request, too
        agents = set()
    processes.send(agents & found, signal.SIGTERM)
    processes.wait_until_gone(token, GRACE_S + 2)
    processes.terminate(token, 1.0)
    if submitted.container == "docker":
        docker.remove_all(token)
    return f"{plural(len(found), 'process', 'es')} ended" if found else "no process was left"


def _stop_on_hosts(run: RunDir, submitted: Submitted) -> str:
    """The agents see the request; what is left then is ended through ssh. Raises LaunchError: a host cannot be reached,
    and the agent there has not written that it ended."""
    until = time.monotonic() + STOP_S
    while not _all_ended(run) and time.monotonic() < until:
        time.sleep(LOOK_S)
    names = {job.ssh: job.nodes for job in submitted.jobs if job.ssh is not None}
    ended, failed = end_on_hosts(names, submitted.token, submitted.container)
    until = time.monotonic() + (SILENCE_S + STOP_S if ended else 0.0)
    while not _all_ended(run) and time.monotonic() < until:  # an agent that was killed shows by its silence alone
        time.sleep(LOOK_S)
    with suppress(RunFolderError):
        still = {node.name for node in observe(run).nodes if not node.ended and node.state != "absent"}
        failed = {name: error for name, error in failed.items() if name in still}
    if failed:
        raise LaunchError(
            f"{'; '.join(map(str, failed.values()))}; processes of {run.name} may be left there: an agent that is "
            f"alive ends its node as soon as it sees the request"
        )
    return f"no process is left on {', '.join(names)}" + (
        f"; {plural(ended, 'process', 'es')} had to be killed" if ended else ""
    )


def _all_ended(run: RunDir) -> bool:
    try:
        return all(node.ended or not node.alive for node in observe(run).nodes)
    except RunFolderError:
        return False


def is_over(run: RunDir) -> bool:
    """Whether nothing of a run is left that could be stopped."""
    if (verdict := verdict_without_plan(run)) is not None:
        return verdict.state is not State.starting
    if not observe(run).over:  # its jobs may not be in the queue yet, or be another user's
        return False
    jobs = run.read(run.jobs, Submitted)
    if jobs is None:
        return True
    if jobs.on_slurm:
        return not slurm_commands.submitted(slurm_commands.comment_of(jobs.token), owner_of(run))
    return not processes.find(jobs.token)


def is_at_work(run: RunDir) -> bool:
    """Whether something of a run lives whose own files are damaged, so that nobody can say more of it."""
    submitted = _submitted(run)
    if submitted is None:
        return False
    if submitted.on_slurm:
        return bool(slurm_commands.submitted(slurm_commands.comment_of(submitted.token), owner_of(run)))
    return bool(processes.find(submitted.token))


def _submitted(run: RunDir) -> Submitted | None:
    """jobs.json; where that is damaged or gone, what marks the run's jobs or processes is taken from these themselves.
    Raises RunFolderError: it is damaged, and nothing else has the mark either."""
    damage: RunFolderError | None = None
    try:
        if (submitted := run.read(run.jobs, Submitted)) is not None:
            return submitted
    except RunFolderError as error:
        damage = error
    if scripts := [read_text(path) for path in entries(run.sbatch)]:
        executor, tokens = "slurm", {token for text in scripts for token in _COMMENT.findall(text)}
    else:
        own = {os.path.realpath(path) for path in (run.submitit, run.plan)}
        executor, tokens = "local", processes.tokens_of(own)
    if len(tokens) == 1:
        return Submitted(token=tokens.pop(), executor=executor, submission=0, jobs=())
    if damage is not None:
        raise damage
    return None


def _find(token: str, patience_s: float) -> set[int]:
    until = time.monotonic() + patience_s
    while not (found := processes.find(token)) and time.monotonic() < until:
        time.sleep(0.1)
    return found
