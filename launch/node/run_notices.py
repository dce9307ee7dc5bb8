"""What a node agent finds out beside its work: why Slurm has started the run again, and that the run has ended."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.files.records import NodeRecord, Start
from launch.files.run_files import read_submitted
from launch.machine import processes, slurm_commands
from launch.machine.job_states import JobState, compressed
from launch.machine.sinfo import parse
from launch.node.peers import SILENCE_S

TOLD_S = 60.0
"""So long a node waits at its end for that."""
ALARMS_S = 300.0
"""Between two looks for alarms, each of which takes some 0.3 CPU seconds."""


def notify_if_last(run: RunDir, node: str, start: Start, code: int) -> None:
    """Is called when the node has written its end. Where two nodes end at the same moment both may be the last, and
    `launch.on_end` tells once."""
    if not run.notify.is_file() or _others_at_work(run, node, start, code):
        return
    with suppress(subprocess.TimeoutExpired):
        _telling(run, node).wait(TOLD_S)


def _telling(run: RunDir, node: str, *words: str) -> subprocess.Popen[bytes]:
    """Starts a process that tells of the run."""
    environment = {name: value for name, value in os.environ.items() if name not in processes.OF_A_RUN}
    return processes.helper(run, node, ["launch.on_end", str(run.path), *words], environment, outlives=True)


class AlarmWatch:
    """Has a process of its own look every few minutes whether something happens to the run that is to be told."""

    def __init__(self, run: RunDir, node: str) -> None:
        self._run, self._node = run, node
        self._process: subprocess.Popen[bytes] | None = None
        self._next = time.monotonic() + ALARMS_S

    def look(self) -> None:
        """Is called all the time."""
        if time.monotonic() < self._next or (self._process is not None and self._process.poll() is None):
            return
        self._next = time.monotonic() + ALARMS_S
        if self._run.notify.is_file():
            with suppress(OSError):
                self._process = _telling(self._run, self._node, "alarms")


def _others_at_work(run: RunDir, node: str, start: Start, code: int) -> bool:
    """A node that has not come is waited for, unless this one has failed."""
    plan = run.read_plan()
    for name in (plan.nodes[rank].name for rank in plan.used):
        if name == node:
            continue
        try:
            state = run.read(run.node_state(name), NodeRecord)
        except RunFolderError:
            continue
        if state is None or state.of < start:
            if code == 0:
                return True
        elif state.state != "ended" and time.time() - state.beat_unix < SILENCE_S:
            return True
    return False


ATTEMPTS, BETWEEN_S = 5, 3.0
"""The accounting lags behind."""
FAILED = {"NODE_FAIL": "failed", "BOOT_FAIL": "did not boot"}
"""What the hosts of a job did, by its state."""
_OTHERS = {
    "PREEMPTED": "made room for another job",
    "TIMEOUT": "had reached its time limit",
    "REQUEUED": "was put back into the queue, by a preemption or by scontrol requeue",
}


def note_requeue(run: RunDir, start: Start, reason: str) -> None:
    """Writes why an agent asks Slurm to start its job again, so that the reason is known while the job waits.

    `start` is the one that follows. Of several agents that ask, the first one's reason stays.
    """
    if not run.restarted(str(start)).exists():
        run.write_json(run.restarted(str(start)), {"unix": time.time(), "reason": _with_hosts(run, reason)})


def _with_hosts(run: RunDir, text: str) -> str:
    """Puts its host behind each node that the text names: in the next start the node may be on another one."""

    def placed(found: re.Match[str]) -> str:
        record = run.read(run.node_state(found[1]), NodeRecord)
        host = None if record is None else record.host
        return found[0] if host in (None, found[1]) else f"{found[0]} on {host}"

    return re.sub(r"\bnode ([\w.-]+)", placed, text)


def note_restart(run: RunDir, start: Start, nodes: int, job: str) -> threading.Thread:
    """Finds out why Slurm started the run again and writes it, in a thread: the run need not wait for that.

    What an agent wrote when it asked for this start says more than that the job was put back into the queue, and stays
    unless Slurm names a host that failed.
    """
    thread = threading.Thread(target=_note, args=(run, start, nodes, job, time.time()), daemon=True)
    thread.start()
    return thread


def _note(run: RunDir, start: Start, nodes: int, job: str, unix: float) -> None:
    for attempt in range(ATTEMPTS):
        try:
            ids = read_submitted(run, nodes).by_id
            found = restart_cause(ids, start, job)
        except (LaunchError, RunFolderError) as error:  # then only the restart itself is reported
            print(f"why the run was started again is not known: {error}", flush=True)
            return
        if found is not None:
            if found.failed or not run.restarted(str(start)).exists():
                record = {"unix": unix, "reason": found.reason, "hosts": found.hosts}
                run.write_json(run.restarted(str(start)), record)
            return
        time.sleep(BETWEEN_S * (attempt < ATTEMPTS - 1))


@dataclass(frozen=True, kw_only=True)
class RestartCause:
    """Why the jobs of a run were started again."""

    reason: str
    failed: bool = False
    """Whether a host failed."""
    hosts: tuple[str, ...] = ()
    """Those that did, where Slurm knows which ones."""


def restart_cause(
    ids: Iterable[str], start: Start, job: str, timeout_s: float = slurm_commands.TIMEOUT_S
) -> RestartCause | None:
    """Asks Slurm's accounting why jobs of a run are started again.

    Args:
        ids: the jobs of the run.
        job: the one that is started again; None is returned until the accounting has all of its ends before `start`.

    Raises:
        LaunchError: there is no accounting, or it does not answer.
    """
    ended = slurm_commands.ended_starts(ids, timeout_s)
    if sum(one.id.partition("+")[0] == job for one in ended) < start.restarts:
        return None
    found = why(ended, _down)
    return None if found is None else replace(found, failed=any(one.state in FAILED for one in ended))


def why(ended: Sequence[JobState], down: Callable[[Iterable[str]], Sequence[str]]) -> RestartCause | None:
    """Says why, by the ended starts of the run's jobs; None if there is none. A job that lost a node explains why the
    others had to be started again. `down`: those of some hosts that are down now."""
    last = list({job.id: job for job in ended}.values())
    if failed := [job for job in last if job.state in FAILED]:  # of a heterogeneous job all components do at once
        hosts = list(dict.fromkeys(host for job in failed for host in job.hosts))
        absent = down(hosts) or (hosts if len(hosts) == 1 else [])
        among = "" if absent else "one of "
        reason = f"{among}{compressed(absent or hosts)} {FAILED[failed[0].state]}, {failed[0].state}"
        return RestartCause(reason=reason, failed=True, hosts=tuple(absent))
    culprit = next((job for job in last if job.state != "REQUEUED"), next(iter(last), None))
    if culprit is None:
        return None
    return RestartCause(reason=f"job {culprit.id} {_OTHERS.get(culprit.state, 'ended')}, {culprit.state}")


def _down(hosts: Iterable[str]) -> list[str]:
    rows = parse(slurm_commands.nodes())
    return sorted({row.node for row in rows if row.node in set(hosts) and row.state.startswith(("down", "fail"))})
