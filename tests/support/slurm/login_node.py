"""Where users of the test cluster run Slurm's commands, and what these say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.support.slurm.configuration import SCAVENGE

OF_A_JOB = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SACCT_", "SQUEUE_", "SINFO_", "SCANCEL_", "PMI", "SUBMITIT_")
"""How variables begin that steer Slurm's commands, or that a job around the tests has set."""


class Job(NamedTuple):
    """A line of squeue. `id` is as squeue shows it: `7`, `7_1` of an array, `7+0` of a heterogeneous job."""

    id: str
    state: str
    reason: str
    name: str


class Account(NamedTuple):
    """A line of sacct; a requeued job has one for every start. It lags behind squeue by seconds."""

    id: str
    partition: str
    state: str
    exit_code: str
    nodes: str
    name: str


class ClusterError(RuntimeError):
    """The cluster does not do what it must; the message holds the end of its logs."""


class LoginNode:
    def __init__(self, base: Path) -> None:
        """`base` is the cluster's folder."""
        self.base = base
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_JOB)}
        self.env |= {"PATH": daemons_path(), "SLURM_CONF": str(base / "slurm.conf")}

    def run(self, *argv: str | Path, timeout: float = 60, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """A command on the login node, to its end."""
        return subprocess.run(argv, env=self.env, input=stdin, capture_output=True, text=True, timeout=timeout)

    def jobs(self) -> list[Job]:
        """All that wait, run or are about to end."""
        return [Job(*line.split("|", 3)) for line in self._lines("squeue", "--noheader", "--format=%i|%T|%r|%j")]

    def sacct(self, *ids: str | int) -> list[Account]:
        """The jobs' accounts, without their steps."""
        fields = "JobID,Partition,State,ExitCode,NodeList,JobName"
        which = ["--jobs", ",".join(map(str, ids)), "--format", fields]
        lines = self._lines("sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", *which)
        return [Account(*line.split("|", 5)) for line in lines]

    def states(self) -> dict[str, str]:
        """By node: idle, mixed, allocated, down, drained…; a star after it: does not answer."""
        lines = self._lines("sinfo", "--noheader", "--Node", f"--partition={SCAVENGE}", "--format=%N %T")
        return dict(line.split() for line in lines)

    def cancel_all(self) -> None:
        """Asks every job, of whatever user, to end; it may take a moment, or KillWait where the job ignores SIGTERM."""
        if ids := [job.id.split("+")[0] for job in self.jobs()]:
            self.run("scancel", "--quiet", *dict.fromkeys(ids))

    def set_node(self, name: str, state: str, reason: str = "test") -> None:
        """`down` fails the jobs on it (they are requeued where they may be), `drain` lets them end, `resume` undoes."""
        self._lines("scontrol", "update", f"nodename={name}", f"state={state}", f"reason={reason}")

    def set_end(self, job: str | int, seconds: int) -> None:
        """Moves a running job's time limit. Slurm looks only every 30 s (PERIODIC_TIMEOUT in slurmctld.h), and so warns
        (sbatch --signal) up to 30 s early: with 31, a job is warned when Slurm looks next, and ended 30 s later."""
        self._lines("scontrol", "update", f"jobid={job}", f"endtime=now+{seconds}")

    def log_tail(self, lines: int = 50) -> str:
        """The end of every daemon's log, or of what it printed, where it did not live to have a log."""
        paths = {path.stem: path for path in sorted((self.base / "log").iterdir(), reverse=True)}
        tails = {name: path.read_text(errors="replace").splitlines()[-lines:] for name, path in paths.items()}
        return "\n".join("\n".join([f"== {name}", *tail]) for name, tail in tails.items() if tail)

    def _lines(self, *argv: str) -> list[str]:
        done = self.run(*argv)
        if done.returncode:
            raise ClusterError(f"{' '.join(argv)}: {done.stderr}\n{self.log_tail()}")
        return done.stdout.splitlines()


def daemons_path() -> str:
    """Daemons lie where not every user looks."""
    return os.environ["PATH"] + ":/usr/local/sbin:/usr/sbin:/sbin"
