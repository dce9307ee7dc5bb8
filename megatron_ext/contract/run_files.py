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


class FileName:
    """An attribute of a run: the path of a file or folder; of the class, what that is called in a run's folder."""

    def __init__(self, *parts: str) -> None:
        self._name = Path(*parts)

    def __get__(self, run: Optional[RunFiles], kind: object = None) -> Path:
        return self._name if run is None else run.path / self._name


@dataclass(frozen=True)
class RunFiles:
    """The folder of a run."""

    path: Path

    plan = FileName(PLAN)

    def plan_of(self, start: str) -> Path:
        """That of a later start of an elastic run, which `plan` has too as long as no other follows."""
        return self.path / PLANS / f"{start}.json"

    secret = FileName("secret")
    """What the run's ranks know each other by; nobody but its owner can read it."""
    address = FileName("master.json")
    """Host and port of rank 0's store, published by its node."""
    blocks = FileName("blocks.json")
    """The names of a module's blocks, from rank 0, where plan.json lacks them."""
    nodes = FileName("nodes")

    def node_ranks(self, node: str) -> Path:
        """What each rank of a node is doing, or how it ended."""
        return self.nodes / f"{node}.ranks.json"

    def keeper(self, node: str) -> Path:
        """Where the process listens that keeps checkpoints in the memory of a node."""
        return self.nodes / f"{node}.keeper.json"

    def node_machine(self, node: str) -> Path:
        """What a node is made of."""
        return self.nodes / f"{node}.machine.json"

    errors = FileName("errors")

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

    events = FileName("events")

    def rank_events(self, rank: int) -> Path:
        return self.events / f"rank-{rank:05d}.bin"

    metrics = FileName("metrics.jsonl")
    experts = FileName("experts.jsonl")
    """How many tokens each expert got, of a model that counts them, by the rank that writes metrics.jsonl."""
    decisions = FileName("decisions.jsonl")
    """What was decided about the batch while the run went on, by rank 0."""
    spent = FileName("spent.json")
    """What the nodes and their traffic have cost so far, over all starts, in dollars."""
    goal = FileName("goal.json")
    """That the run ended before its last iteration because it has reached what it was to reach."""
    checkpoints = FileName(CHECKPOINTS)
    latest_checkpoint = FileName(CHECKPOINTS, LATEST)
    """A file with the name of the newest checkpoint."""
    best_checkpoint = FileName(CHECKPOINTS, BEST)
    """A file with the name of the best one, by `train.best`."""

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
