"""Slurm's commands: the only module that calls them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from launch.errors import LaunchError
from launch.machine.job_states import (
    SACCT_FIELDS,
    SQUEUE_FORMAT,
    STARTS_FIELDS,
    JobState,
    expanded,
    parse_sacct,
    parse_squeue,
    parse_starts,
)
from launch.machine.processes import captured

TIMEOUT_S = 60
CANCEL_S = 90.0
"""Slurm has ended a cancelled job by then; its KillWait is 30 s by default."""
QUEUE_S = 0.5
"""Between two looks at the queue."""
COMMENT = "tdpp"
_OURS = re.compile(rf"(?<=\s){COMMENT} [0-9a-f]{{32}}$")
"""Behind a comment of the user's; a run's token is not to be guessed."""
_WORD = 80
_FOREIGN = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SINFO|SQUEUE|SCANCEL|SACCT|SCONTROL|PMIX?|PMI2?)_")
_KEPT = {"SLURM_CONF"}
_REFUSED = re.compile(r"allocate resources: (.*(?:Invalid (?:account|qos)|not permitted|permission denied).*)")
"""slurm_strerror's texts for a job that this user may not have, however long it waits."""

NODES_UNAVAILABLE = "node configuration is not available"
"""slurm_strerror's text: too few nodes that are up have what a job wants."""
_SUBMITTED = re.compile(r"Submitted batch job (\d+)")
_TO_START = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
"""sbatch --test-only writes it to stderr, in local time."""
_PREEMPTED = re.compile(r" PreemptTime=\d")
_SILENT = re.compile(
    r"unable to contact|timed out|connection (failure|refused)|(send|receive|shutdown) failure|not responding|"
    r"standby mode|unable to establish|could not establish|zero bytes were|munge|protocol authentication",
    re.IGNORECASE,
)
"""In slurm_strerror's texts, where no slurmctld has taken the question."""


class SlurmSilent(LaunchError):
    """Slurm's controller does not answer, so it has refused nothing."""


