"""The process that runs a node's ranks, as its agent starts it: command, environment, the first lines of its log.

What was chosen at submission is a dataclass here, which travels to the agent as JSON. Each has `command`, and `shown`,
the command in a dry run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.schema.values.partition import Partition
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import NODE_RANK, START

WORKER = "megatron_ext.worker"
GRACE_S = 8.0
"""Between asking a worker to end and killing it; it takes up to 3 s to end its ranks."""
SCRUBBED = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", NODE_RANK, "CUDA_VISIBLE_DEVICES"),
    "PYTHONSAFEPATH",
)
"""Not inherited by a worker: an outer launcher's view of the world, and what submitit sets for its own purposes."""


@dataclass(frozen=True)
class ModuleWorker:
    """The worker of every engine, or one that keeps the same files (docs/formats.md)."""

    module: str
    python: str

    def command(self, run: RunDir, node_rank: int, start: str) -> list[str]:
        own = run.plan_of(start)  # of a later start of an elastic run
        return self._words(own if own.exists() else run.plan, node_rank)

    def shown(self, run: Path, node_rank: int) -> list[str]:
        return self._words(RunDir(run).plan, node_rank)

    def _words(self, plan: Path, node_rank: int) -> list[str]:
        return [self.python, "-u", "-m", self.module, str(plan), str(node_rank)]


class Profiler(StrEnum):
    """The name of its command, and of its key (`launch.node.worker_command`)."""

    nsys = "nsys"
    ncu = "ncu"

    def wrap(self, command: list[str], report: Path, one_iteration: bool = False) -> list[str]:
        """The command under the profiler, which writes `<report>.nsys-rep` or `<report>.ncu-rep`. `one_iteration`:
        whether nsys captures only what the ranks mark (`megatron_ext.timeline.recorder`)."""
        output = str(report).replace("%", "%%")  # both replace %h, %p and others
        if self is Profiler.nsys:
            return [
                "nsys",
                "profile",
                f"--output={output}",
                "--force-overwrite=true",
                "--trace=cuda,nvtx,osrt",
                "--sample=none",
                "--trace-fork-before-exec=true",  # ranks are forked and never call exec: without it they are not seen
                "--wait=primary",  # what outlives the worker is the agent's to end
                *(("--capture-range=cudaProfilerApi", "--capture-range-end=stop") if one_iteration else ()),
                *command,
            ]
        return [
            "ncu",
            f"--export={output}",
            "--force-overwrite",
            "--target-processes=all",
            "--nvtx",
            "--kernel-name=regex:^(?!nccl)",  # ncu runs one kernel at a time, but NCCL's wait for those of other GPUs
            *command,
        ]


@dataclass(frozen=True, kw_only=True)
class ProfiledWorker:
    """Another worker, under a profiler."""

    worker: ModuleWorker
    profiler: Profiler
    nodes: tuple[str, ...]
    """Names by node rank."""
    iteration: int | None = None
    """The only one that is captured; None: all."""

    def command(self, run: RunDir, node_rank: int, start: str) -> list[str]:
        command = self.worker.command(run, node_rank, start)
        report = self._report(run.path, node_rank)
        report.parent.mkdir(exist_ok=True)
        return self._wrapped(command, report)

    def shown(self, run: Path, node_rank: int) -> list[str]:
        return self._wrapped(self.worker.shown(run, node_rank), self._report(run, node_rank))

    def _wrapped(self, command: list[str], report: Path) -> list[str]:
        return self.profiler.wrap(command, report, one_iteration=self.iteration is not None)

    def _report(self, run: Path, node_rank: int) -> Path:
        """Returns the report's path without the ending, which the profiler adds."""
        folder = RunDir(run).nsys if self.profiler is Profiler.nsys else RunDir(run).ncu
        node = self.nodes[node_rank]
        return folder / (node if self.iteration is None else f"{node}.iteration-{self.iteration}")


Worker = ModuleWorker | ProfiledWorker
"""What runs the ranks of a node."""


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
