"""Why Slurm has started a run again, as its first node writes it down.

Slurm's accounting says how the last start ended, and sinfo which of its hosts are down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.files.records import Start
from launch.files.run_files import read_submitted
from launch.machine import slurm_commands
from launch.machine.job_states import JobState, compressed
from launch.machine.sinfo import parse

ATTEMPTS, BETWEEN_S = 5, 3.0
"""The accounting lags behind."""
FAILED = {"NODE_FAIL": "failed", "BOOT_FAIL": "did not boot"}
"""What the hosts of a job did, by its state."""
_OTHERS = {
    "PREEMPTED": "made room for another job",
    "TIMEOUT": "had reached its time limit",
    "REQUEUED": "was put back into the queue: its time ran out, it made room, or somebody asked for it",
}


def note_restart(run: RunDir, start: Start, nodes: int, job: str) -> None:
    """Finds out and writes it down, in a thread: the run, of which this is a job, need not wait for that."""
    threading.Thread(target=_note, args=(run, start, nodes, job, time.time()), daemon=True).start()


def _note(run: RunDir, start: Start, nodes: int, job: str, unix: float) -> None:
    for attempt in range(ATTEMPTS):
        try:
            ids = read_submitted(run, nodes).by_id
            ended = slurm_commands.ended_starts(ids)
            complete = sum(one.id.partition("+")[0] == job for one in ended) >= start.restarts
            reason = why(ended, _down) if complete else None
        except (LaunchError, RunFolderError) as error:  # without it the run is only told to have been started again
            print(f"why the run was started again is not known: {error}", flush=True)
            return
        if reason is not None:
            run.write_json(run.restarted(str(start)), {"unix": unix, "reason": reason})
            return
        time.sleep(BETWEEN_S * (attempt < ATTEMPTS - 1))


def why(ended: Sequence[JobState], down: Callable[[Iterable[str]], Sequence[str]]) -> str | None:
    """Says why, by the ended starts of the run's jobs; None if there is none. A job that lost a node explains why the
    others had to be started again.

    Args:
        down: those of some hosts that are down now.
    """
    last = list({job.id: job for job in ended}.values())
    culprit = next((job for job in last if job.state in FAILED), None)
    if culprit is not None:
        absent = down(culprit.hosts)
        among = "" if absent else "one of "
        return f"{among}{compressed(absent or culprit.hosts)} {FAILED[culprit.state]}, {culprit.state}"
    culprit = next((job for job in last if job.state != "REQUEUED"), next(iter(last), None))
    if culprit is None:
        return None
    return f"job {culprit.id} {_OTHERS.get(culprit.state, 'ended')}, {culprit.state}"


def _down(hosts: Iterable[str]) -> list[str]:
    rows = parse(slurm_commands.nodes())
    return sorted({row.node for row in rows if row.node in set(hosts) and row.state.startswith(("down", "fail"))})