class JobRefused(LaunchError):
    """Slurm's rules do not allow the user such a job. The message is Slurm's."""


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without what an allocation or a user's defaults would change in a job or an answer.

    SQUEUE_PARTITION would hide jobs from squeue, SCANCEL_INTERACTIVE have scancel ask and end nothing.
    """
    return {name: value for name, value in inherited.items() if name in _KEPT or not _FOREIGN.match(name)}


def job_states(ids: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, JobState]:
    """The states of jobs, by id; of a heterogeneous one that of its components together.

    squeue knows at once; what it no longer knows, and who cancelled a job, the accounting knows, where there is one.
    `timeout_s` is how long each of these two is waited for.

    Raises:
        LaunchError: Slurm does not answer, or not who knows of a job that has left the queue.
    """
    wanted = list(ids)
    if not wanted:
        return {}
    queue = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(wanted)}", SQUEUE_FORMAT]
    found = parse_squeue(_ask(queue, timeout_s))
    unanswered = [job for job in wanted if job not in found or found[job].state == "CANCELLED"]
    if unanswered:
        try:
            accounts = parse_sacct(_accounting(unanswered, timeout_s))
        except LaunchError:
            if any(job not in found for job in unanswered):
                raise
            accounts = {job: replace(found[job], detail="unknown by whom, because sacct fails") for job in unanswered}
        for job, state in accounts.items():
            if job not in found or found[job].state == state.state:  # the accounting lags behind
                found[job] = state
    return {job: found[job] for job in wanted if job in found}


QUEUED_FORMAT = "--format=%i|%k"


def _accounting(ids: Sequence[str], timeout_s: float) -> str:
    command = ["sacct", "-X", "-n", "-P", "-o", SACCT_FIELDS, "-j", ",".join(ids)]
    done = _run(command, timeout_s)
    if "accounting storage is disabled" in done.stderr:
        return ""
    return _output(command, done)


def ended_starts(ids: Iterable[str], timeout_s: float = TIMEOUT_S) -> list[JobState]:
    """The starts of jobs that have ended, the last one last: how it ended says why Slurm started the job again. Raises
    LaunchError: there is no accounting, or it does not answer."""
    command = ["sacct", "--duplicates", "-X", "-n", "-P", "-o", STARTS_FIELDS, "-j", ",".join(ids)]
    return parse_starts(_ask(command, timeout_s))


def submitted(comment: str, owner: int) -> list[str]:
    """Ids of a user's jobs in the queue that carry a run's comment: also those that nobody wrote down."""
    return by_comment([owner]).get(comment, [])


def by_comment(owners: Collection[int]) -> dict[str, list[str]]:
    """Ids of the jobs in the queue of some users, by the comments that tdpp gave them, behind those of the user."""
    whose = "--me" if set(owners) == {os.geteuid()} else f"--user={','.join(map(str, owners))}"  # ids that have names
    # A comment may hold anything, also line breaks.
    pairs = (line.strip().partition("|") for line in _ask(["squeue", whose, "--noheader", QUEUED_FORMAT]).splitlines())
    found: dict[str, dict[str, None]] = {}
    for job, _, comment in pairs:
        ours = _OURS.search(comment)
        found.setdefault(comment if ours is None else ours[0], {})[job.partition("+")[0]] = None
    return {comment: list(ids) for comment, ids in found.items()}


def comment_of(token: str) -> str:
    """What a job of the run carries as its comment."""
    return f"{COMMENT} {token}"


def cancel(ids: Sequence[str], only_pending: bool = False) -> None:
    """Ends jobs, or takes them out of the queue. Those that have ended already are left alone. Raises LaunchError:
    Slurm does not do so for one of them; also where that one starts or ends at this moment."""
    if ids:
        states = ["--state=PENDING"] if only_pending else []
        _ask(["scancel", *states, *ids])


def end(comment: str, owner: int) -> None:
    """Cancels a user's jobs that carry a run's comment, and waits until they are gone: also those that nobody wrote
    down. Raises LaunchError: Slurm does not end them, or does not answer."""
    until = time.monotonic() + CANCEL_S
    cancelled, refusal = False, ""
    while left := submitted(comment, owner):
        if time.monotonic() > until:
            raise LaunchError(
                f"jobs {', '.join(left)} were cancelled, but Slurm has not ended them in {CANCEL_S:g} s{refusal}"
            )
        if not cancelled:
            try:
                cancel(left)
                cancelled = True
            except LaunchError as error:  # one that starts or ends meanwhile; the queue shows whether any is left
                refusal = f": {error}"
        time.sleep(QUEUE_S)


def requeue(job: str) -> None:
    """Has a job end and be started again. Raises LaunchError: Slurm does not."""
    _ask(["scontrol", "requeue", job])


def allow_requeue(job: str) -> None:
    """Has a job that was submitted with --no-requeue become one that may be started again. Raises LaunchError: Slurm
    does not."""
    _ask(["scontrol", "update", f"JobId={job}", "Requeue=1"])


def is_preempted(job: str, timeout_s: float) -> bool:
    """Whether Slurm has chosen a job that still runs to give way, and gives it time before it ends it (GraceTime).
    Raises LaunchError: Slurm does not answer."""
    parts = _ask(["scontrol", "show", "--oneliner", "job", job], timeout_s).splitlines()
    return any(" JobState=RUNNING " in part and _PREEMPTED.search(part) for part in parts)


def hosts_of(job: str) -> tuple[str, ...]:
    """The nodes that a job has now, in Slurm's order. Raises LaunchError: Slurm does not answer."""
    return expanded(_ask(["squeue", "--noheader", f"--jobs={job}", "--format=%N"]).strip())


def keep_only(job: str, hosts: Sequence[str]) -> None:
    """Gives a job's other nodes back. Its first one, where its script runs, cannot be. Raises LaunchError: Slurm does
    not."""
    with tempfile.TemporaryDirectory() as folder:  # it leaves a script for the job's shell where it runs
        _ask(["scontrol", "update", f"JobId={job}", f"NodeList={','.join(hosts)}"], cwd=folder)


