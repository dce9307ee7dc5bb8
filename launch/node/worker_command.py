"""The process that runs a node's ranks, as its agent starts it: command, environment, the first lines of its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from conf.run_folder.rundir import RunDir
from conf.schema.values.partition import Partition
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import NODE_RANK, START

WORKER = "megatron_ext.worker"
GRACE_S = 8.0
"""Between asking a worker to end and killing it; it takes up to 3 s to end its ranks."""
SCRUBBED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", NODE_RANK, "CUDA_VISIBLE_DEVICES")
"""Not inherited by a worker: an outer launcher's view of the world, and what submitit sets for its own purposes."""


class Worker(Protocol):
    """What runs the ranks of a node: an engine as submission chose it. It is pickled, and travels with the agent."""

    def command(self, run: RunDir, node_rank: int, start: str) -> list[str] | None:
        """None for as long as another node has to write something first."""

    def shown(self, run: Path, node_rank: int) -> list[str]:
        """The command in a dry run, with words in the place of what only a run knows."""


@dataclass(frozen=True)
class ModuleWorker:
    """The worker of tdpp's own engine, or one that keeps the same files (docs/formats.md)."""

    module: str
    python: str

    def command(self, run: RunDir, node_rank: int, start: str) -> list[str]:
        own = run.plan_of(start)  # of a later start of an elastic run
        return self._words(own if own.exists() else run.plan, node_rank)

    def shown(self, run: Path, node_rank: int) -> list[str]:
        return self._words(RunDir(run).plan, node_rank)

    def _words(self, plan: Path, node_rank: int) -> list[str]:
        return [self.python, "-u", "-m", self.module, str(plan), str(node_rank)]


def scrubbed(inherited: Mapping[str, str]) -> dict[str, str]:
    """What a worker may inherit of its agent's environment."""
    return {k: v for k, v in inherited.items() if k not in SCRUBBED and not k.startswith("SUBMITIT_")}


def given_environment(given: Mapping[str, str], plan: Plan, node_rank: int, start: str) -> dict[str, str]:
    """The part of a worker's environment that is not inherited. `given` is what the run gives to all of them."""
    return {**given, **plan.nodes[node_rank].environment, NODE_RANK: str(node_rank), START: start}


def job_info(plan: Plan, model: str, node_rank: int) -> str:
    """What the node is to run, as the first lines of its log."""
    values = {
        NODE_RANK: node_rank,
        "NNODES": len(plan.nodes),
        "WORLD_SIZE": len(plan.ranks),
        "GLOBAL_BATCH_SIZE": plan.global_batch_size,
        "MICRO_BATCH_SIZE": plan.micro_batch_size,
        "TENSOR_MP_SIZE": plan.tensor,
        "DP_SIZE": plan.data,
        "PIPELINE_MP_SIZE": plan.pipeline,
        "PARTITION": str(Partition(tuple(plan.partition))),
        "MODEL": model,
        **({"HIDDEN_SIZE": plan.model.hidden} if plan.model.hidden else {}),
        "NUM_LAYERS": plan.model.counted,
        "PROFILE": str(plan.timeline).lower(),
    }
    return "".join(f"{key}: {value}\n" for key, value in values.items())
