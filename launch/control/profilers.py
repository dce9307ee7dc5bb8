"""Running a node's worker under NVIDIA's profilers: Nsight Systems (profile.nsys) and Nsight Compute (profile.ncu).

Options: the chapters on the command line in their guides, docs.nvidia.com/nsight-systems and /nsight-compute.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from conf.run_folder.rundir import RunDir
from conf.schema.experiment import ContainerKind, ExecutorKind, Experiment
from launch.errors import LaunchError
from launch.node.worker_command import Worker
from megatron_ext.contract.plan import Plan


class Profiler(StrEnum):
    """The name of its command, and of its key."""

    nsys = "nsys"
    ncu = "ncu"

    def wrap(self, command: list[str], report: Path, one_iteration: bool = False) -> list[str]:
        """The command under the profiler, which writes `<report>.nsys-rep` or `<report>.ncu-rep`.

        Args:
            one_iteration: whether nsys captures only what the ranks mark (`megatron_ext.timeline.trace`).
        """
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


def profiler_of(experiment: Experiment) -> Profiler | None:
    """The profiler of a run; a rule of the configuration sees to it that there is one at most."""
    profile = experiment.profile
    return Profiler.nsys if profile.nsys else Profiler.ncu if profile.ncu else None


def check(experiment: Experiment) -> None:
    """Raises LaunchError if the run is to have a profiler that this machine, where it will run, has not."""
    profiler = profiler_of(experiment)
    here = experiment.executor.kind is ExecutorKind.local and experiment.container.kind is ContainerKind.none
    if profiler is not None and here and shutil.which(profiler) is None:
        product = "Nsight Systems" if profiler is Profiler.nsys else "Nsight Compute"
        raise LaunchError(
            f"profile.{profiler}=true: '{profiler}' is not on this machine's PATH; install NVIDIA {product}, or use "
            f"profile.{profiler}=false"
        )


def profiled(worker: Worker, experiment: Experiment, plan: Plan) -> Worker:
    """The worker under the profiler that the run is to have, or as it is."""
    profiler = profiler_of(experiment)
    if profiler is None:
        return worker
    captured = plan.trace_iteration if profiler is Profiler.nsys and plan.device == "cuda" else None
    return ProfiledWorker(worker=worker, profiler=profiler, nodes=tuple(plan.node_names), iteration=captured)


@dataclass(frozen=True, kw_only=True)
class ProfiledWorker:
    """Another worker, under a profiler."""

    worker: Worker
    profiler: Profiler
    nodes: tuple[str, ...]
    """Names by node rank."""
    iteration: int | None = None
    """The only one that is captured; None: all."""

    def command(self, run: RunDir, node_rank: int, start: str) -> list[str] | None:
        command = self.worker.command(run, node_rank, start)
        if command is None:
            return None
        report = self._report(run.path, node_rank)
        report.parent.mkdir(exist_ok=True)
        return self._wrapped(command, report)

    def shown(self, run: Path, node_rank: int) -> list[str]:
        return self._wrapped(self.worker.shown(run, node_rank), self._report(run, node_rank))

    def _wrapped(self, command: list[str], report: Path) -> list[str]:
        return self.profiler.wrap(command, report, one_iteration=self.iteration is not None)

    def _report(self, run: Path, node_rank: int) -> Path:
        """Without the ending, which the profiler adds."""
        folder = RunDir(run).nsys if self.profiler is Profiler.nsys else RunDir(run).ncu
        node = self.nodes[node_rank]
        return folder / (node if self.iteration is None else f"{node}.iteration-{self.iteration}")