def test(script: str) -> float | None:
    """Asks Slurm whether it would take a job; submits nothing.

    Returns:
        When it expects to start it, in seconds since 1970, of a heterogeneous job the last component; None where it
        does not say.

    Raises:
        SlurmSilent: it does not answer.
        LaunchError: it would not, with what it says.
    """
    done = _run(["sbatch", "--test-only", script])
    if done.returncode != 0:
        lines = [re.sub(r"^((sbatch|error|allocation failure): )*", "", line) for line in done.stderr.splitlines()]
        if any(NODES_UNAVAILABLE in line for line in lines):
            lines.append("nodes that are down do not count; see sinfo")
        elif any("nvalid partition" in line for line in lines):
            lines.append("sinfo lists the partitions")
        message = "; ".join(dict.fromkeys(line for line in lines if line))
        raise SlurmSilent(message) if _SILENT.search(message) else LaunchError(message)
    starts = [datetime.fromisoformat(found).timestamp() for found in _TO_START.findall(done.stderr)]
    return max(starts, default=None)


def submit(script: str, given: Mapping[str, str] | None = None) -> str:
    """Submits a job, which outlives this process; returns its id. It inherits this process's environment, or `given`.

    Raises:
        SlurmSilent: Slurm does not answer.
        LaunchError: it refuses the job.
    """
    done = _run(["sbatch", script], timeout_s=None, given=given)
    message = done.stderr.strip() or done.stdout.strip() or "no message"
    if done.returncode != 0 and _SILENT.search(message):
        raise SlurmSilent(f"Slurm does not answer: {message}")
    if done.returncode != 0 or (job := _SUBMITTED.search(done.stdout)) is None:
        raise LaunchError(f"sbatch refused the job: {message}")
    return job[1]


def version() -> str:
    """Returns Slurm's version, such as `slurm-wlm 22.05.8`."""
    return _ask(["sbatch", "--version"]).strip()


NODES_FORMAT = "%N|%R|%P|%a|%t|%c|%B|%m|%l|%p|%M|%G|%f"
"""sinfo's: node, partition, the same with a mark at the default one, whether this is up, state, CPUs, how many of
them the partition's jobs may have, MB, time limit, tier, preemption, gres, features."""


def nodes(timeout_s: float = TIMEOUT_S) -> str:
    """Every node that this user may see, a line for each of its partitions, as `NODES_FORMAT` says.

    Raises:
        SlurmSilent: Slurm does not answer.
        LaunchError: sinfo fails otherwise.
    """
    return _ask(["sinfo", "--noheader", "--Node", f"--format={NODES_FORMAT}"], timeout_s)


def on_one_node(options: Sequence[str], command: Sequence[str], wait_s: int, run_min: int) -> str:
    """What a command prints on a node that Slurm gives within `wait_s`; it may run for `run_min` minutes.

    Raises:
        JobRefused: this user may not have jobs there.
        LaunchError: no such node is free by then, or the command fails.
    """
    bounds = [f"--immediate={wait_s}", f"--time={run_min}", "--nodes=1", "--ntasks=1", "--job-name=tdpp-init"]
    asked = ["srun", *bounds, *options, *command]
    done = _run(asked, wait_s + 60 * run_min + TIMEOUT_S)
    if done.returncode != 0 and (refused := _REFUSED.search(done.stderr)) is not None:
        raise JobRefused(refused[1])
    return _output(asked, done)


def srun_has(option: str) -> bool:
    """Whether srun knows an option, which may come from a plugin."""
    return option in _ask(["srun", "--help"])


def _ask(command: Sequence[str], timeout_s: float = TIMEOUT_S, cwd: str | None = None) -> str:
    return _output(command, _run(command, timeout_s, cwd))


def _output(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    unknown = "Invalid job id specified" in done.stderr  # the only one asked for is not in the queue any more
    if done.returncode != 0 and not (unknown and command[0] in ("squeue", "scancel")):
        message = f"{_shown(command)} failed with {done.returncode}: {done.stderr.strip() or 'no message'}"
        raise SlurmSilent(message) if _SILENT.search(done.stderr) else LaunchError(message)
    return done.stdout


def _shown(command: Sequence[str]) -> str:
    """A command for a message; hundreds of job ids are not spelt out."""
    return " ".join(word if len(word) <= _WORD else f"{word[:_WORD]}…" for word in command)


def _run(
    command: Sequence[str],
    timeout_s: float | None = TIMEOUT_S,
    cwd: str | None = None,
    given: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    try:
        return captured(command, timeout_s, environment=environment(os.environ if given is None else given), cwd=cwd)
    except FileNotFoundError as error:
        raise LaunchError(
            f"{command[0]} is not on this machine, but the run is a Slurm run; use a login node of its cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"{_shown(command)} did not answer within {timeout_s:g} s") from error
