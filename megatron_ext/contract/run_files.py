"""Names of the files in a run's folder that its ranks write or read (docs/formats.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

PLAN = "plan.json"
PLANS = "plans"
"""The folder of the plans of an elastic run's later starts."""
CHECKPOINTS = "checkpoints"
LATEST = "latest"
"""In the folder of checkpoints: a file with the name of the newest one."""
BEST = "best"
"""The same of the best one."""
WEIGHTS, EMA = "weights", "ema"
"""Kinds of tensors in a checkpoint: `weights/<parameter>`, and with `train.ema` their average, `ema/<parameter>`."""
ISLAND, OUTER = "island", "outer_momentum"
"""With `train.sync_every`: the weights of one island, and the momentum of the outer optimizer, whose weights are
`WEIGHTS`."""
META = "meta.json"
"""In the folder of a checkpoint: what it is."""


@dataclass(frozen=True)
class RunFiles:
    """The folder of a run."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / PLAN

    def plan_of(self, start: str) -> Path:
        """That of a later start of an elastic run, which `plan` has too as long as no other follows."""
        return self.path / PLANS / f"{start}.json"

    @property
    def secret(self) -> Path:
        """What the run's ranks know each other by; nobody but its owner can read it."""
        return self.path / "secret"

    @property
    def address(self) -> Path:
        """Host and port of rank 0's store, published by its node."""
        return self.path / "master.json"

    @property
    def blocks(self) -> Path:
        """The names of a module's blocks, from rank 0, where plan.json lacks them."""
        return self.path / "blocks.json"

    @property
    def nodes(self) -> Path:
        return self.path / "nodes"

    def node_ranks(self, node: str) -> Path:
        """What each rank of a node is doing, or how it ended."""
        return self.nodes / f"{node}.ranks.json"

    def keeper(self, node: str) -> Path:
        """Where the process listens that keeps checkpoints in the memory of a node."""
        return self.nodes / f"{node}.keeper.json"

    def node_machine(self, node: str) -> Path:
        """What a node is made of."""
        return self.nodes / f"{node}.machine.json"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    def rank_error(self, rank: int) -> Path:
        return self.errors / _of_rank(rank)

    def rank_memory(self, rank: int) -> Path:
        return self.path / "memory" / _of_rank(rank)

    def rank_waits(self, rank: int) -> Path:
        """How long a rank waited for its samples, minute by minute."""
        return self.path / "waits" / f"rank-{rank:05d}.jsonl"

    def rank_trace(self, rank: int, iteration: int) -> Path:
        """torch's own trace of an iteration."""
        return self.path / "traces" / f"rank-{rank:05d}.iteration-{iteration}.json.gz"

    def rank_traffic(self, rank: int) -> Path:
        return self.path / "traffic" / _of_rank(rank)

    @property
    def events(self) -> Path:
        return self.path / "events"

    def rank_events(self, rank: int) -> Path:
        return self.events / f"rank-{rank:05d}.bin"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def experts(self) -> Path:
        """How many tokens each expert got, of a model that counts them, by the rank that writes metrics.jsonl."""
        return self.path / "experts.jsonl"

    @property
    def decisions(self) -> Path:
        """What was decided about the batch while the run went on, by rank 0."""
        return self.path / "decisions.jsonl"

    @property
    def spent(self) -> Path:
        """What the nodes have cost so far, over all starts, in dollars."""
        return self.path / "spent.json"

    @property
    def goal(self) -> Path:
        """That the run ended before its last iteration because it has reached what it was to reach."""
        return self.path / "goal.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def latest_checkpoint(self) -> Path:
        """A file with the name of the newest checkpoint."""
        return self.checkpoints / LATEST

    @property
    def best_checkpoint(self) -> Path:
        """A file with the name of the best one, by `train.best`."""
        return self.checkpoints / BEST

    def doctor_node(self, node: str) -> Path:
        """What `tdpp doctor` found on a node."""
        return self.path / "doctor" / f"{node}.json"

    def doctor_rank(self, rank: int) -> Path:
        return self.path / "doctor" / _of_rank(rank)

    def profile_rank(self, rank: int) -> Path:
        """What `tdpp profile` measured on a rank."""
        return self.path / "profile" / _of_rank(rank)


def _of_rank(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def checkpoint_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def checkpoint_iteration(name: str) -> Optional[int]:
    """None for what is not a name of a checkpoint."""
    return int(name[len("iter_") :]) if re.fullmatch(r"iter_[0-9]{1,12}", name) else None
