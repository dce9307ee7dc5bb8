"""The way back up: an elastic run goes on with nodes that were lost before, once they are there again."""

from __future__ import annotations

import time

from conf.run_folder.run_files import read_tail
from conf.run_folder.rundir import RunDir
from conf.visible import plural
from launch.errors import LaunchError
from launch.files.run_files import read_joins
from launch.node.elastic.regroup import Company
from launch.node.elastic.replan import replanned
from megatron_ext.contract.files import json_line
from megatron_ext.contract.plan import Plan

LOOK_S = 1.0
"""Between two looks."""
STEADY_S = 5.0
"""A node that was lost once has to be there for so long; one that was lost again, four times as long each time."""
COST_S = 60.0
"""What a change of nodes costs at most: what is left to train has to be longer by what it gains."""
_LINES_BYTES = 16 * 1024


class Growth:
    """Whether others can train, too, as the first node of one start sees it."""

    def __init__(self, run: RunDir, plan: Plan, company: Company, began_unix: float) -> None:
        self._run = run
        self._plan = plan
        self._company = company
        self._began_unix = began_unix
        self._looked = 0.0
        self._later = {one.node for one in read_joins(run, company.submission)}
        """Nodes that were not free when the run was launched, or were lost."""
        self._back: dict[int, float] = {}
        """Since when each node that was lost is there again, on the monotonic clock."""

    def look(self) -> None:
        """Asks for nodes that are back."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        waiting = [rank for rank in self._company.available if rank not in self._plan.used]
        self._back = {rank: self._back.get(rank, now) for rank in waiting}
        if not waiting:
            return
        back = []
        for rank, since in self._back.items():
            losses = self._company.losses(rank)
            if not losses and rank not in self._later:  # the launch left it out, and a lost node brings it in
                continue
            if now - since >= STEADY_S * 4 ** max(0, losses - 1):
                back.append(rank)
        if not back:
            return
        nodes = sorted([*self._plan.used, *back])
        try:
            plan = replanned(self._company.measured_plan(), nodes)
        except LaunchError:  # no plan for more nodes either
            return
        more = [rank for rank in plan.used if rank not in self._plan.used]
        if more and self._left_s() * (1.0 - len(self._plan.ranks) / len(plan.ranks)) > COST_S:
            names = ", ".join(self._plan.node_names[rank] for rank in more)
            back_again = all(self._company.losses(rank) for rank in more)
            how = "came back" if back_again else "joined"
            self._company.ask_for(nodes, f"{plural(len(more), 'node')} {how}: {names}")

    def _left_s(self) -> float:
        """Seconds that these nodes would still train; 0 as long as this start has logged nothing."""
        try:
            content, _ = read_tail(self._run.metrics, _LINES_BYTES)
        except FileNotFoundError:
            return 0.0
        lines = (json_line(text) for text in reversed(content.decode(errors="replace").splitlines()))
        line = next((found for found in lines if found is not None and "elapsed_ms" in found), None)
        if line is None or line["unix"] <= self._began_unix:
            return 0.0
        train = self._plan.train
        total = train.samples or train.iterations * self._plan.global_batch_size
        batch = line.get("global_batch_size", self._plan.global_batch_size)
        return float((total - line["consumed_samples"]) / batch * line["elapsed_ms"] / 1e3)
