"""Jobs of Slurm that bring an elastic run's lost nodes back: each is one node, whose agent joins the run.

The launch leaves a script for each node. The first node that trains submits it once a node is lost for good. When Slurm
has a node for it, because the lost one is back or another one is free, its agent waits until the run takes it in
(`growth`). So the run keeps the nodes that it has, and the queue decides about more.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.files.own_path import own_folder
from launch.files.records import NodeRecord, Start
from launch.files.run_files import read_joins
from launch.machine import slurm_commands
from launch.node.elastic.regroup import Company
from launch.node.slurm_job import ANSWER_S
from megatron_ext.contract.plan import Plan

LOOK_S = 3.0
"""Between two looks."""
LOST_S = 15.0
"""A node that is silent for so long in a start without it is lost for good: its place is asked for again."""
_OF_THE_NODE = ("TMPDIR", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
"""What Slurm or its node may have set for this job alone."""


class Joins:
    """The jobs for lost nodes, as the first node of one start asks for them."""

    def __init__(
        self, run: RunDir, plan: Plan, start: Start, *, together: Collection[int], job: str | None, group: bool
    ) -> None:
        """`together`: the nodes of this node's own `job`."""
        self._run = run
        self._together = together
        self._job = job
        self._plan = plan
        self._start = start
        self._group = group
        self._looked = 0.0
        self._since: dict[int, float] = {}
        self._cancelled: set[str] = set()
        """Jobs that somebody has cancelled: their nodes are not to come back."""

    def look(self, company: Company) -> None:
        """Submits a job for each node that has been lost for long enough, and has none for this loss."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self._since = {rank: self._since.get(rank, now) for rank in company.lost}
        due = [rank for rank, since in self._since.items() if now - since >= LOST_S]
        joins = read_joins(self._run, self._start.submission) if due else ()
        asked = Counter(one.node for one in joins if Start.parse(one.start).restarts)  # not those of the launch
        for rank in due:
            if asked.get(rank, 0) < company.losses(rank):
                self._ask(rank)

    def _ask(self, rank: int) -> None:
        name = self._plan.node_names[rank]
        state = self._run.read(self._run.node_state(name), NodeRecord)
        job, host = (None, None) if state is None else (state.job, state.host)
        if state is None or job is None or state.of.submission < self._start.submission:
            if rank not in self._together or self._job is None:
                return  # it never came: its own job may still bring it
            job, host = self._job, None
        if not self._may_replace(job):
            return
        path = self._run.join(str(self._start), name)
        record = {"id": None, "node": rank, "start": str(self._start), "unix": time.time()}
        self._run.joins.mkdir(exist_ok=True)
        self._run.write_json(path, record)  # before there is a job: what is refused is not submitted again
        try:
            try:
                hosts = slurm_commands.hosts_of(job)
                if host in hosts[1:]:
                    slurm_commands.keep_only(job, [other for other in hosts if other != host])
            except LaunchError as error:  # such as that of a job that has lost its first node: it keeps it
                print(f"node {name} could not be given back: {error}", flush=True)
            again = self._submit(name)
        except TdppError as error:  # the run goes on without
            print(f"node {name} could not be asked for again: {error}", flush=True)
            return
        self._run.write_json(path, {**record, "id": again})
        print(f"node {name} is asked for again by job {again}", flush=True)

    def _may_replace(self, job: str) -> bool:
        """Whether a job is to have another one for its node: not one that somebody cancelled or Slurm starts again."""
        if job in self._cancelled:
            return False
        try:
            found = slurm_commands.job_states([job], ANSWER_S).get(job)
        except LaunchError:  # asked again at the next look
            return False
        if found is not None and found.state == "CANCELLED":
            self._cancelled.add(job)
        return found is None or not (found.pending or job in self._cancelled)

    def _submit(self, name: str) -> str:
        script = self._run.join_script(self._start.submission, name)
        with own_folder(self._run.path, script.parent.name, group=self._group) as own:
            text = own.read(script.name)
        given = {key: value for key, value in os.environ.items() if key not in _OF_THE_NODE}
        with tempfile.TemporaryDirectory() as folder:
            own_copy = Path(folder) / script.name
            own_copy.write_bytes(text)
            return slurm_commands.submit(str(own_copy), given)


def cancel_joins(run: RunDir, submission: int, nodes: Collection[int] | None = None) -> None:
    """Takes such jobs out of the queue, all or those for some nodes; those that have started stay."""
    wanted = [one.id for one in read_joins(run, submission) if one.id and (nodes is None or one.node in nodes)]
    try:
        slurm_commands.cancel(wanted, only_pending=True)
    except LaunchError as error:  # its agent finds that the run is over, and ends
        print(f"jobs for lost nodes could not be removed from the queue: {error}", flush=True)
