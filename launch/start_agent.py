"""python -m launch.start_agent FOLDER FILE [group]: the agent of one task of a job, which runs its node of the run.

FOLDER is the run's `submitit/`, and FILE in it says what the agent is to do; `group` (runs_mode=group) that the run's
group is trusted as its user is. Slurm keeps the script that says so. The kernel signals the agent when its parent dies,
and the worker when the agent does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from conf.utf8 import enter_utf8_mode
from launch.errors import LaunchError
from launch.files.records import Start, Submitted
from launch.machine import processes
from launch.machine.provenance import path_of_agents
from launch.node.elastic.peer_status import Claim, Replaced
from launch.node.elastic.regroup import newest, others_train
from launch.node.node import NodeAgent
from launch.node.settings import NodeSettings
from launch.node.slurm_job import SlurmJob
from launch.node.worker_process import StopSignals
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import NODE_RANK, START, die_with_parent

_OWN = (NODE_RANK, START)
"""What it is not given of the ranks' environment, so that ending a node's worker by it does not end the keeper."""
_LOOK_S = 0.5
AGAIN_S = 5.0
"""What was killed because memory ran out is not started again at once."""


@contextmanager
def keeping(run: RunDir, plan: Plan, node: str, submission: int, environment: Mapping[str, str]) -> Iterator[None]:
    """Has such a process run meanwhile, where the plan wants one; it dies with this one.

    One that was killed, as where memory runs out, is started again with nothing in it; one that ends by itself has said
    why it cannot run. `environment` is that of the ranks, which may say by which interface nodes reach each other.
    """
    if plan.train.save_memory is None:
        yield
        return
    given = {name: value for name, value in (os.environ | dict(environment)).items() if name not in _OWN}
    command = [sys.executable, "-P", "-m", "megatron_ext.checkpoints.keeper", str(run.path), node, str(submission)]

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env={**given, "PYTHONPATH": path_of_agents()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=processes.begin_helper,
        )

    over = threading.Event()

    def keep() -> None:
        """In a thread that lives as long as its processes may: the kernel ends these with the thread."""
        process = started()
        while not over.wait(_LOOK_S):
            if (process.poll() or 0) < 0 and not over.wait(AGAIN_S):
                name = signal.Signals(-process.returncode).name
                print(f"checkpoints in this node's memory are lost, by {name}; new ones are kept", flush=True)
                process = started()
        process.kill()
        process.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main(argv: Sequence[str]) -> int:
    os.umask(os.umask(0o022) | 0o022)
    try:
        run_node(settings_of(argv))
    except Replaced as replaced:  # nothing is wrong with the node
        print(replaced, flush=True)
    except TdppError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def settings_of(words: Sequence[str]) -> NodeSettings:
    """What the agent is to do, by the words that start it. Raises LaunchError: that cannot be known for sure."""
    if len(words) < 2 or words[1] == "group":
        raise LaunchError("this job was submitted by an older version of tdpp; launch the run again")
    folder, name, *mode = words
    return NodeSettings.read(RunDir(Path(folder).parent), name, group=mode == ["group"])


def run_node(settings: NodeSettings) -> None:
    """Runs this node's worker to its end.

    Raises:
        Replaced: another agent runs the node, or does since.
        LaunchError: the worker ended with another exit code than 0, so that the job's own state says it, too.
    """
    from submitit import JobEnvironment

    job, run = JobEnvironment(), settings.run
    submitted = run.read(run.jobs, Submitted)
    if submitted is not None and submitted.submission > settings.submission:  # its launch was killed, and resumed
        raise LaunchError(f"{run.name} was submitted again, but this job belongs to an earlier submission")
    signals = StopSignals()
    die_with_parent(signal.SIGTERM)
    slurm = SlurmJob.here(run, settings.nodes, job.global_rank) if job.cluster == "slurm" else None
    # The parent may have died before the kernel was asked to signal that; a local job's id is its parent's.
    if slurm is None and os.getppid() != int(job.raw_job_id):
        signals.note_end(signal.SIGTERM)
    plan = run.read_plan()
    name = plan.nodes[settings.nodes[job.global_rank]].name
    here = f"on {socket.gethostname()}, task {job.global_rank} of job {job.raw_job_id}"
    print(f"agent of node {name} of {run.name}: process {os.getpid()} {here}", flush=True)
    claim = None
    if plan.elastic is not None:
        claim = Claim(run, name, settings.submission, slurm.id if slurm else None)
        claim.take(at_once=slurm is not None and slurm.restarts > 0)
    start = Start(settings.submission, slurm.restarts if slurm else 0)
    following: tuple[Start, Plan] | None = (start, plan) if plan.elastic is None else newest(run, settings.submission)
    restarted = slurm is not None and slurm.restarts > 0
    if restarted and plan.elastic is not None and following is not None:
        restarted = not others_train(run, *following)
    with keeping(run, plan, name, settings.submission, settings.environment):
        while following is not None:
            node = NodeAgent(settings, job.global_rank, slurm, signals, *following, claim, restarted=restarted)
            code, following = node.run(), node.following
            restarted = False
    if code != 0:
        raise LaunchError(f"node rank {settings.nodes[job.global_rank]}: {node.reason or f'exited with {code}'}")


if __name__ == "__main__":
    enter_utf8_mode()
    sys.exit(main(sys.argv[1:]))
