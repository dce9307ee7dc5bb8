"""The node agent: the process of a node, which runs it for one start after another.

submitit calls it, one task per node. The kernel signals it when its parent dies, and the worker when the agent does.
"""

from __future__ import annotations

import os
import signal

from launch.errors import LaunchError
from launch.files.attempt import Start
from launch.files.records import Submitted
from launch.node.elastic.regroup import newest
from launch.node.node import Node
from launch.node.settings import NodeSettings
from launch.node.slurm_job import SlurmJob
from launch.node.stop_signals import StopSignals
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import die_with_parent


class NodeAgent(NodeSettings):
    """What submitit pickles and calls on every node."""

    def __call__(self) -> None:
        """Runs this node's worker to its end.

        Raises:
            LaunchError: the worker ended with another exit code than 0, so that the job's own state says it, too.
        """
        from submitit import JobEnvironment

        job = JobEnvironment()
        submitted = self.run.read(self.run.jobs, Submitted)
        if submitted is not None and submitted.submission > self.submission:  # its launch was killed, and resumed
            raise LaunchError(f"{self.run.name} was submitted again, but this job belongs to an earlier submission")
        signals = StopSignals()
        die_with_parent(signal.SIGTERM)
        slurm = SlurmJob.here(self.run, self.nodes, job.global_rank) if job.cluster == "slurm" else None
        # The parent may have died before the kernel was asked to signal that; a local job's id is its parent's.
        if slurm is None and os.getppid() != int(job.raw_job_id):
            signals.note_end(signal.SIGTERM)
        plan = self.run.read_plan()
        start = Start(self.submission, slurm.restarts if slurm else 0)
        following: tuple[Start, Plan] | None = (
            (start, plan) if plan.elastic is None else newest(self.run, self.submission)
        )
        restarted = slurm is not None and slurm.restarts > 0
        while following is not None:
            node = Node(self, job.global_rank, slurm, signals, *following, restarted=restarted)
            code, following = node.run(), node.following
            restarted = False
        if code != 0:
            raise LaunchError(f"node rank {self.nodes[job.global_rank]}: {node.reason or f'exited with {code}'}")
